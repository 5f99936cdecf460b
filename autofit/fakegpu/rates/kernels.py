"""Seconds of any kernel on one card: products and attention by their shapes and measured rates, all others by bytes.

Needs no torch. Shapes are those of the tensor arguments of torch's operator, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.specs import GpuSpec, HostCosts

# Values on a grid whose axes are logarithmic, interpolated linearly between its points.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RateGrid:
    """`values` at the crossings of `axes` (the logarithm of each coordinate, ascending); outside, the edge's value."""

    axes: tuple[Floats, ...]
    values: Floats

    def at(self, *coordinates: Floats) -> Floats:
        """The value at each point; a coordinate is an array with one entry a point."""
        lower, weights = [], []
        for axis, coordinate in zip(self.axes, coordinates, strict=True):
            x = np.log(coordinate)
            below = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
            step = axis[np.minimum(below + 1, len(axis) - 1)] - axis[below]
            weights.append(np.clip((x - axis[below]) / np.where(step > 0, step, 1.0), 0.0, 1.0))
            lower.append(below)
        total = np.zeros(np.shape(lower[0]))
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            share = np.ones_like(total)
            place = []
            for axis, below, weight, up in zip(self.axes, lower, weights, corner, strict=True):
                share = share * (weight if up else 1.0 - weight)
                place.append(np.minimum(below + up, len(axis) - 1))
            total += share * self.values[tuple(place)]
        return total


# Seconds of a matrix product on one card: waves of tiles, corrected by measurements near the same shape.
#
# A product of (m, k) and (k, n) is cut into tiles that the card's multiprocessors work off in waves, so its time jumps
# where a wave more is needed. Interpolating measured times across these jumps is what makes plain tables wrong. So the
# waves are computed, and only the ratio of the measured time to the computed one is interpolated. The speed of each
# tile, the achieved bandwidth and the shortest time were fitted to the card's own measurements
# (experiments/rates/make_tables.py).

TILES = np.array([(256, 128), (128, 128), (128, 64), (64, 64), (32, 64), (16, 64)], float)
SPLITS = np.array([1.0, 2.0, 4.0])  # parts of k that are summed afterwards, for products with few tiles
K_STEP = 32.0
_SHARPNESS = 16.0  # of the minimum over tiles and splits, which is smooth so that it can be fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The data-sheet rates that matter to a product: FLOP/s of its dtype, bytes/s, and multiprocessors."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    sm_count: int
    item_bytes: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waves:
    """The fitted properties of one card's products."""

    shortest_s: float
    bandwidth_frac: float  # of the data sheet's, from memory
    split_s: float  # to sum the parts of a split k
    wave_s: float  # start and end of a wave
    cache_gain: float  # added bandwidth, relative, of operands that stay in the cache
    cache_bytes: float
    cache_power: float
    tile_frac: Floats  # FLOP/s of each of TILES, as a fraction of the data sheet's

    @classmethod
    def of(cls, numbers: npt.ArrayLike) -> Waves:
        """From the numbers in the order of the fields, the last one for each tile."""
        given = np.asarray(numbers, float)
        return cls(
            shortest_s=given[0], bandwidth_frac=given[1], split_s=given[2], wave_s=given[3], cache_gain=given[4],
            cache_bytes=given[5], cache_power=given[6], tile_frac=given[7:],
        )  # fmt: skip

    def cache_factor(self, nbytes: Floats) -> Floats:
        """Speed at which a kernel reads and writes `nbytes` that it finds in the cache, over that from memory."""
        beyond = self.cache_power * np.log(np.maximum(nbytes, 1.0) / self.cache_bytes)
        return 1.0 + self.cache_gain / (1.0 + np.exp(np.minimum(beyond, 50.0)))

    def seconds(self, machine: Machine, m: Floats, n: Floats, k: Floats, batch: Floats | float = 1.0) -> Floats:
        """Computed seconds of `batch` products of (m, k) and (k, n) at once, one entry a shape."""
        m, n, k = (np.asarray(x, float)[..., None, None] for x in (m, n, k))
        batch = np.asarray(batch, float)[..., None, None]
        bytes_moved = batch * (m * k + n * k + m * n) * machine.item_bytes
        bandwidth = machine.bandwidth_bytes_per_s * self.bandwidth_frac * self.cache_factor(bytes_moved)
        tiles = batch * np.ceil(m / TILES[:, 0, None]) * np.ceil(n / TILES[:, 1, None])
        waves = np.ceil(tiles * SPLITS / machine.sm_count)
        area = TILES.prod(axis=1)[:, None] * machine.sm_count / (machine.flops_per_s * self.tile_frac[:, None])
        one = 2.0 * area * np.ceil(k / SPLITS / K_STEP) * K_STEP + self.wave_s
        summed = (SPLITS > 1) * (self.split_s + batch * m * n * 8.0 * SPLITS / machine.bandwidth_bytes_per_s)
        each = np.maximum(waves * one, bytes_moved / bandwidth) + self.shortest_s + summed
        least = each.min(axis=(-2, -1), keepdims=True)
        return np.asarray(least[..., 0, 0] * ((each / least) ** -_SHARPNESS).sum(axis=(-2, -1)) ** (-1 / _SHARPNESS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmTable:
    """A card's products: `waves`, and the logarithm of measured over computed seconds by (m, n, k)."""

    waves: Waves
    corrections: RateGrid

    def seconds(self, machine: Machine, m: Floats, n: Floats, k: Floats, batch: Floats | float = 1.0) -> Floats:
        """Seconds of `batch` products; several at once are corrected as one with as many rows."""
        ratio = self.corrections.at(np.maximum(np.asarray(m) * batch, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0))
        return self.waves.seconds(machine, m, n, k, batch) * np.exp(ratio)


# Seconds of one attention kernel on one card: a roofline, corrected by measurements near the same shape.
#
# The forward of flash attention was measured (causal, with and without grouped queries), as was one step of decoding.
# Needs no torch.


# Seconds of torch's kernels over those of the measured forward: first of the forward, then of the backward.
#
# The backward has 2.5 times the FLOPs of the forward (FlashAttention-2, arXiv 2307.08691, section 3.2: five matrix
# products instead of two), at 63 instead of 73 % of the peak, both the best of the same paper (section 4.1, A100).
_BACKWARD = 2.5 * 0.73 / 0.63
# Memory-efficient attention (xformers' CUTLASS kernel, which takes masks) has half the speed of flash attention (the
# same paper, section 4.1, "around 2x faster than FlashAttention and its CUTLASS version in xformers").
_TORCH = {"flash": (1.0, _BACKWARD), "cudnn": (1.0, _BACKWARD), "efficient": (2.0, 2.0 * _BACKWARD)}
# Where flash attention 3 was measured, as on a H100, torch has version 2 and cuDNN's: seconds over those of version 3's
# forward, by the length with heads of 128 and by the heads' size, causal, torch 2.11.0 on an H100 80GB HBM3
# (experiments/gpu/kernel_times.py, 2026-11-26). Between them the logarithms are interpolated; beyond them the nearest
# counts, so that long sequences keep the share of the peak that 8,192 tokens have. Assumed of later cards.
_LENGTHS, _HEADS = np.log((1024.0, 2048.0, 8192.0)), np.log((64.0, 128.0, 256.0))
_BY_LENGTH = {
    "flash": ((0.83, 1.15, 1.60), (3.32, 3.46, 4.58)),
    "cudnn": ((0.73, 0.58, 0.87), (1.77, 1.87, 2.69)),
    "efficient": ((1.56, 1.92, 3.10), (5.01, 6.04, 9.70)),
}
_BY_HEADS = {  # at 2,048 tokens, relative to heads of 128
    "flash": ((0.78, 1.0, 0.97), (0.82, 1.0, 0.88)),
    "cudnn": ((1.05, 1.0, 0.86), (1.81, 1.0, 1.24)),
    "efficient": ((0.96, 1.0, 0.89), (0.94, 1.0, 3.37)),
}


def _beside_version_3(kernel: str, backward: bool, keys: Floats, dim: Floats) -> Floats:
    """Seconds of torch's kernel over those of flash attention 3's forward."""
    by_length, by_heads = np.log(_BY_LENGTH[kernel][backward]), np.log(_BY_HEADS[kernel][backward])
    return np.exp(np.interp(np.log(keys), _LENGTHS, by_length) + np.interp(np.log(dim), _HEADS, by_heads))


FLOPS_FRAC = (
    0.5  # of the roofline that the corrections are relative to; any number gives the same seconds where measured
)
BANDWIDTH_FRAC = 0.8


def roofline(
    machine: Machine, batch: Floats, heads: Floats, key_heads: Floats, queries: Floats, keys: Floats, dim: Floats,
    *, share: float,
) -> Floats:  # fmt: skip
    """Uncorrected seconds; `share` is the part of the scores that is computed, 0.5 if causal."""
    flops = 4.0 * batch * heads * queries * keys * dim * share
    moved = (2.0 * batch * heads * queries * dim + 2.0 * batch * key_heads * keys * dim) * machine.item_bytes
    return np.maximum(
        flops / (machine.flops_per_s * FLOPS_FRAC), moved / (machine.bandwidth_bytes_per_s * BANDWIDTH_FRAC)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """A card's attention: the logarithms of measured over computed seconds, by (length, heads, queries a key, size).

    The heads are those of the whole batch, for decoding the key heads. `shortest_s` is the time of an empty kernel.
    """

    prefill: RateGrid
    decode: RateGrid
    shortest_s: float
    version: int  # of flash attention, as measured

    def seconds(
        self, machine: Machine, batch: Floats, heads: Floats, key_heads: Floats, queries: Floats, keys: Floats,
        dim: Floats, *, causal: bool, backward: bool = False, of_torch: str | None = None,
    ) -> Floats:  # fmt: skip
        """Seconds of one kernel, one entry a shape: `of_torch` ("flash", "cudnn", "efficient"), else as measured."""
        batch, heads, key_heads = (np.maximum(np.asarray(x, float), 1.0) for x in (batch, heads, key_heads))
        queries, keys, dim = (np.maximum(np.asarray(x, float), 1.0) for x in (queries, keys, dim))
        group = np.maximum(heads / key_heads, 1.0)
        least = roofline(machine, batch, heads, key_heads, queries, keys, dim, share=0.5 if causal else 1.0)
        slower: Floats | float = 1.0
        if of_torch:
            newer = self.version > 2
            slower = _beside_version_3(of_torch, backward, keys, dim) if newer else _TORCH[of_torch][backward]
        many = slower * (self.shortest_s + least) * np.exp(self.prefill.at(keys, batch * heads, group, dim))
        one = (self.shortest_s + least) * np.exp(self.decode.at(keys, batch * key_heads, group, dim))
        return np.where(queries == 1.0, one, many)


# -- the measured rates of each card ----------------------------------------------------------------------------------
# The files beside this one hold figures of aiconfigurator-core (see `source` in each);
# experiments/rates/make_tables.py makes them.

STEP = 1e-4  # of the logarithms in the files
MEASURED = {
    "a100-40gb": "a100_sxm", "a100-80gb": "a100_sxm", "l40s": "l40s", "h100": "h100_sxm", "h200": "h200_sxm",
    "b200": "b200_sxm", "rtxpro6000": "rtx_pro_6000_server",
}  # fmt: skip
# For other cards: the card of the same generation, by compute capability; the first that is not above the card's own.
_FAMILIES = ((12, 0), "rtx_pro_6000_server"), ((10, 0), "b200_sxm"), ((9, 0), "h100_sxm"), ((8, 9), "l40s")
_OLDEST = "a100_sxm"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CardRates:
    """Measured rates of one card, as fractions of its data sheet where they are to hold for others of its family."""

    name: str
    source: str
    machine: Machine  # the data sheet of the measured card
    gemms: GemmTable
    attention: AttentionTable
    memory_frac: float  # achieved bandwidth of memory-bound kernels
    flops_frac: float  # achieved FLOP/s of large products
    shortest_s: float


def rates_name(spec: GpuSpec) -> str:
    """The name of the measured card whose rates, relative to its data sheet, stand for `spec`."""
    if spec.name in MEASURED:
        return MEASURED[spec.name]
    return next((name for since, name in _FAMILIES if spec.compute_capability >= since), _OLDEST)


def stand_in(spec: GpuSpec) -> str | None:
    """One sentence if `spec` itself was not measured; None if it was."""
    if spec.name in MEASURED:
        return None
    return (
        f"kernel times of the {spec.name} were not measured: those of the {rates_name(spec)} are scaled by the ratio "
        "of both data sheets"
    )


@cache
def card_rates(name: str) -> CardRates:
    """The rates of a measured card, read from its file (a few milliseconds)."""
    with np.load(Path(__file__).parent / f"{name}.npz") as file:
        flops, bandwidth, multiprocessors = file["machine"].tolist()
        corrections = RateGrid(tuple(np.log(file[f"gemm_{axis}"]) for axis in "mnk"), file["gemm"] * STEP)
        axes = tuple(np.log(file[f"attention_{number}"]) for number in range(4))
        shortest_s = float(file["shortest_s"])
        attention = AttentionTable(
            prefill=RateGrid(axes, file["prefill"] * STEP), decode=RateGrid(axes, file["decode"] * STEP),
            shortest_s=shortest_s, version=int(file["flash_version"]),
        )  # fmt: skip
        return CardRates(
            name=name, source=str(file["source"]),
            machine=Machine(flops_per_s=flops, bandwidth_bytes_per_s=bandwidth, sm_count=int(multiprocessors)),
            gemms=GemmTable(waves=Waves.of(file["waves"]), corrections=corrections), attention=attention,
            memory_frac=float(file["memory_frac"]), flops_frac=float(file["flops_frac"]), shortest_s=shortest_s,
        )  # fmt: skip


# -- any kernel -------------------------------------------------------------------------------------------------------

# Bytes/s of a kernel that memory bounds, by the pattern in which it reads and writes.
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
    """One kernel: its operator, shapes, FLOP/s of its dtype, bytes an element, and its bounds if it has no table."""

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
    """Places of the sizes that determine a product's or attention's seconds; None is 1.

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
        """Speed of moving the fewest bytes, over that from memory."""
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
                machine, *of, causal=causal, backward=name.endswith("_backward"),
                of_torch=next((kind for part, kind in _OF_TORCH.items() if part in name), None),
            )  # fmt: skip
        return told * self.costs.gpu_slowdown
