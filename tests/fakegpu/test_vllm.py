"""GRPO with an engine that cannot run here: its share of the card, its sleep, completions and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from autofit.fakegpu import FakeGpu, FakeGpuError, fake_gpu
from autofit.fakegpu.depth.stack import shrink
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.kernel_log import KernelLog
from autofit.fakegpu.patches.vllm import SamplingParams, StructuredOutputsParams, weights_bytes

from .tiny_trainers import Case, build_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
GIB = 1 << 30


def _train(
    folder: Path,
    *,
    share: float,
    sleep: bool,
    gpu: str = "l4",
    tokens: int = 32,
    mode: str = "colocate",
    shape: Mapping[str, object] = {},
    engine: Mapping[str, object] | None = None,
    log: KernelLog | None = None,
) -> tuple[FakeGpu, float]:
    """One step of GRPO on the card; the card, and the mean completion length that the trainer logged."""
    vllm = {
        "use_vllm": True, "vllm_mode": mode, "vllm_gpu_memory_utilization": share, "vllm_enable_sleep_mode": sleep,
    }  # fmt: skip
    with fake_gpu(gpu) as card:
        card.clock.log = log
        trainer = GRPOTrainer(
            model=build_model(Case(kind="grpo"), **shape),
            reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
            args=GRPOConfig(
                output_dir=str(folder), per_device_train_batch_size=4, num_generations=4, max_steps=2, report_to=[],
                max_completion_length=tokens, bf16=True, save_strategy="no", disable_tqdm=True,
                logging_steps=1, **(vllm if engine is None else engine),
            ),
            train_dataset=Dataset.from_dict({"prompt": ["t1 t2 t3", "t4 t5 t6 t7"] * 8}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.train()
        held = torch.cuda.memory_allocated()
    card.note(f"held {held}")
    return card, trainer.state.log_history[0]["completions/mean_length"]


def _held(gpu: FakeGpu) -> int:
    return int(gpu.notes[-1].removeprefix("held "))


def test_vllm_takes_its_share_and_completions_have_full_length(tmp_path: Path) -> None:
    gpu, length = _train(tmp_path, share=0.3, sleep=False)
    share = int(0.3 * gpu.spec.capacity_bytes)
    assert length == 32
    assert share < gpu.peak_allocated_bytes < share + GIB
    assert _held(gpu) > share
    assert any("vLLM was not run" in note for note in gpu.notes)
    assert gpu.elapsed_s > 0


def test_asleep_it_holds_nothing_but_the_peak_is_while_it_is_awake(tmp_path: Path) -> None:
    gpu, length = _train(tmp_path, share=0.3, sleep=True)
    share = int(0.3 * gpu.spec.capacity_bytes)
    assert length == 32
    assert _held(gpu) < GIB
    assert gpu.peak_allocated_bytes > share
    assert gpu.device_used_bytes > share + gpu.spec.context_bytes


def test_a_share_that_does_not_fit_beside_the_model_runs_out_of_memory(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        _train(tmp_path, share=1.0, sleep=False)


def test_a_share_below_the_weights_says_which_setting(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="vllm_gpu_memory_utilization=1e-05"):
        _train(tmp_path, share=1e-5, sleep=False)


def test_a_share_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FakeGpuError, match=r"vllm_gpu_memory_utilization must be above 0 and at most 1; got 1.5"):
        _train(tmp_path, share=1.5, sleep=False)


@pytest.mark.slow
def test_the_roll_out_is_bound_by_the_cards_bandwidth(tmp_path: Path) -> None:
    wide = {"hidden_size": 2048, "intermediate_size": 8192}  # reading it takes longer than launching a graph
    slow, _ = _train(tmp_path, share=0.3, sleep=False, gpu="l4", tokens=512, shape=wide)
    fast, _ = _train(tmp_path, share=0.3, sleep=False, gpu="h200", tokens=512, shape=wide)
    assert slow.elapsed_s > 2 * fast.elapsed_s


def test_a_server_takes_nothing_of_this_card_and_its_seconds_count(tmp_path: Path) -> None:
    short, length = _train(tmp_path, share=0.3, sleep=False, mode="server")
    long, _ = _train(tmp_path, share=0.3, sleep=False, mode="server", tokens=512)
    assert length == 32
    assert short.peak_allocated_bytes < GIB
    assert long.elapsed_s > short.elapsed_s
    assert any("vLLM's server was not run" in note for note in short.notes)


def test_weights_of_all_layers_count_however_few_are_traced() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4, vocab_size=99
    )
    with torch.device("meta"):
        whole = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        for units in (0, 1, 2):
            few = deepcopy(config)
            shrink(few, traced_units=units)
            model = AutoModelForCausalLM.from_config(few)
            assert len(model.model.layers) < 6
            assert weights_bytes(model) == 2 * whole


def test_continuous_batching_takes_its_share_of_what_is_left_and_ends_with_a_model_in_bfloat16(tmp_path: Path) -> None:
    gpu, length = _train(tmp_path, share=0.3, sleep=False, engine={"use_transformers_continuous_batching": True})
    assert length == 32
    assert 0.45 < gpu.peak_allocated_bytes / gpu.spec.capacity_bytes < 0.55  # TRL's max_memory_percent is 0.5
    assert _held(gpu) < GIB
    assert any("continuous batching was not run" in note for note in gpu.notes)


def test_continuous_batching_without_memory_for_one_sequence_says_which_setting(tmp_path: Path) -> None:
    engine = {"use_transformers_continuous_batching": True,
              "transformers_continuous_batching_config": {"max_memory_percent": 0.001}}  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError, match="raise max_memory_percent"):
        _train(tmp_path, share=0.3, sleep=False, engine=engine)


def test_a_forecast_is_told_the_engine_and_counts_nothing_of_it_twice(tmp_path: Path) -> None:
    log = KernelLog()
    gpu, length = _train(tmp_path, share=0.3, sleep=True, log=log)
    engine = log.kinds({}).engine
    assert isinstance(engine, VllmEngine)
    assert (engine.utilization, engine.sleeps, engine.most_sequences) == (0.3, True, 4)
    assert engine.sync_s > 0
    assert length == 32
    assert gpu.peak_allocated_bytes < GIB


def test_what_vllm_has_no_field_for_is_refused_as_by_vllm() -> None:
    params = SamplingParams(n=1, max_tokens=8, logprobs=0, ignore_eos=True, seed=3)
    assert params.max_tokens == 8
    with pytest.raises(TypeError, match="Unexpected keyword argument 'eos_token_id'"):
        SamplingParams(max_tokens=8, eos_token_id=[1])


@pytest.mark.parametrize("given", [{}, {"regex": "a", "json_object": True}])
def test_structured_outputs_need_one_constraint_as_vllms(given: dict[str, Any]) -> None:
    assert StructuredOutputsParams(regex="a+").regex == "a+"
    with pytest.raises(ValueError, match="need one of json, regex"):
        StructuredOutputsParams(**given)


def test_trl_knows_no_vllm_after_the_block(tmp_path: Path) -> None:
    import trl.generation.vllm_generation as module

    with fake_gpu("l4"):
        assert module.is_vllm_available()
    assert not module.is_vllm_available()
