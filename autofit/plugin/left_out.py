"""Micro-batches of a simulated step that are like those before them: they are not computed."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count, takewhile
from typing import Any

import torch

from autofit.plugin.protocol import Report

COMPUTED = 3  # first micro-batches of a row that are alike; the last one is computed too
_LEAST = COMPUTED + 3  # in a row, below which all are computed


def leave_out_repeated(
    trainer: Any, report: Report, *, rollout_every: int, kinds: Callable[[], Sequence[object]]
) -> None:
    """Let the trainer compute only some micro-batches between two rollouts or optimizer steps, and tell `report`.

    `rollout_every` is the number of micro-batches in a row; a trainer that generates counts them in `_step`. `kinds`
    gives the kind of each of them, once a rollout is there: neighbours of one kind are alike.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32
    generates, of_each = hasattr(trainer, "_step"), list[object]()

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal dtype, of_each
        each = int(trainer.args.gradient_accumulation_steps)
        number = next(done)
        in_step, in_rollout = number % each, int(trainer._step if generates else number) % rollout_every
        before, left = min(in_step, in_rollout), min(each - in_step, rollout_every - in_rollout)
        if before + left < _LEAST:
            return original(*args, **kwargs)
        if in_rollout == 1:  # the first micro-batch makes the rollout
            of_each = list(kinds())
        if in_rollout:
            before = min(before, _alike(of_each[in_rollout], reversed(of_each[:in_rollout])))
            left = min(left, _alike(of_each[in_rollout], of_each[in_rollout:]))
        left_out = before >= COMPUTED and left > 1
        report.micro_step_begins(left_out=left_out)
        if left_out:
            if generates:
                trainer._step += 1
            return torch.zeros((), dtype=dtype, device=trainer.args.device)
        loss = original(*args, **kwargs)
        dtype = loss.dtype
        return loss

    trainer.training_step = training_step


def _alike(kind: object, others: Iterable[object]) -> int:
    """How many of the `others` are of the `kind`, up to the first that is not."""
    return sum(1 for _ in takewhile(lambda other: other == kind, others))
