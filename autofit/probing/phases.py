"""The phases of a training: which one is at work, its peak and its seconds."""

from collections import defaultdict
from pathlib import Path

from autofit.plugin.protocol import LOAD, OPTIMIZER, ROLLOUT, SCORING, UPDATE, WAKE_UP, Report
from autofit.probing.memory import Memory
from autofit.probing.result import PhasePeak

BEFORE_UPDATE = (WAKE_UP, ROLLOUT, SCORING)  # phases that count as the rollout's seconds


class Recorder:
    """Which phase the probe is in, the peak of each, and the seconds of each in the measured steps."""

    def __init__(self, memory: Memory, phase_path: Path) -> None:
        self._memory = memory
        self._phase_path = phase_path
        self._entered = memory.now_s()
        self.phase = LOAD
        self.peaks: list[PhasePeak] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        phase_path.write_text(self.phase)

    def enter(self, phase: str) -> str:
        """Switch to `phase`; the phase that was left."""
        now, left = self._memory.now_s(), self.phase
        self.peaks.append(self._memory.switch(left, phase))
        self.seconds[left] += now - self._entered
        self._entered, self.phase = now, phase
        if phase != left:
            self._phase_path.write_text(phase)
        return left


class Followed(Report):
    """The report of a run whose phases a recorder follows."""

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
