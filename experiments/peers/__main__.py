"""Estimators on the rows: `python -m experiments.peers install`, `run` (goes on where it stopped), `table`."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import resource
import site
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.kept import OLDER, TIMED_OUT, commit, newer, patience
from experiments.peers import table
from experiments.peers.hub import hub, model
from experiments.peers.peers import PEERS, CannotSayError, Peer
from experiments.peers.rows import HERE, Row, read_rows

LIMIT_S = 400
RESULTS = HERE / "results.json"
ROOT = HERE.parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.peers", description=__doc__)
    parser.add_argument("command", choices=("install", "run", "table"))
    parser.add_argument("--peer", action="append", help="only this estimator; may be given again")
    parser.add_argument("--row", action="append", help="only this row; may be given again")
    parser.add_argument("--again", action="store_true", help="anew what has a result")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing after this time")
    arguments = parser.parse_args()
    peers = [peer for peer in PEERS if not arguments.peer or peer.name in arguments.peer]
    if arguments.command == "install":
        for peer in peers:
            install(peer)
    elif arguments.command == "run":
        rows = [row for row in drawn() if not arguments.row or row.name in arguments.row]
        run(rows, peers, again=arguments.again, until=time.monotonic() + 60 * arguments.minutes)
    table.write(json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {})


def drawn() -> list[Row]:
    """The rows by the CRC-32 of their names, so that a run that ends early has some of every set."""
    return sorted(read_rows(), key=lambda row: zlib.crc32(row.name.encode()))


def home(peer: Peer) -> Path:
    """The peer's environment, outside the repository."""
    store = Path(os.environ.get("AUTOFIT_CACHE", Path.home() / ".cache" / "autofit"))
    return store / "peers" / peer.distribution


def install(peer: Peer) -> None:
    if not peer.requirement or (home(peer) / "made").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(home(peer))], check=True)
    more = ["--no-build-isolation"] if peer.sees_torch else []
    if peer.sees_torch:
        packages = next((home(peer) / "lib").glob("python*/site-packages"))
        parents = [path for path in (*site.getsitepackages(), *sys.path) if path.endswith("site-packages")]
        (packages / "zz_parents.pth").write_text("\n".join(dict.fromkeys(parents)) + "\n", encoding="utf-8")
    pip = [str(home(peer) / "bin" / "python"), "-m", "pip", "install", "-q", *more, *peer.requirement]
    done = subprocess.run(pip, env={**os.environ, "DS_BUILD_OPS": "0"})
    if done.returncode:
        print(f"{peer.name}: pip did not install it")
        return
    (home(peer) / "made").touch()


def run(rows: list[Row], peers: list[Peer], *, again: bool, until: float) -> None:
    """Ask each peer for each row, one at a time, and keep each answer as soon as it is there."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    with hub() as address:
        for row in rows:
            for peer in peers:
                known = results.setdefault(row.name, {})
                if (peer.name in known and not again) or time.monotonic() > until:
                    continue
                if peer.requirement and not (home(peer) / "made").exists():
                    continue
                known[peer.name] = newer(known.get(peer.name), answer(row, peer, address))
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
                print(
                    row.name,
                    peer.name,
                    {key: known[peer.name].get(key) for key in ("bytes", "cannot", "error", OLDER)},
                    flush=True,
                )


def answer(row: Row, peer: Peer, address: str) -> dict[str, Any]:
    """Bytes and seconds that the peer says, or what it cannot; wall and processor seconds; version, commit and date."""
    written = {"version": version(peer), "date": datetime.date.today().isoformat(), "autofit": commit()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        told = model(row.model)
        assert told is not None
        (folder / "model" / "config.json").write_text(json.dumps(told[0]), encoding="utf-8")
        (folder / "row.json").write_text(row.to_json(), encoding="utf-8")
        here = Path.cwd()
        os.chdir(folder)
        try:
            words = peer.command(row, str(home(peer) / "bin"))
            return {**asked(words, peer, row, environment(address, folder)), **written}
        except CannotSayError as error:
            return {"cannot": str(error), **written}
        finally:
            os.chdir(here)


def environment(address: str, folder: Path) -> dict[str, str]:
    """A hub that answers, a cache of its own, and no kept server of autofit: each answer is a new process's."""
    return {
        **os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "AUTOFIT_SERVER": "0",
        "AUTOFIT_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200",
    }  # fmt: skip


def asked(words: list[str], peer: Peer, row: Row, settings: Mapping[str, str]) -> dict[str, Any]:
    before, began, limit_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), patience(LIMIT_S)
    try:
        done = subprocess.run(words, env=dict(settings), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer after {limit_s:.0f} s", TIMED_OUT: round(limit_s)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {
        "wall_s": round(time.monotonic() - began, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
    }
    try:
        said = peer.read(done.stdout, row)
    except CannotSayError as error:
        return {"cannot": str(error), **took}
    except (ValueError, KeyError, IndexError, AssertionError, StopIteration):
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        said_last = lines[-1].replace(f"{ROOT}/", "") if lines else f"exit code {done.returncode}"
        return {"error": said_last[:300], **took}
    return {"bytes": said.bytes, "step_s": said.step_s, **took}


def version(peer: Peer) -> str:
    if not peer.requirement:
        return importlib.metadata.version(peer.distribution)
    python = str(home(peer) / "bin" / "python")
    program = f"import importlib.metadata as m; print(m.version({peer.distribution!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
