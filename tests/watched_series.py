"""Full runs as series of logged lines with a law: healthy ones, and the same broken from a step on."""

import random
from collections.abc import Callable, Mapping
from math import exp

from autofit.watching.contract import Watched
from autofit.watching.events import RunEvent
from autofit.watching.guards import GuardWatcher
from autofit.watching.thresholds import StatedGuards, read_guards

Line = dict[str, object]
Break = Callable[[int, Line], Mapping[str, object]]  # of a step's line since the step of the break


def watched(*, generates: bool = True, lines: list[Line] | None = None, trainer: object = None) -> Watched:
    return Watched(
        folder=None, trainer="grpo" if generates else "sft", values={}, device="cpu", generates=generates,
        samples_per_step=32, first_step=len(lines or []), last_step=400, lines=tuple(lines or []), hf_trainer=trainer,
    )  # fmt: skip


def grpo_line(step: int, draw: random.Random) -> Line:
    """A step of a healthy GRPO run: reward rises by 0.3 in 400 steps, KL levels off at 0.05, 1 % of answers are cut."""
    cut = sum(draw.random() < 0.01 for _ in range(32)) / 32
    return {
        "step": step, "max_steps": 400, "loss": draw.gauss(0, 0.02), "grad_norm": exp(draw.gauss(-1, 0.4)),
        "reward": 0.3 + 0.3 * step / 400 + draw.gauss(0, 0.05),
        "kl": 0.05 * (1 - exp(-step / 60)) + draw.gauss(0, 0.004),
        "completions/mean_length": draw.gauss(180, 25), "completions/clipped_ratio": cut,
        "frac_reward_zero_std": sum(draw.random() < 0.25 for _ in range(4)) / 4, "entropy": draw.gauss(1, 0.1),
        "rewards/judge/mean": draw.gauss(0.5, 0.1), "rewards/judge/seconds": (s := abs(draw.gauss(1, 0.3))),
        "rewards/judge/seconds_frac": s / 10,
    }  # fmt: skip


def sft_line(step: int, draw: random.Random) -> Line:
    """A step of a healthy SFT run: the loss falls from 2 to 1."""
    loss = 1 + exp(-step / 80) + draw.gauss(0, 0.1)
    return {"step": step, "max_steps": 400, "loss": loss, "grad_norm": exp(draw.gauss(0, 0.4)),
            "accuracy": min(1.0, 0.5 + step / 500 + draw.gauss(0, 0.1))}  # fmt: skip


def series(
    seed: int, *, generates: bool = True, steps: int = 400, at: int = 0, breaks: Break | None = None
) -> list[Line]:
    """A run of `steps` steps, broken from step `at` on."""
    draw = random.Random(seed)
    lines = [(grpo_line if generates else sft_line)(step, draw) for step in range(1, steps + 1)]
    broken = breaks or (lambda step, line: {})
    return [{**line, **(broken(n, line) if n >= at else {})} for n, line in enumerate(lines, start=1)]


def events(lines: list[Line], *, generates: bool = True, guards: StatedGuards | None = None) -> list[RunEvent]:
    watcher = GuardWatcher(read_guards(guards))
    list(watcher.begins(watched(generates=generates)))
    return [event for line in lines for event in watcher.logs(line)]
