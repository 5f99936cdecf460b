"""Trainers by name, found as `module:object` or by entry point, and checks of a recipe before torch loads.

An installed trainer may have an early check: an entry point of the group `autofit.early_checks` with its name. It is a
function of (name, values, Inspection) that imports nothing heavy and raises ConfigError, in the same words, for what
`inspect` would refuse. A trainer without one is inspected at once. A function of the group `autofit.early_bytes` with
the same arguments tells {what: bytes} that a training of one process surely holds on its card, as far as that is known.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, UnknownKeyError, nearest, option, told
from autofit.frontends.draft import Explanation
from autofit.frontends.reading import refusal
from autofit.frontends.writing import explained as read
from autofit.frontends.writing import in_own_names
from autofit.plugin.protocol import Inspection, Trainer, WorstCase
from autofit.recipe.launching import NO_OPTIONS, Launched, LaunchOptions, launched
from autofit.recipe.profile import profile, trainer_of
from autofit.recipe.recipe import merge
from autofit.recipe.secrets import opened
from autofit.recipe.yaml_file import PROMPT_TOKENS, Source

GROUP = "autofit.trainers"
_ATTRIBUTES = ("name", "keys", "space")
_METHODS = ("inspect", "build", "layers", "small_trainings")


def names() -> tuple[str, ...]:
    """The installed trainers, by name."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is an installed trainer or has the form module:object; reads names only."""
    module, colon, target = name.partition(":")
    if colon and (not target or not all(part.isidentifier() for part in [*module.split("."), *target.split(".")])):
        raise ConfigError(f"{option('trainer')} takes module:object, for example my_loop:TRAINER; got {name!r}")
    if not colon and name not in (known := names()):
        raise ConfigError(
            f"{option('trainer')} must be one of {', '.join(known)}, or module:object for one of your own; got {name!r}"
            f"{nearest(name, known)}"
        )


def trainer_for(values: Mapping[str, object], asked: str | None) -> str:
    """The trainer of a recipe: `asked` where it is given, else told by the recipe's keys. Raises ConfigError."""
    if asked is not None:
        check_name(asked)
    if ":" not in (asked or "") and (other := refusal(values)) is not None:
        raise ConfigError(other)
    return trainer_of(values, asked)


def code_hash(name: str) -> str:
    """A hash of the module of a trainer named `module:object`, so that an edit begins a new study and a new proof.

    "" for an installed trainer, which has a version, and for a module that is not found. Imports nothing.
    """
    module, colon, _ = name.partition(":")
    folders: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    for number, part in enumerate(module.split(".")):
        spec = PathFinder.find_spec(part if number == 0 else ".".join(module.split(".")[: number + 1]), folders)
        if spec is None:
            return ""
        folders = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    path = Path(spec.origin) if colon and spec is not None and spec.origin else None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path is not None and path.is_file() else ""


def load(name: str) -> Trainer:
    """The trainer `name`, imported. Raises ConfigError if its import fails or it is incomplete."""
    from autofit.plugin.lean import lean_imports

    check_name(name)
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    spec = points[0].value if points else name
    module_name, _, target = spec.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with lean_imports() if module_name not in sys.modules else nullcontext():
            found: object = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"the trainer {name!r} must be importable from {Path.cwd()} or the installed packages; importing "
            f"{module_name} gave {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    for part in target.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{module_name} has no {target!r}{nearest(part, vars(found))}")
        found = getattr(found, part)
    if isinstance(found, type):
        raise ConfigError(
            f"{option('trainer')} names an object, and {spec} is a class; name an instance: TRAINER = {target}()"
        )
    lacking = [name for name in _ATTRIBUTES if not hasattr(found, name)]
    if lacking:
        raise ConfigError(
            f"the trainer {spec} must have the attributes {', '.join(_ATTRIBUTES)}; it lacks {', '.join(lacking)}"
        )
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(
            f"the trainer {spec} must have the methods {', '.join(_METHODS)}; it lacks {', '.join(missing)}"
        )
    return cast(Trainer, found)


EARLY_GROUP = "autofit.early_checks"
BYTES_GROUP = "autofit.early_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A recipe that passed all immediate checks."""

    trainer: str
    read: Launched
    inspection: Inspection

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """{part: bytes} that the training surely holds on its card; {} if all are uncertain."""
        points = entry_points(group=BYTES_GROUP, name=self.trainer) if self.read.launch.is_plain else ()
        values = opened(self.read.values)
        return next((point.load()(self.trainer, values, self.inspection) for point in points), {})


def check_source_early(
    source: Source, *, trainer: str | None, device: str, changes: Mapping[str, object],
    prompt_tokens: int | None = None, launch: LaunchOptions = NO_OPTIONS,
) -> Looked:  # fmt: skip
    """Raise ConfigError for errors in `source` and `changes` over it, as far as they are found at once."""
    values = merge(source.values, changes)
    named = trainer_for({**source.values, **changes}, trainer or source.trainer)
    read = launched(values, launch, of=profile(named), own=source.launch)
    changed = [key.partition(".")[0] for key in changes]
    inspection = _inspection(read.values, device, changed, prompt_tokens, read.launch.ranks)
    _check(source, read.values, trainer=named, inspection=inspection, changed=changed)
    return Looked(trainer=named, read=read, inspection=inspection)


def check_early(
    source: Source, values: Mapping[str, object], *, trainer: str, device: str, changed: Sequence[str],
    prompt_tokens: int | None, ranks: int,
) -> None:  # fmt: skip
    """Raise ConfigError if the early check of `trainer` refuses `values`: the recipe less its launch.

    An error in `changed` keys alone is reported as that option's.
    """
    inspection = _inspection(values, device, changed, prompt_tokens, ranks)
    _check(source, values, trainer=trainer, inspection=inspection, changed=changed)


def _check(
    source: Source, values: Mapping[str, object], *, trainer: str, inspection: Inspection, changed: Sequence[str]
) -> None:
    for point in entry_points(group=EARLY_GROUP, name=trainer):
        check = point.load()
        try:
            check(trainer, opened(values), inspection)
        except ConfigError as given:
            error = given.put(in_own_names(source.foreign, given.marked))
            try:
                check(trainer, opened({key: values[key] for key in values if key not in changed}), inspection)
            except ConfigError:
                raise error.within(source.what) from given
            raise error.within(option("set") if changed else source.what) from given


def _inspection(
    values: Mapping[str, object], device: str, changed: Sequence[str], prompt_tokens: int | None, ranks: int
) -> Inspection:
    return Inspection(
        device=device, worst_case=WorstCase(path=Path(os.devnull)), prompt_tokens=prompt_tokens,
        changed=tuple(key for key in changed if key in values), ranks=ranks,
    )  # fmt: skip


_MODEL = "model_name_or_path"


def explained(words: Sequence[str], changes: Mapping[str, object], *, ranks: int | None = None) -> Explanation:
    """Meaning of a file of another tool, or a command, with `changes` in the tool's own keys.

    `words` are the file's path, a command in one text, or its words. Raises ConfigError for text of none of the
    tools, and for a change that the tool does not take.
    """
    found, source = read(words, changes, ranks=ranks)
    if source is None:
        return found
    # in place of the model an existing path with no known facts
    values = {**source.values, _MODEL: os.devnull} if source.values.get(_MODEL) else source.values
    try:  # keys and values that the trainer does not take: not what lies on another machine
        check_source_early(
            replace(source, values=values), trainer=None, device="sim:", changes={},
            prompt_tokens=source.prompt_tokens or PROMPT_TOKENS,
        )  # fmt: skip
    except ConfigError as error:
        said = error.marked.removeprefix(f"{source.what}: ")
        if isinstance(error, UnknownKeyError) and any(key in changes for key in error.keys):
            raise ConfigError(f"{option('set')}: {said}") from error
        return replace(found, wrong=(*found.wrong, told(said, str)))
    return found
