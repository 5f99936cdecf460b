"""The confirmation: longer probes of the winner under the target as a hard cap, each with a checkpoint resumed.

For goal speed they are in turns with probes of the baseline, so that both meet the same machine. If a finalist fails or
is not clearly faster, the next one is probed. The study keeps every result, so no confirmation is repeated.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import optuna

from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.tuning.comparison import Comparison, Pair
from autofit.tuning.frontier import Rule, Trial, compared_with, finalist
from autofit.tuning.record import keep_comparison, keep_confirmation
from autofit.tuning.repeats import Prober
from autofit.tuning.search import Plan
from autofit.tuning.sentences import confirmation_note
from autofit.tuning.study import database_errors, trials_of
from autofit.units import format_seconds

MEASURED_STEPS = 5
_EVERY_S = 20.0


def confirm(
    plan: Plan, study: optuna.Study, *, server_socket: str | None, launcher: Launcher | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Probe the finalist; if it does not hold, probe the next one. Nothing on a simulated card: results are the same.

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
        """Say what is waited for where that takes long: a job may wait in a queue, or import for a minute."""
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
