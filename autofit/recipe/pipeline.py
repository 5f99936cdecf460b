"""A pipeline file: several trainings, each with its recipe, of which later ones use the models of earlier ones.

Free of torch, and only a reader: reading a file finds everything that is wrong with the file itself.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, nearest, option, printable
from autofit.recipe.recipe import merge
from autofit.recipe.yaml_file import read_yaml_mapping

_REFERENCE = re.compile(r"\$\$|\$\{([^}]*)\}")  # `$$` is a plain dollar sign


def names_in(value: object) -> Iterator[str]:
    """The names in `${...}` anywhere inside `value`: text, or lists and mappings of it."""
    if isinstance(value, str):
        yield from (match[1].strip() for match in _REFERENCE.finditer(value) if match[1] is not None)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from names_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from names_in(inner)


def replaced(value: object, values: Mapping[str, object], *, last: bool = True) -> object:
    """`value` with each `${name}` replaced by `values[name]`; a text that is one reference takes that value's type.

    Names that `values` lacks stay as they are. `$$` becomes `$` in the `last` round.
    """
    if isinstance(value, Mapping):
        return {key: replaced(inner, values, last=last) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(inner, values, last=last) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None and whole[1] is not None and whole[1].strip() in values:
        return values[whole[1].strip()]
    return _REFERENCE.sub(_text(values, last=last), value)


def _text(values: Mapping[str, object], *, last: bool) -> Callable[[re.Match[str]], str]:
    def text(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$" if last else "$$"
        name = match[1].strip()
        return str(values[name]) if name in values else match[0]

    return text


# Arguments of `autofit.search` that a pipeline, or a stage of it, may set: {name: its types}.
OPTIONS: dict[str, tuple[type, ...]] = {
    "target_vram": (str, int, float), "headroom": (str, int, float), "device": (str,), "allow": (str,),
    "space": (str, dict), "trials": (int,), "time_budget": (str, int, float), "plateau": (int,),
    "min_gain": (str, int, float), "goal": (str,), "sampler": (str,), "measured_steps": (int,),
    "deadline": (str, int, float), "parallel": (int,), "confirm": (bool,), "advice": (bool,), "seed": (int,),
    "prompt_tokens": (int,),
}  # fmt: skip
_OF_PIPELINE = ("stages", "vars", "name")
_OF_STAGE = ("trainer", "recipe", "values", "set", "search")
_EXAMPLE = """stages: {sft: {recipe: sft.yaml}, grpo: {recipe: grpo.yaml, set: {model_name_or_path: "${sft}"}}}"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training of a pipeline. Its values hold `${other}` where they need what the stage `other` trained."""

    name: str
    values: Mapping[str, object]
    trainer: str | None = None
    uses: tuple[str, ...] = ()  # the stages whose models it needs
    options: Mapping[str, object] = field(default_factory=dict)  # of its search
    searched: bool = True  # False: train the recipe as it is

    def resolved(self, models: Mapping[str, object]) -> dict[str, object]:
        """The recipe's values with `models` ({stage: path of its trained model}) in place."""
        return cast("dict[str, object]", replaced(self.values, models))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages of a pipeline file, in the order in which they are trained."""

    name: str
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        """The stage `name`. Raises ConfigError for an unknown one."""
        found = {stage.name: stage for stage in self.stages}
        if name not in found:
            raise ConfigError(
                f"{option('only')} must name a stage: {', '.join(found)}; got {name!r}{nearest(name, found)}"
            )
        return found[name]


def record_path(folder: Path, name: str) -> Path:
    """Path of a pipeline's record in the studies' `folder`."""
    return folder / "pipelines" / f"{name}.json"


def read_pipeline(given: Path | Mapping[str, object], *, changes: Mapping[str, object] | None = None) -> Pipeline:
    """The pipeline of a YAML file or a mapping. Raises one ConfigError that names everything wrong with it.

    `changes` is laid over it: {"sft.max_steps": 10} for the recipe of the stage `sft`, {"model": path} for one of its
    `vars`. Paths of recipes are relative to the file's folder; all other paths mean what they mean in a search.
    """
    from_file = isinstance(given, Path)
    content = read_yaml_mapping(given, what="pipeline") if isinstance(given, Path) else dict(given)
    name = str(content.get("name", given.stem if isinstance(given, Path) else "pipeline"))
    reader = _PipelineReader(content, given.parent if isinstance(given, Path) else Path(), changes or {})
    stages = reader.stages()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        reader.wrong.append(f"name must be letters, digits, '.', '_' or '-': studies are called after it; got {name!r}")
    if reader.wrong:
        what = f"the pipeline {given}" if from_file else "the pipeline"
        example = f"; for example {_EXAMPLE}" if reader.misshapen else ""
        raise ConfigError(f"{what}: {'; '.join(reader.wrong)}{example}")
    return Pipeline(name=name, stages=stages)


class _PipelineReader:
    """Reads one pipeline and collects its errors."""

    def __init__(self, content: Mapping[str, object], folder: Path, changes: Mapping[str, object]) -> None:
        self.wrong: list[str] = []
        self.misshapen = False  # whether an example of a file would help
        self._content, self._folder = content, folder
        self._stages = self._mapping(content.get("stages"), "stages", needed=True)
        self._vars = self._mapping(content.get("vars"), "vars")
        self._changes = self._sorted(changes)

    def stages(self) -> tuple[Stage, ...]:
        """The stages, each after those that it uses."""
        self._check_keys(self._content, (*_OF_PIPELINE, *OPTIONS), "the file")
        if not self._stages:
            return ()
        self._check_names()
        common = self._options(self._content, "the file")
        found = {name: self._stage(name, given, common) for name, given in self._stages.items()}
        return tuple(found[name] for name in self._order(found))

    def _mapping(self, value: object, what: str, *, needed: bool = False) -> dict[str, object]:
        if value is None and not needed:
            return {}
        if not isinstance(value, Mapping) or (needed and not value):
            self.misshapen = True
            self.wrong.append(f"{what} must be a mapping ({what}: {{name: ...}}); got {printable(repr(value), 80)}")
            return {}
        return {str(key): inner for key, inner in value.items()}

    def _sorted(self, changes: Mapping[str, object]) -> dict[str, dict[str, object]]:
        """{stage: {key of its recipe: value}} of the changes; those of vars are laid over the vars."""
        found: dict[str, dict[str, object]] = {}
        for key, value in changes.items():
            stage, dot, inner = key.partition(".")
            if dot and stage in self._stages:
                found.setdefault(stage, {})[inner] = value
            elif key in self._vars:
                self._vars[key] = value
            else:
                known = [*self._vars, *(f"{name}.KEY" for name in self._stages)]
                self.wrong.append(f"{option('set')} takes {', '.join(known)}; got {key!r}{nearest(key, known)}")
        return found

    def _check_keys(self, given: Mapping[str, object], known: Sequence[str], where: str) -> None:
        for key in given:
            if key not in known:
                self.misshapen = True
                hint = nearest(str(key), known) or f"; it takes {', '.join(known)}"
                self.wrong.append(f"{where} has no key {key!r}{hint}")

    def _check_names(self) -> None:
        for name in (*self._stages, *self._vars):
            if not _NAME.fullmatch(name):
                self.wrong.append(
                    f"the name of a stage or variable is a letter, then also digits, '_', '-'; got {name!r}"
                )
        for name in self._stages.keys() & self._vars.keys():
            self.wrong.append(f"{name} is the name of a stage and of a variable; rename one")

    def _options(self, given: Mapping[str, object], where: str) -> dict[str, object]:
        """The options of a search in `given`; those of a wrong type are noted."""
        found = {key: replaced(given[key], self._vars) for key in OPTIONS if given.get(key) is not None}
        for key, value in found.items():
            kinds = OPTIONS[key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join({str: "text", dict: "a mapping", bool: "true or false"}.get(k, "a number")
                                    for k in kinds)  # fmt: skip
                self.wrong.append(f"{where}: {key} must be {names}; got {value!r}")
        if isinstance(space := found.get("space"), str) and os.path.isfile(self._folder / space):
            found["space"] = str(self._folder / space)
        return found

    def _stage(self, name: str, given: object, common: Mapping[str, object]) -> Stage:
        where = f"stage {name}"
        content = self._mapping(given, where)
        self._check_keys(content, (*_OF_STAGE, *(key for key in OPTIONS if key != "device")), where)
        values = merge(self._recipe(content, where), self._mapping(content.get("set"), f"{where}: set"))
        values = merge(values, self._changes.get(name, {}))
        values = cast("dict[str, object]", replaced(values, self._vars, last=False))
        uses = tuple(dict.fromkeys(names_in(values)))
        known = [*self._stages, *self._vars]
        for other in uses:
            if other not in self._stages:
                self.wrong.append(f"{where} uses ${{{other}}}, which is no stage and no variable{nearest(other, known)}"
                                  f"; there are: {', '.join(known)}")  # fmt: skip
        trainer, searched = content.get("trainer"), content.get("search", True)
        if trainer is not None and not isinstance(trainer, str):
            self.wrong.append(f"{where}: trainer must be text, such as sft or my_loop:TRAINER; got {trainer!r}")
        if not isinstance(searched, bool):
            self.wrong.append(f"{where}: search must be true or false; got {searched!r}")
        return Stage(
            name=name, values=self._with_reward_model(values, where), trainer=None if trainer is None else str(trainer),
            uses=tuple(other for other in uses if other in self._stages), searched=searched is not False,
            options={**common, **self._options(content, where)},
        )  # fmt: skip

    def _recipe(self, content: Mapping[str, object], where: str) -> dict[str, object]:
        """The values of the stage's recipe: a file's, or those that stand in the pipeline."""
        given = [key for key in ("recipe", "values") if content.get(key) is not None]
        if len(given) != 1:
            self.wrong.append(f"{where} needs either recipe (the path of a YAML file) or values (its keys); it has "
                              f"{' and '.join(given) or 'neither'}")  # fmt: skip
            return {}
        if given == ["values"]:
            return self._mapping(content["values"], f"{where}: values")
        path = replaced(content["recipe"], self._vars)
        if not isinstance(path, str):
            self.wrong.append(f"{where}: recipe must be the path of a YAML file; got {path!r}")
            return {}
        try:
            return read_yaml_mapping(self._folder / path, what="recipe")
        except ConfigError as error:
            self.wrong.append(f"{where}: {error.marked}")
            return {}

    def _with_reward_model(self, values: dict[str, object], where: str) -> dict[str, object]:
        """`values` with a stage's model in `reward_funcs` where TRL takes one: in reward_model_name_or_path.

        TRL puts that model first, so its weight goes first too.
        """
        rewards, weights = values.get("reward_funcs"), values.get("reward_weights")
        if not isinstance(rewards, list):
            return values
        models = [i for i, reward in enumerate(rewards) if reward in [f"${{{name}}}" for name in self._stages]]
        if not models:
            return values
        if len(models) > 1 or values.get("reward_model_name_or_path") is not None:
            self.wrong.append(f"{where}: TRL takes one reward model; give the others to a reward function of yours "
                              f"(env: {{SECOND: {rewards[models[-1]]}}}) or use a trainer of your own")  # fmt: skip
            return values
        first = models[0]
        order = [first, *(i for i in range(len(rewards)) if i != first)]
        moved = {**values, "reward_model_name_or_path": rewards[first], "reward_funcs": [rewards[i] for i in order[1:]]}
        if isinstance(weights, list) and len(weights) == len(rewards):
            moved["reward_weights"] = [weights[i] for i in order]
        return {key: value for key, value in moved.items() if key != "reward_funcs" or value}

    def _order(self, stages: Mapping[str, Stage]) -> list[str]:
        """The names of the stages: as in the file, but each after those that it uses."""
        sorter = TopologicalSorter({name: stage.uses for name, stage in stages.items()})
        try:
            sorter.prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(cast("list[str]", error.args[1])))
            self.wrong.append(f"stages must not use each other in a circle: {circle}")
            return list(stages)
        places, order = list(stages), []
        ready: list[str] = []
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=places.index)
            order.append(ready.pop(0))
            sorter.done(order[-1])
        return order
