"""The demo's cache: folders that child processes build once, moved into place atomically, checked at every start."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autofit.errors import ConfigError


class DemoError(ConfigError):
    """The demo's model or data could not be prepared; the message says what to change."""


_ROOT = Path(__file__).resolve().parents[2]


def run_module(module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """Stdout of `python -m module arguments`; a DemoError with its last line if it fails or takes too long."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # PYTHONSAFEPATH: a file named token.py in the working directory must not shadow the standard library's.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            output, complaints = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{module} did not finish within {timeout_s:g} s") from None
        finally:
            _end_group(child)
    if child.returncode:
        raise DemoError(f"{module} failed: {_last_line(complaints) or f'exit status {child.returncode}'}")
    return output


def _end_group(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [""])[-1]


Progress = Callable[[str], None]
Build = Callable[[Path], None]

MANIFEST_NAME = "manifest.json"
_BUILDING_PREFIX = ".building-"


def ensure_built(target: Path, build: Build, *, needed_bytes: int, progress: Progress) -> Path:
    """`target` with the files that `build` wrote, verified by checksums.

    The caller must hold the cache's lock. A damaged or half-written target is built again.
    """
    if is_intact(target):
        return target
    if target.exists():
        progress(f"{target.name} in the cache is damaged; building it again")
    _require_free_bytes(target.parent, needed_bytes)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING_PREFIX, dir=target.parent))
    try:
        build(building)
        write_manifest(building)
        building.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


@contextmanager
def locked_cache(cache_dir: Path, *, progress: Progress) -> Iterator[None]:
    """Hold the cache's lock; the system releases it if this process dies. Disk errors become a DemoError."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("another process is preparing the demo; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left_over in cache_dir.glob(f"{_BUILDING_PREFIX}*"):
                shutil.rmtree(left_over, ignore_errors=True)
            yield
    except OSError as error:
        raise DemoError(_disk_message(cache_dir, error)) from error


def is_intact(folder: Path) -> bool:
    """Whether every file in the folder's manifest exists with its size and sha256."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        return bool(manifest["files"]) and all(
            (folder / name).stat().st_size == entry["bytes"] and sha256_of(folder / name) == entry["sha256"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path) -> None:
    """Record size and sha256 of every file in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps({"files": files}, indent=1) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; an unchanged file is not written."""
    if path.is_file() and path.read_text() == text:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_free_bytes(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DemoError(
            f"no space left for the demo: {folder} has {free_bytes / 1e9:.2f} GB free and {needed_bytes / 1e9:.2f} GB "
            "are needed; free some space, or choose another cache folder"
        )


def _disk_message(cache_dir: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in the demo's cache {cache_dir}; free some space, or choose another cache folder"
    return f"the demo's cache {cache_dir} cannot be used: {error.strerror or error} ({error.filename or cache_dir})"
