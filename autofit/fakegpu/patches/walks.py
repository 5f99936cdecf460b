"""Patches of torch.nn.Module that charge the host for going over a model's modules (`autofit/fakegpu/walks.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.own_work import is_own_work
from autofit.fakegpu.patches.redirect import untouched
from autofit.fakegpu.walks import TRAIN, VISIT, charge_modules

Target = tuple[object, str, object, str]
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
