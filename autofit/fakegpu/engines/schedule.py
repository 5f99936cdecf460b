"""The order in which an engine works off sequences: chunked prefill, continuous batching, blocks of the cache.

Follows vLLM's scheduler (vllm/v1/core/sched/scheduler.py): in each step the running sequences come first, one token
each, then waiting ones while tokens, places and blocks are left. A prompt is admitted if all of it fits
(`scheduler_reserve_full_isl`). A sequence takes a block of the cache for every `block` tokens. If there is none left,
the latest running sequence loses its blocks and waits; what others took of them meanwhile is computed again. Prompts of
one group share the full blocks of their common prompt. Steps with the same sequences are one stretch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.engines.forward import Batch
from autofit.fakegpu.rates.products import Floats

Ints = npt.NDArray[np.int64]


class Stretch(NamedTuple):
    """`steps` equal steps; `context` is the mean number of tokens before the decoded ones, in the middle step."""

    steps: int
    decoding: int
    context: float
    prefilling: int
    queries: float  # tokens of each prefilling sequence, on average
    keys: float  # tokens that each of these queries attends to, on average
    ends: int  # prompts whose last token is among these


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """Limits of an engine: tokens of a step, sequences at once, blocks of the cache."""

    budget: int
    most_sequences: int
    blocks: int
    block: int = 16
    shares_prompts: bool = True

    def play(self, prompts: Sequence[int], tokens: int | Sequence[int], *, group: int) -> tuple[list[Stretch], int]:
        """(the stretches of a generation, number of preemptions): `tokens` tokens after each of the `prompts`.

        `tokens` is of all sequences, or one number for each. `group` prompts in a row are equal.
        """
        return _Play(self, prompts, tokens, group).run()


class _Play:
    """The state of one generation: arrays with an entry a sequence, and the numbers of those that run or wait."""

    def __init__(self, limits: Scheduler, prompts: Sequence[int], tokens: int | Sequence[int], group: int) -> None:
        count = len(prompts)
        self.limits = limits
        self.prompt = np.array(prompts, np.int64)  # tokens to prefill; after a preemption with the generated ones
        self.left = np.broadcast_to(np.asarray(tokens, np.int64), count).copy()  # tokens to generate
        self.computed = np.zeros(count, np.int64)
        self.group = np.arange(count) // group
        same = limits.shares_prompts and group > 1
        self.shared = (self.prompt - 1) // limits.block * same  # full blocks of the prompt that the group has in common
        self.cached: dict[int, int] = {}  # blocks that preempted sequences still find, the oldest first
        self.waiting: deque[int] = deque(range(count))
        self.running = np.zeros(0, np.int64)
        self.stretches: list[Stretch] = []
        self.preempted = 0

    def run(self) -> tuple[list[Stretch], int]:
        while self.waiting or len(self.running):
            if not self._mixed_step():
                self._decode()
        return self.stretches, self.preempted

    def _blocks(self, which: Ints, tokens: Ints) -> Ints:
        """Blocks that each sequence has for itself with so many tokens."""
        return np.asarray(np.maximum(0, -(-tokens // self.limits.block) - self.shared[which]))

    def _held(self) -> int:
        """Blocks of the running sequences with one more token each."""
        groups, first = np.unique(self.group[self.running], return_index=True)
        common = int(self.shared[self.running[first]].sum()) if len(groups) else 0
        return common + int(self._blocks(self.running, self.computed[self.running] + 1).sum())

    # ------------------------------------------------------------------ steps
    def _mixed_step(self) -> bool:
        """A step with prompts in it; False if there is nothing to prefill or no room for it."""
        whole = self.computed[self.running] >= self.prompt[self.running]
        decoding, begun = self.running[whole], self.running[~whole]
        if not len(begun) and (not self.waiting or len(self.running) >= self.limits.most_sequences):
            return False
        budget = self.limits.budget - len(decoding)
        free = self.limits.blocks - self._held()
        chunks: dict[int, int] = {}
        for number in begun.tolist():
            chunk = min(budget, int(self.prompt[number] - self.computed[number]))
            blocks = -(-(self.computed[number] + chunk) // self.limits.block) - -(
                -(self.computed[number] + 1) // self.limits.block
            )
            if blocks > free:
                self._preempt()
                return True
            if chunk > 0:
                chunks[number] = chunk
                budget, free = budget - chunk, free - int(blocks)
        chunks |= self._admit(budget, free)
        if not chunks:
            return False
        self._take(decoding, chunks)
        return True

    def _admit(self, budget: int, free: int) -> dict[int, int]:
        """Sequences that leave the queue, and the tokens of each in this step. A prompt must fit as a whole."""
        self._forget(free)
        block, groups = self.limits.block, set(self.group[self.running].tolist())
        places = self.limits.most_sequences - len(self.running)
        admitted: dict[int, int] = {}
        while self.waiting and len(admitted) < places and budget > 0:
            number = self.waiting[0]
            shared, group, prompt = int(self.shared[number]), int(self.group[number]), int(self.prompt[number])
            known = max(shared if group in groups else 0, self.cached.get(number, 0)) * block
            known = min(known, (prompt - 1) // block * block)
            blocks = max(0, -(-prompt // block) - shared) + (0 if group in groups else shared)
            if blocks > free:
                break
            chunk = min(budget, prompt - known)
            free, budget = free - blocks, budget - chunk
            groups.add(group)
            self.cached.pop(number, None)
            self.computed[self.waiting.popleft()] = known
            admitted[number] = chunk
        self.running = np.append(self.running, np.fromiter(admitted, np.int64, len(admitted)))
        return admitted

    def _preempt(self) -> None:
        """Take the blocks of the latest running sequence; it finds them again as long as no other needs them."""
        last = int(self.running[-1])
        if self.limits.shares_prompts:
            self.cached[last] = int(self.computed[last]) // self.limits.block
        if self.computed[last] >= self.prompt[last]:
            self.prompt[last] = self.computed[last] + 1
        self.computed[last] = 0
        self.waiting.appendleft(last)
        self.running = self.running[:-1]
        self.preempted += 1

    def _forget(self, free: int) -> None:
        """Drop cached blocks, those of the sequences preempted first, until the `free` blocks hold the rest."""
        over = sum(self.cached.values()) - max(0, free)
        for number in list(self.cached):
            if over <= 0:
                return
            cut = min(over, self.cached[number])
            self.cached[number] -= cut
            over -= cut

    def _take(self, decoding: Ints, chunks: dict[int, int]) -> None:
        numbers = np.fromiter(chunks, np.int64, len(chunks))
        sizes = np.fromiter(chunks.values(), np.int64, len(chunks))
        pairs = float((sizes * (self.computed[numbers] + (sizes + 1) / 2)).sum())
        context = float(self.computed[decoding].mean()) if len(decoding) else 0.0
        self.computed[numbers] += sizes
        self.computed[decoding] += 1
        ended = numbers[self.computed[numbers] >= self.prompt[numbers]]
        queries = float(sizes.mean())
        keys = pairs / float(sizes.sum())
        self.stretches.append(Stretch(1, len(decoding), context, len(numbers), queries, keys, len(ended)))
        self.left[ended] -= 1
        self.left[decoding] -= 1
        self.running = self.running[self.left[self.running] > 0]

    def _decode(self) -> None:
        """Steps in which nothing but the running sequences' next token is computed, as many as are alike."""
        running = self.running
        free = self.limits.blocks - self._held()
        if free < 0 and len(running) > 1:
            self._preempt()
            return
        steps = min(int(self.left[running].min()), 1 + self._further(max(0, free)))
        context = float(self.computed[running].mean()) + (steps - 1) / 2
        self.stretches.append(Stretch(steps, len(running), context, 0, 0.0, 0.0, 0))
        self.left[running] -= steps
        self.computed[running] += steps
        self.running = running[self.left[running] > 0]

    def _further(self, free: int) -> int:
        """Steps after the next one for which `free` blocks suffice: every sequence takes one in `block` steps."""
        block, count = self.limits.block, len(self.running)
        rounds, rest = divmod(free, count)
        until = (-(self.computed[self.running] + 1)) % block  # further tokens that fit the last block
        taken = np.cumsum(np.bincount(until, minlength=block))
        return rounds * block + int(np.searchsorted(taken, rest, side="right"))


def batches(stretches: list[Stretch]) -> tuple[Batch, Floats, Floats]:
    """(the batches of the stretches, sequences that are sampled in each, steps of each)."""
    columns = np.array([tuple(stretch) for stretch in stretches], float).reshape(-1, 7).T
    steps, decoding, context, prefilling, queries, keys, ends = columns
    return Batch(decoding, context + 1.0, prefilling, queries, keys), decoding + ends, steps
