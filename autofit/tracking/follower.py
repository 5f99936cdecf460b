"""MLflow's mirrors as processes of their own, so that this one saves the import of MLflow and waits little for it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna

from autofit.files import read_json, stamp, write_json
from autofit.probing.launch import is_alive
from autofit.promotion.run_folder import RunFolder
from autofit.tuning.storage import child_environment, mlflow_follows
from autofit.tuning.study import with_confirmations
from autofit.watching.events import events_of, read_progress

MIRRORED = "mlflow.json"  # in the folder of a full run that has ended, or of a study's probes: what MLflow shows of it
DATABASE = "mlflow.db"  # MLflow's own, beside the studies
_AT_THE_END_S = 20
_ALONE_S = 30  # as long as a search or a training waits for its mirror; one that was killed cannot kill it


class Follower:
    """The mirror of a search's study, in a process that imports MLflow: it is started once there is something to tell.

    A search that goes on with a study that MLflow shows already starts none.
    """

    def __init__(self, folder: Path, study: optuna.Study) -> None:
        self._folder, self._study = folder, study
        self.log_path = folder / "mlflow.log"
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Mirror the study from here on."""
        if self._process is not None:
            return
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autofit.tracking.study_mirror", str(self._folder),
                 self._study.study_name],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env=child_environment(self._folder),
            )  # fmt: skip

    def end(self) -> bool:
        """Let it look once more, and end; False where that takes more than 20 s."""
        if self._process is None and is_mirrored(self._folder, self._study):
            return True
        self.begin()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_AT_THE_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return False
        return True


@contextlib.contextmanager
def following(folder: Path, study: optuna.Study, *, say: Callable[[str], None] = lambda _: None) -> Iterator[Follower]:
    """Mirror `study` to MLflow meanwhile; a slow or absent MLflow costs the search at most 20 s at its end."""
    follower = Follower(folder, study)
    try:
        yield follower
    except BaseException:
        follower.begin()  # regardless of news meanwhile: the database may lack them
        raise
    finally:
        if not follower.end():
            say(f"MLflow is behind (see {follower.log_path}); `autofit sync` brings it up to date")


def told_of(study: optuna.Study) -> list[object]:
    """Facts of the finished trials of `study` for MLflow, as JSON: another list once one ends or is confirmed."""
    frozen = study.get_trials(deepcopy=False)
    return [
        [t.number, str(frozen[t.number].datetime_complete), t.confirmed and list(t.confirmed.step_s),
         t.comparison is not None]
        for t in with_confirmations(study, frozen)
        if t.result is not None
    ]  # fmt: skip


def keep_mirrored(folder: Path, study: str, told: list[object]) -> None:
    """Note that MLflow's own database shows `told` of the study; it counts until that database is written again."""
    home = folder / "probes" / study
    if home.exists():
        write_json(home / MIRRORED, {"told": told, "database": _mark_of(folder)})


def is_mirrored(folder: Path, study: optuna.Study) -> bool:
    """True if MLflow's own database shows all of the study already; False of a server that the user names."""
    if os.environ.get("MLFLOW_TRACKING_URI") or stamp(folder / DATABASE) is None:
        return False
    known = read_json(folder / "probes" / study.study_name / MIRRORED)
    return known == {"told": told_of(study), "database": _mark_of(folder)}


def _mark_of(folder: Path) -> list[int]:
    return list(stamp(folder / DATABASE) or ())


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
    """True if all processes of the run have ended; waits while one that is done still writes to MLflow."""
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
    command = [sys.executable, "-P", "-m", "autofit.tracking.study_mirror", str(RunFolder(folder).request_path)]
    with (folder / "mlflow.log").open("ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=_AT_THE_END_S, check=False,
                       env=env)  # fmt: skip


def mirrored_state(folder: Path, *, ended: bool) -> dict[str, object]:
    """State of a full run in `folder` that an up-to-date mirror has copied."""
    lines = read_progress(folder)
    began = lines[0].get("time") if lines else None
    state = RunFolder(folder).state(lambda: not ended)
    return {"state": state, "began": began, "steps": len(lines), "events": len(events_of(folder))}
