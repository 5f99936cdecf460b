"""A rollout that is played from its first tokens, against the same one simulated token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from autofit.fakegpu import AllocatorSettings, FakeGpu, fake_gpu
from autofit.fakegpu.depth.expand import Mark, run_of
from autofit.fakegpu.patches import rollout, same_calls

from .tiny_trainers import config


def _generate(*, expandable: bool, padded: bool, tokens: int = 36) -> FakeGpu:
    settings = AllocatorSettings(expandable_segments=expandable)
    with fake_gpu("a100-40gb", settings=settings) as gpu:
        model = AutoModelForCausalLM.from_config(
            config(hidden_size=512, num_attention_heads=8, head_dim=64, num_key_value_heads=8), dtype=torch.bfloat16
        ).cuda()
        mask = torch.ones(8, 200, dtype=torch.long)
        mask[0, :3] = 0 if padded else 1
        out = model.generate(
            input_ids=torch.full((8, 200), 5).cuda(),
            attention_mask=mask.cuda(),
            generation_config=GenerationConfig(
                max_new_tokens=tokens, do_sample=True, pad_token_id=4001, eos_token_id=4000
            ),
        )
        assert out.shape == (8, 200 + tokens)
        assert (out[:, 200:] == 4000).sum().item() == 0
    return gpu


@pytest.mark.parametrize(
    ("padded", "expandable"),
    [(False, True), (True, False),
     *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(False, False), (True, True)])],
)  # fmt: skip
def test_a_played_rollout_peaks_where_a_simulated_one_does(
    expandable: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = _generate(expandable=expandable, padded=padded)
    monkeypatch.setattr(rollout, "LAST_TRY", 0)
    simulated = _generate(expandable=expandable, padded=padded)
    assert played.tracer.operation_count < simulated.tracer.operation_count / 3
    assert played.peak_allocated_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=2e-4)
    assert played.peak_reserved_bytes == pytest.approx(simulated.peak_reserved_bytes, rel=0.02)
    assert played.memory.allocator.allocated_bytes == simulated.memory.allocator.allocated_bytes
    assert played.elapsed_s == pytest.approx(simulated.elapsed_s, rel=0.05)
    assert played.timeline.at_peak["KV cache"] > 0


# Full at once; after 9 steps, which are traced; after 25, of which most are played.
@pytest.mark.parametrize(
    "window", [8, pytest.param(24, marks=pytest.mark.thorough), pytest.param(40, marks=pytest.mark.slow)]
)
def test_a_rollout_is_played_once_its_sliding_window_is_full(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate() -> FakeGpu:
        with fake_gpu("a100-40gb") as gpu:
            small = AutoConfig.for_model(
                "gemma3_text", hidden_size=512, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=4, head_dim=64, vocab_size=4002, sliding_window=window,
                layer_types=["sliding_attention", "full_attention"],
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16).cuda()
            ids = torch.full((8, 16), 5).cuda()
            settings = GenerationConfig(max_new_tokens=40, do_sample=True, pad_token_id=4001, eos_token_id=4000)
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            assert out.shape == (8, 56)
        return gpu

    played = generate()
    monkeypatch.setattr(rollout, "LAST_TRY", 0)
    simulated = generate()
    assert played.tracer.operation_count < simulated.tracer.operation_count / 1.5
    assert 0 <= played.peak_allocated_bytes - simulated.peak_allocated_bytes < 20_000
    assert played.peak_reserved_bytes == simulated.peak_reserved_bytes
    assert played.memory.allocator.allocated_bytes == simulated.memory.allocator.allocated_bytes
    assert played.elapsed_s == pytest.approx(simulated.elapsed_s, rel=1e-3)


def test_a_long_rollout_played_in_strides_peaks_and_lasts_as_one_played_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = _generate(expandable=False, padded=False, tokens=400)
    monkeypatch.setattr(rollout, "MOST_PLAYED", 40)
    strides = _generate(expandable=False, padded=False, tokens=400)
    assert len(strides.memory.log) < len(whole.memory.log) / 2
    assert strides.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert strides.least_capacity_bytes == pytest.approx(whole.least_capacity_bytes, rel=0.02)
    assert strides.memory.allocator.allocated_bytes == whole.memory.allocator.allocated_bytes
    assert strides.elapsed_s == pytest.approx(whole.elapsed_s, rel=1e-6)


def _generate_twice(second: dict[str, object] | None = None) -> FakeGpu:
    """Two rollouts of one model, the second with other settings or inputs."""
    with fake_gpu("a100-40gb", follow_layers=True) as gpu:
        model = AutoModelForCausalLM.from_config(config(hidden_size=512, head_dim=64), dtype=torch.bfloat16).cuda()
        for changed in ({}, second or {}):
            if "train" in changed:
                model.train(bool(changed["train"]))
            if "hook" in changed:
                model.lm_head.register_forward_hook(lambda module, args, out: out.clone())
            ids = torch.full((4, int(str(changed.get("tokens", 200)))), int(str(changed.get("token", 5)))).cuda()
            settings = GenerationConfig(
                max_new_tokens=36, do_sample=bool(changed.get("do_sample", True)), pad_token_id=4001, eos_token_id=4000
            )
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )  # fmt: skip
            assert (out[:, -36:] == 4000).sum().item() == 0
            del out, ids
    return gpu


def test_a_rollout_like_one_before_is_played_to_the_same_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    played = _generate_twice()
    monkeypatch.setattr(same_calls, "_state", lambda *_: object())  # no two calls are alike
    traced = _generate_twice()
    assert played.tracer.operation_count < 0.6 * traced.tracer.operation_count
    assert played.memory.log.ids == traced.memory.log.ids
    assert played.memory.log.nbytes == traced.memory.log.nbytes
    assert played.memory.log.tags == traced.memory.log.tags
    assert played.memory.allocator.state == traced.memory.allocator.state
    assert played.peak_reserved_bytes == traced.peak_reserved_bytes
    assert list(played.category_numbers()) == list(traced.category_numbers())
    both = [run_of(gpu, [Mark(name="end", event=len(gpu.memory.log), stretch=10**9)]) for gpu in (played, traced)]
    assert both[0].seconds()[0] == pytest.approx(both[1].seconds()[0], rel=1e-9)
    assert played.elapsed_s == pytest.approx(traced.elapsed_s, rel=1e-3)
    assert played.clock.kernel_count == traced.clock.kernel_count


@pytest.mark.parametrize("second", [{"tokens": 201}, {"token": 6}, {"do_sample": False}, {"train": False}, {"hook": 1}])
def test_a_rollout_that_may_differ_from_those_before_is_traced(second: dict[str, object]) -> None:
    once = _generate_twice()
    other = _generate_twice(second)
    assert other.tracer.operation_count > 1.5 * once.tracer.operation_count


def test_a_rollout_that_leaves_something_behind_is_traced_each_time() -> None:
    kept: list[object] = []
    with fake_gpu("a100-40gb") as gpu:
        model = AutoModelForCausalLM.from_config(config(hidden_size=512, head_dim=64), dtype=torch.bfloat16).cuda()
        model.lm_head.register_forward_hook(lambda module, args, out: kept.append(out))
        counts = []
        for _ in range(3):
            before = gpu.tracer.operation_count
            model.generate(
                input_ids=torch.full((4, 20), 5).cuda(),
                generation_config=GenerationConfig(max_new_tokens=8, pad_token_id=4001, eos_token_id=4000),
            )
            counts.append(gpu.tracer.operation_count - before)
    assert counts[1] == counts[2] > 100


def test_a_card_too_full_for_a_rollout_like_one_before_says_so_and_keeps_nothing_of_it() -> None:
    with fake_gpu("a100-40gb") as gpu:
        model = AutoModelForCausalLM.from_config(config(hidden_size=512, head_dim=64), dtype=torch.bfloat16).cuda()
        settings = GenerationConfig(max_new_tokens=36, pad_token_id=4001, eos_token_id=4000)
        ids = torch.full((64, 200), 5).cuda()
        model.generate(input_ids=ids, generation_config=settings)
        torch.cuda.empty_cache()
        full = torch.empty(gpu.memory.free_bytes - (64 << 20), dtype=torch.uint8, device="cuda")
        held = gpu.memory.allocator.allocated_bytes
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(input_ids=ids, generation_config=settings)
        assert gpu.memory.allocator.allocated_bytes == held
        del full


def test_inputs_that_were_overwritten_by_unknown_values_are_not_those_of_the_call_before() -> None:
    with fake_gpu("a100-40gb") as gpu:
        ids = torch.full((4, 20), 5).cuda()
        known = same_calls._described(ids, gpu.tracer.shadows)
        assert known == same_calls._described(ids.clone(), gpu.tracer.shadows)
        ids.copy_(torch.empty_like(ids))
        assert known != same_calls._described(ids, gpu.tracer.shadows)
