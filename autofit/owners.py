"""Who but this user may change a file or a folder, and folders that nobody else may."""

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

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


def close_to_others(folder: Path, *, up_to: str, enter: bool = True) -> None:
    """Let nobody else write to `folder` of this user's, nor to those above it, up to the one called `up_to`.

    With `enter` False nobody else can enter `folder` itself. A folder of another user's is left as it is.
    """
    levels = [folder, *folder.parents]
    names = [level.name for level in levels]
    for level in levels[: names.index(up_to) + 1 if up_to in names else 1]:
        keeps = 0o777 & ~(0o077 if level == folder and not enter else 0o022)
        with contextlib.suppress(OSError):
            found = level.stat()
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid == os.geteuid() and mode & ~(keeps | 0o7000):
                level.chmod(mode & (keeps | 0o7000))


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
