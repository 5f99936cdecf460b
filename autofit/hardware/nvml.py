"""The CUDA cards that the driver lists, through NVML, which leaves CUDA unstarted. Free of torch.

A card in MIG mode is listed as its slices: CUDA programs see these, and not the card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from autofit.errors import ConfigError

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card, or a slice of one, as the driver describes it."""

    name: str
    uuid: str
    capacity_bytes: int
    index: int = 0  # of the card in NVML's order, which is that of the PCI bus
    compute_capability: tuple[int, int] | None = None

    @property
    def is_slice(self) -> bool:
        """True if it is a part of a card in MIG mode."""
        return self.uuid.startswith("MIG-")

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> Gpu:
        capability = cast("list[int] | None", content.get("compute_capability"))
        both = None if capability is None else (capability[0], capability[1])
        return cls(**{**content, "compute_capability": both})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The driver's report of this machine's cards."""

    gpus: tuple[Gpu, ...] = ()  # in the order of the PCI bus
    refused: tuple[str, ...] = ()  # a line for each card that the driver does not give: lost, or not permitted
    problem: str = ""  # why NVML does not start, where there is a driver


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """State of a card at one moment. None if its driver hides the figure."""

    sm_clock_mhz: int | None
    power_w: float | None  # the mean over the last second on Ampere and later (nvmlDeviceGetPowerUsage)
    temperature_c: int | None
    slowed_by: int | None  # bits of nvmlClocksEventReasons: 1 idle, 4 power cap, 8 hardware slowdown, 32 heat, ...


def driver_gpus() -> tuple[Gpu, ...]:
    """Every card of this machine that works, in the order of the PCI bus; empty if there is no driver."""
    return driver_cards().gpus


def driver_cards() -> Cards:
    """The cards of this machine that work, and those that its driver refuses; empty if there is no driver."""
    import pynvml

    try:
        with started(problems=True) as nvml:
            gpus, refused = of_each_card(nvml, lambda handle, index: described(nvml, handle, index))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Cards()
    except pynvml.NVMLError as error:
        return Cards(problem=str(error))
    return Cards(gpus=tuple(gpus), refused=tuple(refused))


def handle_of(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the card or slice that CUDA calls `uuid`, with its "GPU-" or "MIG-" optional."""
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names[:-1]:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name.encode())
        except nvml.NVMLError_NotFound:
            continue
    return nvml.nvmlDeviceGetHandleByUUID(names[-1].encode())


def used_bytes(nvml: Any, handle: Any) -> int:
    """Bytes in use on a card, less the driver's own reserve if the driver tells them apart (from R510)."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)  # counts the reserve: too much, never too little


def card_state(nvml: Any, handle: Any) -> CardState:
    """Clock, power, temperature and slowdowns of a card now. All are hidden for a MIG slice."""

    def told(name: str, *arguments: object) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    milliwatts = told("nvmlDeviceGetPowerUsage")
    return CardState(
        sm_clock_mhz=told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slowed_by=told("nvmlDeviceGetCurrentClocksThrottleReasons"),  # the older name, which every driver has
    )


@contextmanager
def started(*, problems: bool = False) -> Iterator[Any]:
    """Context of pynvml with NVML started, or None if it fails to start; with `problems` its error is raised."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        if problems:
            raise
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def of_each_card(nvml: Any, read: Callable[[Any, int], _Read]) -> tuple[list[_Read], list[str]]:
    """(`read(handle, index)` of every card, or of every slice of it; a line for each card that the driver refuses)."""
    found: list[_Read] = []
    refused: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):  # counts lost cards, and those that this user may not use
        try:
            found += [read(handle, index) for handle in _handles(nvml, index)]
        except nvml.NVMLError as error:
            refused.append(f"card {index} is left out, its driver says: {error}")
    return found, refused


def _handles(nvml: Any, index: int) -> Iterator[Any]:
    """The handle of a card, or those of its slices if it is in MIG mode."""
    card = nvml.nvmlDeviceGetHandleByIndex(index)
    if not _in_mig_mode(nvml, card):
        yield card
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
        except nvml.NVMLError_NotFound:  # numbers have gaps
            continue


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # not supported by the card, or not known to its driver
        return False


def described(nvml: Any, handle: Any, index: int) -> Gpu:
    try:
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    except nvml.NVMLError:
        capability = None
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)), uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        capacity_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total), index=index, compute_capability=capability,
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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

    Starts no CUDA. NVML counts cards along the PCI bus, and CUDA from the fastest unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID. Where cards differ an index therefore does not say which one is meant, and a child
    process asks CUDA itself. Raises ConfigError where only CUDA knows which cards its value means, and CUDA does not
    start.
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
    """The reason, in words, why this process sees no card."""
    cards, named = driver_cards(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards.problem:
        return f"its driver does not start ({cards.problem})"
    if cards.gpus and named is not None:
        return f"CUDA_VISIBLE_DEVICES={named!r} names none"
    return f"the driver lists none{' that works (' + '; '.join(cards.refused) + ')' if cards.refused else ''}"


def _indices_are_along_the_bus(cards: Cards) -> bool:
    """True if CUDA's index of a card is NVML's: by the user's setting, or because every card is alike, and works."""
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
