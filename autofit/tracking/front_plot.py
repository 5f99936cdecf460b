"""The plot of a study's front: device-used against step time. No MLflow here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from autofit.probing.result import ProbeStatus

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(Protocol):
    """A trial, as far as it is drawn."""

    @property
    def number(self) -> int: ...
    @property
    def status(self) -> ProbeStatus | None: ...
    @property
    def fits(self) -> bool: ...
    @property
    def step_s(self) -> float | None: ...
    @property
    def device_used_bytes(self) -> int | None: ...


def front_figure(
    trials: Sequence[Point], front: Sequence[Point], base: Point | None, target_bytes: int | None
) -> "Figure":
    """Device-used (GB) against step time (s): fits, OOMs at their lower bound, the front, the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    fits = [t for t in trials if t.fits and t.step_s is not None]
    ooms = [t for t in trials if t.status is ProbeStatus.OOM and t.device_used_bytes]
    axes.scatter([t.step_s or 0 for t in fits], [_gb(t) for t in fits], label="fit", zorder=3)
    right = max([t.step_s or 0 for t in fits], default=1.0)
    if ooms:
        axes.scatter([right] * len(ooms), [_gb(t) for t in ooms], marker="x", color="tab:red", label="oom (at least)")
    axes.step([t.step_s or 0 for t in front], [_gb(t) for t in front], where="post", alpha=0.6, label="Pareto front")
    baseline = None if base is None else base.number
    shown = {t.number: t for t in (*front, *(t for t in fits if t.number == baseline))}
    for number, trial in shown.items():
        name = "baseline" if number == baseline else str(number)
        axes.annotate(name, (trial.step_s or 0, _gb(trial)), textcoords="offset points", xytext=(5, 5))
    if target_bytes:
        axes.axhline(target_bytes / 1e9, color="tab:red", linestyle="--", linewidth=1, label="target")
    axes.set(xlabel="step time (s)", ylabel="device-used (GB)")
    axes.legend()
    return figure


def _gb(trial: Point) -> float:
    return (trial.device_used_bytes or 0) / 1e9
