"""How the cards and the host of this machine are used at one moment, by whom. Imports no torch."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from autofit.hardware.nvml import Gpu, described, of_each_card, started, used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """A card, or a slice of one, at one moment. None where its driver does not tell."""

    gpu: Gpu
    device_used_bytes: int
    utilisation_frac: float | None  # of the last sample period with a kernel at work
    processes: tuple[tuple[int, int | None], ...] | None  # (pid, bytes; None where the driver does not tell)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """A process and its descendants at one moment."""

    rss_bytes: int  # the sum over its processes: pages that they share are counted once each
    cpu_s: Mapping[int, float]  # pid -> seconds since that process began

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self.cpu_s)

    def __or__(self, other: "ProcessUse") -> "ProcessUse":
        """Both, if none is in the other."""
        return ProcessUse(rss_bytes=self.rss_bytes + other.rss_bytes, cpu_s={**self.cpu_s, **other.cpu_s})

    def cpu_s_since(self, before: "ProcessUse") -> float:
        """Seconds of processor time that its living processes took since then."""
        return sum(max(0.0, now - before.cpu_s.get(pid, 0.0)) for pid, now in self.cpu_s.items())


def card_uses() -> tuple[CardUse, ...]:
    """Every card of this machine that works, in the order of the PCI bus; empty without a driver."""
    with started() as nvml:
        if nvml is None:
            return ()
        return tuple(of_each_card(nvml, lambda handle, index: _use(nvml, handle, index))[0])


def _use(nvml: Any, handle: Any, index: int) -> CardUse:
    return CardUse(
        gpu=described(nvml, handle, index), device_used_bytes=used_bytes(nvml, handle),
        utilisation_frac=_utilisation(nvml, handle), processes=card_processes(nvml, handle),
    )  # fmt: skip


def _utilisation(nvml: Any, handle: Any) -> float | None:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:  # a MIG slice
        return None


def card_processes(nvml: Any, handle: Any) -> tuple[tuple[int, int | None], ...] | None:
    """(pid, bytes) of each process that computes on the card; None where the driver does not tell."""
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    return tuple((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found)


def tree_use(pid: int) -> ProcessUse | None:
    """What the process `pid` and its descendants use; None if it is gone."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    return _sum(tree)


def _sum(tree: Iterable[psutil.Process]) -> ProcessUse:
    rss, cpu_s = 0, {}
    for process in tree:
        try:
            with process.oneshot():
                used, times = int(process.memory_info().rss), process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        rss += used
        cpu_s[process.pid] = times.user + times.system
    return ProcessUse(rss_bytes=rss, cpu_s=cpu_s)


def command_of(pid: int) -> str:
    """The beginning of a process' command line; "" where it is gone, or in another container."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:80]
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The host at one moment."""

    cores: int
    capacity_bytes: int
    used_bytes: int  # by all processes; without what can be given back at once
    busy_s: float  # seconds of all cores, since it was started
    at_s: float  # of the monotonic clock

    def utilisation_since(self, earlier: "HostUse | None") -> float | None:
        """The share of all cores that was busy since `earlier`; None without it."""
        if earlier is None or self.at_s <= earlier.at_s:
            return None
        return min(1.0, max(0.0, (self.busy_s - earlier.busy_s) / ((self.at_s - earlier.at_s) * self.cores)))


def host_use() -> HostUse:
    """Memory and processor time of this machine."""
    memory, times = psutil.virtual_memory(), psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return HostUse(
        cores=os.cpu_count() or 1, capacity_bytes=int(memory.total), used_bytes=int(memory.total - memory.available),
        busy_s=float(busy), at_s=time.monotonic(),
    )  # fmt: skip
