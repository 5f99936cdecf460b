"""The card's tensors: storages, categories and phases, on top of the allocator; and those in the memory of the host."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.allocator import Block, CachingAllocator, OutOfCapacityError
from autofit.fakegpu.replay import EventLog
from autofit.fakegpu.scratch import Held, Rounded, Stepwise
from autofit.fakegpu.specs import FakeGpuError, GpuSpec

# The simulated card's memory: each storage of a fake tensor holds a block of the allocator during its lifetime.

GIB = 1 << 30
_FIRST_ADDRESS = 1 << 46  # of the invented addresses
_LIBRARY_PARTS = ("/torch/", "/autofit/fakegpu/", "<string>", "/contextlib.py")


@dataclass(slots=True)
class Allocation:
    """One storage from allocation to free. `category` may be set later (gradients are known at the optimizer step)."""

    nbytes: int
    category: str
    phase: str
    op: str
    code: CodeType | None
    line: int
    shape: tuple[int, ...]
    dtype: str
    born: int
    died: int | None = None
    layer: int = 0  # tag of its layer, if layers are followed
    parts: tuple[Rounded, ...] = ()  # of its size, where dimensions are rounded up
    is_stepwise: bool = False  # its size follows no formula of shapes

    @property
    def place(self) -> str:
        """file:line and function of the allocating code outside torch."""
        return f"{self.code.co_filename}:{self.line} {self.code.co_qualname}" if self.code else "?"


def device_type(tensor: torch.Tensor) -> str:
    """The type of a tensor's device; of a fake tensor past the dispatcher, which takes 3 us."""
    return (tensor.fake_device if type(tensor) is FakeTensor else tensor.device).type


class SimulatedMemory:
    """Tracks storages on one device type and allocates them in a caching allocator, which may run out of memory."""

    def __init__(self, spec: GpuSpec, allocator: CachingAllocator, *, device_type: str, record_places: bool) -> None:
        self.spec = spec
        self.allocator = allocator
        self.device_type = device_type
        self.log = EventLog()
        self.allocations: list[Allocation] = []
        self.phase = "start"
        self.phase_marks: list[tuple[int, str]] = [(0, "start")]
        self.category: str | None = None
        self.stream = 0
        self._blocks: dict[int, Block] = {}
        self._live: dict[int, int] = {}  # storage address -> allocation index
        self._besides: dict[int, list[int]] = {}  # the same, of storages that stand for several: all but the first
        self._guards: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._record_places = record_places
        self.keeps_empty = False  # True: also allocate buffers of kernels that only more rows would need
        self.classify: Callable[[torch.Tensor], str] = lambda tensor: "temporaries"
        self.layer_at_work: Callable[[], int] = lambda: 0

    # ------------------------------------------------------------------ tensors
    def track(self, tensor: torch.Tensor, op: str = "") -> None:
        """Allocate the tensor's storage if it is on this device and still untracked; may raise OutOfMemoryError."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor wraps its local shard
        if device_type(tensor) != self.device_type:
            return
        if tensor.layout is not torch.strided:
            raise FakeGpuError(f"{tensor.layout} tensors are not simulated (nn.Embedding(sparse=True) makes them)")
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        index = self.allocate(nbytes, self.category or self.classify(tensor), op, tensor)
        self._live[key] = index
        self._watch(storage)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Allocation index of a tensor's storage, if it is tracked."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        return self._live.get(tensor.untyped_storage()._cdata)

    def mark(self, tensor: torch.Tensor, category: str) -> None:
        """Set the category of a tensor's storage, for its whole lifetime."""
        index = self.index_of(tensor)
        if index is not None:
            self.allocations[index].category = category

    def note_parts(self, tensor: torch.Tensor, parts: tuple[Rounded, ...]) -> None:
        """Set the parts of the size of a tensor's storage."""
        index = self.index_of(tensor)
        if index is not None and self.allocations[index].nbytes == sum(part.nbytes for part in parts):
            self.allocations[index].parts = parts

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Reallocate a storage after a resize in place (FSDP frees parameters this way)."""
        key = storage._cdata
        index = self._live.pop(key, None)
        category = self.allocations[index].category if index is not None else "weights"
        if index is not None:
            self.release(index)
        nbytes = storage.nbytes()
        if nbytes:
            self._live[key] = self.allocate(nbytes, category, "resize_")
            if key not in self._guards:
                self._watch(storage)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """The invented and unique address of a live storage of this card; 0 of any other storage."""
        index = self._live.get(storage._cdata)
        return 0 if index is None else _FIRST_ADDRESS + (index << 40)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """True if a storage is tracked as memory of this card (or was, before it was resized to 0 bytes)."""
        return storage._cdata in self._guards

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata

        def died(_: object) -> None:
            self._died(key)

        self._guards[key] = weakref.ref(storage, died)

    def _died(self, key: int) -> None:
        self._guards.pop(key, None)
        index = self._live.pop(key, None)
        if index is not None:
            self.release(index)
        for other in self._besides.pop(key, ()):
            self.release(other)

    # ------------------------------------------------------------------ bytes
    def allocate(self, nbytes: int, category: str, op: str = "", tensor: torch.Tensor | None = None) -> int:
        """Allocate `nbytes`; returns the allocation index, or raises the real `torch.OutOfMemoryError`."""
        index = len(self.allocations)
        try:
            self._blocks[index] = self.allocator.malloc(nbytes, self.stream)
        except OutOfCapacityError:
            raise torch.OutOfMemoryError(self._out_of_memory_text(nbytes)) from None
        code, line = _caller() if self._record_places else (None, 0)
        layer = self.layer_at_work()
        self.allocations.append(
            Allocation(
                nbytes=nbytes, category=category, phase=self.phase, op=op, code=code, line=line,
                shape=tuple(tensor.shape) if tensor is not None else (nbytes,),
                dtype=str(tensor.dtype) if tensor is not None else "torch.uint8", born=len(self.log), layer=layer,
            )
        )  # fmt: skip
        if self.stream:
            self.log.streams[index] = self.stream
        self.log.add(index, nbytes, layer)
        return index

    def release(self, index: int) -> None:
        block = self._blocks.pop(index, None)
        if block is None:
            return
        allocation = self.allocations[index]
        allocation.died = len(self.log)
        self.allocator.free(block)
        self.log.add(index, -allocation.nbytes, self.layer_at_work())

    def empty_cache(self) -> None:
        """Give back unused memory, as `torch.cuda.empty_cache` does."""
        self.allocator.empty_cache()
        self.log.emptied.append(len(self.log))

    def scratch(self, held: Held, op: str) -> list[int]:
        """Allocate the buffers that a kernel holds at the same time, and free them, the last first; their indices."""
        indices = self.hold(held, op)
        for index in reversed(indices):
            self.release(index)
        return indices

    def hold(self, held: Held, op: str) -> list[int]:
        """Allocate these buffers of a kernel; their indices, for `release`."""
        indices: list[int] = []
        for buffer in held:
            parts = () if isinstance(buffer, int) else buffer
            nbytes = buffer if isinstance(buffer, int) else sum(part.nbytes for part in parts)
            if nbytes == 0 and self.keeps_empty:
                nbytes = sum(part.most_bytes for part in parts)
            if nbytes > 0:
                indices.append(self.allocate(nbytes, "temporaries", op))
                allocation = self.allocations[indices[-1]]
                allocation.parts, allocation.is_stepwise = parts, isinstance(buffer, Stepwise)
        return indices

    def allocate_like(self, template: Allocation, nbytes: int, shape: tuple[int, ...]) -> int:
        """Allocate with the attributes of an earlier allocation (for an extrapolated decode step of a rollout)."""
        index = len(self.allocations)
        try:
            self._blocks[index] = self.allocator.malloc(nbytes, self.stream)
        except OutOfCapacityError:
            raise torch.OutOfMemoryError(self._out_of_memory_text(nbytes)) from None
        layer = self.layer_at_work()
        t = template  # one by one: dataclasses.replace takes several times as long, and a rollout has 10^5 of these
        self.allocations.append(
            Allocation(nbytes, t.category, t.phase, t.op, t.code, t.line, shape, t.dtype, len(self.log), None, t.layer,
                       t.parts)
        )  # fmt: skip
        self.log.add(index, nbytes, layer)
        return index

    def allocate_again(self, earlier: Allocation) -> int:
        """Allocate what an earlier allocation was, in the phase of now."""
        index = self.allocate_like(earlier, earlier.nbytes, earlier.shape)
        made = self.allocations[index]
        made.phase, made.is_stepwise = self.phase, earlier.is_stepwise
        return index

    def adopt(self, tensor: torch.Tensor, index: int) -> None:
        """Let an untracked tensor own an allocation, for as long as its storage lives."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = index
        self._watch(storage)

    def adopt_all(self, tensor: torch.Tensor, indices: Sequence[int]) -> None:
        """The same for several allocations, which are given back in this order."""
        if indices:
            self.adopt(tensor, indices[0])
            self._besides[tensor.untyped_storage()._cdata] = list(indices[1:])

    def disown(self, tensor: torch.Tensor) -> list[int]:
        """Let the allocations of a tensor stay even after its end; returns them."""
        key = tensor.untyped_storage()._cdata
        self._guards.pop(key, None)
        index = self._live.pop(key, None)
        return [] if index is None else [index, *self._besides.pop(key, ())]

    def is_live(self, index: int) -> bool:
        return index in self._blocks

    def replace(self, stand_ins: dict[int, int]) -> None:
        """Map live storages from the allocations in the keys to those in the values."""
        for key, index in self._live.items():
            if index in stand_ins:
                self._live[key] = stand_ins[index]

    def take_over(self, heir: torch.Tensor, owner: torch.Tensor) -> None:
        """Move the allocation of `owner` to `heir`, for an operation that a card would have done in place."""
        old, new = owner.untyped_storage(), heir.untyped_storage()
        if old._cdata in self._live and new._cdata not in self._live:
            self._live[new._cdata] = self._live.pop(old._cdata)
            self._watch(new)

    def enter_phase(self, name: str) -> None:
        self.phase = name
        self.phase_marks.append((len(self.log), name))

    # ------------------------------------------------------------------ what the driver says
    @property
    def free_bytes(self) -> int:
        return max(0, self.allocator.capacity_bytes - self.allocator.reserved_bytes)

    def _out_of_memory_text(self, nbytes: int) -> str:
        allocator, total = self.allocator, self.spec.capacity_bytes
        idle = allocator.reserved_bytes - allocator.allocated_bytes
        return (
            f"CUDA out of memory. Tried to allocate {_text(nbytes)}. GPU 0 has a total capacity of {_text(total)} of "
            f"which {_text(self.free_bytes)} is free. {_text(allocator.allocated_bytes)} is allocated by PyTorch, and "
            f"{_text(idle)} is reserved by PyTorch but unallocated. (autofit: simulated {self.spec.full_name})"
        )


def _text(nbytes: int) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:.2f} KiB"


@cache
def _of_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY_PARTS)


def _caller() -> tuple[CodeType | None, int]:
    """Code and line of the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not _of_library(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


# Bytes of a simulated rank's tensors in the memory of its host: offloaded parameters, optimizer states, buffers.

# Copies between the card and pinned memory of the host, over the host link; other host memory is not simulated.

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
_FACTORIES = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten._to_copy.default,
}  # fmt: skip


class HostCopy(NamedTuple):
    """A copy of `nbytes` over the host link; by default the host waits for its end."""

    nbytes: int
    waits: bool


def pin(func: OpOverload, kwargs: Mapping[str, object], out: object) -> None:
    """Remember that the storage of `out` was asked for in pinned memory, as asynchronous copies are."""
    asked = kwargs.get("pin_memory") or (func is aten._to_copy.default and kwargs.get("non_blocking"))
    if func in _FACTORIES and asked and isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
        set_pinned(out)


def set_pinned(tensor: torch.Tensor) -> None:
    tensor.untyped_storage()._autofit_pinned = True  # type: ignore[attr-defined]


def is_pinned(tensor: torch.Tensor) -> bool:
    """True if a tensor, or the base of a view, was asked for in pinned memory."""
    return getattr(tensor.untyped_storage(), "_autofit_pinned", False)


def host_copy(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> HostCopy | None:
    """The copy that `func` makes between pinned memory and the card, if it makes one."""
    source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
    if not isinstance(source, FakeTensor) or not isinstance(target, FakeTensor):
        return None
    ends = source.fake_device.type, target.fake_device.type
    if ends not in (("cpu", "cuda"), ("cuda", "cpu")) or not is_pinned(source if ends[0] == "cpu" else target):
        return None
    asked = args[2] if func is aten.copy_.default and len(args) > 2 else kwargs.get("non_blocking", False)
    return HostCopy(target.numel() * target.element_size(), waits=not cast("bool", asked))


Ints = npt.NDArray[np.int64]


def held_bytes(nbytes: Ints, pinned: Ints) -> tuple[Ints, Ints]:
    """(bytes held, pinned ones among them) after each event of `nbytes`, where `pinned` is 1 or 0.

    torch rounds pinned blocks up to a power of two and keeps those that are freed, for others of the same size
    (ATen/core/CachingHostAllocator.h).
    """
    rounded = np.sign(nbytes) * 2 ** np.ceil(np.log2(np.maximum(np.abs(nbytes), 1))).astype(np.int64)
    blocks = np.where(pinned == 1, rounded, 0)
    kept = np.zeros(len(nbytes), np.int64)
    for size in np.unique(np.abs(blocks[blocks != 0])):
        kept += np.maximum.accumulate(np.cumsum(np.where(np.abs(blocks) == size, blocks, 0)))
    return np.cumsum(np.where(pinned == 1, 0, nbytes)) + kept, kept


class HostTensors:
    """Follows the storages of fake tensors on the CPU, from the operation that made each to its end.

    `owners` has the layer of each storage and `pinned` whether it is pinned, by its number in the log.
    """

    def __init__(self) -> None:
        self.log = EventLog()
        self.owners: list[int] = []
        self.pinned: list[bool] = []
        self.layer_at_work: Callable[[], int] = lambda: 0
        self._live: dict[int, int] = {}  # storage -> its number
        self._guards: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def follow(self, out: object) -> None:
        """See the outputs of an operation."""
        if isinstance(out, FakeTensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self.follow(item)

    def give(self, tensor: torch.Tensor, layer: int) -> None:
        """Attribute the storage of a tensor, if it is one of these, to a layer."""
        number = self._live.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self.owners[number] = layer

    def layer_of(self, tensor: torch.Tensor) -> int:
        """The layer of the storage of a tensor; 0 if it is untracked, or outside the layers."""
        number = self._live.get(tensor.untyped_storage()._cdata)
        return 0 if number is None else self.owners[number]

    def pin(self, tensor: torch.Tensor) -> None:
        """Note that the storage of a tensor is pinned, although its operation leaves that open."""
        self.pinned[self._live[tensor.untyped_storage()._cdata]] = True

    def _see(self, tensor: FakeTensor) -> None:
        if tensor.fake_device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live or not nbytes:
            return
        number, layer = len(self.owners), self.layer_at_work()

        def died(_: object) -> None:
            del self._live[key], self._guards[key]
            self.log.add(number, -nbytes, self.layer_at_work())

        self._live[key], self._guards[key] = number, weakref.ref(storage, died)
        self.owners.append(layer)
        self.pinned.append(is_pinned(tensor))
        self.log.add(number, nbytes, layer)
