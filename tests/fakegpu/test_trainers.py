"""TRL's trainers on the simulated card: they run unchanged, rollout included, and CUDA's own ways show in the bytes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth.expand import Mark, run_of
from autofit.fakegpu.patches import same_calls

from .tiny_trainers import Case, build_model, config, tokenizer, train


@pytest.mark.parametrize(
    ("kind", "lora_rank"),
    [("sft", None), ("grpo", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("dpo", None), ("reward", 8)]),
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("reward", None), ("grpo", None), ("sft", 8), ("dpo", 8)])],
)  # fmt: skip
def test_every_trainer_runs_and_holds_its_optimizer_state(kind: str, lora_rank: int | None, tmp_path: Path) -> None:
    case = Case(kind=kind, lora_rank=lora_rank, bf16=True, use_cpu=False, checkpointing=True)
    with fake_gpu("h100") as gpu:
        train(case, tmp_path)
    at_peak = gpu.timeline.at_peak
    trainable = at_peak["optimizer"] / 2
    assert at_peak["weights"] > 2 * 2**20
    if lora_rank is not None:
        layers = [2 * 128, 128 + 64, 128 + 64, 2 * 128, 128 + 384, 128 + 384, 384 + 128]  # inputs and outputs of each
        assert trainable == pytest.approx(4 * lora_rank * 2 * sum(layers), rel=0.06)
    else:
        copies = 2 if kind == "dpo" else 1
        assert trainable == pytest.approx(at_peak["weights"] / copies, rel=0.02)
    assert gpu.attention_kernels
    assert gpu.least_capacity_bytes <= gpu.device_used_bytes


def _grpo(folder: Path, prompts: list[str], *, steps: int, follow_layers: bool = False) -> tuple[GRPOTrainer, FakeGpu]:
    gc.collect()  # later collections come at the same moments
    with fake_gpu("a100-40gb", follow_layers=follow_layers) as gpu:
        trainer = GRPOTrainer(
            model=build_model(Case(kind="grpo")),
            reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=GRPOConfig(
                output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_steps=steps, report_to=[],
                max_completion_length=64, bf16=True, save_strategy="no", disable_tqdm=True, beta=0.05,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
    return trainer, gpu


def test_a_step_with_the_prompts_of_the_one_before_has_its_rollout_and_scores_played_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, again, calls = ["t1 t2 t3"] * 8, same_calls._Recorded.again, list[object]()

    def counted(call: same_calls._Recorded, gpu: FakeGpu) -> object:
        calls.append(call)
        return again(call, gpu)

    monkeypatch.setattr(same_calls._Recorded, "again", counted)
    one, played = _grpo(tmp_path, prompts, steps=3, follow_layers=True)
    monkeypatch.setattr(same_calls, "_state", lambda *_: object())  # no two calls are alike
    assert (len(calls), len(set(map(id, calls)))) == (4, 2)  # a rollout and a pass of the reference, twice each
    other, traced = _grpo(tmp_path, prompts, steps=3, follow_layers=True)
    assert played.tracer.operation_count < 0.7 * traced.tracer.operation_count
    for_each = [
        sorted(zip(log.nbytes, log.tags, categories[list(log.ids)].tolist(), strict=True))
        for log, categories in ((gpu.memory.log, gpu.category_numbers()) for gpu in (played, traced))
    ]
    assert for_each[0] == for_each[1]  # autocast frees its copies in the order of their addresses, which is arbitrary
    assert played.peak_allocated_bytes == traced.peak_allocated_bytes
    assert played.peak_reserved_bytes == traced.peak_reserved_bytes
    assert one.state.global_step == other.state.global_step == 3  # alive until here, and with them what they hold
    mark = Mark(name="end", event=len(played.memory.log), stretch=10**9)
    assert run_of(played, [mark]).seconds()[0] == pytest.approx(run_of(traced, [mark]).seconds()[0], rel=1e-9)


def test_grpo_generates_scores_and_trains_with_its_real_rollout(tmp_path: Path) -> None:
    trainer, gpu = _grpo(tmp_path, ["t1 t2 t3", "t4 t5 t6 t7"] * 4, steps=1)
    assert trainer.state.log_history[0]["completions/mean_length"] == 64  # sampled tokens never end a sequence
    assert "KV cache" in {a.category for a in gpu.memory.allocations}


def test_experts_of_a_mixture_run_in_any_type() -> None:
    sizes = {key: value for key, value in config().to_dict().items() if key not in ("model_type", "architectures")}
    shape = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
    for dtype in (torch.float32, torch.bfloat16):
        with fake_gpu("h100"):
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype).cuda()
            ids = torch.randint(0, 4000, (2, 64), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
