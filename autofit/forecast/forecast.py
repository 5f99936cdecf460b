"""Predictions for every candidate before the first probe: trace few structures, then evaluate all candidates.

The candidates of a space fall into structures (the values of the knobs that change which code runs) and, within one,
into micro-batches below and above a tile of TRL's loss, and with and without padding. A few structures are all traced.
Of many, the recipe's own is; every other setting is sketched alone, and two together of which one decides what the
other does (offloaded activations without checkpoints). The structures are composed of these effects, and
the structures of the best candidates by this are sketched until the best ones have been (autofit.forecast.composed).
"""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autofit.fakegpu.formula.formula import Floats
from autofit.fakegpu.rates.collectives import nccl_bytes
from autofit.fakegpu.specs import gpu_spec
from autofit.files import read_json
from autofit.forecast.composed import Composer, PredictionSource, Request, Told, Workshop, pairs
from autofit.forecast.phases import Itinerary, predicted, toured
from autofit.forecast.predictions import (
    LARGE,
    ONE,
    PADDED,
    Predictions,
    Setting,
    Shape,
    Sorted,
    Structure,
    accumulation_of,
    differences,
    is_structural,
    shape_of,
    unique,
)
from autofit.probing.fork_server import ForkServer
from autofit.recipe.keys import LAUNCH, TIERS
from autofit.recipe.recipe import merge
from autofit.space.space import Candidate, Space, Value

SHARDING = f"{LAUNCH}.sharding"
LONGER = 4  # models are valid for completions up to this multiple of the space's longest
_FEW = 2  # structures that are all traced in full: composing them would take as long
_MOST_SKETCHED = 12  # further structures that are sketched because one of their candidates may be the best
_BEGINS_WITHIN_S = 120.0  # a structure that is not being traced by then has no prediction: its candidates are probed
_JOINT = {"padding": PADDED}  # words of `Traits.joint` that are no knobs
_RESERVED = 1.06  # reserved bytes over live bytes, at most as a rule: a candidate with less room may not fit after all


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecaster:
    """Builds mass models in the fork server, or loads them from the folder `kept`."""

    device: str
    worst_case: Path
    server: ForkServer
    scratch: Path
    kept: Path
    workers: int = 2

    def predict(self, space: Space) -> Predictions:
        """Floor bytes, device-used bytes and step seconds of the allowed candidates; unknown if a trace fails."""
        return self.forecast(space).predictions

    def forecast(self, space: Space, *, limit_bytes: int | None = None) -> "Forecast":
        """The predictions of the allowed candidates, with the mass models behind them.

        Where there are many structures, those of the fastest candidates under `limit_bytes` are traced.
        """
        found = Sorted(space, read_json(self.worst_case) or {})
        card = gpu_spec(self.device.removeprefix("sim:"))
        context = card.context_bytes + nccl_bytes(card, space.recipe.launch.ranks)
        if space.recipe.read_by:
            return self._by_phases(found, limit_bytes)
        if not space.recipe.forecasts:
            return _unknown(found, "traces of few layers do not stand for this trainer's models")
        workshop = Workshop(
            worst_case=self.worst_case, server=self.server, scratch=self.scratch, kept=self.kept, workers=self.workers,
            until=time.monotonic() + _BEGINS_WITHIN_S,
        )  # fmt: skip
        shape = shape_of(space, space.baseline)
        requests = _Requests(found, device=self.device, worst_case=self.worst_case)
        own = found.own
        alone = pairs(own, list(found.places)) if len(found.places) > _FEW else {}
        joint = _joint(space)
        together = _together(joint, own, found.places) if alone else []
        sketched = dict.fromkeys([*(s for pair in alone.values() for s in (own, *pair)), *together])
        whole = list(found.places) if not alone else [own]
        made = workshop.make({s: requests.whole(s) for s in whole}, {s: requests.sketch(s) for s in sketched})
        composer = Composer(
            own=own, pairs=alone, whole=made[0], sketches=made[1], completion=shape.completion,
            chunks=requests.chunk, prompt_tokens=found.prompt_tokens, joint=joint,
        )  # fmt: skip
        room = math.inf if limit_bytes is None else limit_bytes - context
        forecast = _forecast(found, composer, context)
        most = _MOST_SKETCHED + len(sketched)
        while wanted := _wanted(forecast, room, most=min(self.workers, most - len(composer.sketches))):
            composer.sketches.update(workshop.make({}, {s: requests.sketch(s) for s in wanted})[1])
            forecast = _forecast(found, composer, context)
        return forecast

    def _by_phases(self, found: Sorted, limit_bytes: int | None) -> "Forecast":
        space = found.space
        itinerary = Itinerary(space)
        made = toured(
            itinerary, device=self.device, limit_bytes=limit_bytes, worst_case=self.worst_case, server=self.server,
            scratch=self.scratch, kept=self.kept,
        )  # fmt: skip
        if made.reason:
            return _unknown(found, made.reason)
        predictions = predicted(itinerary, made.visited, outside_bytes=made.outside_bytes, share=made.share)
        return Forecast(
            space=space, context_bytes=made.outside_bytes, predictions=predictions, problems={}, found=found
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predictions of a space, and their mass models, which also evaluate candidates near the space."""

    space: Space
    context_bytes: int
    predictions: Predictions
    problems: Mapping[str, int]  # why nothing is ruled out: the reason, and the number of candidates
    found: Sorted
    composer: Composer | None = None
    least_live_bytes: Floats | None = None  # of each candidate, if composed effects multiply instead of adding up
    sources: tuple[PredictionSource | None, ...] = ()  # of each candidate's prediction; None without one

    @property
    def crashed(self) -> Mapping[Setting, str]:
        """{setting: the error} of settings with which the simulated training crashes."""
        return {} if self.composer is None else self.composer.crashed

    @property
    def traced(self) -> int:
        """Number of structures with a trace."""
        return 0 if self.composer is None else len({*self.composer.whole, *self.composer.sketches})

    def of(
        self, space: Space, candidate: Candidate, *, completion_tokens: int | None = None
    ) -> tuple[float, float] | None:
        """(device-used bytes, step seconds) of a candidate of `space`, which may have more knobs than the forecast's.

        `completion_tokens` replaces the candidate's own. None if nothing is known of the candidate's structure.
        """
        own, ours = space.params(space.baseline), {knob.name for knob in self.space.knobs}
        params = space.params(candidate)
        if self.composer is None:
            return None if completion_tokens is not None else self._listed(params, own, ours)
        if any(v != own[k] for k, v in params.items() if k not in ours and is_structural(space, k)):
            return None
        shape = shape_of(space, candidate)
        if completion_tokens is not None:
            shape = replace(shape, completion=completion_tokens)
        told = self.composer and self.composer.told(self.found.structure(space, candidate, shape), (shape,))
        if not told:
            return None
        return self.context_bytes + float(told.live_bytes[0]), float(told.parts.step_s[0])

    def _listed(
        self, params: Mapping[str, Value], own: Mapping[str, Value], ours: Collection[str]
    ) -> tuple[float, float] | None:
        """The same of a candidate that differs from the recipe in knobs of the forecast's space alone."""
        if any(v != own[k] for k, v in params.items() if k not in ours):
            return None
        wanted = self.space.candidate({k.name: params.get(k.name, own[k.name]) for k in self.space.knobs})
        known = self.predictions.candidates
        place = known.index(wanted) if wanted in known else None
        if place is None or not math.isfinite(self.predictions.step_s[place]):
            return None
        return float(self.predictions.device_used_bytes[place]), float(self.predictions.step_s[place])


def _unknown(found: Sorted, problem: str) -> Forecast:
    """A forecast that lacks predictions, for a trainer whose models are untraceable with few layers."""
    nothing = np.full(len(found.candidates), np.nan)
    predictions = Predictions(
        candidates=found.candidates, floor_bytes=np.zeros(len(nothing)), device_used_bytes=nothing, step_s=nothing
    )
    return Forecast(
        space=found.space, context_bytes=0, predictions=predictions, problems={problem: len(nothing)}, found=found
    )


def _forecast(found: Sorted, composer: Composer, context_bytes: int) -> Forecast:
    """Forecast of every candidate by the models so far."""
    count = len(found.candidates)
    floor, sources = np.zeros(count), np.full(count, None)
    live, least, step, rollout = (np.full(count, np.nan) for _ in range(4))
    problems: dict[str, int] = {}
    for structure, places in found.places.items():
        shapes, order = unique([found.shapes[p] for p in places])
        told = composer.told(structure, shapes)
        if problem := _problem(composer, structure, told):
            problems[problem] = problems.get(problem, 0) + len(places)
        if told is not None:
            live[places], least[places] = told.live_bytes[order], told.least_live_bytes[order]
            step[places], rollout[places] = told.parts.step_s[order], told.parts.before_update_s[order]
            if told.source is PredictionSource.WHOLE and not problem:
                floor[places] = context_bytes + told.least_live_bytes[order]
            sources[places] = told.source
    predictions = Predictions(
        candidates=found.candidates, floor_bytes=floor, device_used_bytes=context_bytes + live, step_s=step,
        rollout_s=rollout if found.space.recipe.generates else None,
    )  # fmt: skip
    return Forecast(
        space=found.space, context_bytes=context_bytes, predictions=predictions, problems=problems, found=found,
        composer=composer, least_live_bytes=least, sources=tuple(sources.tolist()),
    )  # fmt: skip


def _joint(space: Space) -> frozenset[frozenset[str]]:
    """Pairs of settings of which one decides the effect of the other (`Traits.joint`)."""
    joint = {frozenset((knob.name, _JOINT.get(name, name))) for knob in space.knobs for name in knob.traits.joint}
    gathers = {frozenset((SHARDING, PADDED)), frozenset((SHARDING, ONE))}  # hide kernels; keep whole gradients or not
    return frozenset(joint | gathers)


def _together(joint: Collection[frozenset[str]], own: Structure, structures: Iterable[Structure]) -> list[Structure]:
    """The structures that change such a pair of settings and nothing else.

    Micro-batches of several samples have padding and may be above a tile too. One alone has neither: where it is the
    recipe's own the settings are sketched without, otherwise few candidates have it.
    """
    alone = not dict(own)[PADDED]
    found: dict[frozenset[Setting], Structure] = {}
    for structure in sorted(structures, key=lambda s: len(differences(s, own))):
        settings = {(name, value) for name, value, _ in differences(structure, own)}
        names = frozenset(name for name, _ in settings)
        if alone and PADDED in names:
            settings, names = {setting for setting in settings if setting[0] != LARGE}, names - {LARGE}
        if names in joint and (alone or PADDED not in names or SHARDING in names):
            found.setdefault(frozenset(settings), structure)
    return list(found.values())


def _problem(composer: Composer, structure: Structure, told: Told | None) -> str:
    """Reason why a structure rules out no candidate although it was traced, or failed to be; "" if it may."""
    made = composer.whole.get(composer.plain(structure))
    if made is not None:
        return made.problem
    if told is not None:
        return ""
    reasons = (m.problem for m in (*composer.sketches.values(), *composer.whole.values()) if m.model is None)
    return next(reasons, "a trace failed")


def _wanted(forecast: Forecast, room_bytes: float, *, most: int) -> list[Structure]:
    """Up to `most` structures to sketch: of the fastest candidates of each tier that may fit, the highest tier first.

    Nothing if all of them have a trace. Where nothing fits, the structure of the smallest candidate.
    """
    composer, found, space = forecast.composer, forecast.found, forecast.space
    assert composer is not None
    assert forecast.least_live_bytes is not None
    step, live = forecast.predictions.step_s, forecast.predictions.device_used_bytes - forecast.context_bytes
    structures = {place: s for s, places in found.places.items() for place in places}
    tiers = np.array([TIERS.index(space.tiers[c]) for c in found.candidates])
    best = []
    for tier in sorted(set(tiers.tolist())):
        mine = np.flatnonzero((tiers == tier) & np.isfinite(step))
        rooms = (forecast.least_live_bytes, _RESERVED * forecast.least_live_bytes, _RESERVED * live)
        for needed in rooms if len(mine) else ():
            fitting = mine[needed[mine] <= room_bytes]
            best.append(fitting[np.argmin(step[fitting])] if len(fitting) else mine[np.argmin(needed[mine])])
    wanted = dict.fromkeys(composer.plain(structures[int(place)]) for place in best)
    return [s for s in wanted if s not in composer.whole and s not in composer.sketches][: max(0, most)]


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests for models of the structures of a space."""

    found: Sorted
    device: str
    worst_case: Path

    def chunk(self, structure: Structure) -> int:
        """Micro-batches of a sketch's rollout: those of its step, or more if rollouts are reused."""
        return accumulation_of(self._ranked, one=bool(dict(structure)[ONE])) * (2 if self._reused else 1)

    @property
    def _ranked(self) -> bool:
        return not self.found.space.recipe.launch.is_alone

    @property
    def _reused(self) -> bool:
        recipe = self.found.space.recipe
        return recipe.generates and recipe.reuses_rollouts

    def whole(self, structure: Structure) -> Request:
        """A model of all variables, tested with all layers at one of the structure's shapes.

        It holds at the shapes of every structure: those without a model of their own are composed from it.
        """
        shapes = [self.found.shapes[p] for p in self.found.places.get(structure, ())] or self.found.shapes
        held = min(self._evaluated_alike(shapes), key=_trace_size)
        hold_out = {
            "B": held.micro, "accumulation": min(held.accumulation, 2 * held.chunk), "chunk": held.chunk,
            "r": held.rank, "C": held.completion,
        }  # fmt: skip
        every = self.found.shapes
        sizes = {"B": _span(s.micro for s in every), "G": _span(s.generated for s in every)}
        return {**self._common(structure), "hold_out": hold_out, "ranges": sizes | self._lengths_and_ranks(every)}

    def _evaluated_alike(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The subset of `shapes` with the recipe's own completions, if it evaluates: its evaluation is traced there."""
        own = shape_of(self.found.space, self.found.space.baseline)
        alike = [shape for shape in shapes if (shape.completion, shape.rank) == (own.completion, own.rank)]
        return alike if self.found.space.recipe.evaluated_samples and alike else shapes

    def sketch(self, structure: Structure) -> Request:
        """An untested model of the micro-batch alone, at the recipe's own completion length and rank."""
        own, shapes = shape_of(self.found.space, self.found.space.baseline), self.found.shapes
        micro = _span(n for s in shapes for n in (s.micro, s.generated))
        point = {"C": own.completion, "r": own.rank, "chunk": self.chunk(structure)}
        ranges = {"B": micro, **self._lengths_and_ranks(shapes)}
        return {**self._common(structure), "hold_out": point, "ranges": ranges, "sketch": True}

    def _common(self, structure: Structure) -> Request:
        space, recipe, settings = self.found.space, self.found.space.recipe, dict(structure)
        micro = shape_of(space, space.baseline).micro
        return {
            "trainer": recipe.trainer, "keys": recipe.keys.to_json(), "tile_tokens": recipe.tile_tokens,
            "architecture": recipe.architecture_hash, "device": self.device, "worst_case": str(self.worst_case),
            "values": merge(recipe.values, space.yaml_changes(self.found.representative(structure))),
            "large": settings[LARGE], "padded": settings[PADDED], "one": settings[ONE], "reused": self._reused,
            "varies_rank": recipe.uses_lora, "evaluated_group": recipe.evaluated_group,
            "micro": micro // (micro & -micro),
        }  # fmt: skip

    def _lengths_and_ranks(self, shapes: Sequence[Shape]) -> dict[str, tuple[float, float]]:
        return {
            "C": _widened(_span(s.completion for s in shapes), by=LONGER),
            "r": _widened(_span(s.rank for s in shapes), by=2),
        }


def _trace_size(shape: Shape) -> tuple[bool, int, int, int]:
    """Size of the test of a model: its micro-batches. Two at least, so that gradients accumulate in it."""
    return shape.accumulation < 2, min(shape.accumulation, 2 * shape.chunk), shape.chunk, shape.micro


def _span(numbers: Iterable[int]) -> tuple[int, int]:
    found = list(numbers)
    return min(found), max(found)


def _widened(span: tuple[int, int], *, by: int) -> tuple[float, float]:
    """`span` widened by the factor `by` on both sides, so that the model covers the user's next changes."""
    return span[0] / by, span[1] * by
