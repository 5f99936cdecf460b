"""Fits the waves of a card's products and the corrections of its tables to measured times."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from source import Card, Measured, MeasuredAttention

from autofit.fakegpu.rates.kernels import AttentionTable, Floats, GemmTable, Machine, RateGrid, Waves, roofline

Flags = npt.NDArray[np.bool_]
# In the order of Waves' fields; the fit starts here and is drawn to it, weakly, for what a card's table cannot tell.
START = np.array([2e-6, 0.8, 1e-6, 0.5e-6, 1.0, 8e6, 4.0, 0.75, 0.7, 0.55, 0.4, 0.25, 0.15])
SHAPES = 5000  # to which the waves are fitted
GEMM_WIDTHS = (0.1, 0.1, 0.1)  # of `smoothed`, in logarithms of m, n and k
OWN = 0.7  # weight of a shape's own measurement beside its neighbours'; a step of a wave lies between two of them
LENGTHS = 2.0 ** np.arange(4, 18)
HEADS = 2.0 ** np.arange(0, 15)
GROUPS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
DIMS = np.array([64.0, 128.0, 256.0])
ATTENTION_AXES = tuple(np.log(x) for x in (LENGTHS, HEADS, GROUPS, DIMS))
ATTENTION_WIDTHS = (0.15, 0.15, 0.3, 0.3)


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


def machine(card: Card) -> Machine:
    return Machine(
        flops_per_s=card.half_flops_per_s, bandwidth_bytes_per_s=card.bandwidth_bytes_per_s, sm_count=card.sm_count
    )


def fit_waves(measured: Measured, known: Flags, card: Card) -> Waves:
    """The waves that come closest to the `known` measurements, in logarithms (a robust loss)."""
    where = np.argwhere(known)
    where = where[np.random.default_rng(0).choice(len(where), min(SHAPES, len(where)), replace=False)]
    m, n, k = (axis[where[:, i]] for i, axis in enumerate((measured.ms, measured.ns, measured.ks)))
    wanted = np.log(measured.seconds[tuple(where.T)])
    mine = machine(card)

    def misses(numbers: Floats) -> Floats:
        told = Waves.of(np.exp(numbers)).seconds(mine, m, n, k)
        return np.concatenate([np.log(told) - wanted, 0.01 * (numbers - np.log(START))])

    found = least_squares(misses, np.log(START), loss="soft_l1", f_scale=0.1, max_nfev=40)
    return Waves.of(np.exp(found.x))


def gemm_table(measured: Measured, card: Card, known: Flags | None = None) -> GemmTable:
    """The table of a card's products from the measurements that are `known` (all by default)."""
    known = ~np.isnan(measured.seconds) if known is None else known & ~np.isnan(measured.seconds)
    waves = fit_waves(measured, known, card)
    ratios = np.log(measured.seconds / waves.seconds(machine(card), *measured.mesh))
    corrections = smoothed(np.where(known, ratios, np.nan), measured.axes, GEMM_WIDTHS)
    corrections = np.where(known, OWN * ratios + (1 - OWN) * corrections, corrections)
    rows = known.any(axis=(1, 2))  # an m without any measurement is left out, so that it is interpolated
    axes = (measured.axes[0][rows], *measured.axes[1:])
    return GemmTable(waves=waves, corrections=RateGrid(axes, corrections[rows]))


def memory_frac(measured: Measured, card: Card) -> float:
    """Achieved bandwidth over the data sheet's: few rows times a matrix far larger than any cache, the best tenth.

    Copies and additions stream memory as the best of these products do, so the best tenth is taken, not the median.
    """
    m, n, k = measured.mesh
    large = (m <= 16) & (n * k * 2 > 400e6) & ~np.isnan(measured.seconds)
    moved = 2.0 * (m * n + n * k + m * k)[large]
    return float(np.quantile(moved / measured.seconds[large] / card.bandwidth_bytes_per_s, 0.9))


def flops_frac(measured: Measured, card: Card) -> float:
    """Achieved FLOP/s of large products (m, n and k at least 2048) over the data sheet's, the median."""
    m, n, k = measured.mesh
    large = (np.minimum(np.minimum(m, n), k) >= 2048) & ~np.isnan(measured.seconds)
    return float(np.median((2.0 * m * n * k)[large] / measured.seconds[large] / card.half_flops_per_s))


def attention_grid(measured: MeasuredAttention, card: Card, shortest_s: float, known: Flags) -> RateGrid:
    """Corrections by (keys, heads or key heads of the batch, queries a key, head size), from the `known` shapes."""
    one = measured.queries == 1
    shapes = (measured.batch, measured.heads, measured.key_heads, measured.queries, measured.keys, measured.dim)
    least = np.where(one, roofline(machine(card), *shapes, share=1.0), roofline(machine(card), *shapes, share=0.5))
    ratio = np.log(measured.seconds / (shortest_s + least))
    heads = measured.batch * np.where(one, measured.key_heads, measured.heads)
    places = []
    for axis, x in zip(
        ATTENTION_AXES, (measured.keys, heads, measured.heads / measured.key_heads, measured.dim), strict=True
    ):
        places.append(np.abs(axis[:, None] - np.log(x)[None]).argmin(axis=0))
    shape = tuple(len(axis) for axis in ATTENTION_AXES)
    flat = np.ravel_multi_index([p[known] for p in places], shape)
    values = np.full(int(np.prod(shape)), np.nan)
    order = np.argsort(flat, kind="stable")
    cells, starts = np.unique(flat[order], return_index=True)
    for cell, group in zip(cells, np.split(ratio[known][order], starts[1:]), strict=True):
        values[cell] = np.median(group)
    return RateGrid(ATTENTION_AXES, smoothed(values.reshape(shape), ATTENTION_AXES, ATTENTION_WIDTHS))


def attention_table(
    prefill: MeasuredAttention, decode: MeasuredAttention, card: Card, shortest_s: float,
    known: tuple[Flags, Flags] | None = None,
) -> AttentionTable:  # fmt: skip
    """The table of a card's attention from the `known` shapes of both kinds (all by default)."""
    known = known or (np.ones(len(prefill.batch), bool), np.ones(len(decode.batch), bool))
    return AttentionTable(
        prefill=attention_grid(prefill, card, shortest_s, known[0]),
        decode=attention_grid(decode, card, shortest_s, known[1]),
        shortest_s=shortest_s, version=card.flash_version,
    )  # fmt: skip
