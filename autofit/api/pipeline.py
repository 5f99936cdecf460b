"""`autofit.run`: the stages of a pipeline, each tuned on its own, then trained, for those behind it to use."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from autofit.api.arguments import FOLDER, executor_asked, named_as_arguments, own_folder, studies_folder
from autofit.api.events import Event, OnEvent, Progress, silent
from autofit.api.planning import Request, make_plan
from autofit.api.promoting import PromotionResult, Step, promote
from autofit.api.reading import drop, fork_server
from autofit.api.searching import search
from autofit.api.searching import search as search_for_the_fastest
from autofit.api.tables import Shown
from autofit.cluster.scheduler import Executor
from autofit.errors import ConfigError, Option, option
from autofit.folding import Folding
from autofit.hardware.hardware import training_device
from autofit.plugin.registry import trainer_for
from autofit.probing.fork_server import ForkServer
from autofit.promotion.promotion import model_path
from autofit.promotion.run_folder import RunFolder
from autofit.promotion.stages import Inputs, KnownStage, State, base_of, inputs_of, is_adapter, whole_model
from autofit.recipe.pipeline import Pipeline, Stage, read_pipeline
from autofit.tuning.locks import exclusive
from autofit.tuning.storage import use_storage

# The arguments of a search that a pipeline may set, with their defaults.
_DEFAULTS: dict[str, Any] = {
    name: argument.default for name, argument in signature(search).parameters.items()
    if name in Request.__slots__ and name not in ("recipe", "name", "trainer", "folder", "executor")
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The stages of a pipeline, their inputs, and the kept facts of each."""

    pipeline: Pipeline
    state: State
    given: Mapping[str, object]  # arguments of a search that win over the file's
    search: bool
    trainers: Mapping[str, str]

    @classmethod
    def of(cls, pipeline: Pipeline, folder: Path, given: Mapping[str, object], *, search: bool) -> "Knowledge":
        """The knowledge of one pipeline. Raises ConfigError if the keys of a stage leave its trainer open."""
        trainers = {stage.name: _trainer(stage) for stage in pipeline.stages}
        state = State.read(folder, pipeline.name)
        return cls(pipeline=pipeline, state=state, given=given, search=search, trainers=trainers)

    def known(self, stage: Stage) -> KnownStage | None:
        """The study and trial of `stage`, once its search has ended."""
        return self.state.stages.get(stage.name)

    def inputs(self, stage: Stage) -> Inputs:
        """The present inputs on which the training of `stage` depends."""
        runs = {name: self.state.run(name) for name in stage.uses}
        numbers = {name: "" if found is None else found.number for name, found in runs.items()}
        return inputs_of(stage, self.trainers[stage.name], numbers)

    def changes(self, stage: Stage) -> list[str]:
        """Inputs of the training of `stage` that changed since its study and trial were decided, in words."""
        known = self.known(stage)
        return [] if known is None else self.inputs(stage).changed_from(known.inputs)

    def unfinished(self, stage: Stage) -> list[str]:
        """The stages that `stage` uses and that are still to be done."""
        return [name for name in stage.uses if not self.is_done(self.pipeline.stage(name))]

    def is_done(self, stage: Stage) -> bool:
        """True if the stage and all that it uses are trained, and are as they were then."""
        return not self.unfinished(stage) and self.state.run(stage.name) is not None and not self.changes(stage)

    def goes_on(self, stage: Stage) -> bool:
        """True if `stage` has its study and trial, and they still hold: only its training is left."""
        return self.known(stage) is not None and not self.unfinished(stage) and not self.changes(stage)

    def is_gone(self, stage: Stage) -> bool:
        """True if the stage was trained, but its model is gone."""
        known = self.known(stage)
        finished = known is not None and RunFolder(self.state.home(stage.name)).is_done
        return finished and self.state.run(stage.name) is None

    def is_searched(self, stage: Stage) -> bool:
        return self.search and stage.searched

    def next(self, stage: Stage, *, restart: bool = False) -> str:
        """Plan of a run for `stage`, in words."""
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
        """The arguments of the search of `stage`, as a request."""
        options = self.options(stage)
        return Request(
            **{key: options.get(key, value) for key, value in _DEFAULTS.items()}, recipe=recipe,
            name=self.study_name(stage), trainer=self.trainers[stage.name], folder=self.state.folder,
        )  # fmt: skip

    def options(self, stage: Stage) -> dict[str, Any]:
        """The arguments of the search of `stage`. Raises ConfigError if there is no device to train on."""
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
        stage = about.pipeline.stage(only)
        if waiting := about.unfinished(stage):
            raise ConfigError(
                f"the stage {stage.name} uses what {' and '.join(waiting)} trained, and {waiting[0]} is not done "
                f"({about.next(about.pipeline.stage(waiting[0]))}); run it first, or leave {option('only')} out"
            )
    asked = [stage for stage in about.pipeline.stages if only in (None, stage.name)]
    if to_look_at := [stage for stage in asked if not about.is_done(stage) and not about.goes_on(stage)]:
        _Check(about, tell).look_at(to_look_at)


def _in_stage(named: Option) -> str:
    """Name of a search's option in an error of a stage, as a pipeline has it: its command lacks --prompt-tokens."""
    return f"prompt_tokens: {named.value} in the stage" if named.name == "prompt-tokens" else option(*named)


class _Check:
    """Checks one stage after the other; the base model of an earlier one stands in for its trained model."""

    def __init__(self, about: Knowledge, tell: OnEvent) -> None:
        self._about, self._tell = about, tell
        self._models: dict[str, object] = {}
        self._wrong: dict[str, list[str]] = {}  # {error: the stages}

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
        """The model of the recipe `values`, read as a search reads it; None if there is an error, which is noted."""
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


Status = Literal["done", "kept", "interrupted", "nothing fits", "not reached", "left alone", "planned"]
_GOOD = ("done", "kept", "left alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Outcome of one stage. `kept`: it was done before, and all its inputs are the same."""

    name: str
    trainer: str
    status: Status
    what: str  # outcome, or plan of a run
    study: str | None = None
    trial: int | None = None
    final: Mapping[str, object] | None = None  # of its training: steps, losses, rewards, output_dir

    @property
    def model_path(self) -> str | None:
        """Path of its trained model (or adapter), once it is done."""
        return None if self.final is None else model_path(self.final)

    def to_dict(self) -> dict[str, object]:
        """Plain values only."""
        return {
            "stage": self.name, "trainer": self.trainer, "status": self.status, "what": self.what, "study": self.study,
            "trial": self.trial, "model": self.model_path, "final": None if self.final is None else dict(self.final),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PipelineResult(Shown):
    """The stages of a pipeline, in the order of their training. `str` of it is a table."""

    name: str
    stages: tuple[StageResult, ...]

    @property
    def status(self) -> Status:
        """done, planned, interrupted or nothing fits: of the first stage that is still to be done."""
        return next((stage.status for stage in self.stages if stage.status not in _GOOD), "done")

    @property
    def model_path(self) -> str | None:
        """Path of the last stage's trained model, if every stage is done."""
        return self.stages[-1].model_path if self.status == "done" else None

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit run --json` prints: plain values only."""
        return {"pipeline": self.name, "status": self.status, "stages": [stage.to_dict() for stage in self.stages]}

    def parts(self) -> list[Table | str]:
        """A row a stage: what happened to it, and where its model is."""
        table = Folding(title=f"pipeline {self.name}")
        for column in ("stage", "trainer", "status", "what", "model"):
            table.add_column(column, overflow="fold")
        for stage in self.stages:
            table.add_row(stage.name, stage.trainer, stage.status, stage.what, stage.model_path or "-")
        return [table]


def run(
    pipeline: str | os.PathLike[str] | Mapping[str, object], *,
    target_vram: str | float | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    gpu: str | None = None,
    trials: int | None = None,
    changes: Mapping[str, object] | None = None,
    only: str | None = None,
    restart: bool = False,
    search: bool = True,
    plan: bool = False,
    folder: str | Path = FOLDER,
    storage: str | None = None,
    mlflow: bool = True,
    executor: str | Mapping[str, object] | Executor | None = None,
    on_event: OnEvent | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PipelineResult:  # fmt: skip
    """Tune and train every stage of `pipeline` (a YAML file, or a mapping like it), one after the other.

    A stage has a `recipe` (a file) or `values`, and `set` over them; `${other}` in them is the model that the stage
    `other` trained, as a folder that transformers loads: an adapter is merged into its base model for it, on the CPU.
    Every other argument of `autofit.search` may stand in the file, or in a stage; `target_vram`, `device` and `trials`
    given here win. `changes` is {"stage.key": value} for a recipe's key and {"name": value} for one of the file's vars.

    Each stage is searched (`search=False`: only probed as it is), and its winner is trained as `autofit.promote` does.
    Called again, the pipeline goes on where it was: stages that are done are kept, a started training resumes from its
    last checkpoint. A stage whose recipe, data, code or earlier stages changed is trained again. `only` trains that one
    stage; `restart` trains again from step 0, all stages or the one of `only`. `plan` only predicts it,
    on this machine or on a simulated card, `gpu`.

    Everything that can be wrong with a stage is looked for before anything trains: each recipe is read with its data,
    with the base model of an earlier stage in place of what that stage will train. `executor` says where probes and
    trainings run, as in `autofit.search`. Ctrl-C saves a checkpoint and
    returns, with the status "interrupted". Raises ConfigError, and EnvironmentFault when a search or a training fails.
    """
    with named_as_arguments():
        if gpu is not None and not plan:
            raise ConfigError(
                f"{option('gpu')} names a simulated card, on which nothing trains; it goes with {option('plan')}"
            )
        where = executor_asked(executor, debugging=False)
        folder = studies_folder(folder)
        use_storage(folder, storage)
        given = dict(pipeline) if isinstance(pipeline, Mapping) else Path(pipeline)
        read = read_pipeline(given, changes=changes)
        if only is not None:
            read.stage(only)
        over = {"target_vram": target_vram, "device": device, "gpu": gpu, "trials": trials}
        options = {key: value for key, value in over.items() if value is not None}
        about = Knowledge.of(read, folder, options, search=search)
        driver = _Driver(
            about=about, mlflow=mlflow, executor=where, tell=on_event or silent, on_step=on_step,
            on_progress=on_progress,
        )  # fmt: skip
        chosen = [stage.name for stage in read.stages if only in (None, stage.name)]
        if plan:
            check_stages(about, only=only, tell=driver.tell)
            return PipelineResult(name=read.name, stages=driver.planned(chosen, restart=restart))
        own_folder(folder, on_event)
        with exclusive(folder / "locks", f"pipeline-{read.name}"):
            check_stages(about, only=only, tell=driver.tell)
            return PipelineResult(name=read.name, stages=driver.run(chosen, restart=restart))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Driver:
    """Runs the stages of one pipeline."""

    about: Knowledge
    mlflow: bool
    executor: Executor
    tell: OnEvent
    on_step: Callable[[Step], None] | None
    on_progress: Callable[[Progress], None] | None

    @property
    def state(self) -> State:
        return self.about.state

    def planned(self, chosen: Collection[str], *, restart: bool) -> tuple[StageResult, ...]:
        """The plan of a run, as a result for each stage."""
        found = []
        for stage in self.about.pipeline.stages:
            text = self.about.next(stage, restart=restart) if stage.name in chosen else "left alone"
            found.append(self._result(stage, "planned", text))
        return tuple(found)

    def run(self, chosen: Collection[str], *, restart: bool) -> tuple[StageResult, ...]:
        """Every chosen stage to its end, or to the first that ends otherwise."""
        for name in chosen if restart else ():
            if (known := self.state.stages.get(name)) is not None:
                self.state.keep(name, replace(known, restart=True))
        found: list[StageResult] = []
        for stage in self.about.pipeline.stages:
            going_on = all(result.status in ("done", "kept", "left alone") for result in found)
            if stage.name not in chosen:
                found.append(self._result(stage, "left alone", self.about.next(stage)))
            elif going_on:
                found.append(self._train(stage))
            else:
                found.append(self._result(stage, "not reached", self.about.next(stage)))
        return tuple(found)

    def _train(self, stage: Stage) -> StageResult:
        """Search and train `stage`, as far as is left to do."""
        self._say(stage, self.about.next(stage))
        if self.about.is_done(stage):
            return self._result(stage, "kept", "done before")
        if self.about.goes_on(stage):
            known = self.state.stages[stage.name]
            known = replace(known, restart=known.restart or self.about.is_gone(stage))
        else:
            chosen = self._tuned(stage)
            if isinstance(chosen, StageResult):
                return chosen
            known = chosen
        self.state.keep(stage.name, known)
        trained = self._promoted(stage, known)
        if trained.final is None:
            return self._result(stage, "interrupted", "the same command resumes its training")
        return self._result(stage, "done", f"{trained.final['steps']} steps")

    def _tuned(self, stage: Stage) -> KnownStage | StageResult:
        """The fastest config of `stage`; the stage's result if the search ends with no winner."""
        inputs, again = self.about.inputs(stage), self.about.known(stage) is not None
        options = {key: value for key, value in self.about.options(stage).items() if value is not None}
        found = search_for_the_fastest(
            stage.resolved(self._models(stage)), name=self.about.study_name(stage), folder=self.state.folder,
            trainer=self.about.trainers[stage.name], mlflow=self.mlflow, on_event=self.tell,
            on_progress=self.on_progress, executor=self.executor, **options,
        )  # fmt: skip
        if found.interrupted:
            return self._result(stage, "interrupted", "the same command goes on with its search")
        if found.winner is None:
            return self._result(stage, "nothing fits", found.why)
        self._say(stage, found.why)
        return KnownStage(inputs=inputs, study=found.study, trial=found.winner.number, restart=again)

    def _promoted(self, stage: Stage, known: KnownStage) -> PromotionResult:
        to_begin = known.restart

        def stepped(step: Step) -> None:
            nonlocal to_begin
            if to_begin:  # the old run is gone from here on: after a kill this one is resumed, not begun again
                to_begin = False
                self.state.keep(stage.name, replace(known, restart=False))
            if self.on_step is not None:
                self.on_step(step)

        done = promote(
            known.trial, study=known.study, folder=self.state.folder, restart=known.restart, on_step=stepped,
            on_event=self.tell, executor=self.executor,
        )  # fmt: skip
        self.state.keep(stage.name, replace(known, restart=False))
        return done

    def _models(self, stage: Stage) -> dict[str, object]:
        """{stage that `stage` uses: folder of the whole model that it trained}."""
        found: dict[str, object] = {}
        for name in stage.uses:
            finished = self.state.run(name)
            assert finished is not None, name
            if is_adapter(finished.model):
                self.tell(Event(label=name, text="hands on its base model with its adapter merged in"))
            found[name] = str(whole_model(finished.model, self.state.home(name), run=finished.number).resolve())
        return found

    def _say(self, stage: Stage, text: str) -> None:
        self.tell(Event(label=stage.name, text=text))

    def _result(self, stage: Stage, status: Status, what: str) -> StageResult:
        known = self.about.known(stage)
        finished = self.state.run(stage.name) if status in ("done", "kept", "left alone") else None
        return StageResult(
            name=stage.name, trainer=self.about.trainers[stage.name], status=status, what=what,
            study=None if known is None else known.study, trial=None if known is None else known.trial,
            final=None if finished is None else finished.final,
        )  # fmt: skip
