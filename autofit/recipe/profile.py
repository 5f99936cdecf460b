"""What is known of a built-in trainer before it is imported: `NAME.yaml` beside its module. No torch here.

Its name stands nowhere else in autofit but in that file, its module, its search space and its entry point.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Older:
    """What older libraries did with a recipe, by the version of TRL that changed it; read in the sources of each."""

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
    """What a trainer's recipes are told by, what their training is like, and a recipe to start from."""

    name: str
    place: int = 0  # among the trainers, where they are listed; the first is the usual one
    of_trl: bool = False  # whether `trl NAME` trains its recipes, and hands them on to `accelerate launch`
    of_transformers: bool = False  # without of_trl: whether transformers' keys fsdp and deepspeed say the launch
    page: bool = False  # whether the page's list of allowed settings has those of its recipes
    keys: tuple[str, ...] = ()  # keys that it takes and another trainer does not: its recipes are told by them
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
    """The profile of the trainer `name`; an empty one where it has none, as those of others."""
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
