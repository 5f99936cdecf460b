"""Shadow values: real CPU tensors beside small fake tensors that were computed from known data only.

Fake tensors have shapes and no values, but training code reads some values: mask counts, `.item()` of a step counter,
boolean indexing. Token ids, masks and lengths come from real data through cheap integer operations, so these values are
computed for real. Values that depend on weights are unknown; the answer is then the worst case for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autofit.fakegpu.routing import ONE_HOT_OPERATIONS, OneHot, balanced_choice, is_router

aten = torch.ops.aten

INTEGER_LIMIT = 1 << 20  # most elements of an int or bool shadow
CPU_FLOAT_LIMIT = 1 << 14  # most elements of a float CPU shadow (optimizer step counters, rewards, losses to log)
GPU_FLOAT_LIMIT = 1 << 10  # most elements of a float GPU shadow (rewards, advantages, learning rates)

_UNINITIALISED = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default}
_SAMPLERS = {aten.multinomial.default, aten.argmax.default}
_NEVER_TRUE = {aten.isnan.default, aten.isinf.default}  # training is assumed not to diverge
_KEEPS_INFINITY_FLAG = {aten._amp_foreach_non_finite_check_and_unscale_.default}
_FOLLOWS = {
    aten.all.default, aten.any.default, aten.view.default, aten.select.int, aten.unsqueeze.default,
    aten.expand.default, aten.clone.default, aten.detach.default, aten._to_copy.default, aten.slice.Tensor,
}  # fmt: skip
_NEGATES = {aten.bitwise_not.default, aten.logical_not.default}
DATA_DEPENDENT = {
    aten.nonzero.default, aten.index.Tensor, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.repeat_interleave.Tensor, aten.bincount.default,
}  # fmt: skip

_FAILED = object()  # None is a valid result of an in-place operation


class Shadows:
    """Stores a shadow on each fake tensor with known values; invalidates it when unknown data is written to it."""

    def __init__(self) -> None:
        self._stale: set[int] = set()  # shadow storages overwritten with unknown data
        self.expert_imbalance = 1.0  # the share of the most loaded expert over an even one
        self.routed: Callable[[], object] = lambda: None  # called for each choice of experts
        self.vocabularies: set[int] = set()  # rows of each table of embeddings: scores as long are no router's

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The known values of a tensor, or None. A real tensor is its own shadow."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        shadow = cast("torch.Tensor | None", getattr(tensor, "_autofit_shadow", None))
        if shadow is not None and self._stale and shadow.untyped_storage()._cdata in self._stale:
            return None
        return shadow

    def give(self, tensor: torch.Tensor, shadow: torch.Tensor | None, *, fresh: bool = False) -> None:
        if fresh and shadow is not None and self._stale:
            self._stale.discard(shadow.untyped_storage()._cdata)
        tensor._autofit_shadow = shadow  # type: ignore[attr-defined]

    def truth(self, tensor: torch.Tensor) -> bool | None:
        """The assumed value of all elements of an unknown bool tensor; None if no rule applies."""
        return cast("bool | None", getattr(tensor, "_autofit_truth", None))

    def item(self, tensor: torch.Tensor) -> float | int | bool:
        """The value of a one-element tensor; 1 if it is unknown (a finite loss, a mask that is on)."""
        shadow = self.of(tensor)
        if shadow is not None:
            with unset_fake_temporarily():
                return shadow.item()
        if tensor.dtype is torch.bool:
            known = self.truth(tensor)
            return True if known is None else known
        return 1.0 if tensor.dtype.is_floating_point else 1

    def count_true(self, mask: torch.Tensor) -> int:
        """Number of nonzero elements; if unknown, all of them, the worst case for memory."""
        shadow = self.of(mask)
        if shadow is not None:
            with unset_fake_temporarily():
                return int(torch.count_nonzero(shadow))
        return 0 if self.truth(mask) is False else mask.numel()

    # ------------------------------------------------------------------ following operations
    def follow(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
        """After `out = func(*args)` on fakes: run `func` on the shadows too, if all inputs are known."""
        if func in _LIFTS:
            self._lift(args[0], out)
            return
        mutates = func._schema.is_mutable
        first = args[0] if args else None
        if isinstance(first, FakeTensor) and self.of(first) is None:
            self._unknown(func, args, kwargs, out, mutates=mutates)
            return
        if not mutates and not _worth_it(out):
            return
        if func in _UNINITIALISED:
            return
        values = _Values(self)
        real_args = [values.convert(a) for a in args]
        real_kwargs = {k: values.convert(v) for k, v in kwargs.items()}
        if not values.known:
            self._unknown(func, args, kwargs, out, mutates=mutates)
            return
        result = self._compute(func, real_args, real_kwargs)
        if result is _FAILED:
            self._unknown(func, args, kwargs, out, mutates=mutates)
            return
        fresh = not func.is_view and not mutates
        for fake, real in zip(_flat(out), _flat(result), strict=False):
            if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor):
                self.give(fake, real, fresh=fresh)

    def compute_known(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object | None:
        """The real result of an operation if all its inputs are known, else None (for data-dependent output shapes)."""
        values = _Values(self)
        real_args = [values.convert(a) for a in args]
        real_kwargs = {k: values.convert(v) for k, v in kwargs.items()}
        result = self._compute(func, real_args, real_kwargs) if values.known else _FAILED
        return None if result is _FAILED else result

    def _compute(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        with unset_fake_temporarily(), torch.no_grad():
            try:
                return cast("object", func(*args, **kwargs))
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                return _FAILED  # no CPU kernel for these inputs: the values stay unknown

    def _lift(self, source: object, out: object) -> None:
        if isinstance(out, FakeTensor) and isinstance(source, torch.Tensor):
            known = source if not isinstance(source, FakeTensor) else self.of(source)
            if known is not None and known.numel() <= INTEGER_LIMIT:
                with unset_fake_temporarily():
                    self.give(out, known.clone(), fresh=True)

    def _unknown(
        self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object, *, mutates: bool
    ) -> None:
        if mutates:
            if func not in _KEEPS_INFINITY_FLAG:
                self._forget_written(func, args, kwargs)
        elif func in _SAMPLERS:
            self._sample(args, out)
        elif func is aten.topk.default:
            self._route(args, cast("Sequence[object]", out)[1])
        elif func in ONE_HOT_OPERATIONS and hasattr(args[0], "_autofit_one_hot"):
            self._follow_one_hot(func, args, out)
        else:
            self._follow_truth(func, args, out)

    def _forget_written(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in _flat(value):
                shadow = getattr(tensor, "_autofit_shadow", None)
                if shadow is not None:
                    self._stale.add(shadow.untyped_storage()._cdata)
                if hasattr(tensor, "_autofit_one_hot"):
                    del tensor._autofit_one_hot

    def _sample(self, args: Sequence[object], out: object) -> None:
        """Give sampled tokens a value that is not an end-of-sequence token, so that a rollout runs to full length."""
        if not isinstance(out, FakeTensor) or out.numel() > INTEGER_LIMIT or not isinstance(args[0], torch.Tensor):
            return
        vocabulary = args[0].shape[-1] if args[0].dim() else 1
        with unset_fake_temporarily():
            self.give(out, torch.full(tuple(out.shape), vocabulary // 3, dtype=out.dtype), fresh=True)

    def _route(self, args: Sequence[object], chosen: object) -> None:
        """Give a router's choice of experts balanced values."""
        scores, k = cast("FakeTensor", args[0]), cast("int", args[1])
        last = len(args) < 3 or args[2] in (-1, scores.dim() - 1)
        if not is_router(scores, k, last=last) or scores.shape[-1] in self.vocabularies:
            return
        if not isinstance(chosen, FakeTensor) or chosen.numel() > INTEGER_LIMIT:
            return
        with unset_fake_temporarily():
            choice = balanced_choice(chosen.numel() // k, k, scores.shape[-1], self.expert_imbalance)
            self.give(chosen, choice.view(tuple(chosen.shape)), fresh=True)
        self.routed()

    def make_one_hot(self, tensor: torch.Tensor, choice: torch.Tensor, classes: int) -> None:
        """Let a fake one-hot tensor stand for the known `choice`, (..., k), whatever its size."""
        known = self.of(choice)
        if known is not None and self.of(tensor) is None:
            with unset_fake_temporarily():
                tensor._autofit_one_hot = OneHot.of(known.clone(), classes)  # type: ignore[attr-defined]

    def _follow_one_hot(self, func: OpOverload, args: Sequence[object], out: object) -> None:
        one_hot = cast("OneHot", args[0]._autofit_one_hot)  # type: ignore[attr-defined]
        values = _Values(self)
        known = [values.convert(a) for a in args[1:]]
        if not values.known or not isinstance(out, FakeTensor):
            return
        with unset_fake_temporarily():
            result = one_hot.after(func, (None, *known))
        if isinstance(result, OneHot):
            out._autofit_one_hot = result  # type: ignore[attr-defined]
        elif result is not None and result.numel() <= INTEGER_LIMIT:
            self.give(out, result, fresh=True)

    def _follow_truth(self, func: OpOverload, args: Sequence[object], out: object) -> None:
        if not isinstance(out, FakeTensor) or out.dtype is not torch.bool:
            return
        if func in _NEVER_TRUE:
            out._autofit_truth = False  # type: ignore[attr-defined]
            return
        source = args[0] if args else None
        known = self.truth(source) if isinstance(source, FakeTensor) else None
        if known is not None and (func in _FOLLOWS or func in _NEGATES):
            out._autofit_truth = known if func in _FOLLOWS else not known  # type: ignore[attr-defined]


class _Values:
    """Replaces fake tensors in arguments by their shadows; `known` is false after the first one without a shadow."""

    __slots__ = ("known", "shadows")

    def __init__(self, shadows: Shadows) -> None:
        self.shadows = shadows
        self.known = True

    def convert(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            shadow = self.shadows.of(value)
            if shadow is None:
                self.known = False
            return shadow
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(v) for v in value) if self.known else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value


def _worth_it(out: object) -> bool:
    first = next((t for t in _flat(out) if isinstance(t, FakeTensor)), None)
    if first is None:
        return False
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        return first.numel() <= INTEGER_LIMIT
    return first.numel() <= (CPU_FLOAT_LIMIT if first.device.type == "cpu" else GPU_FLOAT_LIMIT)


def _flat(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
