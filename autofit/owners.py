"""Who but this user may change a file or a folder, and folders that nobody else may."""

import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

from autofit.errors import ConfigError

_ACL = "system.posix_acl_access"  # extended attribute of a file whose mode is not all


def other_writers(path: Path) -> str:
    """Who else may write to `path`, in words that follow its name; "" where only this user, and root, may.

    A group that has no other member counts as the user.
    """
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not (_is_own_group(found.st_gid) and not _has_acl(path)):
        return f"can be written by the group {group_name(found.st_gid)} (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def make_own(folder: Path) -> None:
    """Make `folder`, and those above it, such that only this user can enter it; one that is there is left as it is."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def private_folder(folder: Path) -> Path:
    """`folder`, made if missing; nobody but this user can enter it from now on. Another user's is left as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and mode & 0o077:
        folder.chmod(mode & ~0o077)
    return folder


def check_is_own(folder: Path, *, say: Callable[[str], None]) -> None:
    """Make `folder` for this user alone, or see that nobody else may write to it: jobs run code that lies there.

    Raises ConfigError where others may. Root is told by `say` whose it is: in a container that is often the user.
    """
    make_own(folder)
    who = other_writers(folder)
    if not who:
        return
    what = f"{folder} {who}, and the jobs of its studies load code from there"
    if os.geteuid() == 0 and folder.stat().st_uid != 0:
        say(f"{what}: that user can run code as root")
        return
    fix = "" if folder.stat().st_uid != os.geteuid() else f"run `chmod go-w {folder}`, or "
    raise ConfigError(
        f"{what}, so they could run code as you; {fix}choose another folder with --dir (a new one is yours alone)"
    )


def user_name(number: int) -> str:
    """The name of a user, or the number of one without."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def group_name(number: int) -> str:
    """The name of a group, or the number of one without."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _is_own_group(number: int) -> bool:
    """Whether the group is this user's alone: of the same name, as most systems make one for each user."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and number == user.pw_gid and set(group.gr_mem) <= {user.pw_name}


def _has_acl(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError:
        return False
