"""Fake NVIDIA drivers: `libnvidia-ml.so.1` and `libcuda.so.1`, compiled from fake_driver/, and the cards they list."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "fake_driver"
LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}
FAKE_GPU_UUID = "GPU-00000000-0000-0000-0000-000000000000"  # of the simulated card in torch's properties


def compiled(folder: Path) -> Path:
    """The folder with both libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        assert "CI" not in os.environ, "CI installs gcc"
        pytest.skip("the fake driver is compiled, and there is no C compiler")
    for source, library in LIBRARIES.items():
        command = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", "-o", str(folder / library)]
        subprocess.run([*command, str(SOURCES / source)], check=True)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A line of the fake driver's cards; `kind` is as in fake_driver/cards.h."""

    name: str = "NVIDIA H200"
    uuid: str = FAKE_GPU_UUID
    kind: str = "card"
    total_mib: int = 143771
    reserved_mib: int = 615
    used_mib: int = 600
    capability: tuple[int, int] = (9, 0)

    @property
    def line(self) -> str:
        sizes = (self.total_mib, self.reserved_mib, self.used_mib, *self.capability)
        return ";".join([self.kind, self.name, self.uuid, *map(str, sizes)]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A fake driver: its libraries, and the file with its cards."""

    libraries: Path
    cards: Path

    def has(self, *cards: Card) -> None:
        self.cards.write_text("".join(card.line for card in cards))

    def env(self, **more: str) -> dict[str, str]:
        """The environment of a process on this machine with this driver."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        return kept | {"LD_LIBRARY_PATH": str(self.libraries), "FAKE_CARDS": str(self.cards), **more}

    def load(self) -> None:
        """Make this process, a child of a test, one with this driver: the loader finds a loaded library by name."""
        os.environ["FAKE_CARDS"] = str(self.cards)
        for library in LIBRARIES.values():
            ctypes.CDLL(str(self.libraries / library), mode=ctypes.RTLD_GLOBAL)

    def told(self, expression: str, **env: str) -> object:
        """The value of a Python expression over `autofit.hardware` in a process with this driver."""
        done = self._ran(expression, env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fails(self, expression: str, **env: str) -> str:
        """The last line of the error that the expression raises."""
        done = self._ran(expression, env)
        assert done.returncode == 1, done.stdout
        return done.stderr.splitlines()[-1]

    def _ran(self, expression: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        names = "hardware, health, nvml"
        code = f"import json, sys; from autofit.hardware import {names}\nprint(json.dumps({expression}))"
        return subprocess.run([sys.executable, "-c", code], env=self.env(**env), capture_output=True, text=True)
