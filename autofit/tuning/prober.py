"""One more probe of a trial that the study has: a confirmation, or a repeat. Found again after a crash by its name."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.probing.launch import Attempts, Launcher, Next, to_mend, what_next
from autofit.probing.result import ProbeResult, ProbeSetup
from autofit.recipe.recipe import merge
from autofit.tuning.frontier import Trial


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
