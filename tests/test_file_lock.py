"""Locks of files, and file systems on which they or SQLite cannot be trusted."""

import errno
import logging
import os
from pathlib import Path

import pytest

from autofit.errors import EnvironmentFault
from autofit.tuning import locks
from autofit.tuning.locks import exclusive, file_system, is_of_a_network
from autofit.tuning.study import open_storage


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on NFS, and beside it one on a local disk, as the kernel tells of them."""
    mounts = tmp_path / "mounts"
    home = tmp_path / "the home"
    escaped = str(home).replace(" ", "\\040")
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/home {escaped} nfs4 rw 0 0\ntmpfs {escaped}/local tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(locks, "_MOUNTS", mounts)
    return home


def test_the_file_system_is_that_of_the_nearest_mount(mounted: Path) -> None:
    assert file_system(mounted / "studies") == "nfs4"
    assert file_system(mounted / "local" / "studies") == "tmpfs"
    assert file_system(mounted.parent / "the homes") == "ext4"


def test_file_systems_of_a_network_are_known_by_their_type() -> None:
    assert all(map(is_of_a_network, ("nfs", "nfs4", "cifs", "lustre", "gpfs", "fuse.sshfs", "fuse.s3fs")))
    assert not any(
        map(is_of_a_network, ("ext4", "xfs", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fuseblk", "unknown"))
    )


def test_studies_on_a_network_are_warned_of_once(mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autofit"):
        open_storage(mounted / "studies", create=True)
        open_storage(mounted / "studies", create=True)
        open_storage(mounted / "local" / "studies", create=True)
    (told,) = caplog.messages
    assert "file system of a network (nfs4)" in told
    assert "--storage postgresql://" in told


def test_a_lock_that_holds_off_nobody_is_refused(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with (
        pytest.raises(EnvironmentFault, match=r"\(nfs4\) must lock files, but it gives one lock to two.*with --dir"),
        exclusive(mounted, "s"),
    ):
        pass


def test_a_file_system_without_locks_is_refused(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(EnvironmentFault, match="must lock files, but No locks available"), exclusive(mounted, "s"):
        pass


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_in_the_place_of_a_lock_is_told_or_used_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    (tmp_path / "law.lock").mkdir() if kind == "folder" else os.mkfifo(tmp_path / "law.lock")
    if kind == "pipe":
        with exclusive(tmp_path, "law"):
            pass
        return
    with (
        pytest.raises(EnvironmentFault, match=r"law\.lock: it must be a file, and is a folder; move that away"),
        exclusive(tmp_path, "law"),
    ):
        pass


def test_a_folder_of_locks_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "made before").mkdir(mode=0o777)
    before = os.umask(0o002)
    try:
        for name in ("new", "made before"):
            with exclusive(tmp_path / name, "x"):
                assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
