"""MLflow's mirror beside a search: a process of its own, so that this one loads no MLflow and waits for none."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_THE_END_S = 20


@contextlib.contextmanager
def following(folder: Path, study: str, *, say: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Mirror `study` to MLflow meanwhile; a slow or absent MLflow costs the search at most 20 s at its end."""
    log_path = folder / "mlflow.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autofit.tracking.study_mirror", str(folder), study],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
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
