"""The TRL trainer of a recipe, found by its keys without loading TRL; and recipes to start from. No torch here.

A test compares the table of keys with TRL's own parsers.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import yaml

from autofit.errors import ConfigError, option
from autofit.recipe.profile import profile, profiles
from autofit.recipe.recipe import TrainerName

TRAINERS: tuple[TrainerName, ...] = tuple(p.name for p in profiles().values() if p.keys)  # told by a recipe's keys
OF_TRL = tuple(p.name for p in profiles().values() if p.of_trl)  # whose YAML TRL hands on to `accelerate launch`

# Keys of TRL 1.16's YAML -> the trainers that take them. Keys that all of them take are omitted, as are most of the
# first one's own: the table only has to distinguish its recipe with a wrong key from a recipe of another trainer.
TAKEN_BY: dict[str, tuple[TrainerName, ...]] = {
    key: tuple(p.name for p in profiles().values() if key in p.keys)
    for each in profiles().values()
    for key in each.keys
}


def trainer_of(values: Mapping[str, object], asked: str | None) -> TrainerName:
    """`asked` (--trainer), or the TRL trainer that takes every key of the recipe; the usual one of several.

    A trainer with a key of its own is found by that.

    Raises ConfigError if `asked` cannot take the recipe, or if several other trainers can.
    """
    if asked is not None and asked not in TRAINERS:
        return asked
    for own in profiles().values():
        if asked is None and own.own_key and own.own_key in values:
            return own.name
    telling = {key: TAKEN_BY[key] for key in values if key in TAKEN_BY}
    possible = [t for t in TRAINERS if all(t in takers for takers in telling.values())]
    if asked is not None:
        foreign = [key for key, takers in telling.items() if asked not in takers]
        if foreign and len(possible) == 1:
            raise ConfigError(
                f"{option('trainer', asked)} does not take {', '.join(foreign)}; these are keys of `trl "
                f"{possible[0]}`: give {option('trainer', possible[0])} or omit {option('trainer')}"
            )
        return asked
    if TRAINERS[0] in possible or not possible:
        return TRAINERS[0]
    if len(possible) > 1:
        raise ConfigError(
            f"{', '.join(telling)} may belong to a recipe of {' or '.join(possible)}: choose one with "
            f"{option('trainer')}"
        )
    return possible[0]


MODEL = "Qwen/Qwen3-1.7B"
_MOST_OF_A_LINE = 2**20  # characters
_NO_GUESS = "the trainer cannot be told from the columns"


def recipe_text(trainer: str, *, model: str | None = None, dataset: str | None = None) -> str:
    """The YAML of a recipe for `trainer`."""
    text, usual = profile(trainer).start, profile(trainer).dataset
    named = {"model_name_or_path: MODEL": model or MODEL, "dataset_name: DATASET": dataset or usual}
    for line, name in named.items():
        key = line.partition(":")[0]
        text = text.replace(line, f"{key}: {_scalar(name)}", 1)
    return text


def trainer_of_data(dataset: str) -> str:
    """The trainer that the columns of the file `dataset` are for. Raises ConfigError where they do not say."""
    columns = _columns(Path(dataset))
    fitting = [(len(each), p.place, p.name) for p in profiles().values() for each in p.columns if each <= columns]
    if fitting:
        return max(fitting)[-1]  # by the most columns
    found = f"{dataset} has {', '.join(sorted(columns))}" if columns else f"{dataset} is no file that can be looked at"
    raise ConfigError(f"{_NO_GUESS}: {found}; name it: autofit init {'|'.join(TRAINERS)}")


def _columns(path: Path) -> set[str]:
    """The columns of a JSONL, JSON or CSV file; none for another file."""
    if not path.is_file() or path.suffix not in (".jsonl", ".json", ".csv"):
        return set()
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix == ".csv":
            return set(next(csv.reader(islice(file, 1)), []))
        return _keys(file.readline(_MOST_OF_A_LINE).strip().removeprefix("[").rstrip(","))


def _keys(text: str) -> set[str]:
    try:
        found = json.loads(text)
    except ValueError:
        return set()
    return set(_texts(found)) if isinstance(found, dict) else set()


def _texts(keys: Iterable[object]) -> Iterable[str]:
    return (key for key in keys if isinstance(key, str))


def _scalar(text: str) -> str:
    """`text` as one YAML scalar."""
    return yaml.safe_dump(text, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
