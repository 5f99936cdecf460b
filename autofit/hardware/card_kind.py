"""Kinds of cards: a study belongs to one, since bytes and seconds of another are another's.

A kind is the driver's name with the capacity, "NVIDIA A100-SXM4-80GB, 79 GiB": some names are sold with several sizes.
Or it is a name of the table, "a100-80gb", which means the boards that differ from it in nothing.
"""

from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware.driver_names import card_of
from autofit.hardware.nvml import Gpu

_GIB = 1 << 30


def kind_of(gpu: Gpu) -> str:
    """The kind of a card, from what its driver tells."""
    return f"{gpu.name}, {gpu.capacity_bytes / _GIB:.0f} GiB"


def board_of(kind: str) -> str:
    """The driver's name of the cards of `kind`, or its name in the table: what `driver_names.card_of` reads."""
    return kind if kind in GPU_SPECS else kind.rpartition(", ")[0]


def is_of_kind(gpu: Gpu, kind: str) -> bool:
    """Whether the card is of `kind`. Capacities of one board differ a little from driver to driver."""
    if kind in GPU_SPECS:
        spec, difference = card_of(gpu.name)
        return spec is not None and spec.name == kind and not difference
    name, _, size = kind.rpartition(", ")
    return gpu.name == name and abs(gpu.capacity_bytes / _GIB - float(size.removesuffix(" GiB"))) < 0.8
