"""The confirmation run: a longer probe of the winner under the target as a hard cap, with a checkpoint resumed.

If a finalist fails, the next one is probed. The study keeps every result, so no confirmation is repeated.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna

from autofit.probing.launch import Attempts, Launcher, Next, no_space_left, what_next
from autofit.probing.result import ProbeResult
from autofit.recipe.recipe import merge
from autofit.tuning.frontier import Rule, Trial, finalist
from autofit.tuning.record import keep_confirmation
from autofit.tuning.search import Plan
from autofit.tuning.sentences import confirmation_note
from autofit.tuning.study import database_errors, database_path, trials_of

MEASURED_STEPS = 5
_POLL_S = 0.03


def confirm(
    plan: Plan, study: optuna.Study, *, server_socket: str | None, launcher: Launcher | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Probe the finalist; if it fails, probe the next one. Does nothing on a simulated card: results would not change.

    Safe to interrupt or kill: a second call attaches to the running probe, or starts it again.
    """
    if plan.device.startswith("sim:"):
        return
    rule = Rule(goal=plan.goal, target_bytes=plan.limit_bytes)
    prober = _Prober(plan, server_socket, launcher or Launcher())
    with database_errors(database_path(plan.folder)):
        while (trial := finalist(trials_of(study), rule)) is not None:
            say(f"confirming trial {trial.number}: {prober.measured_steps} steps, saved and resumed, under a hard cap")
            result = prober.probe(trial, merge(plan.recipe.values, trial.yaml_changes))
            if result is None:
                say(f"the confirmation of trial {trial.number} was killed; run the same command again to repeat it")
                return
            keep_confirmation(study, trial.number, result)
            say(confirmation_note([replace(trial, confirmed=result)], rule))


class _Prober:
    """Starts the longer probes of a plan, and finds the probes that an earlier run of the command started."""

    def __init__(self, plan: Plan, server_socket: str | None, launcher: Launcher) -> None:
        self._setup, self._launcher = plan.setup(server_socket=server_socket), launcher
        self._home = plan.probes_folder
        self.measured_steps = max(MEASURED_STEPS, plan.measured_steps)

    def probe(self, trial: Trial, values: dict[str, object]) -> ProbeResult | None:
        """The result of the probe; None if every attempt was killed."""
        attempts = Attempts(home=self._home, name=f"confirm-{trial.number:04d}")
        earlier = attempts.folders()
        folder = earlier[-1] if earlier else self._start(attempts, values)
        started = 0 if earlier else 1  # by this run of the command
        while True:
            result = self._wait(folder)
            follows = what_next(result, folder, attempts=started)
            if follows is Next.FREE_SPACE and started:
                raise no_space_left(folder)
            if follows is Next.KEEP:
                return None if result.was_killed else result
            folder, started = self._start(attempts, values), started + 1

    def _wait(self, folder: Path) -> ProbeResult:
        try:
            while (result := self._launcher.result(folder)) is None:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self._launcher.cancel(folder)
            raise
        return result

    def _start(self, attempts: Attempts, values: dict[str, object]) -> Path:
        folder = attempts.new_folder()
        self._launcher.submit(self._setup.request(folder, values, measured_steps=self.measured_steps))
        return folder
