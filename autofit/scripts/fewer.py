"""Fewer micro-batches a step of transformers' Trainer, where all samples are made up and so alike; their seconds count.

A step has three: the first makes the gradients, the second adds to them, and the third is the second one again. A
trainer with rollouts keeps all, as their size depends on the accumulation.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

FEW = 3


class Fewer:
    """Micro-batches that are left out while `alike` is true; `now_s` is the clock, and `note` is told of it."""

    def __init__(self, alike: Callable[[], bool], now_s: Callable[[], float], note: Callable[[str], None]) -> None:
        self._alike, self._now_s, self._note = alike, now_s, note
        self._left_out = 0
        self._begun_s: list[float] = []

    def end_step(self) -> float:
        """Seconds of what was left out of the step that ends, each as long as the second micro-batch."""
        begun_s, self._begun_s = self._begun_s, []
        return self._left_out * (begun_s[2] - begun_s[1]) if len(begun_s) == FEW else 0.0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which a Trainer is made with fewer micro-batches a step."""
        from transformers import Trainer

        made, step = Trainer.__init__, Trainer.training_step

        @functools.wraps(made)
        def __init__(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
            if args is not None and self._alike():
                _keep_order(args, trainer)  # one with rollouts has taken it from its arguments by now
                if not hasattr(args, "num_generations"):
                    self._shorten(args)
            made(trainer, model, args, *rest, **named)

        @functools.wraps(step)
        def training_step(trainer: Any, *given: Any, **named: Any) -> Any:
            self._begun_s.append(self._now_s())
            return step(trainer, *given, **named)

        with (
            mock.patch.object(Trainer, "__init__", __init__),
            mock.patch.object(Trainer, "training_step", training_step),
        ):
            yield

    def _shorten(self, args: Any) -> None:
        asked = int(args.gradient_accumulation_steps)
        if asked > FEW:
            args.gradient_accumulation_steps = FEW
            self._left_out = asked - FEW
            self._note(f"of {asked} micro-batches a step {FEW} were run, as made-up samples are alike; the others take "
                       "the bytes and seconds of the second")  # fmt: skip


def _keep_order(*of: Any) -> None:
    """Take samples in their order, long and short in turns: a batch of one length alone has no mask, and is faster."""
    for each in of:
        for key, value in (("train_sampling_strategy", "sequential"), ("shuffle_dataset", False)):
            if hasattr(each, key):
                setattr(each, key, value)
