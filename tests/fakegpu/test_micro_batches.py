"""Micro-batches that are played from one like them before, against the same ones traced."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth.expand import Mark, run_of
from autofit.fakegpu.patches import same_calls
from autofit.fakegpu.patches.cuda_api import active_gpu

from .tiny_trainers import Case, build_model, tokenizer, train

STEPS, EACH = 2, 2
Change = Callable[[torch.nn.Module, int], object]  # of a model, before the training (0) and after each step


class Changing(TrainerCallback):  # type: ignore[misc]
    def __init__(self, change: Change) -> None:
        self._change = change

    def on_train_begin(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        self._change(model, 0)

    def on_step_end(self, args: object, state: object, *_: object, model: torch.nn.Module, **__: object) -> None:
        self._change(model, state.global_step)  # type: ignore[attr-defined]


class Trained:
    """A training of two steps with two micro-batches each, and how many of these were played."""

    def __init__(
        self, folder: Path, *, plays: bool = True, lora: bool = True, change: Change | None = None,
        trainer: type[GRPOTrainer] = GRPOTrainer, prompts: Sequence[str] = ("t1 t2 t3",), **settings: Any,
    ) -> None:  # fmt: skip
        with self._card(plays):
            self.trainer = self._build(folder, trainer, lora, prompts, settings)
            if change is not None:
                self.trainer.add_callback(Changing(change))
            self.trainer.train()

    @contextmanager
    def _card(self, plays: bool) -> Iterator[None]:
        """A card on which the played micro-batches are counted."""
        again, self.played = same_calls._MicroBatch.again, 0

        def counted(batch: same_calls._MicroBatch) -> object:
            self.played += 1
            return again(batch)

        gc.collect()  # later collections come at the same moments
        with pytest.MonkeyPatch.context() as patch, fake_gpu("a100-40gb", follow_layers=True) as self.gpu:
            patch.setattr(same_calls._MicroBatch, "again", counted)
            self.gpu.plays_micro_batches = plays
            yield

    def _build(
        self, folder: Path, trainer: type[GRPOTrainer], lora: bool, prompts: Sequence[str], settings: dict[str, object]
    ) -> GRPOTrainer:
        common: dict[str, object] = {
            "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "bf16": True,
            "gradient_accumulation_steps": EACH, "max_steps": STEPS, "save_strategy": "no", "report_to": [],
            "disable_tqdm": True, "gradient_checkpointing": False,
        }  # fmt: skip
        return trainer(
            model=build_model(Case(kind="grpo"), num_hidden_layers=1),
            reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=GRPOConfig(output_dir=str(folder), **(common | settings)),
            train_dataset=Dataset.from_dict({"prompt": [*prompts] * 8}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        )

    @property
    def events(self) -> list[tuple[int, int, int]]:
        """Bytes, layer and category of each event; autocast frees its copies in the order of their addresses."""
        log, categories = self.gpu.memory.log, self.gpu.category_numbers()
        return sorted(zip(log.nbytes, log.tags, categories[list(log.ids)].tolist(), strict=True))

    @property
    def seconds(self) -> float:
        return float(run_of(self.gpu, [Mark(name="end", event=len(self.gpu.memory.log), stretch=10**9)]).seconds()[0])


class TrainedCase(Trained):
    """The same of a trainer without rollouts."""

    def __init__(self, folder: Path, case: Case, *, plays: bool = True) -> None:
        with self._card(plays):
            self.trainer = cast("Any", train(case, folder))


def same(played: Trained, traced: Trained) -> None:
    one, other = played.gpu, traced.gpu
    assert played.events == traced.events
    assert (one.peak_allocated_bytes, one.peak_reserved_bytes, one.least_capacity_bytes) == (
        other.peak_allocated_bytes, other.peak_reserved_bytes, other.least_capacity_bytes
    )  # fmt: skip
    assert one.timeline.at_peak == other.timeline.at_peak
    assert [name for _, name in one.memory.phase_marks] == [name for _, name in other.memory.phase_marks]
    assert played.seconds == pytest.approx(traced.seconds, rel=1e-9)
    assert one.clock.kernel_count == other.clock.kernel_count


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (True, {"gradient_checkpointing": True}),
        pytest.param(True, {"num_iterations": 2}, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(False, {}), (True, {"beta": 0.05})]),
    ],
    ids=str,
)  # fmt: skip
def test_micro_batches_like_one_before_are_played_to_the_same_bytes_and_seconds(
    tmp_path: Path, lora: bool, settings: dict[str, Any]
) -> None:
    played = Trained(tmp_path, lora=lora, **settings)
    traced = Trained(tmp_path, plays=False, lora=lora, **settings)
    assert (played.played, traced.played) == (EACH * STEPS - 2, 0)  # with the first gradients, and added to them
    assert played.gpu.tracer.operation_count < 0.8 * traced.gpu.tracer.operation_count
    same(played, traced)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="sft", lora_rank=8, checkpointing=True, bf16=True, use_cpu=False),
        *(pytest.param(case, marks=pytest.mark.slow) for case in [
            Case(kind="sft", use_cpu=False), Case(kind="dpo", lora_rank=8, bf16=True, use_cpu=False),
            Case(kind="reward", bf16=True, use_cpu=False),
        ]),
        pytest.param(Case(kind="dpo", use_cpu=False), marks=pytest.mark.thorough),
    ],
    ids=str,
)  # fmt: skip
def test_micro_batches_without_rollouts_are_played_to_the_same_bytes_and_seconds(tmp_path: Path, case: Case) -> None:
    played, traced = (TrainedCase(tmp_path, case, plays=plays) for plays in (True, False))
    assert (played.played, traced.played) == (EACH * STEPS - 2, 0)
    same(played, traced)


@pytest.mark.slow  # the default tests have both ways of playing, of GRPO and of SFT
def test_micro_batches_whose_samples_are_drawn_in_another_order_are_played(tmp_path: Path) -> None:
    prompts = ("t1 t2 t3 t4", "t1 t2 t3")  # one of them padded
    settings: dict[str, Any] = {"num_generations": 2, "shuffle_dataset": False}
    played, traced = (Trained(tmp_path, plays=plays, prompts=prompts, **settings) for plays in (True, False))
    assert (played.played, traced.played) == (EACH * STEPS - 2, 0)
    same(played, traced)


def test_a_trl_without_that_shuffle_is_left_as_it_is() -> None:
    with fake_gpu("a100-40gb") as gpu:
        assert not list(same_calls.trl_order(gpu, ModuleType("trl.trainer.utils")))


def _copies(count: Callable[[torch.nn.Module], int]) -> Callable[[torch.nn.Module, object, torch.Tensor], None]:
    """A hook that makes so many copies of the result of a module."""

    def hook(module: torch.nn.Module, args: object, out: torch.Tensor) -> None:
        for _ in range(count(module)):
            out.clone()

    return hook


def _norm(model: torch.nn.Module) -> torch.nn.Module:
    """The last module that a model calls: its loss is computed from the weights of its head."""
    parts: dict[str, torch.nn.Module] = dict(model.named_modules())
    return next(part for name, part in parts.items() if name.endswith("model.norm"))


def _made_with_other_values(model: torch.nn.Module, step: int) -> None:
    _norm(model)._forward_hooks.clear()

    def hook(module: torch.nn.Module, args: object, out: torch.Tensor) -> None:
        for _ in range(step):
            out.clone()

    _norm(model).register_forward_hook(hook)


def _one_more_of_a_kind(model: torch.nn.Module, step: int) -> None:
    _norm(model).register_forward_hook(_COPIES_ONCE)


_COPIES_ONCE = _copies(lambda module: 1)


def _another_value_in_a_buffer(model: torch.nn.Module, step: int) -> None:
    norm = _norm(model)
    norm.register_buffer("copies", torch.tensor([step], device="cuda"), persistent=False)
    if step == 0:
        norm.register_forward_hook(_copies(lambda module: int(cast("torch.Tensor", module.copies))))


def _changed_by_each_call(model: torch.nn.Module, step: int) -> None:
    def count(module: torch.nn.Module) -> int:
        odd = not getattr(module, "odd", True)
        module.odd = odd  # type: ignore[assignment]
        return int(odd)

    if step == 0:
        _norm(model).register_forward_hook(_copies(count))


def _kept(model: torch.nn.Module, step: int) -> None:
    kept = list[object]()
    if step == 0:
        _norm(model).register_forward_hook(lambda module, args, out: kept.append(out.detach().clone()))


def _renews(model: torch.nn.Module, step: int) -> None:
    """Let a module keep a copy of its last result, as Qwen2.5-VL does the shifts of its positions."""

    def hook(module: torch.nn.Module, args: object, out: torch.Tensor) -> None:
        module.latest = out.detach().clone()

    if step == 0:
        _norm(model).register_forward_hook(hook)


def _begins_a_phase(model: torch.nn.Module, step: int) -> None:
    if step == 0:
        _norm(model).register_forward_hook(lambda *_: cast("FakeGpu", active_gpu()).memory.enter_phase("norm"))


def _more_in_the_backward(model: torch.nn.Module, step: int) -> None:
    def hook(weight: torch.Tensor) -> None:
        torch.ones(1000, device="cuda")

    next(weight for weight in model.parameters() if weight.requires_grad).register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize(
    "change",
    [
        _made_with_other_values,
        *(pytest.param(change, marks=pytest.mark.slow) for change in [
            _one_more_of_a_kind, _another_value_in_a_buffer, _changed_by_each_call, _kept, _begins_a_phase,
            _more_in_the_backward,
        ]),
    ],
)  # fmt: skip
def test_a_micro_batch_that_may_differ_from_those_before_is_traced(tmp_path: Path, change: Change) -> None:
    played, traced = (Trained(tmp_path, plays=plays, lora=False, change=change) for plays in (True, False))
    same(played, traced)


@pytest.mark.slow
def test_a_tensor_that_a_model_keeps_until_its_next_forward_is_renewed_by_a_played_micro_batch(tmp_path: Path) -> None:
    played, traced = (
        Trained(tmp_path, plays=plays, change=_renews, gradient_accumulation_steps=4) for plays in (True, False)
    )
    assert (played.played, traced.played) == (4 * STEPS - 2, 0)
    same(played, traced)


class Twice(GRPOTrainer):  # type: ignore[misc]
    """A trainer that computes more in its second step."""

    def compute_loss(self, *args: object, **kwargs: object) -> object:
        for _ in range(self.state.global_step):
            torch.ones(1000, device="cuda")
        return super().compute_loss(*args, **kwargs)


@pytest.mark.slow
def test_a_trainer_that_does_otherwise_in_each_step_has_all_its_micro_batches_traced(tmp_path: Path) -> None:
    same(*(Trained(tmp_path, lora=False, trainer=Twice, plays=plays) for plays in (True, False)))
    emptied = Trained(tmp_path, lora=False, torch_empty_cache_steps=2, max_steps=3)
    assert emptied.played == 0, "the cache is emptied in every other step"
