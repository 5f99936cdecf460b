"""Predicted bytes and seconds of every candidate before the first probe; the structure and shape that decide them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autofit.errors import ConfigError
from autofit.plugin.protocol import is_padded
from autofit.recipe.findings import OFFLOAD
from autofit.recipe.keys import BatchKeys
from autofit.recipe.recipe import Recipe
from autofit.space.space import Candidate, Space, Value

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """One entry per candidate, in the order of `candidates`.

    `floor_bytes` is a lower bound of device-used (live tensors and context): under a smaller target the candidate
    certainly does not fit, so it is never probed. `device_used_bytes` and `step_s` are the expected results of a probe;
    `step_s` is per optimizer step at the recipe's effective batch, so that candidates compare. They may be wrong: the
    search learns the error. They are NaN for a candidate without a prediction, and its floor is 0. `rollout_s` is the
    part of `step_s` before the update; with it, a probe that reports both parts corrects each part separately. `sure`
    predictions are what a probe's own simulation says of each phase; their bytes are those that are needed, of which a
    probe that has room takes more.
    """

    candidates: tuple[Candidate, ...]
    floor_bytes: Floats
    device_used_bytes: Floats
    step_s: Floats
    rollout_s: Floats | None = None
    sure: bool = False

    def __post_init__(self) -> None:
        count = len(self.candidates)
        for field in fields(self)[1:-1]:
            values = getattr(self, field.name)
            if values is None:
                continue
            if values.shape != (count,):
                raise ConfigError(
                    f"predictions must have one {field.name} per candidate, shape ({count},); got shape {values.shape}"
                )
            if not field.name.startswith("floor") and not (values[~np.isnan(values)] > 0).all():
                raise ConfigError(f"predicted {field.name} must be above zero, or NaN if unknown")

    def of(self, candidates: tuple[Candidate, ...]) -> "Predictions":
        """The predictions for `candidates`, in their order; NaN for an unpredicted candidate."""
        if candidates == self.candidates:
            return self
        known = {candidate: place for place, candidate in enumerate(self.candidates)}
        places = np.array([known.get(c, -1) for c in candidates])

        def aligned(values: Floats, unknown: float) -> Floats:
            return np.where(places >= 0, values[places], unknown)

        return Predictions(
            candidates=candidates, floor_bytes=aligned(self.floor_bytes, 0.0),
            device_used_bytes=aligned(self.device_used_bytes, np.nan), step_s=aligned(self.step_s, np.nan),
            rollout_s=None if self.rollout_s is None else aligned(self.rollout_s, np.nan), sure=self.sure,
        )  # fmt: skip


# The predictions of every candidate as points of a picture, few enough to be kept with a study.

_MOST_POINTS = 800
_CELL = 0.01  # width of a cell in log2, in which only one candidate is kept: 0.7 %; widened until few are left

Correct = Callable[[NDArray[np.intp]], tuple[Floats, Floats]]  # indices -> (seconds of a step, device-used bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Predicted bytes and seconds of a study's candidates; of candidates that are nearly equal there is one."""

    candidates: int  # that have a prediction
    device_used_bytes: tuple[int, ...]
    step_s: tuple[float, ...]

    @classmethod
    def of(cls, predictions: Predictions | None, correct: Correct | None = None) -> "Cloud | None":
        """The points of `predictions`, if any. `correct` maps indices to figures corrected by probes."""
        if predictions is None:
            return None
        used, step_s = predictions.device_used_bytes, predictions.step_s
        known = np.isfinite(used) & np.isfinite(step_s)
        if not known.any():
            return None
        points = np.column_stack([used[known], step_s[known]])
        kept = np.flatnonzero(known)[_thinned(points)]
        shown_s, shown = (step_s[kept], used[kept]) if correct is None else correct(kept)
        return cls(
            candidates=len(points), device_used_bytes=tuple(int(used) for used in shown),
            step_s=tuple(float(f"{seconds:.4g}") for seconds in shown_s),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return {"candidates": self.candidates, "device_used_bytes": list(self.device_used_bytes),
                "step_s": list(self.step_s)}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, object] | None) -> "Cloud | None":
        """The cloud that a study keeps, if it has one."""
        if content is None:
            return None
        found = cast("Mapping[str, Any]", content)
        return cls(
            candidates=int(found["candidates"]), device_used_bytes=tuple(found["device_used_bytes"]),
            step_s=tuple(found["step_s"]),
        )  # fmt: skip


def _thinned(points: Floats) -> NDArray[np.intp]:
    """The index of one point of each cell of a logarithmic grid, with cells wide enough for at most _MOST_POINTS."""
    cell = _CELL
    while True:
        _, first = np.unique(np.floor(np.log2(points) / cell), axis=0, return_index=True)
        if len(first) <= _MOST_POINTS:
            return np.sort(first)
        cell *= 1.25


# -- the structure and the shape of a candidate -----------------------------------------------------------------------

LATER = "+"  # suffix of a phase in which gradients of an earlier micro-batch are alive
# Settings of a structure that are no knobs.
LARGE, PADDED, ONE = "micro-batch above a tile", "micro-batch with padding", "one micro-batch a step on several ranks"
Setting = tuple[str, Value]
Structure = tuple[Setting, ...]  # the settings in the space's order, then LARGE, PADDED and ONE


@dataclass(frozen=True, slots=True)
class Shape:
    """The values of the mass model's variables for one candidate."""

    micro: int
    accumulation: int
    chunk: int
    completion: int
    rank: int
    group: int = 1
    share: float = 0.0  # of the card, of a rollout engine
    longest: int = 0  # tokens of the longest sequence that it serves; 0 is the model's own
    passes: int = 1  # of training over one rollout

    @property
    def generated(self) -> int:
        return self.micro * self.chunk

    @property
    def served(self) -> int:
        """Micro-batches that one rollout serves."""
        return self.chunk * self.passes


@dataclass(frozen=True)
class Sorted:
    """The allowed candidates of a space by structure and shape. `facts` are those of the worst case."""

    space: Space
    facts: Mapping[str, Any]

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self.space.allowed())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.facts.get("prompt_tokens", 0))

    @cached_property
    def own(self) -> Structure:
        """The structure of the unchanged recipe."""
        return self.structure(self.space, self.space.baseline)

    @cached_property
    def _found(self) -> tuple[list[Shape], list[Structure]]:
        """(shape, structure) of each candidate. Cached: 10^5 candidates share few shapes and structures."""
        space, keys = self.space, self.space.recipe.keys
        varying = [i for i, knob in enumerate(space.knobs) if knob.name in variables(keys)]
        fixed = [i for i, knob in enumerate(space.knobs) if is_structural(space, knob.name)]
        shapes: dict[tuple[Value, ...], Shape] = {}
        structures: dict[tuple[object, ...], Structure] = {}
        of_each: list[Shape] = []
        structure_of_each: list[Structure] = []
        for candidate in self.candidates:
            values = candidate.values
            varied = tuple([values[i] for i in varying])
            if (shape := shapes.get(varied)) is None:
                shape = shapes[varied] = shape_of(space, candidate)
            is_one = _is_one(space.recipe, shape)
            key = (*[values[i] for i in fixed], _is_large(space.recipe, shape), shape.micro, is_one)
            if (structure := structures.get(key)) is None:
                structure = structures[key] = self.structure(space, candidate)
            of_each.append(shape)
            structure_of_each.append(structure)
        return of_each, structure_of_each

    @property
    def shapes(self) -> list[Shape]:
        return self._found[0]

    @cached_property
    def places(self) -> dict[Structure, list[int]]:
        """{structure: the indices of its candidates}."""
        found: dict[Structure, list[int]] = {}
        for place, structure in enumerate(self._found[1]):
            found.setdefault(structure, []).append(place)
        return found

    def structure(self, space: Space, candidate: Candidate, shape: Shape | None = None) -> Structure:
        """The structure of a candidate of `space`, which may have more knobs; only the knobs of this space count."""
        recipe, params = self.space.recipe, space.params(candidate)
        shape = shape or shape_of(space, candidate)
        names = [k.name for k in self.space.knobs if is_structural(self.space, k.name)]
        limit = params.get(recipe.keys.length or "", recipe.resolved.get(recipe.keys.length or ""))
        padded = is_padded(self.facts, shape.micro, limit if isinstance(limit, int) else None)
        others = (LARGE, _is_large(recipe, shape)), (PADDED, padded), (ONE, _is_one(recipe, shape))
        return (*((n, params[n]) for n in names), *others)

    def representative(self, structure: Structure) -> Candidate:
        """The unchanged recipe with the knobs' values of `structure`."""
        own = self.space.params(self.space.baseline)
        return self.space.settled(own | {name: value for name, value in structure if name in own})


def without(space: Space, settings: Collection[Setting]) -> Space:
    """`space` less these values of its knobs; the recipe's own values stay."""
    own = space.baseline.values
    choices = (
        tuple(v for v in values if v == mine or (knob.name, v) not in settings)
        for knob, values, mine in zip(space.knobs, space.choices, own, strict=True)
    )
    return replace(space, choices=tuple(choices))


def differences(structure: Structure, other: Structure) -> list[tuple[str, Value, Value]]:
    """(name, value, the other's value) of each setting that differs between two structures of one space."""
    pairs = zip(structure, other, strict=True)
    return [(name, value, of_other) for (name, value), (_, of_other) in pairs if not _same(value, of_other)]


def _same(value: Value, other: Value) -> bool:
    return value == other and type(value) is type(other)


def is_structural(space: Space, knob: str) -> bool:
    """True if a change of `knob` leads to another structure.

    False for variables of the mass model, env knobs, and knobs that the space declares to leave traces as they are.
    """
    traced = all(k.traced for k in space.knobs if k.name == knob)
    return traced and knob not in variables(space.recipe.keys) and not knob.startswith("env.")


@cache
def variables(keys: BatchKeys) -> tuple[str, ...]:
    """The recipe keys that are variables of a mass model."""
    named = (
        keys.micro_batch, keys.rollout, keys.accumulation, keys.completion, "lora_r", keys.group, keys.engine_share,
        keys.engine_length,
    )  # fmt: skip
    return tuple(key for key in named if key is not None)


def shape_of(space: Space, candidate: Candidate) -> Shape:
    micro, accumulation, chunk, _ = space.split(candidate)
    params = {**space.recipe.resolved, **space.params(candidate)}

    def number(name: str | None) -> int:
        value = cast(Value, params.get(name or ""))
        return int(value) if isinstance(value, int | float) else 0

    keys = space.recipe.keys
    share = cast(Value, params.get(keys.engine_share or ""))
    return Shape(
        micro, accumulation, chunk, number(keys.completion), number("lora_r"), number(keys.group) or 1,
        float(share) if isinstance(share, int | float) else 0.0, number(keys.engine_length), number(keys.reuse) or 1,
    )  # fmt: skip


def unique(shapes: Sequence[Shape]) -> tuple[tuple[Shape, ...], list[int]]:
    """(each shape once, the place of every one of `shapes` among them)."""
    order = {shape: place for place, shape in enumerate(dict.fromkeys(shapes))}
    return tuple(order), [order[shape] for shape in shapes]


def _is_large(recipe: Recipe, shape: Shape) -> bool:
    """True if a micro-batch has more tokens than one tile of the loss."""
    tokens = shape.completion if recipe.generates else recipe.longest_sample_tokens or 0
    return recipe.tile_tokens is not None and shape.micro * tokens > recipe.tile_tokens


def accumulation_of(ranked: bool, *, one: bool) -> int:
    """Micro-batches of a traced step: the first and the last, and on several ranks one between, unless there is `one`.

    The last adds up the gradients of the ranks.
    """
    return 1 if one else 3 if ranked else 2


def _is_one(recipe: Recipe, shape: Shape) -> bool:
    """True if the only micro-batch of a step also communicates its gradients; of several mostly the last does."""
    return shape.accumulation == 1 and not recipe.launch.is_alone


# Settings whose seconds on a simulated card are a lower bound: the optimizer's step on the host is not timed.

WHY_NOT_OFFLOADED = "candidates without it fit, and the seconds of the host's step are not known"


def without_offload(space: Space) -> Space:
    """`space` less offloads to the host, except the recipe's own; `space` itself if it has none.

    The host's step would count for nothing, so a slower candidate would win.
    """
    place = next((i for i, knob in enumerate(space.knobs) if knob.name == OFFLOAD), None)
    offers = () if place is None else tuple(v for v in space.choices[place] if v != "none")
    gone = [(OFFLOAD, v) for v in offers if place is not None and v != space.baseline.values[place]]
    return without(space, gone) if gone else space


def has_room(predictions: Predictions, limit_bytes: int | None) -> bool:
    """True if a candidate is predicted to fit."""
    used = predictions.device_used_bytes
    return bool((np.isfinite(used) & (used <= (np.inf if limit_bytes is None else limit_bytes))).any())


# The batch of an evaluation, which is no matter of speed: the step's seconds are those of training alone.

_SPARED = 1.06  # room for what the allocator reserves besides, as in a forecast


def as_evaluated(space: Space, samples: int | None = None) -> Space:
    """`space` with the recipe's own batch of an evaluation alone, or beside it one of `samples`.

    `space` itself if it offers no other.
    """
    place = _evaluation(space)
    offers = () if place is None else space.choices[place]
    gone = [(space.keys.evaluation or "", value) for value in offers if value != samples]
    return without(space, gone) if len(offers) > 1 else space


def most_evaluated(space: Space, predictions: Predictions, limit_bytes: int) -> int | None:
    """The largest batch of an evaluation with which a candidate is predicted to fit, if any is."""
    place = _evaluation(space)
    for spared in (_SPARED, 1.0):
        fits = (c for c, used in zip(predictions.candidates, predictions.device_used_bytes, strict=True)
                if spared * used <= limit_bytes)  # fmt: skip
        if place is not None and (found := [cast(int, c.values[place]) for c in fits]):
            return max(found)
    return None


def _evaluation(space: Space) -> int | None:
    """The place of the knob of the evaluation's batch."""
    return next((i for i, knob in enumerate(space.knobs) if knob.name == space.keys.evaluation), None)
