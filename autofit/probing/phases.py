"""The phases of a training: the current one, and the peak and seconds of each."""

from collections import defaultdict
from pathlib import Path

from autofit.hardware.nvml import CardState
from autofit.plugin.protocol import BEFORE_UPDATE, LOAD, OPTIMIZER, SCORING, UPDATE, Control, Report, Run
from autofit.probing.memory import Memory
from autofit.probing.result import PhasePeak


class PhaseRecorder:
    """Records the current phase of the probe, the peak of each phase, and its seconds in the measured steps."""

    def __init__(self, memory: Memory, phase_path: Path) -> None:
        self._memory = memory
        self._phase_path = phase_path
        self._entered = memory.now_s()
        self.phase = LOAD
        self.peaks: list[PhasePeak] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.latest_s: defaultdict[str, float] = defaultdict(float)  # of each phase's last visit alone
        phase_path.write_text(self.phase)

    def enter(self, phase: str) -> str:
        """Switch to `phase`; returns the previous phase."""
        now, left = self._memory.now_s(), self.phase
        self.peaks.append(self._memory.switch(left, phase))
        self.latest_s[left] = now - self._entered
        self.seconds[left] += self.latest_s[left]
        self._entered, self.phase = now, phase
        if phase != left:
            self._phase_path.write_text(phase)
        return left


class Followed(Report):
    """A run's report that passes its phases to a recorder."""

    def __init__(self, recorder: PhaseRecorder) -> None:
        self.recorder = recorder

    def enter(self, phase: str) -> str:
        return self.recorder.enter(phase)

    def step_begins(self, step: int) -> None:
        self.recorder.enter(UPDATE)

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.recorder.enter(OPTIMIZER)

    def optimizer_ends(self) -> None:
        self.recorder.enter(UPDATE)


# The clock of a probe's measured steps.


class StepClock(Followed):
    """Measures the seconds of each optimizer step after number `measure_after`, where memory tracking stops.

    Stops the training after `round_of` measured steps, or after the first multiple of them that took long enough.

    Seconds of scoring done before training (DPO's reference) are distributed: each step gets its share of the last one,
    as the first of a process also loads kernels.
    """

    def __init__(self, run: Run, recorder: PhaseRecorder, memory: Memory, *, measure_after: int, round_of: int) -> None:
        super().__init__(recorder)
        self._run, self._memory, self._measure_after, self._round_of = run, memory, measure_after, round_of
        self.step_s: list[float] = []
        self.sync_s: tuple[float, ...] = ()  # counted with the rollout
        self.rollout_s: list[float] = []
        self.update_s: list[float] = []
        self.card_states: list[CardState] = []
        self._began: float | None = None
        self._share_s = 0.0

    def train_begins(self) -> None:
        self._share_s = self.recorder.latest_s[SCORING] * self._run.scoring_share

    def step_begins(self, step: int) -> None:
        super().step_begins(step)
        if step >= self._measure_after:
            self._memory.stop()
            self._began = self._memory.now_s()
            self.recorder.enter(UPDATE)  # anew, so that the step holds every second of its phases
            self.recorder.seconds.clear()

    def step_ends(self, step: int) -> Control:
        if self._began is not None:
            seconds = self.recorder.seconds
            self.recorder.enter(UPDATE)
            self.step_s.append(self._memory.now_s() - self._began + self._share_s)
            self.rollout_s.append(sum(seconds[phase] for phase in BEFORE_UPDATE) + self._share_s)
            self.update_s.append(seconds[UPDATE] + seconds[OPTIMIZER])
            state = self._memory.card_state()
            self.card_states += [state] if state is not None else []
        return Control(stop=self._is_done)

    @property
    def _is_done(self) -> bool:
        whole_rounds = self.step_s and len(self.step_s) % self._round_of == 0
        return bool(whole_rounds) and sum(self.step_s) >= self._memory.least_measured_s
