"""Whether this machine has the compilers that a training needs while it runs. Imports no torch."""

import os
import shutil


def missing_compilers() -> str:
    """What this machine cannot compile, in words; "" where it has a C and a C++ compiler.

    Triton builds its driver with CC, gcc or clang at the first of its kernels (triton/runtime/build.py), and DeepSpeed
    its optimizer of the host with CXX or c++ (torch.utils.cpp_extension).
    """
    lacks = []
    if "CC" not in os.environ and not any(map(shutil.which, ("gcc", "clang"))):
        lacks.append(
            "no C compiler (gcc, clang) is on the PATH, so kernels of Triton (liger, torch.compile, vLLM) fail"
        )
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        lacks.append("no C++ compiler (c++) is on the PATH, so DeepSpeed's offload of the optimizer fails")
    return "; ".join(lacks)
