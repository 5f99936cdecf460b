"""Micro-batches of a simulated step that are like those before them: they are not computed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any

import torch

from autofit.plugin.protocol import Report

COMPUTED = 3  # first ones of a row that are alike; the last one is computed too
_LEAST = COMPUTED + 3  # in a row, below which all are computed


def leave_out_repeated(
    trainer: Any, report: Report, *, rollout_every: int, kinds: Callable[[], Sequence[object]]
) -> None:
    """Let the trainer compute only some micro-batches between two rollouts or optimizer steps, and tell `report`.

    Of a row the first three are computed, more where `report` finds the last two unlike, and the last one.
    `rollout_every` is the number of micro-batches in a row; a trainer that generates counts them in `_step`. `kinds`
    gives the kind of each of them, once a rollout is there: neighbours of one kind are alike. Of a step of many short
    rows, whole ones are left out, each with its rollout: `report` is told of the last micro-batch of each.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32
    generates, of_each, of_rows = hasattr(trainer, "_step"), list[object](), list[list[object]]()
    skips = False  # the micro-batch before, or the row before, was left out
    sleeps = bool(getattr(trainer.args, "vllm_enable_sleep_mode", False))  # each rollout gives unused memory back

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal of_each, skips
        each = int(trainer.args.gradient_accumulation_steps)
        number = next(done)
        in_step, in_rollout = number % each, int(trainer._step if generates else number) % rollout_every
        rows, rest = divmod(each, rollout_every)
        if not rest and rows > COMPUTED + 1 and rollout_every < _LEAST and not sleeps:
            if not in_rollout:
                row = in_step // rollout_every
                may = COMPUTED <= row < rows - 1 and of_rows[-1] == of_rows[-2]
                skips = may and (skips or report.last_are_alike())
            return in_short_row(in_rollout, args, kwargs)
        before, left = min(in_step, in_rollout), min(each - in_step, rollout_every - in_rollout)
        if before + left < _LEAST:
            return original(*args, **kwargs)
        if in_rollout == 1:  # the first micro-batch makes the rollout
            of_each = list(kinds())
        if in_rollout:
            before = min(before, _alike(of_each[in_rollout], reversed(of_each[:in_rollout])))
            left = min(left, _alike(of_each[in_rollout], of_each[in_rollout:]))
        skips = before >= COMPUTED and left > 1 and (skips or report.last_are_alike())
        report.micro_step_begins(left_out=skips)
        return _nothing(trainer, dtype) if skips else computed(args, kwargs)

    def in_short_row(place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        last = place == rollout_every - 1
        if last:
            report.micro_step_begins(left_out=skips)
        if skips:
            return _nothing(trainer, dtype)
        loss = computed(args, kwargs)
        if last:
            of_rows.append(list(kinds()))
        return loss

    def computed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        nonlocal dtype
        loss = original(*args, **kwargs)
        dtype = loss.dtype
        return loss

    trainer.training_step = training_step


def compute_one_in_first_step(trainer: Any) -> None:
    """Let the trainer compute only the first micro-batch of the first step, which already makes all gradients.

    What it leaves behind for the second step is what the last one would.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal dtype
        if 0 < next(done) < int(trainer.args.gradient_accumulation_steps):
            return _nothing(trainer, dtype)
        loss = original(*args, **kwargs)
        dtype = loss.dtype
        return loss

    trainer.training_step = training_step


def _nothing(trainer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The loss of a micro-batch that is not computed. A trainer that generates counts it in `_step`."""
    if hasattr(trainer, "_step"):
        trainer._step += 1
    return torch.zeros((), dtype=dtype, device=trainer.args.device)


def _alike(kind: object, others: Iterable[object]) -> int:
    """How many of the `others` are of the `kind`, up to the first that is not."""
    return sum(1 for _ in takewhile(lambda other: other == kind, others))
