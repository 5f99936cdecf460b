"""Calls of operators as JSON: as they were seen in a traced step, and again with other sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_SMALLEST = 16  # sizes below it are heads, groups, dimensions' numbers: they stay
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
Call = dict[str, Any]


class Calls(TorchDispatchMode):
    """Notes the operators that are called inside, each with the arguments of its first calls of different shapes."""

    def __init__(self, most: int = 4) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Call]] = {}
        self._most = most

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("aten", "bitsandbytes"):
            seen = self.found.setdefault(str(func), [])
            if len(seen) < self._most:
                call = {"op": str(func), "args": _told(args), "kwargs": _told(kwargs)}
                if call not in seen and any(_is_on_card(part) for part in tensors((call["args"], call["kwargs"]))):
                    seen.append(call)
        return func(*args, **kwargs)


def operator(name: str) -> OpOverload:
    """The operator that `str` calls `name`: aten.add.Tensor."""
    namespace, packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def made(value: Any) -> Any:
    """Arguments again, with fresh tensors of the same sizes, strides and types."""
    if isinstance(value, list):
        return [made(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device=value["device"])
    for name in (*_NAMED, "device", "float"):
        if name in value and len(value) == 1:
            given = value[name]
            return float(given) if name == "float" else given if name == "device" else getattr(torch, given)
    return {key: made(part) for key, part in value.items()}


def resized(call: Call, chance: random.Random) -> Call:
    """The call with some of its sizes replaced by random ones, each size by one other wherever it stands."""
    sizes = sorted({size for part in tensors((call["args"], call["kwargs"])) for size in part["shape"]})
    chosen = [size for size in sizes if size >= _SMALLEST]
    chance.shuffle(chosen)
    others = {size: chance.randint(max(2, size // 4), 2 * size) for size in chosen[: chance.randint(1, len(chosen))]}
    return {key: _replaced(part, others) for key, part in call.items()}


def has_sizes(call: Call) -> bool:
    """Whether the call has a size that may be another."""
    return any(size >= _SMALLEST for part in tensors((call["args"], call["kwargs"])) for size in part["shape"])


def tensors(value: Any) -> Iterator[dict[str, Any]]:
    """The tensors among the arguments of a call, as they are told."""
    if isinstance(value, dict) and "shape" in value:
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        device = "cpu" if value.device.type == "cpu" else "cuda"
        return {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": _last(value.dtype),
            "device": device,
        }
    if isinstance(value, list | tuple):
        return [_told(part) for part in value]
    if isinstance(value, dict):
        return {key: _told(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: _last(value)}
    return value if isinstance(value, int | float | str | bool) else None  # a generator


def _last(value: object) -> str:
    return str(value).rpartition(".")[2]


def _is_on_card(told: Mapping[str, Any]) -> bool:
    return bool(told["device"] == "cuda")


def _replaced(value: Any, others: Mapping[int, int]) -> Any:
    if isinstance(value, dict) and "shape" in value:
        shape = [others.get(size, size) for size in value["shape"]]
        return {**value, "shape": shape, "stride": _strides(value["shape"], value["stride"], shape)}
    if isinstance(value, dict):
        return {key: _replaced(part, others) for key, part in value.items()}
    if isinstance(value, list):
        return [_replaced(part, others) for part in value]
    return others.get(value, value) if type(value) is int else value


def _strides(before: list[int], strides: list[int], after: list[int]) -> list[int]:
    """Strides of the same order of dimensions, with the same gaps between their parts, in multiples of a part."""
    found, span, old_span = [0] * len(after), 1, 1
    for dim in sorted(range(len(before)), key=lambda dim: (strides[dim], -dim)):
        if not strides[dim]:
            continue
        found[dim] = max(1, strides[dim] // max(old_span, 1)) * span if before[dim] > 1 else span
        span, old_span = found[dim] * after[dim], strides[dim] * before[dim]
    return found
