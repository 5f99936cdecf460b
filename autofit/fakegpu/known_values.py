"""Shadow values: real CPU tensors beside small fake tensors that were computed from known data only.

Fake tensors have shapes and no values, but training code reads some values: mask counts, `.item()` of a step counter,
boolean indexing. Token ids, masks and lengths come from real data through cheap integer operations, so these values are
computed for real. Values that depend on weights are unknown; the answer is then the worst case for memory, and a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

# Which experts a mixture-of-experts layer sends its tokens to, although the router's logits are not known.
#
# A router is told by its operation: the top k of unknown scores, in rows of at most `MOST_EXPERTS`. Its choice is taken
# as balanced, as the losses and biases that train routers aim at: each token has k different experts, in turn. One
# expert can be given more than its share. The top k of a vocabulary has longer rows, and stays unknown.
#
# Eager experts read the choice from a one-hot tensor of (tokens, k, experts), too large to compute for real: `OneHot`
# stands for its values.

aten = torch.ops.aten

# Published models have up to 512 experts (Qwen3-Next; Kimi K2 384, DeepSeek-V3 256); the least vocabulary of one is
# that of bytes and some hundred further tokens, and tokens to sample from are taken from values, not from places.
MOST_EXPERTS = 512

_UNCHANGED = {aten.detach.default, aten.alias.default, aten.clone.default}
_MOVES = {aten.permute.default, aten.transpose.int}
ONE_HOT_OPERATIONS = {*_UNCHANGED, *_MOVES, aten.sum.dim_IntList, aten.select.int, aten.index.Tensor}


def is_router(scores: torch.Tensor, k: int, *, last: bool) -> bool:
    """True if the top `k` of unknown `scores` along their last dimension is a choice of experts."""
    return last and scores.dim() >= 2 and scores.is_floating_point() and 0 < k <= scores.shape[-1] <= MOST_EXPERTS


def balanced_choice(tokens: int, k: int, experts: int, imbalance: float = 1.0) -> torch.Tensor:
    """Experts of each token, (tokens, k) int64, a token's all different.

    Expert 0 gets `imbalance` times tokens * k / experts of them, at most all tokens; the others share the rest evenly.
    """
    slots = tokens * k
    if imbalance == 1.0 or k == experts:
        return (torch.arange(slots) % experts).view(tokens, k)
    hot = min(tokens, ceil(imbalance * slots / experts))
    choice = torch.empty(tokens, k, dtype=torch.int64)
    rest = torch.ones(tokens, k, dtype=torch.bool)
    rest[:hot, 0] = False
    choice[:hot, 0] = 0
    choice[rest] = 1 + torch.arange(slots - hot) % (experts - 1)
    return choice


@dataclass(frozen=True, slots=True)
class OneHot:
    """The values of a one-hot tensor of experts: `choice`, (..., k), and where each of its dimensions is now."""

    choice: torch.Tensor
    experts: int
    axes: tuple[int, ...]  # of the tensor, as numbers of the dimensions (*choice.shape, experts)

    @classmethod
    def of(cls, choice: torch.Tensor, experts: int) -> OneHot:
        return cls(choice, experts, tuple(range(choice.dim() + 1)))

    def after(self, func: OpOverload, args: Sequence[object]) -> OneHot | torch.Tensor | None:
        """The values of the output of one of `ONE_HOT_OPERATIONS`: one-hot still, as they are, or unknown (None).

        An index among `args` is its values.
        """
        if func in _UNCHANGED:
            return self
        if func is aten.permute.default:
            return replace(self, axes=tuple(self.axes[d] for d in cast("Sequence[int]", args[1])))
        if func is aten.transpose.int:
            axes, (one, other) = list(self.axes), cast("tuple[int, int]", args[1:3])
            axes[one], axes[other] = axes[other], axes[one]
            return replace(self, axes=tuple(axes))
        if func is aten.sum.dim_IntList:
            return self._counts(args)
        if func is aten.select.int:
            dim, expert = cast("tuple[int, int]", args[1:3])
            return self._tokens_of(expert) if self._is_expert(dim) else None
        indices = cast("Sequence[object]", args[1])
        first = indices[0] if len(indices) == 1 else None
        if not isinstance(first, torch.Tensor) or first.shape != (1,) or not self._is_expert(0):
            return None
        return self._tokens_of(int(first)).unsqueeze(0)

    def _is_expert(self, dim: int) -> bool:
        return self.axes[dim] == self.choice.dim()

    def _counts(self, args: Sequence[object]) -> torch.Tensor | None:
        """Number of times that each expert is chosen: the sum over all other dimensions."""
        summed = {self.axes[d] for d in cast("Sequence[int]", args[1])}
        if len(args) > 2 or summed != set(range(self.choice.dim())):
            return None
        return torch.bincount(self.choice.flatten(), minlength=self.experts)

    def _tokens_of(self, expert: int) -> torch.Tensor:
        return (self.choice == expert).long().permute([axis for axis in self.axes if axis != self.choice.dim()])


INTEGER_LIMIT = 1 << 20  # most elements of an int or bool shadow
CPU_FLOAT_LIMIT = 1 << 14  # most elements of a float CPU shadow (optimizer step counters, rewards, losses to log)
GPU_FLOAT_LIMIT = 1 << 10  # most elements of a float GPU shadow (rewards, advantages, learning rates)
FLOAT_MASK_LIMIT = 1 << 18  # the same, if the floats were only filled, cast or moved: a mask of 64 rows x 4,096 tokens

_UNINITIALISED = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default}
_SAMPLERS = {aten.multinomial.default, aten.argmax.default}
_KEEPS_INFINITY_FLAG = {aten._amp_foreach_non_finite_check_and_unscale_.default}
_FOLLOWS = {
    aten.all.default, aten.any.default, aten.view.default, aten.select.int, aten.unsqueeze.default,
    aten.expand.default, aten.clone.default, aten.detach.default, aten._to_copy.default, aten.slice.Tensor,
}  # fmt: skip
_NEVER_TRUE = {aten.isnan.default, aten.isinf.default}
_NEGATES = {aten.bitwise_not.default, aten.logical_not.default}
_FILLS_AND_MOVES = {
    aten.ones.default, aten.zeros.default, aten.full.default, aten.ones_like.default, aten.zeros_like.default,
    aten.full_like.default, aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.cat.default,
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.view.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.index.Tensor, aten.stack.default,
}  # fmt: skip
_ANDS = {aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default}
_EQUAL, _DIFFERENT = {aten.eq.Tensor, aten.eq.Scalar}, {aten.ne.Tensor, aten.ne.Scalar}
_COUNTS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList}
_KEEPS_COUNT = _FOLLOWS | {aten.max.default, aten.amax.default, aten.min.default, aten.amin.default}
_CONDITION_NOTE = (
    "a condition on values that are not known here was read: masks count as present (`all` is False, `any` True), two "
    "numbers as different, and training as not diverging"
)
_NUMBER_NOTE = (
    "an integer that is not known here was read: a count of a mask is its largest possible one, any other number is 1"
)
ASSUMPTIONS = {_CONDITION_NOTE, _NUMBER_NOTE}  # notes that nearly every training has
DATA_DEPENDENT = {
    aten.nonzero.default, aten.index.Tensor, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.repeat_interleave.Tensor, aten.bincount.default,
}  # fmt: skip

_FAILED = object()  # None is a valid result of an in-place operation


class Shadows:
    """Stores a shadow on each fake tensor with known values; invalidates it when unknown data is written to it."""

    def __init__(self, note: Callable[[str], None] = lambda text: None) -> None:
        self._stale: set[int] = set()  # shadow storages overwritten with unknown data
        self._note = note
        self.expert_imbalance = 1.0  # the share of the most loaded expert over an even one
        self.routed: Callable[[], object] = lambda: None  # called for each choice of experts
        self.followers: dict[OpOverload, Callable[[Sequence[object]], None]] = {}  # what gives results their values
        self.vocabularies: set[int] = set()  # rows of each table of embeddings: scores as long are no router's

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The known values of a tensor, if any. A real tensor is its own shadow."""
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
        """The assumed value of all elements of an unknown bool tensor, if a rule applies."""
        return cast("bool | None", getattr(tensor, "_autofit_truth", None))

    def item(self, tensor: torch.Tensor) -> float | int | bool:
        """The value of a one-element tensor, known or assumed."""
        with unset_fake_temporarily():
            return self.assumed(tensor).item()

    def assumed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The known values, or the worst case for memory: conditions by `_truth_of`, largest counts, else ones."""
        shadow = self.of(tensor)
        if shadow is not None:
            return shadow
        value: int | bool = 1
        if tensor.dtype is torch.bool:
            self._note(_CONDITION_NOTE)
            value = self.truth(tensor) is not False
        elif not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            self._note(_NUMBER_NOTE)
            value = getattr(tensor, "_autofit_most", 1)
        with unset_fake_temporarily():
            return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype)

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
        if func in self.followers:
            self.followers[func](args)
            return
        mutates = func._schema.is_mutable
        first = args[0] if args else None
        if isinstance(first, FakeTensor) and self.of(first) is None:
            self._unknown(func, args, kwargs, out, mutates=mutates)
            return
        if not mutates and not _worth_it(func, out):
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
        """Give sampled tokens another value than the end-of-sequence token, so that a rollout runs to full length."""
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
        source = args[0] if args else None
        if not isinstance(out, FakeTensor) or not isinstance(source, FakeTensor) or out.dtype.is_floating_point:
            return
        if out.dtype is not torch.bool:
            self._follow_count(func, source, out)
        elif (truth := self._truth_of(func, source, args[1:], out)) is not None:
            out._autofit_truth = truth  # type: ignore[attr-defined]

    def _truth_of(self, func: OpOverload, source: FakeTensor, others: Sequence[object], out: FakeTensor) -> bool | None:
        """The assumed value of an unknown condition. A mask has both values, and two numbers (counts) are different.

        So the check that all are on fails, and the mask stays. Training does not diverge: all values are finite.
        """
        known = self.truth(source)
        if func in _NEVER_TRUE:
            return False
        if func in _EQUAL | _DIFFERENT:
            if others[0] is source:
                return func in _EQUAL
            if isinstance(others[0], float) and abs(others[0]) == float("inf"):  # as isfinite and isinf ask
                return func in _DIFFERENT
            return func in _DIFFERENT if out.dim() == 0 else None
        if func in _ANDS and isinstance(others[0], torch.Tensor):
            return known and self.truth(others[0])
        if known is not None and (func in _FOLLOWS or func in _NEGATES):
            return known if func in _FOLLOWS else not known
        return {aten.all.default: False, aten.any.default: True}.get(func)

    def _follow_count(self, func: OpOverload, source: FakeTensor, out: FakeTensor) -> None:
        """Note the largest value of a count of an unknown mask, or of results of such counts."""
        if func in _COUNTS and source.dtype is torch.bool:
            most: int | None = source.numel() // max(out.numel(), 1)
        else:
            most = getattr(source, "_autofit_most", None) if func in _KEEPS_COUNT else None
        if most is not None:
            out._autofit_most = most  # type: ignore[attr-defined]


class _Values:
    """Replaces fake tensors in arguments by their shadows; `known` is false once one lacks a shadow."""

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


def _worth_it(func: OpOverload, out: object) -> bool:
    first = next((t for t in _flat(out) if isinstance(t, FakeTensor)), None)
    if first is None:
        return False
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        return first.numel() <= INTEGER_LIMIT
    limit = CPU_FLOAT_LIMIT if first.device.type == "cpu" else GPU_FLOAT_LIMIT
    return first.numel() <= (max(limit, FLOAT_MASK_LIMIT) if func in _FILLS_AND_MOVES else limit)


def _flat(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
