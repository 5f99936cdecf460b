"""The phases of a training: which one is at work, its peak and its seconds."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from autofit.files import read_json
from autofit.probing.memory import Memory
from autofit.probing.result import PhasePeak

# What a probe turns off or sets in any recipe: reports, evaluation, pushes and plots cost neither peak nor step.
QUIET = {
    "report_to": "none", "push_to_hub": False, "eval_strategy": "no", "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "dataloader_num_workers": 0, "resume_from_checkpoint": None,
    "save_only_model": False, "load_best_model_at_end": False, "logging_strategy": "steps",
}  # fmt: skip

BEFORE_UPDATE = ("wake-up", "rollout", "scoring")  # phases that count as the rollout's seconds


class Recorder:
    """Which phase the probe is in, the peak of each, and the seconds of each in the measured steps."""

    def __init__(self, memory: Memory, phase_path: Path) -> None:
        self._memory = memory
        self._phase_path = phase_path
        self._entered = memory.now_s()
        self.phase = "load"
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

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        outer = self.enter(phase)
        yield  # no finally: after an error the phase is where it happened
        self.enter(outer)

    def wrap(self, target: object, method: str, phase: str) -> None:
        """Make `target.method` run within `phase`."""
        original: Callable[..., Any] = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.within(phase):
                return original(*args, **kwargs)

        setattr(target, method, timed)


def read_worst_case(path: Path) -> dict[str, Any]:
    """What is known of the longest sample (of the longest prompt, for GRPO), and `rows`, a dataset of it alone."""
    found = read_json(path)
    assert found is not None, path
    return {**found, "rows": load_from_disk(str(path.parent / "worst_row"))}


def owner_of(trainer: Any, path: str) -> tuple[Any, str]:
    """What has the method at the dotted `path` from the trainer, and its name; None where the trainer lacks it."""
    *parts, method = path.split(".")
    for part in parts:
        trainer = getattr(trainer, part, None)
    return trainer, method


def wrap_phases(trainer: Any, phases: Mapping[str, str], wrap: Callable[[object, str, str], None]) -> None:
    """Have `wrap` (object, method, phase) mark each method of `trainer` that is a phase of its own."""
    for path, phase in phases.items():
        owner, method = owner_of(trainer, path)
        if owner is not None:
            wrap(owner, method, phase)
