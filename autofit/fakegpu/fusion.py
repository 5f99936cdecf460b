"""Functions that torch.compile compiles: chains of elementwise operations become one kernel, free of intermediates.

Inside such a function the result of an elementwise operation takes no memory until an operation reads it that inductor
does not fuse (a matrix product, attention, a sort), or the function returns it. What backward needs is computed again
from the tensors in memory that it came from, unless it is smaller than these: a tensor at a time, where the min-cut
partitioner decides for the whole graph. Reductions read from outside memory, and write to it. An approximation:
inductor's kernels and their order are not known.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from autofit.fakegpu.clock import Clock
from autofit.fakegpu.kernels import tensors
from autofit.fakegpu.memory import SimulatedMemory

aten = torch.ops.aten
# Elementwise to inductor, without the tag: casts, copies, constants, gathers (an indirect load), softmax (with sums).
_ELEMENTWISE = {
    "_to_copy", "clone", "copy_", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros",
    "new_ones", "new_full", "fill_", "zero_", "arange", "scalar_tensor", "gather", "index_select", "where",
    "masked_fill", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "empty_like",
    "tril", "triu",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "logsumexp", "var", "var_mean", "std", "prod", "any", "all", "argmax",
    "argmin", "linalg_vector_norm", "norm", "nll_loss_forward",
}  # fmt: skip


@dataclass(slots=True)
class _Fused:
    """A storage outside memory: the operation that makes it, and the tensors in memory that it is made from."""

    func: OpOverload
    roots: tuple[torch.Tensor, ...]
    storage: weakref.ref[torch.UntypedStorage]


class Fusion:
    """The storages that fused kernels leave unwritten, and the compiled functions that run now."""

    def __init__(self, memory: SimulatedMemory, clock: Clock) -> None:
        self.memory = memory
        self.clock = clock
        self.inside = 0
        self._fused: dict[int, _Fused] = {}
        self._added: dict[int, _Fused] = {}  # storages in memory: what fused operations in place still read

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    # ------------------------------------------------------------------ operations
    def before(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """True if the operation is fused; if not, its unwritten inputs are written to memory first."""
        name = func._schema.name[6:]
        elementwise = torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or name in _REDUCTIONS
        if func.is_view or (self.inside and elementwise):
            return True
        if self._fused or self._added:
            self.write((args, tuple(kwargs.values())))
        return False

    def after(self, func: OpOverload, args: Sequence[object], out: object) -> None:
        """Leave the results of a fused operation out of memory, or write them if they are a reduction's."""
        roots = self._roots(args)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if tensor.device.type != self.memory.device_type:
                continue
            if self.memory.index_of(tensor) is not None:
                if not func.is_view:
                    self._remember(self._added, func, tensor, roots)
                continue
            known = self._fused.get(storage._cdata)
            if known is not None:
                if not func.is_view:
                    known.roots = _unique((*known.roots, *roots))
                continue
            self._remember(self._fused, func, tensor, roots)
            if func._schema.name[6:] in _REDUCTIONS:
                self.write(tensor)

    def _remember(
        self, where: dict[int, _Fused], func: OpOverload, tensor: torch.Tensor, roots: tuple[torch.Tensor, ...]
    ) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        others = tuple(root for root in roots if root.untyped_storage()._cdata != key)
        where[key] = _Fused(func, others, weakref.ref(storage, lambda _: where.pop(key, None)))

    def _roots(self, args: Sequence[object]) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        for tensor in _tensors(args):
            key = tensor.untyped_storage()._cdata
            fused, added = self._fused.get(key), self._added.get(key)
            found += fused.roots if fused is not None else (tensor.detach(),)
            found += added.roots if added is not None else ()
        return _unique(found)

    def write(self, values: object) -> None:
        """Allocate the outputs that a fused kernel now writes, and charge the kernel."""
        for tensor in _tensors(values):
            key = tensor.untyped_storage()._cdata
            self._added.pop(key, None)
            fused = self._fused.pop(key, None)
            if fused is not None:
                self.memory.track(tensor, fused.func._schema.name[6:])
                self.clock.operation(fused.func, fused.roots, {}, tensor)

    # ------------------------------------------------------------------ backward
    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Context that decides for each tensor that autograd saves: to write it, or to keep its roots."""
        kept: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            fused = self._fused.get(tensor.untyped_storage()._cdata)
            if fused is None:
                kept.add(tensor.untyped_storage()._cdata)
                return tensor.detach()
            missing = [root for root in fused.roots if root.untyped_storage()._cdata not in kept]
            if tensor.untyped_storage().nbytes() <= sum(root.untyped_storage().nbytes() for root in missing):
                self.write(tensor)
                kept.add(tensor.untyped_storage()._cdata)
            else:
                kept.update(root.untyped_storage()._cdata for root in missing)
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class _Compiled(torch.autograd.Function):
    """A compiled function as one node of autograd, so that its backward pass is a region too."""

    @staticmethod
    def forward(ctx, fusion, call, *tensors):  # type: ignore[no-untyped-def]
        inner = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in tensors]
        with torch.enable_grad(), fusion.region(), fusion.saving():
            outs = call(inner)
            fusion.write(outs)
        ctx.fusion, ctx.inner, ctx.outs = fusion, inner, outs
        given = tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in outs)
        ctx.mark_non_differentiable(
            *(g for g, out in zip(given, outs, strict=True) if isinstance(out, torch.Tensor) and not out.requires_grad)
        )
        return given

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        fusion, inner, outs = ctx.fusion, ctx.inner, ctx.outs
        ctx.inner = ctx.outs = None
        pairs = [
            (out, grad)
            for out, grad in zip(outs, grads, strict=True)
            if isinstance(out, torch.Tensor) and out.requires_grad
        ]
        wanted = [t for t in inner if isinstance(t, torch.Tensor) and t.requires_grad]
        with fusion.region():
            found = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            fusion.write(found)
        left = iter(found)
        return (None, None, *(next(left) if isinstance(t, torch.Tensor) and t.requires_grad else None for t in inner))


def run_compiled(
    fusion: Fusion, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Result of `function`, run as torch.compile would run it on the simulated card."""
    if fusion.inside:
        return function(*args, **kwargs)
    leaves, shape = tree_flatten((args, dict(kwargs)))
    if not (torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in leaves)):
        with fusion.region():
            out = function(*args, **kwargs)
            fusion.write(tree_flatten(out)[0])
            return out
    shapes = []

    def call(values: list[object]) -> tuple[object, ...]:
        inner_args, inner_kwargs = tree_unflatten(values, shape)
        flat, out_shape = tree_flatten(function(*inner_args, **inner_kwargs))
        shapes.append(out_shape)
        return tuple(flat)

    return tree_unflatten(list(_Compiled.apply(fusion, call, *leaves)), shapes[0])  # type: ignore[no-untyped-call]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors(value) if isinstance(tensor, FakeTensor))


def _unique(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple({t.untyped_storage()._cdata: t for t in tensors}.values())
