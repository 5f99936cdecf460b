"""From what was given to a Recipe: its trainer, in a child of the fork server, says what it means."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import is_full, read_json, write_json
from autofit.plugin.protocol import Facts
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
    facts = Facts.from_json(answer)
    return Recipe(
        trainer=trainer, trainer_name=facts.name, values=facts.values, resolved=facts.resolved, keys=facts.keys,
        tiers=facts.tiers, space=Path(facts.space), name=source.name, world_size=world_size, model=facts.model,
        command=facts.command, trains_on_data=facts.trains_on_data, compared=facts.compared,
        longest_prompt_tokens=facts.longest_prompt_tokens, longest_sample_tokens=facts.longest_sample_tokens,
        num_prompts=facts.num_prompts, model_parameters=facts.model_parameters, weights_bytes=facts.weights_bytes,
        tile_tokens=facts.tile_tokens, forecasts=facts.forecasts, content_hash=facts.content_hash,
        architecture_hash=facts.architecture_hash,
    )  # fmt: skip


def keep_worst_case(source: Path, target: Path) -> None:
    """Move what the inspection in `source` left for probes to `target`, unless an earlier run of the study did."""
    target.mkdir(parents=True, exist_ok=True)
    if worst_case_path(target).exists():  # the same study has the same one
        return
    own = {"inspect.json", "inspection.json", "inspection.log", "forecasts", worst_case_path(source).name}
    for path in [p for p in source.iterdir() if p.name not in own]:
        if (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)
    os.replace(worst_case_path(source), worst_case_path(target))  # last: its presence says that the rest is there
