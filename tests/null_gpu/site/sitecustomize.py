"""On PYTHONPATH of what runs on the null GPU: what a program reads off the card, and zeros would lead astray.

Every tensor of the null GPU holds zeros, so `mask.all()` is false, and transformers would make a mask of all pairs of
tokens, which it does not make on a card where nothing is padded. Nor would a rollout ever end: `finished == 0` is false
too. Here each completion has all the tokens that it may have, as in a probe. `hidden[labels != -100]` would have no
row, so that TRL's chunked loss computed nothing: whole numbers and masks have their values (host_values.py). Triton's
kernels are not compiled; they do nothing, as all others.

With NULL_GPU_VALUES=1 every tensor has its values (card_values.py). Then there is no Triton: its kernels have none.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _of_torch(torch: ModuleType) -> None:
    original, copied = torch.Tensor.all, torch.Tensor.cpu

    def answered(self: object, *args: object, **named: object) -> object:
        found = original(self, *args, **named)
        return torch.tensor(all_of(self)) if found.is_cuda and not found.dim() else found

    def on_the_host(self: Any, *args: object, **named: object) -> object:
        found = copied(self, *args, **named)
        return torch.ones_like(found) if self.is_cuda and self.dtype is torch.bool else found

    torch.Tensor.all, torch.Tensor.cpu = answered, on_the_host
    from host_values import VALUES, all_of  # type: ignore[import-not-found]

    VALUES.__enter__()


def _of_transformers(masking: ModuleType) -> None:
    original = getattr(masking, "fast_all", None)  # earlier versions call Tensor.all

    def fast_all(mask: Any, *args: object, **named: object) -> object:
        from host_values import all_of

        assert original is not None
        return all_of(mask) if mask.is_cuda else original(mask, *args, **named)

    if original is not None:
        masking.fast_all = fast_all  # type: ignore[attr-defined]


_unfinished = True


def _of_criteria(criteria: ModuleType) -> None:
    original = criteria.StoppingCriteriaList.__call__

    def asked(self: Any, input_ids: Any, *args: object, **named: object) -> object:
        global _unfinished
        _unfinished = not input_ids.is_cuda or input_ids.shape[1] < self.max_length
        return original(self, input_ids, *args, **named)

    criteria.StoppingCriteriaList.__call__ = asked


def _of_generation(generation: ModuleType) -> None:
    original = generation.GenerationMixin._has_unfinished_sequences

    def answered(self: object, finished: object, synced_gpus: bool, device: Any) -> object:
        global _unfinished
        if device.type != "cuda":
            return original(self, finished, synced_gpus, device)
        goes_on, _unfinished = _unfinished, True
        return goes_on

    generation.GenerationMixin._has_unfinished_sequences = answered


def _of_triton(jit: ModuleType) -> None:
    jit.JITFunction.run = lambda *_, **__: None


def _of_zero(zero: ModuleType) -> None:
    """DeepSpeed reads off the card whether a gradient overflowed, and would leave out the step: none does."""
    zero.is_invalid_grad_norm = _never(zero.is_invalid_grad_norm)  # type: ignore[attr-defined]
    for optimizer in [known for name, known in vars(zero).items() if name.startswith("DeepSpeedZeroOptimizer")]:
        optimizer.has_overflow = _never(optimizer.has_overflow)


def _never(asked: Callable[..., object]) -> Callable[..., bool]:
    def answered(*args: object, **named: object) -> bool:
        asked(*args, **named)
        return False

    return answered


def _of_torch_with_values(_: ModuleType) -> None:
    import card_values  # type: ignore[import-not-found]

    card_values.start()


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch": _of_torch, "transformers.masking_utils": _of_transformers,
    "transformers.generation.stopping_criteria": _of_criteria, "transformers.generation.utils": _of_generation,
    "triton.runtime.jit": _of_triton, "deepspeed.runtime.zero.stage_1_and_2": _of_zero,
    "deepspeed.runtime.zero.stage3": _of_zero,
}  # fmt: skip
if os.environ.get("NULL_GPU_VALUES") == "1":
    _CHANGES = {"torch": _of_torch_with_values}
    sys.modules["triton"] = None  # type: ignore[assignment]


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
