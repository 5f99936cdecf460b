"""A cache in front of torch's FakeTensorMode for operations seen before with inputs of the same shapes.

FakeTensorMode has a cache too, but a hit takes about 100 us. Training repeats the same few hundred operations, so the
outputs of an operation (new tensors, a view of its first input, an input itself) are cached here by the shapes,
strides, types and devices of its inputs, and by the default dtype. What is not cached yet takes FakeTensorMode 1 to 2
ms; the kernels that torch has for meta tensors tell the same of most operations on one device in a tenth of it
(`_ON_META`). Operations that do not match this pattern run through FakeTensorMode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from autofit.fakegpu.kernels import tensors

aten = torch.ops.aten
_META = torch.device("meta")
_make_subclass = torch.Tensor._make_subclass  # torch's own: a card's replacement, of which this is, passes fakes on
_MISS = object()
_FACTORIES = {  # make a tensor of a given shape, from no tensor
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.scalar_tensor.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
}  # fmt: skip
# Besides the pointwise ones, operations whose outputs the kernels for meta tensors describe as FakeTensorMode does.
_ON_META = {
    "view", "_unsafe_view", "slice", "select", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "detach",
    "alias", "split", "split_with_sizes", "unbind", "mm", "bmm", "addmm", "baddbmm", "cat", "stack", "clone", "gather",
    "sum", "mean", "amax", "amin", "max", "min", "cumsum", "logsumexp", "any", "all", "argmax", "linalg_vector_norm",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "index_select", "masked_fill",
    "_to_copy", "slice_backward", "select_backward", "embedding_dense_backward", "zero_", "fill_", "copy_",
}  # fmt: skip
_DEVICE_OPTIONS = ("device", "pin_memory", "layout")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _Spec:
    """One output: a new tensor, or (with `viewed`) a view of the first argument, `offset` elements after its begin."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: bool


@dataclass(frozen=True, slots=True)
class _Constant:
    """An output other than a tensor."""

    value: object


@dataclass(frozen=True, slots=True)
class _Same:
    """An output that is the first argument itself (an in-place operation)."""


@dataclass(frozen=True, slots=True)
class _Given:
    """An output that is the argument `out`."""


Output = _Spec | _Constant | _Same | _Given
Known = dict[object, tuple[type | None, tuple[Output, ...]] | None]  # outputs by operation and inputs; None: not cached


class Shortcut:
    """Runs operations on fake tensors and caches the description of their outputs.

    `known` may be shared by cards of one kind, one after another: it holds no tensor.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        mode.cache_enabled = False  # its own cache would take longer to fill for operations that are cached here
        self._attributes: dict[torch.device, dict[str, object]] = {}
        self.known: Known = {}
        self.key: tuple[object, ...] | None = None  # of the last operation; None of one that is not cached
        self._on_meta: dict[OpOverload, bool] = {}

    @property
    def functions(self) -> set[OpOverload]:
        """The operations that ran so far."""
        return {cast("OpOverload", cast("tuple[object, ...]", key)[0]) for key in self.known}

    def run(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self.key = None
        if torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default and _is_plain(args[0]):
            return self._lifted(args[0])
        parts: list[object] = [func, torch.get_default_dtype()]
        found: list[int] = []
        if func is aten.as_strided.default:  # of a place in the storage, independent of the input's
            parts.append(cast("FakeTensor", args[0]).storage_offset())
        if not (_describe(args, parts, found) and (not kwargs or _describe_options(kwargs, parts, found))):
            return func(*args, **kwargs)
        if len(found) > 1 and len(set(found)) < len(found):
            parts.append(tuple(map(found.index, found)))  # which arguments are one tensor
        key = tuple(parts)
        entry = self.known.get(key, _MISS)
        if entry is _MISS:
            entry = self._by_meta(func, args, kwargs)
            if entry is None:
                out = func(*args, **kwargs)
                entry = self.known[key] = _remember(func, args, kwargs, out)
                self.key = None if entry is None else key
                return out
            self.known[key] = entry
        if entry is None:
            return func(*args, **kwargs)
        self.key = key
        kind, outputs = cast("tuple[type | None, tuple[Output, ...]]", entry)
        made = [self._make(output, args, kwargs) for output in outputs]
        return made[0] if kind is None else kind(made)

    def _lifted(self, real: torch.Tensor) -> FakeTensor:
        """A fake tensor with the shape, strides and device of `real`, which has just been made from Python values."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        return self._fake(meta, real.device)

    def _by_meta(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[type | None, tuple[Output, ...]] | None:
        """Description of the outputs by the kernels for meta tensors; None if FakeTensorMode must make it."""
        able = self._on_meta.get(func)
        if able is None:
            able = self._on_meta[func] = _is_on_meta(func)
        if not able or any(name in kwargs for name in _DEVICE_OPTIONS):
            return None
        devices = {cast("FakeTensor", tensor).fake_device for tensor in tensors((args, tuple(kwargs.values())))}
        if len(devices) != 1:
            return None
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        return _remember(func, args, kwargs, out, device=devices.pop())

    def _make(self, output: Output, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        if not isinstance(output, _Spec):
            if isinstance(output, _Constant):
                return output.value
            return args[0] if isinstance(output, _Same) else kwargs["out"]
        source = cast("FakeTensor", args[0]).untyped_storage() if output.viewed else None
        with torch._C._DisableTorchDispatch():
            if source is None:
                meta = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
            else:
                meta = torch.empty((), dtype=output.dtype, device=_META)
                place = output.offset + cast("FakeTensor", args[0]).storage_offset()
                meta.set_(source, place, output.shape, output.stride)
        return self._fake(meta, output.device)

    def _fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """The same as `FakeTensor(mode, meta, device)`, but faster: attributes are copied from an earlier one."""
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self._mode, meta, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = _make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        vars(made).update(attributes)
        return made


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """True if a value is a real tensor with strides."""
    return type(value) is torch.Tensor and value.layout is torch.strided


def _is_on_meta(func: OpOverload) -> bool:
    """True if the kernels for meta tensors give an operation's outputs as FakeTensorMode does."""
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
        return False
    name = func._schema.name[6:]
    if name not in _ON_META and torch.Tag.pointwise not in func.tags:
        return False
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta"))


def _describe(value: object, key: list[object], found: list[int]) -> bool:
    """Append the cache key of an argument, and to `found` its tensors; False if it is unfit for a key."""
    if type(value) is FakeTensor:
        if value.constant is not None or value.dtype.is_complex:
            return False
        key.append((value.shape, value.stride(), value.dtype, value.fake_device))
        found.append(id(value))
        return True
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        key.append(len(value))
        return all(_describe(item, key, found) for item in value)
    if isinstance(value, _PLAIN):
        key.append((type(value), value))
        return True
    return False


def _describe_options(kwargs: Mapping[str, object], key: list[object], found: list[int]) -> bool:
    for name, value in kwargs.items():
        key.append(name)
        if (isinstance(value, torch.Tensor) and name != "out") or not _describe(value, key, found):
            return False
    return True


def _remember(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object,
    device: torch.device | None = None,
) -> tuple[type | None, tuple[Output, ...]] | None:  # fmt: skip
    """Description of the outputs for later calls, which lie on `device`; None if the operation is uncacheable."""
    if torch.Tag.inplace_view in func.tags:
        return None  # in-place views such as transpose_ return their input with another shape
    used = {t.untyped_storage()._cdata for t in tensors((args, tuple(kwargs.values())))}
    if func not in _FACTORIES and not (used and isinstance(args[0], (FakeTensor, list, tuple))):
        return None
    kind = type(out) if isinstance(out, (list, tuple)) else None
    if kind not in (None, list, tuple):
        return None
    outputs = []
    for value in cast("Sequence[object]", out) if kind is not None else (out,):
        described = _Given() if value is kwargs.get("out", _MISS) else _output(func, args, value, used, device)
        if described is None:
            return None
        outputs.append(described)
    return kind, tuple(outputs)


def _output(
    func: OpOverload, args: Sequence[object], value: object, used: set[int], device: torch.device | None
) -> Output | None:
    if not isinstance(value, torch.Tensor):
        return _Constant(value) if isinstance(value, _PLAIN) else None
    first = args[0] if args else None
    if value is first:
        return _Same()
    if device is None:
        if type(value) is not FakeTensor or value.constant is not None:
            return None
        device = value.fake_device
    if value.dtype.is_complex:
        return None
    storage = value.untyped_storage()
    viewed = isinstance(first, FakeTensor) and storage._cdata == first.untyped_storage()._cdata
    if viewed and (func._schema.is_mutable or value.dtype is not cast("FakeTensor", first).dtype):
        return None
    if not viewed:
        if storage._cdata in used or value.storage_offset() or storage.nbytes() != _dense_bytes(value):
            return None
        used.add(storage._cdata)
    offset = int(value.storage_offset()) - (int(cast("FakeTensor", first).storage_offset()) if viewed else 0)
    return _Spec(tuple(value.shape), value.stride(), offset, value.dtype, device, viewed)


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Storage bytes of `empty_strided` with this shape and stride."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
