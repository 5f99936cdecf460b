"""Whether this machine can compile what a training needs while it runs. Imports no torch."""

import os
import shutil
from pathlib import Path


def compiling_faults() -> str:
    """What this machine cannot compile, in words; "" where it has a C and a C++ compiler and no build was cut off.

    Triton builds its driver with CC, gcc or clang at the first of its kernels (triton/runtime/build.py), and DeepSpeed
    its optimizer of the host with CXX or c++ (torch.utils.cpp_extension).
    """
    faults = []
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        faults.append(
            "no C compiler (gcc, clang) is on the PATH, so kernels of Triton (liger, torch.compile, vLLM) fail"
        )
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        faults.append("no C++ compiler (c++) is on the PATH, so DeepSpeed's offload of the optimizer fails")
    faults += [
        f"torch waits without end for the build that holds {lock}; where none is running, it was killed: delete it"
        for lock in _locks_of_builds()
    ]
    return "; ".join(faults)


def _locks_of_builds() -> list[Path]:
    """Locks of builds of torch's C++ extensions: a build that was killed leaves its own (torch.utils.file_baton)."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return sorted(Path(named).glob("*/lock"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return sorted((cache / "torch_extensions").glob("*/*/lock"))
