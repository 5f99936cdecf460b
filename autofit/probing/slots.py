"""Slots: at most one probe per GPU, and by default one on the CPU, across all searches of a user on a machine.

A slot is a locked file, so a killed holder frees it at once. Its folder is the user's own: others cannot write there.
A card in whose driver a process hangs is set aside until that process has ended.
"""

import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from autofit.errors import EnvironmentFault, printable
from autofit.files import cache_folder, read_json, write_json
from autofit.probing.supervise import lives, note_of

_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_QUIET_S = 5.0  # of waiting, before it is said
_GATE = "several"  # held by the process that collects several slots
_HANGS = ".hangs"  # ends the name of the file that names the process which hangs on a slot's card


class NoSlot(EnvironmentFault):
    """Too few slots are left: processes that cannot be killed hang on the others."""


@contextmanager
def slots(
    names: tuple[str, ...], count: int, *, abandoned: Callable[[], bool] = lambda: False,
    what: str = "", waits: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, ...] | None]:  # fmt: skip
    """Hold `count` slots of `names`, in the order of `names`; None if `abandoned` became true while waiting.

    Other processes are told that `what` holds them. `waits` is called once after 5 s of waiting, with who holds one.
    One process at a time collects several slots, so two that each hold a part never wait for each other.
    Raises NoSlot where fewer than `count` are left besides those that are set aside.
    """
    assert count <= len(names), (count, names)
    folder, taken = slots_folder(), list[str]()
    names = _usable(names, count, folder)
    with ExitStack() as held:
        with ExitStack() as gate:
            if count > 1 and _take_one((_GATE,), gate, folder, abandoned, what, waits) is None:
                yield None
                return
            while len(taken) < count:
                left = tuple(name for name in names if name not in taken)
                name = _take_one(left, held, folder, abandoned, what, waits)
                if name is None:
                    break
                taken.append(name)
        yield tuple(sorted(taken, key=names.index)) if len(taken) == count else None


def is_taken(name: str) -> bool:
    """Whether a probe or a run of this user holds the slot at this moment."""
    try:
        with (slots_folder() / name).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_of_card(name: str) -> bool:
    """Whether a slot is a CUDA card."""
    return name.startswith("cuda-")


def set_aside(names: tuple[str, ...], pid: int) -> None:
    """Give none of these cards' slots away while the process `pid` lives: SIGKILL did not end it.

    Without a card it waits for a file system that is away, which keeps no other process from the CPU.
    """
    for name in filter(is_of_card, names):
        write_json(slots_folder() / f"{name}{_HANGS}", note_of(pid))


def _usable(names: tuple[str, ...], count: int, folder: Path) -> tuple[str, ...]:
    """Those of `names` that are not set aside. Raises NoSlot for fewer than `count`."""
    notes = {name: read_json(folder / f"{name}{_HANGS}") for name in names}
    hung = {name: note["pid"] for name, note in notes.items() if note is not None and lives(note)}
    if len(names) - len(hung) >= count:
        return tuple(name for name in names if name not in hung)
    which = ", ".join(f"{name.removeprefix('cuda-')} (process {pid})" for name, pid in hung.items())
    raise NoSlot(
        f"{count} of the cards must be free of processes that hang in the driver, and SIGKILL did not end those of "
        f"{which}; reset the card (nvidia-smi --gpu-reset) or restart the machine, or name other cards in "
        f"CUDA_VISIBLE_DEVICES"
    )


def _take_one(
    names: tuple[str, ...], held: ExitStack, folder: Path, abandoned: Callable[[], bool], what: str,
    waits: Callable[[str], None],
) -> str | None:  # fmt: skip
    """The first free slot of `names`, locked until `held` closes; None if `abandoned` became true while waiting."""
    began, said = time.monotonic(), False
    while not abandoned():
        for name in names:
            file = os.fdopen(os.open(folder / name, _OPENED, 0o600), "r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            held.enter_context(file)
            file.truncate()
            file.write(f"{what} (pid {os.getpid()})")
            file.flush()
            return name
        if not said and time.monotonic() - began > _QUIET_S:
            said = True
            waits(f"{names[0]}, held by {printable((folder / names[0]).read_text(), 200)}")
        time.sleep(0.1)
    return None


def slots_folder() -> Path:
    """The folder of this machine's slots, made: in the temporary folder, or in the cache where another user was there
    first with a folder or a link of that name."""
    usual = Path(tempfile.gettempdir()) / f"autofit-slots-{os.getuid()}"
    for folder in (usual, cache_folder() / f"slots-{platform.node()}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if _is_own(folder):
            return folder
    raise PermissionError(1, "belongs to another user, or others can write there", str(folder))


def _is_own(folder: Path) -> bool:
    """Whether `folder` is a folder itself, not a link, in which the user alone can write."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
