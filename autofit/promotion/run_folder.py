"""The files of a full run beside its steps and events: its end, also when asked, an OOM, its ranks. Free of torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from autofit.cluster.scheduler import own_job
from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.protocol import LOAD, SampleFacts
from autofit.probing.supervise import ProcessEnding, note_of, start_child

State = Literal["running", "done", "failed", "interrupted"]
REQUEUES = "requeues.json"
ADDRESS = "MASTER_ADDR"  # environment variable: where the ranks meet
LOOPBACK = "127.0.0.1"
_PLACE_BYTES = 64
_UNLOADABLE, _ENDED, _OOM = "unloadable.json", "ended.json", "oom.json"
_FINAL, _FAILED, _REQUEST, _STARTED = "final.json", "failed.json", "request.json", "started.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a full run: its request, and its end."""

    path: Path

    @property
    def request_path(self) -> Path:
        return self.path / _REQUEST

    def request(self) -> dict[str, object] | None:
        """The request that the run was launched with; None before its first launch."""
        return read_json(self.request_path)

    def start(self, **more: str) -> None:
        """Note this process as the run's job."""
        write_json(self.path / _STARTED, note_of(os.getpid()) | more)

    def final(self) -> dict[str, object] | None:
        """The summary of a run that is done; its model's path is corrected if this folder was moved or copied."""
        found, request = read_json(self.path / _FINAL), self.request()
        if found is not None and request is not None:
            trained, was = Path(str(found.get("output_dir", ""))), Path(str(request.get("folder")))
            if trained.is_relative_to(was) and (now := self.path.resolve() / trained.relative_to(was)).is_dir():
                found["output_dir"] = str(now)
        return found

    def finish(self, final: Mapping[str, object]) -> None:
        """Keep the summary: the run is done."""
        write_json(self.path / _FINAL, final)

    def failure(self) -> str | None:
        """Reason why the run failed, if it did."""
        found = read_json(self.path / _FAILED)
        return None if found is None else str(found["reason"])

    def fail(self, reason: str) -> None:
        """Keep why the run failed."""
        write_json(self.path / _FAILED, {"reason": reason})

    @property
    def is_done(self) -> bool:
        return (self.path / _FINAL).exists()

    @property
    def has_failed(self) -> bool:
        return (self.path / _FAILED).exists()

    @property
    def is_over(self) -> bool:
        """True if the run is done or has failed, so that only a user may start it again."""
        return self.is_done or self.has_failed

    def state(self, alive: Callable[[], bool]) -> State:
        """The state of the run; `alive` says whether it has a process, and is asked only where that matters."""
        return "done" if self.is_done else "running" if alive() else "failed" if self.has_failed else "interrupted"

    def forget_end(self, *, restart: bool = False) -> None:
        """Prepare a new start of the run; with `restart` from step 0, so its results are deleted too."""
        for name in (STOP, _STARTED, "job.json", _FAILED, _OOM, _ENDED, REQUEUES, *((_FINAL,) if restart else ())):
            (self.path / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank failed, as it said itself, and when: what another rank's end leads to comes later."""

    rank: int
    reason: str
    time: float


class Place:
    """The step and the phase of a rank, kept in a file for the case that it is killed; some microseconds a change."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _place_path(folder, rank).open("wb", buffering=0)

    def keep(self, step: int, phase: str) -> None:
        """`step` optimizer steps are finished, and the rank is in `phase`."""
        self._file.seek(0)
        self._file.write(f"{step} {phase}".ljust(_PLACE_BYTES - 1).encode()[: _PLACE_BYTES - 1] + b"\n")


def place_of(folder: Path, rank: int) -> tuple[int, str]:
    """(finished optimizer steps, phase) in which `rank` was last seen."""
    try:
        step, _, phase = _place_path(folder, rank).read_text(encoding="utf-8").strip().partition(" ")
        return int(step), phase
    except (OSError, ValueError):
        return 0, LOAD


def log_of(folder: Path, rank: int = 0) -> Path:
    """The log of a rank: rank 0 writes into that of the run."""
    return folder / (f"rank-{rank}.log" if rank else "run.log")


def tell_failure(folder: Path, rank: int, reason: str) -> None:
    """Keep why `rank` failed."""
    write_json(_failure_path(folder, rank), asdict(Failure(rank=rank, reason=reason, time=time.time())))


def first_failure(folder: Path, ranks: int) -> Failure | None:
    """The error of the rank that failed first, if any left one."""
    found = (read_json(_failure_path(folder, rank)) for rank in range(ranks))
    failures = [Failure(**content) for content in found if content is not None]  # type: ignore[arg-type]
    return min(failures, key=lambda failure: failure.time, default=None)


def forget_ranks(folder: Path, ranks: int) -> None:
    """Called before the ranks start."""
    for rank in range(ranks):
        _failure_path(folder, rank).unlink(missing_ok=True)
        _place_path(folder, rank).unlink(missing_ok=True)


def tell_unloadable(folder: Path, checkpoint: Path, reason: str) -> None:
    """Note that ranks must start without `checkpoint`; they are unable to try another one in this process."""
    write_json(folder / _UNLOADABLE, {"checkpoints": {**unloadable(folder), str(checkpoint): reason}})


def unloadable(folder: Path) -> dict[str, str]:
    """{checkpoint that failed to load: why, as a predicate}."""
    content = read_json(folder / _UNLOADABLE) or {}
    found = content.get("checkpoints")
    return {str(name): str(reason) for name, reason in found.items()} if isinstance(found, dict) else {}


def forget_unloadable(folder: Path) -> None:
    """A checkpoint was loaded, or all is to begin anew."""
    (folder / _UNLOADABLE).unlink(missing_ok=True)


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"failed-{rank}.json"


def _place_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.at"


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """Place where a run was out of memory, and the step from which it goes on."""

    message: str
    phase: str = LOAD
    finished: int = 0  # optimizer steps that were finished
    resumes_from: int = 0  # the step of the newest whole checkpoint; 0: there is none
    evaluating: bool = False  # it was between two steps, in the evaluation
    samples: SampleFacts | None = None
    unused_frac: float = 0.0  # of what torch's allocator held, the share that no tensor used: fragments
    rank: int | None = None  # of several ranks, the one whose memory ran out

    @property
    def repeated(self) -> int:
        """Finished optimizer steps that are trained again, with the same result."""
        return self.finished - self.resumes_from

    @property
    def where(self) -> str:
        """`step 37: out of memory in the rollout (CUDA out of memory ...)`."""
        out = "out of memory" if self.rank is None else f"rank {self.rank} out of memory"
        if self.phase == LOAD:
            place = f"{out} before the first step"
        elif self.evaluating:
            place = f"step {self.finished}: {out} in the evaluation"
        else:
            place = f"step {self.finished + 1}: {out} in the {self.phase}"
        return f"{place} ({self.message})"


def keep_oom(folder: Path, oom: Oom) -> None:
    """Write what the run in `folder` was doing when memory ran out."""
    write_json(folder / _OOM, asdict(oom))


def read_oom(folder: Path) -> Oom | None:
    """The OOM with which the last start of the run ended, if it did."""
    content = read_json(folder / _OOM)
    if content is None:
        return None
    facts = cast("Mapping[str, object] | None", content.pop("samples", None))
    return Oom(**content, samples=None if facts is None else SampleFacts(**facts))  # type: ignore[arg-type]


def forget_oom(folder: Path) -> None:
    """Called when the training starts again."""
    (folder / _OOM).unlink(missing_ok=True)


def in_words(error: BaseException) -> str:
    """The first sentences of an error about memory, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


_LONGEST = 160


def write_ending(folder: Path, ending: ProcessEnding) -> None:
    """Keep the reason why the run in `folder` ended, unless it is done or has failed with a reason."""
    if not RunFolder(folder).is_over:
        who = "" if ending.rank is None or not ending.exit_code else f"rank {ending.rank}{on_node(ending)}: "
        tell_ending(folder, f"{who}{_reason(folder, ending)}")


def tell_ending(folder: Path, reason: str) -> None:
    """Keep `reason` as that why the run in `folder` ended early."""
    with contextlib.suppress(EnvironmentFault):  # a full disk
        write_json(folder / _ENDED, {"reason": reason})


def on_node(ending: ProcessEnding) -> str:
    """ " on n2" for a rank of a run on several machines."""
    return f" on {ending.node}" if ending.node else ""


def ending_of(folder: Path) -> str | None:
    """Reason why the run in `folder` ended early; None if its job was killed before it could write one."""
    found = read_json(folder / _ENDED)
    return None if found is None else str(found["reason"])


def _reason(folder: Path, ending: ProcessEnding) -> str:
    if ending.kernel_oom:
        return "killed by the kernel, as the machine had no memory left"
    if ending.exit_code == -signal.SIGKILL:
        return "killed by signal 9, perhaps by the host's out-of-memory killer"
    if ending.exit_code < 0:
        return f"killed by signal {-ending.exit_code} ({_name(-ending.exit_code)})"
    if ending.exit_code == 0 and asked_to_end(folder):
        sent = received()
        return f"asked to end{'' if sent is None else f' by {sent.name}'}"
    return f"its process ended with exit code {ending.exit_code}"


def _name(number: int) -> str:
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else "unknown"


# -- how a full run is asked to end -----------------------------------------------------------------------------------
# SIGTERM and SIGINT end programs; Slurm sends SIGUSR1 or SIGUSR2 before it takes a machine away (`--signal`). The
# training saves a checkpoint after the step at work, and ends. A job of Slurm then asks to be started again, unless
# it was the file.

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
STOP = "stop"  # file in the folder of a run
_LATER = "stop-for-now"  # file in the folder of a run on Slurm

_received: list[signal.Signals] = []  # by this process


def listen(act: Callable[[], None] = lambda: None) -> None:
    """Note SIGNALS from now on, and call `act` after each, where they would end this process."""

    def note(number: int, _: object) -> None:
        _received.append(signal.Signals(number))
        act()

    for number in SIGNALS:
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what came while this process could not note it, comes now


def received() -> signal.Signals | None:
    """The first of SIGNALS that this process got since it listens."""
    return _received[0] if _received else None


def ask_to_end(folder: Path) -> None:
    """Ask the run in `folder` to save a checkpoint and to end. A full disk is ignored here."""
    with contextlib.suppress(OSError):
        (folder / STOP).touch()


def ask_after_signal(folder: Path) -> None:
    """As `ask_to_end`, after one of SIGNALS: a job of Slurm is to go on later."""
    if own_job() is None:
        ask_to_end(folder)
        return
    with contextlib.suppress(OSError):
        (folder / _LATER).touch()


def asked_to_end(folder: Path) -> bool:
    """True if the run in `folder` is to save a checkpoint and to end."""
    return bool(_received) or (folder / STOP).exists() or (folder / _LATER).exists()


def goes_on_later(folder: Path) -> bool:
    """True if only a signal asked the run in `folder` to end, and the user's `stop` file is absent."""
    return (bool(_received) or (folder / _LATER).exists()) and not (folder / STOP).exists()


def forget_signals(folder: Path) -> None:
    """Forget the way in which a job of Slurm was asked to end, and the reason, as it starts again."""
    for name in (_LATER, _ENDED):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Context whose started processes block SIGNALS: they end with their work. This process gets them afterwards."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def start_deaf(module: str, request_path: Path, *more: str, log: Path, cwd: str, env: Mapping[str, str]) -> int:
    """Start `python -m module request_path more` as a child that hears signals once it listens for them; its pid."""
    with log.open("ab") as file, deaf_children():
        return start_child(
            [sys.executable, "-P", "-m", module, str(request_path), *more], cwd=cwd, env=env,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
