"""On PYTHONPATH of what runs on the null GPU: a mask says there that no sample was padded, as it does on a card.

Every tensor of the null GPU holds zeros, so `mask.all()` is false, and transformers would make a mask of all pairs of
tokens, which it does not make on a card where nothing is padded.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _of_torch(torch: ModuleType) -> None:
    original = torch.Tensor.all

    def answered(self: object, *args: object, **named: object) -> object:
        found = original(self, *args, **named)
        return torch.ones((), dtype=torch.bool) if found.is_cuda and not found.dim() else found

    torch.Tensor.all = answered


def _of_transformers(masking: ModuleType) -> None:
    original = getattr(masking, "fast_all", None)  # earlier versions call Tensor.all

    def fast_all(mask: object, *args: object, **named: object) -> object:
        assert original is not None
        return True if mask.is_cuda else original(mask, *args, **named)  # type: ignore[attr-defined]

    if original is not None:
        masking.fast_all = fast_all  # type: ignore[attr-defined]


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch": _of_torch, "transformers.masking_utils": _of_transformers,
}  # fmt: skip


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = _CHANGES.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            assert change is not None
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
