"""Stages of a pipeline before anything trains: what is wrong with each, and which are done, changed or to run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from autofit.api.events import Event, OnEvent, silent
from autofit.api.planning import Request, make_plan
from autofit.api.reading import drop, fork_server
from autofit.api.searching import search
from autofit.errors import ConfigError, Option, option
from autofit.hardware.hardware import training_device
from autofit.plugin.registry import trainer_for
from autofit.probing.fork_server import ForkServer
from autofit.promotion.run_folder import RunFolder
from autofit.promotion.stages import Inputs, KnownStage, State, base_of, inputs_of
from autofit.recipe.pipeline import Pipeline, Stage

# The arguments of a search that a pipeline may set, with what they are where it does not.
_DEFAULTS: dict[str, Any] = {
    name: argument.default for name, argument in signature(search).parameters.items()
    if name in Request.__slots__ and name not in ("recipe", "name", "trainer", "folder", "executor")
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The stages of a pipeline, what they depend on, and what is kept of them."""

    pipeline: Pipeline
    state: State
    given: Mapping[str, object]  # arguments of a search that win over the file's
    search: bool
    trainers: Mapping[str, str]

    @classmethod
    def of(cls, pipeline: Pipeline, folder: Path, given: Mapping[str, object], *, search: bool) -> "Knowledge":
        """Raises ConfigError for a stage whose trainer is not told by its keys."""
        trainers = {stage.name: _trainer(stage) for stage in pipeline.stages}
        state = State.read(folder, pipeline.name)
        return cls(pipeline=pipeline, state=state, given=given, search=search, trainers=trainers)

    def known(self, stage: Stage) -> KnownStage | None:
        """The study and trial of `stage`; None before its search has ended."""
        return self.state.stages.get(stage.name)

    def inputs(self, stage: Stage) -> Inputs:
        """What the training of `stage` depends on, now."""
        runs = {name: self.state.run(name) for name in stage.uses}
        numbers = {name: "" if found is None else found.number for name, found in runs.items()}
        return inputs_of(stage, self.trainers[stage.name], numbers)

    def changes(self, stage: Stage) -> list[str]:
        """What the training of `stage` depends on and has changed since its study and trial were decided, in words."""
        known = self.known(stage)
        return [] if known is None else self.inputs(stage).changed_from(known.inputs)

    def unfinished(self, stage: Stage) -> list[str]:
        """The stages that `stage` uses and that are not done."""
        return [name for name in stage.uses if not self.is_done(self.pipeline.stage(name))]

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage and all that it uses are trained, and are as they were then."""
        return not self.unfinished(stage) and self.state.run(stage.name) is not None and not self.changes(stage)

    def goes_on(self, stage: Stage) -> bool:
        """Whether `stage` has its study and trial, and they still hold: only its training is left."""
        return self.known(stage) is not None and not self.unfinished(stage) and not self.changes(stage)

    def is_gone(self, stage: Stage) -> bool:
        """Whether the stage was trained, and its model is no longer there."""
        known = self.known(stage)
        finished = known is not None and RunFolder(self.state.home(stage.name)).is_done
        return finished and self.state.run(stage.name) is None

    def is_searched(self, stage: Stage) -> bool:
        return self.search and stage.searched

    def next(self, stage: Stage, *, restart: bool = False) -> str:
        """What a run does with `stage`, in words."""
        if self.is_done(stage) and not restart:
            return "done, kept as it is"
        known, waits = self.known(stage), self.unfinished(stage)
        after = f", after {' and '.join(waits)}" if waits else ""
        how = "search, then train" if self.is_searched(stage) else "probe it as it is, then train"
        if known is None:
            return f"{how}{after}"
        if waits:
            return f"{how} again{after}"
        if changed := self.changes(stage):
            return f"{how} again, as {', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''}"
        anew = restart or known.restart or self.is_gone(stage)
        how = "train again from step 0" if anew else "go on with its training"
        return f"{how}: trial {known.trial} of {known.study}"

    def request(self, stage: Stage, recipe: Mapping[str, object]) -> Request:
        """What the search of `stage` is asked."""
        options = self.options(stage)
        return Request(
            **{key: options.get(key, value) for key, value in _DEFAULTS.items()}, recipe=recipe,
            name=self.study_name(stage), trainer=self.trainers[stage.name], folder=self.state.folder,
        )  # fmt: skip

    def options(self, stage: Stage) -> dict[str, Any]:
        """The arguments of the search of `stage`. Raises ConfigError where there is no device to train on."""
        found: dict[str, Any] = {**stage.options, **self.given}
        if "gpu" in self.given:  # a plan for a card elsewhere
            found["device"] = "sim"
        else:
            found["device"] = training_device(str(found.get("device", "auto")))
            found.pop("prompt_tokens", None)  # of made-up samples: a training has its dataset
        if not self.is_searched(stage):
            found |= {"trials": 1, "confirm": False, "advice": False}
        return found

    def study_name(self, stage: Stage) -> str:
        """The first part of the name of the stage's study."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.pipeline.name}-{stage.name}")


def _trainer(stage: Stage) -> str:
    try:
        return trainer_for(stage.values, stage.trainer)
    except ConfigError as error:
        raise ConfigError(f"stage {stage.name}: {error.marked}") from error


def check_stages(about: Knowledge, *, only: str | None, tell: OnEvent) -> None:
    """Raise one ConfigError for everything wrong with the stages that are still to be searched."""
    if only is not None:
        _check_earlier(about, about.pipeline.stage(only))
    asked = [stage for stage in about.pipeline.stages if only in (None, stage.name)]
    if to_look_at := [stage for stage in asked if not about.is_done(stage) and not about.goes_on(stage)]:
        _Check(about, tell).look_at(to_look_at)


def _check_earlier(about: Knowledge, stage: Stage) -> None:
    waiting = about.unfinished(stage)
    if waiting:
        raise ConfigError(
            f"the stage {stage.name} uses what {' and '.join(waiting)} trained, and {waiting[0]} is not done "
            f"({about.next(about.pipeline.stage(waiting[0]))}); run it first, or leave {option('only')} out"
        )


def _in_stage(named: Option) -> str:
    """An option of a search in an error of a stage: the command of a pipeline has no --prompt-tokens."""
    return f"prompt_tokens: {named.value} in the stage" if named.name == "prompt-tokens" else option(*named)


class _Check:
    """Looks at one stage after the other; the base model of an earlier one stands in for what it will train."""

    def __init__(self, about: Knowledge, tell: OnEvent) -> None:
        self._about, self._tell = about, tell
        self._models: dict[str, object] = {}
        self._wrong: dict[str, list[str]] = {}  # {what is wrong: the stages}

    def look_at(self, stages: list[Stage]) -> None:
        """Raise one ConfigError for all that is wrong with `stages`."""
        server = fork_server(self._about.state.folder)
        try:
            for stage in self._about.pipeline.stages:
                if set(stage.uses) <= self._models.keys():
                    self._models[stage.name] = self._model_of(stage, server, looked_at=stage in stages)
        finally:
            server.close()
        if self._wrong:
            raise ConfigError("; ".join(f"stage {', '.join(names)}: {text}" for text, names in self._wrong.items()))

    def _model_of(self, stage: Stage, server: ForkServer, *, looked_at: bool) -> object:
        """A model like the one that `stage` trains: the trained one, or the one that it begins with."""
        if not looked_at and (finished := self._about.state.run(stage.name)) is not None:
            return str(base_of(Path(finished.model)))
        values = stage.resolved(self._models)
        return (self._read(stage, values, server) if looked_at else None) or values.get("model_name_or_path")

    def _read(self, stage: Stage, values: dict[str, object], server: ForkServer) -> str | None:
        """The model of the recipe `values`, read as a search reads it; None where something is wrong with it."""
        request = self._about.request(stage, values)
        try:
            request.check()
            planned = make_plan(request, server, silent)
        except ConfigError as error:
            self._wrong.setdefault(error.told(_in_stage), []).append(stage.name)
            return None
        drop(planned.scratch)
        recipe = planned.plan.recipe
        if not recipe.trains_on_data:
            self._wrong.setdefault("the recipe has no dataset to train on", []).append(stage.name)
        text = f"{recipe.trainer}, {recipe.model}, effective batch {recipe.effective_batch_size}"
        self._tell(Event(label=stage.name, text=f"{text}; {self._about.next(stage)}"))
        return recipe.model
