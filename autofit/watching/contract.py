"""The contract of a full run: its promise beside its figures, whether it is kept, and the protocol of watchers.

A probe trains on the longest sample, so its seconds and bytes are those of the slowest and largest step: a run whose
samples are shorter is faster and smaller, and keeps the promise. Seconds are broken where they exceed the promised ones
by more than the stated noise: two standard deviations of the difference of two probes (autofit/tuning/comparison.py)
where they were measured, the upper end of the 90 % interval where they were predicted. Bytes must stay under the limit.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from autofit.hardware.hardware import card_of
from autofit.probing.result import Fidelity, ProbeResult
from autofit.tuning.comparison import NOISE_FRAC
from autofit.units import format_bytes, format_seconds
from autofit.watching.events import PROGRESS, EventKind, RunEvent, events_of, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The search's promise for a trial's full run; None is "unknown"."""

    device_name: str
    fidelity: str  # measured, or predicted on a simulated card
    device_used_bytes: int | None
    limit_bytes: int | None  # the target less the headroom
    step_s: float | None  # median seconds of an optimizer step; the mean where steps are not alike
    samples_per_s: float | None  # completions, where the trainer generates
    effective_batch_size: int | None
    proof: str = ""  # the gradient proof, as a sentence
    log_error: float | None = None  # predicted: half the width of the 90 % interval of the seconds, in logarithms
    steps_alike: bool = True  # False: a rollout serves several optimizer steps, so only some of them generate

    @classmethod
    def of(
        cls, figures: ProbeResult, *, limit_bytes: int | None, effective_batch_size: int | None, proof: str
    ) -> "Promise":
        """Expectations of the full run that follow from the probe or confirmation run `figures`."""
        alike = figures.steps_are_alike or not figures.step_s
        step_s = figures.median_step_s if alike else mean(figures.step_s)
        samples = figures.completions_per_step
        return cls(
            device_name=figures.device_name, fidelity=figures.fidelity, device_used_bytes=figures.device_used_bytes,
            limit_bytes=limit_bytes, step_s=step_s, samples_per_s=samples / step_s if samples and step_s else None,
            effective_batch_size=effective_batch_size, proof=proof, log_error=figures.log_error, steps_alike=alike,
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Promise":
        return cls(**content)  # type: ignore[arg-type]


Figure = float | int | str | None
_SIMULATED = " (simulated)"  # the end of a simulated card's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A promised figure beside the actual one. `kept` is None if they are incomparable; the text says why."""

    key: str  # device_used_bytes, step_s, samples_per_s, effective_batch_size or proof
    what: str  # the same in words
    promised: Figure
    actual: Figure
    kept: bool | None
    promised_text: str
    actual_text: str

    @property
    def text(self) -> str:
        """Both figures in one clause, or the reason why they are left uncompared."""
        if self.key == "proof" and self.kept is not None:
            return self.actual_text
        actual, promised = _short(self.key, self.actual), _short(self.key, self.promised)
        if self.kept is None:
            return f"{self.what}, {self.actual_text}"
        return f"{self.what} {actual}" + ("" if actual == promised else f" ({promised} promised)")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Row":
        return cls(**content)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    """Figures of a run so far; None is "not measured"."""

    device: str  # cpu or cuda
    device_name: str = ""
    generates: bool = False
    step_s: Sequence[float] = ()  # without the first step of each start
    samples_per_step: int | None = None  # of all ranks, as a probe's
    effective_batch_size: int | None = None  # of all ranks
    batch_text: str = ""  # the factors of the effective batch
    device_used_bytes: int | None = None
    host_rss_bytes: int | None = None
    rescues: tuple[str, ...] = ()  # changes after an OOM, a sentence each
    same_gradient: bool = True  # False: a rescue went to a tier below neutral
    of_trial: bool = True  # False: a script of one's own, whose recipe was not compared with the trial's


def contract_of(folder: Path) -> tuple[Row, ...] | None:
    """The rows of the run in `folder`, up to its last logged step, or those of its verdict; None if unpromised."""
    events = events_of(folder)
    last = next((e for e in reversed(events) if e.kind is EventKind.VERDICT and "rows" in e.data), None)
    if last is not None:
        return tuple(Row.from_json(row) for row in cast("list[dict[str, object]]", last.data["rows"]))
    started = [e for e in events if e.kind is EventKind.PROMISE and "promise" in e.data]
    if not started:
        return None
    promise = Promise.from_json(cast("dict[str, object]", started[-1].data["promise"]))
    return contract(promise, actual_of(started[-1].data, read_lines(folder / PROGRESS), events))


def verdict_of(folder: Path) -> str:
    """The verdict of the run in `folder` as a sentence; "" before it ends, and for an unpromised run."""
    return next((e.text for e in reversed(events_of(folder)) if e.kind is EventKind.VERDICT), "")


def actual_of(
    start: Mapping[str, object], lines: Sequence[Mapping[str, object]], events: Sequence[RunEvent]
) -> "Actual":
    """Figures of a run: `start` is the data of the event of its start, `lines` are its logged steps."""
    firsts = {e.step + 1 for e in events if e.kind is EventKind.PROMISE and "promise" in e.data}
    rescues = [e for e in events if e.kind is EventKind.RESCUE]
    return Actual(
        device=str(start["device"]), device_name=str(start["device_name"]), generates=bool(start["generates"]),
        samples_per_step=cast("int | None", start["samples_per_step"]), batch_text=str(start["batch_text"]),
        effective_batch_size=cast("int | None", start["effective_batch_size"]),
        step_s=[float(str(line["step_s"])) for line in lines if "step_s" in line and line.get("step") not in firsts],
        device_used_bytes=_most(lines, "device_used_bytes"), host_rss_bytes=_most(lines, "host_rss_bytes"),
        rescues=tuple(e.text for e in rescues), of_trial=bool(start.get("of_trial", True)),
        same_gradient=all(e.data.get("tier", "neutral") == "neutral" for e in rescues),
    )  # fmt: skip


def _most(lines: Sequence[Mapping[str, object]], key: str) -> int | None:
    return max((int(str(line[key])) for line in lines if line.get(key) is not None), default=None)


def contract(promise: Promise, actual: Actual) -> tuple[Row, ...]:
    """The rows of a run: device-used, seconds of a step, samples a second, effective batch, gradient proof."""
    return (
        _bytes_row(promise, actual), *_speed_rows(promise, actual), _batch_row(promise, actual),
        _proof_row(promise, actual),
    )  # fmt: skip


def verdict(rows: Sequence[Row], rescues: Sequence[str] = ()) -> str:
    """One sentence: whether the promise was kept, with both figures of every row, and the rescues on the way."""
    broken, kept, unknown = (
        "; ".join(row.text for row in rows if row.kept is wanted) for wanted in (False, True, None)
    )
    said = [
        (f"the promise is broken: {broken}", broken), (f"{'kept' if broken else 'the promise is kept'}: {kept}", kept),
        (f"not compared: {unknown}", unknown), (f"rescued from {len(rescues)} OOM(s): {'; '.join(rescues)}", rescues),
    ]  # fmt: skip
    return ". ".join(text for text, there in said if there)


def step_bound_frac(promise: Promise) -> float:
    """By which share a step may be slower than promised before the promise is broken."""
    return NOISE_FRAC if promise.log_error is None else math.exp(promise.log_error) - 1


def elsewhere(promise: Promise, actual: Actual) -> str:
    """Reason why the run's bytes and seconds are incomparable: the promise is for another device. "" if comparable."""
    promised, own = promise.device_name.removesuffix(_SIMULATED), actual.device_name or actual.device
    if actual.device == "cuda" and promise.fidelity == Fidelity.PREDICTED:
        card, _ = card_of(own)
        own = own if card is None else card.full_name
    return "" if promised == own else f"the promise is for {promise.device_name}, the run is on {own}"


def _bytes_row(promise: Promise, actual: Actual) -> Row:
    promised, limit, used = promise.device_used_bytes, promise.limit_bytes, actual.device_used_bytes
    most = limit if limit is not None else promised
    why = elsewhere(promise, actual)
    kept = None if why or used is None or most is None else used <= most
    limit_text = "" if limit is None else f" (limit {format_bytes(limit)})"
    return Row(
        key="device_used_bytes", what="device-used", promised=promised, actual=used, kept=kept,
        promised_text=_or_none(promised, format_bytes) + limit_text,
        actual_text=_unmeasured_bytes(actual) if used is None else _said(format_bytes(used), why),
    )  # fmt: skip


def _unmeasured_bytes(actual: Actual) -> str:
    if actual.device != "cpu":
        return "not measured"
    rss = actual.host_rss_bytes
    held = "" if rss is None else f" (the whole process held {format_bytes(rss)} resident, libraries included)"
    return f"not measured on the CPU{held}"


def _speed_rows(promise: Promise, actual: Actual) -> tuple[Row, Row]:
    typical = median if promise.steps_alike else mean  # as the promise states them
    step_s = typical(actual.step_s) if actual.step_s else None
    why, more = elsewhere(promise, actual), 1 + step_bound_frac(promise)
    kept = None
    if not why and step_s is not None and promise.step_s is not None:
        kept = step_s <= more * promise.step_s
    word = "completions" if actual.generates else "samples"
    per_s = None if step_s is None or actual.samples_per_step is None else actual.samples_per_step / step_s
    return (
        Row(key="step_s", what="step", promised=promise.step_s, actual=step_s, kept=kept,
            promised_text=_or_none(promise.step_s, lambda s: f"{seconds_text(s)} (at most {seconds_text(more * s)})"),
            actual_text=_said(_or_none(step_s, seconds_text, "no step after the first"), why)),
        Row(key="samples_per_s", what=f"{word}/s", promised=promise.samples_per_s, actual=per_s,
            kept=None if per_s is None else kept,
            promised_text=_or_none(promise.samples_per_s, lambda v: f"{v:.2f} (at least {v / more:.2f})"),
            actual_text=_said(_or_none(per_s, lambda v: f"{v:.2f}", "no step after the first"), why)),
    )  # fmt: skip


def _batch_row(promise: Promise, actual: Actual) -> Row:
    promised, own = promise.effective_batch_size, actual.effective_batch_size
    factors = f" ({actual.batch_text})" if actual.batch_text and own is not None else ""
    return Row(
        key="effective_batch_size", what="effective batch", promised=promised, actual=own,
        kept=None if promised is None or own is None else promised == own,
        promised_text=_or_none(promised, str), actual_text=f"{_or_none(own, str)}{factors}",
    )  # fmt: skip


def _proof_row(promise: Promise, actual: Actual) -> Row:
    """The proof is of the trial's recipe, so the run keeps it until a rescue leaves the neutral tier."""
    kept: bool | None = actual.same_gradient
    text = "the same gradient after neutral rescues" if actual.rescues else "the same recipe"
    if not actual.same_gradient:
        text = "changed by a rescue of a lower tier"
    elif not actual.of_trial or not promise.proof:
        kept, text = None, "unknown: a script's recipe is its own" if promise.proof else "nothing was proven"
    return Row(
        key="proof", what="gradient", promised=promise.proof, actual=text, kept=kept,
        promised_text=promise.proof or "no proof", actual_text=text,
    )  # fmt: skip


def _said(text: str, why: str) -> str:
    return f"{text}, not compared: {why}" if why else text


def _short(key: str, figure: Figure) -> str:
    if figure is None or isinstance(figure, str):
        return figure or "unknown"
    if key == "device_used_bytes":
        return format_bytes(int(figure))
    return {"step_s": seconds_text(figure), "samples_per_s": f"{figure:.2f}"}.get(key, str(figure))


def seconds_text(seconds: float) -> str:
    """Seconds with three digits below ten, so that a bound of a few percent is seen."""
    return f"{seconds:.3g} s" if seconds < 10 else format_seconds(seconds)


def _or_none(value: float | None, text: Callable[[Any], str], none: str = "unknown") -> str:
    return none if value is None else text(value)


# -- those who look at a run while it trains --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Facts of a run when its training begins."""

    folder: Path | None  # where its own files are; None for a user's own script
    trainer: str  # grpo, sft, ..., or the name of a trainer of one's own
    values: Mapping[str, object]  # the recipe; of a user's script, its arguments
    device: str  # cpu or cuda
    generates: bool
    samples_per_step: int  # of one rank
    first_step: int  # optimizer steps that an earlier start finished
    last_step: int
    promise: Promise | None = None
    lines: tuple[Mapping[str, object], ...] = ()  # of the steps that an earlier start logged
    hf_trainer: Any = None  # the transformers.Trainer, where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One finished optimizer step. Bytes are since the run began; None is "not measured"."""

    number: int  # from 1
    step_s: float
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None


class Watcher:
    """Methods that emit no event; a watcher overrides some of them, and is cheap: at most 1 % of a step
    for all watchers together."""

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """Training begins, for the first time or after a resume."""
        return ()

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        """Called after every optimizer step."""
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        """Figures that it adds to a logged line, before the line is kept and `logs` gets it."""
        return {}

    def logs(self, line: Mapping[str, object]) -> Iterable[RunEvent]:
        """Called with each logged line: step, max_steps, step_s, and the trainer's metrics."""
        return ()

    def ends(self) -> Iterable[RunEvent]:
        """The last step is finished."""
        return ()
