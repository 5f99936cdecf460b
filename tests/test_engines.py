"""Rollout engines in forecasts, and against published throughputs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import yaml
from engines.__main__ import rows, tokens_per_s
from recipes import inspect

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.engines.forward import Decoder, PagedBatching
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.specs import HostCosts, gpu_spec
from autofit.forecast.evaluation import Parts, Rollout, with_engine
from autofit.forecast.predictions import Shape
from autofit.forecast.worker import Structure
from autofit.plugin.protocol import Report, Task, WorstCase
from autofit.plugin.registry import load
from autofit.recipe.catalogue import architecture, names
from autofit.trainers.keys import ROLLOUTS, TILE_TOKENS

ENGINE = VllmEngine(
    spec=gpu_spec("a100-80gb"), costs=HostCosts(), weights_bytes=8_044_936_192, utilization=0.3, longest=40_960,
    decoder=Decoder(hidden=2560, layers=36, heads=32, key_heads=8, head_dim=128, intermediate=9728, vocab=151_936),
    most_sequences=20,
)  # fmt: skip
ROLLOUT = Rollout(completions=64, group=8, prompt=1024, tokens=512, share=0.5, longest=1536)


def added(engine: VllmEngine | PagedBatching, *rollouts: Rollout) -> tuple[dict[str, Any], dict[str, Any]]:
    """(bytes by phase, seconds by segment) of an engine beside 10 GB in each phase and a decode of 1 s."""
    phases = ("load", "rollout", "wake-up", "scoring", "update", "update+")
    live = {phase: np.full(len(rollouts), 10e9) for phase in phases}
    return with_engine(engine, rollouts, live, {"decode": np.ones(len(rollouts)), "update": np.ones(len(rollouts))})


def test_a_candidates_engine_has_its_own_share_and_sequences_whatever_was_traced() -> None:
    share = int(0.5 * ENGINE.spec.capacity_bytes)
    for sleeps in (False, True):
        bytes_of, _ = added(replace(ENGINE, sleeps=sleeps), ROLLOUT)
        assert bytes_of["rollout"][0] == bytes_of["load"][0] == 10e9 + share
        assert bytes_of["update+"][0] == bytes_of["scoring"][0]
        assert (bytes_of["update"][0] < 10e9 + 2**30) == sleeps
        assert 18e9 < bytes_of["wake-up"][0] < (19e9 if sleeps else 10e9 + share)


def test_seconds_of_an_engine_follow_the_candidate() -> None:
    longer, fewer = replace(ROLLOUT, tokens=1024), replace(ROLLOUT, completions=8)
    _, seconds = added(replace(ENGINE, sync_s=0.1), ROLLOUT, longer, fewer)
    short_s, long_s, few_s = seconds["rollout"]
    assert 2.0 < long_s / short_s < 3.0  # each further token attends to more
    assert short_s / 8 < few_s < short_s
    assert seconds["update"].tolist() == [1.0, 1.0, 1.0]


def test_a_share_that_holds_no_sequence_needs_more_than_the_card() -> None:
    bytes_of, _ = added(ENGINE, replace(ROLLOUT, share=0.1), ROLLOUT)
    assert bytes_of["load"][0] > ENGINE.spec.capacity_bytes > bytes_of["load"][1]
    own = replace(ROLLOUT, share=0.15, longest=0)  # the model's own length of 40,960 tokens does not fit, 1,536 do
    bytes_of, _ = added(ENGINE, own, replace(own, longest=1536))
    assert bytes_of["load"][0] > ENGINE.spec.capacity_bytes > bytes_of["load"][1]


def test_continuous_batching_takes_a_share_of_what_is_left() -> None:
    batching = PagedBatching(spec=ENGINE.spec, costs=ENGINE.costs, decoder=ENGINE.decoder, share=0.5)
    bytes_of, seconds = added(batching, ROLLOUT)
    assert bytes_of["rollout"][0] == pytest.approx((10e9 + ENGINE.spec.capacity_bytes) / 2)
    assert bytes_of["update"][0] == 10e9
    assert seconds["rollout"][0] > 0


ONE_BY_ONE = [row for row in rows() if row["measure"] == "decode" and "14B" not in row["name"]]


@pytest.mark.parametrize("row", ONE_BY_ONE, ids=lambda row: row["name"])
def test_decoding_one_sequence_is_as_fast_as_was_measured(row: dict[str, str]) -> None:
    assert tokens_per_s(row) == pytest.approx(float(row["tokens_per_s"]), rel=0.1)


def test_the_sizes_of_a_config_are_read_from_every_architecture_of_the_catalogue() -> None:
    for name in names():
        entry = architecture(name)
        assert entry is not None
        text = entry.text_config
        decoder = Decoder.of(text)
        mlp = 3 if decoder.gated else 2
        experts = decoder.experts * decoder.intermediate + decoder.shared_intermediate
        width = experts if decoder.experts else decoder.intermediate
        sparse = decoder.layers - decoder.dense_layers
        per_layer = sum(n * k for n, k in decoder.products(1))
        counted = decoder.layers * per_layer + mlp * decoder.hidden * (
            sparse * width + decoder.dense_layers * decoder.dense_intermediate
        )
        counted += decoder.vocab * decoder.hidden
        otherwise = ("hidden_size_per_layer_input", "full_attn_idxs")  # tables that are looked up; convolutions
        if not decoder.recurrent_layers and not any(map(text.get, otherwise)):
            rest = 0.35 if "vision_config" in entry.config else 0.25  # a tower of 0.67 B beside a decoder of 1.54
            assert counted == pytest.approx(entry.parameters, rel=rest), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_forecast_with_vllm_agrees_with_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
            "vllm_enable_sleep_mode": True, "vllm_max_model_length": 512}  # fmt: skip
    model_path = tiny.write_model(tmp_path / "m", layers=5)
    recipe = yaml.safe_load(tiny.write_recipe(tmp_path, model_path, use_peft=False, **vllm).read_text())
    worst_case = tmp_path / "worst_case.json"
    values: Any = inspect("grpo", recipe, "sim:l4", worst_case)["values"]
    structure = Structure(
        trainer="grpo", keys=ROLLOUTS, tile_tokens=TILE_TOKENS, values=values, device="sim:l4", large=False,
        worst_case=str(worst_case), reused=False, varies_rank=False,
        ranges={"B": (1, 64), "G": (1, 256), "C": (8, 300)},
        hold_out={"B": 4, "C": 33, "accumulation": 2, "chunk": 2},
    )  # fmt: skip
    model, mismatch, _ = structure.model()
    assert mismatch.bytes_frac < 1e-4
    changed = values | {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 2,
        "num_generations": 4, "max_completion_length": 48, "vllm_gpu_memory_utilization": 0.6,
    }  # fmt: skip
    with fake_gpu("l4", enforce_capacity=False) as gpu:
        task = Task(device="sim:l4", output=tmp_path / "o", worst_case=WorstCase(path=worst_case), steps=2)
        load("grpo").build(changed, task).train(Report())
    prompt_tokens = int(WorstCase(path=worst_case).facts["prompt_tokens"])
    parts = Parts.of(model, 5, (Shape(2, 4, 2, 48, 0, 4, 0.6, 512),)).with_engine(model.engine, prompt_tokens)
    assert parts.live_bytes[0] == pytest.approx(gpu.memory.allocator.peak_requested_bytes, rel=1e-5)
    assert 2 * parts.step_s[0] == pytest.approx(gpu.elapsed_s, rel=0.3)
