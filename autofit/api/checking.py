"""`autofit.check`: whether one config runs on a card, in one line; for a test of one's own, and before a run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rich.table import Table

from autofit.api.arguments import named_as_arguments, seconds_or_none
from autofit.api.estimating import ADVICE_TIME, Asked, GivenLengths, Predicted, estimator, with_advice, with_typical
from autofit.api.events import Event, OnAdvice, OnEvent, keeping
from autofit.api.reading import Given
from autofit.forecast.advice import ending_words, float32_words, then_lines
from autofit.forecast.change import Change
from autofit.forecast.estimate import Crash, Estimator, crash_of
from autofit.forecast.margin import care_lines, is_safe, is_tight, most_used_bytes, shown_bytes, step_words, used_words
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.as_of import Then
from autofit.recipe.launching import launch_options
from autofit.units import format_bytes

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Predicted):
    """Whether a config runs on a card. `str` of it is the verdict in one line, and a line each of what mends it."""

    crash: Crash | None = None  # where it runs out of memory; None where it fits

    @classmethod
    def of(cls, made: Estimator, result: ProbeResult, then: Then | None = None) -> "Check":
        """What the `result` of an estimator's recipe says."""
        recipe, capacity = made.recipe, made.capacity_bytes
        return cls(
            recipe=recipe, device=made.device, capacity_bytes=capacity, result=result, then=then,
            crash=None if is_safe(result, capacity) else crash_of(result, recipe, capacity),
        )  # fmt: skip

    @property
    def mend(self) -> Change | None:
        """The first change that makes it fit with room to spare; None where none was found."""
        return next(iter(() if self.advice is None else self.advice.changes), None)

    @property
    def verdict(self) -> Verdict:
        """`tight`: it fits as predicted, with less to spare than the prediction may be off."""
        if self.result.status is not ProbeStatus.FIT:
            return "does not fit"
        return "tight" if is_tight(self.result, self.capacity_bytes) else "fits"

    @property
    def tight(self) -> bool:
        """Whether it fits with less to spare than the prediction may be off."""
        return self.verdict == "tight"

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit check --json` prints: plain values only."""
        shown, _ = shown_bytes(self.result, self.capacity_bytes)
        return {
            "verdict": self.verdict,
            "fits": self.fits,
            "tight": self.tight,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "device_used_bytes": self.result.device_used_bytes,
            "most_used_bytes": most_used_bytes(shown, self.device),
            "least_capacity_bytes": self.result.least_capacity_bytes,
            "step_s": self.result.median_step_s,
            "step_s_90": self.result.step_s_interval,
            "crash": None if self.crash is None else self.crash.to_json(),
            "float32_weights_bytes": self.recipe.weights_bytes if self._of_weights else None,
            "change": None if self.mend is None else self.mend.to_json(),
            "changes": [change.to_json() for change in (() if self.advice is None else self.advice.changes)],
            "advice_ended_by": None if self.advice is None or self.advice.ending is None else str(self.advice.ending),
            **({} if self.then is None else {"as_of": self.then.to_json()}),
            **({} if self.typical is None else {"typical": self.typical.to_json()}),
        }

    def parts(self) -> list[Table | str]:
        """The line, what decides where it is tight, why the weights take so much, and what to change."""
        older = then_lines(self.then, self.result, self.capacity_bytes)
        care = care_lines(self.result, self.recipe, self.capacity_bytes)
        return [self.line, *care, *self._of_weights, *older, *self.of_typical, *self.advice_parts(), *self.noted]

    @property
    def of_typical(self) -> list[str]:
        """Which steps fit where the worst case does not, in one line; [] where all do, none, or that is not known."""
        line = None if self.typical is None else self.typical.fit_line
        return [] if line is None else [line]

    @property
    def _of_weights(self) -> list[str]:
        return float32_words(self.recipe, self.result, self.capacity_bytes)

    @property
    def line(self) -> str:
        """The verdict and why, in short sentences; where it does not fit, the place where it stops."""
        if not self.fits and self.crash is not None:
            return f"does not fit: {self.crash.where}{self._over(self.crash)}"
        where = "" if self.crash is None else f", in {self.crash.where}"
        return f"{self.verdict}: {used_words(self.result, self.capacity_bytes, where)}{step_words(self.result)}"

    def _over(self, crash: Crash) -> str:
        """By how much it does not fit: that is so at the peak of all phases, which may come after it has stopped."""
        if self.result.least_capacity_bytes is None:  # it stopped before all was asked for
            return f"; {self.result.reason}" if self.result.reason else ""
        over = f"{format_bytes(crash.over_bytes)} over"
        phases = {phase.name: phase.peak_allocated_bytes for phase in self.result.phases}
        last = max(phases, key=lambda name: phases[name], default=crash.phase)
        return f", {over}" if last == crash.phase else f"; {over} at the peak, in {last}"

    def advice_parts(self) -> list[str]:
        """What to change, a line each; [] where it fits, or nothing was looked for."""
        if self.advice is None:
            return []
        lines = [
            f"{_setting(change)}: {format_bytes(change.shown_bytes)}{change.step_words}"
            for change in self.advice.changes
        ]
        if not lines and not self.advice.came_too_late:
            tried = "was found" if self.advice.ending else "that was tried makes it fit with room to spare"
            closest = self.advice.closest
            near = "" if closest is None else f"; the closest: {_setting(closest)} {closest.outcome}"
            lines = [f"no change {tried}{near}"]
        return [*lines, *ending_words(self.advice)]


def _setting(change: Change) -> str:
    return f"set {change.own or change.options.replace('--set ', '')} ({change.tier})"


def check(
    recipe: Given | None = None, *,
    gpu: str | None = None,
    target_vram: str | float | None = None,
    trainer: str | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    gpus: int | None = None,
    advice_time: str | float = ADVICE_TIME,
    as_of: str | None = None,
    lengths: GivenLengths | None = None,
    deadline: str | float = "15m",
    on_event: OnEvent | None = None,
    on_result: Callable[[Check], None] | None = None,
    on_typical: Callable[[Check], None] | None = None,
    on_advice: OnAdvice | None = None,
) -> Check:  # fmt: skip
    """Whether one config runs on a card; if not, where it stops, and a change. `tight`: perhaps, it says what decides.

    The arguments are those of `autofit.estimate`; `on_result` hears the verdict before any change is tried. Where only
    the worst case does not fit, it says which steps do, by `lengths` or by those of the dataset. Only if it
    does not fit, or is tight, are changes simulated, until the first one that makes it fit with room, and weights of 16
    bits in place of float32, for `advice_time` at most. Where the dataset is read, the longest sample is named, and the
    step that trains on it.

    Raises ConfigError for a recipe or a card that cannot be, and EnvironmentFault when the simulation fails.
    """
    notes: list[str] = []
    tell = on_event or keeping(notes)
    with named_as_arguments():
        advice_s = seconds_or_none("advice-time", advice_time)
        gpu, launch = launch_options(
            gpu=gpu, accelerate_config=accelerate_config, num_processes=num_processes, gpus=gpus
        )
    asked = Asked(
        recipe=recipe, gpu=gpu, target_vram=target_vram, trainer=trainer, changes=changes, prompt_tokens=prompt_tokens,
        deadline=deadline, launch=launch, as_of=as_of, lengths=lengths,
    )  # fmt: skip
    with estimator(asked, tell) as made:
        result = made.estimate()
        found = Check.of(made, result, asked.then(made.recipe))
        if on_result is not None:
            on_result(found)
        if not found.fits:
            found = with_typical(found, asked, made, tell)
            if on_typical is not None:
                on_typical(found)
        if advice_s and found.verdict != "fits" and not found.interrupted:
            look = partial(made.mends, result, tell=lambda text: tell(Event(text=text, trying=True)), wanted=1)
            found = with_advice(found, made, look, advice_s, tell=tell, on_advice=on_advice)
        return replace(found, notes=tuple(notes))
