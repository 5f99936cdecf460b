"""The cards that this process sees, their use, and their faults. Free of torch.

NVML does not tell past Xid errors; the counters and states that they leave behind are read instead. Imports no torch.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from autofit.hardware.nvml import (
    Gpu,
    described,
    driver_cards,
    handle_of,
    of_each_card,
    started,
    used_bytes,
    visible_gpus,
)
from autofit.units import format_bytes

_ANSWER_S = 60.0  # NVML alone takes some seconds a card where no persistence daemon runs
_FREED_WITHIN_S = 3.0  # the driver takes back the memory of a process that was killed
_IDLE_BYTES = 1 << 30  # without processes: an old driver counts its own reserve, which is 0.6 GiB on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The visible cards in CUDA's order, and the driver's version; a line for each card that is broken, or held."""

    cards: tuple[Gpu, ...] = ()
    driver: str = ""
    refused: tuple[str, ...] = ()  # cards that the driver does not give: they are in no other list
    faults: tuple[str, ...] = ()  # what is broken, or cannot be asked
    held: tuple[str, ...] = ()  # by programs that are not of this job

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Look":
        cards = tuple(Gpu.from_json(card) for card in cast(list[dict[str, object]], content["cards"]))
        lines = {name: tuple(cast(list[str], content.get(name, []))) for name in ("refused", "faults", "held")}
        return cls(cards=cards, driver=str(content["driver"]), **lines)


def look_at_cards(*, visible: str | None = None, answer_s: float = _ANSWER_S) -> Look:
    """The visible cards and their faults; a driver that exceeds `answer_s` seconds is a fault.

    `visible` is the CUDA_VISIBLE_DEVICES to look by; None: this process' own.
    """
    command = [sys.executable, "-P", "-m", "autofit.hardware.health"]
    env = os.environ if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, env=env)  # fmt: skip
    try:
        said, problem = child.communicate(timeout=answer_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(1)
        child.returncode = child.returncode or -9  # one that hangs inside the driver cannot be killed: not waited for
        return Look(faults=(f"the driver does not answer within {answer_s:.0f} s",))
    if child.returncode:
        return Look(faults=(f"the driver cannot be asked: {(problem.strip().splitlines() or ['no reason'])[-1]}",))
    return Look.from_json(json.loads(said.splitlines()[-1]))


def _look() -> Look:
    """As `look_at_cards`, in this process: it may hang."""
    with started() as nvml:
        if nvml is None:
            problem = driver_cards().problem
            return Look(faults=(f"the driver does not start: {problem}",) if problem else ())
        try:
            driver = nvml.nvmlSystemGetDriverVersion()
            cards, refused = visible_gpus(), driver_cards().refused
            faults = [f"{_named(gpu)} {what}" for gpu in cards for what in _broken(nvml, handle_of(nvml, gpu.uuid))]
            held = {gpu: _held(nvml, handle_of(nvml, gpu.uuid)) for gpu in cards}
        except nvml.NVMLError as error:
            return Look(faults=(f"the driver refuses: {error}",))
    return Look(
        cards=cards, driver=driver if isinstance(driver, str) else driver.decode(), refused=refused,
        faults=tuple(faults), held=tuple(f"{_named(gpu)} {words}" for gpu, words in held.items() if words),
    )  # fmt: skip


def _named(gpu: Gpu) -> str:
    return f"{gpu.name} ({gpu.uuid})"


def _broken(nvml: Any, handle: Any) -> Iterator[str]:
    """Faults shown by NVML's counters. Empty for a card that lacks such a counter, and for a MIG slice."""
    with suppress(nvml.NVMLError):
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if errors := nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter):
            yield f"has {errors} uncorrectable ECC errors since its driver was loaded"
    with suppress(nvml.NVMLError):  # up to Volta; later cards remap rows instead
        if nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle):
            yield "has pages to retire and must be reset"
    with suppress(nvml.NVMLError):
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if pending or failed:
            yield "has rows of memory that could not be remapped" if failed else "has rows to remap and must be reset"


def _held(nvml: Any, handle: Any) -> str:
    """Other holders of the card, in words; "" if it is free, or becomes so within some seconds."""
    deadline = time.monotonic() + _FREED_WITHIN_S
    while words := _holders(nvml, handle):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return words


def _holders(nvml: Any, handle: Any) -> str:
    processes = card_processes(nvml, handle) or ()
    others = [(pid, held) for pid, held in processes if not _is_of_this_job(pid) and not _is_mps(pid)]
    if others:
        names = [f"process {pid}{_owner(pid)}{_holding(held)}" for pid, held in others]
        return f"is held by {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    used = used_bytes(nvml, handle)
    if not processes and used > _IDLE_BYTES and not _has_desktop(nvml, handle):  # of another container: not listed
        return f"is held: {format_bytes(used)} are in use by processes that its driver does not name"
    return ""


def _holding(held: int | None) -> str:
    return "" if held is None else f" with {format_bytes(held)}"


def _has_desktop(nvml: Any, handle: Any) -> bool:
    """True if programs draw on the card: their bytes count as used, and stay."""
    if os.path.exists("/dev/dxg"):  # Windows' own, below WSL
        return True
    with suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle))
    return False


def _is_mps(pid: int) -> bool:
    """True if the process is the server of CUDA's MPS, which is there for everyone."""
    with suppress(psutil.Error):
        return psutil.Process(pid).name().startswith("nvidia-cuda-mps")
    return False


def _is_of_this_job(pid: int) -> bool:
    job = os.environ.get("SLURM_JOB_ID")
    try:
        return job is not None and psutil.Process(pid).environ().get("SLURM_JOB_ID") == job
    except psutil.Error:
        return False


def _owner(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f" of {process.username()} ({process.name()})"
    except psutil.Error:  # gone, or in another container
        return ""


def compiling_faults() -> str:
    """Faults of compilation on this machine, in words; "" if it has a C and a C++ compiler and all builds are whole.

    Triton builds its driver with CC, gcc or clang at the first of its kernels (triton/runtime/build.py), and DeepSpeed
    its optimizer of the host with CXX or c++ (torch.utils.cpp_extension).
    """
    faults = []
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        faults.append(
            "no C compiler (gcc, clang) is on the PATH, so kernels of Triton (liger, torch.compile, vLLM) fail"
        )
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        faults.append("no C++ compiler (c++) is on the PATH, so DeepSpeed's offload of the optimizer fails")
    faults += [
        f"torch waits without end for the build that holds {lock}; where none is running, it was killed: delete it"
        for lock in _locks_of_builds()
    ]
    return "; ".join(faults)


def _locks_of_builds() -> list[Path]:
    """Locks of builds of torch's C++ extensions: a build that was killed leaves its own (torch.utils.file_baton)."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return sorted(Path(named).glob("*/lock"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return sorted((cache / "torch_extensions").glob("*/*/lock"))


# -- the use of cards and host at one moment --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """A card, or a slice of one, at one moment. None if its driver hides the figure."""

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
        """The sum of both, which must be disjoint."""
        return ProcessUse(rss_bytes=self.rss_bytes + other.rss_bytes, cpu_s={**self.cpu_s, **other.cpu_s})

    def cpu_s_since(self, before: "ProcessUse") -> float:
        """Seconds of processor time that its living processes took since then."""
        return sum(max(0.0, now - before.cpu_s.get(pid, 0.0)) for pid, now in self.cpu_s.items())


def card_uses() -> tuple[CardUse, ...]:
    """Every card of this machine that works, in the order of the PCI bus; empty if there is no driver."""
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
    """(pid, bytes) of each process that computes on the card; None if the driver hides them."""
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    return tuple((int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in found)


def tree_use(pid: int) -> ProcessUse | None:
    """Use of the process `pid` and its descendants, if it is alive."""
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
        """The share of all cores that was busy since `earlier`, if it is given."""
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


if __name__ == "__main__":
    print(json.dumps(_look().to_json()))
