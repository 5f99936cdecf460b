"""Several cards: this process is one rank of a fake process group, and the simulated memory is that rank's.

Use `torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)` before the block. FSDP2's
Python code runs unchanged. DDP's C++ reducer reads the memory of gradients, so a Python class with the same buckets
replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.redirect import untouched
from autofit.fakegpu.tracer import Tracer

Target = tuple[object, str, object, str]


class BucketReducer:
    """The memory of DDP's Reducer: flat buckets of the gradients' total size; with bucket views, gradients are views.

    Without bucket views, gradients need memory in addition to the buckets (torch/csrc/distributed/c10d/reducer.cpp).
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_indices: Sequence[Sequence[int]],
        bucket_size_limits: Sequence[int],
        process_group: object,
        expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool = False,
        *rest: object,
        **options: object,
    ) -> None:
        self._buckets: list[torch.Tensor] = []
        for indices in bucket_indices:
            members = [parameters[i] for i in indices]
            total = sum(p.numel() for p in members)
            bucket = torch.zeros(total, dtype=members[0].dtype, device=members[0].device)
            self._buckets.append(bucket)
            offset = 0
            for parameter in members:
                view = bucket[offset : offset + parameter.numel()].view(parameter.shape)
                offset += parameter.numel()
                if gradient_as_bucket_view:
                    parameter.register_post_accumulate_grad_hook(_into(view))

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


def _into(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not view:
            parameter.grad = view

    return hook


class SilentLogger:
    """Replaces DDP's C++ logger, which reads the C++ reducer; logs nothing."""

    def __init__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def data_parallel(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    import torch.distributed as distributed

    reason = "it reads tensors' memory from C++"
    yield distributed, "Reducer", BucketReducer, reason
    yield distributed, "Logger", SilentLogger, reason
    yield module, "_verify_param_shape_across_processes", lambda *args, **kwargs: None, reason
    yield module, "_sync_module_states", lambda *args, **kwargs: None, reason


def note_collectives(note: Callable[[str], None]) -> None:
    """Note that communication between cards is not in the time, and NCCL's buffers are not in the bytes."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        note("the time of collectives between cards and NCCL's own buffers are not counted")


def sharding_propagation(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Do not track DTensor's shape propagation, which runs operations on fakes of the full, unsharded size."""
    owner = module.ShardingPropagator
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if name in vars(owner):
            yield (
                owner,
                name,
                _untracked(gpu.tracer, untouched(vars(owner)[name])),
                "its fakes are no memory of the card",
            )


def _untracked(tracer: Tracer, original: Callable[..., object]) -> Callable[..., object]:
    def propagate(*args: object, **kwargs: object) -> object:
        before, tracer.paused = tracer.paused, True
        try:
            return original(*args, **kwargs)
        finally:
            tracer.paused = before

    return propagate
