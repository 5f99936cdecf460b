"""What a killed process leaves in the folder for temporary files is deleted by the next one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofit import files
from autofit.files import ScratchFolder, claim, release

_HOLDS = (
    "import sys; from autofit.files import ScratchFolder; s = ScratchFolder('x-'); "
    "print(s.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_swept", set())
    monkeypatch.setattr(files, "_YOUNG_S", -1.0)
    return tmp_path


def test_a_folder_lives_as_long_as_its_context() -> None:
    with ScratchFolder("proof-") as folder:
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
        with ScratchFolder():
            assert folder.exists()
        process.kill()
        process.wait()
    monkeypatch.setattr(files, "_swept", set())
    with ScratchFolder():
        assert not folder.exists()
    assert (home / "autofit-of-somebody").exists()


def test_what_a_killed_search_read_is_deleted_by_the_next_one_and_a_living_ones_is_not(home: Path) -> None:
    code = "import os, sys, pathlib; from autofit.files import claim; claim(pathlib.Path(sys.argv[1])); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, home / "killed"], check=False)
    assert (home / "killed").exists()
    claim(home / "living")
    claim(home / "new")
    assert sorted(p.name for p in home.iterdir()) == ["living", "new"]
    release(home / "living")
    release(home / "new")
    assert not list(home.iterdir())


def test_a_clock_that_was_set_back_makes_no_folder_young_for_ever(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_YOUNG_S", 60.0)
    (home / "left").mkdir()
    (home / "left" / files.OWNER).touch()
    os.utime(home / "left", (2**32, 2**32))
    claim(home / "new")
    release(home / "new")
    assert not list(home.iterdir())


def test_a_folder_that_an_error_left_claimed_is_claimed_again(tmp_path: Path) -> None:
    claim(tmp_path / "one")
    (tmp_path / "one/left").touch()
    claim(tmp_path / "one")
    assert not (tmp_path / "one/left").exists()
    release(tmp_path / "one")
    assert not (tmp_path / "one").exists()
