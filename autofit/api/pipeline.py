"""`autofit.run`: the stages of a pipeline, each tuned on its own, then trained, for those behind it to use."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.table import Table

from autofit.api.arguments import FOLDER, executor_asked, named_as_arguments, own_folder, studies_folder
from autofit.api.events import Event, OnEvent, Progress, silent
from autofit.api.pipeline_stages import Knowledge, check_stages
from autofit.api.promoting import PromotionResult, Step, promote
from autofit.api.searching import search as search_for_the_fastest
from autofit.api.tables import Shown
from autofit.cluster.executor import Executor
from autofit.errors import ConfigError, option
from autofit.folding import Folding
from autofit.promotion.promotion import model_path
from autofit.promotion.stages import KnownStage, State, is_adapter, whole_model
from autofit.recipe.pipeline import Stage, read_pipeline
from autofit.tuning.locks import exclusive
from autofit.tuning.storage import use_storage

Status = Literal["done", "kept", "interrupted", "nothing fits", "not reached", "left alone", "planned"]
_GOOD = ("done", "kept", "left alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How one stage went. `kept`: it was done before, and nothing that it depends on has changed."""

    name: str
    trainer: str
    status: Status
    what: str  # what happened, or what a run would do
    study: str | None = None
    trial: int | None = None
    final: Mapping[str, object] | None = None  # of its training: steps, losses, rewards, output_dir

    @property
    def model_path(self) -> str | None:
        """Where its trained model (or adapter) lies; None before it is done."""
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
        """done, planned, interrupted or nothing fits: of the first stage that is not done."""
        return next((stage.status for stage in self.stages if stage.status not in _GOOD), "done")

    @property
    def model_path(self) -> str | None:
        """Where the last stage's trained model lies; None unless every stage is done."""
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
    stage; `restart` trains again from step 0, all stages or the one of `only`. `plan` says what would happen,
    on this machine or on a simulated card, `gpu`.

    Everything that can be wrong with a stage is looked for before anything trains: each recipe is read with its data,
    with the base model of an earlier stage in place of what that stage will train. `executor` says where probes and
    trainings run, as in `autofit.search`. Ctrl-C saves a checkpoint and
    returns, with the status "interrupted". Raises ConfigError, and EnvironmentFault when a search or a training fails.
    """
    with named_as_arguments():
        if gpu is not None and not plan:
            raise ConfigError(f"{option('gpu')} names a simulated card, on which nothing trains; it goes with --plan")
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
        """What a run would do with each stage."""
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
        """Search and train `stage`, as far as it is not done."""
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
        """The fastest config of `stage`; its result where the search ends without one."""
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
