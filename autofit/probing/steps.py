"""The clock of a probe's measured steps."""

from autofit.hardware.nvml import CardState
from autofit.plugin.protocol import BEFORE_UPDATE, OPTIMIZER, SCORING, UPDATE, Control, Run
from autofit.probing.memory import Memory
from autofit.probing.phases import Followed, Recorder


class StepClock(Followed):
    """Measures the seconds of each optimizer step after number `measure_after`, where memory tracking stops.

    Stops the training after `round_of` measured steps, or after the first multiple of them that took long enough.

    Seconds of scoring done once before training (DPO's reference) are distributed: each step gets its share.
    """

    def __init__(self, run: Run, recorder: Recorder, memory: Memory, *, measure_after: int, round_of: int) -> None:
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
        self._share_s = self.recorder.seconds[SCORING] * self._run.scoring_share

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
