"""What a killed process leaves in the folder for temporary files is deleted by the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofit import scratch
from autofit.scratch import Scratch

_HOLDS = (
    "import sys; from autofit.scratch import Scratch; s = Scratch('x-'); print(s.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_swept", set())
    monkeypatch.setattr(scratch, "_YOUNG_S", -1.0)
    return tmp_path


def test_a_folder_lives_as_long_as_its_context() -> None:
    with Scratch("proof-") as folder:
        (folder / "x").write_text("1")
        assert folder.name.startswith("autofit-proof-")
    assert not folder.exists()


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "autofit-of-somebody").mkdir()  # no scratch folder: it has no lock
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS], env={**os.environ, "TMPDIR": str(home)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        with Scratch():
            assert folder.exists()
        process.kill()
        process.wait()
    monkeypatch.setattr(scratch, "_swept", set())
    with Scratch():
        assert not folder.exists()
    assert (home / "autofit-of-somebody").exists()
