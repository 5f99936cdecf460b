"""A machine that is busy with other work half of the time, on a clock of its own: a search takes milliseconds."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import optuna
from search_driver import plan

from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.tuning.frontier import Trial
from autofit.tuning.search import confirm
from autofit.tuning.study import note_candidate, tell, trials_of

_KEY = "logging_steps"  # tells the candidates apart
_OVERHEAD_S = 3.0  # of a probe, besides its steps
_NOISE = 0.02  # standard deviation of a step's seconds without other work, as a share


class Machine:
    """Idle and busy for stretches of random length, `stretch_s` on average; busy it is `slowdown` times slower."""

    def __init__(self, seed: int, *, stretch_s: float, slowdown: float = 2.0, varies: bool = False) -> None:
        self._random = random.Random(seed)
        self._stretch_s, self._slowdown, self._varies = stretch_s, slowdown, varies
        self._now_s = self._until_s = 0.0
        self._busy = self._random.random() < 0.5
        self._next_stretch()

    def _next_stretch(self) -> None:
        self._busy = not self._busy
        self._until_s += self._random.expovariate(1 / self._stretch_s)
        most = 2 * self._slowdown - 1
        slowdown = self._random.uniform(1, most) if self._varies else self._slowdown
        self._factor = slowdown if self._busy else 1.0

    def run(self, idle_s: float) -> float:
        """The seconds that work of `idle_s` on an idle machine takes now."""
        began_s = self._now_s
        while self._now_s + idle_s * self._factor > self._until_s:
            idle_s -= (self._until_s - self._now_s) / self._factor
            self._now_s = self._until_s
            self._next_stretch()
        self._now_s += idle_s * self._factor
        return self._now_s - began_s

    def probe(self, step_s: float, *, steps: int) -> ProbeResult:
        """A probe of `steps` measured steps that take `step_s` on an idle machine."""
        self.run(_OVERHEAD_S + 2 * step_s)
        times = tuple(self.run(step_s * self._random.gauss(1.0, _NOISE)) for _ in range(steps))
        return ProbeResult(status=ProbeStatus.FIT, device="cpu", device_used_bytes=10**8, step_s=times,
                           completions_per_step=16, wall_s=1.0)  # fmt: skip


class _On(Launcher):
    """Answers each probe at once, as the machine says."""

    def __init__(self, machine: Machine, steps_s: Sequence[float]) -> None:
        self._machine, self._steps_s, self.probes = machine, steps_s, 0

    def submit(self, request: ProbeRequest) -> None:
        self.probes += 1
        step_s = self._steps_s[int(str(request.values[_KEY]))]
        write_json(request.answer_path, self._machine.probe(step_s, steps=request.measured_steps).to_json())


def search_on(machine: Machine, folder: Path, steps_s: Sequence[float]) -> tuple[list[Trial], int]:
    """(trials, probes of the confirmation): candidates probed in their order, the baseline first, then confirmed.

    `steps_s` are the seconds of a step on an idle machine.
    """
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=optuna.samplers.RandomSampler(seed=0))
    for number, step_s in enumerate(steps_s):
        changes = {_KEY: number} if number else {}
        note_candidate(study.ask(), tier="neutral", changes=changes, yaml_changes=changes)
        tell(study, number, machine.probe(step_s, steps=2), target_bytes=None)
    launcher = _On(machine, steps_s)
    wanted = plan(folder, len(steps_s))
    wanted = replace(wanted, target_bytes=None, recipe=replace(wanted.recipe, values={**wanted.recipe.values, _KEY: 0}))
    confirm(wanted, study, server_socket=None, launcher=launcher)
    return trials_of(study), launcher.probes
