"""The search: ask Optuna, probe, tell, until a budget is spent; then longer probes of the winner, its confirmation.

Idempotent: a second run continues the first.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from autofit.cluster.scheduler import LOCAL, Executor
from autofit.errors import ConfigError, option
from autofit.forecast.predictions import Cloud, Predictions
from autofit.hardware.hardware import Device
from autofit.probing.launch import Attempts, Launcher, Next, to_mend, what_next
from autofit.probing.prepare import worst_case_path
from autofit.probing.result import Fidelity, ProbeResult, ProbeSetup, ProbeStatus
from autofit.recipe.recipe import Recipe, merge
from autofit.space.space import Space
from autofit.tuning.candidates import Grid
from autofit.tuning.comparison import Comparison, Pair
from autofit.tuning.frontier import Foreseen, Goal, Rule, Trial, compared_with, cost, finalist, measured, winner
from autofit.tuning.record import (
    Stop,
    StopKind,
    StudyRecord,
    keep_comparison,
    keep_confirmation,
    keep_record,
    record_of,
    repeats,
    sealed_file,
)
from autofit.tuning.repeats import Prober, Repeats
from autofit.tuning.sampler import CandidateSampler, SamplerName, make_sampler
from autofit.tuning.sentences import confirmation_note
from autofit.tuning.storage import me
from autofit.tuning.study import (
    FOR_FRONT,
    SoleWriter,
    database_errors,
    note_candidate,
    open_storage,
    requeue,
    tell,
    to_trial,
    trials_of,
)
from autofit.units import format_bytes, format_seconds

_SHOW_S = 0.5
_BROKEN_TRIALS = 2  # failures that end a search in which no probe ran to its end
DEFAULT_MIN_GAIN_FRAC = 0.01  # smallest expected gain (share of step time) for which a tier is searched further
_FOUND = (StopKind.GAIN, StopKind.EXHAUSTED)  # ends of a search that has its winner
FRONT_TRIALS = 2  # simulations of candidates that belong on the front, once the winner is found
_QUICK_S = 20.0  # the quickest simulation of a study took less: two more cost seconds
_GAIN = 0.01  # smallest gain (share) that counts as an improvement of the winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The request of a search. Every input that a probe's result depends on is in `fingerprint`."""

    recipe: Recipe
    space: Space
    folder: Path
    device: Device
    target_bytes: int | None
    headroom_bytes: int = 0
    study_name: str | None = None
    max_trials: int | None = 12
    budget_s: float | None = None
    plateau_trials: int | None = None
    min_gain_frac: float | None = None
    sampler: SamplerName = "autofit"
    goal: Goal = "speed"
    predictions: Predictions | None = None
    parallel: int = 1
    measured_steps: int = 2
    deadline_s: float = 900.0
    seed: int = 0
    executor: Executor = LOCAL
    card: str | None = None  # the kind of a card in another machine; None: of this one, or no card

    @property
    def limit_bytes(self) -> int | None:
        """The limit of a probe in bytes: the target less the headroom."""
        return None if self.target_bytes is None else self.target_bytes - self.headroom_bytes

    @property
    def fingerprint(self) -> str:
        recipe, space = self.recipe, self.space
        knobs = [[k.name, list(map(str, c))] for k, c in zip(space.knobs, space.choices, strict=True)]
        parts = [
            recipe.trainer, recipe.values, recipe.world_size, knobs, space.allow, self.device, self.limit_bytes,
            self.measured_steps, recipe.longest_prompt_tokens, recipe.content_hash, recipe.model_parameters,
            *([] if self.card is None else [self.card]),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        target = "" if self.target_bytes is None else f"-{format_bytes(self.target_bytes).replace(' ', '')}"
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self.recipe.name)
        return self.study_name or f"{stem}{target}-{self.device.replace(':', '-')}-{self.fingerprint[:6]}"

    @property
    def probes_folder(self) -> Path:
        return self.folder / "probes" / self.name

    def setup(self, *, server_socket: str | None) -> ProbeSetup:
        """The common settings of all probes of the search and its confirmation runs."""
        return ProbeSetup(
            trainer=self.recipe.trainer, device=self.device, limit_bytes=self.limit_bytes,
            worst_case=worst_case_path(self.probes_folder), deadline_s=self.deadline_s,
            measured_steps=self.measured_steps, parallel=self.parallel, server_socket=server_socket,
            least_of_fits=False, recipe_hash=self.recipe.named_hash,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """The state of a search, shown while it runs."""

    trials: tuple[Trial, ...]
    probing: tuple[Trial, ...]
    best: Trial | None
    elapsed_s: float
    left_s: float | None


def open_study(plan: Plan) -> optuna.Study:
    """The plan's study, made if it is new. Raises ConfigError when the name holds another plan's trials."""
    _check_name(plan.probes_folder)
    storage = SoleWriter(open_storage(plan.folder, create=True))
    with database_errors(plan.folder):
        study = _stored(plan, storage)
        if _all_broken(study.get_trials(deepcopy=False)):  # the user may have repaired the cause since
            optuna.delete_study(study_name=plan.name, storage=storage)
            shutil.rmtree(plan.probes_folder, ignore_errors=True)  # the worst case too: the data may be repaired
            study = _stored(plan, storage)
        study.sampler = make_sampler(
            plan.sampler, Grid.of(plan.space), predictions=plan.predictions, target_bytes=plan.limit_bytes,
            seed=plan.seed, goal=plan.goal, min_gain_frac=plan.min_gain_frac or DEFAULT_MIN_GAIN_FRAC,
        )  # fmt: skip
        known = record_of(study)
        if known.fingerprint not in ("", plan.fingerprint):
            by = f" by {known.owner}" if known.owner else ""
            raise ConfigError(
                f"the study {plan.name!r} was made{by} for another recipe, target, device or space; "
                f"omit {option('study')} or give another name"
            )
        keep_record(study, _asked(plan, known))
    return study


def _check_name(folder: Path) -> None:
    """Raise ConfigError where the file system takes another study's folder for this one's: it ignores case."""
    there = os.listdir(folder.parent) if folder.exists() else []
    other = next((name for name in there if name.casefold() == folder.name.casefold()), folder.name)
    if there and folder.name not in there and other != folder.name:
        raise ConfigError(
            f"the study {folder.name!r} needs a folder of its own, and the file system, which ignores case, has "
            f"that of {other!r} there; choose a name with {option('study')} that differs in more than case"
        )


def _stored(plan: Plan, storage: SoleWriter) -> optuna.Study:
    return optuna.create_study(
        study_name=plan.name, storage=storage, load_if_exists=True, directions=["minimize", "minimize"]
    )


def _asked(plan: Plan, known: StudyRecord) -> StudyRecord:
    """`known`, the record that the study already has, updated with the plan's request."""
    recipe = plan.recipe
    return replace(
        known, fingerprint=plan.fingerprint, owner=known.owner or me(), used=datetime.now(UTC).isoformat(),
        device=plan.device, card=plan.card, target_bytes=plan.target_bytes, headroom_bytes=plan.headroom_bytes,
        trainer=recipe.trainer,
        values=dict(recipe.values), resolved=dict(recipe.resolved), recipe_name=recipe.name,
        effective_batch_size=recipe.effective_batch_size, cwd=Path.cwd(), allow=plan.space.allow, goal=plan.goal,
        keys=recipe.keys, compared=recipe.compared, command=recipe.command, trains_on_data=recipe.trains_on_data,
        tiers=dict(recipe.tiers), left_out=dict(recipe.left_out), other_names=dict(recipe.other_names),
        spelling=recipe.spelling,
        space="" if recipe.space is None else str(recipe.space), traits=plan.space.stated,
        foreign=sealed_file(recipe.foreign),
        sampler=plan.sampler, baseline_predicted=_baseline_predicted(plan), predicted=_predicted(plan),
        least_floor_bytes=None if plan.predictions is None else float(plan.predictions.floor_bytes.min()),
    )  # fmt: skip


def _predicted(plan: Plan) -> dict[str, object] | None:
    cloud = Cloud.of(plan.predictions)
    return None if cloud is None else cloud.to_json()


def _baseline_predicted(plan: Plan) -> dict[str, float] | None:
    """The prediction for the unchanged recipe, if there is one: {floor_bytes, device_used_bytes, step_s}."""
    if plan.predictions is None or plan.space.baseline not in plan.predictions.candidates:
        return None
    alone = plan.predictions.of((plan.space.baseline,))
    names = ("floor_bytes", "device_used_bytes", "step_s")
    return {n: float(getattr(alone, n)[0]) for n in names if math.isfinite(getattr(alone, n)[0])}


class Search:
    """Drives one study. `run` returns the reason to stop; it is safe to interrupt or kill, and to run again."""

    def __init__(
        self, plan: Plan, study: optuna.Study, *, server_socket: str | None, launcher: Launcher | None = None
    ) -> None:
        self.plan = plan
        self.study = study
        self._setup = plan.setup(server_socket=server_socket)
        self._launcher = launcher or Launcher()
        self.on_progress: Callable[[SearchProgress], None] | None = None
        self.on_told: Callable[[Trial], None] = lambda _: None
        self.on_note: Callable[[str], None] = lambda _: None
        self.on_spare: Callable[[], None] | None = None  # called once: the winner is found, and a slot is free
        sampler = study.sampler
        assert isinstance(sampler, CandidateSampler)
        self._sampler = sampler
        self._said_waiting: set[Path] = set()
        self._live: dict[int, Path] = {}  # trial number -> the folder of its attempt
        self._began = time.monotonic()
        self._told: dict[int, Trial] = {}  # finished trials, each read once
        self._ended: list[Trial] = []  # of them those before the first that is not finished
        prober = Prober(
            setup=self._setup, home=plan.probes_folder, values=plan.recipe.values, launcher=self._launcher,
            measured_steps=plan.measured_steps, meanwhile=self._keep_busy,
        )  # fmt: skip
        measured = not plan.device.startswith("sim:")  # a simulated probe says the same each time
        self._repeats = Repeats(study, sampler, prober) if measured else None

    def run(self) -> Stop:
        """Probe until a stop rule holds (trials, time, plateau, gain, empty space); returns that rule."""
        self._launcher.say = self.on_note
        with database_errors(self.plan.folder), self._alone():
            self._reconcile()
            while True:
                stop = self._fill(self.plan.parallel)
                if not self._live:
                    assert stop is not None
                    self._keep_the_rest()
                    return stop
                found = stop is not None and stop.kind in _FOUND and len(self._live) < self.plan.parallel
                if found and self.on_spare is not None:
                    self.on_spare()
                    self.on_spare = None
                self._wait_for_one()
                if self._repeats is not None and not self._out_of_time():
                    self._repeats.probe_doubted(self._trials, self.on_note)

    def _fill(self, slots: int) -> Stop | None:
        """Ask for probes until `slots` are at work; the reason to stop asking, if there is one."""
        stop = None
        while len(self._live) < slots and ((stop := self._enough()) is None or self._traces_front(stop)):
            self._ask()
        return stop

    def _traces_front(self, stop: Stop) -> bool:
        """True if a candidate predicted to be on the front is simulated next although the winner is found.

        Only where a probe is a simulation of seconds. One that is ahead of trials first, then the leanest: it says how
        little memory is enough.
        """
        done = [r for t in self._trials() if (r := t.result) is not None]
        quick = any(r.fidelity is Fidelity.PREDICTED and (r.process_s or math.inf) < _QUICK_S for r in done)
        traced = sum(bool(t.user_attrs.get(FOR_FRONT)) for t in self._frozen())
        known = self.plan.predictions is not None and self.plan.predictions.sure  # a simulation would say the same
        if stop.kind not in _FOUND or not quick or known or traced >= FRONT_TRIALS:
            return False
        ahead = self._sampler.ahead(self.study)
        costs = [cost(trial) for trial in measured(self._trials())]
        beaten = {place: sum(s >= step_s and u >= used for s, u in costs) for place, step_s, used in ahead}
        if ahead:
            self._sampler.wanted = min(ahead, key=lambda one: (-beaten[one[0]], one[2]))[0]
        return bool(ahead)

    def _keep_the_rest(self) -> None:
        """Keep with the study the number of excluded candidates, and the unprobed candidates on its front."""
        space, candidates = self.plan.space, self._sampler.grid.candidates
        ahead = [
            Foreseen(
                name=f"p{number}", tier=space.tier(candidates[place]), changes=space.changes(candidates[place]),
                step_s=step_s, device_used_bytes=round(used), params=space.params(candidates[place]),
                yaml_changes=space.yaml_changes(candidates[place]), needs=space.packages(candidates[place]),
            ).to_json()
            for number, (place, step_s, used) in enumerate(self._sampler.ahead(self.study), start=1)
        ]  # fmt: skip
        cloud, screened = self._sampler.cloud(self.study), self._sampler.read(self.study).screened
        keep_record(
            self.study,
            replace(
                record_of(self.study), screened=screened, foreseen=ahead,
                predicted=None if cloud is None else cloud.to_json(),
            ),
        )  # fmt: skip

    def _keep_busy(self) -> None:
        """While a probe is repeated, in a slot of its own: tell the results that came, and fill the other slots."""
        told = [self._conclude(number, folder) for number, folder in list(self._live.items())]
        if any(told):
            self._fill(self.plan.parallel - 1)

    def interrupt(self) -> None:
        """Stop the running probes; their trials wait in the queue for the next run."""
        with database_errors(self.plan.folder):
            running = {frozen.number for frozen in self._frozen() if frozen.state is TrialState.RUNNING}
            for number in running & set(self._live):
                self._launcher.cancel(self._live[number])
                result = self._launcher.result(self._live[number])
                if result is not None and result.status is not ProbeStatus.LOST:  # answered just before
                    tell(self.study, number, result, target_bytes=self.plan.limit_bytes)
            for frozen in self._frozen():
                if frozen.state is TrialState.RUNNING:
                    requeue(self.study, frozen)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the caller holds the study's lock, as its only writer."""
        storage = self.study._storage
        return storage.alone() if isinstance(storage, SoleWriter) else contextlib.nullcontext()

    # -- asking -----------------------------------------------------------------------------------------------------

    def _frozen(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _trials(self) -> tuple[Trial, ...]:
        """All trials as plain values; each finished trial is converted only once."""
        still = self._open(self._frozen())
        trials = [*self._ended, *map(self._plain, still)]
        for number, again in ({} if self._repeats is None else repeats(self.study)).items():
            trials[number] = trials[number].repeated(again)
        return tuple(trials)

    def _open(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """The last of all `trials`, from the first unfinished one on."""
        ended = self._ended
        while len(ended) < len(trials) and trials[len(ended)].state.is_finished():
            ended.append(self._plain(trials[len(ended)]))
            self._told.pop(len(ended) - 1, None)
        return trials[len(ended) :]

    def _plain(self, frozen: FrozenTrial) -> Trial:
        if not frozen.state.is_finished():
            return to_trial(frozen)
        if frozen.number not in self._told:
            self._told[frozen.number] = to_trial(frozen)
        return self._told[frozen.number]

    def _out_of_time(self) -> bool:
        return self.plan.budget_s is not None and time.monotonic() - self._began > self.plan.budget_s

    def _enough(self) -> Stop | None:
        """The reason to stop asking for trials, if there is one."""
        plan, frozen = self.plan, self._frozen()
        waiting = [t for t in self._open(frozen) if not t.state.is_finished() and t.number not in self._live]
        for lost in waiting:  # made twice: the database was away between its commit and its answer
            if lost.state is TrialState.RUNNING:
                requeue(self.study, lost)
        if self._out_of_time():
            return Stop(StopKind.BUDGET, f"the time budget of {plan.budget_s:.0f} s is spent")
        if waiting:
            return None
        if _all_broken(frozen):
            return Stop(StopKind.BROKEN, "no probe ran to its end")
        if plan.max_trials is not None and len(frozen) >= plan.max_trials:
            return Stop(StopKind.TRIALS, f"{len(frozen)} of {plan.max_trials} trials are done")
        if plan.plateau_trials is not None:
            since = since_improvement(self._trials(), goal=plan.goal, target_bytes=plan.limit_bytes)
            if since >= plan.plateau_trials:
                return Stop(StopKind.PLATEAU, f"the last {plan.plateau_trials} trials did not improve on the winner")
        return self._sampler.worth_another(self.study, min_gain_frac=plan.min_gain_frac if frozen else None)

    def _ask(self) -> None:
        for_front = self._sampler.wanted is not None
        trial = self.study.ask(self._sampler.distributions())
        space = self.plan.space
        candidate = space.candidate(trial.params)
        yaml_changes = space.yaml_changes(candidate)
        note_candidate(
            trial, tier=space.tier(candidate), changes=space.changes(candidate), yaml_changes=yaml_changes,
            needs=space.packages(candidate), for_front=for_front,
        )  # fmt: skip
        folder = self._attempts(trial.number).new_folder()
        self._live[trial.number] = folder  # before it starts: Ctrl-C comes the moment that it has
        self._launcher.submit(self._setup.request(folder, merge(self.plan.recipe.values, yaml_changes)))

    def _attempts(self, number: int) -> Attempts:
        return Attempts(home=self.plan.probes_folder, name=f"trial-{number:04d}")

    # -- telling ----------------------------------------------------------------------------------------------------

    def _wait_for_one(self) -> None:
        shown = 0.0
        while True:
            for number, folder in list(self._live.items()):
                if self._conclude(number, folder):
                    return
                if folder not in self._said_waiting and (what := self._launcher.waits_for(folder)) is not None:
                    self._said_waiting.add(folder)
                    self.on_note(f"trial {number} waits for {what}")
            if self.on_progress is not None and time.monotonic() - shown > _SHOW_S:
                self.on_progress(self._progress())
                shown = time.monotonic()
            time.sleep(self._launcher.poll_s)

    def _conclude(self, number: int, folder: Path) -> bool:
        """Tell the result of trial `number` if there is one; True if the trial has freed its probe slot."""
        result = self._launcher.result(folder)
        if result is None:
            return False
        follows = what_next(result, folder, **self._attempts(number).counted())
        if follows is not Next.KEEP:
            requeue(self.study, self._frozen()[number])
            del self._live[number]
            if follows is Next.MEND:
                raise to_mend(result, folder)
            return True
        tell(self.study, number, result, target_bytes=self.plan.limit_bytes)
        del self._live[number]  # told: a Ctrl-C from here on must not tell it again
        for left in ("job", "checkpoints"):  # checkpoints: of a probe that was killed
            shutil.rmtree(folder / left, ignore_errors=True)
        self.on_told(to_trial(self._frozen()[number]))
        return True

    def _reconcile(self) -> None:
        """Handle trials that an earlier run left RUNNING: attach to live probes, tell answers, requeue lost ones."""
        for frozen in self._frozen():
            if frozen.state is not TrialState.RUNNING:
                continue
            attempts = self._attempts(frozen.number).folders()
            result = self._launcher.result(attempts[-1]) if attempts else None
            if attempts and result is None:
                self._live[frozen.number] = attempts[-1]
            elif result is not None and (result.wall_s is not None or result.status is not ProbeStatus.LOST):
                self._live[frozen.number] = attempts[-1]
                self._conclude(frozen.number, attempts[-1])
            else:
                requeue(self.study, frozen)

    def _progress(self) -> SearchProgress:
        trials = self._trials()
        elapsed_s = time.monotonic() - self._began
        done = [t for t in trials if t.result is not None]
        walls = [t.result.wall_s for t in done if t.result is not None and t.result.wall_s is not None]
        left_s = None
        if walls and self.plan.max_trials is not None:
            left_s = sum(walls) / len(walls) * max(0, self.plan.max_trials - len(done)) / self.plan.parallel
        if self.plan.budget_s is not None:
            left_s = min(left_s or self.plan.budget_s, max(0.0, self.plan.budget_s - elapsed_s))
        return SearchProgress(
            trials=trials, probing=tuple(t for t in trials if t.number in self._live),
            best=winner(trials, goal=self.plan.goal, target_bytes=self.plan.limit_bytes), elapsed_s=elapsed_s,
            left_s=left_s,
        )  # fmt: skip


def _all_broken(frozen: list[FrozenTrial]) -> bool:
    """True if all finished probes (at least two) failed: then the recipe or the machine is broken."""
    if any(t.state is TrialState.COMPLETE for t in frozen):
        return False
    finished = [t for t in frozen if t.state.is_finished()]
    return len(finished) >= _BROKEN_TRIALS and all(t.state is TrialState.FAIL for t in finished)


def since_improvement(trials: Sequence[Trial], *, goal: Goal = "speed", target_bytes: int | None = None) -> int:
    """Number of trials finished since the winner last improved by more than 1 % or in tier; 0 before the first fit."""
    best: Trial | None = None
    since = 0
    for trial in trials:
        if trial.result is None:
            continue
        since += 1
        new = winner([trial] if best is None else [best, trial], goal=goal, target_bytes=target_bytes)
        if new is not None and new is not best and (best is None or _clearly_better(new, best, goal)):
            best, since = new, 0
    return since if best is not None else 0


def _clearly_better(new: Trial, best: Trial, goal: Goal) -> bool:
    if new.tier != best.tier or goal == "utilisation":
        return True
    if goal == "memory":
        return (new.device_used_bytes or 0) < (1 - _GAIN) * (best.device_used_bytes or 0)
    return (new.step_s or 0) < (1 - _GAIN) * (best.step_s or 0)


# -- the confirmation of the winner -----------------------------------------------------------------------------------

MEASURED_STEPS = 5
_EVERY_S = 20.0


def confirm(
    plan: Plan, study: optuna.Study, *, server_socket: str | None, launcher: Launcher | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Probe the finalist; if it fails, probe the next one. Skipped on a simulated card: results are the same.

    Safe to interrupt or kill: a second call reads the probes that ended, attaches to the running one, or starts it
    again.
    """
    if plan.device.startswith("sim:"):
        return
    with database_errors(plan.folder):
        _Confirmation(plan, study, server_socket, launcher or Launcher(), say).run()


class _Confirmation:
    """Starts the longer probes of a study's finalists, and finds those that an earlier run of the command started."""

    def __init__(
        self, plan: Plan, study: optuna.Study, server_socket: str | None, launcher: Launcher, say: Callable[[str], None]
    ) -> None:
        self._plan, self._study, self._say = plan, study, say
        self._steps = max(MEASURED_STEPS, plan.measured_steps)
        self._prober = Prober(
            setup=plan.setup(server_socket=server_socket), home=plan.probes_folder, values=plan.recipe.values,
            launcher=launcher, measured_steps=self._steps, meanwhile=self._say_still,
        )  # fmt: skip
        self._probing, self._began, self._said_at = "", 0.0, 0.0  # for whom a probe is, and the times on the clock

    def run(self) -> None:
        rule = Rule(goal=self._plan.goal, target_bytes=self._plan.limit_bytes)
        while (trial := finalist(trials := trials_of(self._study), rule)) is not None:
            base = compared_with(trials, self._plan.goal) if trial.changes else None
            how = "" if base is None else ", in turns with the recipe as it is"
            self._say(f"confirming trial {trial.number}: {self._steps} steps, saved and resumed, under a hard cap{how}")
            sure = self._alone(trial) if base is None else self._in_turns(trial, base)
            if sure is None:
                killed = f"the confirmation of trial {trial.number} was killed"
                self._say(f"{killed}; run the same command again to repeat it")
                return
            self._say(confirmation_note([sure], rule))

    def _alone(self, trial: Trial) -> Trial | None:
        """`trial` with its confirmation, one probe; None if that was killed."""
        result = self._probe(trial, f"confirm-{trial.number:04d}", f"trial {trial.number}")
        return None if result is None else self._kept(trial, result)

    def _in_turns(self, trial: Trial, base: Trial) -> Trial | None:
        """`trial` with its confirmation and its comparison with `base`, from as many pairs of probes as that takes.

        The order changes from pair to pair. If a probe of either fails, that one is returned with its failure. None if
        a probe was killed. The comparison is kept last: without it, a second call reads all the probes again.
        """
        ours, theirs = list[ProbeResult](), list[ProbeResult]()
        comparison = Comparison(pairs=(), searched=_pair(base.result, trial.result))
        while comparison.faster is None:
            number = len(comparison.pairs) + 1
            turns = (base, trial, theirs), (trial, base, ours)
            for one, other, results in turns if number % 2 else turns[::-1]:
                whose = f"trial {trial.number}" if one is trial else "the recipe as it is"
                name = f"confirm-{one.number:04d}-with-{other.number:04d}-{number:02d}"
                result = self._probe(one, name, f"{whose} for pair {number}")
                if result is None:
                    return None
                if result.status is not ProbeStatus.FIT:
                    return self._kept(one, result)
                results.append(result)
            pair = _pair(theirs[-1], ours[-1])
            comparison = replace(comparison, pairs=(*comparison.pairs, pair))
            self._say(
                f"pair {number}: {format_seconds(pair.baseline_s)} a step for the recipe as it is, "
                f"{format_seconds(pair.finalist_s)} for trial {trial.number}: {pair.speedup:.2f}x"
            )
        self._kept(base, _fastest(theirs))
        sure = self._kept(trial, _fastest(ours))
        keep_comparison(self._study, trial.number, comparison)
        return replace(sure, comparison=comparison)

    def _probe(self, trial: Trial, name: str, whose: str) -> ProbeResult | None:
        self._probing, self._began = whose, time.monotonic()
        self._said_at = self._began
        return self._prober.probe(trial, name)

    def _say_still(self) -> None:
        """Report the probe in progress if it takes long: a job may wait in a queue, or import for a minute."""
        now = time.monotonic()
        if now - self._said_at >= _EVERY_S:
            self._said_at = now
            self._say(f"still probing {self._probing}, for {format_seconds(now - self._began)}")

    def _kept(self, trial: Trial, result: ProbeResult) -> Trial:
        keep_confirmation(self._study, trial.number, result)
        return replace(trial, confirmed=result)


def _fastest(results: Sequence[ProbeResult]) -> ProbeResult:
    """The least disturbed of `results`, all of them of one config."""
    return min(results, key=lambda r: r.fastest_step_s or 0.0)


def _pair(baseline: ProbeResult | None, finalist: ProbeResult | None) -> Pair:
    """The pair of two probes that fitted."""
    assert baseline is not None
    assert finalist is not None
    assert baseline.fastest_step_s is not None
    assert finalist.fastest_step_s is not None
    return Pair(baseline_s=baseline.fastest_step_s, finalist_s=finalist.fastest_step_s)
