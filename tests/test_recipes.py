"""Recipes beyond a text model and a reward function: reward models, LoRA reward trainers, other tools' files."""

from pathlib import Path
from typing import Any

import pytest
import tiny

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.plugin.registry import load
from autofit.recipe.recipe import read_yaml_mapping
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
        (VERL, r"this is a config of verl .* model_name_or_path: Qwen/Qwen3-4B; lora_r: 16; num_generations: 5; .*"
               r"max_completion_length: 512; .*gradient_accumulation_steps = 40 on one GPU"),
        ({"distributed_type": "FSDP", "num_processes": 2}, "a config of accelerate .*--accelerate_config FILE"),
        ({"device_map": "auto"}, "'device_map': TRL places the model itself.*fsdp2"),
        ({"tools": ["search"]}, "'tools': it takes functions that the model may call.*--trainer module:object"),
        ({"rollout_func": "mine.roll"}, "'rollout_func': it takes a function"),
        ({"base_model": "Qwen/Qwen3-4B"}, "'base_model' is a key of axolotl; in TRL it is model_name_or_path"),
        ({"finetuning_type": "lora"}, "LLaMA-Factory; in TRL it is use_peft"),
    ],
)  # fmt: skip
def test_a_key_of_another_tool_is_named_as_such_with_what_takes_its_place(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("grpo", values, overrides={"use_cpu": True})


def test_a_lora_reward_model_needs_the_task_type_that_peft_reads() -> None:
    values = {"model_name_or_path": "x", "use_peft": True}
    with pytest.raises(ConfigError, match="must be SEQ_CLS .* got CAUSAL_LM .the default of TRL.; set lora_task_type"):
        load("reward").parse(values, overrides={"use_cpu": True})
    load("reward").parse({**values, "lora_task_type": "SEQ_CLS"}, overrides={"use_cpu": True})


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
    monkeypatch.chdir(tmp_path)
    for changes, message in (
        ({"reward_model_name_or_path": "no/such-judge"}, "reward_model_name_or_path must .* 'no/such-judge'"),
        ({"reward_weights": [1.0]}, "reward_weights must have one number for each reward .2: .* got 1"),
        ({"reward_funcs": ["some/judge"]}, "set reward_model_name_or_path: some/judge"),
    ):
        with pytest.raises(ConfigError, match=message):
            _graded(tmp_path / message[:8], tiny_model, "sim:a10g", 4, **changes)
