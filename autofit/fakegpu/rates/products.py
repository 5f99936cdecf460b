"""Seconds of matrix products and of attention on one card, and the measured rates that correct them. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.specs import GpuSpec

# Values on a grid whose axes are logarithmic, interpolated linearly between its points. Needs no torch.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
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


def smoothed(values: Floats, axes: Sequence[Floats], widths: Sequence[float]) -> Floats:
    """Means of `values` around each point, with the weight exp(-distance / width) along each axis; nan is no value.

    Points that have none take the mean of their neighbours, however far away these are.
    """
    weights = (~np.isnan(values)).astype(float)
    sums = np.where(weights > 0, values, 0.0)
    for number, (axis, width) in enumerate(zip(axes, widths, strict=True)):
        kernel = np.exp(-np.abs(axis[:, None] - axis[None]) / width)
        sums = np.moveaxis(np.tensordot(kernel, sums, (1, number)), 0, number)
        weights = np.moveaxis(np.tensordot(kernel, weights, (1, number)), 0, number)
    return np.asarray(sums / np.maximum(weights, 1e-300))


# Seconds of a matrix product on one card: waves of tiles, corrected by what was measured near the same shape.
#
# A product of (m, k) and (k, n) is cut into tiles that the card's multiprocessors work off in waves, so its time jumps
# where a wave more is needed. Interpolating measured times across these jumps is what makes plain tables wrong. So the
# waves are computed, and only the ratio of the measured time to the computed one is interpolated. The speed of each
# tile, the achieved bandwidth and the shortest time were fitted to the card's own measurements
# (experiments/rates/make_tables.py). Needs no torch.

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
        """How many times as fast as memory a kernel reads and writes so many bytes, if it finds them in the cache."""
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
    corrections: Grid

    def seconds(self, machine: Machine, m: Floats, n: Floats, k: Floats, batch: Floats | float = 1.0) -> Floats:
        """Seconds of `batch` products; several at once are corrected as one with as many rows."""
        ratio = self.corrections.at(np.maximum(np.asarray(m) * batch, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0))
        return self.waves.seconds(machine, m, n, k, batch) * np.exp(ratio)


# Seconds of one attention kernel on one card: a roofline, corrected by what was measured near the same shape.
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
    """Seconds without a correction; `share` is the part of the scores that is computed, 0.5 if causal."""
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

    prefill: Grid
    decode: Grid
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
        corrections = Grid(tuple(np.log(file[f"gemm_{axis}"]) for axis in "mnk"), file["gemm"] * STEP)
        axes = tuple(np.log(file[f"attention_{number}"]) for number in range(4))
        shortest_s = float(file["shortest_s"])
        attention = AttentionTable(
            prefill=Grid(axes, file["prefill"] * STEP), decode=Grid(axes, file["decode"] * STEP),
            shortest_s=shortest_s, version=int(file["flash_version"]),
        )  # fmt: skip
        return CardRates(
            name=name, source=str(file["source"]),
            machine=Machine(flops_per_s=flops, bandwidth_bytes_per_s=bandwidth, sm_count=int(multiprocessors)),
            gemms=GemmTable(waves=Waves.of(file["waves"]), corrections=corrections), attention=attention,
            memory_frac=float(file["memory_frac"]), flops_frac=float(file["flops_frac"]), shortest_s=shortest_s,
        )  # fmt: skip
