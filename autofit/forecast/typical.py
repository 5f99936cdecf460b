"""The typical step beside the worst case: a few lengths are simulated, and steps as they are drawn lie between them.

The bytes and seconds of a micro-batch depend on the tokens to which it is padded, and its loss on those of all samples.
They are simulated at up to four of the lengths that occur, with one sample of that length and the others as long as
they are beside it on average, and lines between these give every other length. Live bytes are the largest of several
amounts that grow with the length, so a line is hardly below them; tests compare both with every step of TRL's trainer.
"""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json, written_json
from autofit.forecast.estimate import PARALLEL, Estimator
from autofit.forecast.lengths import Counts, Drawn, Lengths, drawn, lies_in_a_row, sampling
from autofit.hardware.prices import Price, prices
from autofit.plugin.protocol import UPDATE
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.profile import OF_TRL
from autofit.recipe.recipe import Recipe
from autofit.units import format_bytes, format_seconds

Floats = NDArray[np.float64]

_CLOSE = 1.02  # lengths that differ by less are not simulated both
_HOUR_S = 3600.0
_FOLLOWED = ("random", "sequential", "group_by_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """Cost of a whole training, by the mean of the steps as drawn; evaluations and checkpoints are left out."""

    steps: int
    step_s: float  # the mean
    tokens: int  # of samples, without padding; of completions, where the trainer generates
    usd: float | None = None
    price: Price | None = None  # of one card
    cards: int = 1

    @property
    def seconds(self) -> float:
        return self.steps * self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """The steps of a run as they are drawn from its samples' lengths."""

    lengths: Lengths
    generates: bool
    drawn: int  # optimizer steps
    simulated: tuple[int, ...]  # the lengths, in tokens
    micro_batch_tokens: int  # to which the median micro-batch is padded
    step_tokens: int  # to which the longest of a step's micro-batches is padded, in the median
    longest_tokens: int  # to which the longest is padded
    device_used_bytes: int  # of the median step
    peak_allocated_bytes: int
    step_s: float
    most_bytes: int  # of a step with the longest sample
    most_s: float
    fits_frac: float  # the share of steps that fit
    fits_tokens: int | None  # the longest micro-batch that fits; None where all fit, or none
    run: WholeRun | None = None
    log_error: float | None = None  # as of a step's seconds
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        run = self.run
        return {
            "lengths": self.lengths.source,
            "drawn_steps": self.drawn,
            "simulated_tokens": list(self.simulated),
            "micro_batch_tokens": self.micro_batch_tokens,
            "step_tokens": self.step_tokens,
            "longest_tokens": self.longest_tokens,
            "device_used_bytes": self.device_used_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "step_s": self.step_s,
            "most_bytes": self.most_bytes,
            "most_s": self.most_s,
            "fits_frac": self.fits_frac,
            "fits_tokens": self.fits_tokens,
            "notes": list(self.notes),
            "run": None if run is None else {
                "steps": run.steps, "step_s": run.step_s, "seconds": run.seconds, "tokens": run.tokens,
                "usd": run.usd, "usd_per_hour": None if run.price is None else run.price.usd_per_hour,
                "cards": run.cards,
            },
        }  # fmt: skip

    @property
    def lines(self) -> list[str]:
        """The typical step, the worst one of an epoch, and the run as a whole: a line each."""
        return [self._step, *([] if self.run is None else [self._whole(self.run)]), *self.notes]

    @property
    def _step(self) -> str:
        what = "rollout" if self.generates else "micro-batch"
        several = self.step_tokens > self.micro_batch_tokens
        widest = f", the longest of a step to {self.step_tokens:,}" if several else ""
        steps = "1 step" if self.drawn == 1 else f"{self.drawn:,} steps"
        between = "" if len(self.simulated) < 2 else f", interpolated between {len(self.simulated)} simulated lengths"
        return (
            f"Typical step: {format_bytes(self.device_used_bytes)} needed, {format_seconds(self.step_s)} (median of "
            f"{steps} drawn from {self.lengths.source}{between}; a {what} is padded to "
            f"{self.micro_batch_tokens:,} tokens{widest}). The worst step of an epoch: "
            f"{format_bytes(self.most_bytes)}, {format_seconds(self.most_s)} ({self.longest_tokens:,} tokens)."
        )

    def _whole(self, run: WholeRun) -> str:
        around = ""
        if self.log_error is not None:
            low, high = (run.seconds * math.exp(sign * self.log_error) for sign in (-1, 1))
            around = f" ({format_seconds(low)} to {format_seconds(high)} in 9 of 10 cases)"
        of = "completions" if self.generates else "samples"
        cost = ""
        if run.usd is not None and run.price is not None:
            cards = "one card" if run.cards == 1 else f"{run.cards} cards"
            cost = f", about ${run.usd:,.2f} at ${run.price.usd_per_hour:.2f} an hour a card, {cards}"
        return (
            f"The whole run: {run.steps:,} steps of {format_seconds(run.step_s)} on average, "
            f"{format_seconds(run.seconds)}{around}, {_count(run.tokens)} tokens of {of}{cost}; evaluation and "
            "checkpoints come on top."
        )

    @property
    def fit_line(self) -> str | None:
        """Line on the steps that fit, if only some do; None if all or none do."""
        if self.fits_tokens is None or not 0 < self.fits_frac < 1:
            return None
        tokens = f"{self.fits_tokens:,} tokens"
        which = f"rollouts padded to up to {tokens}" if self.generates else f"micro-batches of up to {tokens}"
        first = 1 / (1 - self.fits_frac)
        typical = "the typical step does" if self.fits_frac >= 0.5 else "nor does the typical step"
        return (
            f"the worst case does not fit, {typical}: {_percent(self.fits_frac)} of the steps fit "
            f"({which}), and about 1 step in {first:,.0f} does not (drawn from {self.lengths.source})"
        )


def typical(estimator: Estimator, worst: ProbeResult, lengths: Lengths) -> Typical | None:
    """The typical step of a recipe whose worst case is `worst`, if its steps depend on the lengths.

    Raises EnvironmentFault where a simulation fails, and Cancelled where the estimator was.
    """
    recipe = estimator.recipe
    limit = longest_tokens(recipe)
    if limit is None or worst.median_step_s is None:
        return None
    notes = []
    if (most := max(lengths.tokens)) > limit:
        what = f"{recipe.keys.completion}: {limit:,}" if recipe.generates else f"the longest sample, {limit:,}"
        notes.append(f"lengths of up to {most:,} tokens were given; those above {what} count as that.")
    lengths = lengths.within(limit)
    if (how := sampling(recipe)) not in _FOLLOWED:
        notes.append(f"train_sampling_strategy {how} is taken as random.")
    if lies_in_a_row(recipe):
        notes.append("padding_free: samples lie one after the other, so their mean length counts.")
    found = drawn(lengths, recipe)
    if fills(recipe):
        found = replace(found, longest=np.full((1, 1, recipe.grad_accum_steps), limit))
    longest = np.minimum(found.longest, limit)
    alike = fills(recipe) or lies_in_a_row(recipe)
    points = _points(longest, 0 if alike else max(lengths.tokens))
    results = _simulated(estimator, worst, {n: None if alike else _rest(estimator, found, lengths, n) for n in points})
    curve = _Curve.of(points, results, recipe)
    return _told(estimator, curve, longest, lengths, points, tuple(notes), worst.log_error)


def _rest(estimator: Estimator, found: Drawn, lengths: Lengths, tokens: int) -> int | None:
    """Tokens of the other sequences of a micro-batch whose longest has `tokens`, if there are any; None of rollouts."""
    if estimator.recipe.generates:
        return None
    own = (read_json(estimator.worst_case) or {}).get("lengths")
    sequences = int(own.get("sequences", 1)) if isinstance(own, Mapping) else 1
    whole = sequences * float(np.mean(lengths.tokens))
    share = 1.0 if lengths.mean_tokens is None else min(1.0, lengths.mean_tokens / whole)
    return found.rest(tokens, sequences=sequences, share=share)


def longest_tokens(recipe: Recipe) -> int | None:
    """Tokens of the worst case's samples, or completions; None if no key of the recipe changes them, and if the padding
    of rollouts is unknown, as with trainers other than TRL's: verl's micro-batches have a budget of tokens.
    """
    if recipe.generates:
        return recipe.max_completion_tokens if recipe.trainer in OF_TRL else None
    return None if recipe.keys.length is None else recipe.longest_sample_tokens


def fills(recipe: Recipe) -> bool:
    """True if every row is filled by packing, or padded, to the same length."""
    return bool(recipe.resolved.get("packing") or recipe.resolved.get("pad_to_max_length"))


def _points(longest: Counts, most: int) -> tuple[int, ...]:
    """Up to four lengths to simulate: the least and the median of micro-batches, the longest that an epoch has, and the
    median of each step's longest, which decides the step's bytes; where steps have one micro-batch, 90 % of them.
    """
    widest = longest.max(axis=(1, 2))
    shares = (0.5,) if longest[0].size > 1 else (0.9,)
    among = (longest.min(), np.quantile(longest, 0.5, method="higher"), *np.quantile(widest, shares, method="higher"))
    kept = [max(most, int(longest.max()))]
    for tokens in sorted({int(n) for n in among}, reverse=True):
        if tokens * _CLOSE <= kept[-1]:
            kept.append(tokens)
    return tuple(reversed(kept))


def _simulated(estimator: Estimator, worst: ProbeResult, points: Mapping[int, int | None]) -> list[ProbeResult]:
    """The results at {tokens of a micro-batch's longest sequence: of its others; None: as many}."""
    recipe = estimator.recipe
    key = recipe.keys.completion if recipe.generates else recipe.keys.length
    traced = replace(estimator, least_of_fits=False)
    assert key is not None

    def at(tokens: int) -> ProbeResult:
        rest = points[tokens]
        if rest is None and tokens == longest_tokens(recipe):
            return worst
        folder = estimator.folder.parent / f"length-{tokens}"
        here = replace(traced, worst_case=shorter_case(estimator.worst_case, folder, tokens, rest))
        result = here.probe({**recipe.values, key: tokens})
        if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM) or result.median_step_s is None:
            raise EnvironmentFault(f"the simulation at {tokens:,} tokens failed: {result.reason}")
        return result

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(at, points))


def shorter_case(worst_case: Path, folder: Path, tokens: int, rest: int | None) -> Path:
    """The worst case in `folder`, as the longest of samples that differ: it has `tokens`, the others `rest`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in worst_case.parent.iterdir():
        if path.is_dir() and not (folder / path.name).exists():
            os.symlink(path.resolve(), folder / path.name)
    facts = written_json(worst_case)
    if isinstance(own := facts.get("lengths"), Mapping) and not own.get("generates"):
        facts = {**facts, "lengths": {**own, "longest": [tokens], "most": tokens, "least": 0, "rest": rest}}
    path = folder / worst_case.name
    write_json(path, facts)
    return path


# ---------------------------------------------------------------------- between the simulated lengths
@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Bytes of a step and seconds of a micro-batch by the tokens to which it is padded: lines between points."""

    tokens: tuple[int, ...]
    used: tuple[float, ...]
    allocated: tuple[float, ...]
    micro_s: tuple[float, ...]  # of one micro-batch; of a whole step, where the trainer generates
    once_s: tuple[float, ...]  # the rest of an optimizer step

    @classmethod
    def of(cls, tokens: Sequence[int], results: Sequence[ProbeResult], recipe: Recipe) -> "_Curve":
        steps = [result.median_step_s or 0.0 for result in results]
        whole = [0.0 if recipe.generates else result.phase_s.get(UPDATE, 0.0) for result in results]
        micro = steps if recipe.generates else [update / recipe.grad_accum_steps for update in whole]
        once = [0.0 if recipe.generates else step - update for step, update in zip(steps, whole, strict=True)]
        return cls(
            tokens=tuple(tokens), used=tuple(float(result.device_used_bytes or 0) for result in results),
            allocated=tuple(float(result.peak_allocated_bytes or 0) for result in results),
            micro_s=tuple(micro), once_s=tuple(once),
        )  # fmt: skip

    def at(self, tokens: Counts | Floats, values: Sequence[float]) -> Floats:
        return np.asarray(np.interp(tokens, self.tokens, values), dtype=np.float64)

    def reaches(self, capacity_bytes: int) -> int | None:
        """The most tokens of a micro-batch that fits; None if even the shortest exceeds the capacity, or all fit."""
        tokens = np.arange(self.tokens[0], self.tokens[-1] + 1)
        fitting = tokens[self.at(tokens, self.used) <= capacity_bytes]
        return int(fitting[-1]) if 0 < len(fitting) < len(tokens) else None


def _told(
    estimator: Estimator, curve: _Curve, longest: Counts, lengths: Lengths, points: tuple[int, ...],
    notes: tuple[str, ...], log_error: float | None,
) -> Typical:  # fmt: skip
    recipe = estimator.recipe
    seconds = _step_s(curve, longest, recipe)
    widest = longest.max(axis=(1, 2))  # of each step: its bytes are those of its longest micro-batch
    used = curve.at(widest, curve.used)
    most = points[-1]
    # A step that has the longest sample of an epoch is drawn too seldom: one micro-batch of the median step is it.
    middle = int(np.argsort(seconds)[len(seconds) // 2])
    with_longest = longest[middle : middle + 1].copy()
    with_longest[0, 0, 0] = most
    fits = float((used <= estimator.capacity_bytes).mean())
    whole = _whole(estimator, lengths, float(seconds.mean()))
    return Typical(
        lengths=lengths, generates=recipe.generates, drawn=len(seconds), simulated=points,
        micro_batch_tokens=int(np.median(longest)), step_tokens=int(np.median(widest)), longest_tokens=most,
        device_used_bytes=int(np.median(used)), peak_allocated_bytes=int(np.median(curve.at(widest, curve.allocated))),
        step_s=float(np.median(seconds)), most_bytes=int(curve.used[-1]),
        most_s=float(max(seconds.max(), _step_s(curve, with_longest, recipe)[0])),
        fits_frac=fits, fits_tokens=curve.reaches(estimator.capacity_bytes), run=whole, log_error=log_error,
        notes=notes,
    )  # fmt: skip


def _step_s(curve: _Curve, longest: Counts, recipe: Recipe) -> Floats:
    """Seconds of each optimizer step: its micro-batches, for which ranks wait, and what happens once in it."""
    each = curve.at(longest, curve.micro_s)  # (steps, ranks, micro-batches)
    once = recipe.launch.sharding in ("ddp", "zero0", "zero1")  # ranks wait for each other once in a step, else in each
    spent = each.sum(axis=2).max(axis=1) if once else each.max(axis=1).sum(axis=1)
    return np.asarray(spent + curve.at(longest.mean(axis=(1, 2)), curve.once_s), dtype=np.float64)


def _whole(estimator: Estimator, lengths: Lengths, step_s: float) -> WholeRun | None:
    recipe = estimator.recipe
    each = float(np.mean(lengths.tokens)) if lengths.mean_tokens is None else lengths.mean_tokens
    rows = lengths.samples
    if rows is None:
        rows = recipe.num_samples
        limit = longest_tokens(recipe)
        if recipe.resolved.get("packing") and limit:  # lengths are of samples, which fill rows of `limit` tokens
            rows = None if rows is None else math.ceil(rows * each / limit)
            each = limit
    steps = run_steps(recipe, rows)
    if steps is None:
        return None
    price = prices().get(estimator.device.removeprefix("sim:"))
    cards = recipe.launch.cards
    usd = None if price is None else cards * price.usd_per_hour * steps * step_s / _HOUR_S
    tokens = round(steps * recipe.effective_batch_size * each)
    return WholeRun(steps=steps, step_s=step_s, tokens=tokens, usd=usd, price=price, cards=cards)


def run_steps(recipe: Recipe, samples: float | None) -> int | None:
    """Optimizer steps of the whole training, of epochs of `samples`, if known.

    As transformers counts them (`Trainer.set_initial_training_values`), and for rollouts TRL's RepeatSampler.
    """
    steps, epochs = recipe.resolved.get("max_steps"), recipe.resolved.get("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        return steps
    if not isinstance(epochs, int | float) or isinstance(epochs, bool):
        return None
    if recipe.generates:
        if recipe.num_prompts is None:
            return None
        rollouts = recipe.num_prompts * recipe.num_generations // recipe.generation_batch_size
        again = recipe.resolved.get(recipe.keys.reuse or "", 1)
        batches = rollouts * recipe.steps_per_generation * (again if isinstance(again, int) else 1)
    elif samples is None:
        return None
    else:
        batches = math.ceil(samples / (recipe.micro_batch_size * recipe.world_size))
    return math.ceil(epochs * max(1, math.ceil(batches / recipe.grad_accum_steps)))


def _count(number: int) -> str:
    """`36.2 M`, `1.20 B`, or `8,200`."""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _percent(share: float) -> str:
    """A share below 1 in percent, rounded down."""
    return f"{math.floor(share * 1000) / 10:g} %"
