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
from dataclasses import dataclass
from pathlib import Path

from autofit.errors import EnvironmentFault, one_line, option, printable
from autofit.files import cache_folder, last_line, read_json, write_json
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.probing.fork_server import ForkServer
from autofit.probing.result import is_oom
from autofit.probing.supervise import lives, note_of

_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_QUIET_S = 5.0  # of waiting, before a message
_GATE = "several"  # held by the process that collects several slots
_HANGS = ".hangs"  # ends the name of the file that names the process which hangs on a slot's card


class NoSlot(EnvironmentFault):
    """Too few slots are left: unkillable processes hang on the others."""


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
    """True if a probe or a run of this user holds the slot at this moment."""
    try:
        with (slots_folder() / name).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_of_card(name: str) -> bool:
    """True if a slot is a CUDA card."""
    return name.startswith("cuda-")


def set_aside(names: tuple[str, ...], pid: int) -> None:
    """Withhold these cards' slots while the process `pid` lives: SIGKILL did not end it.

    A process on the CPU waits for a file system that is away; others may use the CPU meanwhile.
    """
    for name in filter(is_of_card, names):
        write_json(slots_folder() / f"{name}{_HANGS}", note_of(pid))


def _usable(names: tuple[str, ...], count: int, folder: Path) -> tuple[str, ...]:
    """The subset of `names` that may be taken. Raises NoSlot for fewer than `count`."""
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
    """True if `folder` is a folder itself, rather than a link, in which the user alone can write."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


# -- the start of CUDA, and whether the cards are free ----------------------------------------------------------------
# CUDA is asked in a child of the fork server, which has torch imported and starts no CUDA itself.

_START_S = 120.0  # the first context of a machine without a persistence daemon takes tens of seconds
# The oldest driver for each CUDA, by its minor version compatibility (CUDA Toolkit 13.0 release notes, table 2).
_OLDEST_DRIVER = {13: 580, 12: 525, 11: 450}
_ELSEWHERE = f"or simulate a card ({option('gpu', 'NAME')}), or train on the CPU ({option('device', 'cpu')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStart:
    """Outcome of starting CUDA: the versions of torch and of the CUDA it is built for, and the error if it failed."""

    torch: str = ""  # "": it could not be asked
    cuda: str | None = None  # None: torch is built for the CPU
    error: str = ""  # "": it started

    @property
    def major(self) -> int:
        """Major version of the CUDA that torch is built for; 0 for a CPU build."""
        return _first_number(self.cuda or "")


def check_cuda(server: ForkServer, folder: Path) -> Look:
    """The visible cards, on which CUDA programs of this environment can compute, and alone.

    Raises EnvironmentFault where CUDA does not start, with what to install, and where other programs compute on a card:
    bytes and seconds that are measured beside them are not the recipe's.
    """
    look = look_at_cards()
    if held := held_cards(look) and held_cards(look := look_at_cards()):  # a search of this user may just have ended
        raise EnvironmentFault(
            f"{'; '.join(held)}; end these programs, or name other cards in CUDA_VISIBLE_DEVICES, {_ELSEWHERE}"
        )
    if problem := start_problem(look, cuda_start(server, folder, look.cards)):
        raise EnvironmentFault(f"{problem}, {_ELSEWHERE}")
    return look


def held_cards(look: Look) -> tuple[str, ...]:
    """A line for each card that others hold. For one on which this user's own search probes, the next one waits."""
    free = [gpu.uuid for gpu in look.cards if not is_taken(f"cuda-{gpu.uuid}")]
    return tuple(line for line in look.held if any(uuid in line for uuid in free))


def cuda_start(server: ForkServer, folder: Path, cards: tuple[Gpu, ...]) -> CudaStart:
    """Outcome of starting CUDA on the first of `cards`, in a child of `server`."""
    if not cards:
        return CudaStart(error="no card works")
    folder.mkdir(parents=True, exist_ok=True)
    answer, log = folder / f"cuda-start-{os.getpid()}.json", folder / f"cuda-start-{os.getpid()}.log"
    try:
        ending = server.call(
            {"entry": "autofit.probing.slots:run", "argument": str(answer.resolve()), "cwd": str(Path.cwd()),
             "log": str(log), "env": {"CUDA_VISIBLE_DEVICES": cards[0].uuid}, "deadline_s": _START_S}
        )  # fmt: skip
        told = read_json(answer)
        if told is None:
            late = f"no answer within {_START_S:.0f} s"
            said = one_line(last_line(log), 300) or f"exit {ending.exit_code}"
            return CudaStart(error=late if ending.deadline_passed else said)
        cuda = told["cuda"]
        return CudaStart(torch=str(told["torch"]), cuda=None if cuda is None else str(cuda), error=str(told["error"]))
    finally:
        for path in (answer, log):
            path.unlink(missing_ok=True)


def run(answer: str) -> int:
    """In the child: write the versions of torch and CUDA, and the error of CUDA's start ("" if it starts)."""
    import torch

    error = ""
    try:
        torch.zeros(1, device="cuda").item()
    except Exception as problem:
        error = "" if is_oom(problem) else one_line(str(problem), 300)  # a full card has started
    write_json(Path(answer), {"torch": torch.__version__, "cuda": torch.version.cuda, "error": error})
    return 0


def start_problem(look: Look, start: CudaStart) -> str:
    """Reason why CUDA fails to start on the cards of `look`, and its remedy; "" if it starts."""
    if not start.error:
        return ""
    if not look.cards:
        return "; ".join((*look.faults, *look.refused)) or start.error
    cards = ", ".join(dict.fromkeys(gpu.name for gpu in look.cards))
    driver = _first_number(look.driver)
    build = next((cuda for cuda, oldest in _OLDEST_DRIVER.items() if driver >= oldest), None)
    install = f"install a torch that is built for CUDA {build} (pytorch.org/get-started)" if build else ""
    versions = f"{cards} (driver {look.driver or 'unknown'}, torch {start.torch or 'unknown'}"
    if start.torch and start.cuda is None:
        return f"{versions}): this torch is built for the CPU; {install or 'update the driver'}"
    words = f"CUDA does not start on {versions} for CUDA {start.cuda or 'unknown'})"
    oldest = _OLDEST_DRIVER.get(start.major)
    if oldest is not None and 0 < driver < oldest:
        return f"{words}: it needs driver {oldest} or newer; update the driver{f', or {install}' if install else ''}"
    if refused := _refused(look.cards):
        return f"{words}: no permission to open {refused}; ask its administrator (often for the group video or render)"
    return f"{words}: {start.error}"


def _first_number(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _refused(cards: tuple[Gpu, ...]) -> str:
    """The first device file closed to this user, if there is one, else ""."""
    files = ["/dev/nvidiactl", "/dev/nvidia-uvm", *(f"/dev/nvidia{gpu.index}" for gpu in cards)]
    return next((file for file in files if os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK)), "")
