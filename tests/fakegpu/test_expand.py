"""A run traced with few layers and expanded, against the same run traced with all of them: event by event."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.allocator import AllocatorSettings
from autofit.fakegpu.depth.expand import Mark, TracedRun, expanded, find_sweeps, run_of, with_what_loops_give_back
from autofit.fakegpu.depth.layers import DATA, LayerClock, Tag
from autofit.fakegpu.depth.stack import NotRepeatingError, Stack, plan_stack, shrink
from autofit.fakegpu.patches import rollout
from autofit.fakegpu.replay import least_capacity, replay

from . import tiny_trainers
from .tiny_trainers import Case, train

LAYERS, FEWER = 8, 6
STACK = Stack(first=1, period=1, units=6, layers=8)  # traced: the first layer, two of the middle, the last


def followed(work: Callable[[], object]) -> tuple[FakeGpu, list[Mark]]:
    with fake_gpu("a100-40gb", enforce_capacity=False, follow_layers=True, record_places=False) as gpu:
        kept = work()
        assert isinstance(gpu.clock, LayerClock)
        marks = [Mark(name="end", event=len(gpu.memory.log), stretch=gpu.clock.cut())]
        del kept
    return gpu, marks


def trained(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, *, shallow: bool) -> tuple[FakeGpu, list[Mark]]:
    original = tiny_trainers.config

    def config(**changes: object) -> AutoConfig:
        shape = original(**({"num_hidden_layers": LAYERS} | changes))
        if shallow:
            shrink(shape)
        return shape

    with monkeypatch.context() as patched:
        patched.setattr(tiny_trainers, "config", config)
        return followed(lambda: train(case, folder))


def assert_same(short: TracedRun, long: TracedRun, *, seconds_rel: float = 0.01) -> None:
    """The same storages come and go, in the same order but for frees with nothing taken between them."""
    for mine, true in zip(_normal(short), _normal(long), strict=True):
        np.testing.assert_array_equal(mine, true)
    for settings in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        assert replay(short.log, settings=settings) == replay(long.log, settings=settings)
        assert least_capacity(short.log, settings=settings) == least_capacity(long.log, settings=settings)
    assert short.seconds()[-1] == pytest.approx(long.seconds()[-1], rel=seconds_rel)


def _normal(run: TracedRun) -> tuple[object, object, object]:
    _, first, inverse = np.unique(run.ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    ids, free = rank[inverse], run.nbytes < 0
    row = np.cumsum(~free | np.concatenate([[True], ~free[:-1]]))
    order = np.lexsort((np.where(free, ids, 0), row))
    return ids[order], run.nbytes[order], run.categories[order]


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="sft", lora_rank=8, bf16=True, use_cpu=False),
        # CI has GRPO's bytes from few layers on ranks (test_simulated_ranks.py) and in forecasts (test_formula.py)
        *(pytest.param(case, marks=pytest.mark.thorough) for case in (
            Case(kind="grpo", lora_rank=8, checkpointing=True, beta=0.1, bf16=True, use_cpu=False),
            Case(kind="sft", checkpointing=True, bf16=True, use_cpu=False),
            Case(kind="dpo", bf16=True, use_cpu=False),
            Case(kind="dpo", lora_rank=8, checkpointing=True, bf16=True, use_cpu=False),
            Case(kind="reward", bf16=True, checkpointing=True, use_cpu=False),
            Case(kind="reward", lora_rank=8, bf16=True, use_cpu=False),
            Case(kind="grpo", beta=0.1, bf16=True, use_cpu=False),
            Case(kind="grpo", lora_rank=8, checkpointing=True, dtype=torch.bfloat16, use_cpu=False),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_a_shallow_run_expands_to_the_deep_one(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, marks = trained(case, tmp_path, monkeypatch, shallow=True)
    short = expanded(shallow, marks)
    deep, marks = trained(case, tmp_path, monkeypatch, shallow=False)
    assert len(shallow.memory.log) < 0.7 * len(deep.memory.log)
    assert_same(short, run_of(deep, marks))
    # transformers empties the cache before the first step, which decides where later blocks find room
    assert deep.memory.log.emptied
    assert replay(short.log).peak_reserved_bytes == deep.peak_reserved_bytes


def _steps(config: AutoConfig, *, generate: bool = False, optimized: Callable[..., Any] = torch.optim.AdamW) -> object:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    if config.model_type == "gemma3_text":
        model.train().gradient_checkpointing_enable()  # keeps both masks, of the window and of all tokens, for backward
    groups = [[w for w in model.parameters() if (w.dim() > 1) is decayed] for decayed in (True, False)]  # as Trainer's
    optimizer = optimized([{"params": group} for group in groups])
    ids = torch.randint(0, 3000, (2, 64), device="cuda")
    for _ in range(2):
        if generate:
            with torch.no_grad():
                model.generate(input_ids=ids, max_new_tokens=48, do_sample=True, pad_token_id=0, eos_token_id=[10**9])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _config(kind: str, **changes: object) -> AutoConfig:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = {name: getattr(tiny_trainers.config(), name) for name in names}
    return AutoConfig.for_model(kind, **(sizes | {"num_hidden_layers": FEWER} | changes))


_EVERY_SECOND = ["sliding_attention", "full_attention"]
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "generate"),
    [
        ("llama", {}, True),
        pytest.param("qwen3_moe", _EXPERTS, False, marks=pytest.mark.thorough),
        ("gemma3_text", {"num_hidden_layers": 8, "sliding_window": 32, "layer_types": _EVERY_SECOND * 4}, True),
    ],
)  # fmt: skip
def test_patterns_experts_and_rollouts_expand(
    kind: str, changes: dict[str, object], generate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "MOST_PLAYED", 12)  # of 48 tokens, so that one played step stands for several
    full, few = _config(kind, **changes), _config(kind, **changes)
    shrink(few)
    assert few.num_hidden_layers < full.num_hidden_layers
    shallow, marks = followed(lambda: _steps(few, generate=generate))
    short = expanded(shallow, marks)
    deep, marks = followed(lambda: _steps(full, generate=generate))
    assert_same(short, run_of(deep, marks))


def test_memory_taken_at_once_before_a_load_is_that_of_all_layers(tmp_path: Path) -> None:
    full, few = _config("llama"), _config("llama")
    shrink(few)
    AutoModelForCausalLM.from_config(full, dtype=torch.bfloat16).save_pretrained(tmp_path)
    most = []
    for config in (few, full):
        options = {"config": config, "dtype": torch.bfloat16, "device_map": {"": 0}}
        gpu, _ = followed(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **options))  # noqa: B023
        most.append(max(gpu.memory.log.nbytes))
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(full).parameters())
    assert most == [2 * weights] * 2


def test_scales_of_a_paged_optimizer_made_from_sizes_alone_are_of_their_layers() -> None:
    paged = pytest.importorskip("bitsandbytes").optim.PagedAdamW8bit
    config = _config("llama", hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=8)
    deep, marks = followed(lambda: _steps(config, optimized=paged))
    long = run_of(deep, marks)
    shrink(config)
    shallow, marks = followed(lambda: _steps(config, optimized=paged))
    # the launches that make the scales, in the first step alone, are not counted once for each layer
    assert_same(expanded(shallow, marks), long, seconds_rel=0.02)


def test_a_loss_over_the_routers_of_all_layers_expands(tmp_path: Path) -> None:
    case = Case(kind="sft", bf16=True, dtype=torch.bfloat16, use_cpu=False)
    full, few = (_config("qwen3_moe", output_router_logits=True, **_EXPERTS) for _ in range(2))
    shrink(few)

    def run(config: AutoConfig) -> tuple[FakeGpu, list[Mark]]:
        return followed(lambda: train(case, tmp_path, model=lambda: AutoModelForCausalLM.from_config(config)))

    short = expanded(*run(few))
    assert_same(short, run_of(*run(full)))


def test_a_pattern_is_a_unit_and_few_layers_are_left_alone() -> None:
    stack = plan_stack(_config("gemma3_text", num_hidden_layers=26))
    assert (stack.period, stack.units) == (6, 4)
    with pytest.raises(NotRepeatingError, match="4 layers do not repeat 3 times"):
        plan_stack(_config("llama", num_hidden_layers=4))


def test_layers_that_differ_where_no_list_says_so_are_seen_in_the_modules() -> None:
    full, few = (_config("qwen3_moe", mlp_only_layers=[3], num_hidden_layers=9, **_EXPERTS) for _ in range(2))
    assert shrink(few).first == 4
    shallow, marks = followed(lambda: _steps(few))
    short = expanded(shallow, marks)
    deep, marks = followed(lambda: _steps(full))
    assert_same(short, run_of(deep, marks))


def test_a_layer_that_changes_after_it_was_planned_is_not_expanded() -> None:
    config = _config("llama")
    shrink(config)

    class Wider(LlamaDecoderLayer):  # type: ignore[misc]
        def __init__(self, config: object, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.extra = torch.nn.Linear(8, 8 + layer_idx)

    with mock.patch.object(modeling_llama, "LlamaDecoderLayer", Wider):
        gpu, marks = followed(lambda: _steps(config))
    with pytest.raises(NotRepeatingError, match="that were built do not repeat"):
        expanded(gpu, marks)


def test_work_on_a_single_middle_layer_is_not_expanded() -> None:
    config = _config("llama")
    shrink(config)

    def uneven() -> object:
        kept = _steps(config)
        model = kept[0]  # type: ignore[index]
        kept_gradients = [p * 2 for p in model.model.layers[1].parameters()]
        more = [p * 2 for layer in (model.model.layers[2], model.model.layers[1]) for p in layer.parameters()]
        return kept, kept_gradients, more

    gpu, marks = followed(uneven)
    with pytest.raises(NotRepeatingError):
        expanded(gpu, marks)


def test_layers_are_found_at_addresses_of_layers_that_are_gone() -> None:
    config = tiny_trainers.config(num_hidden_layers=LAYERS)
    shrink(config)
    with fake_gpu("a100-40gb", enforce_capacity=False, follow_layers=True) as gpu:
        for built in range(1, 30):
            AutoModelForCausalLM.from_config(config)
            assert gpu.layers is not None
            assert len(gpu.layers.stacks) == built


def test_a_model_with_few_layers_that_were_not_found_is_not_taken_for_a_whole_one() -> None:
    gpu, marks = followed(lambda: None)
    assert gpu.layers is not None
    gpu.layers.is_shrunk = True
    with pytest.raises(NotRepeatingError, match="were not found"):
        expanded(gpu, marks)


def test_a_free_that_a_loop_over_layers_puts_off_belongs_to_the_layer_at_which_it_happens() -> None:
    layers = [Tag(DATA, 0, number).encode() for number in range(4)]
    visits = [(0, (8, 4)), (1, (8,)), (0, (-4,)), (1, (4,)), (2, (8,)), (1, (-4,)), (2, (4,)), (3, (8, -4))]
    tags = np.array([layers[layer] for layer, events in visits for _ in events])
    nbytes = np.array([event for _, events in visits for event in events])
    assert find_sweeps(with_what_loops_give_back(nbytes, tags), [STACK], nbytes > 0)[0].bounds == (2, 5, 8)
    with pytest.raises(NotRepeatingError, match="visits middle units"):
        find_sweeps(tags, [STACK], nbytes > 0)
