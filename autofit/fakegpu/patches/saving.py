"""Checkpoints inside the block: `torch.save` writes shapes instead of values, and `torch.load` makes fakes from them.

A fake is saved as a small dictionary with its known values, if any. So files stay small, `weights_only=True` accepts
them, and a loop can load its own checkpoints. Files saved outside the block are loaded too, as their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.known_values import Shadows
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
_KEY = "autofit fake tensor"
_MODULE = "autofit fake module"
KNOWN_LIMIT = 4096  # most elements of saved known values (step counters, token counts)


def torch_checkpoints(shadows: Shadows) -> Iterable[Target]:
    reason = "fakes have no bytes to save"
    yield torch, "save", _save(shadows, untouched(torch.save)), reason
    yield torch, "load", _load(untouched(torch.load)), reason


def _save(shadows: Shadows, original: Callable[..., object]) -> Callable[..., None]:
    def save(obj: object, *args: object, **kwargs: object) -> None:
        with unset_fake_temporarily():
            original(_described(shadows, obj), *args, **kwargs)

    return save


def _load(original: Callable[..., object]) -> Callable[..., object]:
    def load(f: object, map_location: object = None, *args: object, **kwargs: object) -> object:
        return _restored(original(f, "cpu", *args, **kwargs), map_location)

    return load


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
