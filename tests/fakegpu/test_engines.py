"""Rollout engines by their laws: order of sequences, blocks of the cache, seconds of a step, and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig

from autofit.fakegpu import FakeGpuError
from autofit.fakegpu.engines.forward import Decoder, ForwardPasses, PagedBatching, collective_seconds
from autofit.fakegpu.engines.vllm import Scheduler, Stretch, VllmEngine
from autofit.fakegpu.specs import HostCosts, gpu_spec
from autofit.probing.result import least_share

QWEN3_4B = Decoder(
    hidden=2560, layers=36, heads=32, key_heads=8, head_dim=128, intermediate=9728, vocab=151936
)  # fmt: skip
ENGINE = VllmEngine(
    spec=gpu_spec("a100-80gb"), costs=HostCosts(), decoder=QWEN3_4B, weights_bytes=8_044_936_192, utilization=0.3,
    longest=4096, most_sequences=64,
)  # fmt: skip


def generated(stretches: list[Stretch]) -> int:
    return sum(s.steps * s.decoding + s.ends for s in stretches)


def prefilled(stretches: list[Stretch]) -> int:
    return round(sum(s.prefilling * s.queries for s in stretches))


def step_s(engine: VllmEngine, sequences: int, context: int) -> float:
    batch = ForwardPasses(*(np.array([float(x)]) for x in (sequences, context, 0, 0, 0)))
    return float(engine.steps_s(batch, np.array([float(sequences)]))[0])


def test_every_sequence_gets_its_tokens_and_equal_steps_are_one_stretch() -> None:
    scheduler = Scheduler(budget=4096, most_sequences=64, blocks=100_000)
    stretches, preempted = scheduler.play([1024] * 64, 256, group=1)
    assert generated(stretches) == 64 * 256
    assert prefilled(stretches) == 64 * 1024
    assert preempted == 0
    assert max(s.decoding + s.prefilling * s.queries for s in stretches) <= 4096
    assert len(stretches) < 40  # 16 steps with prompts, then all decode together until the first ends


def test_completions_of_a_group_share_the_full_blocks_of_their_prompt() -> None:
    scheduler = Scheduler(budget=4096, most_sequences=64, blocks=100_000)
    alike, _ = scheduler.play([1024] * 64, 8, group=16)
    alone, _ = replace(scheduler, shares_prompts=False).play([1024] * 64, 8, group=16)
    assert prefilled(alike) == 4 * (1024 + 15 * 16)  # the last block of a prompt is computed for each
    assert prefilled(alone) == 64 * 1024
    assert generated(alike) == generated(alone) == 64 * 8


def test_without_blocks_the_latest_sequence_waits_and_all_are_still_worked_off() -> None:
    scheduler = Scheduler(budget=4096, most_sequences=64, blocks=1200)
    stretches, preempted = scheduler.play([100] * 64, 1000, group=1)
    assert preempted > 0
    assert generated(stretches) == 64 * 1000
    roomy, _ = replace(scheduler, blocks=10_000).play([100] * 64, 1000, group=1)
    assert sum(s.steps for s in stretches) > 1.5 * sum(s.steps for s in roomy)


def test_a_step_takes_the_time_of_its_weights_and_its_cache() -> None:
    weights_s = ENGINE.weights_bytes / gpu_spec("a100-80gb").bandwidth_bytes_per_s
    assert weights_s < step_s(ENGINE, 1, 512) < 2 * weights_s
    assert step_s(ENGINE, 64, 512) < 3 * step_s(ENGINE, 1, 512)
    cache_s = 64 * 3584 * QWEN3_4B.kv_bytes_per_token / gpu_spec("a100-80gb").bandwidth_bytes_per_s
    assert step_s(ENGINE, 64, 4096) - step_s(ENGINE, 64, 512) == pytest.approx(cache_s / 0.85, rel=0.25)
    assert step_s(replace(ENGINE, waits=True), 64, 512) > step_s(ENGINE, 64, 512)


def test_an_eager_step_is_launched_by_the_modules_python() -> None:
    compiled = replace(ENGINE, spec=gpu_spec("h100"))
    launches = 11 * QWEN3_4B.layers * ENGINE.costs.launch_s
    assert step_s(replace(compiled, eager=True), 1, 512) > launches
    assert step_s(compiled, 1, 512) < launches


def test_adapters_are_three_more_kernels_beside_each_of_four_products() -> None:
    served = replace(ENGINE, spec=gpu_spec("h100"), lora_rank=32)
    plain = replace(served, lora_rank=0)
    launches = 12 * QWEN3_4B.layers * ENGINE.costs.launch_s
    added = step_s(replace(served, eager=True), 1, 512) - step_s(replace(plain, eager=True), 1, 512)
    assert added == pytest.approx(launches)  # without graphs the host launches each of them
    shortest = 12 * QWEN3_4B.layers * served.forward.kernels.shortest_s
    captured = step_s(served, 1, 512) - step_s(plain, 1, 512)
    assert shortest * 0.999 < captured < launches  # in a graph the card has them alone


def test_cards_that_share_a_model_add_their_outputs_twice_a_layer() -> None:
    alone = replace(ENGINE, spec=gpu_spec("h100"))
    small = replace(alone, decoder=replace(QWEN3_4B, layers=QWEN3_4B.layers // 2))
    shared = replace(alone, ranks=2)
    sums = 2 * QWEN3_4B.layers * collective_seconds(alone.spec).seconds("all_reduce", 64 * 2560 * 2, 2)
    assert step_s(shared, 64, 512) > max(sums, step_s(replace(small, ranks=1), 64, 512) / 2)
    eager = step_s(replace(shared, eager=True), 1, 512) - step_s(replace(alone, eager=True), 1, 512)
    assert eager == pytest.approx(2 * QWEN3_4B.layers * ENGINE.costs.launch_s)


def test_a_generation_goes_on_until_its_longest_completion() -> None:
    prompts, completions = [100] * 64, [100] * 63 + [400]
    lasts = replace(ENGINE, spec=gpu_spec("h100"), eager=True)
    whole = lasts.generation_s(prompts, 400)
    assert lasts.generation_s(prompts, 100) < lasts.generation_s(prompts, completions) <= whole
    assert lasts.generation_s(prompts, completions) > 0.9 * whole  # launches, not sequences, take the time
    stretches, _ = Scheduler(budget=4096, most_sequences=64, blocks=100_000).play(prompts, completions, group=1)
    assert generated(stretches) == 63 * 100 + 400


def test_an_engine_that_waits_still_launches_while_the_card_computes() -> None:
    slow = replace(ENGINE, eager=True, waits=True)
    prepared = step_s(slow, 1, 512) - step_s(replace(slow, waits=False), 1, 512)
    assert prepared == pytest.approx(0.0, abs=1e-4)  # both are bound by launches, after the host's preparation


def test_a_small_share_runs_fewer_sequences_at_once_and_takes_longer() -> None:
    prompts = [1024] * 256
    wide = replace(ENGINE, utilization=0.9, most_sequences=256)
    narrow = replace(wide, utilization=0.16)
    assert narrow.blocks * 16 < 256 * 1024 < wide.blocks * 16
    assert narrow.generation_s(prompts, 512, group=8) > 1.2 * wide.generation_s(prompts, 512, group=8)


def test_the_share_is_weights_cache_graphs_and_the_profiling_run() -> None:
    held = ENGINE.held_bytes(weights=True, cache=True, computing=True)
    assert held == ENGINE.share_bytes == int(0.3 * gpu_spec("a100-80gb").capacity_bytes)
    asleep = ENGINE.held_bytes(weights=False, cache=False)
    assert 0 < asleep < 2**30
    assert ENGINE.graph_sizes[-1] == 128  # twice the sequences
    assert replace(ENGINE, eager=True).graph_sizes == []
    assert replace(ENGINE, remote=True).held_bytes(weights=True, cache=True) == 0


def test_an_engine_that_cannot_serve_one_sequence_says_what_to_change() -> None:
    assert ENGINE.refusal == ""
    small = replace(ENGINE, longest=262_144)
    assert small.missing_bytes == QWEN3_4B.kv_bytes_per_token * 262_144 - small.cache_bytes
    assert "set a lower vllm_max_model_length" in small.refusal
    assert "one sequence of 262,144 tokens 38.65 GB; raise" in small.refusal
    too_small = replace(ENGINE, utilization=0.05).refusal
    assert "No available memory for the cache blocks" in too_small
    assert "vllm_max_model_length" not in too_small, "no length is short enough: the weights alone are too large"
    least = least_share(too_small)
    assert least is not None
    assert replace(ENGINE, utilization=least).refusal == ""
    assert replace(ENGINE, utilization=least - 0.01).refusal
    assert "no share of this card is enough" in replace(ENGINE, longest=10**9).refusal
    with pytest.raises(FakeGpuError, match=r"at most 1; got 1\.2"):
        replace(ENGINE, utilization=1.2)


def test_vllms_cache_keeps_one_vector_of_latent_attention_on_every_card() -> None:
    """GLM-4.7-Flash: vLLM's `get_head_size` is kv_lora_rank + qk_rope_head_dim, and `get_num_kv_heads` is 1."""
    config = {
        "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
        "num_key_value_heads": 20, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    for ranks in (1, 4):
        assert Decoder.of(config).vllm_bytes_per_token(ranks) == 47 * 576 * 2
    assert Decoder.of({**config, "model_type": "minicpm3"}).vllm_bytes_per_token(1) == 47 * 2 * 20 * 102 * 2


def test_a_card_keeps_at_least_one_head_of_keys_and_values() -> None:
    assert QWEN3_4B.vllm_bytes_per_token(16) == QWEN3_4B.kv_bytes_per_token // QWEN3_4B.key_heads


def test_sizes_that_differ_between_layers_are_their_mean() -> None:
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6)
    assert Decoder.of(config).head_dim == (5 * 256 + 512) // 6


def test_an_engine_survives_its_json() -> None:
    assert VllmEngine.from_json(ENGINE.to_json()) == ENGINE
    batching = PagedBatching(spec=ENGINE.spec, costs=ENGINE.costs, decoder=QWEN3_4B, share=0.5, step_s=0.04)
    assert PagedBatching.from_json(batching.to_json()) == batching


def test_continuous_batching_waits_for_places_and_its_attention_grows_with_all_sequences() -> None:
    batching = PagedBatching(spec=gpu_spec("a100-40gb"), costs=HostCosts(), decoder=QWEN3_4B, share=0.5, step_s=0.04)
    held = 12e9
    tokens = batching.cache_tokens(held, 64)
    assert 0.4 < tokens * QWEN3_4B.kv_bytes_per_token / float(batching.cache_bytes(held)) < 0.95
    assert batching.waves([1024] * 8, 512, held) == 1
    assert batching.waves([1024] * 8, tokens, held) == 0  # not even one sequence has a place
    many = batching.waves([1024] * 128, 512, held)
    assert many > 1
    assert batching.added_s([1024] * 128, 512, held) > (many - 1) * 512 * 0.04
    few, more = (batching.added_s([128] * n, 512, held) for n in (8, 16))
    assert more > 1.2 * few


@pytest.mark.parametrize("sparse", [False, True])
def test_a_mixture_reads_the_experts_that_its_tokens_have(sparse: bool) -> None:
    mixture = replace(QWEN3_4B, experts=128, experts_per_token=8, intermediate=768)
    engine = replace(ENGINE, decoder=mixture if sparse else QWEN3_4B)
    assert (step_s(engine, 64, 512) > 3 * step_s(engine, 1, 512)) == sparse
