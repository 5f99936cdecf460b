"""A hostile user of the same machine: plants links, pipes and folders where autofit keeps its own, reads what it can.

The victim runs a real search and a full run of it, with a token in the recipe. Needs root, to be two users.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tiny

from storm.inputs import Found

NAME = "tricks of another user"
_USER = 34567  # needs no entry in the table of users
_TOKEN = "hf_" + "n" * 30
_PRECIOUS = "what the victim wrote"
_END_S = 300.0
_OLD_S = 3600.0  # folders without an owner are deleted once they are older than a minute


def meet_neighbours(folder: Path, *, meetings: int, dice: random.Random, until: float) -> Found:
    """Searches and full runs beside that user, who tries a trick every few milliseconds."""
    found = Found()
    model = tiny.write_model(folder / "model")
    for _ in range(meetings):
        if time.monotonic() > until:
            break
        home = Path(tempfile.mkdtemp(prefix="neighbours-", dir="/tmp"))  # `folder` may be one that they cannot enter
        try:
            _meet(home, model, random.Random(dice.random()), found)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    return found


def _meet(home: Path, model: Path, dice: random.Random, found: Found) -> None:
    home.chmod(0o755)
    shared, private, told = home / "tmp", home / "private", home / "told"
    for place, mode in ((shared, 0o1777), (private, 0o700), (told, 0o777)):
        place.mkdir()
        place.chmod(mode)
    (private / "folder").mkdir()
    precious = [private / "file", private / "folder" / "file", home / "open"]
    for path in precious:
        path.write_text(_PRECIOUS)
    recipe = tiny.write_offline_recipe("sft", private, model, hub_token=_TOKEN, max_steps=6, output_dir=None)
    neighbour = multiprocessing.get_context("fork").Process(target=_neighbour, args=(home, dice.random()))
    neighbour.start()
    try:
        for words in (
            ["search", str(recipe), "--target-vram", "2GB", "--trainer", "sft", "--trials", "2", "--no-confirm"],
            ["promote", "0"],
            ["report"],
        ):
            _victim(home, words, found)
        assert neighbour.is_alive()
    finally:
        neighbour.kill()
        neighbour.join()
    for line in (told / "all").read_text().splitlines():
        found.tried[NAME] += 1
        for what, where in json.loads(line):
            found.add_wrong(f"{NAME}: {what}", where)
    for path in precious:
        if path.read_text() != _PRECIOUS:
            found.add_wrong(f"{NAME}: a file of the victim was changed", path)


def _victim(home: Path, words: list[str], found: Found) -> None:
    device = ["--device", "cpu"] if words[0] != "report" else []
    command = [sys.executable, "-m", "autofit", *words, *device, "--dir", str(home / "studies")]
    env = {**os.environ, "TMPDIR": str(home / "tmp"), "AUTOFIT_CACHE": str(home / "cache")}
    done = subprocess.run(
        command, env=env, cwd=home / "private", capture_output=True, text=True, timeout=_END_S, check=False
    )
    if done.returncode or "Traceback" in done.stderr:
        found.add_wrong(f"{NAME}: `autofit {words[0]}` ended with code {done.returncode}", done.stderr[-1500:])


# -- the other user ---------------------------------------------------------------------------------------------------


def _neighbour(home: Path, seed: float) -> None:
    os.setgroups([])
    os.setgid(_USER)
    os.setuid(_USER)
    os.umask(0)
    dice = random.Random(seed)
    tricks = [_plant_slots, _plant_folder, _take_what_is_new, _read_all, _read_commands, _shout_at_sockets]
    with (home / "told" / "all").open("w") as told:
        while True:
            trick = dice.choice(tricks)
            done = list[tuple[str, str]]()
            with contextlib.suppress(OSError):
                for where in trick(home, dice):
                    done.append((trick.__name__.strip("_"), str(where)))
            told.write(json.dumps(done) + "\n")
            told.flush()
            time.sleep(dice.uniform(0.001, 0.02))


def _plant(place: Path, home: Path, dice: random.Random) -> None:
    """A link, pipe, socket, file or folder at `place`, which is cleared first if it is the neighbour's own."""
    with contextlib.suppress(OSError):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
    private = home / "private"
    makes: list[Callable[[], object]] = [
        lambda: place.symlink_to(private / "file"), lambda: place.symlink_to(private / "folder"),
        lambda: place.symlink_to(home / "open"), lambda: place.symlink_to(private / "missing"),
        lambda: place.symlink_to(place), lambda: os.mkfifo(place, 0o666),
        lambda: place.write_text("{"), lambda: place.mkdir(mode=0o777), lambda: place.mkdir(mode=0o700),
        lambda: os.link(home / "open", place),
    ]  # fmt: skip
    with contextlib.suppress(OSError):
        dice.choice(makes)()


def _plant_slots(home: Path, dice: random.Random) -> Iterator[Path]:
    folder = home / "tmp" / "autofit-slots-0"
    _plant(folder, home, dice)
    if folder.is_dir() and not folder.is_symlink():
        for name in ("cpu-0", "cpu-1", "several"):
            _plant(folder / name, home, dice)
    yield from ()


def _plant_folder(home: Path, dice: random.Random) -> Iterator[Path]:
    """What looks like a folder that a killed process left, which autofit deletes."""
    folder = home / "tmp" / f"autofit-{dice.choice('abcdefgh')}"
    _plant(folder, home, dice)
    with contextlib.suppress(OSError):
        _plant(folder / ".owner", home, dice)
        (folder / "more").symlink_to(home / "private" / "folder")
        os.utime(folder, (time.time() - _OLD_S,) * 2, follow_symlinks=False)
    yield from ()


def _take_what_is_new(home: Path, dice: random.Random) -> Iterator[Path]:
    """Write into, rename and delete what the victim has in the shared folder and in its studies."""
    for path in (*(home / "tmp").iterdir(), *_seen(home / "studies", dice), *_seen(home / "cache", dice)):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == _USER:
                continue
            if path.is_dir():
                (path / "planted").write_text("x")
            else:
                with path.open("r+"):
                    pass
            yield path
        with contextlib.suppress(OSError):
            path.rename(path.with_name("taken"))
            yield path
        with contextlib.suppress(OSError):
            path.unlink()
            yield path


def _read_all(home: Path, dice: random.Random) -> Iterator[Path]:
    for folder in (home / "tmp", home / "studies", home / "cache", home / "private"):
        for path in _seen(folder, dice):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid != _USER and path.is_file() and _TOKEN.encode() in path.read_bytes():
                    yield path


def _read_commands(_: Path, __: random.Random) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if _TOKEN.encode() in (process / name).read_bytes():
                    yield process / name


def _shout_at_sockets(home: Path, dice: random.Random) -> Iterator[Path]:
    for path in _seen(home / "tmp", dice):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            if path.is_socket() and path.lstat().st_uid != _USER:
                line.settimeout(0.1)
                line.connect(str(path))
                line.sendall(b'{"pid": 1}\n' * 100)
                yield path


def _seen(folder: Path, dice: random.Random) -> list[Path]:
    """Up to 50 of what the neighbour sees below `folder`."""
    seen = [Path(place) / name for place, folders, files in os.walk(folder) for name in (*folders, *files)]
    return dice.sample(seen, min(50, len(seen)))
