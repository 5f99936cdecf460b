"""MLflow's mirrors as processes of their own, so that this one loads no MLflow and waits little for it."""

import contextlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autofit.files import read_json
from autofit.probing.launch import is_alive
from autofit.promotion.run_folder import RunFolder
from autofit.tuning.storage import child_environment, mlflow_follows
from autofit.watching.events import events_of, read_progress

MIRRORED = "mlflow.json"  # in the folder of a full run that has ended: the state that MLflow shows
_AT_THE_END_S = 20
_ALONE_S = 30  # as long as a search or a training waits for its mirror; one that was killed cannot kill it


@contextlib.contextmanager
def following(folder: Path, study: str, *, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Mirror `study` to MLflow meanwhile; a slow or absent MLflow costs the search at most 20 s at its end."""
    log_path = folder / "mlflow.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autofit.tracking.study_mirror", str(folder), study],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=child_environment(folder),
        )  # fmt: skip
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_AT_THE_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            say(f"MLflow is behind (see {log_path}); `autofit sync` brings it up to date")


def told_to_end(*, within_s: int = _ALONE_S) -> threading.Event:
    """In a mirror: an event that is set once standard input closes, as the process that started it ends or was killed.

    The kernel kills this process `within_s` later, whatever it waits for. Call it before `nice`, which is each thread's
    own: a busy machine gives a nice thread less than a hundredth of a processor.
    """
    told = threading.Event()

    def wait() -> None:
        select.select([sys.stdin], [], [])
        signal.alarm(within_s)
        told.set()

    threading.Thread(target=wait, daemon=True).start()
    return told


@contextlib.contextmanager
def mended(folder: Path) -> Iterator[None]:
    """Afterwards MLflow shows the end of the full run in `folder`, also where its own mirror was killed.

    Takes at most 40 s, without a word: `autofit sync` does the same.
    """
    try:
        yield
    finally:
        has_run = mlflow_follows() and RunFolder(folder).request_path.exists()
        if has_run and _has_ended(folder) and not _is_up_to_date(folder):
            _mirror_once(folder)


def _has_ended(folder: Path) -> bool:
    """Whether no process of the run is left; waits while one that is done still tells MLflow."""
    deadline = time.monotonic() + _AT_THE_END_S
    while is_alive(folder):
        done = RunFolder(folder).is_done
        if not done or _is_up_to_date(folder) or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _is_up_to_date(folder: Path) -> bool:
    return read_json(folder / MIRRORED) == mirrored_state(folder, ended=True)


def _mirror_once(folder: Path) -> None:
    request = RunFolder(folder).request() or {}
    env = child_environment(Path(str(request.get("study_folder"))))
    command = [sys.executable, "-P", "-m", "autofit.tracking.run_mirror", str(RunFolder(folder).request_path)]
    with (folder / "mlflow.log").open("ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_AT_THE_END_S, check=False,
                       env=env)  # fmt: skip


def mirrored_state(folder: Path, *, ended: bool) -> dict[str, object]:
    """What a mirror that is up to date has copied of the full run in `folder`."""
    lines = read_progress(folder)
    began = lines[0].get("time") if lines else None
    state = RunFolder(folder).state(lambda: not ended)
    return {"state": state, "began": began, "steps": len(lines), "events": len(events_of(folder))}
