"""Values of whole numbers and masks on the null GPU: the CPU computes them beside, on tensors of its own.

Memory and dispatch stay the CUDA build's; only what a program would read off the card, or take for the rows of a mask,
comes from here. Tensors of floating-point numbers have no values.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_LARGEST = 1 << 26  # elements
_Tensor = torch.Tensor
_WRITES = {_Tensor.__setitem__, _Tensor.copy_}
_ROWS = {_Tensor.__getitem__, _Tensor.__setitem__}
_NEW = {torch.empty, torch.empty_like, torch.empty_strided, _Tensor.new_empty}  # hold nothing yet


class HostValues(TorchFunctionMode):
    """Follows CUDA tensors of whole numbers and booleans, from the host's tensors that they were made of."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a CUDA tensor; None where they are not known."""
        found: torch.Tensor | None = self._known.get(tensor)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_cuda else None
        if func in _ROWS and asked is not None:
            args = (asked, self._rows(args[1]), *args[2:])
        elif asked is not None and func in (_Tensor.item, _Tensor.tolist, _Tensor.__bool__, _Tensor.cpu):
            known = self.of(asked)
            if known is not None:
                func(asked)
                return func(known)
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def _rows(self, index: Any) -> Any:
        """`index` with the rows of a mask in place of the mask: all of them where it is not known."""
        if isinstance(index, tuple) and any(_is_mask(part) for part in index):
            return tuple(row for part in index for row in (self._rows(part) if _is_mask(part) else (part,)))
        if not _is_mask(index):
            return index
        known = self.of(index)
        mask = torch.ones(index.shape, dtype=torch.bool) if known is None else known.bool()
        return mask.nonzero().to(index.device).unbind(1)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func in _NEW:
            return
        changed = args[0] if out is None or func in _WRITES else out
        if not any(_is_counted(each) for each in _tensors(changed)):
            return
        with contextlib.suppress(_Unknown, RuntimeError, TypeError, ValueError, IndexError):
            made = func(*self._on_host(args), **self._on_host(kwargs))
            made = self._on_host(args[0]) if out is None or func in _WRITES else made
            for there, here in zip(_tensors(changed), _tensors(made), strict=True):
                if _is_counted(there) and there.shape == here.shape and not here.is_cuda:
                    self._known[there] = here
            return
        for there in _tensors(changed):
            self._known.pop(there, None)

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.is_cuda:
                return value
            known = self.of(value)
            if known is None:
                raise _Unknown
            return known
        if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
            return torch.device("cpu")
        if isinstance(value, dict):
            return {key: self._on_host(each) for key, each in value.items()}
        return type(value)(map(self._on_host, value)) if type(value) in (tuple, list) else value


VALUES = HostValues()


def all_of(mask: torch.Tensor) -> bool:
    """Whether every element of a CUDA mask is true; yes where it is not known, as where nothing is padded."""
    known = VALUES.of(mask)
    return known is None or bool(known.all())


class _Unknown(Exception):
    """A tensor has no values here."""


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.is_cuda and index.dtype is torch.bool


def _is_counted(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and not tensor.is_floating_point() and tensor.numel() <= _LARGEST


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
