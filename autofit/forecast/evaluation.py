"""Bytes and seconds of shapes by a mass model, phase by phase, with those of a rollout engine. Free of torch."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import numpy as np

from autofit.fakegpu.engines.forward import PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.formula import Floats, MassModel
from autofit.fakegpu.formula.seconds import DECODE, REPEATED
from autofit.forecast.predictions import LATER, Shape
from autofit.plugin.protocol import EVALUATION, LOAD, ROLLOUT, SCORING, SYNC, UPDATE, WAKE_UP

Engine = VllmEngine | PagedBatching
LAST = "!"  # suffix of the segment of a step's last micro-batch, where several ranks add up their gradients in it
BETWEEN = "between"  # two steps: the next one's micro-batches are fetched beside the last one's
_ONCE = (UPDATE, UPDATE + LATER + LAST, "optimizer", BETWEEN)  # segments that run once in an optimizer step
OF_MICRO_BATCH = (UPDATE, "optimizer", BETWEEN)
_OF_ROLLOUT = (ROLLOUT, WAKE_UP, SYNC, DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Peak live bytes of each phase, and seconds of each segment in one optimizer step; an entry for each shape."""

    shapes: tuple[Shape, ...]
    peaks: Mapping[str, Floats]
    seconds: Mapping[str, Floats]

    @classmethod
    def of(cls, model: MassModel, layers: int, shapes: tuple[Shape, ...]) -> "Parts":
        rows = np.array([(s.micro, s.generated, s.completion, s.rank) for s in shapes], float)
        values = dict(zip(("B", "G", "C", "r"), rows.T, strict=True))
        once = model.seconds(values, layers, values["C"])
        seconds = {name: passes(name, shapes, once) * each for name, each in once.items()}
        added = np.array([s.accumulation - model.micro_batches for s in shapes], float)  # micro-batches of a step
        more = model.sample_bytes * values["B"] * added
        peaks = {
            phase: peak + (2 if phase == BETWEEN else 1) * more for phase, peak in model.peaks(values, layers).items()
        }
        return cls(shapes=shapes, peaks=peaks, seconds=seconds)

    @property
    def held_bytes(self) -> Floats:
        """Lower bound of the bytes held all the time: the peak of the smallest phase, once the training runs."""
        return _held(self.peaks)

    def with_evaluated(self, evaluated: "Evaluated | None", *, least: bool = False) -> "Parts":
        """These parts and the evaluation within the training, if there is one; with `least` as far as it was traced."""
        if evaluated is None:
            return self
        return replace(self, peaks={**self.peaks, EVALUATION: evaluated.at(self, least=least)})

    def with_engine(self, engine: Engine | None, prompt_tokens: int) -> "Parts":
        """These parts and those of a rollout engine, which a mass model leaves out."""
        if engine is None:
            return self
        rollouts = [
            Rollout(completions=s.generated, group=s.group, prompt=prompt_tokens, tokens=s.completion, share=s.share,
                    longest=s.longest)
            for s in self.shapes
        ]  # fmt: skip
        often = {name: passes(name, self.shapes, self.seconds) for name in self.seconds}
        once = {name: each / np.maximum(often[name], 1.0) for name, each in self.seconds.items()}
        peaks, spent = with_engine(engine, rollouts, self.peaks, once)
        seconds = {name: passes(name, self.shapes, spent) * each for name, each in spent.items()}
        return Parts(shapes=self.shapes, peaks=peaks, seconds=seconds)

    @property
    def live_bytes(self) -> Floats:
        """Peak live bytes of the whole training."""
        return live_bytes(self.peaks, self.shapes)

    @property
    def step_s(self) -> Floats:
        return _sum(self.seconds.values(), len(self.shapes))

    @property
    def before_update_s(self) -> Floats:
        """Seconds of an optimizer step before its update."""
        before = [each for segment, each in self.seconds.items() if plain(segment) not in OF_MICRO_BATCH]
        return _sum(before, len(self.shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The evaluation in a training of one shape, which was traced: its batch has a size of its own."""

    peak_bytes: float
    held_bytes: float  # of what the training holds throughout
    prompt: int  # tokens
    completion: int

    @classmethod
    def of(cls, peak_bytes: float, parts: Parts, *, prompt: int) -> "Evaluated":
        """That with the `parts` of a single shape."""
        (shape,), (held,) = parts.shapes, parts.held_bytes
        return cls(peak_bytes=peak_bytes, held_bytes=float(held), prompt=prompt, completion=shape.completion)

    def at(self, parts: Parts, *, least: bool) -> Floats:
        """Its peak bytes in trainings of other shapes: where completions have another length, in proportion to that.

        With `least` those have what is held throughout and no more.
        """
        completions = np.array([shape.completion for shape in parts.shapes], float)
        share = (self.prompt + completions) / max(1, self.prompt + self.completion)
        share = np.where(completions == self.completion, 1.0, 0.0 if least else share)
        return np.asarray(parts.held_bytes + share * (self.peak_bytes - self.held_bytes), dtype=np.float64)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def _held(peaks: Mapping[str, Floats]) -> Floats:
    phases = [peak for phase, peak in peaks.items() if phase != LOAD] or list(peaks.values())
    return np.asarray(np.min(phases, axis=0), dtype=np.float64)


def _sum(each: Iterable[Floats], count: int) -> Floats:
    return np.asarray(np.sum([np.zeros(count), *each], axis=0), dtype=np.float64)


def live_bytes(peaks: Mapping[str, Floats], shapes: Sequence[Shape]) -> Floats:
    """The maximum over the phases that happen in a training of these shapes."""
    accumulation = np.array([s.accumulation for s in shapes])
    served = np.array([s.served for s in shapes])
    live = np.zeros(len(shapes))
    for phase, peak in peaks.items():
        later = phase.endswith(LATER)
        happens = (
            (accumulation > 1) if phase == UPDATE + LATER else (served < accumulation) if later else accumulation > 0
        )
        live = np.maximum(live, np.where(happens, peak, 0.0))
    return live


def passes(segment: str, shapes: Sequence[Shape], segments: Collection[str] = ()) -> Floats:
    """Number of runs of `segment` in an optimizer step, of all the `segments` that a model tells apart.

    The update of the first micro-batch makes the gradients, to which later ones add theirs; the last of several adds
    them up over the ranks. Without completions there are no rollouts, and what is scored before the training (DPO's
    reference) is one micro-batch after the other.
    """
    accumulation = np.array([s.accumulation for s in shapes], float)
    if segment == UPDATE + LATER:
        return np.maximum(0.0, accumulation - (2.0 if UPDATE + LATER + LAST in segments else 1.0))
    if segment == SCORING and not any(s.completion for s in shapes):
        return accumulation
    if segment in _ONCE:
        return np.ones(len(shapes))
    often = np.array([s.passes if segment.endswith(REPEATED) else s.served for s in shapes], float)
    return np.asarray(accumulation / often)


def plain(segment: str) -> str:
    """The segment or phase less its suffix."""
    return segment.removesuffix(REPEATED).removesuffix(LAST).removesuffix(LATER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketched:
    """Figures of a sketch (a model of the micro-batch alone) for shapes: bytes of a phase, seconds of one pass."""

    peaks: Mapping[str, Floats]
    seconds: Mapping[str, Floats]
    engine: Engine | None = None  # of the rollout; its bytes and seconds are not among these

    @property
    def held_bytes(self) -> Floats:
        """As of `Parts`."""
        return _held(self.peaks)

    @classmethod
    def of(
        cls, model: MassModel, layers: int, shapes: tuple[Shape, ...], *, completion: int, chunk: int, prompt: int = 0
    ) -> "Sketched":
        """A rollout of the sketch is `chunk` micro-batches, so rollouts are evaluated at a micro-batch of their size.

        `completion` is that of the sketch, after the longest prompt of `prompt` tokens. Completions of another length
        are evaluated at a micro-batch of as many tokens, whose bytes they hold; seconds stay those of the sketch.
        """
        steps = np.full(len(shapes), float(completion))
        micro = np.array([s.micro for s in shapes], float)
        generated = np.array([s.generated / chunk for s in shapes], float)
        own = prompt + completion  # 0 of a trainer that does not generate
        longer = np.array([(prompt + s.completion) / own if own else 1.0 for s in shapes])
        at_micro, at_rollout = (
            (model.peaks({"B": longer * b}, layers), model.seconds({"B": b}, layers, steps)) for b in (micro, generated)
        )
        peaks, seconds = (
            {name: (at_rollout if plain(name) in _OF_ROLLOUT else at_micro)[which][name] for name in at_micro[which]}
            for which in (0, 1)
        )
        return cls(peaks=peaks, seconds=seconds, engine=model.engine)


# -- rollout engines --------------------------------------------------------------------------------------------------
# An engine's cache fills its share of the card, and its seconds follow from a schedule. Neither is a polynomial of the
# candidate, so both are computed for each candidate from the engine's own law.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One candidate's generation: completions at once and in a group, lengths, and the engine's share and length.

    A share of 0 and a longest sequence of 0 are those that were traced.
    """

    completions: int
    group: int
    prompt: int
    tokens: int
    share: float = 0.0
    longest: int = 0

    def engine(self, traced: VllmEngine) -> VllmEngine:
        """The engine of this candidate; TRL's takes as many sequences at once as there are completions."""
        if traced.remote:
            return traced
        return replace(
            traced, utilization=self.share or traced.utilization, longest=self.longest or traced.longest,
            most_sequences=self.completions * traced.ranks,
        )  # fmt: skip

    def _largest_part(self, completions: int, copies: int) -> int:
        """Completions of the busiest of the server's cards: whole prompts are divided among them."""
        group = max(1, self.group)
        return -(-(completions // group) // copies) * group

    def seconds(self, traced: VllmEngine) -> float:
        """Seconds of one generation, with synchronisation and sleep."""
        engine = self.engine(traced)
        whole = self.completions * engine.ranks * engine.served
        prompts = (self.prompt,) * (whole if engine.copies == 1 else self._largest_part(whole, engine.copies))
        blocks = engine.usable_blocks(prompts, self.tokens)
        alike = replace(engine, utilization=1.0, longest=1, weights_bytes=0, sync_s=0.0, sleeps=False)
        generation_s = _generation_s(alike, prompts, self.tokens, self.group, blocks)
        return traced.sync_s + engine.switch_s + generation_s


@lru_cache(maxsize=4096)
def _generation_s(engine: VllmEngine, prompts: tuple[int, ...], tokens: int, group: int, blocks: int) -> float:
    """Seconds of one generation. Shares of the card that have room for all sequences have one answer."""
    whole = group if group and len(prompts) % group == 0 else 1
    return engine.generation_s(prompts, tokens, group=whole, blocks=blocks)


def held_bytes(engine: VllmEngine, phase: str) -> int:
    """Bytes that the engine holds at most in `phase`."""
    name = phase.removesuffix(LATER)
    if name in (LOAD, ROLLOUT):
        return engine.held_bytes(weights=True, cache=True, computing=True)
    weights = not engine.sleeps or engine.keeps_weights or name in (WAKE_UP, SYNC)
    return engine.held_bytes(weights=weights, cache=not engine.sleeps)


def with_engine(
    engine: Engine | None, rollouts: Sequence[Rollout], peaks: Mapping[str, Floats], seconds: Mapping[str, Floats],
) -> tuple[dict[str, Floats], dict[str, Floats]]:  # fmt: skip
    """The peaks of each phase and the seconds of each segment of a mass model, with its engine's.

    An engine that does not start needs more than the whole card: the card, and the bytes that its share lacks.
    """
    if engine is None:
        return dict(peaks), dict(seconds)
    if isinstance(engine, PagedBatching):
        return _with_batching(engine, rollouts, peaks, seconds)
    kinds = [(rollout.completions, rollout.share, rollout.longest) for rollout in rollouts]
    engines = {kind: rollout.engine(engine) for kind, rollout in zip(kinds, rollouts, strict=True)}  # few are different

    def of_each(nbytes: Callable[[VllmEngine], int]) -> Floats:
        found = {kind: nbytes(each) for kind, each in engines.items()}
        return np.array([found[kind] for kind in kinds], float)

    found = {phase: held + of_each(partial(held_bytes, phase=phase)) for phase, held in peaks.items()}
    lacking = of_each(lambda each: each.spec.capacity_bytes + each.missing_bytes if each.missing_bytes else 0)
    found[LOAD] = np.maximum(found.get(LOAD, np.zeros(len(rollouts))), lacking)
    spent = np.array([rollout.seconds(engine) for rollout in rollouts])
    return found, _with(seconds, spent)


def _with_batching(
    engine: PagedBatching, rollouts: Sequence[Rollout], peaks: Mapping[str, Floats], seconds: Mapping[str, Floats]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """The same for continuous batching of transformers, whose traced steps are among the seconds."""
    found, none = dict(peaks), np.zeros(len(rollouts))
    live, steps = peaks.get(ROLLOUT, none), seconds.get(DECODE, none)
    spent, lacking = none.copy(), none.copy()
    for i, rollout in enumerate(rollouts):
        prompts, held = [rollout.prompt] * rollout.completions, float(live[i])
        law = replace(engine, step_s=float(steps[i]) / max(1, rollout.tokens))
        spent[i] = law.added_s(prompts, rollout.tokens, held)
        if not law.waves(prompts, rollout.tokens, held):
            one = law.decoder.kv_bytes_per_token * (rollout.prompt + rollout.tokens)
            lacking[i] = law.spec.capacity_bytes + one
    for phase in (name for name in peaks if name.removesuffix(LATER) == ROLLOUT):
        found[phase] = np.maximum(peaks[phase] + engine.cache_bytes(peaks[phase]), lacking)
    return found, _with(seconds, spent)


def _with(seconds: Mapping[str, Floats], spent: Floats) -> dict[str, Floats]:
    return {**seconds, ROLLOUT: seconds.get(ROLLOUT, np.zeros(len(spent))) + spent}
