"""The kept server of the tests' commands: their full runs are forks of the command, with the imports of the server.

A command starts a run's job by submitit, and the job its training: three processes, and 5 s of imports for each run.
Here both are forks, which end, hear signals and are killed as those do. test_secrets.py has a run that submitit starts;
test_interruption.py, test_server_runs.py and the tests on Slurm have trainings that are processes of their own.
"""

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import counted_work

from autofit.files import private_folder, write_json
from autofit.plugin.registry import load
from autofit.probing import fork_server, kept_server, launch
from autofit.probing.supervise import note_of
from autofit.promotion import job, promotion
from autofit.promotion.run_folder import deaf_children

_OF_MLFLOW = (
    "autofit.tracking.study_mirror", "mlflow.store.tracking.sqlalchemy_store",
)  # fmt: skip


def start_job(folder: Path, function: Callable[[str], None], argument: str, **options: Any) -> None:
    """Run a full run's job in a fork; another one as ever."""
    if function is not job.run_promoted:
        launch.start_job(folder, function, argument, **options)
        return
    private_folder(folder / "job")
    with launch.holding_back_interrupts():
        pid = os.fork()
        if pid == 0:
            os.setsid()
            _become(lambda: function(argument), folder / "job" / "log")
        write_json(folder / "job.json", {"job_id": str(pid), **note_of(pid), "submitted": time.time()})


def start_deaf(module: str, request_path: Path, *, log: Path, cwd: str, env: Mapping[str, str]) -> int:
    """The pid of a fork that runs the module as `python -m` does."""
    with deaf_children():
        pid = os.fork()
        if pid == 0:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [module, str(request_path)]
            _become(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), log)
    return pid


def _become(act: Callable[[], object], log: Path) -> NoReturn:
    """In a fork: act with nothing of the parent's open, as a new process, and end."""
    code = 1
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        nowhere, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, descriptor in enumerate((nowhere, file, file)):
            os.dup2(descriptor, number)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)  # another thread may hold the old ones
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        act()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(request: str) -> None:
    """A job of SFT whose ranks are its forks: it imports once."""
    load("sft")
    with patch.object(job, "start_deaf", start_deaf):
        job.run_promoted(request)


if __name__ == "__main__":
    counted_work.begin(Path(sys.argv[2]).with_name("counted"))
    with (
        patch.object(promotion, "start_job", start_job),
        patch.object(job, "start_deaf", start_deaf),
        patch.object(kept_server, "_OF_COMMANDS", (*kept_server._OF_COMMANDS, *_OF_MLFLOW)),
    ):
        fork_server.serve(sys.argv[1], stays=sys.argv[2])
