"""The slots of a machine lie where their user alone can write, and no link of another user is followed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.probing.slots import NoSlot, set_aside, slots, slots_folder


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the slots lie where nobody was first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / f"autofit-slots-{os.getuid()}"


def test_the_folder_is_the_users_own(usual: Path) -> None:
    assert slots_folder() == usual
    assert usual.stat().st_mode & 0o777 == 0o700


def test_a_folder_in_which_others_can_write_or_a_link_is_left_for_one_in_the_cache(usual: Path) -> None:
    usual.mkdir()
    usual.chmod(0o777)
    assert slots_folder().is_relative_to(usual.parent / "cache")
    usual.rmdir()
    usual.symlink_to(usual.parent)
    assert slots_folder().is_relative_to(usual.parent / "cache")


def test_a_link_in_the_place_of_a_slot_is_not_followed_and_its_file_keeps_its_content(usual: Path) -> None:
    precious = usual.parent / "precious"
    precious.write_text("kept")
    slots_folder()
    (usual / "cpu-0").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), slots(("cpu-0",), 1):
        pass
    assert precious.read_text() == "kept"


def test_a_slot_that_is_held_is_waited_for_until_that_is_abandoned(usual: Path) -> None:
    both = ("cpu-0", "cpu-1")
    with slots(both, 1) as first, slots(both, 1) as second:
        assert (first, second) == (("cpu-0",), ("cpu-1",))
        asked = iter((False, False, True))
        with slots(("cpu-0",), 1, abandoned=lambda: next(asked)) as third:
            assert third is None


def test_who_waits_is_told_who_holds_the_slot(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.probing.slots._QUIET_S", 0.0)
    said: list[str] = []
    with (
        slots(("cpu-0",), 1, what="the probe in studies/probes/trial-0001-1"),
        slots(("cpu-0",), 1, abandoned=lambda: bool(said), waits=said.append) as held,
    ):
        assert held is None
    assert said == [f"cpu-0, held by the probe in studies/probes/trial-0001-1 (pid {os.getpid()})"]


def test_a_card_on_which_a_process_hangs_is_given_to_nobody_until_that_has_ended(usual: Path) -> None:
    both = ("cuda-GPU-1", "cuda-GPU-2")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as hung:
        set_aside(("cuda-GPU-1",), hung.pid)
        with slots(both, 1) as held:
            assert held == ("cuda-GPU-2",)
        with pytest.raises(NoSlot, match=rf"GPU-1 \(process {hung.pid}\); reset the card"), slots(both, 2):
            pass
        hung.kill()
    with slots(both, 2) as held:
        assert held == both


def test_the_slot_of_the_cpu_is_given_away_though_a_process_without_a_card_lives_on(usual: Path) -> None:
    set_aside(("cpu-0",), os.getpid())
    with slots(("cpu-0",), 1) as held:
        assert held == ("cpu-0",)
