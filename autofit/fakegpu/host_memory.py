"""Bytes of a simulated rank's tensors in the memory of its host: offloaded parameters, optimizer states, buffers."""

from __future__ import annotations

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.host_copies import is_pinned


class HostMemory:
    """Follows the storages of fake tensors on the CPU, from the operation that made each to its end."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.pinned_bytes = 0  # of the live ones
        self.peak_pinned_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def take_peak(self) -> int:
        """The most bytes since the last call; from here on the peak is counted anew."""
        peak, self.peak_bytes, self.peak_pinned_bytes = self.peak_bytes, self.live_bytes, self.pinned_bytes
        return peak

    def follow(self, out: object) -> None:
        """See the outputs of an operation."""
        if isinstance(out, FakeTensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self.follow(item)

    def _see(self, tensor: FakeTensor) -> None:
        if tensor.fake_device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, nbytes, pinned = storage._cdata, storage.nbytes(), is_pinned(tensor)
        if key in self._live or not nbytes:
            return

        def died(_: object) -> None:
            del self._live[key]
            self._add(-nbytes, pinned)

        self._live[key] = weakref.ref(storage, died)
        self._add(nbytes, pinned)

    def _add(self, nbytes: int, pinned: bool) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if pinned:
            self.pinned_bytes += nbytes
            self.peak_pinned_bytes = max(self.peak_pinned_bytes, self.pinned_bytes)
