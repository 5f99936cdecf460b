"""Whose folders are: what another user may have written is not followed, and no code of theirs is run."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.owners import close_to_others, make_own, other_writers
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


def test_what_lies_above_a_job_is_closed_to_writers_and_the_job_to_all(tmp_path: Path, group_writes: None) -> None:
    job = tmp_path / "studies" / "probes" / "law" / "trial-0000-1" / "job"
    job.mkdir(parents=True)
    job.chmod(0o2775)  # of a folder whose group is handed on
    close_to_others(job, up_to="probes", enter=False)
    assert oct(job.stat().st_mode & 0o7777) == oct(0o2700)
    assert [level.stat().st_mode & 0o022 for level in list(job.parents)[:3]] == [0, 0, 0]
    assert (tmp_path / "studies").stat().st_mode & 0o020
