"""Place of the kept server of imported libraries, and whether this process may use it or leave one behind.

There is one for each user, Python and environment: any variable, limit, priority, capability or namespace that differs
makes another place, but for variables that no library reads. The folder is the user's alone, and both ends ask the
kernel who the other is.
"""

import contextlib
import hashlib
import json
import os
import resource
import socket
import stat
import struct
import sys
import tempfile
import time
from pathlib import Path

_OFF = "AUTOFIT_SERVER"  # 0: no server is used or left behind; 1: one is, in CI and by plain scripts too
# Variables that a shell, a terminal or a session sets, and that nothing which is imported reads.
_OF_TERMINALS = {
    "_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "DISPLAY",
    "WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "PS1", "PS2", "PROMPT", "PROMPT_COMMAND",
    "LS_COLORS", "MAIL", "HISTFILE", "HISTSIZE", "HISTCONTROL", "PAGER", "LESS", "EDITOR", "VISUAL", "AUTOFIT_STORAGE",
    "AUTOFIT_SERVER", "AUTOFIT_PARENT", "PYTEST_CURRENT_TEST", "INVOCATION_ID", "JOURNAL_STREAM",
}  # fmt: skip
_FAMILIES = ("SSH_", "TMUX", "VSCODE_", "TERM_", "XDG_SESSION", "GNOME_", "KITTY_", "WEZTERM_", "ITERM_", "WT_", "JPY_")
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_OF_STATUS = ("Cap", "NoNewPrivs", "Seccomp")  # lines of /proc/self/status: what this process may do
_MOST_OF_A_PATH = 107  # characters of a socket's path
_PRIVATE = 0o700
_YOUNG_S = 60.0  # a socket that is being made has another name

_asked = False  # by the command line, or a notebook


def ask_for_one() -> None:
    """Let this process use the kept server, and leave its own fork server behind."""
    global _asked
    _asked = True


def is_asked_for() -> bool:
    """True if this process uses and leaves one: a command, a notebook, or a script of a user who set it to 1.

    False in processes that these start, and where `is_allowed` is False.
    """
    is_script = getattr(sys.modules["__main__"], "__spec__", None) is None  # ours, and jobs, are `python -m MODULE`
    by_script = os.environ.get(_OFF) == "1" and is_script
    return (_asked or "ipykernel" in sys.modules or by_script) and is_allowed()


def is_allowed() -> bool:
    """True if one may stay here: False with AUTOFIT_SERVER=0, and by default in CI and jobs of Slurm."""
    said = os.environ.get(_OFF)
    if said is not None:
        return said not in ("0", "")
    return not any(os.environ.get(name) for name in ("CI", "SLURM_JOB_ID"))


def socket_path() -> Path | None:
    """The socket of the server for this Python and environment; None if this user lacks a folder of its own."""
    folder = own_folder()
    if folder is None:
        return None
    flags = [sys.flags.optimize, sys.flags.utf8_mode, sys.flags.dev_mode]
    python = _hash([sys.prefix, sys.version, flags, str(Path(__file__).parent)])
    try:
        path = folder / f"{python}-{_hash(_environment())}"
    except OSError:  # no /proc, or a part of it
        return None
    return path if len(str(path)) < _MOST_OF_A_PATH - len(".new") else None


def forget_the_terminal() -> None:
    """Take the variables of the terminal that a server was started from out of its environment."""
    for name in [name for name in os.environ if not _matters(name)]:
        del os.environ[name]


def own_folder() -> Path | None:
    """The folder of this user's servers, made if missing; None if another user made it, or may enter it."""
    folder = Path(tempfile.gettempdir()) / f"autofit-servers-{os.getuid()}"
    try:
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    private = stat.S_IMODE(found.st_mode) == _PRIVATE and found.st_uid == os.getuid()
    return folder if private and stat.S_ISDIR(found.st_mode) else None


def connected(path: Path, *, wait_s: float = 2.0) -> socket.socket | None:
    """A connection to the server at `path`, if this user runs one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(wait_s)
    try:
        connection.connect(str(path))
        if peer(connection)[1] == os.getuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None


def sweep() -> list[Path]:
    """The sockets of this user's servers, of every Python and environment; those of killed servers are deleted."""
    folder = own_folder()
    found = []
    for path in sorted(folder.iterdir()) if folder is not None else ():
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(2.0)
                connection.connect(str(path))
        except ConnectionRefusedError:  # it is bound before it listens, for an instant
            with contextlib.suppress(OSError):  # a folder
                if not path.suffix or time.time() - path.lstat().st_mtime > _YOUNG_S:
                    path.unlink()
            continue
        except OSError:
            continue
        found.append(path)
    return found


def peer(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as the kernel has it."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _environment() -> list[object]:
    """Inherited properties of a process, as far as they may matter to a library or to who pays for it."""
    variables = {name: value for name, value in os.environ.items() if _matters(name)}
    limits = [resource.getrlimit(getattr(resource, name)) for name in _LIMITS]
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in sorted(os.listdir("/proc/self/ns"))]
    group, status = (Path(f"/proc/self/{name}").read_text(encoding="utf-8") for name in ("cgroup", "status"))
    may = [line for line in status.splitlines() if line.startswith(_OF_STATUS)]
    turn = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))]
    return [variables, limits, spaces, group, may, umask(), turn, os.getgroups(), os.getgid()]


def umask() -> int:
    """The mask of the files that this process makes."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _matters(name: str) -> bool:
    return name not in _OF_TERMINALS and not name.startswith(_FAMILIES)


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
