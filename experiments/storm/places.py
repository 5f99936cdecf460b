"""Where and who: whole commands on one study from every folder, as every user, under every umask. Needs root.

A case is a child of this process that becomes the user and runs the command; a second is enough for about ten.
"""

import functools
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from search_driver import main as drive

from autofit.cli import main
from autofit.files import write_json
from storm.inputs import Found, quick_folder

NAME = "places and users"
_GROUP, _OTHERS = 34600, 34601
_USERS = {"owner": (34568, _GROUP), "member": (34569, _GROUP), "stranger": (34570, _OTHERS), "root": (0, 0)}
_COMMANDS = (
    ("studies",), ("report", "--json"), ("monitor", "--once"), ("jobs",), ("promote", "99"), ("sync",),
    ("verify", "99"), ("ui", "--port", "70000"), ("init", "grpo"), ("explain", "gone.yaml"), ("completion", "bash"),
    ("server", "status"), ("search", "gone.yaml", "--gpu", "t4"), ("run", "gone.yaml", "--plan"),
    ("check", "gone.yaml", "--gpu", "t4"), ("estimate", "gone.yaml", "--gpu", "t4"), ("advise", "gone.yaml"),
    ("doctor", "gone.yaml"), ("web", "--port", "70000"),
)  # fmt: skip
_OF_STUDIES = ("studies", "report", "monitor", "jobs", "promote", "sync", "verify", "ui")  # commands that need a study
_READ = ("studies", "report", "monitor", "jobs")  # of them those that write nothing
_AT = ("project", "above", "elsewhere")  # the working directory
_STATES = ("as made", "moved", "copied", "shown to all", "group writes", "planted storage", "read-only parent", "clone")
_END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and from where and by whom it is called."""

    command: tuple[str, ...]
    at: str
    relative: bool
    umask: int
    who: str
    state: str  # of the study's folder

    @property
    def may_enter(self) -> bool:
        return self.who in ("owner", "root") or self.state in ("shown to all", "group writes", "clone")


def cases() -> list[Case]:
    """All of them."""
    every = itertools.product(_COMMANDS, _AT, (True, False), (0o002, 0o022, 0o077), _USERS, _STATES)
    return [Case(command=c, at=a, relative=r, umask=u, who=w, state=s) for c, a, r, u, w, s in every]


def call_from_places(
    folder: Path, *, calls: int, dice: random.Random, until: float, first: int = 0, without: tuple[str, ...] = ()
) -> Found:
    """`calls` cases from `first` on, each user and state as often as any other; `without` these commands."""
    found = Found()
    if not calls:
        return found
    if not (folder / "study").exists():  # a storm of many parts makes it once
        drive(folder / "study", 2, 0)
    _load_all(folder, without)
    every = [case for case in cases() if case.command[0] not in without]
    dice.shuffle(every)
    every.sort(key=_turns(every).__getitem__)
    for case in every[first : first + calls]:
        if time.monotonic() > until:
            break
        with _project(folder / "study", case) as (home, studies):
            began = time.monotonic()
            before = _listed(home)
            code, said = _called(case, home, studies)
            found.tried[NAME] += 1
            found.refused += code == 2
            found.slowest_s = max(found.slowest_s, time.monotonic() - began)
            for what in _wrong(case, code, said, before, _listed(home)):
                found.add_wrong(what, (case, code, said[-1500:]))
    return found


@functools.cache  # once a process
def _load_all(folder: Path, without: tuple[str, ...]) -> None:
    """Import what the commands need: another user may not enter the folder of this Python."""
    shutil.rmtree(folder / "warm", ignore_errors=True)  # of another process: a study with a mirror imports less
    shutil.copytree(folder / "study", folder / "warm")
    for command in _COMMANDS:
        if command[0] not in without:
            with chdir(folder / "warm"):
                main([*command, "--dir", str(folder / "warm")])


def _turns(every: list[Case]) -> dict[Case, int]:
    """{case: how many cases of its command, user and state come before it}, so that the first ones differ most."""
    seen: dict[tuple[object, ...], int] = {}
    turns = {}
    for case in every:
        key = (case.who, case.state)
        turns[case] = seen[key] = seen.get(key, -1) + 1
    return turns


@contextmanager
def _project(study: Path, case: Case) -> Iterator[tuple[Path, Path]]:
    """(a folder of projects, the studies in one of them), with the modes of a group that shares its projects."""
    home = Path(tempfile.mkdtemp(prefix="places-", dir=quick_folder()))
    try:
        home.chmod(0o755)
        project, elsewhere = home / "project", home / "elsewhere"
        for place in (project, elsewhere):
            place.mkdir()
        studies = project / "studies"
        shutil.copytree(study, studies)
        if case.state in ("moved", "copied"):
            shutil.copytree(studies, project / "other")
            if case.state == "moved":
                shutil.rmtree(studies)
            studies = project / "other"
        if case.state == "planted storage":
            write_json(studies / "storage.json", {"storage": "postgresql://me@127.0.0.1:9/stolen"})
        for path in (project, *project.rglob("*")):
            os.chown(path, *_USERS["owner"])
        if case.state == "planted storage":
            os.chown(studies / "storage.json", *_USERS["member"])
            (studies / "storage.json").chmod(0o664)
        project.chmod(0o555 if case.state == "read-only parent" else 0o2775)
        studies.chmod({"shown to all": 0o755, "group writes": 0o2777, "clone": 0o755}.get(case.state, 0o700))
        if case.state == "clone":  # whoever calls has made it from somebody's folder
            for path in (studies, *studies.rglob("*")):
                os.chown(path, *_USERS[case.who])
        if case.state in ("shown to all", "group writes"):
            (studies / "studies.db").chmod(0o644)
        yield home, studies
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _called(case: Case, home: Path, studies: Path) -> tuple[int, str]:
    """(exit code, output) of the command, in a child that is the user; code -1 where it did not end."""
    at = {"project": studies.parent, "above": home, "elsewhere": home / "elsewhere"}[case.at]
    given = os.path.relpath(studies, at) if case.relative else str(studies)
    with tempfile.TemporaryFile() as told:
        pid = os.fork()
        if pid == 0:
            _become(case, at, told.fileno())
            code = 99
            try:
                code = main([*case.command, "--dir", given])
            except BaseException as error:
                print(f"Traceback {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)
        deadline = time.monotonic() + _END_S
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                return -1, ""
            time.sleep(0.01)
        told.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), told.read().decode(errors="replace")


def _become(case: Case, at: Path, out: int) -> None:
    user, group = _USERS[case.who]
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    tempfile.tempdir = "/tmp"
    os.environ |= {"AUTOFIT_STORAGE": "", "AUTOFIT_CACHE": f"/tmp/places-cache-{user}", "PGCONNECT_TIMEOUT": "2"}
    os.umask(case.umask)
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.chdir(at)


def _listed(home: Path) -> set[str]:
    """All that is there but what lies within a folder of studies."""
    return {str(path.relative_to(home)) for path in (*home.glob("*"), *home.glob("*/*"))}


def _wrong(case: Case, code: int, said: str, before: set[str], after: set[str]) -> list[str]:
    """What must not be, of how the command ended."""
    errors = [line for line in said.splitlines() if line.startswith("autofit: ")]
    verb = case.command[0]
    refuses = verb == "promote" and case.who != "root" and (case.state == "group writes" or case.who != "owner")
    of_studies, new = (
        verb in _OF_STUDIES,
        {path for path in after - before if verb != "init" or "grpo.yaml" not in path},
    )
    not_followed = (
        case.state == "planted storage" and case.who in ("owner", "root")
        and of_studies and verb not in ("monitor", "jobs", "ui")
    )  # fmt: skip
    reads = verb in _READ and case.may_enter and not not_followed
    checks = {
        "it did not end": code == -1,
        "a traceback": "Traceback" in said,
        f"exit code {code}": code not in (0, 1, 2, -1),
        "an error that is not one line": (code == 2) != (len(errors) == 1),
        "a file beside the studies": bool(new or before - after),
        "a user who may read it was refused": reads and code != 0,
        "a user who may not enter it got an answer": of_studies and not case.may_enter and code != 2,
        "code of others could have run": refuses and code != 2,
        "a planted storage.json was followed": not_followed and "is not followed" not in said,
    }
    return [what for what, wrong in checks.items() if wrong]
