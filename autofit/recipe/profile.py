"""Facts of a built-in trainer, known before its import: `NAME.yaml` beside its module. Free of torch.

Its name stands nowhere else in autofit but in that file, its module, its search space and its entry point. A test
compares the table of keys, by which a recipe tells its trainer, with TRL's own parsers.
"""

import csv
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autofit.errors import ConfigError, option

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Older:
    """Behaviour of older libraries with a recipe, by the version of TRL that changed it; read in each one's sources."""

    logits_until: Version | None = None  # the logits of all tokens were held at the loss; None: not known
    kbit_until: Version = (0, 26)  # peft's preparation made all weights that are not quantised float32
    prompts_until: Version = ()  # per_device_train_batch_size counted prompts
    two_copies_until: Version = ()  # the loss held two copies of float32 logits in place of three
    three_copies_since: Version | None = None  # the loss holds three copies of logits of 16 bits, and two before
    three_copies_until: Version = ()  # the same the other way round
    makes_float32: bool = False  # the loss makes float32 of logits of 16 bits itself
    rows: int = 1  # rows of the model for a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Keys that identify a trainer's recipes, properties of its training, and a recipe to start from."""

    name: str
    place: int = 0  # among the trainers, where they are listed; the first is the usual one
    of_trl: bool = False  # whether `trl NAME` trains its recipes, and hands them on to `accelerate launch`
    of_transformers: bool = False  # without of_trl: True if transformers' keys fsdp and deepspeed set the launch
    page: bool = False  # whether the page's list of allowed settings has those of its recipes
    keys: tuple[str, ...] = ()  # keys that it takes and another trainer lacks, which identify its recipes
    own_key: str = ""  # a key that no other trainer takes, and each of its recipes has
    columns: tuple[frozenset[str], ...] = ()  # of a dataset that is for it: any of these sets
    dataset: str = ""  # of TRL's own documentation, in its format
    start: str = ""  # the YAML of a recipe to start from, with MODEL and DATASET in it
    generates: bool = False
    reference_by: str = ""  # the key that asks for a reference model
    reference_unless: str = ""  # the key without which there is one
    takes_lm_head: bool = False  # whether its loss takes the LM head of the model
    own_launch: bool = False  # whether its tool starts the ranks and shards the model itself, without accelerate
    verl: bool = False  # whether a recipe of it can be written as verl's
    older: Older = field(default_factory=Older)


def profile(name: str) -> Profile:
    """The profile of the trainer `name`; an empty one if it has none, as those of others."""
    return profiles().get(name) or Profile(name=name)


@cache
def profiles() -> Mapping[str, Profile]:
    """{name: profile} of the built-in trainers that have one, in their order."""
    files = (file for file in resources.files("autofit.trainers").iterdir() if file.name.endswith(".yaml"))
    found = [_read(file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8")) for file in files]
    return {one.name: one for one in sorted(found, key=lambda one: one.place)}


def _read(name: str, text: str) -> Profile:
    content: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    older = {key: _version(value) for key, value in content.pop("older", {}).items()}
    columns = tuple(frozenset(each) for each in content.pop("columns", ()))
    keys = tuple(content.pop("keys", ()))
    return Profile(name=name, columns=columns, keys=keys, older=Older(**older), **content)


def _version(value: object) -> Any:
    """The numbers of a version, and any other value as it is."""
    return tuple(int(part) for part in value.split(".")) if isinstance(value, str) else value


# ------------------------------------------------------------- told by the keys of a recipe, and recipes to start from

TRAINERS: tuple[str, ...] = tuple(p.name for p in profiles().values() if p.keys)  # told by a recipe's keys
OF_TRL = tuple(p.name for p in profiles().values() if p.of_trl)  # whose YAML TRL hands on to `accelerate launch`

# Keys of TRL 1.16's YAML -> the trainers that take them. Keys that all of them take are omitted, as are most of the
# first one's own: the table only has to distinguish its recipe with a wrong key from a recipe of another trainer.
TAKEN_BY: dict[str, tuple[str, ...]] = {
    key: tuple(p.name for p in profiles().values() if key in p.keys)
    for each in profiles().values()
    for key in each.keys
}


class SeveralTrainersError(ConfigError):
    """The keys of a recipe fit several trainers."""

    def __init__(self, keys: tuple[str, ...], trainers: tuple[str, ...]) -> None:
        self.trainers = trainers
        self.what = f"{', '.join(keys)} may belong to a recipe of {' or '.join(trainers)}"
        super().__init__(f"{self.what}: choose one with {option('trainer')}")


def trainer_of(values: Mapping[str, object], asked: str | None) -> str:
    """`asked` (--trainer), or the TRL trainer that takes every key of the recipe; the usual one of several.

    A trainer with a key of its own is found by that. Of several those that the columns of the dataset are for, if it
    is a file that can be looked at.

    Raises ConfigError if `asked` cannot take the recipe, SeveralTrainersError if several other trainers can.
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
    if len(possible) > 1:
        dataset = str(values.get("dataset_name"))
        if fitting := _fitting(_columns(Path(dataset)), among=possible):
            telling, possible = telling or {f"the columns of {dataset}": ()}, fitting
    if TRAINERS[0] in possible or not possible:
        return TRAINERS[0]
    if len(possible) > 1:
        raise SeveralTrainersError(tuple(telling), tuple(possible))
    return possible[0]


def told_by_columns(values: Mapping[str, object]) -> bool:
    """True if the columns of the dataset, rather than the keys of the recipe, decide its trainer."""
    try:
        return trainer_of({k: v for k, v in values.items() if k != "dataset_name"}, None) != trainer_of(values, None)
    except SeveralTrainersError:
        return True


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


_KTO = frozenset({"completion", "label"})  # TRL's format of unpaired preference, beside an optional prompt


def trainer_of_data(dataset: str) -> str:
    """The trainer that the columns of the file `dataset` are for. Raises ConfigError if they leave it open."""
    columns = _columns(Path(dataset))
    if columns >= _KTO:
        raise ConfigError(
            f"{dataset} has the columns of KTO (completion, label), of which there is no recipe of TRL's here; a file "
            "of LLaMA-Factory or ms-swift that trains KTO is taken as it is; for SFT on completions: autofit init sft"
        )
    if fitting := _fitting(columns, among=TRAINERS):
        return fitting[0]
    found = f"{dataset} has {', '.join(sorted(columns))}" if columns else f"{dataset} is no file that can be looked at"
    raise ConfigError(f"{_NO_GUESS}: {found}; name it: autofit init {'|'.join(TRAINERS)}")


def _fitting(columns: set[str], *, among: Iterable[str]) -> list[str]:
    """The trainers that data of these `columns` is for: those that use the most of them; [] for KTO's."""
    if columns >= _KTO:
        return []
    used = {name: max((len(each) for each in profile(name).columns if each <= columns), default=0) for name in among}
    most = max(used.values(), default=0)
    return [name for name, number in used.items() if number == most > 0]


def _columns(path: Path) -> set[str]:
    """The columns of a JSONL, JSON or CSV file, or of a folder's first; empty if unreadable."""
    try:
        if os.path.isdir(path):
            path = min((one for one in path.iterdir() if one.suffix in (".jsonl", ".csv")), default=path)
        if path.suffix not in (".jsonl", ".json", ".csv") or not os.path.isfile(path):
            return set()
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(_MOST_OF_A_LINE)
            if path.suffix == ".csv":
                return set(next(csv.reader([line]), []))
            return _keys(line.strip().removeprefix("[").rstrip(","))
    except (OSError, csv.Error):
        return set()


def _keys(text: str) -> set[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return set()
    return set(_texts(found)) if isinstance(found, dict) else set()


def _texts(keys: Iterable[object]) -> Iterable[str]:
    return (key for key in keys if isinstance(key, str))


def _scalar(text: str) -> str:
    """`text` as one YAML scalar."""
    return yaml.safe_dump(text, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
