"""The winner is probed once more: longer, under the target as a hard cap, saving and resuming a checkpoint.

A finalist that fails falls to the next one. What was said is kept in the study, so it is not asked again.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna

from autofit.errors import EnvironmentFault
from autofit.files import is_full
from autofit.hardware.hardware import slot_names
from autofit.probing.launch import Launcher
from autofit.probing.prepare import worst_case_path
from autofit.probing.result import NO_SPACE, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.recipe import merge
from autofit.tuning.frontier import Rule, Trial, finalist, rule_of
from autofit.tuning.search import Plan
from autofit.tuning.sentences import confirmation_note
from autofit.tuning.study import database_errors, database_path, keep_confirmation, trials_of

MEASURED_STEPS = 5
_POLL_S = 0.03
_ATTEMPTS = 2  # a probe that was killed is tried once more


def confirm(
    plan: Plan, study: optuna.Study, *, server_socket: str | None, launcher: Launcher | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Probe the finalist, and the next while one falls. A simulated card would say the same again: it is not asked.

    May be interrupted or killed anywhere: run again, it attaches to the probe at work, or starts it anew.
    """
    if plan.device.startswith("sim:"):
        return
    rule = Rule(goal=plan.goal, target_bytes=plan.limit_bytes)
    prober = _Prober(plan, server_socket, launcher or Launcher())
    with database_errors(database_path(plan.folder)):
        while (trial := finalist(trials_of(study), rule)) is not None:
            say(f"confirming trial {trial.number}: {prober.measured_steps} steps, saved and resumed, under a hard cap")
            yaml_changes = study.get_trials(deepcopy=False)[trial.number].user_attrs["yaml_changes"]
            result = prober.probe(trial, merge(plan.recipe.values, yaml_changes))
            if result is None:
                say(f"the confirmation of trial {trial.number} was killed; run the same command again to repeat it")
                return
            keep_confirmation(study, trial.number, result)
            say(confirmation_note([replace(trial, confirmed=result)], rule_of(study.user_attrs)))


class _Prober:
    """Starts the longer probes of a plan, and finds again what an earlier run of the command started."""

    def __init__(self, plan: Plan, server_socket: str | None, launcher: Launcher) -> None:
        self._plan, self._server_socket, self._launcher = plan, server_socket, launcher
        self.measured_steps = max(MEASURED_STEPS, plan.measured_steps)

    def probe(self, trial: Trial, values: dict[str, object]) -> ProbeResult | None:
        """What the probe said; None when it was killed each time."""
        earlier = self._attempts(trial.number)
        folder = earlier[-1] if earlier else self._start(trial.number, values)
        started = 0 if earlier else 1
        while True:
            result = self._wait(folder)
            disk_full = result.reason.startswith(NO_SPACE) or (result.status is ProbeStatus.LOST and is_full(folder))
            if disk_full and started:
                raise EnvironmentFault(f"{NO_SPACE} in {folder}; free some and run the same command again")
            killed = result.status is ProbeStatus.LOST and "deadline" not in result.reason
            if not killed and not disk_full:
                return result
            if started == _ATTEMPTS:
                return None
            folder, started = self._start(trial.number, values), started + 1

    def _wait(self, folder: Path) -> ProbeResult:
        try:
            while (result := self._launcher.result(folder)) is None:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            self._launcher.cancel(folder)
            raise
        return result

    def _attempts(self, number: int) -> list[Path]:
        folders = self._plan.probes_folder.glob(f"confirm-{number:04d}-*")
        return sorted(folders, key=lambda f: int(f.name.rsplit("-", 1)[1]))

    def _start(self, number: int, values: dict[str, object]) -> Path:
        plan = self._plan
        folder = plan.probes_folder / f"confirm-{number:04d}-{len(self._attempts(number)) + 1}"
        request = ProbeRequest(
            folder=folder, trainer=plan.recipe.trainer, values=values, device=plan.device,
            limit_bytes=plan.limit_bytes, worst_case=worst_case_path(plan.probes_folder),
            measured_steps=self.measured_steps, server_socket=self._server_socket,
            deadline_s=plan.deadline_s * self.measured_steps / plan.measured_steps,
            slots=slot_names(plan.device, plan.parallel),
        )  # fmt: skip
        folder.mkdir(parents=True)
        self._launcher.submit(request)
        return folder
