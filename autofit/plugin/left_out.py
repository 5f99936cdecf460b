"""Micro-batches of a simulated step that are like those before them: they are not computed."""

from itertools import count
from typing import Any

import torch

from autofit.plugin.protocol import Report

COMPUTED = 3  # first micro-batches of a row that are alike; the last one is computed too
_LEAST = COMPUTED + 3  # in a row, below which all are computed


def leave_out_repeated(trainer: Any, report: Report, *, rollout_every: int) -> None:
    """Let the trainer compute only some micro-batches between two rollouts or optimizer steps, and tell `report`.

    `rollout_every` is the number of micro-batches in a row that are alike. A trainer that generates counts them in
    `_step`.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32
    generates = hasattr(trainer, "_step")

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal dtype
        each = int(trainer.args.gradient_accumulation_steps)
        number = next(done)
        in_step, in_rollout = number % each, int(trainer._step if generates else number) % rollout_every
        before, left = min(in_step, in_rollout), min(each - in_step, rollout_every - in_rollout)
        if before + left < _LEAST:
            return original(*args, **kwargs)
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
