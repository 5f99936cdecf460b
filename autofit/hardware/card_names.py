"""The names of cards: of the driver, of the table, and of kinds, by which studies differ.

A driver has one name for each board. Only boards that hold the same bytes are taken for one another; another chip, or
another amount of memory, would make every predicted figure a guess. Names are NVML's, from NVIDIA's list of supported
products in the driver's README, and from public logs for Tesla V100-SXM2-16GB-N (NVIDIA/warp's documentation).

A study belongs to one kind, since bytes and seconds of another are another's. A kind is the driver's name with the
capacity, "NVIDIA A100-SXM4-80GB, 79 GiB": some names are sold with several sizes. Or it is a name of the table,
"a100-80gb", which means the boards that differ from it in nothing.
"""

from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, UnknownGpuError, gpu_spec
from autofit.hardware.nvml import Gpu

# {a driver's name: (card of the table, how the board differs)}; NVIDIA's data sheets.
_SAME_CHIP = {
    "NVIDIA A100-PCIE-40GB": ("a100-40gb", "250 W in place of 400"),
    "NVIDIA A100 80GB PCIe": ("a100-80gb", "300 W in place of 400, memory 5 % slower"),
    "NVIDIA A800 80GB PCIe": ("a800", "300 W in place of 400, memory 5 % slower"),
    "NVIDIA H800": ("h100", "a slower NVLink"),
    "NVIDIA H800 PCIe": ("h100-pcie", "a slower NVLink"),
    "NVIDIA H200 NVL": ("h200", "600 W in place of 700, arithmetic 16 % slower"),
    "Tesla V100-SXM2-16GB-N": ("v100-16gb", "a variant of the board; how it differs is not published"),
    "Tesla V100-SXM3-32GB": ("v100-32gb", "350 W in place of 300"),
    "Tesla V100-DGXS-32GB": ("v100-32gb", "in a workstation"),
    "Tesla V100-DGXS-16GB": ("v100-16gb", "in a workstation"),
    "Tesla V100-PCIE-16GB": ("v100-16gb", "250 W in place of 300, arithmetic 11 % slower"),
    "Tesla V100-PCIE-32GB": ("v100-32gb", "250 W in place of 300, arithmetic 11 % slower"),
}


def card_of(driver_name: str) -> tuple[GpuSpec | None, str]:
    """(the card that predicts one of that name, how it differs); (None, the reason) where none does."""
    if driver_name in _SAME_CHIP:
        name, difference = _SAME_CHIP[driver_name]
        return gpu_spec(name), f"{driver_name} is predicted as {name}: {difference}"
    if " MIG " in driver_name:
        return None, f"{driver_name} is a slice of a card, and slices are not simulated"
    if driver_name.removeprefix("NVIDIA ").startswith("GRID ") or _is_virtual(driver_name):
        return None, f"{driver_name} is a virtual card with a share of a card's memory, and these are not simulated"
    try:
        return gpu_spec(driver_name), ""
    except UnknownGpuError as error:
        return None, str(error)


def _is_virtual(name: str) -> bool:
    """Whether a name ends as NVIDIA's vGPU profiles do: GB and a letter for the licence ("NVIDIA A40-48Q")."""
    profile = name.rpartition("-")[2]
    return profile[:-1].isdigit() and profile[-1:] in "ABCQ" and "-" in name


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
