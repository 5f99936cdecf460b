"""The measured rates of each card, and which card's stand in for a card without measurements. Needs no torch.

The files beside this one hold figures of aiconfigurator-core (see `source` in each); experiments/rates/make_tables.py
makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from autofit.fakegpu.rates.products import AttentionTable, GemmTable, Grid, Machine, Waves
from autofit.fakegpu.specs import GpuSpec

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
