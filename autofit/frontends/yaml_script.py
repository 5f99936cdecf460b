"""Scripts that start LLaMA-Factory or Axolotl: with a YAML, with values laid over it, or with arguments alone.

LLaMA-Factory (hparams/parser.py, read_args, and launcher.py at ff6d4d12) takes a YAML and `key=value` after it, or
`--key value`; Axolotl (cli/main.py at 067b021c) a YAML and `--key value` after it. No torch here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.frontends.command import (
    UNSURE,
    Command,
    accelerate_config,
    arguments,
    certain,
    check_certain,
    commands,
    started_ranks,
    told_ranks,
)
from autofit.frontends.sharing import near, of_accelerate
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, Tool
from autofit.recipe.yaml_file import parse_yaml, read_yaml_mapping

_YAML = (".yaml", ".yml", ".json")
_PROGRAMS = {"llamafactory-cli": LLAMA_FACTORY, "lmf": LLAMA_FACTORY, "axolotl": AXOLOTL}  # each with `train`
_SCRIPT = re.compile(r"(?:.*/)?(?:(train_bash\.py|src/train\.py|llamafactory/launcher\.py)|(axolotl/cli/train\.py))")
_MODULE = re.compile(r"(llamafactory\.(?:launcher|cli))|(axolotl\.cli\.train)")
# Of `axolotl train` (cli/args.py, cli/main.py): how it is started, and nothing of the training.
_NAMES = """
launcher num_processes num_machines main_process_port main_process_ip sweep cloud debug debug_text_only
debug_num_examples prompter shard mixed_precision machine_rank accelerate_config use_ray ray_num_workers
"""
_OF_LAUNCH = frozenset(_NAMES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training that a script starts: the tool, its keys and values, and the ranks where the script says them.

    `config` is the YAML that it names, and `laid_over` has the values that the script says besides.
    """

    tool: Tool
    values: Mapping[str, object]
    ranks: int | None
    config: Path | None = None
    laid_over: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def training(text: str, *, folder: Path) -> Training:
    """The first training that a script in `folder` starts. Raises ConfigError."""
    found = list(started(text))
    command, tool, place = found[0]
    words = command.words[place + 1 :]
    config = near(certain("the config", words[0]), folder) if words and words[0].endswith(_YAML) else None
    if config is None and tool is AXOLOTL:
        raise ConfigError("`axolotl train` names no YAML in it")
    rest = words if config is None else words[1:]
    own = _overrides(rest) if config is not None and tool is LLAMA_FACTORY else _arguments(rest, folder, tool)
    shared = accelerate_config(command.words[:place], folder)
    given = {} if config is None else read_yaml_mapping(config, what=f"config of {tool.name}")
    check_certain([key for key, value in own.items() if UNSURE in str(value) and key != "output_dir"])
    over = of_accelerate(shared) if tool is LLAMA_FACTORY and not {"deepspeed", "fsdp"} & {*given, *own} else {}
    over |= {key: value for key, value in own.items() if key not in _OF_LAUNCH}
    notes = (f"the script starts {len(found)} trainings; the first is read",) if len(found) > 1 else ()
    # `axolotl train` starts a launcher itself, with options among its own
    before = command.words if tool is AXOLOTL and place == 1 else command.words[:place]
    told = told_ranks(before, shared, command.variables if tool is LLAMA_FACTORY and place == 1 else {})
    ranks = started_ranks(command.words, told, command.variables)
    return Training(tool=tool, values={**given, **over}, ranks=ranks, config=config, laid_over=over, notes=notes)


def started(text: str) -> Iterator[tuple[Command, Tool, int]]:
    """(a command that trains, the tool, the place of the last word before its arguments)."""
    for command in commands(text):
        words = command.words
        if len(words) > 1 and words[1] == "train" and (tool := _PROGRAMS.get(words[0].rpartition("/")[2])):
            yield command, tool, 1
            continue
        for place, word in enumerate(words):
            match = _SCRIPT.fullmatch(word) or _MODULE.fullmatch(word)
            if match is not None:
                after = place + (words[place + 1 : place + 2] == ("train",))
                yield command, LLAMA_FACTORY if match[1] else AXOLOTL, after
                break


def _overrides(words: Sequence[str]) -> dict[str, object]:
    """{key: value} of `key=value`, as OmegaConf reads them; a key may be a.b."""
    found: dict[str, object] = {}
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or key.startswith("-"):
            raise ConfigError(f"after its YAML LLaMA-Factory takes key=value; got {quoted(word)}")
        found[key] = UNSURE if UNSURE in value else parse_yaml(value)
    return found


def _arguments(words: Sequence[str], folder: Path, tool: Tool) -> dict[str, object]:
    """The values of `--key value`, up to a `--`, after which a launcher's own follow."""
    return arguments(words[: words.index("--") if "--" in words else None], folder, tool=tool.name)
