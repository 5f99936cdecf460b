"""Several cards: this process is one rank of a fake process group, and holds that rank's memory.

Use `torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)` before the block. FSDP2's
Python code runs as it is. DDP's C++ reducer reads gradients' memory, so a stand-in holds its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.tracer import Tracer

Target = tuple[object, str, object, str]


class BucketReducer:
    """The memory of DDP's Reducer: flat buckets as large as the gradients; as views, they are the gradients.

    A gradient that is not a bucket view lives beside its bucket (torch/csrc/distributed/c10d/reducer.cpp).
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
    """DDP's C++ logger reads its reducer; nothing is logged here."""

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
    """The clock knows one card: what crosses between cards is not in its time, nor NCCL's own buffers in its bytes."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        note("the time of collectives between cards and NCCL's own buffers are not counted")


def sharding_propagation(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """DTensor finds output shapes by running operations on fakes of the whole, unsharded size: not memory."""
    owner = module.ShardingPropagator
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if name in vars(owner):
            yield owner, name, _untracked(gpu.tracer, vars(owner)[name]), "its fakes are no memory of the card"


def _untracked(tracer: Tracer, original: Callable[..., object]) -> Callable[..., object]:
    def propagate(*args: object, **kwargs: object) -> object:
        before, tracer.paused = tracer.paused, True
        try:
            return original(*args, **kwargs)
        finally:
            tracer.paused = before

    return propagate
