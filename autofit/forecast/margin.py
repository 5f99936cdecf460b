"""How far a predicted peak may be from the card's: the margin that an answer needs before it says that a recipe fits.

Source: 39 reserved peaks that others measured, simulated (experiments/accuracy/table.md, 2026-11-22): the mean error is
0.8 %, and the worst prediction is 6.23 % below its measurement (prefix tuning of a 3B model on an L40S). No least
capacity was compared; it has the gaps between the allocator's blocks in it as reserved peaks have, and counts as no
better. The context of a card without a figure of its own is scaled from another card's, and may be off by 150 MiB
(fakegpu/specs.py).
"""

from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.hardware import Device
from autofit.probing.result import ProbeResult, ProbeStatus

WORST_ERROR_FRAC = 0.0623  # of the measured bytes, where the prediction is below them


def needed_bytes(result: ProbeResult) -> int:
    """Device-used bytes without which it does not run: the least capacity, where it is known.

    The allocator may hold more, up to the whole card: it keeps freed blocks, and returns them before it raises an OOM.
    """
    return result.least_capacity_bytes or result.device_used_bytes or 0


def most_used_bytes(used_bytes: int, device: Device) -> int:
    """Device-used bytes of a card whose peak is as far above its prediction as the worst that was compared."""
    context = gpu_spec(device.removeprefix("sim:")).context_bytes
    return context + round(max(0, used_bytes - context) / (1 - WORST_ERROR_FRAC))


def roomy_bytes(capacity_bytes: int, device: Device) -> int:
    """The largest predicted device-used bytes that fit into `capacity_bytes` with the margin."""
    context = gpu_spec(device.removeprefix("sim:")).context_bytes
    return context + round(max(0, capacity_bytes - context) * (1 - WORST_ERROR_FRAC))


def is_tight(result: ProbeResult, capacity_bytes: int) -> bool:
    """Whether the recipe fits as predicted, with less to spare than the prediction may be off."""
    return result.status is ProbeStatus.FIT and needed_bytes(result) > roomy_bytes(capacity_bytes, result.device)
