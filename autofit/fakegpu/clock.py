"""The simulated clock: a host that launches kernels, and a GPU that runs them in order (roofline per kernel).

A kernel's time is the maximum of its FLOPs at the card's peak rate, its bytes at the card's bandwidth, and the minimum
kernel time. The host runs ahead until an operation waits for the GPU (`.item()`, `synchronize`, a copy to the host).
So a rollout of small kernels is host-bound and an update is GPU-bound, as on a card.

The default efficiencies and host costs are round guesses for eager PyTorch, not measurements; pass `HostCosts` to
replace them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from autofit.fakegpu.foreign_flops import TENSOR_CORE_NAMES, foreign_flops, foreign_rate
from autofit.fakegpu.specs import GpuSpec, HostCosts

aten = torch.ops.aten

NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_",
    "device", "is_pinned", "lift_fresh", "record_stream", "_local_scalar_dense",
}  # fmt: skip
_GATHERS = {"embedding", "index", "gather", "index_select"}  # their cost is the rows they return, not the whole input
_TENSOR_CORE_OPS = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    *(name[6:] for name in TENSOR_CORE_NAMES),
}  # fmt: skip


class OperationLog(Protocol):
    """A listener of the clock: every operation on the GPU, and the decode steps of a rollout."""

    def view(self) -> None: ...

    def kernel(
        self, func: OpOverload, args: Sequence[object], out: object, *, flops: int, rate: float, gathers: bool
    ) -> None: ...

    def decode_step(self, number: int) -> None: ...

    def decode_end(self) -> None: ...


class Clock:
    """Two monotonic times: `host_s`, and `gpu_s`, the end of the last kernel launched so far."""

    def __init__(self, spec: GpuSpec, costs: HostCosts) -> None:
        self.spec = spec
        self.costs = costs
        self.host_s = 0.0
        self.gpu_s = 0.0
        self.flops = 0
        self.bytes_moved = 0
        self.kernel_count = 0
        self.log: OperationLog | None = None

    @property
    def now_s(self) -> float:
        return max(self.host_s, self.gpu_s)

    def synchronize(self) -> None:
        """Let the host wait for the GPU."""
        self.host_s = self.now_s

    def advance(self, seconds: float) -> None:
        """Add time without a traced kernel (the skipped part of a rollout)."""
        self.host_s += seconds
        self.gpu_s += seconds

    def copy_to_host(self, nbytes: int) -> None:
        self.gpu_s = self.now_s + nbytes / self.spec.host_link_bytes_per_s
        self.synchronize()

    def operation(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
        """Charge one GPU operation: a view costs host time, a kernel costs host and GPU time."""
        name = func._schema.name[6:]
        if func.is_view or name in NO_KERNEL:
            self.host_s += self.costs.view_s
            if self.log is not None:
                self.log.view()
            return
        flops = _flops(func, args, kwargs, out)
        nbytes = _bytes(name, args, out)
        rate = foreign_rate(func._schema.name, self.spec.half_flops_per_s) or self._rate(name, out)
        if self.log is not None:
            self.log.kernel(func, args, out, flops=flops, rate=rate, gathers=name in _GATHERS)
        self.kernel(flops=flops, nbytes=nbytes, rate=rate)

    def kernel(self, *, flops: int, nbytes: int, rate: float) -> None:
        costs = self.costs
        self.host_s += costs.launch_s
        seconds = max(
            flops / (rate * costs.flops_frac),
            nbytes / (self.spec.bandwidth_bytes_per_s * costs.bandwidth_frac),
            costs.shortest_kernel_s,
        )
        self.gpu_s = max(self.gpu_s, self.host_s) + seconds
        self.flops += flops
        self.bytes_moved += nbytes
        self.kernel_count += 1

    def _rate(self, name: str, out: object) -> float:
        tensor = _first_tensor(out)
        dtype = tensor.dtype if tensor is not None else torch.float32
        if name not in _TENSOR_CORE_OPS:
            return self.spec.fp32_flops_per_s
        if dtype is torch.float16:
            return self.spec.half_flops_per_s
        if dtype is torch.bfloat16:
            native = self.spec.compute_capability >= (8, 0)
            return self.spec.half_flops_per_s if native else self.spec.fp32_flops_per_s
        tf32 = self.spec.compute_capability >= (8, 0) and torch.backends.cuda.matmul.allow_tf32
        return self.spec.tf32_flops_per_s if tf32 else self.spec.fp32_flops_per_s


def _flops(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> int:
    known = foreign_flops(func, args)
    if known is not None:
        return known
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=out))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0  # a shape that the registry does not support: only bytes bound the time


def _bytes(name: str, args: Sequence[object], out: object) -> int:
    seen: dict[int, int] = {}
    _add_bytes(out, seen)
    if name in _GATHERS:
        return 2 * sum(seen.values())
    for argument in args:
        _add_bytes(argument, seen)
    return sum(seen.values())


def _add_bytes(value: object, seen: dict[int, int]) -> None:
    if isinstance(value, torch.Tensor):
        seen[id(value)] = value.numel() * value.element_size()
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add_bytes(item, seen)


def _first_tensor(value: object) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return next((t for t in value if isinstance(t, torch.Tensor)), None)
    return None
