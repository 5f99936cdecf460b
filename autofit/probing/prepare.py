"""From what was given to a Recipe: TRL's parser, the dataset and the model's config, asked of the fork server."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import is_full, read_json, write_json
from autofit.probing.fork_server import ForkServer
from autofit.recipe.recipe import Recipe, TrainerName, merge
from autofit.recipe.source import Source, read_source

_INSPECTION_S = 900.0  # tokenizing a large dataset takes minutes


def worst_case_path(folder: Path) -> Path:
    """Where the row with the longest prompt is kept."""
    return folder / "worst_case.json"


def prepare(
    given: Path | Source, *, trainer: TrainerName, device: str, folder: Path, server: ForkServer, world_size: int = 1,
    changes: Mapping[str, object] | None = None, prompt_tokens: int | None = None,
) -> Recipe:  # fmt: skip
    """The recipe that was `given` with `changes` over it; leaves the worst-case row in `folder`.

    On a simulated card `prompt_tokens` stands for the dataset: a made-up prompt of so many tokens is the worst case.
    Raises ConfigError for what TRL would not take.
    """
    source = given if isinstance(given, Source) else read_source(given)
    values = merge(source.values, changes or {})
    answer_path = folder / "inspection.json"
    answer_path.unlink(missing_ok=True)
    request = {
        "trainer": trainer, "values": values, "device": device, "prompt_tokens": prompt_tokens,
        "worst_case": str(worst_case_path(folder)), "answer": str(answer_path),
    }  # fmt: skip
    write_json(folder / "inspect.json", request)
    log = folder / "inspection.log"
    ending = server.call(
        {
            "entry": "autofit.probing.inspection:run",
            "argument": str(folder / "inspect.json"),
            "cwd": str(Path.cwd()),
            "log": str(log),
            "env": {},
            "deadline_s": _INSPECTION_S,
        }
    )
    answer = read_json(answer_path)
    if answer is None and is_full(folder):
        raise EnvironmentFault(f"no space left to write {answer_path}; free some or choose another folder with --dir")
    if answer is None:
        raise EnvironmentFault(f"reading {source.what} ended with exit code {ending.exit_code}; see {log}")
    if "error" in answer:
        raise ConfigError(f"{source.what}: {answer['error']}")
    return Recipe(
        trainer=trainer,
        values=cast(Mapping[str, object], answer["values"]),
        resolved=cast(Mapping[str, object], answer["resolved"]),
        name=source.name,
        world_size=world_size,
        longest_prompt_tokens=cast(int | None, answer.get("longest_prompt_tokens")),
        longest_sample_tokens=cast(int | None, answer.get("longest_sample_tokens")),
        num_prompts=cast(int | None, answer.get("num_prompts")),
        model_parameters=cast(int | None, answer.get("model_parameters")),
        weights_bytes=cast(int | None, answer.get("weights_bytes")),
        balances_experts=bool(answer.get("balances_experts")),
        counts_padding=bool(answer.get("counts_padding")),
        content_hash=str(answer.get("content_hash", "")),
    )
