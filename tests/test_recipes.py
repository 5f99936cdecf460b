"""Recipes beyond a text model and a reward function: reward models, LoRA reward trainers, other tools' files."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoConfig

from autofit.api.estimating import estimate
from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.plugin.registry import load
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.trainers.images import vision_of
from autofit.trainers.trl_config import parse

VERL = {
    "actor_rollout_ref": {
        "model": {"path": "Qwen/Qwen3-4B", "lora_rank": 16},
        "rollout": {"n": 5, "gpu_memory_utilization": 0.6},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 8, "max_response_length": 512},
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VERL, r"this is a config of verl .*1,280 samples over all GPUs \(ppo_mini_batch_size 256 x rollout.n 5\)"),
        ({"distributed_type": "FSDP", "num_processes": 2}, "a config of accelerate .*--accelerate_config FILE"),
        ({"device_map": "auto"}, "'device_map': TRL places the model itself.*fsdp2"),
        ({"tools": ["search"]}, "'tools': it takes functions that the model may call.*--trainer module:object"),
        ({"rollout_func": "mine.roll"}, "'rollout_func': it takes a function"),
        ({"base_model": "Qwen/Qwen3-4B"}, "'base_model' is a key of Axolotl; in TRL it is model_name_or_path"),
        ({"finetuning_type": "lora"}, "LLaMA-Factory; in TRL it is use_peft"),
        ({"optim": "sgd", "max_lenght": 9}, "'max_length' is a key of `trl sft`, .*; no key says another"),
        ({"beta": 0.1, "max_lenght": 9}, "'max_length' is .* `trl reward`; of a completion .* is the limit$"),
    ],
)  # fmt: skip
def test_a_key_of_another_tool_is_named_as_such_with_what_takes_its_place(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("grpo", values, overrides={"use_cpu": True})


def test_a_lora_reward_model_needs_the_task_type_that_peft_reads() -> None:
    values = {"model_name_or_path": "x", "use_peft": True}
    trainer: Any = load("reward")
    with pytest.raises(ConfigError, match=r"must be SEQ_CLS .* got CAUSAL_LM .the default of TRL.; set lora_task_type"):
        trainer.parse(values, overrides={"use_cpu": True})
    trainer.parse({**values, "lora_task_type": "SEQ_CLS"}, overrides={"use_cpu": True})


@pytest.mark.parametrize("prompt_tokens", [32, 40])
def test_a_synthetic_pair_is_as_long_as_a_reward_trainer_keeps(
    tmp_path: Path, tiny_model: Path, prompt_tokens: int
) -> None:
    values = read_yaml_mapping(tiny.write_offline_recipe("reward", tmp_path, tiny_model), what="recipe")
    worst_case = WorstCase(path=tmp_path / "i" / "worst_case.json")
    worst_case.folder.mkdir()
    facts = load("reward").inspect(
        values, Inspection(device="sim:a10g", worst_case=worst_case, prompt_tokens=prompt_tokens)
    )
    assert facts.longest_sample_tokens == 32  # its max_length


def _graded(folder: Path, model: Path, device: str, prompt_tokens: int | None, **changes: object) -> Any:
    """The run of a tiny GRPO recipe with a reward model beside its reward function."""
    folder.mkdir(exist_ok=True)
    path = tiny.write_recipe(folder, model, **{"reward_model_name_or_path": str(model), **changes})
    values = read_yaml_mapping(path, what="recipe")
    worst_case = WorstCase(path=folder / "i" / "worst_case.json")
    worst_case.folder.mkdir()
    load("grpo").inspect(values, Inspection(device=device, worst_case=worst_case, prompt_tokens=prompt_tokens))
    return load("grpo").build(values, Task(device=device, output=folder / "out", worst_case=worst_case, steps=1))


def test_a_reward_model_scores_full_sequences_with_random_weights(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = _graded(tmp_path, tiny_model, "cpu", None, reward_weights=[1.0, 0.5])
    shapes: list[tuple[int, ...]] = []
    judge = run.trainer.reward_funcs[0]
    judge.register_forward_pre_hook(lambda m, args, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    run.train(Report())
    assert type(judge).__name__ == "LlamaForSequenceClassification"
    assert shapes == [(8, 7 + 8)]  # the rollout's completions; the longest prompt and a full completion


def test_a_reward_model_is_named_where_it_cannot_be(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, message in (
        ({"reward_model_name_or_path": "no/such-judge"}, "reward_model_name_or_path must .* 'no/such-judge'"),
        ({"reward_weights": [1.0]}, "reward_weights must have one number for each reward .2: .* got 1"),
        ({"reward_funcs": ["some/judge"]}, "set reward_model_name_or_path: some/judge"),
    ):
        folder = tmp_path / message[:8]
        folder.mkdir()
        monkeypatch.chdir(folder)  # where the recipe's own reward function is
        with pytest.raises(ConfigError, match=message):
            _graded(folder, tiny_model, "sim:a10g", 4, **changes)


def _image_model(folder: Path, kind: str, **vision: object) -> Path:
    """The config.json, and no more, of a small image-text model."""
    text: dict[str, object] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    classes = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}
    if kind == "qwen2_5_vl":
        text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}}
    else:
        text |= {"model_type": "llama"}
    content = {
        "model_type": kind, "architectures": [classes[kind]], "text_config": text, "vision_config": vision,
        "image_token_id": 500, "image_token_index": 500, "video_token_id": 501, "vision_start_token_id": 502,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 28**2, "max_pixels": 24 * 28**2}))
    return folder


QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
LLAVA = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 32}  # fmt: skip


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("trainer", "kind", "vision", "tokens"),
    [
        ("sft", "qwen2_5_vl", QWEN, 24),  # the limit in its processor's file
        pytest.param("grpo", "qwen2_5_vl", QWEN, 24, marks=pytest.mark.thorough),
        pytest.param("grpo", "llava", LLAVA, 16, marks=pytest.mark.slow),
    ],
)
def test_an_image_text_model_trains_on_an_image_at_its_largest(
    tmp_path: Path, trainer: str, kind: str, vision: dict[str, object], tokens: int
) -> None:
    model = _image_model(tmp_path / "model", kind, **vision)
    values: dict[str, object] = {"model_name_or_path": str(model), "dtype": "bfloat16"}
    if trainer == "grpo":
        values |= {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
                   "max_completion_length": 8, "reward_funcs": ["think_format_reward"]}  # fmt: skip
    else:
        values |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": 2048}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    found = estimate(tmp_path / "run.yaml", trainer=trainer, gpu="a10g", prompt_tokens=16, advice=False)
    longest = found.recipe.longest_prompt_tokens or found.recipe.longest_sample_tokens
    assert longest is not None
    assert 0 <= longest - tokens - 16 < 24  # and the words of the chat template
    assert found.fits
    assert f"{tokens:,} tokens" in " ".join(found.recipe.notes)
    assert found.step_s is not None
    assert not found.recipe.forecasts


@pytest.mark.parametrize(("kind", "has"), [("gemma3", False), ("qwen3_5", False), ("llava", True)])
def test_made_up_prompts_of_a_chat_model_that_also_takes_images_are_of_text(kind: str, has: bool) -> None:
    assert vision_of(AutoConfig.for_model(kind), "a/model").in_made_up is has


def test_an_image_of_qwen3_5_is_a_token_for_1024_pixels_and_a_sample_that_is_made_up_has_none() -> None:
    from datasets import Dataset
    from transformers import Qwen3_5Config

    from autofit.trainers.image_prompts import with_an_image
    from autofit.trainers.images import StandInProcessor, vision_of

    vision = vision_of(Qwen3_5Config(vision_config={}), "a/b")
    assert vision.tokens((640, 480)) == 300
    rows = Dataset.from_list([{"prompt": "one"}])
    assert with_an_image(rows, StandInProcessor(None, vision, 1)).column_names == ["prompt"]


QWEN3_5 = {
    "text_config": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 512, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("trainer", ["dpo", "hf"])
def test_a_model_that_also_takes_images_trains_on_text_without_its_processors_files(
    trainer: str, tmp_path: Path
) -> None:
    """DPO asked for the image processor of Qwen3.5, and a plain Trainer made its words alone of the whole config."""
    model = tmp_path / "model"
    AutoConfig.for_model("qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"], **QWEN3_5).save_pretrained(model)
    values = {"model_name_or_path": str(model), "max_length": 64, "per_device_train_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    found = estimate(tmp_path / "run.yaml", trainer=trainer, gpu="t4", prompt_tokens=16, advice=False)
    assert found.fits
    assert found.step_s is not None


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_limit_without_room_for_an_image_is_refused_before_the_probe(tmp_path: Path) -> None:
    model = _image_model(tmp_path / "model", "qwen2_5_vl", **QWEN)
    values = {"model_name_or_path": str(model), "max_length": 16, "per_device_train_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"max_length=16 must leave room for the .* give more, or null for no limit"):
        estimate(tmp_path / "run.yaml", trainer="sft", gpu="a10g", prompt_tokens=16, advice=False)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_an_image_text_model_that_packs_trains_on_text(tmp_path: Path) -> None:
    model = _image_model(tmp_path / "model", "qwen2_5_vl", **QWEN)
    values = {"model_name_or_path": str(model), "packing": True, "max_length": 64, "per_device_train_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    found = estimate(tmp_path / "run.yaml", trainer="sft", gpu="a10g", prompt_tokens=64, advice=False)
    assert found.fits
    assert found.recipe.longest_sample_tokens == 64
    assert not any("image" in note for note in found.recipe.notes)
    assert found.recipe.forecasts


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_rollout_that_serves_four_steps_is_a_quarter_of_each_and_has_the_optimizers_state_beside_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = {"reward_funcs": ["think_format_reward"], "use_peft": False}
    once = tiny.write_recipe(tmp_path, tiny_model, **common)
    one = estimate(once, gpu="a10g", prompt_tokens=4, advice=False)
    four = estimate(once, gpu="a10g", prompt_tokens=4, changes={"num_iterations": 4}, advice=False)
    share = four.result.rollout_s[0] / one.result.rollout_s[0]
    assert 0.25 < share < 0.35  # with old log-probabilities, which one iteration does not need
    peak = {name: p.peak_allocated_bytes for name, found in (("one", one), ("four", four)) for p in found.phases
            if p.name == "rollout"}  # fmt: skip
    assert peak["four"] == pytest.approx(peak["one"], rel=0.02)


def test_a_number_of_parameters_below_a_billion_that_rounds_to_one_is_one() -> None:
    from autofit.recipe.recipe import _count

    assert [_count(number) for number in (999_885_952, 999_400_000, 4_020_000_000)] == ["1 B", "999 M", "4.02 B"]
