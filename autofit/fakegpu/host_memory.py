"""Bytes of a simulated rank's tensors in the memory of its host: offloaded parameters, optimizer states, buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.replay import EventLog

# Copies between the card and pinned memory of the host, over the host link; other host memory is not simulated.

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
_FACTORIES = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten._to_copy.default,
}  # fmt: skip


class HostCopy(NamedTuple):
    """A copy of `nbytes` over the host link; the host waits for its end unless it was asked not to."""

    nbytes: int
    waits: bool


def pin(func: OpOverload, kwargs: Mapping[str, object], out: object) -> None:
    """Remember that the storage of `out` was asked for in pinned memory, as copies for which nobody waits are."""
    asked = kwargs.get("pin_memory") or (func is aten._to_copy.default and kwargs.get("non_blocking"))
    if func in _FACTORIES and asked and isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
        set_pinned(out)


def set_pinned(tensor: torch.Tensor) -> None:
    tensor.untyped_storage()._autofit_pinned = True  # type: ignore[attr-defined]


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or that of which it is a view, was asked for in pinned memory."""
    return getattr(tensor.untyped_storage(), "_autofit_pinned", False)


def host_copy(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> HostCopy | None:
    """The copy that `func` makes between pinned memory and the card; None if it makes none."""
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


class HostMemory:
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

    def pin(self, tensor: torch.Tensor) -> None:
        """Note that the storage of a tensor is pinned, which was made by an operation that does not say so."""
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
