"""Tensor and module methods that need another way round with fake tensors; put in place by `patches.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autofit.fakegpu.tracer import real_value

if TYPE_CHECKING:
    from autofit.fakegpu.card import FakeGpu

Convert = Callable[[torch.Tensor], torch.Tensor]


def apply_to_module(gpu: FakeGpu) -> Callable[..., torch.nn.Module]:
    """`nn.Module._apply` that keeps Parameter objects: torch's own swaps fakes, which fails while a weakref is held.

    A real parameter (built before the block) cannot become fake in place, so it is replaced, once for all its owners.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def _apply(module: torch.nn.Module, fn: Convert, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _converted(parameter, fn, gpu, replaced)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = new = fn(buffer)
                gpu.memory.mark(new, "weights")
        return module

    return _apply


def _converted(
    parameter: torch.nn.Parameter,
    fn: Convert,
    gpu: FakeGpu,
    replaced: dict[int, tuple[torch.Tensor, torch.nn.Parameter]],
) -> torch.nn.Parameter:
    done = replaced.get(id(parameter))
    if done is not None and done[0] is parameter:
        return done[1]
    with torch.no_grad():
        value = fn(parameter)
        grad = parameter.grad
        new_grad = fn(grad) if grad is not None else None
    if value is parameter or (
        value.device == parameter.device and value.dtype == parameter.dtype and _same(value, parameter)
    ):
        return parameter
    result = parameter
    if isinstance(parameter, FakeTensor) and type(value) is FakeTensor:
        _become(parameter, value, gpu)
        if new_grad is not None:
            result.grad = None
    else:
        result = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        if isinstance(value, FakeTensor):
            replaced[id(parameter)] = (parameter, result)
    if new_grad is not None:
        result.grad = new_grad.detach()
    gpu.memory.mark(result, "weights")
    return result


def _same(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return bool(value.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def _become(parameter: FakeTensor, value: FakeTensor, gpu: FakeGpu) -> None:
    """Give a fake parameter another one's storage, device and value, keeping its identity (for optimizers, ties)."""
    parameter.data = value
    parameter.fake_device = value.fake_device
    gpu.tracer.shadows.give(parameter, gpu.tracer.shadows.of(value))


def set_data(gpu: FakeGpu, original: property) -> property:
    """`tensor.data = other` for two fakes also moves the device, which torch keeps in a Python attribute."""

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        original.__set__(tensor, value)
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device
            gpu.tracer.shadows.give(tensor, gpu.tracer.shadows.of(value))

    return property(original.__get__, assign)


def to_list(gpu: FakeGpu, original: Callable[..., object]) -> Callable[..., object]:
    """`Tensor.tolist`: the known values, or ones."""

    def tolist(tensor: torch.Tensor) -> object:
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        _synchronize(gpu, tensor)
        with unset_fake_temporarily():
            return cast("object", real_value(gpu.tracer, tensor).tolist())

    return tolist


def to_numpy(gpu: FakeGpu, original: Callable[..., object]) -> Callable[..., object]:
    """`Tensor.numpy`: the known values, or ones; a GPU tensor is refused as on a card."""

    def values(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **kwargs)
        if tensor.device.type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        with unset_fake_temporarily():
            return cast("object", real_value(gpu.tracer, tensor).detach().numpy())

    return values


def to_array(gpu: FakeGpu, original: Callable[..., object]) -> Callable[..., object]:
    """`numpy.asarray(tensor)`."""

    def array(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **kwargs)
        return numpy.asarray(tensor.numpy(), dtype=args[0] if args else None)  # type: ignore[call-overload]

    return array


def formatted(original: Callable[..., str]) -> Callable[..., str]:
    """`f"{loss:.3f}"`: the number that `.item()` would give."""

    def text(tensor: torch.Tensor, spec: str) -> str:
        if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
            return format(tensor.item(), spec)
        return original(tensor, spec)

    return text


def deep_copied(gpu: FakeGpu, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`copy.deepcopy` of a fake: torch would copy its storage, which is not there."""

    def deep_copy(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad():
            copied: torch.Tensor = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
            gpu.memory.mark(copied, "weights")
        else:
            copied.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copied
        return copied

    return deep_copy


def itself(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """`Tensor.pin_memory`: host memory is not simulated."""
    return tensor


def resize_storage(gpu: FakeGpu, original: Callable[..., object]) -> Callable[..., object]:
    """`UntypedStorage.resize_`: FSDP frees and refills parameters through it."""

    def resize_(storage: torch.UntypedStorage, size: int) -> object:
        before = storage.nbytes()
        result = original(storage, size)
        if size != before and gpu.owns(storage):
            gpu.memory.resized(storage)
        return result

    return resize_


def _synchronize(gpu: FakeGpu, tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        gpu.clock.copy_to_host(tensor.numel() * tensor.element_size())
