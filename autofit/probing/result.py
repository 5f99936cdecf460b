"""Request and result of a probe, plain values that travel as JSON; and which errors are a failed allocation."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from math import exp
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from autofit.files import end_bytes, read_json, written_json
from autofit.hardware.hardware import Device, slot_names
from autofit.hardware.nvml import CardState
from autofit.probing.host_memory import HostMemory

_NO_ROLLOUT = 0.1  # share of the longest rollout below which a step did not generate


class ProbeStatus(StrEnum):
    FIT = "fit"  # ran to the end under the target
    OOM = "oom"  # needed more than the target: a measurement, not an error
    FAILED = "failed"  # raised, crashed or exited
    LOST = "lost"  # killed before it could answer


class Cause(StrEnum):
    """The reason why a probe lacks a measurement, for decisions and filters; `ProbeResult.reason` is the text."""

    DEADLINE = "deadline"  # it exceeded its deadline
    KILLED = "killed"  # by another process, or with its job
    JOB = "job"  # the cluster ended its job: preempted, cancelled, timed out, or the node went away
    JOB_FAILED = "job failed"  # its job ended, and the cluster tells no reason of its own
    HOST_OOM = "host oom"  # the kernel's out-of-memory killer ended it: the host's memory, not the card's
    NO_SPACE = "no space"  # the disk is full
    HANGS = "hangs"  # SIGKILL did not end it: it hangs in the card's driver
    NO_CARD = "no card"  # processes that hang hold every card, so it was not started
    SHARED = "shared"  # other programs computed on its card
    CRASHED = "crashed"  # a signal that it raised itself, such as SIGSEGV
    EXITED = "exited"  # sys.exit, or an exit code before the answer
    RAISED = "raised"  # an exception


class Fidelity(StrEnum):
    MEASURED = "measured"  # on the device itself
    PREDICTED = "predicted"  # on a simulated one


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One probe: `values` is the complete recipe YAML of the candidate."""

    folder: Path
    trainer: str
    values: Mapping[str, object]
    device: str
    limit_bytes: int | None
    worst_case: Path
    measured_steps: int = 2
    deadline_s: float = 900.0
    cwd: Path = field(default_factory=Path.cwd)
    server_socket: str | None = None
    slots: tuple[str, ...] = ("cpu-0",)
    least_of_fits: bool = True  # simulated: find the least capacity of a fit too (takes a second or more)
    recipe_hash: str | None = None  # of what the values only name (data, code, architecture); None: not known
    capped: bool = True  # False: no cap during the run; the bytes are compared with the limit afterwards
    rank: int | None = None  # of several: this request is one rank's, with files of its own
    port: int | None = None  # of 127.0.0.1, where the ranks meet
    resume_port: int | None = None  # where they meet again, if they resume in processes of their own
    terminal: bool = False  # stdin, stdout and stderr are the user's, for a debugger

    @property
    def request_path(self) -> Path:
        return self.folder / ("request.json" if self.rank is None else f"rank-{self.rank}.request.json")

    @property
    def answer_path(self) -> Path:
        return self.folder / ("answer.json" if self.rank is None else f"rank-{self.rank}.json")

    @property
    def log_path(self) -> Path:
        return self.folder / ("probe.log" if self.rank is None else f"rank-{self.rank}.log")

    @property
    def phase_path(self) -> Path:
        """The file with the name of the current phase, read if the probe dies before it answers."""
        return self.folder / ("phase" if self.rank is None else f"rank-{self.rank}.phase")

    @property
    def saved_path(self) -> Path:
        """The file with the peaks of a first process, which trained until the save; missing if there was none."""
        return self.folder / ("saved.json" if self.rank is None else f"rank-{self.rank}.saved.json")

    @property
    def pid_path(self) -> Path:
        """The file with the process id of the probe itself: `autofit monitor` reads it."""
        return self.folder / ("pid" if self.rank is None else f"rank-{self.rank}.pid")

    def to_json(self) -> dict[str, object]:
        paths = {"folder": str(self.folder), "worst_case": str(self.worst_case), "cwd": str(self.cwd)}
        return {**asdict(self), **paths}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "ProbeRequest":
        paths = {key: Path(str(content[key])) for key in ("folder", "worst_case", "cwd")}
        slots = tuple(cast(list[str], content["slots"]))
        known = {key: value for key, value in content.items() if key in cls.__slots__}
        return cls(**{**known, **paths, "slots": slots})  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> "ProbeRequest":
        content = written_json(path)
        return cls.from_json(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSetup:
    """The common settings of all probes of one command; `request` completes them for one probe."""

    trainer: str
    device: Device
    limit_bytes: int | None
    worst_case: Path
    deadline_s: float  # for a probe of `measured_steps` steps
    measured_steps: int = 2
    parallel: int = 1
    server_socket: str | None
    least_of_fits: bool = True
    recipe_hash: str | None = None
    cwd: Path = field(default_factory=Path.cwd)

    @classmethod
    def of(cls, earlier: ProbeRequest, *, server_socket: str | None) -> "ProbeSetup":
        """The settings of an earlier probe."""
        return cls(
            trainer=earlier.trainer, device=earlier.device, limit_bytes=earlier.limit_bytes,
            worst_case=earlier.worst_case, deadline_s=earlier.deadline_s, measured_steps=earlier.measured_steps,
            parallel=len(earlier.slots), server_socket=server_socket, least_of_fits=earlier.least_of_fits,
            recipe_hash=earlier.recipe_hash, cwd=earlier.cwd,
        )  # fmt: skip

    def request(self, folder: Path, values: Mapping[str, object], *, measured_steps: int | None = None) -> ProbeRequest:
        """The request to probe the recipe `values` in `folder`; the deadline grows with the measured steps."""
        steps = measured_steps or self.measured_steps
        return ProbeRequest(
            folder=folder, trainer=self.trainer, values=values, device=self.device, limit_bytes=self.limit_bytes,
            worst_case=self.worst_case, measured_steps=steps, deadline_s=self.deadline_s * steps / self.measured_steps,
            server_socket=self.server_socket, slots=slot_names(self.device, self.parallel),
            least_of_fits=self.least_of_fits, recipe_hash=self.recipe_hash, cwd=self.cwd,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """Peak bytes during one phase (load, rollout, scoring, update, optimizer, save, resume)."""

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak:
    """One rank of a probe of several: its own peaks in bytes, and its seconds per measured optimizer step."""

    rank: int
    device_used_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    step_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, rank: int, result: "ProbeResult") -> "RankPeak":
        """The peaks of a rank whose own probe ended with `result`, which has device-used bytes at least."""
        used = result.device_used_bytes
        assert used is not None
        return cls(
            rank=rank, device_used_bytes=used, peak_reserved_bytes=result.peak_reserved_bytes or used,
            peak_allocated_bytes=result.peak_allocated_bytes or used, step_s=result.step_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of a probe. None is "not measured"; times have one entry per measured optimizer step."""

    status: ProbeStatus
    device: str
    reason: str = ""  # for people: no code decides by its words
    cause: Cause | None = None  # None for a fit and for an OOM of the device
    oom_phase: str | None = None
    device_used_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    limit_bytes: int | None = None
    phases: tuple[PhasePeak, ...] = ()
    step_s: tuple[float, ...] = ()
    rollout_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()
    sync_s: tuple[float, ...] = ()  # simulated, several ranks: of rollout_s, giving vLLM the gathered weights
    phase_s: Mapping[str, float] = field(default_factory=dict)  # simulated: of each phase in the last measured step
    completions_per_step: int | None = None
    tokens_per_step: int | None = None
    least_capacity_bytes: int | None = None  # simulated: capacity of the smallest card on which the probe completes
    growing_capacity_bytes: int | None = None  # the same with expandable segments, where gaps between blocks decide
    uncapped_bytes: int | None = None  # cuda: device-used of the same probe without the cap, after an OOM under it
    categories: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # simulated: at each phase's peak
    # Simulated: the last step for its picture, {"live": {category: [MiB]}, "phases": [[name, first part, seconds]]}.
    course: Mapping[str, Any] = field(default_factory=dict)
    fidelity: Fidelity = Fidelity.MEASURED
    host_costs: str = ""  # simulated: source of the clock's host costs
    log_error: float | None = None  # simulated: half the width of the 90 % interval of the seconds, in logarithms
    # Simulated: shares of the seconds of "rollout" and "update" in which the "card" computes, or waits for the "host".
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # simulated: where the run differs from one on a card, a sentence each
    device_name: str = ""
    card_states: tuple[CardState, ...] = ()  # cuda: at the end of each measured step
    versions: Mapping[str, str] = field(default_factory=dict)
    process_s: float | None = None  # from the start of the probe's process to its answer
    wall_s: float | None = None  # from the start of the job to its end, measured by the job
    rank: int | None = None  # of several: the rank that decided, the largest one or the one that failed
    host: HostMemory | None = None  # simulated, several ranks
    ranks: tuple[RankPeak, ...] = ()  # of several: all that told their peaks, in order

    @property
    def median_step_s(self) -> float | None:
        """Seconds per optimizer step: the median over the measured steps."""
        return median(self.step_s) if self.step_s else None

    @property
    def step_s_interval(self) -> tuple[float, float] | None:
        """Interval of the seconds per optimizer step expected in 9 of 10 cases; None if they were measured."""
        step_s = self.median_step_s
        if step_s is None or self.log_error is None:
            return None
        return step_s * exp(-self.log_error), step_s * exp(self.log_error)

    @property
    def fastest_step_s(self) -> float | None:
        """Seconds of the fastest measured step: of all, the one that other work disturbed least.

        The mean over all steps where only some of them generate, because a rollout serves several.
        """
        if not self.step_s:
            return None
        return min(self.step_s) if self.steps_are_alike else mean(self.step_s)

    @property
    def steps_are_alike(self) -> bool:
        """True if every measured step does the same work; False if only some of them generate."""
        return not self.rollout_s or min(self.rollout_s) >= _NO_ROLLOUT * max(self.rollout_s)

    def with_growing_segments(self, capacity_bytes: int) -> "ProbeResult | None":
        """The result with expandable segments, which leave all events of the run as they are, if it is known."""
        least = self.growing_capacity_bytes
        if least is None:
            return None
        fits = least <= capacity_bytes
        return replace(
            self, status=ProbeStatus.FIT if fits else ProbeStatus.OOM, device_used_bytes=least,
            least_capacity_bytes=least, growing_capacity_bytes=None, reason="" if fits else self.reason,
            oom_phase=None if fits else self.oom_phase,
        )  # fmt: skip

    @property
    def was_killed(self) -> bool:
        """True if the probe was killed from outside, so that it is no evidence about its candidate."""
        return self.status is ProbeStatus.LOST and self.cause is not Cause.DEADLINE

    @property
    def ended_with_job(self) -> bool:
        """True if its job ended while it ran: the attempt does not count as its own."""
        return self.cause in (Cause.JOB, Cause.JOB_FAILED)

    @property
    def is_graded(self) -> bool:
        """True if an OOM reports the exact bytes needed, because the probe completed without the limit."""
        return (self.least_capacity_bytes or self.uncapped_bytes) is not None

    @property
    def completions_per_s(self) -> float | None:
        step_s = self.median_step_s
        return None if step_s is None or self.completions_per_step is None else self.completions_per_step / step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt and completion tokens trained on, per second."""
        step_s = self.median_step_s
        return None if step_s is None or self.tokens_per_step is None else self.tokens_per_step / step_s

    def to_json(self) -> dict[str, object]:
        derived = {"completions_per_s": self.completions_per_s, "tokens_per_s": self.tokens_per_s}
        return {**asdict(self), **derived}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "ProbeResult":
        fields = {k: v for k, v in content.items() if k in cls.__slots__}
        fields["status"] = ProbeStatus(str(fields["status"]))
        fields["cause"] = None if fields.get("cause") is None else Cause(str(fields["cause"]))
        fields["fidelity"] = Fidelity(str(fields.get("fidelity", Fidelity.MEASURED)))
        fields["phases"] = tuple(PhasePeak(**p) for p in cast(list[dict[str, int]], fields.get("phases", [])))  # type: ignore[arg-type]
        states = cast(list[dict[str, int]], fields.get("card_states", []))
        fields["card_states"] = tuple(CardState(**state) for state in states)
        host = cast("dict[str, Any] | None", fields.get("host"))
        fields["host"] = None if host is None else HostMemory(**host)
        ranks = cast(list[dict[str, Any]], fields.get("ranks", []))
        fields["ranks"] = tuple(RankPeak(**{**one, "step_s": tuple(one["step_s"])}) for one in ranks)
        for name in ("step_s", "rollout_s", "update_s", "sync_s", "notes"):
            fields[name] = tuple(cast(list[object], fields.get(name, [])))
        return cls(**fields)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> "ProbeResult | None":
        """The answer in `path`, once there is one."""
        content = read_json(path)
        return None if content is None else cls.from_json(content)


# -- errors that are a failed allocation ------------------------------------------------------------------------------
# The words are all here, each with its source. They name memory of the card, or an allocation by cuBLAS or cuDNN,
# which keep theirs on the card. Words that may mean something else (CUBLAS_STATUS_NOT_INITIALIZED) are not among
# them. Importing it loads no torch.

_LEAST_SHARE = re.compile(r"raise the share to (\d\.\d\d)")  # autofit/fakegpu/engines/vllm.py


def least_share(reason: str) -> float | None:
    """The least share of the card with which a simulated rollout engine starts, if its refusal has one."""
    found = _LEAST_SHARE.search(reason)
    return None if found is None else float(found[1])


_CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation in CUDA's driver_types.h
_WORDS = (
    "DefaultCPUAllocator",  # torch, c10/core/impl/alloc_cpu.cpp: a RuntimeError
    "CUDA error: out of memory",  # torch, outside of its allocator: a context, a module's code, an event
    "CUDA driver error: out of memory",  # torch, C10_CUDA_DRIVER_CHECK: expandable segments
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch, aten/src/ATen/cuda/CublasHandlePool.cpp: cublasCreate
    "CUDNN_STATUS_ALLOC_FAILED",  # cuDNN up to 8
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # cuDNN 9, cudnn_graph.h
    "Triton Error [CUDA]: out of memory",  # Triton, third_party/nvidia/backend/driver.c: a RuntimeError
    "No available memory for the cache blocks",  # vLLM, a ValueError (vllm-project/vllm#2248)
    "less than desired GPU memory utilization",  # vLLM, a ValueError: its share is not free when it starts
    "larger than the available KV cache memory",  # vLLM, the same for one sequence of the longest length
    "Cuda failure 2 'out of memory'",  # NCCL's last error, in torch's DistBackendError
)
# torch, c10/cuda/CUDACachingAllocator.cpp, reportProcessMemoryInfo: an allocation has failed, and for its message torch
# asserts that NVML lists the card's processes. A MIG slice and a container without rights refuse that, so a
# RuntimeError comes instead of the OutOfMemoryError. PeerToPeerAccess.cpp has the same assertion about something else.
_UNREPORTED = ("NVML_SUCCESS == ", "INTERNAL ASSERT FAILED", "CUDACachingAllocator.cpp")
# bitsandbytes, csrc: CUDA_CHECK_RETURN prints this and calls exit(1) (bitsandbytes-foundation/bitsandbytes#464).
_LAST_WORDS = b"Error out of memory at line"
_END_BYTES = 4000


def is_oom(error: BaseException) -> bool:
    """True if `error`, or the error that led to it, is a failed allocation on the CPU or a CUDA card."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if _is_oom(at):
            return True
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False


def exited_for_oom(log_path: Path) -> bool:
    """True if the log's end has a failed allocation as the reason of a process that exited without an exception."""
    try:
        return _LAST_WORDS in end_bytes(log_path, _END_BYTES)
    except OSError:
        return False


def _is_oom(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) is not None:
        return bool(error.error_code == _CUDA_ERROR_MEMORY_ALLOCATION)  # type: ignore[attr-defined]
    if not isinstance(error, RuntimeError | ValueError):
        return False
    text = str(error)
    return any(words in text for words in _WORDS) or all(words in text for words in _UNREPORTED)
