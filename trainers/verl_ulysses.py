"""Ulysses' sequence parallelism: a group of ranks has parts of the same packed samples, in attention of their heads.

Read in verl at commit 1dda039b: verl/utils/ulysses.py and verl/models/transformers/monkey_patch.py. Imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed
from transformers.integrations import flash_attention
from transformers.modeling_flash_attention_utils import _flash_attention_forward

_TOKENS, _HEADS = 1, 2  # the dimensions of queries, keys and values: (1, tokens, heads, width)


class Ulysses:
    """One group of `size` ranks, which verl makes of neighbours; attention of transformers' flash kernels passes it.

    verl gathers the positions of all tokens in each layer, which happens here too; their values are those of `begin`,
    because on a simulated card the other ranks have none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        own, ranks = distributed.get_rank(), distributed.get_world_size()
        self.rank = own % size
        self.group = [distributed.new_group(list(range(at, at + size))) for at in range(0, ranks, size)][own // size]
        self._data = [distributed.new_group(list(range(at, ranks, size))) for at in range(size)][self.rank]
        self._positions: torch.Tensor | None = None

    def count(self, device: torch.device) -> None:
        """The sum of a batch's tokens over the ranks with other samples, in a group of their own with its buffers."""
        distributed.all_reduce(torch.zeros((), device=device), group=self._data)

    def part(self, packed: torch.Tensor) -> torch.Tensor:
        """This rank's part of (1, tokens), which is padded to a multiple of the ranks."""
        return self._padded(packed).chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, values: torch.Tensor, tokens: int) -> torch.Tensor:
        """The numbers of all `tokens` from each rank's part."""
        found: torch.Tensor = _Gathered.apply(values, self)  # type: ignore[no-untyped-call]
        return found[:tokens]

    def begin(self, positions: torch.Tensor) -> None:
        """The model computes tokens of these positions next, (1, tokens) of all ranks, forward and backward."""
        self._positions = self._padded(positions)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Attention inside is of all tokens and a part of the heads, forward and where a backward repeats it."""
        with mock.patch.object(flash_attention, "_flash_attention_forward", self._attend):
            yield

    def _padded(self, packed: torch.Tensor) -> torch.Tensor:
        more = -packed.shape[1] % self.size
        return torch.nn.functional.pad(packed, (0, more)) if more else packed

    def _of_all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Exchanged.apply(states, _HEADS, _TOKENS, self.group)  # type: ignore[no-untyped-call]
        return found

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, query_length: int,
        position_ids: torch.Tensor, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's tokens and all heads, (1, tokens / ranks, heads, width)."""
        key, value = (_repeated(states, self.size) for states in (key, value))
        query, key, value = (self._of_all_tokens(states) for states in (query, key, value))
        parts = [torch.empty_like(position_ids) for _ in range(self.size)]
        distributed.all_gather(parts, position_ids, group=self.group)
        gathered = torch.cat(parts, dim=-1)
        assert self._positions is not None
        assert gathered.shape == self._positions.shape
        found = _flash_attention_forward(
            query, key, value, *args, query_length=query.shape[_TOKENS], position_ids=self._positions, **options
        )
        back: torch.Tensor = _Exchanged.apply(found, _TOKENS, _HEADS, self.group)  # type: ignore[no-untyped-call]
        return back


def _repeated(states: torch.Tensor, ranks: int) -> torch.Tensor:
    """Keys or values with each head as often as lets every rank have one."""
    tokens, heads, width = states.shape[1:]
    times = ranks // heads
    if times <= 1:
        return states
    return states[:, :, :, None].expand(1, tokens, heads, times, width).reshape(1, tokens, heads * times, width)


def _exchanged(states: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
    """All-to-all: dimension `split` is dealt to the ranks, what they hold of `joined` is put together."""
    sent = [part.contiguous() for part in torch.tensor_split(states, distributed.get_world_size(group), split)]
    received = [torch.empty_like(sent[0]) for _ in sent]
    distributed.all_to_all(received, sent, group=group)
    return torch.cat(received, dim=joined).contiguous()


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
        ctx.back = joined, split, group
        return _exchanged(states, split, joined, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.back), None, None, None


class _Gathered(torch.autograd.Function):
    """All-gather along the tokens; each rank's gradient is its own part, times the ranks."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ulysses: Ulysses) -> torch.Tensor:
        ctx.ulysses, ctx.length = ulysses, values.shape[0]
        whole = torch.empty((values.shape[0] * ulysses.size,), dtype=values.dtype, device=values.device)
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its new name
        gather(whole, values, group=ulysses.group)
        return torch.cat(whole.split(values.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        scaled = grads[0] * ctx.ulysses.size
        return scaled.split(ctx.length)[ctx.ulysses.rank].contiguous(), None
