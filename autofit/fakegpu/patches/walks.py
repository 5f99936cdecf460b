"""Patches that charge the host for Python: that goes over a model's modules, and bitsandbytes' around its kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.stack import is_own_work
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.tracer import TRAIN, VISIT, charge_modules, charge_tensors

Pair = tuple[str, torch.nn.Module]


def walks(gpu: FakeGpu) -> Iterable[Target]:
    """The patches of torch.nn.Module."""
    why = "the host's time for going over a model's modules"
    named = untouched(cast("Callable[..., Iterator[Pair]]", torch.nn.Module.named_modules))
    trained = untouched(cast("Callable[..., torch.nn.Module]", torch.nn.Module.train))
    inside, before = [False], weakref.WeakSet[torch.nn.Module]()  # that have been trained

    def named_modules(
        self: torch.nn.Module, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Pair]:
        found = named(self, memo, prefix, remove_duplicate)
        return found if memo is not None or _is_free(gpu) else _counted(gpu, found)

    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        if inside[0]:
            return trained(self, mode)
        # A mode that changes later does so around a rollout or an evaluation, of which it is a thousandth.
        free = _is_free(gpu) or (self.training != mode and (not mode or self in before))
        if mode:
            before.add(self)
        inside[0] = True
        try:
            return trained(self, mode)
        finally:
            inside[0] = False
            if not free:
                charge_modules(gpu.clock, gpu.layers, TRAIN, [module for _, module in named(self, set())])

    clips = untouched(cast("Callable[..., object]", torch.nn.utils.clip_grad_norm_))

    def clip(*args: object, **kwargs: object) -> object:
        log = gpu.clock.log
        if log is None:
            return clips(*args, **kwargs)
        log.of_step = True
        try:
            return clips(*args, **kwargs)
        finally:
            log.of_step = False

    return [
        (torch.nn.Module, "named_modules", named_modules, why), (torch.nn.Module, "train", train, why),
        (torch.nn.utils, "clip_grad_norm_", clip, "what it takes the host is a step's, not a micro-batch's"),
    ]  # fmt: skip


def _is_free(gpu: FakeGpu) -> bool:
    return is_own_work() or gpu.clock.asleep


def _counted(gpu: FakeGpu, found: Iterator[Pair]) -> Iterator[Pair]:
    modules = []
    try:
        for pair in found:
            modules.append(pair[1])
            yield pair
    finally:  # a walk may end early
        charge_modules(gpu.clock, gpu.layers, VISIT, modules)


# -- bitsandbytes -----------------------------------------------------------------------------------------------------
# Measured with the CUDA build of torch 2.11 and bitsandbytes 0.50.2 without a card, in turns with a module's `train()`,
# of which 0.19 launches are charged (`autofit/fakegpu/tracer.py`): `python -m gpu.low_bit`, four runs within 10 %. The
# host of an H100 took 92 to 157 us for each of 290 tensors of AdamW8bit (experiments/gpu/h100-2/timeline.jsonl); this
# says 112 us with a host of 11.0 us a launch and 230 with one of 22.7, the two that were measured there.


class Product(NamedTuple):
    """Launches that a product with a quantised weight takes the host beside those of its kernels."""

    forward: float
    recorded: float  # where a gradient is recorded
    backward: float


FOUR_BITS, FOUR_BITS_NESTED, EIGHT_BITS = Product(6.9, 10.9, 3.0), Product(7.9, 11.8, 3.7), Product(18.9, 18.9, 2.3)
# Launches a tensor that is updated, by whether its states are in 8 bits.
UPDATE = {True: 8.9, False: 6.8}
_WHY = "the host's time for bitsandbytes' Python"


def products(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The forward of layers of 4 and 8 bits."""
    four = untouched(cast("Callable[..., torch.Tensor]", module.matmul_4bit))
    eight = untouched(cast("Callable[..., torch.Tensor]", module.matmul))

    def matmul_4bit(a: torch.Tensor, b: torch.Tensor, quant_state: Any, *args: object, **kw: object) -> torch.Tensor:
        _charge_forward(gpu, _of_four_bits(quant_state), a)
        return four(a, b, quant_state, *args, **kw)

    def matmul(a: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        _charge_forward(gpu, EIGHT_BITS, a)
        return eight(a, *args, **kwargs)

    return [(module, "matmul_4bit", matmul_4bit, _WHY), (module, "matmul", matmul, _WHY)]


def gradients(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The backward of such layers."""
    for owner, cost in (
        (module.MatMul4Bit, lambda context: _of_four_bits(context.state)), (module.MatMul8bitLt, lambda _: EIGHT_BITS),
    ):  # fmt: skip
        yield owner, "backward", staticmethod(partial(_costly, gpu, untouched(owner.backward), cost)), _WHY


def updates(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """An optimizer's update of a tensor. The card has nothing else to do: the host waited for it before."""
    for owner in (module.Optimizer2State, module.Optimizer1State):
        yield owner, "update_step", partial(_updating, gpu, untouched(owner.update_step)), _WHY


def _of_four_bits(state: Any) -> Product:
    return FOUR_BITS_NESTED if state.nested else FOUR_BITS


def _charge_forward(gpu: FakeGpu, cost: Product, input_: torch.Tensor) -> None:
    is_recorded = torch.is_grad_enabled() and input_.requires_grad
    gpu.clock.host_work(cost.recorded if is_recorded else cost.forward)


def _costly(
    gpu: FakeGpu, original: Callable[..., object], cost: Callable[[Any], Product], context: Any,
    *gradients: torch.Tensor,
) -> object:  # fmt: skip
    gpu.clock.host_work(cost(context).backward)
    return original(context, *gradients)


def _updating(
    gpu: FakeGpu, original: Callable[..., object], optimizer: torch.optim.Optimizer, group: object, p: torch.Tensor,
    *place: object,
) -> object:  # fmt: skip
    is_low = optimizer.state[p]["state1"].dtype is torch.uint8
    charge_tensors(gpu.clock, gpu.layers, UPDATE[is_low], [p])
    return original(optimizer, group, p, *place)
