"""Probes of a trial that the study has: repeats of those that other work on the machine slowed down.

A probe is doubted if its steps differ from each other by more than undisturbed ones do, or if it is slower than its
prediction and the other probes lead to expect: by more than `_DOUBT` standard deviations and `_SLOWER`. Other work
makes a probe slower and never faster (tuning.comparison), so only slow ones are doubted, the baseline's too: a slow
baseline is found out by the first probe after it. The faster of the two probes counts.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from autofit.probing.launch import Attempts, Launcher, Next, to_mend, what_next
from autofit.probing.result import ProbeResult, ProbeSetup
from autofit.recipe.recipe import merge
from autofit.tuning.acquisition import Model
from autofit.tuning.candidates import Ledger, Observation
from autofit.tuning.comparison import PROBE_NOISE, alike
from autofit.tuning.frontier import Trial
from autofit.tuning.record import keep_repeat
from autofit.tuning.sampler import CandidateSampler
from autofit.tuning.sentences import repeat_words
from autofit.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prober:
    """Probes trials with `measured_steps` steps, each under a name in the folder `home`."""

    setup: ProbeSetup
    home: Path
    values: Mapping[str, object]  # of the recipe
    launcher: Launcher
    measured_steps: int
    meanwhile: Callable[[], None] = lambda: None  # called between two looks at a probe

    def probe(self, trial: Trial, name: str) -> ProbeResult | None:
        """The result of the probe `name` of `trial`; None if every attempt was killed."""
        values = merge(self.values, trial.yaml_changes)
        attempts = Attempts(home=self.home, name=name)
        earlier = attempts.folders()
        folder = earlier[-1] if earlier else self._start(attempts, values)
        started = 0 if earlier else 1  # by this run of the command
        while True:
            result = self._wait(folder)
            follows = what_next(result, folder, **{**attempts.counted(), "attempts": started})
            if follows is Next.MEND and started:
                raise to_mend(result, folder)
            if follows is Next.KEEP:
                return None if result.was_killed else result
            folder, started = self._start(attempts, values), started + (not result.ended_with_job)

    def _wait(self, folder: Path) -> ProbeResult:
        try:
            while (result := self.launcher.result(folder)) is None:
                self.meanwhile()
                time.sleep(self.launcher.poll_s)
        except KeyboardInterrupt:
            self.launcher.cancel(folder)
            raise
        return result

    def _start(self, attempts: Attempts, values: dict[str, object]) -> Path:
        folder = attempts.new_folder()
        try:
            self.launcher.submit(self.setup.request(folder, values, measured_steps=self.measured_steps))
        except KeyboardInterrupt:
            self.launcher.cancel(folder)
            raise
        return folder


_DOUBT = 2.0
_SLOWER = 1.25  # times the expectation: less is not worth a probe
_LEAST_S = 0.3  # seconds: a smaller difference is not worth the start of a probe
_JUDGED = 12  # of so few timed probes each is judged; more than four times as many others are not looked at
_AGES = (1, 2, 5)  # which of more probes are judged, the newest being 1: each thrice, by ever more of those after it
_MOST = 4  # repeats of a study: on a machine that is always busy each probe would need one


@dataclass(frozen=True, slots=True)
class Doubt:
    """A trial whose probe is doubted, and why."""

    number: int
    words: str


class Repeats:
    """Finds the trials of a study to probe again, and probes them."""

    def __init__(self, study: optuna.Study, sampler: CandidateSampler, prober: Prober) -> None:
        self._study, self._sampler, self._prober = study, sampler, prober
        self._steady: set[int] = set()  # trials whose steps were found to be alike
        self._all_steady = 0  # every trial with a lower number is among them
        self._model = Model(sampler.grid, sampler.predictions, target_bytes=sampler.target_bytes)

    def probe_doubted(self, trials: Callable[[], tuple[Trial, ...]], say: Callable[[str], None]) -> None:
        """Probe doubted trials again, the most doubtful first, until all are settled or `_MOST` were probed."""
        failed: set[int] = set()
        while (doubt := self._doubt(trials(), failed)) is not None:
            trial = next(t for t in trials() if t.number == doubt.number)
            say(f"trial {trial.number} is probed again: {doubt.words}")
            again = self._prober.probe(trial, f"repeat-{trial.number:04d}")
            if again is None:  # killed: the next run of the command asks anew
                failed.add(trial.number)
                continue
            keep_repeat(self._study, trial.number, again)
            say(repeat_words(trial.repeated(again)))

    def _doubt(self, trials: tuple[Trial, ...], failed: Collection[int]) -> Doubt | None:
        ledger = self._sampler.read(self._study)
        if len(ledger.repeated) + len(failed) >= _MOST:
            return None
        done = ledger.repeated | set(failed)
        while self._all_steady in self._steady:
            self._all_steady += 1
        for trial in trials[self._all_steady :]:
            result = trial.result
            if trial.number in self._steady or trial.number in done or result is None:
                continue
            least_s, most_s = min(result.step_s, default=0.0), max(result.step_s, default=0.0)
            if not trial.fits or not result.steps_are_alike or alike(result.step_s) or most_s - least_s < _LEAST_S:
                self._steady.add(trial.number)
                continue
            words = f"its steps took {format_seconds(least_s)} to {format_seconds(most_s)}"
            return Doubt(trial.number, words)
        return self._slower_than_expected(ledger, done)

    def _slower_than_expected(self, ledger: Ledger, done: Collection[int]) -> Doubt | None:
        timed = [o for o in ledger.observations if o.step_s is not None]
        found: list[tuple[float, Doubt]] = []
        for told in timed if len(timed) <= _JUDGED else [timed[-age] for age in _AGES]:
            number = ledger.number_of(told)
            if number in done or not told.fits:
                continue
            others = [o for o in ledger.observations[-4 * _JUDGED :] if o is not told]
            if not self._model.predicted and len(timed) < 2:
                continue
            sure, doubt = self._judged(told, others)
            if doubt is not None:
                found.append((sure, Doubt(number, doubt)))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _judged(self, told: Observation, others: list[Observation]) -> tuple[float, str | None]:
        """(standard deviations above the expectation, sentence on it if the trial is doubted)."""
        assert told.step_s is not None
        self._model.learn(others, ())
        mean, spread = (float(v[0]) for v in self._model.log_step_at(np.array([told.place], dtype=np.intp)))
        above = math.log(told.step_s) - mean
        sure = above / math.hypot(spread, PROBE_NOISE)
        if sure < _DOUBT or above < math.log(_SLOWER) or told.step_s - math.exp(mean) < _LEAST_S:
            return sure, None
        source = "the other probes" if not self._model.predicted else "its prediction and the other probes"
        seconds = format_seconds(told.step_s)
        return sure, f"it took {seconds} a step, where {source} let {format_seconds(math.exp(mean))} be expected"
