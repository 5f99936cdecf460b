"""Which micro-batches of a simulated step are computed: the first of a row that are alike, and the last."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autofit.fakegpu import fake_gpu
from autofit.plugin.protocol import Report
from autofit.plugin.transformers_run import TransformersRun, compute_one_in_first_step, leave_out_repeated
from autofit.trainers.grpo import RolloutRun


class Heard(Report):
    leaves_out = True

    def __init__(self) -> None:
        self.said: list[bool] = []
        self.unlike = 0  # how often the last two are not alike

    def micro_step_begins(self, *, left_out: bool) -> None:
        self.said.append(left_out)

    def last_are_alike(self) -> bool:
        self.unlike -= 1
        return self.unlike < 0


def counting(**args: object) -> tuple[Any, list[int]]:
    """A trainer that counts its micro-batches in `_step`, and the numbers of those that it computes."""
    found: list[int] = []

    def training_step(*_: Any) -> torch.Tensor:
        found.append(trainer._step)
        trainer._step += 1
        return torch.ones((), dtype=torch.bfloat16)

    trainer = SimpleNamespace(training_step=training_step, args=SimpleNamespace(device="cpu", **args), _step=0)
    return trainer, found


def computed(
    accumulation: int,
    rollout_every: int,
    steps: int = 2,
    lone: Sequence[int] = (),
    sleeps: bool = False,
    unlike: int = 0,
) -> tuple[list[int], Heard]:
    """The numbers of the micro-batches that are computed, and what was told; `lone` are not like the others."""
    trainer, found = counting(gradient_accumulation_steps=accumulation, vllm_enable_sleep_mode=sleeps)
    heard = Heard()
    heard.unlike = unlike

    def kinds() -> list[object]:
        first = found[-1] // rollout_every * rollout_every
        return [first + place in lone for place in range(rollout_every)]

    leave_out_repeated(trainer, heard, rollout_every=rollout_every, kinds=kinds)
    for _ in range(steps * accumulation):
        loss = trainer.training_step(None, {}, None)
        assert (loss.dtype, loss.shape) == (torch.bfloat16, ())
    assert trainer._step == steps * accumulation
    return found, heard


def test_of_a_step_that_is_one_rollout_three_and_the_last_are_computed() -> None:
    found, heard = computed(16, 16)
    assert found == [0, 1, 2, 15, 16, 17, 18, 31]
    assert heard.said == 2 * [*[False] * 3, *[True] * 12, False]


def test_one_more_is_computed_where_the_last_two_are_not_alike() -> None:
    assert computed(16, 16, unlike=1)[0] == [0, 1, 2, 3, 15, 16, 17, 18, 31]
    assert computed(6, 6, unlike=9)[0] == list(range(12))
    assert computed(7, 1, unlike=2)[0] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 13]


def test_a_trainer_that_does_not_generate_counts_its_micro_batches_by_its_steps() -> None:
    found: list[int] = []

    def training_step(*_: Any) -> torch.Tensor:
        found.append(len(found))
        return torch.ones(())

    args = SimpleNamespace(gradient_accumulation_steps=8, device="cpu")
    trainer: Any = SimpleNamespace(training_step=training_step, args=args)
    leave_out_repeated(trainer, heard := Heard(), rollout_every=8, kinds=lambda: [None] * 8)
    for _ in range(16):
        trainer.training_step(None, {}, None)
    assert len(found) == 8
    assert heard.said == 2 * [*[False] * 3, *[True] * 4, False]


def test_each_rollout_of_a_step_begins_a_new_row() -> None:
    assert computed(16, 8)[0] == [n + r for r in (0, 8, 16, 24) for n in (0, 1, 2, 7)]


def test_a_few_short_rows_are_computed_and_nothing_is_told() -> None:
    found, heard = computed(16, 4)
    assert found == list(range(32))
    assert heard.said == []


def test_of_many_short_rows_three_and_the_last_are_computed_and_each_is_told_at_its_end() -> None:
    found, heard = computed(24, 3, steps=1)
    assert found == [*range(9), 21, 22, 23]
    assert heard.said == [False, False, False, True, True, True, True, False]
    assert computed(7, 1)[0] == [0, 1, 2, 6, 7, 8, 9, 13]
    assert computed(7, 1, sleeps=True)[0] == list(range(14)), "vLLM gives memory back in each rollout"


def test_a_short_row_unlike_the_others_is_computed_with_two_after_it_that_are_alike() -> None:
    assert computed(24, 3, steps=1, lone=(7,))[0] == [*range(15), 21, 22, 23]


def test_a_micro_batch_unlike_the_others_is_computed_with_the_first_three_after_it_and_the_last_before() -> None:
    assert computed(16, 16, lone=(7, 31))[0] == [0, 1, 2, 6, 7, 8, 9, 10, 15, 16, 17, 18, 30, 31]
    assert computed(16, 16, steps=1, lone=(1,))[0] == [0, 1, 2, 3, 4, 15]


def test_a_micro_batch_of_the_longest_prompt_alone_is_of_its_own_kind() -> None:
    with fake_gpu("l40s"):
        masks = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]], device="cuda")
        unknown = torch.empty(1, 3, device="cuda") > 0
        inputs = [{"prompt_mask": masks[i : i + 1]} for i in range(3)] + 2 * [{"prompt_mask": unknown}]
        trainer = SimpleNamespace(args=SimpleNamespace(num_iterations=2), _buffered_inputs=inputs)
        kinds = RolloutRun(trainer, phases={}, samples_per_step=1).kinds()
    assert kinds[:3] == [False, True, False]
    assert kinds[3] != kinds[4], "what is not known is like nothing"
    assert kinds[5:] == kinds[:5]


def test_nothing_is_left_out_where_each_step_generates_anew() -> None:
    args = SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=8, num_iterations=1)
    every = [RolloutRun(SimpleNamespace(args=args, **facts), phases={}, samples_per_step=1).rollout_every
             for facts in ({}, {"generates_each_step": True})]  # fmt: skip
    assert every == [8, 0]


def test_the_micro_batches_of_a_step_are_alike_where_a_probe_repeats_one_sample() -> None:
    def every(**facts: bool) -> int:
        args = SimpleNamespace(gradient_accumulation_steps=32)
        return TransformersRun(SimpleNamespace(args=args, **facts), phases={}, samples_per_step=1).rollout_every

    assert every(repeats_one_row=True) == 32
    assert every() == 0


@pytest.mark.parametrize("last", [False, True])
def test_a_forecast_computes_one_micro_batch_alone_of_the_first_step(last: bool) -> None:
    """Of several ranks the last, in which they add up their gradients."""
    trainer, found = counting(gradient_accumulation_steps=4)
    compute_one_in_first_step(trainer, last=last)
    kinds = [trainer.training_step(None, {}, None).dtype for _ in range(8)]
    assert set(kinds[3:]) == {torch.bfloat16}
    assert found == [3 if last else 0, 4, 5, 6, 7]
    assert trainer._step == 8
