"""Files that are none: pipes, devices, folders and floods in the place of a file that an option names."""

import errno
import os
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import TornFile, cannot_write, read_json, regular_bytes, write_atomically
from autofit.frontends.command import script_text
from autofit.recipe.launch import Launch
from autofit.recipe.launch_keys import read_deepspeed_file
from autofit.tuning.storage import database_of, use_storage

OPTIONS = (
    ["studies", "--storage", "file:{}"],
    ["search", "{}", "--gpu", "t4"],
    ["search", "--space", "{}", "--gpu", "t4"],
    ["search", "--accelerate_config", "{}", "--gpu", "t4"],
    ["advise", "--prices", "{}"],
    ["check", "{}"],
    ["run", "{}"],
    ["promote", "best", "--guards", "{}"],
    ["doctor", "{}"],
)


@pytest.fixture(params=["pipe", "device", "folder"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What is no file: one that never ends, one that never begins, a folder."""
    path = tmp_path / "no.yaml"
    if request.param == "device":
        return Path("/dev/zero")
    if request.param == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("command", OPTIONS, ids=lambda c: " ".join(c))
def test_an_option_that_names_no_file_is_one_line_at_once(
    command: list[str],
    no_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOFIT_STORAGE", "")  # the command line sets it
    assert main([part.format(no_file) for part in command]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "Traceback" not in lines[0]


def test_a_flood_is_not_read(tmp_path: Path) -> None:
    flood = tmp_path / "flood"
    with flood.open("wb") as file:
        file.truncate(2**40)  # sparse
    flood.chmod(0o600)
    use_storage(tmp_path, f"file:{flood}")
    with pytest.raises(ConfigError, match="at most 4 KiB"):
        database_of(tmp_path)
    with pytest.raises(ConfigError, match="at most"):
        read_deepspeed_file(str(flood))
    with pytest.raises(ConfigError, match="flood must have at most 128 KiB"):
        script_text(flood)


def test_a_script_that_never_begins_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.sh")
    with pytest.raises(ConfigError, match=r"train\.sh must be a file, and is a pipe"):
        script_text(tmp_path / "train.sh")


def test_a_file_of_our_own_that_became_a_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "storage.json")
    with pytest.raises(TornFile):
        read_json(tmp_path / "storage.json")
    with pytest.raises(ConfigError, match="is a pipe"):
        regular_bytes(tmp_path / "storage.json")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """`--out /dev/null`, as root, would have replaced the device."""
    path = tmp_path / "tuned.yaml"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(EnvironmentFault, match=f"must be a file, and is a {kind}; move it away"):
        write_atomically(path, "x: 1\n")
    assert os.listdir(tmp_path) == ["tuned.yaml"]


@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_the_path_of_a_deepspeed_json_in_the_place_of_a_mapping_is_refused_for_every_type(kind: str) -> None:
    config = {"distributed_type": kind, "num_processes": 2, "deepspeed_config": "ds.json"}
    with pytest.raises(ConfigError, match=r"deepspeed_config must be a mapping; got .ds\.json.; a JSON file"):
        Launch.of_accelerate(config, what="the accelerate config a.yaml")


def test_a_quota_that_is_reached_is_not_told_as_a_full_disk() -> None:
    told = {number: cannot_write(Path("out"), OSError(number, "")) for number in (errno.ENOSPC, errno.EDQUOT)}
    assert str(told[errno.ENOSPC]).startswith("no space left to write out;")
    assert str(told[errno.EDQUOT]).startswith("your disk quota leaves no space to write out;")
