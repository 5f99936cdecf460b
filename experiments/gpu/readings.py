"""What the driver and torch say of the card at one moment: every figure that someone may call "memory used"."""

from gpu.folder import Row


def reading(device: str) -> Row | None:
    """Bytes by NVML (both versions), by CUDA and by torch's allocator; None where there is no card."""
    if device != "cuda":
        return None
    import pynvml
    import torch

    from autofit.probing.memory import own_handle

    torch.cuda.synchronize()
    pynvml.nvmlInit()
    try:
        handle = own_handle(pynvml)
        older, newer = pynvml.nvmlDeviceGetMemoryInfo(handle), _version_2(pynvml, handle)
    finally:
        pynvml.nvmlShutdown()
    free, total = torch.cuda.mem_get_info()
    return {
        "nvml_v1_used": int(older.used), "nvml_v1_total": int(older.total), **newer, "cuda_used": total - free,
        "cuda_total": total, "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated(),
    }  # fmt: skip


def _version_2(pynvml: object, handle: object) -> Row:
    try:
        found = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)  # type: ignore[attr-defined]
    except pynvml.NVMLError:  # type: ignore[attr-defined]
        return {}
    return {"nvml_v2_used": int(found.used), "nvml_v2_reserved": int(found.reserved)}
