"""What is wrong with the stages of a pipeline, before anything trains: each recipe is read with its data."""

from pathlib import Path

from autofit.api.events import Event, OnEvent, silent
from autofit.api.pipeline_known import Knowledge
from autofit.api.planning import make_plan
from autofit.api.reading import drop, fork_server
from autofit.errors import ConfigError
from autofit.probing.fork_server import ForkServer
from autofit.promotion.stages import base_of
from autofit.recipe.pipeline import Stage


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
            f"({about.next(about.pipeline.stage(waiting[0]))}); run it first, or leave --only out"
        )


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
            self._wrong.setdefault(str(error), []).append(stage.name)
            return None
        drop(planned.scratch)
        recipe = planned.plan.recipe
        if not recipe.trains_on_data:
            self._wrong.setdefault("the recipe has no dataset to train on", []).append(stage.name)
        text = f"{recipe.trainer}, {recipe.model}, effective batch {recipe.effective_batch_size}"
        self._tell(Event(label=stage.name, text=f"{text}; {self._about.next(stage)}"))
        return recipe.model
