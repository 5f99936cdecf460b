"""The job that submitit runs: one probe in a child process. Writes an answer in every case, also after errors."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import cache_folder, keep_small, read_json, write_atomically, write_json
from autofit.hardware import calibration
from autofit.hardware.hardware import gpu_of_slot
from autofit.hardware.health import look_at_cards
from autofit.probing.fork_server import ServerGone, call_ranks
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus, exited_for_oom
from autofit.probing.slots import NoSlot, set_aside, slots
from autofit.probing.supervise import (
    ProcessEnding,
    RanksEnded,
    has_ranks,
    keep_rank_probes,
    keep_ranks,
    note_of,
    start_child,
    trial_env,
)
from autofit.recipe.launch import Launch
from autofit.units import format_bytes

_LARGER = 1.1  # least capacity / target for an uncapped probe: a smaller card has no room to measure the excess
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def run_probe(request_path: str) -> None:
    """Run the requested probe on a free slot; afterwards an answer file lies beside the request."""
    began = time.perf_counter()
    request = ProbeRequest.read(Path(request_path))
    if not request.terminal and answered(request):
        return
    write_json(request.folder / "started.json", note_of(os.getpid()))
    cards = Launch.of(request.values).ranks if request.device == "cuda" else 1
    if cards > len(request.slots):
        write_json(request.answer_path, _too_few(request, cards).to_json() | {"wall_s": 0.0})
        return
    try:
        _run_in_slots(request, cards)
    except NoSlot as error:
        none = ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=str(error), cause=Cause.NO_CARD)
        write_json(request.answer_path, none.to_json())
    content = read_json(request.answer_path)
    if content is not None:
        write_json(request.answer_path, content | {"wall_s": time.perf_counter() - began})
        keep_answer(request, content)


def _run_in_slots(request: ProbeRequest, cards: int) -> None:
    """Run the probe to its answer, or until it is cancelled."""
    with _slots(request, cards) as held:
        name = None if held is None else ",".join(held)
        ending = (
            ProcessEnding(exit_code=-signal.SIGKILL, abandoned=True) if name is None else _keep(request, name, request)
        )
        if read_json(request.answer_path) is None and not ending.abandoned:
            write_json(request.answer_path, classified(ending, request).to_json())
        if name is not None and ending.left_pid is None and _can_say_how_far_over(request, name):
            ending = _grade(request, name)
        if held is not None and ending.left_pid is not None:
            set_aside(held, ending.left_pid)
        elif name is not None and not cancelled(request):
            _refuse_shared(request, name)


def _refuse_shared(request: ProbeRequest, slot_name: str) -> None:
    """Put LOST in place of measurements on cards on which programs of others compute as well."""
    answer = ProbeResult.read(request.answer_path)
    measured = answer is not None and answer.status in (ProbeStatus.FIT, ProbeStatus.OOM)
    if request.device != "cuda" or not measured:
        return
    if held := look_at_cards(visible=slot_name.replace("cuda-", "")).held:
        reason = f"{'; '.join(held)}, and bytes and seconds beside others are not the recipe's"
        lost = ProbeResult(status=ProbeStatus.LOST, device=request.device, reason=reason, cause=Cause.SHARED)
        write_json(request.answer_path, lost.to_json())


@contextmanager
def _slots(request: ProbeRequest, cards: int) -> Iterator[tuple[str, ...] | None]:
    """The slots of the probe; while it waits for them, a file says for which, and who holds it."""
    waiting = waiting_path(request.folder)
    with slots(
        request.slots, cards, abandoned=lambda: cancelled(request), what=f"the probe in {request.folder}",
        waits=lambda text: write_atomically(waiting, text),
    ) as held:  # fmt: skip
        waiting.unlink(missing_ok=True)
        yield held


def waiting_path(folder: Path) -> Path:
    """The file that says, while the probe in `folder` waits, for which slot, and who holds it."""
    return folder / "waiting"


def answered(request: ProbeRequest) -> bool:
    """True if an earlier simulated probe answers `request`; its answer then lies beside the request."""
    answer = kept_answer(request)
    if answer is not None:
        write_json(request.answer_path, answer | {"wall_s": 0.0})
    return answer is not None


def cancel(folder: Path) -> None:
    """Ask the job of the probe in `folder` to kill it and end unanswered."""
    (folder / "cancel").touch()


def cancelled(request: ProbeRequest) -> bool:
    return (request.folder / "cancel").exists()


def _can_say_how_far_over(request: ProbeRequest, slot_name: str) -> bool:
    """True if the probe ran out of memory under an emulated target, on a card with room to measure the excess.

    The card is the slot's: submitit empties CUDA_VISIBLE_DEVICES in its jobs, so this process sees none.
    """
    answer = ProbeResult.read(request.answer_path)
    oom = answer is not None and answer.status is ProbeStatus.OOM
    if request.device != "cuda" or request.limit_bytes is None or not oom or cancelled(request):
        return False
    cards = [gpu_of_slot(name) for name in slot_name.split(",")]
    return all(gpu is not None and gpu.capacity_bytes > _LARGER * request.limit_bytes for gpu in cards)


def _grade(request: ProbeRequest, slot_name: str) -> ProcessEnding:
    """Probe again uncapped, and add its bytes and seconds to the answer. The verdict stays that of the cap."""
    free = replace(request, folder=request.folder / "uncapped", measured_steps=1, capped=False)
    free.folder.mkdir(exist_ok=True)
    write_json(free.request_path, free.to_json())
    ending = _keep(free, slot_name, request)
    found, answer = ProbeResult.read(free.answer_path), ProbeResult.read(request.answer_path)
    assert answer is not None
    assert request.limit_bytes is not None
    used = found.device_used_bytes if found is not None and found.step_s else None  # no steps: it did not complete
    if found is not None and used is not None and used > request.limit_bytes:
        over = (
            f"without the cap it held {format_bytes(used)}, {format_bytes(used - request.limit_bytes)} over the target"
        )
        graded = replace(
            answer, device_used_bytes=used, uncapped_bytes=used, phases=found.phases, reason=f"{over}; {answer.reason}",
            peak_reserved_bytes=found.peak_reserved_bytes, peak_allocated_bytes=found.peak_allocated_bytes,
            step_s=found.step_s, rollout_s=found.rollout_s, update_s=found.update_s,
            rank=found.rank, ranks=found.ranks,
        )  # fmt: skip
        write_json(request.answer_path, graded.to_json())
    return ending


def _keep(request: ProbeRequest, slot_name: str, asked: ProbeRequest) -> ProcessEnding:
    """Run the probe to its end; a cancellation of the request `asked` ends it too."""
    request.answer_path.unlink(missing_ok=True)  # of a job that was killed here before
    env: dict[str, str] = {}

    def left() -> bool:
        keep_small(request.folder.glob("*.log"))
        return cancelled(asked)

    if slot_name.startswith("cuda-"):  # the card of each rank, in their order
        env["CUDA_VISIBLE_DEVICES"] = ",".join(name.removeprefix("cuda-") for name in slot_name.split(","))

    def workers(requests: Sequence[ProbeRequest]) -> RanksEnded:
        return _keep_workers(requests, env, left, cancel_path=str(asked.folder / "cancel"))

    if has_ranks(request):
        return keep_rank_probes(request, workers, abandoned=left, classify=classified)
    return workers([request]).alone


def _keep_workers(
    requests: Sequence[ProbeRequest], env: dict[str, str], left: Callable[[], bool], *, cancel_path: str
) -> RanksEnded:
    """The ends of a worker for each request, forked by the server of the first one where it has one."""
    first = requests[0]
    if first.server_socket is not None:
        message = {
            "entry": "autofit.probing.worker:run", "cwd": str(first.cwd), "env": env, "deadline_s": first.deadline_s,
            "cancel": cancel_path,
            "ranks": [{"argument": str(one.request_path), "log": str(one.log_path)} for one in requests],
        }  # fmt: skip
        try:
            return call_ranks(first.server_socket, message)
        except ServerGone:
            pass  # nothing has run yet: start the workers below
        except EnvironmentFault:  # they may have run: do not run them again
            return RanksEnded(endings=(ProcessEnding(exit_code=-signal.SIGKILL),) * len(requests), first=0)
    return keep_ranks(
        lambda rank: _start_cold(requests[rank], env), len(requests), deadline_s=first.deadline_s, abandoned=left
    )


def _start_cold(request: ProbeRequest, env: dict[str, str]) -> int:
    command = [sys.executable, "-P", "-m", "autofit.probing.worker", str(request.request_path)]
    with request.log_path.open("ab") as log:
        has_terminal = request.terminal and request.rank in (None, 0)  # one process reads it
        into, out = (None, None) if has_terminal else (subprocess.DEVNULL, log)
        return start_child(command, cwd=request.cwd, env=trial_env(**env), stdin=into, stdout=out, stderr=out)


def _too_few(request: ProbeRequest, cards: int) -> ProbeResult:
    reason = f"the recipe has {cards} ranks, one a card, and this machine shows {len(request.slots)} cards"
    return ProbeResult(status=ProbeStatus.FAILED, device=request.device, reason=reason, cause=Cause.RAISED)


def classified(ending: ProcessEnding, request: ProbeRequest) -> ProbeResult:
    """The result of a probe that ended before it wrote an answer."""
    phase = request.phase_path.read_text() if request.phase_path.exists() else "load"
    status, cause, what = _end_of(ending, request)
    return ProbeResult(
        status=status, device=request.device, reason=f"{what} during {phase}; see {request.log_path}", cause=cause,
        oom_phase=phase if status is ProbeStatus.OOM else None, limit_bytes=request.limit_bytes,
    )  # fmt: skip


def _end_of(ending: ProcessEnding, request: ProbeRequest) -> tuple[ProbeStatus, Cause | None, str]:
    """(status, cause, reason in words)."""
    if ending.left_pid is not None:
        what = f"process {ending.left_pid} of the probe hangs in the driver (SIGKILL did not end it)"
        return ProbeStatus.LOST, Cause.HANGS, f"{what}, and its card gets no more probes while it lives,"
    if ending.deadline_passed:
        return ProbeStatus.LOST, Cause.DEADLINE, f"the deadline of {request.deadline_s:.0f} s passed"
    if ending.kernel_oom:
        what = "the kernel's out-of-memory killer ended the probe"
        if request.device == "cpu":
            return ProbeStatus.OOM, Cause.HOST_OOM, what
        return ProbeStatus.LOST, Cause.HOST_OOM, f"{what}: host memory, not the card"
    if ending.exit_code >= 0:
        what = f"the probe exited with code {ending.exit_code} before it answered"
        if request.device == "cuda" and exited_for_oom(request.log_path):
            return ProbeStatus.OOM, None, f"{what}, out of memory,"
        return ProbeStatus.FAILED, Cause.EXITED, what
    name = signal.Signals(-ending.exit_code).name
    if -ending.exit_code in _CRASHES:
        return ProbeStatus.FAILED, Cause.CRASHED, f"the probe crashed ({name})"
    return ProbeStatus.LOST, Cause.KILLED, f"the probe was killed ({name})"


# -- answers of simulated probes, kept on disk under a hash of all their inputs ---------------------------------------

_UNREAD = ("output_dir", "run_name", "logging_dir")  # keys of a recipe that no simulated probe depends on
_KEPT = (ProbeStatus.FIT, ProbeStatus.OOM)
_ENV = ("PYTORCH_", "TORCH_CUDNN_")  # variables that the simulated allocator and attention read


def kept_answer(request: ProbeRequest) -> dict[str, object] | None:
    """The answer of an earlier probe with the same inputs; None if missing or torn, and on a real device."""
    if not _is_kept(request):
        return None
    try:
        answer = read_json(_path(request)) or {}
        return answer if ProbeResult.from_json(answer).status in _KEPT else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def keep_answer(request: ProbeRequest, answer: Mapping[str, object]) -> None:
    """Keep `answer` for a later probe with the same inputs, if it is a measurement. Ignores a full disk."""
    if _is_kept(request) and answer.get("status") in _KEPT:
        with contextlib.suppress(EnvironmentFault):
            write_json(_path(request), answer)


def _is_kept(request: ProbeRequest) -> bool:
    return request.device.startswith("sim:") and request.recipe_hash is not None


def _path(request: ProbeRequest) -> Path:
    values = by_content({k: v for k, v in request.values.items() if k not in _UNREAD})
    settings = {name: value for name, value in os.environ.items() if name.startswith(_ENV)}
    parts = [
        request.trainer, values, request.recipe_hash, request.device, request.limit_bytes, request.measured_steps,
        request.least_of_fits, request.capped, read_json(request.worst_case), settings, code_hash(),
        calibration.fingerprint(request.device),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "probes" / f"{name}.json"


def by_content(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with the content of a model's folder in place of its path: a copy of it elsewhere answers the same.

    Its weights are left out, as simulations read none.
    """
    return {key: _content(value) if isinstance(value, str) else value for key, value in values.items()}


def _content(value: str) -> object:
    folder = Path(value)
    if not folder.is_absolute() or not os.path.isfile(folder / "config.json"):
        return value
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.json"))}
    return {"files": files}


# A hash of the code of the simulation: its kept results count only for the same code.

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "vllm")
_FOLDERS = ("fakegpu", "forecast", "plugin", "probing")


@cache
def code_hash() -> str:
    """A hash of the simulation's own code and the versions of the packages that it runs."""
    digest = hashlib.sha256(json.dumps([_version(p) for p in _PACKAGES]).encode())
    package = Path(__file__).parent.parent
    for folder in (*(package / name for name in _FOLDERS), Path(str(resources.files("autofit.trainers")))):
        for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.npz"))):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
