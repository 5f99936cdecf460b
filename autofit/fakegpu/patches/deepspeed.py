"""DeepSpeed on the simulated card: its own Python engine runs unchanged, with its buffers, streams and collectives.

Replaced are three things that cannot run on fakes: what it asks the driver, the C++ of its Adam on the host, and the
check of gradients for infinity, whose result would be unknown (a step that is skipped is not the worst case).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.memory import is_pinned
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
_FINITE = "values are not known, and a step skipped for infinite gradients needs less memory"
HOST_ADAM_NOTE = (
    "the seconds of DeepSpeed's Adam on the host are not counted: they depend on the processors and memory of the host"
)


def accelerator(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """DeepSpeed chooses its accelerator once a process, at import, which may have been without the card."""
    made = import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
    yield module, "ds_accelerator", made, "DeepSpeed must see the simulated card"


def process_groups(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Inside the block `module` (deepspeed.utils.groups, deepspeed.comm.comm) knows none of the groups from before."""
    for name in ("cdb", "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device", "_ALL_TO_ALL_GROUP"):
        if name in vars(module):
            empty: object = {} if name == "_ALL_TO_ALL_GROUP" else None
            yield module, name, empty, "the groups of another block have ended"


def cuda_accelerator(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    owner = module.CUDA_Accelerator
    reason = "DeepSpeed asks the driver, and fakes have no host memory"

    def available_memory(self: object, device_index: object = None) -> int:
        return gpu.spec.capacity_bytes - gpu.memory.allocator.allocated_bytes

    yield owner, "_init_pynvml", lambda self: None, reason
    yield owner, "available_memory", available_memory, reason
    yield owner, "pin_memory", lambda self, tensor, align_bytes=1: tensor.pin_memory(), reason
    yield owner, "is_pinned", lambda self, tensor: is_pinned(tensor), reason


def finite_gradients(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The check of the ZeRO optimizers of `module` for infinite gradients runs, and finds none."""
    for name in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        owner = getattr(module, name, None)
        if owner is not None:
            yield owner, "has_overflow", _finds_none(untouched(owner.has_overflow)), _FINITE


def same_on_all_ranks(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        yield module, name, lambda *args: None, "the other ranks do not exist"


def finite_norms(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    yield module, "is_invalid_grad_norm", lambda norm: False, _FINITE


def _finds_none(original: Callable[..., object]) -> Callable[..., bool]:
    def has_overflow(*args: object, **kwargs: object) -> bool:
        original(*args, **kwargs)
        return False

    return has_overflow


class HostAdam:
    """Stands in for DeepSpeed's compiled Adam on the host, which updates in place."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def load(self, *args: object, **kwargs: object) -> HostAdam:
        return self

    def create_adam(self, *args: object) -> None: ...

    def destroy_adam(self, *args: object) -> None: ...

    def adam_update(self, *args: object) -> None:
        self._gpu.note(HOST_ADAM_NOTE)


def host_adam(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    yield module, "CPUAdamBuilder", lambda *args: HostAdam(gpu), "it would compile C++, which cannot read fakes"
