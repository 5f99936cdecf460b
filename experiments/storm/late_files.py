"""Searches on Slurm from a machine that sees what the others write late, as NFS shows it; no probe may run twice.

`python -m storm.late_files FOLDER TRIALS AT_ONCE LATE_S` is such a search: a file of FOLDER that was looked for and not
found is missing for LATE_S more seconds, and a listing stays that old, but for what this process changes itself.
"""

import builtins
import io
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import search_driver
from slurm_cluster import Cluster, cluster, missing

from storm.inputs import Found
from storm.kills import END_S, TRIALS, lost

NAME = "late files"
_AT_ONCE = 3
_MOST_LATE_S = 40.0  # NFS: 60


def search_late(folder: Path, *, searches: int, dice: random.Random, until: float) -> Found:
    """`searches` on a Slurm of their own; none where Slurm lacks."""
    found = Found()
    if not searches or missing() is not None:
        return found
    with cluster(nodes=2) as slurm:
        while found.tried[NAME] < searches and time.monotonic() < until:
            home = folder / f"late-{found.tried[NAME]}"
            late_s = dice.uniform(0.5, _MOST_LATE_S)
            found.tried[NAME] += 1
            for what in _searched(home, slurm, late_s):
                found.add_wrong(f"{NAME}: {what}", (late_s, home.with_suffix(".log").read_text()[-1500:]))
            shutil.rmtree(home, ignore_errors=True)
    return found


def _searched(home: Path, slurm: Cluster, late_s: float) -> list[str]:
    command = [sys.executable, "-m", "storm.late_files", str(home), str(TRIALS), str(_AT_ONCE), str(late_s)]
    with (
        mock.patch.dict(os.environ, {"SLURM_CONF": str(slurm.conf), "LAWFUL_S": "4-9"}),
        home.with_suffix(".log").open("wb") as log,
    ):
        code = subprocess.run(command, stdout=log, stderr=log, timeout=2 * END_S, check=False).returncode
        slurm.clear()  # a job that waits for more probes is alive, and so is each probe that it had
        if code:
            return [f"the search ended with code {code}"]
        wrong = lost(home)
    repeated = [path.name for path in (home / "probes/law").glob("trial-*") if not path.name.endswith("-1")]
    return wrong + ([f"repeated though no job had ended: {', '.join(repeated)}"] if repeated else [])


class _LateFiles:
    """Puts itself in the place of Python's calls that look for files; those of SQLite are left as they are."""

    def __init__(self, folder: Path, late_s: float) -> None:
        self._folder, self._late_s = f"{folder}/probes/", late_s
        self._missing: dict[str, float] = {}  # {path: when it was looked for}
        self._listed: dict[str, tuple[float, list[Any]]] = {}  # {path: (until when, its entries)}

    def begin(self) -> None:
        for module, name in ((os, "stat"), (io, "open"), (builtins, "open"), (os, "open")):
            setattr(module, name, self._looked(getattr(module, name)))
        for name in ("mkdir", "unlink", "remove", "rename", "replace"):
            setattr(os, name, self._changed(getattr(os, name)))
        os.scandir = self._scandir(os.scandir)

    def _looked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(path: Any, *words: Any, **more: Any) -> Any:
            if not self._is_shared(path):
                return call(path, *words, **more)
            key, mode = os.fspath(path), (*words, more.get("mode"), 0)[0]
            creates = bool(mode & os.O_CREAT) if isinstance(mode, int) else str(mode)[:1] in "wax"
            if not creates and time.monotonic() - self._missing.get(key, -1e9) < self._late_s:
                raise FileNotFoundError(2, "not seen yet", key)
            try:
                answer = call(path, *words, **more)
            except FileNotFoundError:
                self._missing[key] = time.monotonic()
                raise
            if creates:
                self._forget(key)
            return answer

        return looked

    def _changed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*paths: Any, **more: Any) -> Any:
            answer = call(*paths, **more)
            for path in paths:
                if self._is_shared(path):
                    self._forget(os.fspath(path))
            return answer

        return changed

    def _scandir(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: Any = ".") -> Any:
            if not self._is_shared(path):
                return call(path)
            until, entries = self._listed.get(os.fspath(path), (0.0, []))
            if time.monotonic() >= until:
                with call(path) as found:
                    entries = list(found)
                self._listed[os.fspath(path)] = time.monotonic() + self._late_s * random.uniform(0.1, 1.0), entries
            return _Entries(entries)

        return listed

    def _forget(self, path: str) -> None:
        self._missing.pop(path, None)
        self._listed.pop(os.path.dirname(path), None)

    def _is_shared(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(self._folder)


class _Entries(list[Any]):
    """What os.scandir gives."""

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    _LateFiles(Path(sys.argv[1]), float(sys.argv[4])).begin()
    search_driver.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
