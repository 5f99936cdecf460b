"""`autofit.AutofitCallback`: the watchers of a promoted run for anyone's `transformers.Trainer`. Loads torch."""

import inspect
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transformers import TrainerCallback

from autofit.api.arguments import FOLDER, named_as_arguments, studies_folder
from autofit.errors import ConfigError
from autofit.plugin.protocol import Control, Report, Run
from autofit.plugin.transformers_run import TransformersRun
from autofit.promotion.promotion import choose, promise_of
from autofit.promotion.reports import RunRecorder
from autofit.tuning.record import kept_proof, record_of
from autofit.tuning.study import load_study, trials_of
from autofit.watching.contract import Promise, Row, Watched, Watcher
from autofit.watching.events import RunEvent, forget_events_after, forget_progress_after, read_progress
from autofit.watching.thresholds import StatedGuards, read_guards
from autofit.watching.watchers import ContractWatcher, watchers

Say = Callable[[str], object]


class AutofitCallback(TrainerCallback):  # type: ignore[misc]
    """Holds the training of a script of one's own against a promise, and watches it as a promoted run is watched.

    `Trainer(..., callbacks=[AutofitCallback(study="NAME")])`. The promise is that of `trial` (a number, "best" or
    "leanest") of `study` in the folder `studies`, or the one given; without either the run is watched and nothing is
    compared.
    `say` gets each event as a line of text. In `folder` events.jsonl and progress.jsonl are kept, so that
    `autofit.watching.contract.contract_of` reads them. `guards` is a file laid over autofit's own guards.yaml, its
    content as a mapping, or "off".

    Checkpoints stay the script's own matter. A guard that asks to stop is obeyed on one rank; several ranks go on, and
    the first of them watches. Raises ConfigError for a study or a trial that is not there.
    """

    def __init__(
        self, promise: Promise | None = None, *,
        folder: str | Path | None = None,
        study: str | None = None,
        trial: str | int = "best",
        studies: str | Path = FOLDER,
        say: Say = print,
        guards: StatedGuards | None = None,
    ) -> None:  # fmt: skip
        if promise is not None and study is not None:
            raise ConfigError("the promise is given, or is that of a study's trial; leave out promise or study")
        with named_as_arguments():
            self._guards = read_guards(guards)
            self._promise = (
                _promise_of_trial(studies_folder(studies), study, str(trial)) if study is not None else promise
            )
        self._own = None if folder is not None else tempfile.TemporaryDirectory(prefix="autofit-")
        self._folder = studies_folder(folder) if folder is not None else Path(cast("Any", self._own).name)
        self._say = say
        self._report: Report = Report()
        self._contract = ContractWatcher()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Promised against actual, as last compared; empty if nothing was promised, or before the first comparison."""
        return self._contract.rows

    @property
    def verdict(self) -> str:
        """Sentence on whether the promise was kept; "" before the end of training, or if nothing was promised."""
        return self._contract.verdict

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not state.is_world_process_zero:
            return
        found = watchers(guards=self._guards)
        self._contract = next(w for w in found if isinstance(w, ContractWatcher))
        self._contract.of_trial = False
        watched = _watched(args, state, self._folder, self._promise, trainer=_trainer_of(self))
        run = TransformersRun(watched.hf_trainer or SimpleNamespace(state=state, model=given.get("model")), phases={},
                              samples_per_step=watched.samples_per_step)  # fmt: skip
        self._report = _ScriptRecorder(run, watched, found, self._say)
        self._report.train_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._report.step_begins(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._report.step_ends(state.global_step).stop and args.world_size == 1:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: object) -> None:
        if logs and "loss" in logs:
            self._report.logs(state.global_step, state.max_steps, logs)

    def on_train_end(self, *_: object, **__: object) -> None:
        if isinstance(self._report, RunRecorder):
            self._report.ends()


class _ScriptRecorder(RunRecorder):
    """A recorder that also says its events, and leaves checkpoints to the script."""

    def __init__(self, run: Run, watched: Watched, found: list[Watcher], say: Say) -> None:
        super().__init__(run, watched, found)
        self._say = say

    def step_ends(self, step: int) -> Control:
        return replace(super().step_ends(step), save=False)

    def _tell(self, events: Iterable[RunEvent]) -> None:
        told = list(events)
        super()._tell(told)
        for event in told:
            self._say(f"autofit, step {event.step}: {event.text}")


def _watched(args: Any, state: Any, folder: Path, promise: Promise | None, *, trainer: Any) -> Watched:
    """Facts of the script's run. Notes of an earlier run in `folder` on steps still to come are deleted."""
    done = int(state.global_step)
    folder.mkdir(parents=True, exist_ok=True)
    forget_progress_after(folder, done)
    forget_events_after(folder, done)
    return Watched(
        folder=folder, trainer=_name(args), values=_plain(args), device=str(args.device.type),
        generates=hasattr(args, "num_generations"), first_step=done, last_step=int(state.max_steps), promise=promise,
        samples_per_step=int(args.per_device_train_batch_size * args.gradient_accumulation_steps),
        lines=tuple(read_progress(folder)), hf_trainer=trainer,
    )  # fmt: skip


def _trainer_of(callback: TrainerCallback) -> Any:
    """The trainer that calls `callback`, if found: transformers gives callbacks everything but itself.

    It is the object of the caller that has the callback in its list.
    """
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if callback in getattr(getattr(owner, "callback_handler", None), "callbacks", ()):
            return owner
        frame = frame.f_back
    return None


def _name(args: Any) -> str:
    """The trainer's name from the class of its arguments: GRPOConfig is grpo."""
    return type(args).__name__.removesuffix("Config").removesuffix("TrainingArguments").lower() or "transformers"


def _plain(args: Any) -> dict[str, object]:
    return {key: value for key, value in vars(args).items() if isinstance(value, bool | int | float | str | None)}


def _promise_of_trial(studies: Path, study: str, trial: str) -> Promise | None:
    """The promise of `trial` of a study in `studies`, with its gradient proof if there is one."""
    found = load_study(studies, study)
    record = record_of(found)
    chosen = choose(trials_of(found), trial, record.rule)
    proof = kept_proof(found, chosen.number)
    return promise_of(chosen, record, "" if proof is None else str(proof.get("sentence", "")))
