"""Intercepts every operation inside the block: decides values, tracks storages, charges scratch and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.fakegpu.clock import Clock, in_backward
from autofit.fakegpu.depth.layers import LayerRecorder
from autofit.fakegpu.fusion import Fusion
from autofit.fakegpu.kernels import (
    FACTORS,
    GEMMS,
    MADE_LAST_FIRST,
    NAMESPACES,
    WITHOUT_DROPOUT,
    collective,
    moved_by,
    product_name,
    rounded_outputs,
    tensors,
)
from autofit.fakegpu.known_values import DATA_DEPENDENT, Shadows
from autofit.fakegpu.memory import COPIES, HostTensors, SimulatedMemory, device_type, host_copy, pin
from autofit.fakegpu.op_cache import Shortcut
from autofit.fakegpu.scratch import COPYING, nonzero_before, nonzero_beside, scratch_of

aten = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
_COMPARISONS = (aten.equal.default, aten.allclose.default)
Handler = Callable[[Sequence[object], Mapping[str, object]], object]


class Tracer(TorchDispatchMode):
    """The dispatch mode on top of torch's FakeTensorMode."""

    def __init__(
        self, memory: SimulatedMemory, clock: Clock, *, blas_workspace_bytes: int,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.clock = clock
        self.note = note
        self.shadows = Shadows(note)
        self.operation_count = 0
        self.paused = False
        self.vocabulary_sizes: set[int] = set()
        self.handlers: dict[OpOverload, Handler] = {}  # operations with a replacement; other packages add theirs
        self.composites: dict[OpOverload, Callable[..., object]] = {}  # the same for composite operations
        self.whole: set[OpOverload] = set()  # operations with a composite and a CUDA kernel
        self.in_parts: dict[OpOverload, Callable[..., object]] = {}  # operations that are several kernels on a card
        self.handlers[aten._grouped_mm.default] = _grouped_mm
        self.handlers |= dict.fromkeys((aten.addmm.dtype, aten.addmm.dtype_out), _addmm_to_dtype)
        # the output of a collective, as on a card; for fakes torch makes a copy of it
        self.handlers[torch.ops._c10d_functional.wait_tensor.default] = lambda args, kwargs: args[0]
        if memory.device_type == "cuda":
            self.in_parts[aten.masked_scatter_backward.default] = self._masked_scatter_backward
        self.fusion: Fusion | None = None  # once a compiled function was called
        self._within_parts = False
        self.shortcut: Shortcut | None = None
        self._key: tuple[object, ...] | None = None  # of the operation under way: its inputs, if these tell its cost
        self.host: HostTensors | None = None  # where the memory of the host is followed too
        self.layers: LayerRecorder | None = None
        self.after: Callable[..., None] | None = None  # called for each operation with the clock's arguments
        self.groups: dict[str, int] = {}  # ranks of each process group that had a collective on the card
        self._workspace_bytes = blas_workspace_bytes
        self.workspaces: dict[tuple[bool, int], int] = {}  # the allocation of each of cuBLAS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper costs more than most of this mode

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func is _PRIM_DEVICE and type(args[0]) is FakeTensor:  # two of three calls
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a wrapper such as DTensor: its operations on inner tensors arrive here next
        if func is _PRIM_DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._item(args[0])
        if (whole := self._in_parts(func, args, kwargs)) is not NotImplemented:
            return whole
        self.operation_count += 1
        fused = self.fusion is not None and self.fusion.before(func, args, kwargs)
        out = self._run(func, args, kwargs)
        key = self._key
        self.shadows.follow(func, args, kwargs, out)
        if fused and self.fusion is not None and self.fusion.inside:
            self.fusion.after(func, args, out)
            return out
        whole_name = func._schema.name
        name = whole_name[6:]
        if kwargs:
            pin(func, kwargs, out)
        copies: Sequence[int] = ()
        if whole_name in COPYING and _device_of(args, None) == "cuda":
            copies = self.memory.hold(COPYING[whole_name](self.memory.spec, *args, **kwargs), name)
        self._track(_in_order(func, args, out), product_name(name, args))
        if self.host is not None:
            self.host.follow(out)
        if self.layers is not None and not self.layers.code():
            self.layers.follow(args, out)
        self._charge(func, args, kwargs, out, name, key)
        for index in reversed(copies):
            self.memory.release(index)
        return out

    def _in_parts(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run an operation by its parts, which come back here: one of `in_parts`, or a composite one (linear, item).

        Composite operations arrive whole in inference mode, and among the parts of another operation.
        """
        parts = self.in_parts.get(func)
        if parts is not None and _device_of(args, None) != self.memory.device_type:
            parts = None
        if parts is None and (self._within_parts or torch.is_inference_mode_enabled()):
            if func in self.whole or not func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
                return NotImplemented
            parts = self.composites.get(func, func.decompose)
        if parts is None:
            return NotImplemented
        before, self._within_parts = self._within_parts, True
        try:
            with self:
                return parts(*args, **kwargs)
        finally:
            self._within_parts = before

    # ------------------------------------------------------------------ values
    def _item(self, tensor: FakeTensor) -> float | int | bool:
        if tensor.device.type == self.memory.device_type:
            self.clock.synchronize()
        return self.shadows.item(tensor)

    def _run(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self._key = None
        handler = self.handlers.get(func)
        if handler is not None:  # no frame more: replacements count the references of their arguments
            if self.shortcut is None:
                return handler(args, kwargs)
            self.shortcut.key = None
            replaced = handler(args, kwargs)
            key = self.shortcut.key
            self._key = key if key is not None and key[0] is func else None
            return replaced
        if func in DATA_DEPENDENT and _has_fake(args) and (func is not aten.index.Tensor or _has_mask(args[1])):
            return self._data_dependent(func, args, kwargs)
        if func in _COMPARISONS and _has_fake(args):
            known = self.shadows.compute_known(func, args, kwargs)
            return True if known is None else known
        if func is aten.embedding.default and isinstance(args[0], torch.Tensor):
            self.shadows.vocabularies.add(args[0].shape[0])
            if args[0].shape[0] >= 1000:
                self.vocabulary_sizes.add(args[0].shape[0])
        if self.shortcut is None:
            return func(*args, **kwargs)
        out = self.shortcut.run(func, args, kwargs)
        self._key = self.shortcut.key
        return out

    def _untracked(self, func: OpOverload, *args: object, **kwargs: object) -> Any:
        """The outputs of an operation that is a part of another one."""
        return func(*args, **kwargs) if self.shortcut is None else self.shortcut.run(func, args, kwargs)

    def _data_dependent(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run an operation with a data-dependent output size: the true size for known inputs, else the largest."""
        if func is aten.nonzero.default:
            return self._rows(cast("torch.Tensor", args[0]))
        if func is aten.index.Tensor:
            return self._masked_index(cast("torch.Tensor", args[0]), cast("list[torch.Tensor | None]", args[1]))
        if func is aten.masked_select.default:
            source, mask = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
            if self.memory.device_type != "cuda":
                return source.new_empty((self.shadows.count_true(mask),))
            if source.shape != mask.shape:
                source, mask = torch.broadcast_tensors(source, mask)
            return self._masked_index(source, [mask])
        real = self.shadows.compute_known(func, args, kwargs)
        first = cast("torch.Tensor", args[0])
        if real is None:
            return self._largest(func, first, args, kwargs)
        return _like_real(real, first.device)

    def _rows(self, mask: torch.Tensor, *, most: int | None = None) -> torch.Tensor:
        """The places of the true elements: `nonzero`, of the number that is known, else of all, but of `most`."""
        on_card = device_type(mask) == self.memory.device_type == "cuda"
        if on_card:
            self.memory.scratch(nonzero_before(self.memory.spec, mask.numel()), "nonzero")
        count = self.shadows.count_true(mask)
        count = count if most is None else min(count, most)
        shape = [mask.dim(), count]
        rows = self._untracked(aten.empty.memory_format, shape, dtype=torch.long, device=mask.device)
        self.memory.track(rows, "nonzero")
        if on_card:
            self.memory.scratch(nonzero_beside(mask.numel()), "nonzero")
        return cast("torch.Tensor", self._untracked(aten.t.default, rows))

    def _masked_index(self, source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
        expanded: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                expanded += self._untracked(aten.unbind.int, self._rows(index), 1)
            else:
                expanded.append(index)
        out = cast("torch.Tensor", self._untracked(aten.index.Tensor, source, expanded))
        self.memory.track(out, "index")  # while the rows are there
        return out

    def _masked_scatter_backward(self, grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The gradient of the scattered rows: those of the mask, as many as there were, and zeros for the rest."""
        count = prod(sizes)
        rows = self._rows(mask, most=count)
        taken = grad.new_empty(rows.shape[0])
        del rows
        if taken.shape[0] < count:
            taken = torch.cat([taken, taken.new_zeros(count - taken.shape[0])])
        return taken.view(tuple(sizes))

    def _largest(
        self, func: OpOverload, first: torch.Tensor, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        count = first.numel()
        if func is aten.repeat_interleave.Tensor:
            size = kwargs.get("output_size")
            return first.new_empty((size if isinstance(size, int) else count,), dtype=torch.long)
        if func is aten.bincount.default:
            least = next((a for a in args[2:] if isinstance(a, int)), kwargs.get("minlength", 0))
            return first.new_empty((max(cast("int", least), 1),), dtype=torch.long)
        unique = first.new_empty(first.shape if func is aten.unique_dim.default else (count,))
        whole = first.new_empty(first.shape, dtype=torch.long)
        return unique, whole, first.new_empty((count,), dtype=torch.long)

    # ------------------------------------------------------------------ memory and time
    def _track(self, out: object, name: str) -> None:
        if isinstance(out, torch.Tensor):
            self.memory.track(out, name)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._track(item, name)

    def _charge(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object, name: str,
        key: tuple[object, ...] | None,
    ) -> None:  # fmt: skip
        if func in COPIES and (copy := host_copy(func, args, kwargs, out)) is not None:
            self.clock.link(func, args, out, nbytes=copy.nbytes, stream=self.memory.stream, waits=copy.waits)
            return
        device = _device_of(args, out)
        if device != self.memory.device_type:
            return
        if func.namespace in NAMESPACES:
            self._communicate(func, args, out)
            return
        if device == "cuda":
            if func in GEMMS:
                _check_dtypes(name, args)
                self._ensure_workspace()
            for number, parts in rounded_outputs(func, args).items():
                self.memory.note_parts(cast("Sequence[torch.Tensor]", out)[number], parts)
        for held in scratch_of(func, args, kwargs, device=device, spec=self.memory.spec):
            taken = self.memory.scratch(held, name)
            if self.layers is not None and args and isinstance(args[0], (list, tuple)):
                for index in taken:
                    self.layers.share_evenly(index, args[0])
        if (
            device == "cuda"
            and func is aten._to_copy.default
            and isinstance(out, torch.Tensor)
            and out.device.type == "cpu"
        ):
            self.clock.copy_to_host(out.numel() * out.element_size())
            return
        if func.namespace == "fsdp":
            args, out = moved_by(func, args, kwargs, out)
        if (launches := OF_A_TENSOR.get(func)) is not None:
            charge_tensors(self.clock, self.layers, launches, args[0])
        self.clock.operation(func, args, kwargs, out, key)
        if self.after is not None:
            self.after(func, args, kwargs, out, key)

    def _communicate(self, func: OpOverload, args: Sequence[object], out: object) -> None:
        """Charge a collective with other cards, or the wait for those before."""
        call, stream = collective(func, args, out), self.memory.stream
        if call is None:
            self.clock.wait(stream, self.clock.communicated())
            return
        if call.ranks < 2:
            return
        if call.group not in self.groups:
            self.groups[call.group] = call.ranks
            for text in self.clock.collectives.notes(call.ranks):
                self.note(text)
        self.clock.collective(func, call, stream=stream)
        if func is torch.ops.c10d.barrier.default:
            self.clock.wait(None, self.clock.communicated())

    def _ensure_workspace(self) -> None:
        """Allocate the cuBLAS workspace of this thread's handle and stream; backward counts as a thread of its own."""
        key = (in_backward(), self.memory.stream)
        if key not in self.workspaces:
            self.workspaces[key] = self.memory.allocate(self._workspace_bytes, "workspace", "cublas workspace")

    def clear_workspaces(self) -> None:
        """Free all workspaces (torch._C._cuda_clearCublasWorkspaces)."""
        for index in self.workspaces.values():
            self.memory.release(index)
        self.workspaces.clear()


def _check_dtypes(name: str, args: Sequence[object]) -> None:
    """Raises the RuntimeError of CUDA's products for factors of two dtypes, which fakes multiply."""
    first = FACTORS.get(name)
    if first is None:
        return
    one, other = (cast("torch.Tensor", arg).dtype for arg in args[first : first + 2])
    if one is not other:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {one} != {other}")


def _in_order(func: OpOverload, args: Sequence[object], out: object) -> object:
    """The outputs of an operation that a card allocates, the first one first."""
    if not isinstance(out, tuple):
        return out
    if func in WITHOUT_DROPOUT and (len(args) < 6 or not args[5]):
        return out[: WITHOUT_DROPOUT[func]]
    return out[::-1] if func in MADE_LAST_FIRST else out


def _grouped_mm(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The matmul of experts; its fake accepts only bf16, while CUDA runs other types too (as a loop of matmuls).

    The rows of CUDA's result are multiples of 16 bytes apart (create_grouped_gemm_output_tensor in GroupedMMUtils.h),
    those of a CPU build's fake are not.
    """
    a, b = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
    if a.dtype is torch.bfloat16 or not isinstance(a, FakeTensor):
        out = aten._grouped_mm.default(*args, **kwargs)
        return _rows_apart(out) if isinstance(out, FakeTensor) and out.fake_device.type == "cuda" else out
    groups: tuple[int, ...] = (a.shape[0],) if a.dim() == b.dim() == 3 else ()
    if a.dim() == b.dim() == 2:
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        groups = (offsets.shape[0],) if isinstance(offsets, torch.Tensor) else ()
    dtype = kwargs.get("out_dtype") or a.dtype
    out = a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=cast("torch.dtype", dtype))
    return _rows_apart(out) if a.fake_device.type == "cuda" else out


def _rows_apart(out: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape with rows of multiples of 16 bytes; the same one if its are."""
    multiple = 16 // out.element_size()
    if out.stride(-2) % multiple == 0:
        return out
    width = -(-out.shape[-1] // multiple) * multiple
    return out.new_empty_strided(out.shape, (out.shape[-2] * width, width, 1)[-out.dim() :])


def _addmm_to_dtype(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """addmm(..., out_dtype=): the decomposition in torch 2.11 mistakes the dtype for a scaling factor."""
    out = kwargs.get("out")
    if out is not None:
        return out
    a, b = cast("torch.Tensor", args[1]), cast("torch.Tensor", args[2])
    return a.new_empty((a.shape[0], b.shape[1]), dtype=cast("torch.dtype", args[3]))


def _has_fake(args: Sequence[object]) -> bool:
    return any(
        isinstance(a, FakeTensor) or (isinstance(a, (list, tuple)) and any(isinstance(x, FakeTensor) for x in a))
        for a in args
    )


def _has_mask(indices: object) -> bool:
    return isinstance(indices, (list, tuple)) and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


def _like_real(real: object, device: torch.device) -> object:
    if isinstance(real, torch.Tensor):
        return torch.empty(tuple(real.shape), dtype=real.dtype, device=device)
    return tuple(_like_real(r, device) for r in cast("tuple[object, ...]", real))


def _device_of(args: Sequence[object], out: object) -> str:
    """The device of an operation: that of its first tensor argument, else of its output."""
    for value in (*args, out):
        if isinstance(value, torch.Tensor):
            kind = device_type(value)
            if kind == "cpu" and value.dim() == 0:
                continue
            return kind
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    return device_type(item)
    return "cpu"


# -- the host's time for Python that goes over all modules, or over lists of tensors ----------------------------------
# transformers' loop goes over all modules several times for each micro-batch (`model.train()`, its count of FLOPs) and
# over lists of tensors for each step (clipping, the optimizer, `zero_grad`), after it has waited for the card, which
# has nothing to do meanwhile: on an H100 17 to 20 ms of each micro-batch and 10 to 20 ms of each step of Qwen3-1.7B
# with LoRA, 2,389 modules (experiments/gpu, 2026-11-27). Measured on that host, in launches of it (11.0 us):
# `experiments/gpu/walks.py`.

# Launches a module: 1.1 to 1.4 us for its weights, 2.1 us for its mode.
VISIT, TRAIN = 0.11, 0.19
# Launches a tensor: `clip_grad_norm_` 4.8 us, `AdamW.step` 3.0 us.
OF_A_TENSOR: dict[OpOverload, float] = {
    aten._foreach_norm.Scalar: 0.43,
    **dict.fromkeys(
        (
            aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr, aten._fused_adam_.default,
            aten._fused_adam_.tensor_lr, aten._foreach_addcdiv_.ScalarList, aten._foreach_addcdiv_.Scalar,
        ),
        0.27,
    ),
}  # fmt: skip


def charge_modules(
    clock: Clock, layers: LayerRecorder | None, launches: float, modules: Sequence[torch.nn.Module]
) -> None:
    """Charge the host for going over modules, `launches` each. Inside of a layer they are that layer's alone."""
    deep = len(modules) if layers is None or layers.code() else sum(map(layers.growth_of_module, modules))
    _charge(clock, launches, len(modules), deep)


def charge_tensors(clock: Clock, layers: LayerRecorder | None, launches: float, several: object) -> None:
    """Charge the host for going over a list of tensors, `launches` each."""
    found = list(tensors(several))
    deep = len(found) if layers is None else sum(map(layers.growth_of_tensor, found))
    _charge(clock, launches, len(found), deep)


def _charge(clock: Clock, launches: float, number: int, of_full_depth: float) -> None:
    if number:
        clock.host_work(launches * number, deep=launches * of_full_depth, alone=True)
