"""Bytes of a simulated rank's tensors in the memory of its host: offloaded parameters, optimizer states, buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.host_copies import is_pinned
from autofit.fakegpu.replay import EventLog

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
