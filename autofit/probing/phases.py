"""The phases of a training: the current one, and the peak and seconds of each."""

from collections import defaultdict
from pathlib import Path

from autofit.plugin.protocol import LOAD, OPTIMIZER, UPDATE, Report
from autofit.probing.memory import Memory
from autofit.probing.result import PhasePeak


class Recorder:
    """Records the current phase of the probe, the peak of each phase, and its seconds in the measured steps."""

    def __init__(self, memory: Memory, phase_path: Path) -> None:
        self._memory = memory
        self._phase_path = phase_path
        self._entered = memory.now_s()
        self.phase = LOAD
        self.peaks: list[PhasePeak] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        phase_path.write_text(self.phase)

    def enter(self, phase: str) -> str:
        """Switch to `phase`; returns the previous phase."""
        now, left = self._memory.now_s(), self.phase
        self.peaks.append(self._memory.switch(left, phase))
        self.seconds[left] += now - self._entered
        self._entered, self.phase = now, phase
        if phase != left:
            self._phase_path.write_text(phase)
        return left


class Followed(Report):
    """A run's report that passes its phases to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def enter(self, phase: str) -> str:
        return self.recorder.enter(phase)

    def step_begins(self, step: int) -> None:
        self.recorder.enter(UPDATE)

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.recorder.enter(OPTIMIZER)

    def optimizer_ends(self) -> None:
        self.recorder.enter(UPDATE)
