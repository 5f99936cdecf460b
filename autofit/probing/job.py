"""What submitit runs: one probe, in a child process, and an answer whatever happens to it. Never raises."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.hardware.hardware import gpus
from autofit.probing.fork_server import call
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.slots import slot
from autofit.probing.supervise import Ending, computing_env, keep
from autofit.units import format_bytes

_LARGER = 1.1  # a card that is hardly larger than the target cannot say by how much that is exceeded
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def run_probe(request_path: str) -> None:
    """Probe as the request says, on a free slot; afterwards there is an answer beside the request."""
    began = time.perf_counter()
    request = ProbeRequest.read(Path(request_path))
    process = psutil.Process()
    write_json(request.folder / "started.json", {"pid": process.pid, "create_time": process.create_time()})
    with slot(request.slots, abandoned=lambda: cancelled(request)) as name:
        ending = Ending(exit_code=-signal.SIGKILL, abandoned=True) if name is None else _keep(request, name, request)
        if name is not None and _can_say_how_far_over(request):
            _grade(request, name)
    if read_json(request.answer_path) is None and not ending.abandoned:
        write_json(request.answer_path, classified(ending, request).to_json())
    content = read_json(request.answer_path)
    if content is not None:
        write_json(request.answer_path, content | {"wall_s": time.perf_counter() - began})


def cancel(folder: Path) -> None:
    """Ask the job of the probe in `folder` to kill it and end without an answer."""
    (folder / "cancel").touch()


def cancelled(request: ProbeRequest) -> bool:
    return (request.folder / "cancel").exists()


def _can_say_how_far_over(request: ProbeRequest) -> bool:
    """Whether the probe ran out of memory under a target that is emulated on a larger card."""
    answer = ProbeResult.read(request.answer_path)
    oom = answer is not None and answer.status is ProbeStatus.OOM
    if request.device != "cuda" or request.limit_bytes is None or not oom or cancelled(request):
        return False
    return any(gpu.capacity_bytes > _LARGER * request.limit_bytes for gpu in gpus())


def _grade(request: ProbeRequest, slot_name: str) -> None:
    """Probe again without the cap, and add its bytes and seconds to the answer. The cap alone decides what fits."""
    free = replace(request, folder=request.folder / "uncapped", measured_steps=1, capped=False)
    free.folder.mkdir(exist_ok=True)
    write_json(free.request_path, free.to_json())
    _keep(free, slot_name, request)
    found, answer = ProbeResult.read(free.answer_path), ProbeResult.read(request.answer_path)
    assert answer is not None
    assert request.limit_bytes is not None
    used = found.device_used_bytes if found is not None and found.step_s else None  # without steps it did not end
    if found is not None and used is not None and used > request.limit_bytes:
        over = (
            f"without the cap it held {format_bytes(used)}, {format_bytes(used - request.limit_bytes)} over the target"
        )
        graded = replace(
            answer, device_used_bytes=used, uncapped_bytes=used, phases=found.phases, reason=f"{over}; {answer.reason}",
            peak_reserved_bytes=found.peak_reserved_bytes, peak_allocated_bytes=found.peak_allocated_bytes,
            step_s=found.step_s, rollout_s=found.rollout_s, update_s=found.update_s,
        )  # fmt: skip
        write_json(request.answer_path, graded.to_json())


def _keep(request: ProbeRequest, slot_name: str, asked: ProbeRequest) -> Ending:
    """Run the probe to its end; `asked` is the request that is cancelled with it."""
    env: dict[str, str] = {}
    if slot_name.startswith("cuda-"):
        env["CUDA_VISIBLE_DEVICES"] = slot_name.removeprefix("cuda-")
    if request.server_socket is not None:
        message = {
            "entry": "autofit.probing.worker:run", "argument": str(request.request_path), "cwd": str(request.cwd),
            "log": str(request.log_path), "env": env, "deadline_s": request.deadline_s,
            "cancel": str(asked.folder / "cancel"),
        }  # fmt: skip
        try:
            return call(request.server_socket, message)
        except EnvironmentFault as fault:
            if "does not answer" not in str(fault):  # the child was taken: it may have run, so it is not run again
                return Ending(exit_code=-signal.SIGKILL)
    return keep(lambda: _start_cold(request, env), deadline_s=request.deadline_s, abandoned=lambda: cancelled(asked))


def _start_cold(request: ProbeRequest, env: dict[str, str]) -> int:
    with request.log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autofit.probing.worker", str(request.request_path)],
            cwd=request.cwd, env=computing_env(**env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    process.returncode = 0  # the keeper waits for it, not this object
    return process.pid


def classified(ending: Ending, request: ProbeRequest) -> ProbeResult:
    """The result of a probe that ended without an answer of its own."""
    phase_path = request.phase_path
    phase = phase_path.read_text() if phase_path.exists() else "load"
    status, oom_phase = ProbeStatus.FAILED, None
    if ending.deadline_passed:
        status, what = ProbeStatus.LOST, f"the deadline of {request.deadline_s:.0f} s passed"
    elif ending.kernel_oom and request.device == "cpu":
        status, what, oom_phase = ProbeStatus.OOM, "the kernel's out-of-memory killer ended the probe", phase
    elif ending.kernel_oom:
        status, what = ProbeStatus.LOST, "the kernel's out-of-memory killer ended the probe: host memory, not the card"
    elif ending.exit_code == -signal.SIGKILL:
        status, what = ProbeStatus.LOST, "the probe was killed (SIGKILL)"
    elif -ending.exit_code in _CRASHES:
        what = f"the probe crashed ({signal.Signals(-ending.exit_code).name})"
    elif ending.exit_code < 0:
        status, what = ProbeStatus.LOST, f"the probe was killed ({signal.Signals(-ending.exit_code).name})"
    else:
        what = f"the probe exited with code {ending.exit_code} before it answered"
    return ProbeResult(
        status=status,
        device=request.device,
        reason=f"{what} during {phase}; see {request.log_path}",
        oom_phase=oom_phase,
        limit_bytes=request.limit_bytes,
    )
