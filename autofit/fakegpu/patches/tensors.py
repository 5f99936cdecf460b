"""Replacements for tensor and module methods that fail on fake tensors. `registry.py` installs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.fakegpu.known_values import Shadows
from autofit.fakegpu.memory import SimulatedMemory, is_pinned, set_pinned
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.specs import FakeGpuError
from autofit.fakegpu.tracer import Tracer

Convert = Callable[[torch.Tensor], torch.Tensor]


def apply_to_module(memory: SimulatedMemory, shadows: Shadows) -> Callable[..., torch.nn.Module]:
    """`nn.Module._apply` that keeps Parameter objects: torch's version swaps fakes, which fails if a weakref is held.

    A real parameter (built before the block) cannot become fake in place, so a new one replaces it, the same one in all
    modules that share it.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}

    def _apply(module: torch.nn.Module, fn: Convert, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _converted(parameter, fn, memory, shadows, replaced)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = new = fn(buffer)
                memory.mark(new, "weights")
        return module

    return _apply


def one_hot(
    shadows: Shadows, original: Callable[..., torch.Tensor], tensor: torch.Tensor, num_classes: int = -1
) -> torch.Tensor:
    """`functional.one_hot` as on CUDA: zeros and a scatter in place; on a fake, torch compares with a range instead."""
    if not isinstance(tensor, FakeTensor) or num_classes < 0:
        return original(tensor, num_classes)
    made = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    made.scatter_(-1, tensor.unsqueeze(-1), 1)
    shadows.make_one_hot(made, tensor, num_classes)
    return made


def truncated_normal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`nn.init._no_grad_trunc_normal_`, which draws again until all values lie within [a, b], with two draws of a fake.

    What a fake holds is not known, so torch (since 2.13) would draw for ever; further draws need no more bytes.
    """
    if "where" not in original.__code__.co_names:  # an older torch draws once
        return original

    def run(tensor: torch.Tensor, mean: float, std: float, a: float, b: float, **generator: object) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, mean, std, a, b, **generator)
        with torch.no_grad():
            tensor.normal_(mean, std)
            outside = (tensor < a) | (tensor > b)
            return tensor.copy_(torch.where(outside, torch.empty_like(tensor).normal_(mean, std), tensor))

    return run


def _converted(
    parameter: torch.nn.Parameter, fn: Convert, memory: SimulatedMemory, shadows: Shadows,
    replaced: dict[int, tuple[torch.Tensor, torch.nn.Parameter]],
) -> torch.nn.Parameter:  # fmt: skip
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
    alike = type(value) in (FakeTensor, type(parameter)) and "meta" not in (parameter.device.type, value.device.type)
    if isinstance(parameter, FakeTensor) and isinstance(value, FakeTensor) and alike:
        _become(parameter, value, shadows)
        if new_grad is not None:
            result.grad = None
    elif type(value) is type(parameter) and is_traceable_wrapper_subclass(parameter):  # FSDP2's share of a parameter
        parameter.grad = None
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        result = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        if isinstance(value, FakeTensor) and not isinstance(parameter, FakeTensor):
            replaced[id(parameter)] = (parameter, result)
    if new_grad is not None:
        result.grad = new_grad.detach()
    memory.mark(result, "weights")
    return result


def _same(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return bool(value.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def _become(parameter: FakeTensor, value: FakeTensor, shadows: Shadows) -> None:
    """Give a fake parameter the storage, device and values of another, but keep its identity (optimizers, ties).

    And those attributes that a subclass has (bitsandbytes' scales).
    """
    parameter.data = value
    if type(value) is not FakeTensor:
        vars(parameter).update({name: held for name, held in vars(value).items() if held is not None})
    parameter.fake_device = value.fake_device
    shadows.give(parameter, shadows.of(value))


def parameter_of_its_type(
    original: Callable[..., torch.Tensor], cls: type[FakeTensor], *args: object, **options: object
) -> torch.Tensor:
    """`FakeTensor.__new__` that makes `type(parameter)(value, ...)`, with which accelerate makes a parameter, one."""
    if args and isinstance(args[0], torch.Tensor):
        return torch.nn.Parameter(args[0], requires_grad=bool(options.get("requires_grad", True)))
    return original(cls, *args, **options)


def set_data(shadows: Shadows, original: property) -> property:
    """`tensor.data = other` for two fakes that also copies the device, which is a Python attribute of a fake."""

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        original.__set__(tensor, value)
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device
            shadows.give(tensor, shadows.of(value))

    return property(original.__get__, assign)


def to_list(tracer: Tracer, original: Callable[..., object], tensor: torch.Tensor) -> object:
    """`Tensor.tolist`: the known values, or assumed ones."""
    if not isinstance(tensor, FakeTensor):
        return original(tensor)
    if tensor.device.type == "cuda":
        tracer.clock.copy_to_host(tensor.numel() * tensor.element_size())
    with unset_fake_temporarily():
        return cast("object", tracer.shadows.assumed(tensor).tolist())


def to_numpy(
    tracer: Tracer, original: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object
) -> object:
    """`Tensor.numpy`: the known values, or assumed ones; a GPU tensor raises TypeError, as on a card."""
    if not isinstance(tensor, FakeTensor):
        return original(tensor, *args, **kwargs)
    if tensor.device.type == "cuda":
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    with unset_fake_temporarily():
        return cast("object", tracer.shadows.assumed(tensor).detach().numpy())


def to_array(original: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
    """`numpy.asarray(tensor)`."""
    if not isinstance(tensor, FakeTensor):
        return original(tensor, *args, **kwargs)
    return numpy.asarray(tensor.numpy(), dtype=args[0] if args else None)  # type: ignore[call-overload]


def formatted(original: Callable[..., str], tensor: torch.Tensor, spec: str) -> str:
    """`f"{loss:.3f}"`: the number that `.item()` would give."""
    if isinstance(tensor, FakeTensor) and tensor.dim() == 0:
        return format(tensor.item(), spec)
    return original(tensor, spec)


def deep_copied(
    memory: SimulatedMemory, original: Callable[..., torch.Tensor], tensor: torch.Tensor, memo: dict[int, torch.Tensor]
) -> torch.Tensor:
    """`copy.deepcopy` of a fake: torch would copy its storage, which is missing."""
    if not isinstance(tensor, FakeTensor):
        return original(tensor, memo)
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copied: torch.Tensor = tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memory.mark(copied, "weights")
    else:
        copied.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def pinned_copy(tracer: Tracer, tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """`Tensor.pin_memory`: a copy in pinned memory, whose values are as known as those of the tensor."""
    if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cpu" or is_pinned(tensor):
        return tensor
    copied = tensor.clone()
    set_pinned(copied)
    if tracer.host is not None and copied.numel():
        tracer.host.pin(copied)
    return copied


def shared(original: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`Tensor.share_memory_`: a fake is returned as it is, having no memory to share; datasets shares its epoch so."""
    return tensor if isinstance(tensor, FakeTensor) else original(tensor)


def resize_storage(
    memory: SimulatedMemory, original: Callable[..., object], storage: torch.UntypedStorage, size: int
) -> object:
    """`UntypedStorage.resize_`: FSDP frees and refills parameters through it."""
    before = storage.nbytes()
    result = original(storage, size)
    if size != before and memory.knows(storage):
        memory.resized(storage)
    return result


def storage_address(memory: SimulatedMemory, original: Callable[..., int], storage: torch.UntypedStorage) -> int:
    """`UntypedStorage.data_ptr`: the invented address of a storage of this card, by which TRL tells storages apart."""
    return memory.address_of(storage) or original(storage)


# Checkpoints inside the block: `torch.save` writes shapes instead of values, and `torch.load` makes fakes from them.
#
# A fake is saved as a small dictionary with its known values, if any. So files stay small, `weights_only=True` accepts
# them, and a loop can load its own checkpoints. Files saved outside the block are loaded too, as their shapes.

_KEY = "autofit fake tensor"
_MODULE = "autofit fake module"
KNOWN_LIMIT = 4096  # most elements of saved known values (step counters, token counts)


def torch_checkpoints(shadows: Shadows) -> Iterable[Target]:
    reason = "fakes have no bytes to save"
    yield torch, "save", partial(_save, shadows, untouched(torch.save)), reason
    yield torch, "load", partial(_load, untouched(torch.load)), reason


def _save(shadows: Shadows, original: Callable[..., object], obj: object, *args: object, **kwargs: object) -> None:
    with unset_fake_temporarily():
        original(_described(shadows, obj), *args, **kwargs)


def _load(
    original: Callable[..., object], f: object, map_location: object = None, *args: object, **kwargs: object
) -> object:
    return _restored(original(f, "cpu", *args, **kwargs), map_location)


def _described(shadows: Shadows, value: object) -> object:
    """`value` with each fake in its containers replaced by a description."""
    if isinstance(value, FakeTensor):
        known = shadows.of(value)
        return {
            _KEY: list(value.shape), "dtype": value.dtype, "device": str(value.device),
            "parameter": isinstance(value, torch.nn.Parameter), "requires_grad": value.requires_grad,
            "values": known.tolist() if known is not None and known.numel() <= KNOWN_LIMIT else None,
        }  # fmt: skip
    if isinstance(value, torch.nn.Module):
        return {_MODULE: type(value).__name__}
    return _rebuilt(value, lambda item: _described(shadows, item))


def _restored(value: object, map_location: object) -> object:
    if isinstance(value, dict) and _MODULE in value:
        raise FakeGpuError(f"a whole {value[_MODULE]} saved inside the block cannot be loaded; save its state_dict()")
    if isinstance(value, dict) and _KEY in value:
        device, values = _device(value["device"], map_location), value["values"]
        if values is not None:
            made = torch.tensor(values, dtype=value["dtype"]).reshape(value[_KEY]).to(device)
        else:
            made = torch.empty(value[_KEY], dtype=value["dtype"], device=device)
        if value["parameter"]:
            return torch.nn.Parameter(made, requires_grad=value["requires_grad"])
        return made.requires_grad_(value["requires_grad"])
    if isinstance(value, torch.Tensor):
        return value.to(_device("cpu", map_location))
    return _rebuilt(value, lambda item: _restored(item, map_location))


def _rebuilt(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, dict):
        made = cast("dict[object, object]", type(value)()) if type(value).__name__ == "OrderedDict" else {}
        made.update({key: change(item) for key, item in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in cast("Iterable[object]", value))  # type: ignore[call-arg]
    return value


def _device(saved: str, map_location: object) -> torch.device:
    if isinstance(map_location, dict):
        map_location = map_location.get(saved, saved)
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location)
    return torch.device(saved)
