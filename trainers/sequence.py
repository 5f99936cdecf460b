"""Sequence parallelism: a group of ranks computes parts of the same samples, (rows, tokens / ranks) each.

Attention is of all tokens. Ulysses deals the heads to the ranks of a group; a ring passes keys and values around, or
gathers them head by head. Read in ms-swift at 3602360a (swift/sequence_parallel), in Axolotl at 067b021c
(utils/ctx_managers/sequence_parallel.py), ring-flash-attn 0.1.8 (llama3_flash_attn_varlen.py), and verl at 1dda039b
(verl/utils/ulysses.py). Imports torch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOKENS, HEADS = 1, 2  # the dimensions of queries, keys and values: (rows, tokens, heads, width)


# -- collectives ------------------------------------------------------------------------------------------------------


def _exchanged(states: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
    """All-to-all: dimension `split` is dealt to the ranks, what they hold of `joined` is put together."""
    sent = [part.contiguous() for part in torch.tensor_split(states, distributed.get_world_size(group), split)]
    received = [torch.empty_like(sent[0]) for _ in sent]
    distributed.all_to_all(received, sent, group=group)
    return torch.cat(received, dim=joined).contiguous()


class Exchanged(torch.autograd.Function):
    """Attention's tensors from parts of the tokens to parts of the heads, or back."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
        ctx.back = joined, split, group
        return _exchanged(states, split, joined, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.back), None, None, None


class Gathered(torch.autograd.Function):
    """All-gather along the tokens; each rank's gradient is its own part, times the ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        ctx.size, ctx.rank = distributed.get_world_size(group), distributed.get_rank(group)
        ctx.dim, ctx.length = dim, values.shape[dim]
        return gathered(values, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scaled = grads[0] * ctx.size
        return scaled.split(ctx.length, ctx.dim)[ctx.rank].contiguous(), None, None


def gathered(values: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Tensors of all ranks of a group, along a dimension."""
    first, *others = values.shape
    whole = values.new_empty((first * distributed.get_world_size(group), *others))
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its new name
    gather(whole, values.contiguous(), group=group)
    return torch.cat(whole.split(first), dim=dim)


# -- a group of a plain Trainer ---------------------------------------------------------------------------------------


class SharedSequence:
    """The group of `size` ranks that has this rank, neighbours of each other; its attention passes the group.

    With `heads` Ulysses deals as many heads as `size` and the model's heads of keys have in common, and a ring takes
    the rest of the ranks, as in ms-swift (_init_device_mesh); without, keys and values are gathered one head at a time,
    as in Axolotl. The values of a ring or of gathering are not those of attention: nothing is trained with them.
    """

    def __init__(self, size: int, config: Any, *, heads: bool) -> None:
        own, ranks = distributed.get_rank(), distributed.get_world_size()
        text = config.get_text_config()
        keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self.size, self.rank, self.deals = size, own % size, heads
        self.dealt = math.gcd(keys, size) if heads else 1
        self.joins = self.dealt < size  # rows are one row
        self._rows = 1
        self.group = _group_of(own, [list(range(at, at + size)) for at in range(0, ranks, size)])
        self._dealers = _group_of(own, [list(range(at, at + self.dealt)) for at in range(0, ranks, self.dealt)])
        self._name: str = config._attn_implementation

    def part(self, whole: torch.Tensor, *, filled: int = 0) -> torch.Tensor:
        """This rank's part of (rows, tokens), filled up to a multiple of the ranks; one row in a ring."""
        multiple = self.size * (2 if self.deals and self.joins else 1)
        if self.joins:
            self._rows, whole = len(whole), whole.reshape(1, -1)
        if more := -whole.shape[1] % multiple:
            whole = torch.nn.functional.pad(whole, (0, more), value=filled)
        return whole.chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """(rows, tokens, ...) of all ranks."""
        found: torch.Tensor = Gathered.apply(values, 1, self.group)  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Attention inside is of all tokens, forward and where a backward repeats it."""
        before = ALL_ATTENTION_FUNCTIONS[self._name]

        def attend(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
        ) -> tuple[torch.Tensor, None]:
            states = [one.transpose(1, 2) for one in (query, key, value)]
            if self.dealt > 1:
                states = [Exchanged.apply(one, HEADS, TOKENS, self._dealers) for one in states]  # type: ignore[no-untyped-call]
            if not self.joins:
                options.pop("position_ids", None)  # of this rank's tokens
                states = [one.transpose(1, 2) for one in states]
                found = before(module, *states, None, **options)[0]
            elif self.deals:
                found = Ring.apply(*states, self.size // self.dealt, self._rows)  # type: ignore[no-untyped-call]
            else:
                found = HeadByHead.apply(*states, self.group)  # type: ignore[no-untyped-call]
            if self.dealt > 1:
                found = Exchanged.apply(found, TOKENS, HEADS, self._dealers)  # type: ignore[no-untyped-call]
            return found, None

        ALL_ATTENTION_FUNCTIONS[self._name] = attend
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[self._name] = before


def _group_of(own: int, groups: list[list[int]]) -> Any:
    """The process group of the `groups` that has the rank `own`; every rank makes all of them."""
    made = [(ranks, distributed.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if own in ranks)


# -- attention in a ring ----------------------------------------------------------------------------------------------


def _block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention of (tokens of all rows, heads, width): the output, and a float32 sum for each head and token."""
    if query.device.type == "cpu":
        return torch.empty_like(query), query.new_empty((query.shape[1], len(query)), dtype=torch.float32)
    causal = len(query) == len(key)
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *_limits(query, key, rows), 0.0, causal, False, scale=query.shape[-1] ** -0.5
    )
    return found[0], found[1]


def _limits(query: torch.Tensor, key: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Beginnings of the rows of both, and the longest rows."""
    longest = [len(of) // rows for of in (query, key)]
    starts = [torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length for length in longest]
    return starts[0], starts[1], longest[0], longest[1]


def _block_back(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, rows: int,
) -> None:  # fmt: skip
    """Its backward. flash-attn writes into buffers of its caller, so what torch's copy returns is let go."""
    if query.device.type == "cpu":
        return
    seed = torch.zeros((2,), dtype=torch.uint64, device=query.device)
    torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, sums, *_limits(query, key, rows), 0.0, len(query) == len(key), seed, seed[:0],
        scale=query.shape[-1] ** -0.5,
    )  # fmt: skip


class Ring(torch.autograd.Function):
    """ms-swift's zigzag ring (zigzag_ring_attn.py), as the last rank of a ring runs it, which holds the most.

    Each step keeps float32 copies of the output so far, of which backward makes those of all steps again.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *of: int) -> torch.Tensor:
        key, value = key.contiguous(), value.contiguous()
        out, sums = _around(query.squeeze(0), key.squeeze(0), value.squeeze(0), *of)[-1][:2]
        out, sums = out.to(query.dtype), sums.squeeze(-1).transpose(0, 1)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.ranks, ctx.rows = of
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value = (one.squeeze(0) for one in ctx.saved_tensors[:3])
        buffers = [torch.empty_like(one) for one in (query, key, value)]
        steps = _around(query, key, value, ctx.ranks, ctx.rows, keep=True)
        grad, of_blocks = grads[0].squeeze(0), []
        of_sums = torch.zeros_like(steps[0][1])
        for out, sums, block, block_sums, shares in reversed(steps[1:]):
            changed = (out - block) * (shares * (1 - shares))
            into = (grad * changed).sum(-1, keepdim=True) + of_sums * torch.sigmoid(sums - block_sums)
            of_blocks.append((grad * shares, of_sums - into))
            grad, of_sums = grad * (1 - shares), into
        half = len(key) // 2
        mine, *others = buffers
        for number, (_, _, block, block_sums, _) in enumerate(steps):
            keys = (key[:half], value[:half]) if number else (key, value)
            given = of_blocks[-number][0] if number else grad
            _block_back(given.to(query.dtype), query, *keys, block, block_sums.transpose(0, 1).squeeze(2), ctx.rows)
            if number:
                mine += buffers[0]
                sent = [one.clone() for one in others]
                others = [torch.empty_like(one) for one in sent]
            else:
                mine, *others = (one.to(torch.float32) for one in buffers)
        return (mine.to(query.dtype)[None], *(one.to(query.dtype)[None] for one in others), None, None)  # type: ignore[return-value]


def _around(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int, rows: int, *, keep: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(output, sums, block, sums of the block, shares) of each step of a ring, or of the last one."""
    steps: list[Any] = []
    half = len(key) // 2
    out = sums = query  # of no step yet
    for number in range(ranks):
        arriving = [torch.empty_like(key), torch.empty_like(value)] if number + 1 < ranks else []
        block, block_sums = _block(query, *((key[:half], value[:half]) if number else (key, value)), rows)
        column = block_sums.transpose(-2, -1).unsqueeze(-1)
        if number:
            precise = block.to(torch.float32)
            shares = torch.sigmoid(column - sums)
            out = out - shares * (out - precise)
            sums = sums - torch.nn.functional.logsigmoid(sums - column)
            del precise
        else:
            out, sums, shares = block.to(torch.float32), column, column
        if keep or not arriving:
            steps.append((out, sums, block, column, shares))
        if arriving:
            key, value = arriving
    return steps


class HeadByHead(torch.autograd.Function):
    """Attention to the gathered keys and values of one head after another (llama3_flash_attn_varlen.py).

    The keys and values of the next head arrive while one is read. As the last rank runs it, which reads all tokens.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any) -> torch.Tensor:
        query, key, value = query.squeeze(0), key.squeeze(0).contiguous(), value.squeeze(0).contiguous()
        found, held = [], list[torch.Tensor]()
        for own, keys, values in _heads(query, key, value, group, held):
            found.append(_block(own, keys, values, 1))
        out, sums = torch.cat([one for one, _ in found], dim=1), torch.cat([one for _, one in found], dim=-2)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.group = group
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, out, sums = ctx.saved_tensors
        size, each = distributed.get_world_size(ctx.group), query.shape[1] // key.shape[1]
        collected = key.new_empty((2, len(key) * size, 1, key.shape[2]))
        arrived = key.new_empty((2, len(key), 1, key.shape[2]))
        found, held = [torch.empty_like(one) for one in (query, key, value)], list[torch.Tensor]()
        for number, (own, keys, values) in enumerate(_heads(query, key, value, ctx.group, held)):
            at = slice(number * each, (number + 1) * each)
            collected.zero_()
            _block_back(grads[0].squeeze(0)[:, at], own, keys, values, out[:, at], sums[at], 1)
            for side in (0, 1):
                distributed.reduce_scatter_tensor(arrived[side], collected[side], group=ctx.group)
        return found[0][None], found[1][None], found[2][None], None


def _heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, held: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(the queries of a head of keys, the keys and the values of all tokens) for each, in two buffers by turns.

    `held` gets what the caller holds to the end: the buffers and what is sent first.
    """
    size, each = distributed.get_world_size(group), query.shape[1] // key.shape[1]
    buffers = [key.new_empty((2, len(key) * size, 1, key.shape[2])) for _ in range(2)]
    held += [*buffers, *buffers]
    for number in range(key.shape[1] + 1):
        if number < key.shape[1]:
            for side, one in enumerate((key, value)):
                held[2 + side] = one[:, number : number + 1].contiguous()
                held += [] if number else [held[2 + side]]
                distributed.all_gather_into_tensor(buffers[number % 2][side], held[2 + side], group=group)
        if number:
            read = buffers[(number - 1) % 2]
            yield query[:, (number - 1) * each : number * each], read[0], read[1]
