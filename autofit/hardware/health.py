"""The cards that this process sees, and what is wrong with them, told by a child: a broken card can hang its driver.

NVML does not tell past Xid errors; the counters and states that they leave behind are read instead. Imports no torch.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import psutil

from autofit.hardware.nvml import Gpu, handle_of, started, used_bytes
from autofit.hardware.usage import card_processes
from autofit.hardware.visible import visible_gpus
from autofit.units import format_bytes

_ANSWER_S = 60.0  # NVML alone takes some seconds a card where no persistence daemon runs
_FREED_WITHIN_S = 3.0  # the driver takes back the memory of a process that was killed
_IDLE_BYTES = 1 << 30  # without processes: an old driver counts its own reserve, which is 0.6 GiB on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The visible cards in CUDA's order, the driver's version, and a line for each thing that is wrong."""

    cards: tuple[Gpu, ...] = ()
    driver: str = ""
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Look":
        cards = tuple(Gpu.from_json(card) for card in cast(list[dict[str, object]], content["cards"]))
        return cls(cards=cards, driver=str(content["driver"]), faults=tuple(cast(list[str], content["faults"])))


def look_at_cards(*, answer_s: float = _ANSWER_S) -> Look:
    """The visible cards and their faults; a driver that does not answer within `answer_s` seconds is a fault."""
    command = [sys.executable, "-P", "-m", "autofit.hardware.health"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)  # fmt: skip
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
            return Look()
        try:
            driver = nvml.nvmlSystemGetDriverVersion()
            cards = visible_gpus()
            faults = [fault for gpu in cards for fault in _faults(nvml, gpu)]
        except nvml.NVMLError as error:
            return Look(faults=(f"the driver refuses: {error}",))
    return Look(cards=cards, driver=driver if isinstance(driver, str) else driver.decode(), faults=tuple(faults))


def _faults(nvml: Any, gpu: Gpu) -> Iterator[str]:
    handle = handle_of(nvml, gpu.uuid)
    for what in (*_broken(nvml, handle), _held(nvml, handle)):
        if what:
            yield f"{gpu.name} ({gpu.uuid}) {what}"


def _broken(nvml: Any, handle: Any) -> Iterator[str]:
    """What NVML's counters say is broken. A card that has no such counter, or a MIG slice, says nothing."""
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
    """Who else holds the card; "" where nobody does, or nobody any more after some seconds."""
    deadline = time.monotonic() + _FREED_WITHIN_S
    while words := _holders(nvml, handle):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return words


def _holders(nvml: Any, handle: Any) -> str:
    processes = card_processes(nvml, handle) or ()
    others = [(pid, held) for pid, held in processes if not _is_of_this_job(pid)]
    if others:
        names = [f"process {pid}{_owner(pid)}" for pid, _ in others]
        return f"is held by {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
    used = used_bytes(nvml, handle)
    if not processes and used > _IDLE_BYTES:  # a process of another container is not listed
        return f"is held: {format_bytes(used)} are in use by processes that its driver does not name"
    return ""


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


if __name__ == "__main__":
    print(json.dumps(_look().to_json()))
