"""What this machine has, asked without torch: GPUs through NVML, host memory through the operating system."""

import os
from dataclasses import dataclass

from autofit.errors import ConfigError
from autofit.fakegpu.errors import UnknownGpuError
from autofit.fakegpu.specs import GpuSpec, gpu_spec
from autofit.units import format_bytes

Device = str  # "cpu", "cuda" or "sim:GPU", such as "sim:a100-40gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A card as the driver describes it."""

    name: str
    uuid: str
    capacity_bytes: int


def visible_gpu_ids() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of the machine's cards: indices or UUIDs, as it names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(i) for i in range(len(_all_gpus())))
    return tuple(name.strip() for name in visible.split(",") if name.strip())


def slot_names(device: Device, count: int) -> tuple[str, ...]:
    """The slots that probes on `device` share: one a visible card, or `count` on the CPU (which simulates, too)."""
    if device == "cuda":
        return tuple(f"cuda-{name}" for name in visible_gpu_ids())
    return tuple(f"cpu-{i}" for i in range(count))


def gpus() -> tuple[Gpu, ...]:
    """The visible CUDA cards."""
    found = _all_gpus()
    ids = visible_gpu_ids()
    return tuple(g for i, g in enumerate(found) if str(i) in ids or any(g.uuid.startswith(name) for name in ids))


def _all_gpus() -> tuple[Gpu, ...]:
    """The CUDA cards that the driver lists; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=str(pynvml.nvmlDeviceGetName(h)),
                uuid=str(pynvml.nvmlDeviceGetUUID(h)),
                capacity_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(h).total),
            )
            for h in handles
        )
    finally:
        pynvml.nvmlShutdown()


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_device(asked: str, gpu: str | None = None) -> Device:
    """`cpu`, `cuda` (`auto`: where there is a card) or, when a `gpu` is named, `sim:` and its name.

    Raises ConfigError for a card that is not there or not known.
    """
    if gpu is not None:
        if asked not in ("auto", "sim"):
            raise ConfigError(f"--gpu names a simulated card, so --device must be auto or sim; got {asked}")
        return f"sim:{_spec(gpu).name}"
    if asked == "sim":
        raise ConfigError("--device sim needs --gpu NAME, the card to simulate, for example --gpu a100-40gb")
    if asked == "cpu":
        return "cpu"
    found = gpus()
    if asked == "cuda" and not found:
        raise ConfigError("--device cuda needs a CUDA card, and the driver lists none; use --device cpu")
    return "cuda" if found else "cpu"


def _spec(name: str) -> GpuSpec:
    try:
        return gpu_spec(name)
    except UnknownGpuError as error:
        raise ConfigError(str(error)) from error


def choose_target(asked_bytes: int | None, device: Device) -> int:
    """The target in bytes: what was asked for, or the whole card. Raises ConfigError for more than there is."""
    if device.startswith("sim:"):
        capacity = _spec(device.removeprefix("sim:")).capacity_bytes
    else:
        capacity = min(g.capacity_bytes for g in gpus()) if device == "cuda" else host_memory_bytes()
    what = "machine" if device == "cpu" else "card"
    if asked_bytes is None:
        if device == "cpu":
            raise ConfigError("on the CPU a search needs a target: give --target-vram, for example --target-vram 3GB")
        return capacity
    if asked_bytes > capacity:
        raise ConfigError(
            f"--target-vram must be within the {what}'s memory of {format_bytes(capacity)}; got "
            f"{format_bytes(asked_bytes)}"
        )
    return asked_bytes
