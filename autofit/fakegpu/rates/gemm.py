"""Seconds of a matrix product on one card: waves of tiles, corrected by what was measured near the same shape.

A product of (m, k) and (k, n) is cut into tiles that the card's multiprocessors work off in waves, so its time jumps
where a wave more is needed. Interpolating measured times across these jumps is what makes plain tables wrong. So the
waves are computed, and only the ratio of the measured time to the computed one is interpolated. The speed of each
tile, the achieved bandwidth and the shortest time were fitted to the card's own measurements
(experiments/rates/make_tables.py). Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autofit.fakegpu.rates.grid import Floats, Grid

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
