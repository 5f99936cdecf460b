"""The `torch.cuda` functions and classes inside the block. `registry.py` installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import MAIN, Moment
from autofit.fakegpu.specs import FakeGpuError


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """Stands in for torch's _CudaDeviceProperties."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32
    gcnArchName: str = ""
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 101376
    shared_memory_per_multiprocessor: int = 102400
    L2_cache_size: int = 40 << 20
    uuid: str = "00000000-0000-0000-0000-000000000000"


def _number(stream: object) -> int:
    return stream.stream_id if isinstance(stream, FakeStream) else MAIN


class FakeEvent:
    """torch.cuda.Event on the simulated clock."""

    __class__ = torch.cuda.Event  # type: ignore[assignment]  # for isinstance

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._gpu = _current()
        self._time_s: float | None = None
        self._moment: Moment | None = None

    def record(self, stream: object = None) -> None:
        self._time_s = self._gpu.clock.now_s
        self._moment = self._gpu.clock.moment(self._gpu.memory.stream if stream is None else _number(stream))

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        if self._time_s is None or end_event._time_s is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return (end_event._time_s - self._time_s) * 1e3

    def synchronize(self) -> None:
        if self._moment is not None:
            self._gpu.clock.wait(None, self._moment)

    def wait(self, stream: object = None) -> None:
        if self._moment is not None:
            self._gpu.clock.wait(self._gpu.memory.stream if stream is None else _number(stream), self._moment)

    def query(self) -> bool:
        return True


class FakeStream:
    """torch.cuda.Stream: its allocations come from its own pools, and its copies to the host overlap with kernels."""

    __class__ = torch.cuda.Stream  # type: ignore[assignment]
    _count = 0

    def __init__(self, device: object = None, priority: int = 0, *, stream_id: int | None = None, **_: object) -> None:
        if stream_id is None:
            FakeStream._count += 1
            stream_id = FakeStream._count
        self.stream_id = stream_id
        self.cuda_stream = stream_id
        self.priority = priority
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.device_type = 1
        self._before = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait_stream(self, stream: object) -> None:
        clock = _current().clock
        clock.wait(self.stream_id, clock.moment(_number(stream)))

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def __enter__(self) -> FakeStream:
        self._before = _current().memory.stream
        _current().memory.stream = self.stream_id
        return self

    def __exit__(self, *exc: object) -> None:
        _current().memory.stream = self._before

    def synchronize(self) -> None:
        clock = _current().clock
        clock.wait(None, clock.moment(self.stream_id))

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


def instead_of(kind: type, fake: Callable[..., object]) -> Callable[..., object]:
    """`kind.__new__` that makes a fake, which `isinstance` takes for a `kind`."""

    def new(cls: type, *args: object, **kwargs: object) -> object:
        if cls is not kind:
            raise FakeGpuError(f"{cls.__qualname__} is a subclass of {kind.__qualname__}, which is not simulated")
        return fake(*args, **kwargs)

    return new


@dataclass
class CudaApi:
    """The functions of `torch.cuda` and `torch.accelerator` for one simulated card."""

    gpu: FakeGpu
    _random_state: torch.Tensor = field(default_factory=lambda: torch.zeros(16, dtype=torch.uint8))
    _memory_fraction: float = 1.0

    def properties(self, device: object = None) -> DeviceProperties:
        spec = self.gpu.spec
        major, minor = spec.compute_capability
        return DeviceProperties(
            name=spec.full_name,
            major=major,
            minor=minor,
            total_memory=spec.capacity_bytes,
            multi_processor_count=spec.sm_count,
        )

    def capability(self, device: object = None) -> tuple[int, int]:
        return self.gpu.spec.compute_capability

    def name(self, device: object = None) -> str:
        return self.gpu.spec.full_name

    def bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.gpu.spec.compute_capability >= (8, 0)

    def tf32_supported(self) -> bool:
        return self.gpu.spec.compute_capability >= (8, 0)

    def device_handle(self, device: object = None) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        self.gpu.clock.synchronize()

    def empty_cache(self) -> None:
        self.gpu.memory.empty_cache()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.gpu.memory.free_bytes, self.gpu.spec.capacity_bytes

    def memory_stats(self, device: object = None) -> dict[str, object]:
        """torch's nested statistics, limited to the entries that its public functions and its summary read."""
        allocator = self.gpu.memory.allocator
        inactive = allocator.reserved_bytes - allocator.allocated_bytes
        zero = _stat(0, 0)
        nested: dict[str, object] = {
            "allocated_bytes": _stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "requested_bytes": _stat(allocator.requested_bytes, allocator.peak_requested_bytes),
            "reserved_bytes": _stat(allocator.reserved_bytes, allocator.peak_reserved_bytes),
            "active_bytes": _stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
            "inactive_split_bytes": _stat(inactive, inactive),
            "segment": _stat(allocator.segment_count, allocator.segment_count),
            "num_alloc_retries": allocator.retry_count,
            "num_ooms": allocator.oom_count,
        }
        for name in ("allocation", "active", "inactive_split"):
            nested[name] = zero
        for name in ("oversize_allocations", "oversize_segments"):
            nested[name] = zero["all"]
        return nested

    def reset_peaks(self, device: object = None) -> None:
        self.gpu.reset_peaks()

    def reset_accumulated(self, device: object = None) -> None: ...

    def set_memory_fraction(self, fraction: float, device: object = None) -> None:
        spec = self.gpu.spec
        self._memory_fraction = fraction
        self.gpu.memory.allocator.capacity_bytes = min(int(fraction * spec.capacity_bytes), self.gpu.allocatable_bytes)

    def get_memory_fraction(self, device: object = None) -> float:
        return self._memory_fraction

    def current_stream(self, device: object = None) -> FakeStream:
        return FakeStream(stream_id=self.gpu.memory.stream)

    def default_stream(self, device: object = None) -> FakeStream:
        return FakeStream(stream_id=0)

    def set_stream(self, stream: object) -> None:
        if isinstance(stream, FakeStream):
            self.gpu.memory.stream = stream.stream_id

    def get_rng_state(self, device: object = "cuda") -> torch.Tensor:
        return self._random_state

    def get_rng_states(self) -> list[torch.Tensor]:
        return [self._random_state]

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    def clear_workspaces(self) -> None:
        self.gpu.tracer.clear_workspaces()


class FakeCudaGraph:
    """torch.cuda.CUDAGraph: a capture runs the code; a replay takes as long as the capture."""

    __class__ = torch.cuda.CUDAGraph  # type: ignore[assignment]

    def __init__(self, keep_graph: bool = False) -> None:
        self._gpu = _current()
        self._started_s = self._seconds = 0.0
        self._gpu.note("a CUDA graph's replay is timed as its capture, and its memory is that of its own stream's pool")

    def capture_begin(self, *args: object, **kwargs: object) -> None:
        self._started_s = self._gpu.clock.now_s

    def capture_end(self) -> None:
        self._seconds = self._gpu.clock.now_s - self._started_s

    def replay(self) -> None:
        self._gpu.clock.advance(self._seconds)

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def instantiate(self) -> None: ...

    def reset(self) -> None: ...


def scatter_to_one(tensor: torch.Tensor, *args: object) -> tuple[torch.Tensor, ...]:
    """torch._C._scatter for `nn.DataParallel` on a single card."""
    return (tensor.to("cuda"),)


def one_card(gpu: FakeGpu) -> Iterator[tuple[object, str, object, str]]:
    """Patches of less common CUDA functions that a CPU build lacks: graphs, snapshots, markers, DataParallel."""
    import torch.cuda.graphs
    import torch.cuda.memory
    import torch.cuda.nvtx

    reason = "torch.cuda answers for the simulated card"

    def no_snapshot(*args: object, **kwargs: object) -> list[object]:
        gpu.note("a memory snapshot of the simulated card is empty; see gpu.timeline and gpu.why_peak()")
        return []

    for module in (torch.cuda, torch.cuda.memory):
        yield module, "memory_snapshot", no_snapshot, reason
        yield module, "memory_usage", always(0), reason
        yield module, "list_gpu_processes", always("GPU:0\nno processes are running"), reason
    for name in ("_snapshot", "_record_memory_history", "_dump_snapshot"):
        yield torch.cuda.memory, name, no_snapshot, reason
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        yield torch.cuda.nvtx, name, always(0), reason
    for module in (torch.cuda, torch.cuda.graphs):
        yield module, "graph_pool_handle", always((0, 0)), reason
    yield torch.cuda.CUDAGraph, "__new__", instead_of(torch.cuda.CUDAGraph, FakeCudaGraph), reason
    yield torch.cuda.graph, "default_capture_stream", None, reason
    yield torch._C, "_host_emptyCache", nothing, reason
    yield torch._C, "_scatter", scatter_to_one, reason


def nothing(*args: object, **kwargs: object) -> None:
    """No-op for calls that only matter to a real device: seeding, collecting handles, initialising."""


def always(value: object) -> Callable[..., object]:
    """A function that accepts any arguments and returns `value`."""

    def answer(*args: object, **kwargs: object) -> object:
        return value

    return answer


_STACK: list[FakeGpu] = []


@contextlib.contextmanager
def current_gpu(gpu: FakeGpu) -> Iterator[None]:
    """Inside, this is the card of new events, streams and graphs."""
    _STACK.append(gpu)
    try:
        yield
    finally:
        _STACK.remove(gpu)


def active_gpu() -> FakeGpu | None:
    """The card of the block that is running; None outside of blocks."""
    return _STACK[-1] if _STACK else None


def _current() -> FakeGpu:
    gpu = active_gpu()
    if gpu is None:
        raise RuntimeError("this CUDA object belongs to a simulated GPU whose block has ended")
    return gpu


def _stat(current: int, peak: int) -> dict[str, dict[str, int]]:
    one = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
    return {"all": one, "small_pool": dict.fromkeys(one, 0), "large_pool": one}
