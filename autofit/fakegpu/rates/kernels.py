"""Seconds of any kernel on one card: products and attention by their shapes, all others by FLOPs and bytes.

Needs no torch. Shapes are those of the tensor arguments of torch's operator, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.rates.products import CardRates, Floats, Machine, card_rates, rates_name
from autofit.fakegpu.specs import GpuSpec, HostCosts

# Bytes/s of a kernel that memory bounds, by the pattern in which it reads and writes. Needs no torch.
#
# Kernels that stream reach the card's achieved bandwidth. Others work out an address for each element, which takes
# instructions of the multiprocessors: these reach what the same number of multiprocessors reached where it was
# measured, or what streaming does if that is less.

Pattern = Literal[
    "streaming", "cast", "strided", "strided_halves", "cat", "cat_halves", "cat_whole", "tensors", "gather", "scatter",
    "one_block",
]  # fmt: skip
# GB/s of one multiprocessor, learned from half of Liger-Kernel's measurements of plain torch
# (experiments/rates/bandwidth.py, which tells the other half). On the H100 these are of experiments/gpu: gather,
# scatter and loss (rows of 4 KiB, and 4,096 targets); `..._halves`, elements of two bytes whose addresses are worked
# out one by one (370 billion a second, the other operand in the cache); the concatenation of whole tensors; and
# `tensors`, lists of them (fused AdamW, the scaling and the norm of gradients). `one_block` is the loss of targets, 8
# bytes each, that one block works off: the time of waiting for memory.
PER_MULTIPROCESSOR: Mapping[str, dict[Pattern, float]] = {
    "a100_sxm": {
        "cast": 13.8, "strided": 7.0, "strided_halves": 7.0, "cat": 16.0, "cat_halves": 16.0, "cat_whole": 16.0,
        "tensors": 16.6, "gather": 5.8, "scatter": 3.7, "one_block": 0.16,
    },
    "h100_sxm": {
        "cast": 15.1, "strided": 14.4, "strided_halves": 11.1, "cat": 14.7, "cat_halves": 6.9, "cat_whole": 19.9,
        "tensors": 16.6, "gather": 21.0, "scatter": 6.5, "one_block": 2.05,
    },
}  # fmt: skip
_MEASURED = {"a100_sxm": "a100_sxm"}  # all newer cards: h100_sxm


def bandwidth(pattern: Pattern, rates: str, streaming: float, sm_count: int, slowdown: float) -> float:
    """Bytes/s on a card that has the rates named `rates` and streams at `streaming` bytes/s."""
    if pattern == "streaming":
        return streaming
    of = PER_MULTIPROCESSOR[_MEASURED.get(rates, "h100_sxm")]
    per_multiprocessor = of.get(pattern, PER_MULTIPROCESSOR["a100_sxm"][pattern])
    working = 1 if pattern == "one_block" else sm_count
    return min(streaming, per_multiprocessor * 1e9 * working / slowdown)


Shape = tuple[int, ...]
Place = tuple[int, int]  # (number of the shape, its dimension)
Operand = TypeVar("Operand")
Family = Literal["products", "attention", "others"]

# Where batch (None: 1), m, n and k of a product are; a grouped product counts as one, which reads all its matrices.
_PRODUCTS: dict[str, tuple[Place | None, Place, Place, Place]] = {
    "mm": (None, (0, 0), (1, -1), (0, 1)), "addmm": (None, (1, 0), (2, -1), (1, 1)),
    "_scaled_mm": (None, (0, 0), (1, -1), (0, 1)), "_grouped_mm": (None, (0, 0), (1, -1), (0, 1)),
    "bmm": ((0, 0), (0, 1), (1, -1), (0, 2)), "baddbmm": ((1, 0), (1, 1), (2, -1), (1, 2)),
}  # fmt: skip
_ATTENTION = {
    f"_scaled_dot_product_{name}_attention{back}" for name in ("flash", "efficient", "cudnn") for back in
    ("", "_backward")
} | {"flex_attention", "flex_attention_backward"}  # fmt: skip
_OF_TORCH = {"efficient": "efficient", "cudnn": "cudnn", "flash": "flash", "flex": "flash"}  # by a part of the name
_TOKENS_FIRST = {"_flash_attention_forward", "_flash_attention_backward"}  # flash-attn's: tokens before heads


class Work(NamedTuple):
    """One kernel: its operator, shapes, FLOP/s of its dtype, bytes an element, and what bounds it without a table."""

    name: str
    shapes: tuple[Shape, ...]
    rate: float
    item_bytes: int
    causal: bool
    flops: int
    nbytes: int
    pattern: Pattern = "streaming"


def family(name: str, shapes: Sequence[Shape]) -> Family:
    """Which rates tell the seconds of an operator."""
    if name in _PRODUCTS and all(len(shapes) > place[0] for place in _PRODUCTS[name] if place):
        return "products"
    if name in _TOKENS_FIRST:  # sequences one after the other have no batch
        return "attention" if len(shapes[1]) == 4 else "others"
    return "attention" if name in _ATTENTION else "others"


def places(name: str) -> tuple[Place | None, ...]:
    """Where the sizes are of which a product's or attention's seconds are a function; None is 1.

    Batch, m, n, k of a product; batch, heads, key heads, queries, keys and head size of attention.
    """
    if name in _PRODUCTS:
        return _PRODUCTS[name]
    q = 1 if name.endswith("_backward") else 0  # the backward's first tensor is a gradient
    heads, tokens = (2, 1) if name in _TOKENS_FIRST else (1, 2)
    return (q, 0), (q, heads), (q + 1, heads), (q, tokens), (q + 1, tokens), (q, 3)


def matrices(name: str, tensors: Sequence[Operand]) -> tuple[Operand, Operand]:
    """The two matrices of a product, of its tensor arguments in order."""
    _, first, second, _ = _PRODUCTS[name]
    return tensors[first[0]], tensors[second[0]]


def sizes(name: str, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """The sizes at `places`."""
    return tuple(1 if place is None else shapes[place[0]][place[1]] for place in places(name))


@dataclass(slots=True)
class KernelSeconds:
    """Seconds of kernels on the card `spec`, with the corrections of `costs`."""

    spec: GpuSpec
    costs: HostCosts
    rates: CardRates = field(init=False)
    flops_frac: float = field(init=False)  # of a data sheet's FLOP/s, of kernels without a table
    bandwidth_bytes_per_s: float = field(init=False)  # achieved
    _known: dict[Work, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = card_rates(rates_name(self.spec))
        self.flops_frac = self.rates.flops_frac / self.costs.gpu_slowdown
        self.bandwidth_bytes_per_s = self.spec.bandwidth_bytes_per_s * self.rates.memory_frac / self.costs.gpu_slowdown

    def bandwidth(self, pattern: Pattern) -> float:
        """Bytes/s that a kernel of this pattern reaches."""
        return bandwidth(
            pattern, self.rates.name, self.bandwidth_bytes_per_s, self.spec.sm_count, self.costs.gpu_slowdown
        )

    @property
    def shortest_s(self) -> float:
        return self.rates.shortest_s * self.costs.gpu_slowdown

    def seconds(self, work: Work) -> tuple[float, Family]:
        """Seconds of one kernel, and the family that it belongs to."""
        kind = family(work.name, work.shapes)
        if kind == "others":
            return self.others(work.flops, work.nbytes, work.rate, work.pattern), kind
        if work not in self._known:
            of = np.asarray(sizes(work.name, work.shapes), float)[:, None]
            told = self.measured(kind, work.name, of, rate=work.rate, item_bytes=work.item_bytes, causal=work.causal)
            cold_s = work.nbytes / self.bandwidth_bytes_per_s if kind == "products" else 0.0
            self._known[work] = max(float(told[0]), cold_s)
        return self._known[work], kind

    def others(self, flops: float, nbytes: float, rate: float, pattern: Pattern = "streaming") -> float:
        """A short kernel, and the longer of FLOPs at the card's achieved rate and bytes at its achieved bandwidth.

        On an H100, kernels that stream 0.1 to 0.6 GB take 3 to 6 us more than their bytes do (experiments/gpu). What
        moves no bytes of the card's memory is a copy over a link, whose own rate is all that it takes.
        """
        moving_s = float(self.warm(np.array(nbytes / self.bandwidth(pattern))))
        return max(flops / (rate * self.flops_frac), moving_s) + (self.shortest_s if nbytes else 0.0)

    def warm(self, cold_s: Floats) -> Floats:
        """Seconds of moving bytes that take `cold_s` from memory; few bytes, just written, are still in the cache.

        The factor is that of products whose operands stay in the cache, measured on the same card.
        """
        return cold_s / self.rates.gemms.waves.cache_factor(cold_s * self.bandwidth_bytes_per_s)

    @property
    def cached_factor(self) -> float:
        """How many times as fast as from memory the fewest bytes are moved."""
        return float(self.rates.gemms.waves.cache_factor(np.array(0.0)))

    def measured(
        self, kind: Family, name: str, of: Floats, *, rate: float, item_bytes: float, causal: bool
    ) -> npt.NDArray[np.float64]:
        """Seconds of products or attention whose sizes are the rows of `of` (one a size of `places`, columns shapes).

        Small operands lay in the cache when they were measured; `seconds` has those of a product come from memory.
        """
        machine = Machine(
            flops_per_s=rate, bandwidth_bytes_per_s=self.spec.bandwidth_bytes_per_s, sm_count=self.spec.sm_count,
            item_bytes=item_bytes,
        )  # fmt: skip
        of = np.maximum(of, 1.0)
        if kind == "products":
            told = self.rates.gemms.seconds(machine, of[1], of[2], of[3], of[0])
        else:
            told = self.rates.attention.seconds(
                machine,
                *of,
                causal=causal,
                backward=name.endswith("_backward"),
                of_torch=next((kind for part, kind in _OF_TORCH.items() if part in name), None),
            )
        return told * self.costs.gpu_slowdown
