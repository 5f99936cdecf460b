"""vLLM in the process of a trainer: the memory that it holds, and the seconds of a generation.

Facts are those of the versions that TRL 1.16 takes, 0.22 to 0.31 (`is_vllm_available`), read in vLLM's source:

- memory (vllm/v1/worker/gpu_worker.py, `determine_available_memory`): weights, the peak of a profiling run, and CUDA
  graphs (since 0.21) are taken from `gpu_memory_utilization` times the card; the cache gets the rest.
- graphs (vllm/config/vllm.py): batches up to twice `max_num_seqs`, at most 512, are captured, in steps of 8 and 16.
- seconds: the host prepares a step while the card computes the one before (asynchronous scheduling, the default), so
  a step takes the longer of both.
- order (vllm/v1/core/sched/scheduler.py): in each step the running sequences come first, one token each, then waiting
  ones while tokens, places and blocks are left. A prompt is admitted if all of it fits
  (`scheduler_reserve_full_isl`). A sequence takes a block of the cache for every `block` tokens. If there is none
  left, the latest running sequence loses its blocks and waits; what others took of them meanwhile is computed again.
  Prompts of one group share the full blocks of their common prompt. Steps with the same sequences are one stretch.

By their metadata, with transformers from 5.17 (autofit's floor): 0.22 to 0.30 take any such version, 0.31.0 only 5.17
(<5.18). 0.22 to 0.26 want torch 2.11.0 exactly, 0.27 to 0.31 torch 2.13.0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.engines.forward import ITEM, Decoder, Forward, ForwardPasses, facts_from_json, kernel_seconds
from autofit.fakegpu.rates.kernels import Floats
from autofit.fakegpu.specs import FakeGpuError, GpuSpec, HostCosts

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
        """Blocks that each sequence has for itself with this number of tokens."""
        return np.asarray(np.maximum(0, -(-tokens // self.limits.block) - self.shared[which]))

    def _held(self) -> int:
        """Blocks of the running sequences with one more token each."""
        groups, first = np.unique(self.group[self.running], return_index=True)
        common = int(self.shared[self.running[first]].sum()) if len(groups) else 0
        return common + int(self._blocks(self.running, self.computed[self.running] + 1).sum())

    # ------------------------------------------------------------------ steps
    def _mixed_step(self) -> bool:
        """A step with prompts in it; False if all are prefilled or there is no room."""
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
        """Take the blocks of the latest running sequence; it finds them again unless another needs them first."""
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
        """Steps that compute only the running sequences' next tokens, as many as are alike."""
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


def batches(stretches: list[Stretch]) -> tuple[ForwardPasses, Floats, Floats]:
    """(the batches of the stretches, sequences that are sampled in each, steps of each)."""
    columns = np.array([tuple(stretch) for stretch in stretches], float).reshape(-1, 7).T
    steps, decoding, context, prefilling, queries, keys, ends = columns
    return ForwardPasses(decoding, context + 1.0, prefilling, queries, keys), decoding + ends, steps


BLOCK_TOKENS = 16
MOST_CAPTURED = 512
# Bytes of the graphs of one size: "Estimated CUDA graph memory: 0.73 GiB" of 51 + 35 graphs, the largest figure found
# (vllm-project/vllm#39559; 0.52 GiB of an 8B model in LMCache/LMCache#3430).
_GRAPH_BYTES = int(0.73 * 2**30 / 86)
_LIBRARIES_BYTES = int(0.15 * 2**30)  # "non_torch_memory takes 0.15GiB" (vllm-project/vllm#17117)
# Live bytes of the sampler for each logit when it is profiled, with top-k and top-p: the logits in half and single
# precision, and the sorted values, their numbers (8 bytes) and the buffers of the sort (vllm/v1/sample).
_SAMPLER_BYTES = 2 + 4 + 4 + 8 + 12
# Bytes that sampling one token moves for each logit (vllm/v1/sample/sampler.py): to single precision, temperature,
# softmax, exponential noise, division, maximum; with log-probabilities also log_softmax and the rank of the token.
_GREEDY_BYTES, _RANDOM_BYTES, _LOGPROB_BYTES = 10, 46, 16
_GREEDY_KERNELS, _RANDOM_KERNELS, _LOGPROB_KERNELS = 3, 7, 4
_INPUT_KERNELS = 10  # copies and small kernels that prepare a step's positions, slots and tables
# Seconds to sleep at level 2 by GiB freed (0.31 s for 47.4 GiB, 0.12 for 32: vllm-project/vllm#48337, A100), and to
# wake up by GiB mapped (up to 0.4 s, blog.vllm.ai/2025/10/26/sleep-mode.html, taken as of as many GiB).
_SLEEP_S_PER_GIB, _WAKE_S_PER_GIB = 0.31 / 47.4, 0.4 / 47.4
# Host seconds of a step: scheduling 0.2 ms, states and inputs 0.23 ms (vllm-project/vllm#42131, one sequence), the
# output's update 1.1 us a sequence (vllm-project/vllm#46112: 0.287 ms for 256). Detokenising is not measured: as much.
_STEP_HOST_S = 0.43e-3
# A launch from compiled code, as a share of one with the modules' Python: no more than a single operator called from
# Python, which took 6 us (github zebra-uestc/llaisys, docs/ops/nvidia.md), of 18.3 us.
_COMPILED_LAUNCH = 6 / 18.3
_SEQUENCE_HOST_S = 2.2e-6


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of buffers (vllm/config/lora.py, MaxLoRARanks)


def adapter_bytes(decoder: Decoder, *, rank: int, ranks: int) -> int:
    """Bytes of a card's buffers for one adapter of `rank` beside the products of attention and of dense MLPs.

    A matrix that a product's inputs meet is whole on each of the `ranks` where its columns are dealt out, and the other
    one where its rows are (vllm/lora/layers, create_lora_weights, without fully_sharded_loras).
    """
    if not rank:
        return 0
    held = next((most for most in _LORA_RANKS if most >= rank), rank)
    (merged, hidden), (out, heads) = decoder.products(ranks)
    dense = decoder.dense_layers if decoder.experts else decoder.layers
    width = (decoder.dense_intermediate or decoder.intermediate) // ranks
    up = 2 if decoder.gated else 1
    attention = 3 * hidden + merged + heads + out
    mlp = up * (hidden + width) + width + hidden
    return ITEM * held * (decoder.layers * attention + dense * mlp)


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """One engine on the card `spec`; `weights_bytes` are those of one of its `ranks`."""

    spec: GpuSpec
    costs: HostCosts
    decoder: Decoder
    weights_bytes: int
    utilization: float
    longest: int  # tokens of the longest sequence that it must be able to serve (max_model_len)
    most_sequences: int
    ranks: int = 1
    batched_tokens: int = 4096  # as TRL sets it
    shares_prompts: bool = True
    greedy: bool = False
    logprobs: bool = True
    eager: bool = False  # enforce_eager: without graphs
    waits: bool = False  # whether the host prepares a step only after the one before (no asynchronous scheduling)
    lora_rank: int = 0  # of adapters that are served beside the model
    sleeps: bool = False  # whether it sleeps outside of generation
    keeps_weights: bool = False  # whether its weights stay on the card while it sleeps
    static_share: bool = False  # whether the share is of weights and cache alone, as SGLang's is
    remote: bool = False  # whether it is on another card, as TRL's server is
    served: int = 1  # ranks whose prompts a server gets
    copies: int = 1  # cards of a server, each with a copy of the model and its part of the prompts
    sync_s: float = 0.0  # seconds of one synchronisation of the weights
    share_key: str = "vllm_gpu_memory_utilization"  # the user's names of `utilization` and `longest`
    length_key: str = "vllm_max_model_length"

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise FakeGpuError(f"{self.share_key} must be above 0 and at most 1; got {self.utilization}")

    # ------------------------------------------------------------------ memory
    @property
    def share_bytes(self) -> int:
        return int(self.utilization * self.spec.capacity_bytes)

    @property
    def graph_sizes(self) -> list[int]:
        """Numbers of tokens for which a graph is captured."""
        most = 0 if self.eager else min(2 * self.most_sequences, MOST_CAPTURED, self.batched_tokens)
        return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED + 1, 16)) if size <= most]

    @property
    def graph_bytes(self) -> int:
        """Memory of the captured graphs: one a size for mixed batches, and one for pure decoding."""
        decoding = sum(size <= self.most_sequences for size in self.graph_sizes)
        return _GRAPH_BYTES * (len(self.graph_sizes) + decoding)

    @property
    def activation_bytes(self) -> int:
        """The peak of the profiling run: a full step of the longest layer, or the sampler of all sequences."""
        decoder, tokens = self.decoder, self.batched_tokens
        width = max(decoder.intermediate * max(1, decoder.experts_per_token), decoder.dense_intermediate)
        layer = tokens * ITEM * (3 * decoder.hidden + 3 * width // self.ranks)
        sampler = min(self.most_sequences, self.batched_tokens) * decoder.vocab * _SAMPLER_BYTES
        return tokens * ITEM * decoder.hidden + max(layer, sampler)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the share beside weights and cache."""
        return self.activation_bytes + self.graph_bytes + _LIBRARIES_BYTES

    @property
    def cache_bytes(self) -> int:
        """Bytes left for the cache; 0 or below if there are none."""
        inside = 0 if self.static_share else self.overhead_bytes
        return self.share_bytes - self.weights_bytes - inside

    @property
    def token_bytes(self) -> int:
        return max(1, self.decoder.vllm_bytes_per_token(self.ranks))

    @property
    def blocks(self) -> int:
        return max(0, self.cache_bytes) // (self.token_bytes * BLOCK_TOKENS)

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the share is too small for one sequence of `longest` tokens; vLLM refuses to start then."""
        return max(0, self.token_bytes * self.longest - self.cache_bytes)

    @property
    def least_share(self) -> float:
        """The least `utilization` with which the engine starts, up to the next hundredth; above 1: none."""
        beside = self.share_bytes - self.cache_bytes
        return math.ceil(100 * (beside + self.token_bytes * self.longest) / self.spec.capacity_bytes) / 100

    @property
    def refusal(self) -> str:
        """Reason why the engine fails to start; "" if it starts."""
        if not self.missing_bytes:
            return ""
        parts = (self.share_bytes, self.weights_bytes, self.overhead_bytes, self.token_bytes * self.longest)
        share, weights, overhead, sequence = (f"{count / 1e9:.2f} GB" for count in parts)
        least = self.least_share
        raised = f"raise the share to {least:.2f}" if least <= 1 else "no share of this card is enough"
        shorter = f" or set a lower {self.length_key}" if self.blocks else ""
        return (
            f"vLLM's share of the card ({self.share_key}={self.utilization}) is {share}: weights take "
            f"{weights}, profiling and graphs {overhead}, and one sequence of {self.longest:,} tokens {sequence}; "
            f"{raised}{shorter} (vLLM says: No available memory for the cache blocks)"
        )

    def held_bytes(self, *, weights: bool, cache: bool, computing: bool = False) -> int:
        """Bytes on the trainer's card: with `weights`, `cache`, and the live bytes while `computing`."""
        if self.remote:
            return 0
        parts = (weights, self.weights_bytes), (cache, max(0, self.cache_bytes)), (computing, self.activation_bytes)
        return self.graph_bytes + _LIBRARIES_BYTES + sum(nbytes for held, nbytes in parts if held)

    # ------------------------------------------------------------------ seconds
    @property
    def switch_s(self) -> float:
        """Seconds of one sleep and of waking up again."""
        share_gib = (self.share_bytes - self.overhead_bytes) / 2**30
        return (_SLEEP_S_PER_GIB + _WAKE_S_PER_GIB) * max(0.0, share_gib) if self.sleeps else 0.0

    def sleep_s(self, nbytes: int) -> float:
        return _SLEEP_S_PER_GIB * nbytes / 2**30

    def wake_s(self, nbytes: int) -> float:
        return _WAKE_S_PER_GIB * nbytes / 2**30

    def usable_blocks(self, prompts: Sequence[int], tokens: int | Sequence[int]) -> int:
        """Blocks of the cache that such a generation can use; at least those of one sequence."""
        most = tokens if isinstance(tokens, int) else max(tokens)
        each = -(-(max(prompts) + most) // BLOCK_TOKENS)
        return max(each, min(self.blocks, each * len(prompts)))

    def generation_s(
        self, prompts: Sequence[int], tokens: int | Sequence[int], *, group: int = 1, blocks: int | None = None
    ) -> float:
        """Seconds of `tokens` tokens after each of `prompts` (lengths), of which `group` in a row are equal.

        `tokens` is of all sequences, or one number for each. `blocks` replaces the cache's own.
        """
        scheduler = Scheduler(
            budget=self.batched_tokens, most_sequences=self.most_sequences,
            blocks=blocks or self.usable_blocks(prompts, tokens), block=BLOCK_TOKENS,
            shares_prompts=self.shares_prompts,
        )  # fmt: skip
        stretches, _ = scheduler.play(list(prompts), tokens, group=group)
        batch, sampled, steps = batches(stretches)
        return float(steps @ self.steps_s(batch, sampled))

    def steps_s(self, batch: ForwardPasses, sampled: Floats) -> Floats:
        """Seconds of one step of each batch: the card's or the host's, whichever is longer."""
        card, launching = self.card_s(batch, sampled), self._launching_s(batch)
        host = _STEP_HOST_S + _SEQUENCE_HOST_S * (batch.decoding + batch.prefilling)
        return np.asarray(host + np.maximum(card, launching) if self.waits else np.maximum(card, host + launching))

    def card_s(self, batch: ForwardPasses, sampled: Floats) -> Floats:
        """Seconds of the card's kernels."""
        forward = self.forward
        sampling = _GREEDY_BYTES if self.greedy else _RANDOM_BYTES
        count = _GREEDY_KERNELS if self.greedy else _RANDOM_KERNELS
        if self.logprobs:
            sampling, count = sampling + _LOGPROB_BYTES, count + _LOGPROB_KERNELS
        logits = forward.moving(sampled * self.decoder.vocab * sampling / count, count)
        small = _INPUT_KERNELS * forward.kernels.shortest_s
        head = np.where(sampled > 0, forward.head_s(np.maximum(sampled, 1.0)) + logits, 0.0)
        return np.asarray(forward.layers_s(batch, self._padded(batch.tokens)) + head + small)

    def _padded(self, tokens: Floats) -> Floats:
        """The number of tokens computed: those of the next larger captured graph, if there is one."""
        sizes = np.array(self.graph_sizes or [0], float)
        place = np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)
        return np.where(tokens <= sizes[-1], sizes[place], tokens)

    def _launching_s(self, batch: ForwardPasses) -> Floats:
        """Host seconds of launches outside a single graph: attention between the graphs of a mixed batch.

        With enforce_eager nothing is compiled either (vllm/config, CompilationLevel.NO_COMPILATION).
        """
        launch_s = (1.0 if self.eager else _COMPILED_LAUNCH) * self.costs.launch_s
        largest = self.graph_sizes[-1] if self.graph_sizes else 0
        whole = (batch.prefilling == 0) & (batch.tokens <= min(largest, self.most_sequences))
        # adapters: three launches for each of four products; and one for each of two sums over the cards
        further = 12 * bool(self.lora_rank) + 2 * (self.ranks > 1)
        pieces = np.where(batch.tokens <= largest, 3.0, 11.0 + further)  # a layer
        return np.asarray(np.where(whole, 0.0, launch_s * pieces * self.decoder.layers))

    @cached_property
    def forward(self) -> Forward:
        kernels = kernel_seconds(self.spec, self.costs)
        return Forward(decoder=self.decoder, kernels=kernels, ranks=self.ranks, lora_rank=self.lora_rank)

    # ------------------------------------------------------------------ on disk
    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> VllmEngine:
        return cls(**{**kept, **facts_from_json(kept)})
