"""Pictures for MLflow and reports: a study's front with every predicted candidate, and a step. Free of MLflow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from autofit.forecast.predictions import Cloud
from autofit.forecast.step_picture import memory_figure
from autofit.probing.launch import Attempts
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.tuning.frontier import Foreseen, Trial, baseline, common_front, winner
from autofit.tuning.record import StudyRecord
from autofit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROOM = 1.3  # the picture ends this far above the target and the slowest probe; candidates beyond are counted
_LOG_FROM = 8.0  # ratio of the slowest to the fastest step from which the time axis is logarithmic


class FrontPoint(Protocol):
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
    @property
    def stopped_at_oom(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPicture:
    """Content of a front's picture."""

    trials: Sequence[FrontPoint]
    front: Sequence[FrontPoint] = ()
    foreseen: Sequence[Foreseen] = ()  # on the front too, predicted
    winner: FrontPoint | None = None
    baseline: FrontPoint | None = None
    target_bytes: int | None = None
    predicted: Cloud | None = None
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The ends of the axes: all probes and the target are within; far candidates lie outside."""

    left_s: float
    right_s: float
    top_bytes: float
    timeless: bool  # whether no probe and no candidate has a step time
    bars: tuple[int, ...]  # the trials without a step time, which stand in a strip beside the axis

    @classmethod
    def of(cls, picture: FrontPicture) -> "Frame":
        cloud = picture.predicted or Cloud(candidates=0, device_used_bytes=(), step_s=())
        known = [t.step_s for t in picture.trials if t.step_s is not None] or [*cloud.step_s]
        known += [one.step_s for one in picture.foreseen]
        timed = known or [1.0]
        held = [t.device_used_bytes for t in picture.trials if t.device_used_bytes] or [*cloud.device_used_bytes]
        bars = tuple(t.number for t in picture.trials if is_bar(t))
        top = max([*held, picture.target_bytes or 0])
        return cls(
            left_s=0.94 * min(timed + sorted(cloud.step_s)[:1]), right_s=_end(max(timed), cloud.step_s),
            top_bytes=_ROOM * top if bars else _end(top or 10**9, cloud.device_used_bytes), bars=bars,
            timeless=not known,
        )  # fmt: skip

    def holds(self, used_bytes: int, step_s: float) -> bool:
        return used_bytes <= self.top_bytes and step_s <= self.right_s

    @property
    def unit(self) -> str:
        return "GB" if self.top_bytes >= 10**9 else "MB"

    def amount(self, count: float | None) -> float:
        """Bytes in the picture's unit."""
        return (count or 0) / (10**9 if self.unit == "GB" else 10**6)

    def place(self, trial: FrontPoint) -> tuple[float, float]:
        """Position of a trial: its seconds and amount, or its bar's lower end."""
        x = trial.step_s or 0.0
        if trial.number in self.bars:
            left, right = self.strip
            x = left + (right - left) * (self.bars.index(trial.number) + 0.5) / len(self.bars)
        return x, self.amount(trial.device_used_bytes)

    def places(self, trials: Sequence[FrontPoint]) -> tuple[list[float], list[float]]:
        """The same of several, as two columns."""
        return columns([self.place(t) for t in trials])

    @property
    def logarithmic(self) -> bool:
        return self.left_s > 0 and self.right_s / self.left_s > _LOG_FROM

    @property
    def strip(self) -> tuple[float, float]:
        """(left, right) of the strip for trials that lack a step time."""
        if self.logarithmic:
            return self.right_s, self.right_s * (self.right_s / self.left_s) ** 0.08
        return self.right_s, self.right_s + 0.08 * (self.right_s - self.left_s)

    def fit(self, axes: Any) -> None:
        if self.logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if self.timeless:
            axes.set_xticks([])
        right = self.strip[1] if self.bars else self.right_s
        axes.set(xlim=(self.left_s, right), ylim=(0, self.amount(self.top_bytes)))


def _end(largest: float, predicted: Sequence[float]) -> float:
    """End of an axis: beyond `largest`, with candidates up to _ROOM times as far."""
    return 1.06 * max([largest, *(value for value in predicted if value <= _ROOM * largest)])


def ran_out(trial: FrontPoint) -> bool:
    return trial.status is ProbeStatus.OOM and bool(trial.device_used_bytes)


def is_bar(trial: FrontPoint) -> bool:
    return ran_out(trial) and (trial.step_s is None or trial.stopped_at_oom)


def columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# Okabe and Ito's colours, which most people who see colours differently can tell apart.
_BLUE, _GREEN, _RED, _ORANGE, _GREY = "#0072B2", "#009E73", "#D55E00", "#E69F00", "#808080"
_CLOSE_POINTS = 14  # a trial's number is left out where another label is nearer (1/72 inch)


def study_figure(study: str, trials: Sequence[Trial], record: StudyRecord) -> "Figure":
    """The picture of a study as it is kept."""
    probed = [t.result for t in trials if t.result is not None]
    title = title_of(
        study, record.resolved, trainer=record.trainer, device=probed[0].device_name or record.device if probed else "",
        fidelity=str(probed[0].fidelity) if probed else "",
    )  # fmt: skip
    front, ahead = common_front(trials, record.points_ahead)
    return front_figure(
        FrontPicture(trials=trials, front=front, foreseen=ahead, winner=winner(trials, **record.rule),
                baseline=baseline(trials), target_bytes=record.target_bytes,
                predicted=Cloud.from_json(record.predicted), title=title)
    )  # fmt: skip


def title_of(study: str, original: Mapping[str, object], *, trainer: str, device: str, fidelity: str) -> str:
    """Two lines: model, trainer, card, and whether the probes were measured or predicted; then the study."""
    model = PurePath(str(original.get("model_name_or_path") or "")).name
    head = " ".join(filter(None, (model, trainer.upper() if ":" not in trainer else trainer)))
    where = f"{head or study} on {device}" if device else head or study
    return f"{where}: {fidelity}\n{study}" if fidelity else f"{where}\n{study}"


def front_figure(picture: FrontPicture) -> "Figure":
    """Device-used (GB) against step time (s): candidates, trials, the front, the winner, the baseline, the target.

    An OOM whose whole need is not known is a bar upwards from the bytes that it held, beside the time axis: it has no
    step time.
    """
    from autofit.picture import Picture

    figure = Picture(figsize=(9, 5.6), layout="constrained")
    axes = figure.subplots()
    frame = Frame.of(picture)
    beyond = _candidates(axes, picture.predicted, frame)
    _trials(axes, picture, frame)
    _target(axes, picture.target_bytes, frame)
    frame.fit(axes)
    _names(axes, picture, frame)
    head, _, study = picture.title.partition("\n")
    axes.set_title(_plain(head), fontsize=12, loc="left", pad=20)
    below = "; ".join(filter(None, (_plain(study), *_counts(picture, beyond))))
    axes.text(0, 1.015, below, transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    axes.set(xlabel="seconds of an optimizer step", ylabel=f"device-used ({frame.unit})")
    axes.grid(visible=True, alpha=0.25)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    return figure


def _plain(text: str) -> str:
    """`text` with dollar signs escaped for matplotlib."""
    return text.replace("$", r"\$")


# -- what is drawn ----------------------------------------------------------------------------------------------------


def _candidates(axes: Any, cloud: Cloud | None, frame: Frame) -> int:
    """Draw the predictions; returns how many of its points are outside the picture."""
    if cloud is None:
        return 0
    points = list(zip(cloud.step_s, cloud.device_used_bytes, strict=True))
    shown = [(step_s, frame.amount(used)) for step_s, used in points if frame.holds(used, step_s)]
    axes.scatter(*columns(shown), s=10, color=_GREY, alpha=0.6, linewidths=0, label="candidates, predicted", zorder=1)
    return len(points) - len(shown)


def _trials(axes: Any, picture: FrontPicture, frame: Frame) -> None:
    fits = [t for t in picture.trials if t.fits and t.step_s is not None]
    whole = [t for t in picture.trials if ran_out(t) and not is_bar(t)]
    bars = [t for t in picture.trials if is_bar(t)]
    if fits:
        axes.scatter(*frame.places(fits), s=34, color=_BLUE, label="probed, fits", zorder=4)
    if whole:
        axes.scatter(*frame.places(whole), s=42, marker="x", color=_RED, label="out of memory", zorder=4)
    if bars:
        _bars(axes, bars, frame)
    ahead = [(one.step_s, frame.amount(one.device_used_bytes)) for one in picture.foreseen]
    if ahead:
        axes.scatter(
            *columns(ahead), s=34, facecolors="white", edgecolors=_BLUE, label="predicted, on the front", zorder=4
        )
    front = sorted([*map(frame.place, picture.front), *ahead])
    if len(front) > 1:
        axes.step(*columns(front), where="post", color=_BLUE, alpha=0.6, label="Pareto front", zorder=3)


def _bars(axes: Any, trials: Sequence[FrontPoint], frame: Frame) -> None:
    """A bar upwards from the bytes that each trial held when memory ran out."""
    axes.axvspan(*frame.strip, color=_RED, alpha=0.06, zorder=0)
    for trial in trials:
        x, y = frame.place(trial)
        label = "out of memory, needs at least" if trial is trials[0] else None
        axes.plot([x, x], [y, frame.amount(frame.top_bytes)], color=_RED, linewidth=1.6, label=label, zorder=4)
        axes.plot([x], [y], marker="_", markersize=7, color=_RED, zorder=4)


def _target(axes: Any, target_bytes: int | None, frame: Frame) -> None:
    if target_bytes:
        label = f"target {format_bytes(target_bytes)}"
        axes.axhline(frame.amount(target_bytes), color=_ORANGE, linestyle="--", linewidth=1.4, label=label, zorder=2)


# -- names ------------------------------------------------------------------------------------------------------------


def _names(axes: Any, picture: FrontPicture, frame: Frame) -> None:
    """Name the winner and the baseline, and number the front as far as there is room."""
    base, best = picture.baseline, picture.winner
    named: list[tuple[FrontPoint, str, str]] = []
    if best is not None and base is not None and best.number == base.number:
        named.append((best, f"the winner is the baseline (trial {best.number})", _GREEN))
    else:
        named += [] if best is None else [(best, f"winner: trial {best.number}", _GREEN)]
        named += [] if base is None else [(base, "baseline", "black")]
    shown = {trial.number for trial, _, _ in named}
    named += [(t, str(t.number), _BLUE) for t in picture.front if t.number not in shown]
    if best is not None and best.step_s is not None:
        axes.scatter(*frame.places([best]), s=150, facecolors="none", edgecolors=_GREEN, linewidths=2, zorder=5)
    _placed(
        axes, frame, [(t, text, colour) for t, text, colour in named if t.step_s is not None or t.number in frame.bars]
    )


def _placed(axes: Any, frame: Frame, named: Sequence[tuple[FrontPoint, str, str]]) -> None:
    """Write each name beside its trial, on the side where the picture has room; a number near another is left out."""
    from matplotlib.patheffects import withStroke

    taken: list[tuple[float, float]] = []
    for trial, text, colour in named:
        place = frame.place(trial)
        x, y = axes.transData.transform(place) * 72 / axes.figure.dpi
        near = any(abs(x - a) < _CLOSE_POINTS and abs(y - b) < _CLOSE_POINTS for a, b in taken)
        if near and text.isdigit():
            continue
        across, up = (5, 3) if text.isdigit() else (9, 7)  # a number is at its dot, a name clear of the winner's ring
        right = axes.transAxes.inverted().transform(axes.transData.transform(place))[0] < 0.6
        axes.annotate(
            text, place, textcoords="offset points", xytext=(across if right else -across, -13 if near else up),
            ha="left" if right else "right", fontsize=9, color=colour, weight="normal" if text.isdigit() else "bold",
            zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
        taken.append((x, y))


def _counts(picture: FrontPicture, beyond: int) -> list[str]:
    """Numbers of trials of each kind, and of predicted candidates."""
    states = [t.status for t in picture.trials if t.status is not None]
    parts = [f"{states.count(s)} {s}" for s in ProbeStatus if s in states]
    found = [f"{len(states)} probed: {', '.join(parts)}" if states else "nothing probed"]
    if picture.predicted is not None:
        cut = ", some beyond this picture" if beyond else ""
        found.append(f"{picture.predicted.candidates} candidates predicted{cut}")
    return found


# -- the step of a trial, as files for MLflow -------------------------------------------------------------------------


STEP_FILES = ("step.png", "step.svg")


def write_step(trial: Trial, record: StudyRecord, *, probes: Path, into: Path) -> list[Path]:
    """The files of the picture in the folder `into`; [] if all phases of the trial's step are unknown.

    The study keeps the peaks of each phase; how they came is in the answer in the study's folder of `probes`.
    """
    result = _with_course(trial, probes)
    if result is None or not result.phases:
        return []
    figure = memory_figure(result, record.target_bytes, what=f"trial {trial.number}")
    found = [into / name for name in STEP_FILES]
    for path in found:
        figure.savefig(path, dpi=110)
    return found


def _with_course(trial: Trial, probes: Path) -> ProbeResult | None:
    own = trial.before_confirmation.result
    for folder in reversed(Attempts(home=probes, name=f"trial-{trial.number:04d}").folders()):
        answer = ProbeResult.read(folder / "answer.json")
        if answer is not None and own is not None and answer.device_used_bytes == own.device_used_bytes:
            return answer
    return own
