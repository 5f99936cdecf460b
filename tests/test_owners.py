"""Whose folders are: what another user may have written is not followed, and no code of theirs is run."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autofit import api
from autofit.cluster.scheduler import read_executor
from autofit.errors import ConfigError
from autofit.files import check_is_own, make_own, other_writers, write_json
from autofit.probing.launch import Attempts, start_job
from autofit.tuning.storage import check_is_of, database_of, keep_storage, storage_option, use_storage

URL = "postgresql://me@db.example/studies"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user: needs root")
STRANGER, THEIR_GROUP = 65534, 65533


@pytest.fixture
def group_writes() -> Iterator[None]:
    """The umask of a cluster whose groups share folders."""
    kept = os.umask(0o002)
    yield
    os.umask(kept)


@pytest.fixture
def remembers(tmp_path: Path) -> Path:
    """A folder of studies whose storage.json names a database."""
    folder = tmp_path / "studies"
    folder.mkdir()
    write_json(folder / "storage.json", {"storage": URL})
    return folder


def test_a_database_that_my_own_folder_names_is_followed_and_said_so(remembers: Path) -> None:
    database = database_of(remembers)
    assert (str(database), database.remembered) == (URL, True)
    assert storage_option(remembers) == ""


@as_root
@pytest.mark.parametrize("what", ["folder of another", "file of another", "folder for all", "file for the group"])
def test_a_database_that_others_may_have_named_is_not_followed(what: str, remembers: Path) -> None:
    file = remembers / "storage.json"
    if what.startswith("folder"):
        os.chown(remembers, STRANGER, THEIR_GROUP) if "another" in what else remembers.chmod(0o777)
    else:
        os.chown(file, STRANGER if "another" in what else 0, THEIR_GROUP)
        file.chmod(0o664)
    with pytest.raises(ConfigError, match=r"not followed, as .*PGPASSWORD.*--storage"):
        database_of(remembers)
    use_storage(remembers, URL)  # named by the user it is used, and the proposed command names it too
    database = database_of(remembers)
    assert not database.remembered
    assert storage_option(remembers) == f" --storage '{URL}'"
    before = file.read_text()
    check_is_of(database)
    keep_storage(database)
    assert file.read_text() == before


def test_a_folder_is_mine_alone_unless_its_mode_lets_others_write(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(0o755)
    assert other_writers(folder) == ""
    folder.chmod(0o757)
    assert other_writers(folder) == "can be written by everybody (mode 757)"


@as_root
def test_a_group_that_is_the_users_own_is_no_other(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    assert other_writers(tmp_path) == ""
    os.chown(tmp_path, 0, THEIR_GROUP)
    assert other_writers(tmp_path).startswith("can be written by the group ")


def test_an_own_folder_is_closed_whatever_the_umask(tmp_path: Path, group_writes: None) -> None:
    make_own(tmp_path / "shared" / "studies")
    assert stat.S_IMODE((tmp_path / "shared" / "studies").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o775


def test_the_folder_of_a_job_is_closed_whatever_the_umask(
    tmp_path: Path, group_writes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    class Executor:
        def __init__(self, folder: Path, python: str) -> None:
            modes.append(folder.stat().st_mode & 0o7777)

        def update_parameters(self, **_: object) -> None: ...

        def submit(self, *_: object) -> object:
            return SimpleNamespace(job_id=str(os.getpid()))

    monkeypatch.setattr("autofit.probing.launch.submitit.LocalExecutor", Executor)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)  # its group is handed on, as in the folders of a project
    start_job(shared / "probe", print, "request.json", timeout_s=1)
    (shared / "old" / "job").mkdir(parents=True)
    start_job(shared / "old", print, "request.json", timeout_s=1)
    assert list(map(oct, modes)) == [oct(0o2700), oct(0o2700)]


def test_the_folder_of_a_probe_is_closed_too_as_a_study_may_be_shown_with_all_that_is_in_it(
    tmp_path: Path, group_writes: None
) -> None:
    folder = Attempts(home=tmp_path, name="trial-0000").new_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o2775, 0o777, 0o757])
def test_a_folder_of_studies_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "studies"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 0, THEIR_GROUP)
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=r"can be written by .*run code as you; run `chmod go-w .*`, or choose"):
        api.search(device="sim", gpu="t4", folder=folder)
    with pytest.raises(ConfigError, match="run code as you"):
        api.promote("best", folder=folder)


@as_root
def test_root_is_told_whose_folder_it_works_in(tmp_path: Path) -> None:
    os.chown(tmp_path, STRANGER, THEIR_GROUP)
    said: list[str] = []
    check_is_own(tmp_path, say=said.append)
    assert len(said) == 1
    assert "that user can run code as root" in said[0]


@pytest.mark.parametrize("case", ["mine", "of the folder's owner", "of another", "for the group", "for all"])
@as_root
def test_an_executor_file_that_another_user_may_have_put_there_is_not_followed(case: str, tmp_path: Path) -> None:
    """Nobody names it: in a folder that several people write to, one of them could run code as each other one."""
    file = tmp_path / "executor.yaml"
    file.write_text("partition: gpu\n")
    os.chown(file, STRANGER if "of" in case.split() else 0, THEIR_GROUP)
    file.chmod({"for the group": 0o664, "for all": 0o646}.get(case, 0o644))
    if case == "of the folder's owner":
        os.chown(tmp_path, STRANGER, THEIR_GROUP)
    if case in ("mine", "of the folder's owner"):
        assert read_executor(None, {}, tmp_path).partition == "gpu"
        return
    fix = "copy of your own" if case == "of another" else "chmod go-w"
    with pytest.raises(ConfigError, match=rf"its setup runs as you; .*{fix}"):
        read_executor(None, {}, tmp_path)
