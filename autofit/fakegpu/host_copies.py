"""Copies between the card and pinned memory of the host, over the host link; other host memory is not simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
_FACTORIES = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten._to_copy.default,
}  # fmt: skip


class HostCopy(NamedTuple):
    """A copy of `nbytes` over the host link; the host waits for its end unless it was asked not to."""

    nbytes: int
    waits: bool


def pin(func: OpOverload, kwargs: Mapping[str, object], out: object) -> None:
    """Remember that the storage of `out` was asked for in pinned memory, as copies for which nobody waits are."""
    asked = kwargs.get("pin_memory") or (func is aten._to_copy.default and kwargs.get("non_blocking"))
    if func in _FACTORIES and asked and isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
        set_pinned(out)


def set_pinned(tensor: torch.Tensor) -> None:
    tensor.untyped_storage()._autofit_pinned = True  # type: ignore[attr-defined]


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or that of which it is a view, was asked for in pinned memory."""
    return getattr(tensor.untyped_storage(), "_autofit_pinned", False)


def host_copy(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> HostCopy | None:
    """The copy that `func` makes between pinned memory and the card; None if it makes none."""
    source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
    if not isinstance(source, FakeTensor) or not isinstance(target, FakeTensor):
        return None
    ends = source.fake_device.type, target.fake_device.type
    if ends not in (("cpu", "cuda"), ("cuda", "cpu")) or not is_pinned(source if ends[0] == "cpu" else target):
        return None
    asked = args[2] if func is aten.copy_.default and len(args) > 2 else kwargs.get("non_blocking", False)
    return HostCopy(target.numel() * target.element_size(), waits=not cast("bool", asked))
