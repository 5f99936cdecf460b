"""Compile the null GPU beside the CUDA build of torch that this Python has, and the environment that loads it."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
DRIVER = HERE.parent / "fake_driver"
# Library: its sources, and how the names begin that others need of it.
LIBRARIES = {
    "libcudart.so.13": (("process.cpp", "memory.cpp", "device.cpp", "kernels.cpp"), ("cuda", "__cuda")),
    "libcublas.so.13": (("blas.c",), ("cublas",)),
    "libcublasLt.so.13": (("blas.c",), ("cublasLt",)),
    "libcusolver.so.12": ((), ("cusolver",)),
    "libnccl.so.2": (("nccl.cpp",), ("nccl",)),
}
OF_DRIVER = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}
HEADERS = {"cu13/include": ("cuda_runtime_api.h", "crt/host_defines.h"), "nccl/include": ("nccl.h",)}
_UNVERSIONED = "libnccl.so.2"


class CannotBuild(Exception):
    """What is missing here, and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NullGpu:
    """The compiled libraries, and a folder for the cards and what processes hold of them."""

    libraries: Path
    home: Path

    def has(self, lines: Iterable[str]) -> None:
        """Give the machine these cards, each a line as fake_driver/cards.h reads it."""
        (self.home / "held").mkdir(parents=True, exist_ok=True)
        (self.home / "cards").write_text("".join(lines))

    def env(self, *, values: bool = False, small_values: bool = False) -> dict[str, str]:
        """What a process's environment has besides, to see the cards; with `values` its tensors have theirs.

        With `small_values` what is copied, or sent between ranks, in few bytes has its values, as DDP needs.
        """
        loaded = os.pathsep.join(str(self.libraries / name) for name in LIBRARIES)
        path = os.pathsep.join(filter(None, [str(HERE / "site"), os.environ.get("PYTHONPATH")]))
        own = {"NULL_GPU_VALUES": "1", "TORCHDYNAMO_DISABLE": "1"} if values else {}
        own |= {"NULL_GPU_VALUES": "small"} if small_values else {}
        return {
            **own,
            "LD_PRELOAD": loaded, "LD_LIBRARY_PATH": str(self.libraries), "FAKE_CARDS": str(self.home / "cards"),
            "FAKE_HELD": str(self.home / "held"), "FAKE_CUDA_ORDER": "visible", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": path, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN does not start here
        }  # fmt: skip


def h100s(count: int, *, used_mib: Mapping[int, int] | None = None) -> list[str]:
    """The lines of as many H100s of 80 GB; `used_mib` is what others hold of a card (4 MiB by itself)."""
    used = used_mib or {}
    return [
        f"card;NVIDIA H100 80GB HBM3;GPU-{i:08x}-1111-1111-1111-111111111111;81559;530;{used.get(i, 4)};9;0\n"
        for i in range(count)
    ]


def missing() -> str | None:
    """Why the null GPU cannot be built for this Python; None if it can. Imports no torch."""
    torch = _package("torch")
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        return "needs the CUDA build of torch, and this is another: nox -s cuda"
    if not _headers():
        return "needs CUDA's headers: pip install nvidia-cuda-runtime nvidia-cuda-crt==13.0.88"
    programs = [name for name in ("gcc", "g++", "nm") if shutil.which(name) is None]
    return f"is compiled, and there is no {' and no '.join(programs)}: apt-get install g++" if programs else None


def build(folder: Path) -> Path:
    """Compile every library into `folder`, which is returned. Raises CannotBuild."""
    reason = missing()
    if reason is not None:
        raise CannotBuild(f"the null GPU {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    for source, library in OF_DRIVER.items():
        _run("gcc", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, DRIVER / source)
    needed = _needed()
    for library, (sources, prefixes) in LIBRARIES.items():
        objects = [_object(HERE / source, folder) for source in sources]
        rest = folder / f"{library}.rest.c"
        names = {name for name, of in needed if of == library or (not of and name.startswith(prefixes))}
        rest.write_text(_doing_nothing(names - _defined(objects)))
        _link(library, [*objects, _object(rest, folder)], folder)
    return folder


def _package(name: str) -> Path | None:
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _headers() -> list[Path]:
    """The folders of CUDA's and NCCL's headers; none where one is missing."""
    spec = find_spec("nvidia")
    for place in () if spec is None else spec.submodule_search_locations or ():
        if all((Path(place) / folder / name).exists() for folder, names in HEADERS.items() for name in names):
            return [Path(place) / folder for folder in HEADERS]
    return []


def _needed() -> set[tuple[str, str]]:
    """(function, the library that it is asked of; "" without one) of torch and bitsandbytes."""
    torch, bitsandbytes = _package("torch"), _package("bitsandbytes")
    assert torch is not None
    of_torch = ("torch_cuda", "torch_cuda_linalg", "c10_cuda", "torch_python", "torch_nvshmem")
    users = [torch / "lib" / f"lib{name}.so" for name in of_torch]
    users += [] if bitsandbytes is None else bitsandbytes.glob("libbitsandbytes_cuda130.so")
    told = _run("nm", "-D", "--undefined-only", *(path for path in users if path.exists()))
    symbols = [line.split()[-1].partition("@") for line in told.splitlines() if " U " in line]
    return {(name, library.lstrip("@")) for name, _, library in symbols}


def _defined(objects: Sequence[Path]) -> set[str]:
    told = _run("nm", "--defined-only", *objects) if objects else ""
    return {line.split()[-1] for line in told.splitlines() if " T " in line}


def _doing_nothing(names: Iterable[str]) -> str:
    """Functions that answer success."""
    return "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names))


def _object(source: Path, folder: Path) -> Path:
    found = folder / f"{source.name}.o"
    compiler = "g++" if source.suffix == ".cpp" else "gcc"
    places = [f"-I{place}" for place in (DRIVER, *_headers())]
    _run(compiler, "-O1", "-w", "-fPIC", *places, "-c", source, "-o", found)
    return found


def _link(library: str, objects: Iterable[Path], folder: Path) -> None:
    flags = [f"-Wl,-soname,{library}", "-ldl"]
    if library != _UNVERSIONED:  # torch asks for `cudaMalloc@libcudart.so.13`
        names = folder / f"{library}.map"
        names.write_text(f"{library} {{ global: *; }};\n")
        flags.append(f"-Wl,--version-script={names}")
    _run("g++", "-shared", "-fPIC", "-o", folder / library, *objects, *flags)


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout
