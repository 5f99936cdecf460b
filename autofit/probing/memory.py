"""Peak memory by phase: bytes of the CPU allocator, or bytes reported by a CUDA card's driver. Imports torch.

On `cpu` every storage is tracked from the operator that made it to its release. The result equals the peak of
`torch.profiler(profile_memory=True)` except for the 8-byte boxes that torch makes for Python numbers, which no operator
returns: 48 to 72 B of 30 to 60 MB (tests/test_probe.py). The profiler's own events come too late to stop at a limit.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from autofit.hardware.nvml import CardState, card_state, handle_of, used_bytes
from autofit.plugin.protocol import OPTIMIZER, SAVE, SCORING, UPDATE
from autofit.probing.result import PhasePeak
from autofit.units import format_bytes


class Memory(Protocol):
    """Records a device's bytes and time."""

    device_name: str
    least_measured_s: float  # measured steps are repeated until they took this long together

    def card_state(self) -> CardState | None:
        """State of the card at this moment, if a driver reports it."""
        ...

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def switch(self, left: str, entered: str) -> PhasePeak:
        """The peaks of phase `left`: those since the last call."""
        ...

    def account(self) -> dict[str, Any]:
        """Further fields of ProbeResult that this device knows after the probe."""
        ...

    def now_s(self) -> float:
        """Current time in seconds, after all launched kernels have completed."""
        ...


class _StorageTracker(TorchDispatchMode):
    """Tracks live storages of one device type; raises torch.OutOfMemoryError above `limit_bytes`."""

    def __init__(self, device_type: str, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._limit_bytes = limit_bytes
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self.current_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(map(is_traceable_wrapper_subclass_type, types)):  # a DTensor, say: its operators on the parts come next
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif out is not None:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device_type or is_traceable_wrapper_subclass(tensor):
            return
        self._see_storage(tensor.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._live or size_bytes == 0:
            return
        self._live[key] = weakref.ref(storage, partial(self._release, key))
        self._sizes[key] = size_bytes
        self._add(size_bytes)

    def _add(self, size_bytes: int) -> None:
        self.current_bytes += size_bytes
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            if self._limit_bytes is not None and self.current_bytes > self._limit_bytes:
                raise torch.OutOfMemoryError(
                    f"tried to allocate {format_bytes(size_bytes)}: {format_bytes(self.current_bytes)} allocated, "
                    f"the limit is {format_bytes(self._limit_bytes)}"
                )

    def see_rng_states(self) -> Callable[[], torch.Tensor]:
        """Track `torch.get_rng_state` too: checkpointing keeps one state of 5056 B a layer, made outside the operators.

        Returns the original function.
        """
        original = torch.get_rng_state

        def get_rng_state() -> torch.Tensor:
            state = original()
            self._see(state)
            return state

        torch.get_rng_state = get_rng_state
        return original

    def see_resizes(self) -> Callable[..., Any]:
        """Track `UntypedStorage.resize_` too: FSDP frees and allocates the gathered parameters with it.

        Returns the original function.
        """
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            resized = original(storage, size)
            key = storage._cdata
            if key in self._live:
                before, self._sizes[key] = self._sizes[key], storage.nbytes()
                self._add(self._sizes[key] - before)
            elif storage.device.type == self._device_type:
                self._see_storage(storage)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return original

    def _release(self, key: int, _: object) -> None:
        self._live.pop(key, None)
        self.current_bytes -= self._sizes.pop(key, 0)


_ASLEEP = (SCORING, UPDATE, OPTIMIZER, SAVE)  # phases in which a vLLM engine that can sleep does so throughout


class CpuMemory:
    """The CPU allocator. Allocated, reserved and device-used bytes are equal, so the three peaks are one number."""

    least_measured_s = 0.0

    def __init__(self, limit_bytes: int | None) -> None:
        self.device_name = cpu_name()
        self._tracker = _StorageTracker("cpu", limit_bytes)
        self._original_rng: Callable[[], torch.Tensor] | None = None

    def card_state(self) -> None:
        return None

    def start(self) -> None:
        self._tracker.__enter__()  # type: ignore[no-untyped-call]
        self._original_rng = self._tracker.see_rng_states()
        self._original_resize = self._tracker.see_resizes()

    def stop(self) -> None:
        """Stop tracking: the following steps run at full speed."""
        if self._original_rng is not None:
            torch.get_rng_state, self._original_rng = self._original_rng, None
            torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
            self._tracker.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def account(self) -> dict[str, Any]:
        return {}

    def switch(self, left: str, entered: str) -> PhasePeak:
        tracker = self._tracker
        peak_bytes, tracker.peak_bytes = tracker.peak_bytes, tracker.current_bytes
        return PhasePeak(
            name=left, peak_allocated_bytes=peak_bytes, peak_reserved_bytes=peak_bytes, device_used_bytes=peak_bytes,
        )  # fmt: skip

    def now_s(self) -> float:
        return time.perf_counter()


class CudaMemory:
    """A CUDA card: torch's allocator, and NVML for all other bytes on the card.

    The target is emulated on a larger card by a hard cap on the allocator: target minus the bytes outside the allocator
    (context, modules, library handles, other processes). These grow while a probe runs, since CUDA loads kernels at
    their first use, so the cap is set anew at each change of phase.

    A vLLM engine that sleeps has given its memory back, and torch's books still hold it: NVML then counts fewer bytes
    than torch. Where it may wake up within a phase, its bytes count; in a phase of `_ASLEEP` what NVML counts does.
    """

    least_measured_s = 1.0  # NVML's power is the mean over a second, so shorter steps would tell none of their own

    def __init__(self, limit_bytes: int | None) -> None:
        import pynvml

        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.device_name = properties.name
        self._total_bytes: int = properties.total_memory
        self._limit_bytes = limit_bytes
        self._nvml = pynvml
        self._handle = own_handle(pynvml)
        self.context_bytes = self._awake_bytes = self._outside_bytes()
        _start_cublas()
        self.cublas_bytes = self._outside_bytes()
        if limit_bytes is not None and self.cublas_bytes >= limit_bytes:
            raise torch.OutOfMemoryError(
                f"the card already holds {format_bytes(self.cublas_bytes)} outside the allocator, "
                f"and the limit is {format_bytes(limit_bytes)}"
            )
        self._cap(self.cublas_bytes)

    def _cap(self, outside_bytes: int) -> None:
        """Cap the allocator at the limit less `outside_bytes`; if that is zero, every new segment fails."""
        if self._limit_bytes is not None:
            share = (self._limit_bytes - outside_bytes) / self._total_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)))

    def _outside_bytes(self) -> int:
        """Bytes on the card outside torch's allocator; below 0 if it holds those of a sleeping engine."""
        torch.cuda.synchronize()
        return used_bytes(self._nvml, self._handle) - torch.cuda.memory_reserved()

    def card_state(self) -> CardState:
        return card_state(self._nvml, self._handle)

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def stop(self) -> None:
        pass

    def account(self) -> dict[str, Any]:
        return {}

    def switch(self, left: str, entered: str) -> PhasePeak:
        reserved, outside = torch.cuda.max_memory_reserved(), self._outside_bytes()
        if outside >= 0:
            self._awake_bytes = outside
        peak = PhasePeak(
            name=left, peak_allocated_bytes=torch.cuda.max_memory_allocated(), peak_reserved_bytes=reserved,
            device_used_bytes=reserved + (outside if left in _ASLEEP else self._awake_bytes),
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        self._cap(outside if entered in _ASLEEP else self._awake_bytes)
        return peak

    def now_s(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


def _start_cublas() -> None:
    """Load cuBLAS, and leave torch's allocator as empty as a run finds it: a workspace that stood there before the
    model would move every later segment (up to 3.4 % of the reserved bytes of small models).
    """
    warm = torch.ones(64, 64, device="cuda")
    (warm @ warm).sum().item()
    del warm
    empty_allocator()


def empty_allocator() -> None:
    """Give back what torch's allocator holds for later, as a process that starts anew finds it."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _visible_slice() -> str | None:
    """The MIG slice that this process sees: torch's properties may name its card instead (cuDeviceGetUuid)."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = names[min(torch.cuda.current_device(), len(names) - 1)].strip()  # a rank's own of several
    return name if name.startswith("MIG-") else None


def own_handle(nvml: Any) -> Any:
    """NVML's handle of the card, or of the slice of one, that this process computes on."""
    return handle_of(nvml, _visible_slice() or str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


@contextmanager
def memory_of(device: str, limit_bytes: int | None) -> Iterator[Memory]:
    """The memory recorder of `device` ("cpu", "cuda" or "sim:GPU") with a hard limit in bytes."""
    if device.startswith("sim:"):
        from autofit.probing.simulated import simulated

        with simulated(device, limit_bytes) as memory:
            yield memory
    else:
        yield CudaMemory(limit_bytes) if device == "cuda" else CpuMemory(limit_bytes)


def merged(peaks: Iterable[PhasePeak]) -> tuple[PhasePeak, ...]:
    """One entry per phase, in order of first appearance, with the maximum of each peak."""
    by_name: dict[str, PhasePeak] = {}
    for peak in peaks:
        old = by_name.get(peak.name, peak)
        by_name[peak.name] = PhasePeak(
            name=peak.name,
            peak_allocated_bytes=max(old.peak_allocated_bytes, peak.peak_allocated_bytes),
            peak_reserved_bytes=max(old.peak_reserved_bytes, peak.peak_reserved_bytes),
            device_used_bytes=max(old.device_used_bytes, peak.device_used_bytes),
        )
    return tuple(by_name.values())


def tops(peaks: Iterable[PhasePeak]) -> dict[str, Any]:
    """The maximum of each peak over all phases, in bytes."""
    names, found = ("device_used_bytes", "peak_reserved_bytes", "peak_allocated_bytes"), tuple(peaks)
    return {name: max((getattr(p, name) for p in found), default=None) for name in names}


def cpu_name() -> str:
    """Name of this CPU in results measured on it: its model and the number of its threads."""
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]} x {len(names)}" if names else platform.processor() or "cpu"
