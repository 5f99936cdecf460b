"""Which of the driver's cards CUDA programs see, by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, without starting CUDA.

NVML counts cards along the PCI bus, and CUDA from the fastest unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Where cards differ
an index therefore does not say which one is meant, and a child process asks CUDA itself.
"""

import os
import subprocess
import sys

from autofit.errors import ConfigError
from autofit.hardware.nvml import Cards, Gpu, driver_cards

_ASK_S = 60.0
# Prints the UUIDs of the cards that CUDA sees, in its order; a line each. cuDeviceGetUuid_v2 tells slices apart.
_ASK = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count, device, name = ctypes.c_int(), ctypes.c_int(), (ctypes.c_char * 16)()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for i in range(count.value):
    assert cuda.cuDeviceGet(ctypes.byref(device), i) == 0 and cuda.cuDeviceGetUuid_v2(name, device) == 0
    print(uuid.UUID(bytes=name.raw))
"""


def visible_gpus() -> tuple[Gpu, ...]:
    """The cards and MIG slices that CUDA programs see and that work, in the order of CUDA_VISIBLE_DEVICES.

    Raises ConfigError where only CUDA knows which cards its value means, and CUDA does not start.
    """
    cards, named = driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not cards.gpus:
        return cards.gpus
    names = [name.strip() for name in named.split(",")]
    if any(name.isdigit() for name in names) and not _indices_are_along_the_bus(cards):
        return _asked(cards.gpus, named)
    seen: list[Gpu] = []
    for name in names:
        gpu = _named(name, cards.gpus)
        if gpu is None:  # CUDA stops at the first name that it does not know
            break
        seen.append(gpu)
    return tuple(seen)


def why_none() -> str:
    """The reason, in words, why no card is visible here."""
    cards, named = driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards.problem:
        return f"its driver does not start ({cards.problem})"
    if cards.gpus and named is not None:
        return f"CUDA_VISIBLE_DEVICES={named!r} names none"
    return f"the driver lists none{' that works (' + '; '.join(cards.refused) + ')' if cards.refused else ''}"


def _indices_are_along_the_bus(cards: Cards) -> bool:
    """Whether CUDA's index of a card is NVML's: by the user's setting, or because every card is alike, and works."""
    if cards.refused or any(gpu.is_slice for gpu in cards.gpus):
        return False
    alike = len({(gpu.name, gpu.capacity_bytes) for gpu in cards.gpus}) == 1
    return alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _named(name: str, found: tuple[Gpu, ...]) -> Gpu | None:
    """The card of that index, or of that beginning of a UUID."""
    if name.isdigit():
        return found[int(name)] if int(name) < len(found) else None
    matching = [gpu for gpu in found if name and gpu.uuid.startswith(name)]
    return matching[0] if len(matching) == 1 else None


def _asked(found: tuple[Gpu, ...], named: str) -> tuple[Gpu, ...]:
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={named} names cards by CUDA's own order, and CUDA does not start to tell it; name "
            f"them by UUID (nvidia-smi -L), or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        ) from error
    by_uuid = {gpu.uuid.partition("-")[2]: gpu for gpu in found}
    return tuple(by_uuid[uuid] for uuid in done.stdout.split() if uuid in by_uuid)
