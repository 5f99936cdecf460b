"""Forecasts of random architectures against traces of all their layers, byte for byte."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from architectures import ARCHITECTURES, PlainTrainer, random_config, write_model
from recipes import inspect
from tiny import WORDS, write_recipe
from tiny import write_model as write_words
from transformers import AutoConfig

from autofit.fakegpu.depth.stack import NotRepeatingError, layer_prints, plan_stack, shrink
from autofit.forecast.composed import Made
from autofit.forecast.worker import Point, Structure
from autofit.trainers.keys import ROLLOUTS, TILE_TOKENS

pytestmark = pytest.mark.filterwarnings("ignore")
# Linear attention, with experts. Thorough: attention that slides by a pattern (in CI by fakegpu/test_expand.py), in
# chunks, Mamba, experts where the config says, a rollout with a plain cache (fakegpu/test_formula.py), a compressed and
# a sliding one
MECHANISMS = (("qwen3_next", 0, False),)
PATTERNS = ("gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "glm4_moe", "llama4_text", "jamba", "qwen3_next")
ROLLING = ("llama", "gpt2", "olmo3", "qwen2_moe", "deepseek_v2", "llama4_text", "gemma2", "mixtral")
CASES = [
    *((name, seed, False) for name in ARCHITECTURES for seed in (0,)),
    *((name, 1, False) for name in PATTERNS),
    *((name, 2, True) for name in ROLLING),
]


def marks_of(case: tuple[str, int, bool]) -> tuple[pytest.MarkDecorator, ...]:
    """When a case runs: in CI, or with every other architecture (`nox -s thorough`)."""
    return (pytest.mark.slow,) if case in MECHANISMS else (pytest.mark.thorough,)


def structure_of(
    trainer: str, kind: PlainTrainer | None, values: dict[str, Any], worst_case: Path, padded: bool = False, **more: Any
) -> Structure:
    return Structure(
        trainer=trainer, keys=kind.keys if kind else ROLLOUTS, tile_tokens=None if kind else TILE_TOKENS,
        values=values, device="sim:l4", worst_case=str(worst_case), large=False, reused=False, padded=padded,
        ranges={"B": (1, 64), "G": (1, 256), "C": (8, 300), "r": (2, 32)}, **more,
    )  # fmt: skip


def random_point(draw: random.Random, *, generates: bool, lora: bool) -> Point:
    chunk = draw.choice((1, 2)) if generates else 1
    return Point(
        micro_batch=draw.randint(1, 9) * 2, completion=draw.randint(9, 60) if generates else 0,
        rank=draw.randint(2, 20) if lora else None, accumulation=chunk * draw.choice((1, 2)), chunk=chunk,
    )  # fmt: skip


def forecast_and_traced(structure: Structure, model: Any, point: Point) -> tuple[dict[str, int], dict[str, int]]:
    """Peak bytes of each phase, as forecast and as traced with all layers."""
    at = {"B": point.micro_batch, "G": point.generated, "C": point.completion, "r": point.rank or 0}
    traced = structure.recording.trace(point).peaks
    told = model.peaks({n: np.array([float(at[n])]) for n in model.variables}, structure.recording.layers)
    return {phase: round(float(told[phase][0])) for phase in traced}, traced


@pytest.mark.parametrize(
    ("name", "seed", "generates"),
    [pytest.param(*case, marks=marks_of(case)) for case in CASES],
)
def test_a_forecast_of_an_architecture_is_exact_or_rules_nothing_out(
    name: str, seed: int, generates: bool, tmp_path: Path
) -> None:
    draw = random.Random(f"{name}{seed}")
    config = random_config(name, draw, layers=draw.choice((10, 12, 14) if seed == 1 else (2, 5, 6, 7, 8)))
    lora = draw.random() < 0.25 and name != "llama4_text"  # PEFT does not take its router, which returns a pair
    values = {
        "model": str(write_model(tmp_path, config)), "checkpointing": draw.random() < 0.5, "tokens": 24,
        "lora_r": 8 if lora else 0, "dtype": draw.choice(("float32", "bfloat16")),
    }  # fmt: skip
    kind, held = PlainTrainer(generates=generates), random_point(draw, generates=generates, lora=lora)
    structure = structure_of(
        f"architectures:{'ROLLOUTS' if generates else 'SAMPLES'}", kind, values, tmp_path / "worst_case.json",
        varies_rank=lora, hold_out={
            "B": held.micro_batch, "C": held.completion, "r": held.rank or 0,
            "accumulation": held.accumulation, "chunk": held.chunk,
        },
    )  # fmt: skip
    model, mismatch, _ = structure.model()
    told, traced = forecast_and_traced(structure, model, random_point(draw, generates=generates, lora=lora))
    assert told == traced
    made = Made(
        model=model, layers=structure.recording.layers, mismatch=mismatch.bytes_frac,
        seconds_mismatch=mismatch.seconds_frac,
    )  # fmt: skip
    assert made.problem == ""
    assert abs(mismatch.seconds_frac) < 0.001  # none was more than 0.034 % off


@pytest.mark.thorough  # 33 s; CI has layers told apart by their modules below, and a random pattern of experts above
def test_dense_layers_first_are_seen_in_a_real_grpo_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_words(tmp_path / "model")
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=WORDS, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=3, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, max_position_embeddings=256, eos_token_id=WORDS - 3,
        pad_token_id=WORDS - 2, bos_token_id=None, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    recipe = yaml.safe_load(write_recipe(tmp_path, folder, use_peft=False).read_text())
    worst_case = tmp_path / "worst_case.json"
    values: Any = inspect("grpo", recipe, "sim:l4", worst_case)["values"]
    structure = structure_of(
        "grpo", None, dict(values), worst_case, varies_rank=False,
        hold_out={"B": 3, "accumulation": 4, "chunk": 2, "C": 20},
    )  # fmt: skip
    model, mismatch, _ = structure.model()
    point = Point(micro_batch=4, completion=16, rank=None, accumulation=2, chunk=2)
    told, traced = forecast_and_traced(structure, model, point)
    assert told == traced
    assert mismatch.bytes_frac == 0.0
    assert structure.stack is not None
    assert len(structure.stack.kept) < 12


def test_layers_are_told_apart_by_their_modules() -> None:
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=20, first_k_dense_replace=3)
    stack = plan_stack(config)
    assert (stack.first, stack.period, stack.units) == (3, 1, 16)
    prints = layer_prints(config)
    assert prints[0] == prints[2] != prints[3] == prints[19]


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("zamba2", {}, "share weights"),
        ("bart", {}, "2 lists of"),
        ("qwen3_moe", {"num_hidden_layers": 4}, "4 layers do not repeat"),
        ("gemma3n_text", {}, "other modules if it has fewer layers"),  # an embedding for each layer
        ("diffllama", {}, "do not repeat"),
    ],
)
def test_a_model_that_few_layers_cannot_stand_for_is_refused(kind: str, sizes: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(kind, **sizes)
    whole = config.to_dict()
    with pytest.raises(NotRepeatingError, match=reason):
        shrink(config)
    with pytest.raises(NotRepeatingError, match=reason):
        plan_stack(config)
    assert config.to_dict() == whole
