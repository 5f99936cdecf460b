"""Progress of a run: seconds left, tokens a second, memory, and levels and trends of its logged lines."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt
from statistics import median

from autofit.units import format_bytes, format_seconds
from autofit.watching.contract import Watched, Watcher
from autofit.watching.events import RunEvent

# -- levels and trends of a noisy series ------------------------------------------------------------------------------

_LEAST_POINTS = 8  # below it, even a perfectly rising series is little evidence
_SURE = 2.0  # standard deviations of Kendall's S: about 1 in 20 for noise
_GROWTH_WINDOW = 64  # steps that are looked at for growth; a longer window is thinned to every second step
_LEAST_STEPS = 24  # before growth can be told
_EVERY = 8  # steps between two looks
_SURE_GROWTH = 3.29  # normal quantile of one false alarm in 2,000 looks, for the rank test of Mann and Kendall


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The direction of a series of points (x, y)."""

    slope: float  # y per unit of x: the median slope of all pairs (Theil and Sen)
    z: float  # Kendall's S over its standard deviation under pure noise; its sign is the direction

    @property
    def rises(self) -> bool:
        return self.z > _SURE

    @property
    def falls(self) -> bool:
        return self.z < -_SURE

    @property
    def is_flat(self) -> bool:
        """True if noise alone could look like this."""
        return not (self.rises or self.falls)


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of 8 or more `points`, in the order of x, else None. Its time grows with the square of the points."""
    found = _slope_and_score(points) if len(points) >= _LEAST_POINTS else None
    return None if found is None else Trend(slope=found[0], z=found[1] / _deviation(len(points)))


def _slope_and_score(points: Sequence[tuple[float, float]]) -> tuple[float, int] | None:
    """(the median slope of all pairs, Kendall's S); None if all points are of the same x."""
    import numpy as np  # ten times as fast here, and 0.1 s to load, which a command that shows no trend does not pay

    x, y = np.array(points, dtype=float).T
    first, second = np.triu_indices(len(points), 1)
    rises, runs = y[second] - y[first], x[second] - x[first]
    apart = runs != 0
    if not apart.any():  # the same step, logged again and again
        return None
    return float(np.median(rises[apart] / runs[apart])), int(np.sign(rises).sum())


def _deviation(n: int) -> float:
    """The standard deviation of Kendall's S of `n` points of pure noise."""
    return sqrt(n * (n - 1) * (2 * n + 5) / 18)


class Growth:
    """Amount held at the end of each step, and its growth: told apart from noise, and from a single filling up."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []  # (step, held)
        self._every = 1
        self._count = 0

    def add(self, step: int, held: int) -> None:
        """Add the amount held after `step`, in bytes or any other unit."""
        self._count += 1
        if self._count % self._every:
            return
        self._points.append((step, held))
        if len(self._points) > _GROWTH_WINDOW:
            self._points, self._every = self._points[1::2], 2 * self._every

    @property
    def is_due(self) -> bool:
        """True if enough is new since the last look."""
        return len(self._points) >= _LEAST_STEPS and self._count % (_EVERY * self._every) == 0

    def growth(self) -> float | None:
        """The amount a step by which the held amount grows, if it surely does.

        The median slope of all steps and of both halves by themselves: the least of the three, so memory that grows
        and then stays counts as none.
        """
        count, half = len(self._points), len(self._points) // 2
        found = _slope_and_score(self._points) if count >= _LEAST_STEPS else None
        if found is None or (found[1] - 1) / _deviation(count) < _SURE_GROWTH:  # less 1: S is a whole number
            return None
        halves = (_slope_and_score(part) for part in (self._points[:half], self._points[half:]))
        least = min(found[0], *(part[0] for part in halves if part is not None))
        return least if least > 0 else None


def shift(before: Sequence[float], after: Sequence[float]) -> float:
    """Certainty that `after` is higher than `before`, in standard deviations of pure noise (Mann and Whitney's U)."""
    m, n, ordered = len(before), len(after), sorted(before)
    u = sum((bisect_left(ordered, a) + bisect_right(ordered, a)) / 2 for a in after)
    return (u - m * n / 2) / sqrt(m * n * (m + n + 1) / 12)


def memory(noise: Sequence[float]) -> float:
    """Factor by which a mean of `noise` scatters wider because each value resembles the one before: 1 if none does.

    From the correlation r of neighbours: sqrt((1 + r) / (1 - r)), as for noise of first order.
    """
    power = sum(value * value for value in noise)
    if power == 0:
        return 1.0
    r = min(0.9, max(0.0, sum(a * b for a, b in pairwise(noise)) / power))
    return sqrt((1 + r) / (1 - r))


_WINDOW = 50  # logged lines that are looked at: the trend of 50 points takes 0.3 ms
_EVERY_S = 0.5  # between two looks: they take 0.25 ms of CPU time, which a step of 30 ms would feel
_MEMORY = {  # the first that a line has; the host's memory stands for a device's on a CPU
    "device_used_bytes": "device-used", "peak_reserved_bytes": "peak reserved", "host_rss_bytes": "host memory",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """State of a run after its last logged line. None is "unknown", or "unknown yet"."""

    step: int
    last_step: int
    step_s: float | None = None  # median seconds from one step to the next, saves included
    eta_s: float | None = None  # seconds until the last step
    tokens_per_s: float | None = None  # as the trainer counts its tokens
    reward: float | None = None
    reward_trend_per_100: float | None = None  # change of the reward over 100 steps
    reward_is_flat: bool = False  # noise alone could give this trend
    memory_bytes: int | None = None
    memory_kind: str = ""  # device-used, peak reserved, or host memory (of a run on the CPU)


def progress_of(lines: Sequence[Mapping[str, object]]) -> RunProgress | None:
    """The progress of a run with the logged `lines`, oldest first, if there are any."""
    if not lines:
        return None
    recent, last = [*lines][-_WINDOW:], lines[-1]
    timed = _of_this_start(recent)
    kind = next((key for key in _MEMORY if last.get(key) is not None), None)
    rewards = [(float(_whole(line, "step")), _number(line, "reward")) for line in recent]
    found = trend([(step, reward) for step, reward in rewards if reward is not None])
    return RunProgress(
        step=_whole(last, "step"), last_step=_whole(last, "max_steps"), step_s=_step_s(timed), eta_s=_eta_s(timed),
        tokens_per_s=_tokens_per_s(timed), reward=_number(last, "reward"),
        reward_trend_per_100=None if found is None else 100 * found.slope,
        reward_is_flat=found is not None and found.is_flat,
        memory_bytes=None if kind is None else _whole(last, kind), memory_kind=_MEMORY.get(kind or "", ""),
    )  # fmt: skip


class ProgressWatcher(Watcher):
    """Adds the seconds left, the tokens a second and the reward's trend (0: within noise) to each logged line."""

    def __init__(self) -> None:
        self._lines: deque[Mapping[str, object]] = deque(maxlen=_WINDOW)
        self._looked_at, self._shown = -_EVERY_S, dict[str, object]()

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        self._lines.extend(run.lines)
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        """The figures as of half a second ago at most."""
        self._lines.append(line)
        if _clock(line) - self._looked_at >= _EVERY_S:
            self._looked_at, self._shown = _clock(line), _figures(self._lines)
        return self._shown


def _figures(lines: Sequence[Mapping[str, object]]) -> dict[str, object]:
    now = progress_of(lines)
    assert now is not None
    slope = 0.0 if now.reward_is_flat else now.reward_trend_per_100
    shown = {"eta_s": now.eta_s, "tokens_per_s": now.tokens_per_s, "reward_trend_per_100": slope}
    return {key: value for key, value in shown.items() if value is not None}


def progress_words(line: Mapping[str, object]) -> list[str]:
    """Progress in a logged line of a watched run: reward's trend, tokens/s, memory, time left."""
    slope, tokens, eta = (_number(line, key) for key in ("reward_trend_per_100", "tokens_per_s", "eta_s"))
    words = [] if slope is None else [f"reward {_direction(slope)}"]
    words += [] if tokens is None else [f"{tokens:.4g} tokens/s"]
    words += [f"{format_bytes(_whole(line, key))} {_MEMORY[key]}" for key in _MEMORY if line.get(key) is not None][:1]
    return words + ([] if not eta else [f"{format_seconds(eta)} left"])


def _direction(slope: float) -> str:
    return "flat" if slope == 0 else f"{'rising' if slope > 0 else 'falling'} {abs(slope):.2g} per 100 steps"


def _of_this_start(lines: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """The lines since the run was last started or resumed."""
    kept: list[Mapping[str, object]] = []
    for line in lines:
        if kept and _clock(line) <= _clock(kept[-1]):
            kept = []
        kept.append(line)
    return kept


def _clock(line: Mapping[str, object]) -> float:
    """Seconds since training began in this start; the time of day in lines that lack them."""
    return _number(line, "run_s") or _number(line, "time") or 0.0


def _step_s(lines: Sequence[Mapping[str, object]]) -> float | None:
    each = [
        (_clock(b) - _clock(a)) / (_whole(b, "step") - _whole(a, "step"))
        for a, b in pairwise(lines)
        if _whole(b, "step") > _whole(a, "step")
    ]
    return median(each) if each else None


def _eta_s(lines: Sequence[Mapping[str, object]]) -> float | None:
    """The mean step's seconds times the steps left: a mean counts saves, and rollouts that serve several steps."""
    steps = _whole(lines[-1], "step") - _whole(lines[0], "step")
    if steps <= 0:
        return None
    step_s = (_clock(lines[-1]) - _clock(lines[0])) / steps
    return step_s * max(0, _whole(lines[-1], "max_steps") - _whole(lines[-1], "step"))


def _tokens_per_s(lines: Sequence[Mapping[str, object]]) -> float | None:
    counted = [(_clock(line), tokens) for line in lines if (tokens := _number(line, "num_tokens")) is not None]
    if len(counted) < 2 or counted[-1][0] <= counted[0][0]:
        return None
    return (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])


def _number(line: Mapping[str, object], key: str) -> float | None:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _whole(line: Mapping[str, object], key: str) -> int:
    value = line.get(key)
    return int(value) if isinstance(value, int | float) else 0
