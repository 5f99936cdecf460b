"""Whether an error is a failed allocation. Types say it where a library has one; the others say it in words only.

The words are all here, each with its source. They name memory of the card, or an allocation by cuBLAS or cuDNN, which
keep theirs on the card. Words that may mean something else (CUBLAS_STATUS_NOT_INITIALIZED) are not among them.
Importing it loads no torch.
"""

from pathlib import Path

_CUDA_ERROR_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation in CUDA's driver_types.h
_WORDS = (
    "DefaultCPUAllocator",  # torch, c10/core/impl/alloc_cpu.cpp: a RuntimeError
    "CUDA error: out of memory",  # torch, outside of its allocator: a context, a module's code, an event
    "CUDA driver error: out of memory",  # torch, C10_CUDA_DRIVER_CHECK: expandable segments
    "CUBLAS_STATUS_ALLOC_FAILED",  # torch, aten/src/ATen/cuda/CublasHandlePool.cpp: cublasCreate
    "CUDNN_STATUS_ALLOC_FAILED",  # cuDNN up to 8
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # cuDNN 9, cudnn_graph.h
    "Triton Error [CUDA]: out of memory",  # Triton, third_party/nvidia/backend/driver.c: a RuntimeError
    "No available memory for the cache blocks",  # vLLM, a ValueError (vllm-project/vllm#2248)
    "less than desired GPU memory utilization",  # vLLM, a ValueError: its share is not free when it starts
    "larger than the available KV cache memory",  # vLLM, the same for one sequence of the longest length
    "Cuda failure 2 'out of memory'",  # NCCL's last error, in torch's DistBackendError
)
# torch, c10/cuda/CUDACachingAllocator.cpp, reportProcessMemoryInfo: an allocation has failed, and for its message torch
# asserts that NVML lists the card's processes. A MIG slice and a container without rights refuse that, so a
# RuntimeError comes instead of the OutOfMemoryError. PeerToPeerAccess.cpp has the same assertion about something else.
_UNREPORTED = ("NVML_SUCCESS == ", "INTERNAL ASSERT FAILED", "CUDACachingAllocator.cpp")
# bitsandbytes, csrc: CUDA_CHECK_RETURN prints this and calls exit(1) (bitsandbytes-foundation/bitsandbytes#464).
_LAST_WORDS = b"Error out of memory at line"
_END_BYTES = 4000


def is_oom(error: BaseException) -> bool:
    """Whether `error`, or the error that led to it, is a failed allocation on the CPU or a CUDA card."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if _is_oom(at):
            return True
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False


def exited_for_oom(log_path: Path) -> bool:
    """Whether a process that exited without an exception said at the end of its log that an allocation failed."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log_path.stat().st_size - _END_BYTES))
            return _LAST_WORDS in log.read()
    except OSError:
        return False


def _is_oom(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) is not None:
        return bool(error.error_code == _CUDA_ERROR_MEMORY_ALLOCATION)  # type: ignore[attr-defined]
    if not isinstance(error, RuntimeError | ValueError):
        return False
    text = str(error)
    return any(words in text for words in _WORDS) or all(words in text for words in _UNREPORTED)
