"""Which micro-batches of a simulated step are computed: the first of a row that are alike, and the last."""

from types import SimpleNamespace
from typing import Any

import torch

from autofit.plugin.left_out import leave_out_repeated
from autofit.plugin.protocol import Report
from autofit.plugin.transformers_run import TransformersRun
from autofit.trainers.grpo import RolloutRun


class Heard(Report):
    leaves_out = True

    def __init__(self) -> None:
        self.said: list[bool] = []

    def micro_step_begins(self, *, left_out: bool) -> None:
        self.said.append(left_out)


def computed(accumulation: int, rollout_every: int, steps: int = 2) -> tuple[list[int], Heard]:
    """The numbers of the micro-batches that are computed, and what was told."""
    found: list[int] = []

    def training_step(*_: Any) -> torch.Tensor:
        found.append(trainer._step)
        trainer._step += 1
        return torch.ones((), dtype=torch.bfloat16)

    args = SimpleNamespace(gradient_accumulation_steps=accumulation, device="cpu")
    trainer: Any = SimpleNamespace(training_step=training_step, args=args, _step=0)
    heard = Heard()
    leave_out_repeated(trainer, heard, rollout_every=rollout_every)
    for _ in range(steps * accumulation):
        loss = trainer.training_step(None, {}, None)
        assert (loss.dtype, loss.shape) == (torch.bfloat16, ())
    assert trainer._step == steps * accumulation
    return found, heard


def test_of_a_step_that_is_one_rollout_three_and_the_last_are_computed() -> None:
    found, heard = computed(16, 16)
    assert found == [0, 1, 2, 15, 16, 17, 18, 31]
    assert heard.said == 2 * [*[False] * 3, *[True] * 12, False]


def test_a_trainer_that_does_not_generate_counts_its_micro_batches_by_its_steps() -> None:
    found: list[int] = []

    def training_step(*_: Any) -> torch.Tensor:
        found.append(len(found))
        return torch.ones(())

    args = SimpleNamespace(gradient_accumulation_steps=8, device="cpu")
    trainer: Any = SimpleNamespace(training_step=training_step, args=args)
    leave_out_repeated(trainer, heard := Heard(), rollout_every=8)
    for _ in range(16):
        trainer.training_step(None, {}, None)
    assert len(found) == 8
    assert heard.said == 2 * [*[False] * 3, *[True] * 4, False]


def test_each_rollout_of_a_step_begins_a_new_row() -> None:
    assert computed(16, 8)[0] == [n + r for r in (0, 8, 16, 24) for n in (0, 1, 2, 7)]


def test_short_rows_are_computed_and_nothing_is_told() -> None:
    found, heard = computed(16, 4)
    assert found == list(range(32))
    assert heard.said == []


def test_micro_batches_of_one_sample_are_computed_where_one_prompt_is_the_longest() -> None:
    def every(micro_batch: int, **facts: bool) -> int:
        args = SimpleNamespace(per_device_train_batch_size=micro_batch, steps_per_generation=8, num_iterations=1)
        run = RolloutRun(SimpleNamespace(args=args, **facts), phases={}, samples_per_step=1)
        return int(run.rollout_every)

    assert every(1) == every(2, one_is_longest=True) == 8
    assert every(1, one_is_longest=True) == every(2, generates_each_step=True) == 0


def test_the_micro_batches_of_a_step_are_alike_where_a_probe_repeats_one_sample() -> None:
    def every(**facts: bool) -> int:
        args = SimpleNamespace(gradient_accumulation_steps=32)
        return TransformersRun(SimpleNamespace(args=args, **facts), phases={}, samples_per_step=1).rollout_every

    assert every(repeats_one_row=True) == 32
    assert every() == 0
