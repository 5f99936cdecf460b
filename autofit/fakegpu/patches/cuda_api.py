"""The `torch.cuda` functions and classes inside the block. `registry.py` installs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import MAIN, Moment
from autofit.fakegpu.memory import SimulatedMemory
from autofit.fakegpu.specs import FakeGpuError, GpuSpec


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


def _instead_of(kind: type, fake: Callable[..., object]) -> Callable[..., object]:
    """`kind.__new__` that makes a fake, which `isinstance` takes for a `kind`."""

    def new(cls: type, *args: object, **kwargs: object) -> object:
        if cls is not kind:
            raise FakeGpuError(f"{cls.__qualname__} is a subclass of {kind.__qualname__}, which is not simulated")
        return fake(*args, **kwargs)

    return new


def _properties(spec: GpuSpec) -> DeviceProperties:
    major, minor = spec.compute_capability
    return DeviceProperties(
        name=spec.full_name, major=major, minor=minor, total_memory=spec.capacity_bytes,
        multi_processor_count=spec.sm_count,
    )  # fmt: skip


def _memory_stats(memory: SimulatedMemory) -> dict[str, object]:
    """torch's nested statistics, limited to the entries that its public functions and its summary read."""
    allocator = memory.allocator
    inactive = allocator.reserved_bytes - allocator.allocated_bytes
    zero = _stat(0, 0)
    return {
        "allocated_bytes": _stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
        "requested_bytes": _stat(allocator.requested_bytes, allocator.peak_requested_bytes),
        "reserved_bytes": _stat(allocator.reserved_bytes, allocator.peak_reserved_bytes),
        "active_bytes": _stat(allocator.allocated_bytes, allocator.peak_allocated_bytes),
        "inactive_split_bytes": _stat(inactive, inactive),
        "segment": _stat(allocator.segment_count, allocator.segment_count), "num_alloc_retries": allocator.retry_count,
        "num_ooms": allocator.oom_count, **dict.fromkeys(("allocation", "active", "inactive_split"), zero),
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), zero["all"]),
    }  # fmt: skip


def answers(gpu: FakeGpu) -> Iterator[tuple[object, str, object, str]]:
    """The functions of `torch.cuda` and `torch.accelerator` for one simulated card."""
    import torch.cuda.amp
    import torch.cuda.memory
    import torch.cuda.random

    spec, memory, clock, fraction = gpu.spec, gpu.memory, gpu.clock, 1.0
    ampere, random_state = spec.compute_capability >= (8, 0), torch.zeros(16, dtype=torch.uint8)

    def set_fraction(value: float, device: object = None) -> None:
        nonlocal fraction
        fraction = value
        memory.allocator.capacity_bytes = min(int(value * spec.capacity_bytes), gpu.allocatable_bytes)

    def set_stream(stream: object) -> None:
        if isinstance(stream, FakeStream):
            memory.stream = stream.stream_id

    reason = "torch.cuda answers for the simulated card"
    shared: dict[str, object] = {
        "is_available": always(True), "device_count": always(1), "synchronize": lambda device=None: clock.synchronize(),
        "current_stream": lambda device=None: FakeStream(stream_id=memory.stream), "set_stream": set_stream,
    }  # fmt: skip
    of_cuda: dict[str, object] = {
        "current_device": always(0), "is_initialized": always(True), "_lazy_init": nothing, "init": nothing,
        "_lazy_call": nothing, "get_device_capability": always(spec.compute_capability), "set_device": nothing,
        "get_device_properties": always(_properties(spec)), "get_device_name": always(spec.full_name),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or ampere,
        "is_tf32_supported": always(ampere), "ipc_collect": nothing,
        "default_stream": lambda device=None: FakeStream(stream_id=0),
        "can_device_access_peer": always(False), "get_arch_list": always([]), "utilization": always(100),
        "_exchange_device": always(0), "_maybe_exchange_device": always(0), "_check_capability": nothing,
        "default_generators": (torch.default_generator,), "is_current_stream_capturing": always(False),
    }  # fmt: skip
    of_allocator: dict[str, object] = {
        "empty_cache": memory.empty_cache, "reset_peak_memory_stats": lambda device=None: gpu.reset_peaks(),
        "reset_accumulated_memory_stats": nothing,
    }  # fmt: skip
    free: Callable[..., object] = lambda device=None: (memory.free_bytes, spec.capacity_bytes)  # noqa: E731
    of_memory: dict[str, object] = {
        "memory_stats_as_nested_dict": lambda device=None: _memory_stats(memory), **of_allocator, "mem_get_info": free,
        "set_per_process_memory_fraction": set_fraction, "get_allocator_backend": always("native"),
        "get_per_process_memory_fraction": lambda device=None: fraction,
    }  # fmt: skip
    seeds: dict[str, object] = {
        "manual_seed": nothing, "manual_seed_all": nothing, "seed": nothing, "seed_all": nothing,
        "initial_seed": always(0), "get_rng_state": always(random_state), "set_rng_state": nothing,
        "get_rng_state_all": always([random_state]), "set_rng_state_all": nothing,
    }  # fmt: skip
    for module, functions in ((torch.cuda.memory, of_memory), (torch.cuda.random, seeds)):
        yield from ((module, name, value, reason) for name, value in functions.items())
    for name, value in {**shared, **of_cuda, **of_memory, **seeds}.items():
        yield torch.cuda, name, value, reason
    for kind, fake in ((torch.cuda.Event, FakeEvent), (torch.cuda.Stream, FakeStream)):
        yield kind, "__new__", _instead_of(kind, fake), reason
    yield torch._C, "_cuda_clearCublasWorkspaces", gpu.tracer.clear_workspaces, reason
    cuda, totals = torch.cuda, ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    of_accelerator: dict[str, object] = {
        **shared, **of_allocator, "current_accelerator": always(torch.device("cuda")), "get_memory_info": free,
        **dict.fromkeys(("current_device_index", "current_device_idx"), always(0)),
        **dict.fromkeys(("set_device_index", "set_device_idx"), nothing),
        **{name: lambda *_, name=name: getattr(cuda, name)() for name in (*totals, "memory_stats")},
    }  # fmt: skip
    for name, value in of_accelerator.items():
        yield torch.accelerator, name, value, "torch.accelerator is the simulated card"


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
    yield torch.cuda.CUDAGraph, "__new__", _instead_of(torch.cuda.CUDAGraph, FakeCudaGraph), reason
    yield torch.cuda.graph, "default_capture_stream", None, reason
    yield torch._C, "_host_emptyCache", nothing, reason
    yield torch._C, "_scatter", lambda tensor, *args: (tensor.to("cuda"),), reason  # of nn.DataParallel


def nothing(*args: object, **kwargs: object) -> None:
    """No-op for calls that only matter to a real device: seeding, collecting handles, initialising."""


def always(value: object) -> Callable[..., object]:
    """A function that accepts any arguments and returns `value`."""

    return lambda *args, **kwargs: value


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
    """The card of the block that is running, if there is one."""
    return _STACK[-1] if _STACK else None


def _current() -> FakeGpu:
    gpu = active_gpu()
    if gpu is None:
        raise RuntimeError("this CUDA object belongs to a simulated GPU whose block has ended")
    return gpu


def _stat(current: int, peak: int) -> dict[str, dict[str, int]]:
    one = {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}
    return {"all": one, "small_pool": dict.fromkeys(one, 0), "large_pool": one}
