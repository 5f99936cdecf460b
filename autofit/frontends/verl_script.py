"""The overrides of a shell script that starts verl: `data.train_batch_size=${BATCH:-1024}`. Nothing is run.

What the script sets outside of conditions and loops is certain. A value that hangs on a condition, on the environment
or on a command is not, and its key is named instead.
"""

import re
from collections.abc import Iterator

from autofit.errors import ConfigError
from autofit.frontends.command import UNSURE, Command, commands
from autofit.frontends.verl import ENGINE
from autofit.recipe.yaml_file import parse_yaml

_ENTRY = "verl.trainer.main_ppo"
_OVERRIDE = re.compile(r"(?:\+{0,2}(model_engine|[a-z_]+(?:\.[a-z0-9_]+)+)|--(config-name))=(.*)", re.DOTALL)


def starts_verl(text: str) -> bool:
    return _ENTRY in text and next(_trainings(text), None) is not None


def overrides(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """({dotted key: value} of the overrides that are certain, the keys of those that are not)."""
    found: dict[str, object] = {}
    unread: dict[str, None] = {}
    for command in _trainings(text):
        said = _overrides(command)
        for key, value in said.items():
            if value is None or command.conditional or found.get(key, value) != value:
                unread[key] = None
            else:
                found[key] = value
    return {key: value for key, value in found.items() if key not in unread}, tuple(unread)


def likely_overrides(text: str) -> dict[str, object]:
    """The values of overrides that are not certain, as they would be if conditions that set a variable held.

    The first value stands where several conditions set one, None where it comes from a command. A training that itself
    hangs on a condition is left out, unless all do: then the first is taken.
    """
    perhaps: dict[str, object] = {}
    trainings = list(_trainings(text, likely=True))
    for command in [each for each in trainings if not each.conditional] or trainings[:1]:
        for key, value in _overrides(command).items():
            perhaps.setdefault(key, value)
    return {key: perhaps[key] for key in overrides(text)[1] if key in perhaps}


def span(text: str) -> tuple[int, int]:
    """(start, end) of the text of the first training that a script starts. Raises ConfigError where it starts none."""
    for command in _trainings(text):
        return command.start, command.end
    raise ConfigError(f"no `python -m {_ENTRY}` is started in it, so it does not train")


def _trainings(text: str, *, likely: bool = False) -> Iterator[Command]:
    """The commands of a script that start verl."""
    return (command for command in commands(text, likely=likely) if _ENTRY in command.words)


def _overrides(command: Command) -> dict[str, object]:
    """{key: value} of a command, the last one where a key is given twice; None for what is not certain, and null."""
    said: dict[str, object] = {}
    words = iter(command.words)
    for word in words:
        word = f"{word}={next(words, '')}" if word == "--config-name" else word
        word = re.sub(r"^\+{0,2}\w+@actor_rollout_ref\.actor=", f"{ENGINE}=", word)  # the whole group is another one
        if found := _OVERRIDE.fullmatch(word):
            said[found[1] or found[2]] = None if UNSURE in found[3] else _parsed(found[3])
    return said


def _parsed(value: str) -> object:
    """The value as YAML has it; hydra's null is None here as well, and counts as not certain."""
    try:
        return parse_yaml(value)
    except ConfigError:
        return value
