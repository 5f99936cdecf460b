"""What a rollout engine adds to a mass model: the bytes that it holds in each phase, and the seconds of a generation.

An engine's cache fills its share of the card, and its seconds follow from a schedule. Neither is a polynomial of the
candidate, so both are computed for each candidate from the engine's own law. Needs no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from autofit.fakegpu.engines.continuous import PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.formula import Floats
from autofit.fakegpu.formula.seconds import DECODE
from autofit.forecast.structures import LATER
from autofit.plugin.protocol import LOAD, ROLLOUT, SYNC, WAKE_UP

Engine = VllmEngine | PagedBatching


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
    engine: Engine | None,
    rollouts: Sequence[Rollout],
    peaks: Mapping[str, Floats],
    seconds: Mapping[str, Floats],
) -> tuple[dict[str, Floats], dict[str, Floats]]:
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
