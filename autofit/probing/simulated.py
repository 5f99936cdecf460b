"""The `sim:` device: the simulated GPU's account of its bytes, and its clock. Imports torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autofit.fakegpu import FakeGpu, fake_gpu, gpu_spec
from autofit.fakegpu.replay import replay
from autofit.probing.result import PhasePeak


class SimMemory:
    """A simulated card inside its block: nothing is allocated, and seconds are those of its clock.

    The card has no limit while the probe runs, so that a candidate over the target says by how much; the verdict comes
    from replaying its allocations under the target.
    """

    def __init__(self, gpu: FakeGpu, limit_bytes: int | None) -> None:
        self._gpu = gpu
        self._limit_bytes = gpu.spec.capacity_bytes if limit_bytes is None else limit_bytes
        self.device_name = f"{gpu.spec.full_name} (simulated, {gpu.mode} mode)"

    def start(self) -> None:
        self._gpu.memory.enter_phase("load")

    def stop(self) -> None:
        pass

    def switch(self, left: str, entered: str) -> PhasePeak:
        gpu = self._gpu
        allocator = gpu.memory.allocator
        peak = PhasePeak(
            name=left,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            device_used_bytes=allocator.peak_reserved_bytes + self._outside_bytes,
        )
        gpu.reset_peaks()
        gpu.memory.enter_phase(entered)
        return peak

    def now_s(self) -> float:
        return self._gpu.elapsed_s

    @property
    def _outside_bytes(self) -> int:
        return self._gpu.spec.context_bytes + self._gpu.occupied_bytes

    def account(self) -> dict[str, Any]:
        """Least capacity, bytes by category at each phase's peak, and the device-used bytes under the target."""
        gpu = self._gpu
        least = gpu.least_capacity_bytes
        used = gpu.device_used_bytes
        if used > self._limit_bytes >= least:  # the allocator gives cached blocks back before it gives up
            room = self._limit_bytes - self._outside_bytes
            used = replay(gpu.memory.log, capacity_bytes=room, settings=gpu.settings).peak_reserved_bytes
            used += self._outside_bytes
        elif least > self._limit_bytes:
            used = least
        phases = {p.name: {k: v for k, v in p.categories.items() if v} for p in gpu.timeline.phases}
        return {
            "device_used_bytes": used,
            "least_capacity_bytes": least,
            "categories": phases,
            "fidelity": "predicted",
        }


@contextmanager
def simulated(device: str, limit_bytes: int | None) -> Iterator[SimMemory]:
    """The block of the card in `device` ("sim:a100-40gb"), of which a probe may use `limit_bytes`."""
    with fake_gpu(gpu_spec(device.removeprefix("sim:")), enforce_capacity=False, record_places=False) as gpu:
        yield SimMemory(gpu, limit_bytes)
