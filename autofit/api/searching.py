"""`autofit.search` and `autofit.report`: the search from its plan to its result."""

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna

from autofit.api.arguments import FOLDER, executor_asked, named_as_arguments, own_folder, studies_folder
from autofit.api.events import STOPPING, Event, OnAdvice, OnEvent, Progress, TrialResult, silent
from autofit.api.lower_tiers import is_known, outside, where_a_lower_tier_is_faster
from autofit.api.planning import DeviceKind, Planned, Request, make_plan
from autofit.api.reading import Given, drop, fork_server
from autofit.api.results import SearchResult, read_result
from autofit.api.tables import trial_line
from autofit.cluster.scheduler import Executor
from autofit.errors import AutofitError, ConfigError, EnvironmentFault
from autofit.files import cache_folder, private_folder, write_atomically
from autofit.forecast.advice import Ending, within
from autofit.forecast.composed import PredictionSource
from autofit.forecast.estimate import Estimator
from autofit.forecast.forecast import Forecast, Forecaster
from autofit.forecast.predictions import (
    WHY_NOT_OFFLOADED,
    as_evaluated,
    has_room,
    most_evaluated,
    without,
    without_offload,
)
from autofit.hardware import calibration
from autofit.hardware.hardware import about_twin, simulated_twin
from autofit.probing.cluster_launch import launcher_for
from autofit.probing.fork_server import LOG, ForkServer
from autofit.probing.prepare import keep_worst_case, worst_case_path
from autofit.recipe.findings import OFFLOAD
from autofit.recipe.keys import Tier
from autofit.recipe.launching import launch_options
from autofit.recipe.recipe import merge, own_names
from autofit.space.knob import StatedSpace
from autofit.space.space import Space
from autofit.space.traits import describe_changes
from autofit.tracking.follower import Follower, following
from autofit.tuning.frontier import Goal, Trial, baseline, winner
from autofit.tuning.locks import is_there
from autofit.tuning.record import Stop, StopKind, keep_record, record_of
from autofit.tuning.sampler import SamplerName
from autofit.tuning.search import Plan, Search, SearchProgress, confirm, open_study
from autofit.tuning.sensitivity import sensitivity
from autofit.tuning.storage import database_of, mlflow_follows, use_storage
from autofit.tuning.study import driving, open_storage, trials_of
from autofit.units import format_seconds

_HOST_COSTS_S = 30.0  # the most; it takes about a second
_INTERRUPTED = Stop(StopKind.INTERRUPTED, "interrupted")


def search(
    recipe: Given | None = None, *,
    target_vram: str | float | None = None,
    device: DeviceKind = "auto",
    gpu: str | None = None,
    trainer: str | None = None,
    space: StatedSpace | None = None,
    allow: Tier = "neutral",
    headroom: str | float | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    gpus: int | None = None,
    trials: int | None = None,
    time_budget: str | float | None = None,
    plateau: int | None = None,
    min_gain: str | float = 0.01,
    goal: Goal = "speed",
    sampler: SamplerName = "autofit",
    measured_steps: int = 2,
    deadline: str | float = "15m",
    parallel: int | None = None,
    executor: str | Mapping[str, object] | Executor | None = None,
    confirm: bool = True,
    seed: int = 0,
    name: str | None = None,
    study: str | None = None,
    folder: str | Path = FOLDER,
    storage: str | None = None,
    mlflow: bool = True,
    advice: bool = True,
    on_event: OnEvent | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_result: Callable[[SearchResult], None] | None = None,
    on_advice: OnAdvice | None = None,
) -> SearchResult:  # fmt: skip
    """The Pareto front of step time and device-used bytes, and the fastest config that fits, as the study has them.

    `recipe` is the path of the YAML that `trl grpo --config` takes, a mapping of its keys, or TRL's config objects (a
    `GRPOConfig`, or a sequence of what TRL's parser makes: script arguments, trainer, model and dataset config; a
    mapping may stand among them), or a function that returns one of these, called once the other arguments are found to
    be right. None is the built-in baseline. Reward functions go by dotted path.

    What is tried:
    - `target_vram`, `headroom`: bytes, or text such as "40GB" (40e9) or "40GiB". The target is the whole card, or all
      memory on cpu, unless given; the headroom, kept free below it, 2 % (0 on cpu).
    - `device`: "cuda", "cpu", "sim" or "auto" (cuda where there is a card, else a simulated one); `gpu` names the
      simulated card ("a100-40gb"), else the target's size does.
    - `allow`: the lowest tier of change to try, where nothing of a higher one fits; all compete if `goal` is
      "speed-at-any-tier". `space`: a YAML file, a name in search_spaces/, {knob: its entry in
      such a file}, or `Knob`s. `changes`: {key of the recipe: value}, laid over it; None removes a key.
    - `prompt_tokens`: on a simulated card, a synthetic prompt of that many tokens replaces the dataset.
    - `accelerate_config` (a file, or one that TRL ships: "fsdp2", "zero3") and `num_processes`: how the recipe is
      launched, as `trl` takes it; the recipe is for that many ranks. `gpus`: train on that many cards, at the effective
      batch that the recipe has as written. `gpu` may say both: "8xa100-80gb".

    When it ends: after `trials` (12 unless a time or plateau is given), `time_budget` (seconds, or "10m"), `plateau`
    trials without a better winner, or when no candidate is expected to be at least `min_gain` (a share) faster.
    `deadline` (seconds, or "15m") bounds one probe, `measured_steps` are its timed optimizer steps, and `parallel`
    probes run at once. `confirm` probes the winner again, longer and in turns with the recipe as it is; one that is not
    clearly faster gives way to the next, and the recipe stays as it is if none is.

    `executor` says where probes run: "local", "slurm", "debug" (in this terminal, for breakpoints in reward functions),
    a mapping with sbatch's options ({"executor": "slurm", "partition": "gpu", "time": "4h"}), which is laid over
    executor.yaml of the working directory, or an `Executor`.

    The study is kept in `folder`, or in the Postgres that `storage` names ("postgresql://user@host/database", or
    "file:PATH" of a file with such a URL), which several people and machines may share; the folder remembers it without
    a password. It goes on when the same search is called again, as after a crash. It is called `study`, or after the
    recipe (`name` in place of the file's), the target and the device. `mlflow` mirrors it.
    `advice` simulates, after the search, what lies outside the allowed tier.

    Nothing is printed: `on_event` gets each thing that happens (`on_event=print` shows them), `on_progress` the state
    of the search twice a second, `on_result` the result before the advice and again with it, both before MLflow shows
    all of it, and `on_advice` None as the simulations of advice begin, which have no limit. Ctrl-C ends the probes at
    work and returns what was found, with `interrupted` set; a KeyboardInterrupt is raised only before the first probe.
    No signal handler is installed, so any thread will do.

    Raises ConfigError for what cannot be searched, and EnvironmentFault where the machine is at fault.
    """
    with named_as_arguments():
        gpu, launch = launch_options(
            gpu=gpu, accelerate_config=accelerate_config, num_processes=num_processes, gpus=gpus
        )
        where = executor_asked(executor)
        home = studies_folder(folder)
    asked = Request(
        recipe=recipe, name=name, target_vram=target_vram, headroom=headroom, device=device, gpu=gpu, trainer=trainer,
        space=space, allow=allow, changes=changes, prompt_tokens=prompt_tokens, launch=launch, trials=trials,
        time_budget=time_budget, plateau=plateau, min_gain=min_gain, goal=goal, sampler=sampler,
        measured_steps=measured_steps, deadline=deadline, parallel=parallel, seed=seed, study=study,
        folder=home, executor=where,
    )  # fmt: skip
    with named_as_arguments():
        asked.check()
        use_storage(asked.folder, storage)
        database = database_of(asked.folder)
        with _kept_if_used(asked.folder):
            own_folder(asked.folder, on_event)
            if database.url is not None:
                open_storage(
                    asked.folder, create=True
                ).engine.dispose()  # reports at once a server that is away, or only reads
            server = fork_server(asked.folder)
            try:
                run = _Run(asked, server, on_event or silent, on_progress, on_result, on_advice)
                result, stop = run.to_its_end(confirming=confirm, mirroring=mlflow, advising=advice)
            finally:
                server.close()
        if stop.kind is StopKind.BROKEN:
            raise EnvironmentFault(f"{result.why}; mend that and run the same command again")
        return result


def report(
    study: str | None = None, *, folder: str | Path = FOLDER, html: str | Path | None = None,
    storage: str | None = None,
) -> SearchResult:  # fmt: skip
    """The result of the study called `study` in `folder`, or of the one used last. Raises ConfigError if there is none.

    `html` is the path of a file to which it is also written, as a web page that needs nothing else.
    """
    with named_as_arguments():
        folder = studies_folder(folder)
        use_storage(folder, storage)
        result = read_result(folder, study)
        if html is not None:
            from autofit.api.page import page_of

            write_atomically(Path(html), page_of(result))
        return result


@contextlib.contextmanager
def _kept_if_used(folder: Path) -> Iterator[None]:
    """Context in which `folder` may be made; if so, it is deleted again if a wrong recipe leaves only a log."""
    was_there = folder.exists()
    try:
        yield
    except ConfigError:
        if not was_there and folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOG}:
            (folder / LOG).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another search has begun there
                folder.rmdir()
        raise


class _Run:
    """One call of `search`, once its arguments are checked."""

    def __init__(
        self,
        asked: Request,
        server: ForkServer,
        on_event: OnEvent,
        on_progress: Callable[[Progress], None] | None,
        on_result: Callable[[SearchResult], None] | None,
        on_advice: OnAdvice | None,
    ) -> None:
        self._asked, self._server = asked, server
        self._tell, self._on_progress = on_event, on_progress
        self._on_result, self._on_advice = on_result, on_advice

    def to_its_end(self, *, confirming: bool, mirroring: bool, advising: bool) -> tuple[SearchResult, Stop]:
        """(the result, why the search ended): plan, predict, probe, confirm."""
        planned = make_plan(self._asked, self._server, self._tell)
        with _database_made(self._asked.folder):  # beside the forecast, which other processes compute
            planned, forecast = self._forecast_as_evaluated(planned)
        plan = replace(planned.plan, predictions=None if forecast is None else forecast.predictions)
        if forecast is not None and plan.device.startswith("sim:"):  # a probe there would crash too
            plan = replace(plan, space=without(plan.space, forecast.crashed))
        with contextlib.ExitStack() as stack:
            stack.enter_context(driving(plan.folder, plan.name))
            study = open_study(plan)
            mirroring = mirroring and mlflow_follows()
            follower = stack.enter_context(following(plan.folder, study, say=self._note)) if mirroring else None
            for folder in (plan.folder / "probes", plan.probes_folder):
                private_folder(folder)
            keep_worst_case(planned.scratch, plan.probes_folder)
            drop(planned.scratch)
            self._note(
                f"{plan.name} (in {plan.folder}), {len(plan.space.allowed())} candidates of tier "
                f"{plan.space.allow} or above",
                label="study",
            )
            launcher = launcher_for(
                plan.executor,
                plan.probes_folder,
                device=plan.device,
                card=plan.card,
                cards=plan.recipe.launch.ranks,
            )
            stack.callback(launcher.close)
            if plan.executor.kind == "debug":
                self._note("the time at a breakpoint counts as the probe's; another name gives it a study of its own",
                           label="debug")  # fmt: skip
            driver = Search(plan, study, server_socket=self._server.socket_path, launcher=launcher)
            driver.on_told, driver.on_progress = self._on_told(plan, study, follower), self._showing(plan)
            driver.on_note = self._note
            ahead = stack.enter_context(self._advice_ahead(plan, study)) if advising else None
            driver.on_spare = None if ahead is None else ahead.begin
            try:
                stop = driver.run()
                if confirming:
                    confirm(plan, study, server_socket=self._server.socket_path, launcher=launcher, say=self._note)
                if plan.device == "cuda":
                    self._correct_clock(plan, study)
                if stop.kind is not StopKind.BROKEN:
                    self._keep_relaxed(replace(planned, plan=plan), study)
            except KeyboardInterrupt:
                self._tell(Event(text="stopping the probe at work; its trial waits for the next run", interrupted=True))
                driver.interrupt()
                stop = _INTERRUPTED
            _keep_sensitivity(planned, study, forecast)
            hears = None if stop.kind in (StopKind.INTERRUPTED, StopKind.BROKEN) else self._on_result
            if hears is not None:
                hears(read_result(plan.folder, plan.name, stop=stop))
            if advising and stop.kind is not StopKind.INTERRUPTED and not self._keep_outside(plan, study, ahead):
                stop, hears = _INTERRUPTED, None
            result = read_result(plan.folder, plan.name, stop=stop)
            if hears is not None:
                hears(result)
        return result, stop

    def _note(self, text: str, *, label: str = "") -> None:
        self._tell(Event(text=text, label=label))

    def _on_told(self, plan: Plan, study: optuna.Study, follower: Follower | None) -> Callable[[Trial], None]:
        base = baseline(trials_of(study))  # of an earlier run, if there is one
        names = own_names(plan.recipe.foreign)

        def told(trial: Trial) -> None:
            nonlocal base
            if follower is not None:
                follower.begin()
            base = base if trial.changes else trial
            text = trial_line(trial, plan.recipe.resolved, base, limit_bytes=plan.limit_bytes, names=names)
            self._tell(Event(text=text, trial=TrialResult.of(trial, base, limit_bytes=plan.limit_bytes)))

        return told

    def _showing(self, plan: Plan) -> Callable[[SearchProgress], None] | None:
        show = self._on_progress
        return None if show is None else lambda found: show(_progress(found, plan))

    def _forecast_as_evaluated(self, planned: Planned) -> tuple[Planned, Forecast | None]:
        """The plan and its forecast with the recipe's own batch of an evaluation, if any candidate is predicted to fit.

        Then the largest is tried with which a candidate is predicted to fit.
        """
        plan = planned.plan
        lean = replace(planned, plan=replace(plan, space=as_evaluated(plan.space)))
        found, forecast = self._forecast_without_offload(lean)
        if lean.plan.space is plan.space or forecast is None or plan.limit_bytes is None:
            return found, forecast
        if not np.isfinite(forecast.predictions.step_s).any() or has_room(forecast.predictions, plan.limit_bytes):
            return found, forecast
        wider, others = self._forecast_without_offload(planned)
        samples = None if others is None else most_evaluated(plan.space, others.predictions, plan.limit_bytes)
        if samples is None:
            return found, forecast
        key = plan.recipe.keys.evaluation
        self._note(f"{key} {samples} is tried: nothing fits with {plan.recipe.evaluated_samples}", label="predicted")
        return replace(wider, plan=replace(wider.plan, space=as_evaluated(wider.plan.space, samples))), others

    def _forecast_without_offload(self, planned: Planned) -> tuple[Planned, Forecast | None]:
        """The plan and its forecast; on a simulated card, offloads to the host are tried only if nothing else fits."""
        plan = planned.plan
        space = without_offload(plan.space) if plan.device.startswith("sim:") else plan.space
        lean = replace(planned, plan=replace(plan, space=space))
        forecast = self._forecast(lean)
        if space is plan.space or forecast is None:
            return planned, forecast
        if has_room(forecast.predictions, plan.limit_bytes):
            self._note(f"{OFFLOAD} is not tried on a simulated card: {WHY_NOT_OFFLOADED}", label="predicted")
            return lean, forecast
        return planned, self._forecast(planned)

    def _forecast(self, planned: Planned) -> Forecast | None:
        """Prediction for every candidate on the simulated card; None on the CPU, or on an unknown card."""
        plan, scratch = planned.plan, planned.scratch
        device, remark = simulated_twin(plan.device, plan.card), about_twin(plan.device, plan.card)
        if remark:
            self._note(remark if device is not None else f"nothing, so no candidate is ruled out: {remark}",
                       label="predicted")  # fmt: skip
        if device is None:
            return None
        began = time.monotonic()
        if plan.device == "cuda" and plan.executor.kind == "local" and calibration.found_path(device) is None:
            self._measure_host(device, scratch)
        forecaster = self._forecaster(device, worst_case_path(scratch), scratch)
        try:
            forecast = forecaster.forecast(plan.space, limit_bytes=plan.limit_bytes)
        except BaseException:
            drop(scratch)
            raise
        predictions = forecast.predictions
        known = int(np.isfinite(predictions.step_s).sum())
        too_large = int((predictions.floor_bytes > (plan.limit_bytes or math.inf)).sum())
        self._note(
            f"{known} of {len(predictions.candidates)} candidates in {format_seconds(time.monotonic() - began)}; "
            f"{too_large} cannot fit",
            label="predicted",
        )
        if composed := forecast.sources.count(PredictionSource.COMPOSED):
            self._note(
                f"{composed} of them from the effects of single settings, so none of these is ruled out; "
                f"{forecast.traced} structures were traced",
                label="predicted",
            )
        for (name, value), problem in forecast.crashed.items():
            self._note(f"{name} = {value} is not tried on a simulated card: {problem}", label="predicted")
        for problem, count in forecast.problems.items():
            self._note(f"nothing is ruled out for {count} of them: {problem}", label="predicted")
        return forecast

    def _measure_host(self, device: str, scratch: Path) -> None:
        """Measure this host for the clock of its card's simulated twin; where that fails, the published costs stay."""
        self._server.call({
            "entry": "autofit.hardware.calibration:measure_for", "argument": device.removeprefix("sim:"),
            "cwd": str(Path.cwd()), "env": {}, "log": str(scratch / "host_costs.log"), "deadline_s": _HOST_COSTS_S,
        })  # fmt: skip
        seconds = calibration.launch_s(device)
        if seconds is not None:
            self._note(f"a kernel's launch takes this host {seconds * 1e6:.1f} us, measured once for this card",
                       label="predicted")  # fmt: skip

    def _keep_relaxed(self, planned: Planned, study: optuna.Study) -> None:
        """Keep with the study the gain of a lower tier, if one is clearly faster."""
        plan, trials, record = planned.plan, trials_of(study), record_of(study)
        best, words = winner(trials, **record.rule), ""
        if best is not None and plan.predictions is not None:
            words = where_a_lower_tier_is_faster(planned, self._asked, trials, best, plan.predictions)
        keep_record(study, replace(record, relaxed=words))

    def _forecaster(self, device: str, worst_case: Path, scratch: Path) -> Forecaster:
        return Forecaster(
            device=device, worst_case=worst_case, server=self._server, scratch=scratch / "forecasts",
            kept=cache_folder() / "forecasts",
        )  # fmt: skip

    @contextlib.contextmanager
    def _advice_ahead(self, plan: Plan, study: optuna.Study) -> Iterator["_Ahead | None"]:
        """Advice that may begin beside the last probes; None on a real device, whose seconds it would disturb."""
        estimator = self._estimator(plan, "advice") if plan.device.startswith("sim:") else None
        if estimator is None:
            yield None
            return
        ahead = _Ahead(study, replace(estimator, folder=estimator.folder.with_name(f"{plan.name}-ahead")))
        try:
            yield ahead
        finally:
            ahead.end()

    def _keep_outside(self, plan: Plan, study: optuna.Study, ahead: "_Ahead | None") -> bool:
        """Keep with the study what lies outside its tier, unless it is known from an earlier run of the same search.

        False: Ctrl-C came first.
        """
        record, trials = record_of(study), trials_of(study)
        best, estimator = winner(trials, **record.rule), self._estimator(plan, "advice")
        if estimator is None or is_known(record.outside, best, record.allow):
            return True
        if self._on_advice is not None:
            self._on_advice(None)
        interrupted = False

        def look() -> dict[str, object] | None:
            known = None if ahead is None else ahead.found(best, trying)
            return known or outside(best, trials, estimator, record.allow, tell=trying)

        def trying(text: str) -> None:
            self._tell(Event(text=text, trying=True))

        def cancel(_: Ending) -> None:
            nonlocal interrupted
            interrupted = True
            self._tell(STOPPING)
            estimator.cancel()
            if ahead is not None:
                ahead.cancel()

        try:
            found, _ = within(threading.TIMEOUT_MAX, look, cancel=cancel)
            if not interrupted:
                keep_record(study, replace(record, outside=found))
        except AutofitError as error:  # the search itself is done
            if not interrupted:
                self._note(f"what lies outside the {record.allow} tier is not known: {error}")
        finally:
            shutil.rmtree(estimator.folder, ignore_errors=True)
        return not interrupted

    def _estimator(self, plan: Plan, folder: str) -> Estimator | None:
        """Simulations on the twin of the plan's card, if it has one."""
        device = simulated_twin(plan.device, plan.card)
        if device is None or plan.limit_bytes is None:
            return None
        return Estimator(
            recipe=plan.recipe, device=device, capacity_bytes=plan.limit_bytes,
            folder=plan.folder / folder / plan.name, worst_case=worst_case_path(plan.probes_folder),
            server=self._server, deadline_s=plan.deadline_s,
        )  # fmt: skip

    def _correct_clock(self, plan: Plan, study: optuna.Study) -> None:
        """Correct the clock of the card's simulated twin by the winner's measured seconds; it is kept."""
        device, best = simulated_twin(plan.device, plan.card), winner(trials_of(study), **record_of(study).rule)
        estimator = self._estimator(plan, "calibrations")
        if device is None or best is None or best.result is None or estimator is None:
            return
        predicted = estimator.probe(merge(plan.recipe.values, best.changes))
        fitted = calibration.fit_card(device, predicted=predicted, measured=best.result)
        if fitted.costs is not None:
            self._note(f"the clock of {device} by this search's winner", label="calibrated")
        else:
            self._note(f"the clock of {device} stays as it is: {fitted.why}")


class _Ahead:
    """Changes outside the tier of a study's winner, simulated silently while the last probes run.

    These probes are for the front, so that the winner mostly stays; else all of it is dropped.
    """

    def __init__(self, study: optuna.Study, estimator: Estimator) -> None:
        self._study, self._estimator = study, estimator
        self._pool = ThreadPoolExecutor(1)
        self._best: Trial | None = None
        self._made: Future[dict[str, object] | None] | None = None
        self._said: list[str] = []

    def begin(self) -> None:
        """Begin for the winner so far, unless the study has the answer."""
        record, trials = record_of(self._study), trials_of(self._study)
        self._best = best = winner(trials, **record.rule)
        if best is not None and not is_known(record.outside, best, record.allow):
            self._made = self._pool.submit(
                outside, best, trials, self._estimator, record.allow, tell=self._said.append
            )  # fmt: skip

    def found(self, best: Trial | None, tell: Callable[[str], None]) -> dict[str, object] | None:
        """The answer for the winner `best`, after its messages were told; None: it must be simulated anew."""
        if self._made is None or best != self._best:
            return None
        made = self._made.result()
        for text in self._said:
            tell(text)
        return made

    def cancel(self) -> None:
        """Make the work still running end soon."""
        self._estimator.cancel()

    def end(self) -> None:
        """Stop the work still running."""
        self.cancel()
        self._pool.shutdown()
        shutil.rmtree(self._estimator.folder, ignore_errors=True)


@contextlib.contextmanager
def _database_made(folder: Path) -> Iterator[None]:
    """Context in which another thread makes the studies' own database if it is missing, in most of a second.

    The next call that opens it reports its faults.
    """
    database = database_of(folder)
    if database.url is not None or is_there(database.path):
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: open_storage(folder, create=True).engine.dispose())
        yield


def _progress(found: SearchProgress, plan: Plan) -> Progress:
    original, names = plan.recipe.resolved, own_names(plan.recipe.foreign)
    return Progress(
        done=sum(t.result is not None for t in found.trials),
        probing=tuple(f"trial {t.number}: {describe_changes(t.changes, original, names)}" for t in found.probing),
        best=None if found.best is None else TrialResult.of(
            found.best, baseline(found.trials), limit_bytes=plan.limit_bytes
        ),
        elapsed_s=found.elapsed_s, left_s=found.left_s,
    )  # fmt: skip


def _keep_sensitivity(planned: Planned, study: optuna.Study, forecast: Forecast | None) -> None:
    """Keep with the study what lies around its winner, for `report`: knobs of every tier, as far as it is known."""
    plan, trials, record = planned.plan, trials_of(study), record_of(study)
    best = winner(trials, **record.rule)
    if best is None:
        return
    space = Space.of(plan.recipe, planned.knobs, allow="recipe", device=plan.device, card=plan.card)
    kept = sensitivity(
        space, trials, best, limit_bytes=plan.limit_bytes,
        predict=lambda other, tokens: None if forecast is None else forecast.of(space, other, completion_tokens=tokens),
    )  # fmt: skip
    keep_record(study, replace(record, sensitivity=kept))
