"""Files of other tools as recipes: values, ranks and lengths as that tool's own code would set them, by hand."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from recipes import grpo_recipe
from tiny import write_model

import autofit
from autofit.api.planning import _or_less
from autofit.cli import main
from autofit.errors import ConfigError
from autofit.frontends import ms_swift, sharing
from autofit.frontends.command import UNSURE, commands
from autofit.frontends.draft import Foreign
from autofit.frontends.ms_swift import TYPE
from autofit.frontends.reading import explain, read
from autofit.frontends.writing import (
    can_say,
    changed,
    in_16_bits,
    in_own_keys,
    on_card,
    own_text,
    own_words,
    source_of,
    written,
)
from autofit.hardware.hardware import has_bfloat16
from autofit.plugin.registry import trainer_for
from autofit.recipe.launching import LaunchOptions, launched
from autofit.recipe.recipe import own_names
from autofit.space.traits import describe_changes

LLAMA: dict[str, object] = {
    "model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "do_train": True, "finetuning_type": "lora",
    "dataset": "identity", "template": "qwen3", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    "learning_rate": "1e-4", "bf16": True,
}  # fmt: skip
AXO: dict[str, object] = {
    "base_model": "Qwen/Qwen3-4B", "datasets": [{"path": "a", "type": "alpaca"}], "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "sequence_len": 2000, "optimizer": "adamw_8bit", "learning_rate": "2e-5",
}  # fmt: skip
AXO_LORA: dict[str, object] = {
    **AXO, "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True,
}  # fmt: skip
VERL_SCRIPT = """python3 -m verl.trainer.main_ppo data.train_batch_size=64 data.max_prompt_length=512 \\
    data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 algorithm.adv_estimator=grpo \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
"""
SWIFT = """#!/bin/bash
# 2 * 20GiB
n=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$n \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --dataset 'swift/self-cognition#1000' \\
              'another#500' \\
    --system "You are
a helpful assistant." \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps $(expr 16 / $n) \\
    --learning_rate 1e-4 \\
    --max_length 2048
"""


def of_yaml(folder: Path, values: Mapping[str, object]) -> Foreign:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    found = read(path)
    assert found is not None
    return found


def of_script(folder: Path, text: str) -> Foreign:
    path = folder / "run.sh"
    path.write_text(text)
    found = read(path)
    assert found is not None
    return found


def test_llama_factory_keeps_a_frozen_model_in_16_bits_and_lora_in_float32(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, LLAMA)
    assert (found.tool, found.trainer, found.prompt_tokens) == ("LLaMA-Factory", "hf", 2048)
    assert found.values["dtype"] == "bfloat16"
    assert found.values["adapter_dtype"] == "float32"
    assert [found.values[key] for key in ("lora_r", "lora_alpha", "lora_target_modules")] == [8, 16, ["all-linear"]]
    assert (found.values["max_length"], found.values["pad_to_multiple_of"]) == (2048, 8)
    assert found.values["gradient_checkpointing"] is True
    assert found.values["gradient_checkpointing_kwargs"] == {"use_reentrant": True}
    assert found.values["learning_rate"] == pytest.approx(1e-4)
    assert found.keys["max_length"] == "cutoff_len"
    assert found.defaults["cutoff_len"] == 2048
    assert not found.launch


def evaluated(found: Foreign) -> object:
    """Samples that a file evaluates at once within its training; None where it does not evaluate."""
    assert (found.values.get("eval_strategy") == "epoch") == ("per_device_eval_batch_size" in found.values)
    return found.values.get("per_device_eval_batch_size")


def test_a_file_that_evaluates_is_a_recipe_that_does(tmp_path: Path) -> None:
    on = {"eval_strategy": "steps", "val_size": 0.1}
    llama = of_yaml(tmp_path, {**LLAMA, **on})
    assert evaluated(llama) == 8  # transformers' default
    assert llama.defaults["per_device_eval_batch_size"] == 8
    assert (
        evaluated(of_yaml(tmp_path, {**LLAMA, "do_eval": True, "val_size": 0.1, "per_device_eval_batch_size": 2})) == 2
    )
    for silent in ({}, {**on, "eval_strategy": "no"}):
        assert evaluated(of_yaml(tmp_path, {**LLAMA, **silent})) is None
    axolotl = {**AXO, "val_set_size": 0.1}
    assert evaluated(of_yaml(tmp_path, axolotl)) is None  # it never says when
    assert evaluated(of_yaml(tmp_path, {**axolotl, "evals_per_epoch": 2})) == 2  # as many as it trains
    fewer = of_yaml(tmp_path, {**axolotl, "eval_steps": 0.1, "eval_batch_size": 3})
    assert (evaluated(fewer), fewer.keys["per_device_eval_batch_size"]) == (3, "eval_batch_size")
    swift = SWIFT.rstrip() + " --split_dataset_ratio "
    assert evaluated(of_script(tmp_path, swift + "0.01\n")) == 1
    assert evaluated(of_script(tmp_path, swift + "0.01 --per_device_eval_batch_size 4\n")) == 4
    assert evaluated(of_script(tmp_path, swift + "0.01 --eval_strategy no\n")) is None
    assert evaluated(of_script(tmp_path, swift + "0.0\n")) is None


@pytest.mark.parametrize(
    ("changed", "dtype"),
    [
        ({}, "float32"), ({"pure_bf16": True}, "bfloat16"), ({"bf16": False, "fp16": True}, "float32"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "float32"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "bfloat16"),  # DeepSpeed keeps the float32 masters itself
    ],
)  # fmt: skip
def test_llama_factory_trains_whole_models_from_float32_masters_unless_told_otherwise(
    tmp_path: Path, changed: dict[str, object], dtype: str
) -> None:
    found = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "full", **changed})
    assert found.values["dtype"] == dtype
    assert "use_peft" not in found.values


def test_llama_factory_takes_its_preference_loss_from_float32_logits_and_its_packed_rows_whole(tmp_path: Path) -> None:
    dpo = of_yaml(tmp_path, {**LLAMA, "stage": "dpo", "pref_beta": 0.2, "cutoff_len": 1024})
    assert [dpo.values[key] for key in ("objective", "float32_logits", "beta")] == ["dpo", True, 0.2]
    assert (
        of_yaml(tmp_path, {**LLAMA, "stage": "kto", "lora_dropout": 0.1, "cutoff_len": 64}).values["lora_dropout"] == 0
    )
    packed = of_yaml(tmp_path, {**LLAMA, "neat_packing": True, "cutoff_len": 1024}).values
    assert [packed[key] for key in ("packing", "block_diagonal", "max_length")] == [True, True, 1024]
    frozen = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "freeze"})
    assert (frozen.values["trainable_layers"], frozen.defaults["freeze_trainable_layers"]) == (2, 2)
    assert (frozen.values["dtype"], frozen.values["adapter_dtype"]) == ("bfloat16", "float32")


def test_adapters_of_pefts_other_than_lora_are_read_with_the_tools_own_options(tmp_path: Path) -> None:
    oft = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "oft", "oft_block_size": 16}).values  # model/adapter.py
    assert oft["peft_adapter"] == {"peft_type": "OFT", "r": 0, "oft_block_size": 16, "module_dropout": 0.0}
    assert (oft["use_peft"], oft["lora_target_modules"], oft["adapter_dtype"]) == (True, ["all-linear"], "float32")
    script = SWIFT.replace("--max_length 2048", "--tuner_type adalora --adalora_init_r 6")
    found = of_script(tmp_path, script)  # pipelines/train/tuner.py
    assert found.values["peft_adapter"] == {
        "peft_type": "ADALORA", "target_r": 8, "init_r": 6, "tinit": 0, "tfinal": 0, "deltaT": 1, "beta1": 0.85,
        "beta2": 0.85, "orth_reg_weight": 0.5,
    }  # fmt: skip
    assert not can_say(found, "lora_r", 4)
    pro = of_script(tmp_path, SWIFT.replace("--max_length 2048", "--tuner_type llamapro")).values
    assert (pro["added_layers"], "use_peft" in pro) == (4, False)
    bone = of_script(tmp_path, SWIFT.replace("--max_length 2048", "--tuner_type bone")).values
    assert bone["peft_adapter"] == {"peft_type": "MISS", "r": 4}


RAY = {"nproc_per_node": 4, "default": {"device": "GPU", "ranks": "list(range(0, 4))", "workers": ["default"]}}


def test_explain_names_the_adapter_and_the_layers_that_are_trained(tmp_path: Path) -> None:
    for change, wanted in (
        ({"finetuning_type": "oft"}, "OFT in float32, on a frozen model held in bfloat16"),
        ({"finetuning_type": "freeze", "use_llama_pro": True}, "2 layers trained, held in float32"),
    ):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**LLAMA, **change}))
        told = {line.name: line.text for line in explain(path).lines}
        assert told["weights"].startswith(wanted)


def test_rays_ranks_are_those_of_its_group(tmp_path: Path) -> None:
    file = {"model": "m", "tuner_type": "lora", "use_ray": True, "device_groups": RAY}
    found = of_yaml(tmp_path, file)
    assert (found.ranks, found.values["gradient_accumulation_steps"]) == (4, 4)  # 16 samples over 4 ranks
    with pytest.raises(ConfigError, match="use_ray is simulated with one group"):
        of_yaml(tmp_path, {**file, "device_groups": {**RAY, "rollout": {"ranks": 2, "workers": ["rollout"]}}})


def test_a_layer_class_beside_fsdp_is_a_key_of_llama_factory(tmp_path: Path) -> None:
    sharded = {**LLAMA, "fsdp": ["full_shard", "auto_wrap"], "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
    inner = of_yaml(tmp_path, {**sharded, "fp8": True}).launch["fsdp_config"]
    assert isinstance(inner, dict)
    assert inner["fsdp_transformer_layer_cls_to_wrap"] == "Qwen3DecoderLayer"


def test_axolotls_qat_is_torchaos_with_its_own_groups(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, {**AXO, "qat": {"weight_dtype": "int4", "activation_dtype": "int8"}})
    assert found.values["qat"] == {"weight_dtype": "int4", "activation_dtype": "int8", "group_size": 32}


@pytest.mark.parametrize(
    ("file", "compute"),
    [
        ({**LLAMA, "model_name_or_path": "TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ"}, "bfloat16"),
        ({**AXO_LORA, "gptq": True, "bf16": False, "float16": True}, "float16"),
        ({"model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "tuner_type": "lora", "torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_model_that_is_quantised_already_is_simulated_in_4_bits_and_said_to_be(
    file: dict[str, object], compute: str, tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, file)
    keys = ("load_in_4bit", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "use_peft")
    assert [found.values[key] for key in keys] == [True, False, compute, True]
    assert any("0.52 bytes each in groups of 128" in note for note in found.notes)


LOSSES: list[tuple[dict[str, object], dict[str, object]]] = [  # (a file, its loss by that tool's own code)
    ({**LLAMA, "stage": "kto", "pref_beta": 0.2},  # train/kto/trainer.py
     {"objective": "kto", "beta": 0.2, "float32_logits": True, "keeps_logits": True}),
    ({**LLAMA, "stage": "dpo", "pref_loss": "orpo"},  # train/dpo/trainer.py
     {"objective": "orpo", "beta": 0.1, "float32_logits": True, "nll_weight": 1.0}),
    ({**LLAMA, "stage": "dpo", "pref_loss": "simpo"},
     {"objective": "simpo", "float32_logits": True, "simpo_gamma": 0.5, "nll_weight": None}),
    ({**LLAMA, "finetuning_type": "full", "use_asft_loss": True, "asft_alpha": 0.05},  # train/sft/trainer.py
     {"objective": "asft", "beta": 0.05, "dtype": "float32"}),
    ({**AXO, "rl": "kto", "rl_beta": 0.5, "remove_unused_columns": False},  # core/builders/rl.py
     {"objective": "kto", "beta": 0.5, "keeps_logits": True, "float32_logits": None, "max_length": 2000}),
    ({**AXO, "process_reward_model": True, "num_labels": 2},  # core/trainers/trl.py
     {"objective": "label_tokens", "num_labels": 2, "pad_to_multiple_of": 64}),
    ({**AXO, "rl": "orpo", "orpo_alpha": 0.3}, {"objective": "orpo", "beta": 0.3, "nll_weight": 1.0}),
    ({**AXO, "rl": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.1},
     {"objective": "simpo", "nll_weight": 0.0, "simpo_gamma": 1.1}),
    ({"model": "m", "tuner_type": "lora", "rlhf_type": "kto"},  # arguments/rlhf_args.py
     {"objective": "kto", "beta": 0.1, "keeps_logits": None, "nll_weight": None}),
    ({"model": "m", "tuner_type": "lora", "rlhf_type": "simpo"},
     {"objective": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "nll_weight": 1.0}),
    ({"model": "m", "tuner_type": "lora", "rlhf_type": "cpo", "beta": 0.3},
     {"objective": "cpo", "beta": 0.3, "nll_weight": 1.0, "simpo_gamma": None}),
    ({"model": "m", "tuner_type": "lora", "task_type": "seq_cls", "num_labels": 3},
     {"objective": "classify", "num_labels": 3}),
    ({"model": "m", "tuner_type": "lora", "rlhf_type": "orpo"}, {"objective": "orpo", "nll_weight": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("file", "loss"), LOSSES, ids=lambda value: str(value.get("objective", "")))
def test_a_loss_over_answers_is_read_with_its_tools_own_weights_and_logits(
    file: dict[str, object], loss: dict[str, object], tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, file)
    assert found.trainer == "hf"
    assert {key: found.values.get(key) for key in loss} == loss


def test_a_student_is_read_with_its_teacher_and_with_the_logits_of_its_own_answers(tmp_path: Path) -> None:
    gkd: dict[str, object] = {"model": "m", "rlhf_type": "gkd", "max_length": 64, "max_completion_length": 32}
    whole = of_yaml(tmp_path, {**gkd, "teacher_model": "t", "lmbda": 0, "sft_alpha": 0.1}).values
    assert [whole.get(key) for key in ("objective", "teacher_model_name_or_path", "max_length", "answer_tokens")] == [
        "gkd", "t", 64, None
    ]  # fmt: skip
    assert [whole[key] for key in ("beta", "temperature", "nll_weight", "lora_dropout")] == [0.5, 0.9, 0.1, 0.0]
    own = {**gkd, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}
    asleep = of_yaml(tmp_path, {**own, "teacher_model": "m", "lmbda": 1, "sleep_level": 1})
    assert "teacher_model_name_or_path" not in asleep.values  # arguments/rlhf_args.py: the model without its adapter
    assert (asleep.values["max_length"], asleep.values["answer_tokens"]) == (96, 32)
    assert any("a lower bound, for vLLM holds 0.5 of the card while it generates" in note for note in asleep.notes)
    awake = of_yaml(tmp_path, {**own, "teacher_model_server": "http://t", "gkd_logits_topk": 8, "lmbda": 0.5}).values
    assert [awake[key] for key in ("engine_share", "teacher_words", "answer_tokens")] == [0.5, 8, 64]
    assert not can_say(asleep, "max_length", 8)


def test_a_reranker_has_as_many_documents_as_ms_swift_takes_at_most(tmp_path: Path) -> None:
    script = SWIFT.replace("--max_length 2048", "--task_type generative_reranker --loss_type pointwise_reranker")
    found = of_script(tmp_path, script)
    assert [found.values[key] for key in ("objective", "negatives", "word_scores")] == ["rerank", 7, True]
    few = of_script(tmp_path, script.replace("NPROC_PER_NODE", "MAX_NEGATIVE_SAMPLES=1 \\\nNPROC_PER_NODE")).values
    assert few["negatives"] == 1
    named_before = of_script(tmp_path, script.replace("pointwise_reranker", "generative_reranker"))  # ms-swift 3
    assert named_before.values == found.values


def test_ranks_that_share_samples_are_read_and_count_once_in_the_batch(tmp_path: Path) -> None:
    script = SWIFT.replace("--max_length 2048", "--sequence_parallel_size 2 --padding_free true --attn_impl flash_attn")
    found = of_script(tmp_path, script.replace("NPROC_PER_NODE", "CELOSS_PARALLEL_SIZE=2048 \\\nNPROC_PER_NODE"))
    assert [found.values[key] for key in ("sequence_parallel_size", "loss_chunk")] == [2, 2048]
    paired = script.replace("swift sft", "swift rlhf --rlhf_type dpo").replace("batch_size 1", "batch_size 4")
    half = of_script(tmp_path, paired)  # whole samples of as many tokens
    assert half.values["per_device_train_batch_size"] == 2
    assert not can_say(half, "per_device_train_batch_size", 1)
    ring = of_yaml(tmp_path, {**AXO, "sample_packing": True, "micro_batch_size": 1, "context_parallel_size": 4,
                              "dp_shard_size": 2})  # fmt: skip
    assert (ring.ranks, ring.values["sequence_parallel_size"], ring.values["sequence_parallel"]) == (8, 4, "gathered")


def test_fsdp2_of_ms_swift_checkpoints_by_itself_in_place_of_the_trainer(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, {"model": "m", "tuner_type": "full", "fsdp": "fsdp2"})
    assert found.values["gradient_checkpointing"] is False
    config = found.launch["fsdp_config"]
    assert isinstance(config, dict)
    assert config["fsdp_activation_checkpointing"] is True
    assert not can_say(found, "gradient_checkpointing", True)


def test_a_rank_of_each_tool_loads_onto_its_own_card_and_one_of_trl_does_not(tmp_path: Path) -> None:
    for found in (of_yaml(tmp_path, LLAMA), of_yaml(tmp_path, AXO), of_script(tmp_path, SWIFT)):
        assert found.values["loads_on_card"] is True
    assert "loads_on_card" not in of_yaml(tmp_path, {**AXO, "rl": "dpo"}).values


def test_what_trains_beside_or_in_place_of_all_weights_is_read(tmp_path: Path) -> None:
    kt = of_yaml(tmp_path, {**LLAMA, "use_kt": True, "kt_config": {"kt_backend": "AMXBF16"}})
    assert kt.values["host_experts"] is True
    assert kt.values["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    adapter = of_yaml(tmp_path, {"model": "m", "tuner_type": "adapter", "adapter_length": 64})
    assert (adapter.values["bottleneck"], adapter.values.get("use_peft")) == (64, None)
    assert of_yaml(tmp_path, {"model": "m", "tuner_type": "reft"}).values["reft_rank"] == 4
    assert of_yaml(tmp_path, {"model": "m", "tuner_type": "longlora"}).values["lora_r"] == 8
    packing = {"model": "m", "rlhf_type": "dpo", "packing": True, "attn_impl": "flash_attn"}
    packed = of_yaml(tmp_path, {**packing, "max_length": 4096}).values
    assert (packed["max_length"], packed.get("packing")) == (2048, None)
    masks = {"llmcompressor": {"recipe": {"a": {"b": {"ConstantPruningModifier": {"start": 0}}}}}}
    assert of_yaml(tmp_path, {**AXO, **masks}).values["pruning_masks"] is True
    assert of_yaml(tmp_path, {**AXO, "use_onebitllms": True}).values["qat"] == {"weight_dtype": "ternary"}
    dealt = {"plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"], "expert_parallel_size": 4}
    assert of_yaml(tmp_path, {**AXO, **dealt}).ranks == 4
    texts = {"rl": "ebft", "ebft": {"mode": "strided", "stride": 4}}
    whole = of_yaml(tmp_path, {**AXO, **texts})
    assert (whole.trainer, whole.values["objective"], whole.values["ebft"]) == ("hf", "ebft", {"stride": 4})
    assert (whole.values["pad_to_max_length"], whole.values["attn_implementation"]) == (True, "flex_attention")
    answers = of_yaml(tmp_path, {**AXO, "rl": "ebft", "ebft": {"use_whitening": True}, "trl": {"num_generations": 4}})
    assert (answers.trainer, answers.values["reward_funcs"]) == (
        "grpo",
        ["autofit.trainers.features.whitened_features"],
    )
    blurred = {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"], "diffusion": {"mask_token_id": 7}}
    found = of_yaml(tmp_path, {**AXO, **blurred, "sample_packing": True}).values
    assert [found.get(key) for key in ("objective", "mask_token", "block_diagonal")] == ["diffusion", 7, None]


@pytest.mark.parametrize("key", ["use_galore", "use_apollo", "use_adam_mini", "use_muon", "use_badam"])
def test_an_optimizer_with_fewer_states_than_adamw_is_simulated_as_adamw_and_said_to_be_a_bound(
    key: str, tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "full", key: True})
    assert found.values["optim"] == "adamw_torch_fused"
    assert [note.endswith(": an upper bound") for note in found.notes if note.startswith(f"{key}: ")] == [True]
    assert found.values["dtype"] == ("bfloat16" if key == "use_badam" else "float32")  # adapter.py, init_adapter
    assert can_say(found, "optim", "adamw_8bit") is (key in ("use_galore", "use_apollo", "use_badam"))
    if key in ("use_adam_mini", "use_muon"):  # of which LLaMA-Factory reads no optim (train/trainer_utils.py)
        assert of_yaml(tmp_path, {**LLAMA, "optim": "sgd", key: True}).values["optim"] == "adamw_torch_fused"


def test_an_optimizer_that_steps_layer_by_layer_keeps_its_accumulation_of_one(tmp_path: Path) -> None:
    layerwise = {"use_galore": True, "galore_layerwise": True, "gradient_accumulation_steps": 1}
    found = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "full", **layerwise})
    assert [can_say(found, "gradient_accumulation_steps", steps) for steps in (1, 2)] == [True, False]


def test_arguments_of_ms_swift_3_are_read_by_their_names_of_today(tmp_path: Path) -> None:
    found = of_script(tmp_path, SWIFT.replace("--max_length 2048", "--train_type lora --init_lora_weights olora"))
    assert found.values["use_peft"] is True


def test_what_trains_a_part_of_the_model_at_a_time_is_bounded_by_training_of_all(tmp_path: Path) -> None:
    lisa = of_yaml(tmp_path, {**AXO, "lisa_n_layers": 4, "lisa_step_interval": 20, "optimizer": "muon"})
    assert "use_peft" not in lisa.values
    assert lisa.values["optim"] == "adamw_torch_fused"
    assert {note.partition(":")[0] for note in lisa.notes if note.endswith("an upper bound")} == {
        "lisa_n_layers", "optimizer"
    }  # fmt: skip
    script = SWIFT.replace("--max_length 2048", "--tuner_type full --lisa_activated_layers 2")
    found = of_script(tmp_path, script)
    assert (found.values["trainable_layers"], found.values["trains_rest"]) == (2, True)
    assert any(note.startswith("LISA trains 2 changing layers") for note in found.notes)
    pro = of_yaml(tmp_path, {**LLAMA, "finetuning_type": "freeze", "freeze_trainable_layers": 8, "use_llama_pro": True})
    assert (pro.values["trainable_layers"], pro.values["spread_layers"]) == (8, True)


def test_what_llama_factory_trains_besides_layers_is_trained_here(tmp_path: Path) -> None:
    more = {"finetuning_type": "freeze", "freeze_trainable_layers": -3, "freeze_trainable_modules": "mlp,self_attn"}
    found = of_yaml(tmp_path, {**LLAMA, **more, "freeze_extra_modules": "embed_tokens, lm_head"})
    assert found.values["trainable_layers"] == -3
    assert found.values["layer_modules"] == ["mlp", "self_attn"]
    assert found.values["extra_modules"] == ["embed_tokens", "lm_head"]
    told = " ".join(line.text for line in explain(tmp_path / "run.yaml").lines)
    assert "mlp and self_attn of the first 3 layers and embed_tokens, lm_head trained, held in float32" in told
    with pytest.raises(ConfigError, match="freeze_trainable_layers: 0 trains nothing, with which LLaMA-Factory ends"):
        of_yaml(tmp_path, {**LLAMA, "finetuning_type": "freeze", "freeze_trainable_layers": 0})


@pytest.mark.parametrize(
    ("changed", "read_as"),
    [
        ({"resize_vocab": True}, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),  # whole matrices are trained
        ({"resize_vocab": True, "additional_target": "lm_head"}, {"lora_modules_to_save": ["lm_head"]}),
        ({"stage": "dpo", "packing": True, "cutoff_len": 1025}, {"max_length": 1024}),
        ({"lora_target": "q_proj"}, {"lora_target_modules": [r"(.*\.)?q_proj"]}),
        ({"stage": "kto", "pref_loss": "orpo"}, {"nll_weight": None, "objective": "kto"}),
        ({"lora_alpha": 0, "lora_rank": 4}, {"lora_alpha": 8}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}},
         {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ({"use_reentrant_gc": False}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ({"use_reentrant_gc": False, "gradient_checkpointing": True},  # the Trainer turns it on once more
         {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ({"disable_gradient_checkpointing": True, "gradient_checkpointing": True},
         {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}, "gradient_checkpointing": True},
         {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    ],
)  # fmt: skip
def test_what_meets_by_chance_in_a_file_is_read_as_llama_factory_does(
    changed: dict[str, object], read_as: dict[str, object], tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, {**LLAMA, **changed})
    assert {key: found.values.get(key) for key in read_as} == read_as


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fp16": True}, "bf16 and fp16"), ({"stage": "dpo", "neat_packing": True}, "needs stage sft"),
        ({"finetuning_type": "full", "use_dora": True}, "needs finetuning_type lora"),
        ({"eval_strategy": "steps"}, "evaluation needs eval_dataset"), ({"eval_strategy": False}, 'write "no"'),
        ({"eval_dataset": "a", "val_size": 0.1}, "cannot both"), ({"streaming": True}, "needs max_steps"),
        ({"pure_bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}}}, "ZeRO-3"),
        ({"quantization_bit": 8, "deepspeed": {"zero_optimization": {"stage": 3}}}, "quantization_bit 4"),
        ({"finetuning_type": "full", "use_galore": True, "deepspeed": {"zero_optimization": {"stage": 2}}}, "GaLore"),
        ({"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 2}}}, "fsdp and deepspeed"),
        ({"stage": "kto", "pissa_init": True}, "pissa_init"), ({"lora_dropout": 2}, "0 to 1"),
        ({"quantization_device_map": "auto"}, "cannot train"), ({"ref_model_quantization_bit": 3}, "4 or 8"),
        ({"save_strategy": "never"}, "must be one of"),
        ({"stage": "rm", "load_best_model_at_end": True}, "stage rm"),
        ({"load_best_model_at_end": True}, "evaluation and saving at the same time; got no and steps"),
        ({"stage": "dpo", "pref_loss": "ipo", "dpo_label_smoothing": 0.1}, "pref_loss sigmoid"),
    ],
)  # fmt: skip
def test_what_ends_llama_factory_before_it_loads_the_model_is_told_before(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LLAMA, **changed}))
    assert message in "; ".join(explain(path).wrong)


def test_llama_factory_stores_4_bits_in_the_compute_dtype_and_quantises_twice(tmp_path: Path) -> None:
    values = of_yaml(tmp_path, {**LLAMA, "quantization_bit": 4}).values
    assert values["load_in_4bit"] is True
    assert values["use_bnb_nested_quant"] is True
    assert values["bnb_4bit_quant_storage"] == "bfloat16"


def test_a_deepspeed_file_is_found_from_the_folder_where_the_tool_is_started(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "z2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "train").mkdir()
    launch = of_yaml(tmp_path / "train", {**LLAMA, "deepspeed": "configs/z2.json"}).launch
    assert launch["distributed_type"] == "DEEPSPEED"
    with pytest.raises(ConfigError, match=r"there is no file 'configs/z9\.json' in the current folder"):
        of_yaml(tmp_path / "train", {**LLAMA, "deepspeed": "configs/z9.json"})


def test_a_training_has_the_allocator_settings_that_its_tool_starts_it_with(tmp_path: Path) -> None:
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert of_yaml(tmp_path, AXO).values["env"] == growing
    assert "env" not in of_yaml(tmp_path, LLAMA).values  # one process, which the launcher starts as it is
    shared = of_yaml(tmp_path, {**LLAMA, "fsdp": "full_shard auto_wrap"})
    assert shared.values["env"] == growing
    told = read(tmp_path / "run.yaml", text=yaml.safe_dump(LLAMA), ranks=2)
    assert told is not None
    assert told.values["env"] == growing


def test_axolotl_holds_weights_in_bfloat16_and_fills_packed_rows_to_a_multiple_of_64(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, {**AXO, "sample_packing": True, "gradient_checkpointing": True})
    assert (found.trainer, found.values["dtype"], found.values["bf16"]) == ("hf", "bfloat16", True)
    assert found.values["max_length"] == 2048  # 2,000 rounded up
    assert [found.values[key] for key in ("packing", "block_diagonal", "pad_to_max_length")] == [True, True, True]
    assert found.values["gradient_checkpointing_kwargs"] == {"use_reentrant": True}
    assert found.defaults["bf16"] == "auto"
    plain = of_yaml(tmp_path, AXO).values
    assert (plain["max_length"], plain["pad_to_multiple_of"], plain["gradient_checkpointing"]) == (2000, 64, False)


def test_axolotl_keeps_embeddings_in_float32_only_without_flash_attention_or_adapters(tmp_path: Path) -> None:
    assert any("float32" in note for note in of_yaml(tmp_path, AXO).notes)
    flash = of_yaml(tmp_path, {**AXO, "flash_attention": True})
    assert flash.values["attn_implementation"] == "flash_attention_2"
    assert not any("float32" in note for note in flash.notes)


@pytest.mark.parametrize(
    ("changed", "steps"),
    [({}, 4), ({"gradient_accumulation_steps": None, "batch_size": 12}, 6)],
)
def test_axolotls_accumulation_may_follow_from_its_batch_size(
    tmp_path: Path, changed: dict[str, object], steps: int
) -> None:
    assert of_yaml(tmp_path, {**AXO, **changed}).values["gradient_accumulation_steps"] == steps


def test_axolotls_batch_size_has_no_effect_beside_its_default_accumulation_of_one(tmp_path: Path) -> None:
    values = {key: value for key, value in AXO.items() if key != "gradient_accumulation_steps"}
    found = of_yaml(tmp_path, {**values, "batch_size": 12})
    assert found.values["gradient_accumulation_steps"] == 1
    assert any(note.startswith("batch_size 12 has no effect") for note in found.notes)
    halved = {"gradient_accumulation_steps": 2}
    own = yaml.safe_load(written(tmp_path / "run.yaml", halved))
    assert (own["batch_size"], own["gradient_accumulation_steps"]) == (None, 2)  # Axolotl refuses both
    told = dict(explain(tmp_path / "run.yaml").lines)
    assert "gradient_accumulation_steps 1 (the default)" in told["effective batch"]


@pytest.mark.parametrize(
    ("changed", "read_as"),
    [
        ({"gradient_checkpointing": "offload"}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ({"gradient_checkpointing": True, "rl": "dpo"}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ({"gradient_checkpointing": True, "unfrozen_parameters": ["lm_head"]},
         {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ({"val_set_size": 0.1, "evals_per_epoch": 1}, {"eval_strategy": None}),  # once in a training is never
        ({"val_set_size": 0.1, "evals_per_epoch": 1, "num_epochs": 3}, {"eval_strategy": "epoch"}),
    ],
)  # fmt: skip
def test_what_meets_by_chance_in_a_file_is_read_as_axolotl_does(
    changed: dict[str, object], read_as: dict[str, object], tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, {**AXO, **changed})
    assert {key: found.values.get(key) for key in read_as} == read_as


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_in_4bit": True}, "need adapter"), ({"bf16": "full"}, "bf16 must be true, false or auto"),
        ({"attn_implementation": "fa2"}, "attn_implementation must be one of"),
        ({"lr_scheduler": "cos"}, "lr_scheduler"),
        ({"attn_implementation": "sdpa", "flash_attention": True}, "cannot both be set"),
        ({"adapter": "lora", "lora_r": 8, "lora_target_linear": True}, "lora_alpha is missing"),
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 8}, "PEFT adapts nothing"),
        ({**AXO_LORA, "lora_dropout": 2}, "0 to 1"), ({**AXO_LORA, "load_in_8bit": True,
         "lora_o_kernel": True}, "8bit"),
        ({**AXO_LORA, "adapter": "qlora", "load_in_8bit": True}, "in 8 bits"),
        ({"neftune_noise_alpha": 0}, "more than 0"),
        ({"eval_steps": 5, "evals_per_epoch": 1}, "cannot both be set"),
        ({"fsdp": ["full_shard"]}, "needs fsdp_config"),
        ({"sample_packing": True, "rl": "dpo"}, "sample_packing and rl"), ({"rl": "kto"}, "remove_unused_columns"),
        ({"unsloth_lora_o": True}, "no longer"), ({"save_strategy": "best"}, "metric_for_best_model"),
        ({"eval_steps": 5, "val_set_size": 0}, "more than 0"), ({"rl": "simpo", "warmup_ratio": 0.1}, "warmup_steps"),
        ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "adamw_torch_8bit"),
        ({"rl": "grpo", "trl": {"num_generations": 3}}, "8 completions"), ({"dpo_loss_type": ["ipo"]}, "need rl: dpo"),
        ({"rl": "grpo", "trl": {"num_generations": 1}}, "2 or more"),
        ({"liger_cross_entropy": True, "cut_cross_entropy": True}, "cannot both be set"),
        ({"num_epochs": 0, "saves_per_epoch": 1, "max_steps": 9}, "by which Axolotl divides 1"),
        ({"num_epochs": 0, "evals_per_epoch": 1, "val_set_size": 0}, "nothing is trained"),
        ({"chat_template": "chatlm"}, "nearest valid one is 'chatml'"), ({"s2_attention": True}, "leave it out"),
        ({"rpo_alpha": 0}, "no longer a key"), ({"rope_scaling": {"factor": 2}}, "write overrides_of_model_config"),
        ({"unfrozen_parameters": ["a"],
         "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant: false"),
    ],
)  # fmt: skip
def test_what_ends_axolotl_before_its_first_step_is_told_before(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**AXO, **changed}))
    assert message in "; ".join(explain(path).wrong)


def test_axolotls_own_templates_steps_and_empty_old_keys_are_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    fine = {"max_packed_sequence_len": None, "s2_attention": False, "num_epochs": 0, "max_steps": 9}
    for chat in ("chatml", "tokenizer_default_fallback_alpaca", "jinja"):
        path.write_text(yaml.safe_dump({**AXO, **fine, "chat_template": chat}))
        assert not explain(path).wrong


def test_axolotl_hands_preferences_and_grpo_on_to_trls_own_trainers(tmp_path: Path) -> None:
    dpo = of_yaml(tmp_path, {**AXO_LORA, "rl": "dpo", "rl_beta": 0.3})
    assert (dpo.trainer, dpo.values["beta"], dpo.values["max_length"]) == ("dpo", 0.3, 2000)
    inner = {"num_generations": 4, "max_completion_length": 64, "beta": 0.01}
    grpo = of_yaml(tmp_path, {**AXO, "rl": "grpo", "trl": inner})
    assert grpo.trainer == "grpo"
    assert {key: grpo.values[key] for key in inner} == inner
    assert grpo.keys["num_generations"] == "trl.num_generations"


@pytest.mark.parametrize(("more", "cut"), [({}, True), ({"cut_cross_entropy": False}, None), ({"rl": "dpo"}, None)])
def test_axolotls_cut_cross_entropy_is_the_loss_over_samples(
    more: dict[str, object], cut: bool | None, tmp_path: Path
) -> None:
    plugin = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    assert of_yaml(tmp_path, {**AXO, "plugins": [plugin], **more}).values.get("cut_cross_entropy") is cut


def test_a_misspelt_key_is_told_beside_the_one_that_is_missing(tmp_path: Path) -> None:
    values = {key: value for key, value in AXO_LORA.items() if key != "lora_r"}
    with pytest.raises(ConfigError, match=r"lora_r is missing, .*; unknown key 'lora_rr'; the nearest valid one is"):
        of_yaml(tmp_path, {**values, "lora_rr": 16})
    with pytest.raises(ConfigError, match=r"lora_r is missing, .* with adapter: lora$"):
        of_yaml(tmp_path, {**values, "xyzzy": 16})


def test_axolotls_fsdp_is_a_launch_and_an_unknown_key_is_named_as_ignored(tmp_path: Path) -> None:
    config = {"offload_params": True, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT",
              "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}  # fmt: skip
    found = of_yaml(
        tmp_path, {**AXO, "optimizer": "sgd", "fsdp_version": 2, "fsdp_config": config, "micro_batchsize": 3}
    )
    inner = found.launch["fsdp_config"]
    assert isinstance(inner, dict)
    assert (inner["fsdp_version"], inner["fsdp_offload_params"]) == (2, True)
    assert any("'micro_batchsize'; the nearest valid one is 'micro_batch_size'" in note for note in found.notes)


def test_a_script_of_ms_swift_is_read_with_its_sums_its_environment_and_its_defaults(tmp_path: Path) -> None:
    found = of_script(tmp_path, SWIFT)
    assert (found.tool, found.trainer, found.ranks, found.prompt_tokens) == ("ms-swift", "hf", 2, 2048)
    assert found.values["gradient_accumulation_steps"] == 8
    assert found.values["dtype"] == "bfloat16"
    assert [found.values[key] for key in ("lora_r", "lora_alpha", "lora_dropout")] == [8, 32, 0.05]
    assert (found.keys["lora_r"], found.defaults["lora_rank"]) == ("lora_rank", 8)


@pytest.mark.parametrize(
    ("config", "launch", "ranks"),
    [
        ("{distributed_type: FSDP, num_processes: 3, fsdp_config: {fsdp_version: 2}}", "FSDP2", 3),
        ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}", "DeepSpeed ZeRO-3", 2),
        ("{distributed_type: MULTI_GPU, num_processes: 4}", "DDP", 4),
    ],
)
def test_the_accelerate_config_that_a_script_of_ms_swift_names_shares_its_model(
    config: str, launch: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "launch.yaml").write_text(config)
    started = "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file ./launch.yaml swift/cli/sft.py"
    found = of_script(tmp_path, f"{started} --model m --tuner_type full")
    assert (sharing.words(found.launch), found.ranks) == (launch, ranks)


def test_an_accelerate_config_of_ms_swift_that_is_missing_or_of_megatron_is_one_line(tmp_path: Path) -> None:
    started = "accelerate launch --config_file launch.yaml swift/cli/sft.py --model m"
    with pytest.raises(ConfigError, match="there is no file 'launch"):
        of_script(tmp_path, started)
    (tmp_path / "launch.yaml").write_text("distributed_type: MEGATRON_LM")
    with pytest.raises(ConfigError, match="distributed_type 'MEGATRON_LM' of the accelerate"):
        of_script(tmp_path, started)


@pytest.mark.parametrize(("micro", "ranks", "steps"), [(1, None, 16), (3, 2, 3), (16, 4, 1)])
def test_ms_swift_makes_16_samples_or_more_over_all_ranks(tmp_path: Path, micro: int, ranks: int, steps: int) -> None:
    values = {"model": "m", "per_device_train_batch_size": micro, "tuner_type": "full"}
    found = ms_swift.recipe(values, folder=tmp_path, ranks=ranks)
    assert found.values["gradient_accumulation_steps"] == steps


@pytest.mark.parametrize(
    ("more", "ranks", "reentrant", "dropout"),
    [({}, None, True, 0.05), ({}, 2, False, 0.05), ({"deepspeed": "zero2"}, 2, True, 0.05),
     ({TYPE: "dpo"}, None, True, 0.0), ({TYPE: "rm", "disable_dropout": "false"}, None, True, 0.05)],
)  # fmt: skip
def test_ms_swift_checkpoints_re_entrantly_but_under_ddp_and_has_no_dropout_in_losses_over_answers(
    more: dict[str, object], ranks: int | None, reentrant: bool, dropout: float, tmp_path: Path
) -> None:
    values = {"model": "m", "max_length": 64, "tuner_type": "lora", **more}
    found = ms_swift.recipe(values, folder=tmp_path, ranks=ranks).values
    assert found["gradient_checkpointing_kwargs"] == {"use_reentrant": reentrant}
    assert found["lora_dropout"] == dropout


@pytest.mark.parametrize(
    ("before", "more", "read_as"),
    [
        ("NPROC_PER_NODE=1", "", {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),  # torchrun all the same
        ("CUDA_VISIBLE_DEVICES=0", "--rlhf_type grpo --reward_funcs f --use_vllm true --vllm_mode colocate "
         "--gradient_accumulation_steps 8", {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("NPROC_PER_NODE=2", "--deepspeed zero0", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("NNODES=2", "", {"gradient_accumulation_steps": 8, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("NPROC_PER_NODE=2", "--ddp_find_unused_parameters true", {"ddp_find_unused_parameters": True}),
        ("", "--num_labels 2", {"objective": "classify", "num_labels": 2}),
        ("", "--lora_dtype float16", {"adapter_dtype": "float32"}),
        ("", "--tuner_type llamapro --torch_dtype float16", {"dtype": "float16", "adapter_dtype": "float32"}),
        ("", "--modules_to_save all-embedding", {"lora_modules_to_save": list(ms_swift.EMBEDDINGS)}),
        ("", "--target_modules q_proj", {"lora_target_modules": [r"(.*\.)?q_proj"]}),  # alone, it would be a pattern
        ("", "--target_regex '.*_proj'", {"lora_target_modules": [".*_proj"]}),
        ("", "--target_parameters w", {"lora_target_parameters": ["w"], "lora_target_modules": ["all-linear"]}),
        ("", "--cached_val_dataset a", {"per_device_eval_batch_size": 1}),
        ("", "--streaming true --max_steps 9 --split_dataset_ratio 0.1", {"per_device_eval_batch_size": None}),
    ],
)  # fmt: skip
def test_what_meets_by_chance_in_a_command_is_read_as_ms_swift_does(
    before: str, more: str, read_as: dict[str, object], tmp_path: Path
) -> None:
    kind = "rlhf" if "rlhf" in more else "sft"
    found = of_script(tmp_path, f"{before} swift {kind} --model m --max_length 64 {more}\n")
    assert {key: found.values.get(key) for key in read_as} == read_as


def test_a_packed_row_of_ms_swift_is_as_long_as_packing_length_says_and_no_note_says_else(tmp_path: Path) -> None:
    packed = "--packing true --attn_impl flash_attn --packing_length 4096"
    found = of_script(tmp_path, f"CUDA_VISIBLE_DEVICES=0 swift sft --model m {packed}\n")
    assert (found.values["max_length"], found.prompt_tokens) == (4096, 4096)
    assert not any("max_length" in note for note in found.notes)


def test_the_json_that_fsdp_of_ms_swift_names_says_how_the_model_is_shared(tmp_path: Path) -> None:
    inner = {"fsdp_version": 2, "reshard_after_forward": False, "activation_cpu_offload": True}
    (tmp_path / "two.json").write_text(json.dumps({"fsdp": "full_shard auto_wrap", "fsdp_config": inner}))
    found = of_script(tmp_path, "NPROC_PER_NODE=2 swift sft --model m --max_length 64 --fsdp two.json\n")
    config = found.launch["fsdp_config"]
    assert isinstance(config, Mapping)
    assert (config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (2, False)
    assert any(note.startswith("activation_cpu_offload:") for note in found.notes)


@pytest.mark.parametrize(
    ("before", "more", "message"),
    [
        ("", "--packing true --max_length 64", "packing needs flash attention: attn_impl flash_attn,"),
        ("", "--attn_impl fa2", "attn_impl must be one of"), ("", "--fp16 true", "bf16 and fp16 cannot both"),
        ("", "--load_best_model_at_end true", "evaluation and saving at the same time; got no and steps"),
        ("", "--lora_dropout 2", "lora_dropout must be 0 to 1"), ("", "--num_train_epochs all", "epochs must be"),
        ("", "--target_modules q_proj,v_proj", "target_modules must be names with spaces"),
        ("", "--target_modules ALL", "is all-linear today"), ("", "--streaming true", "streaming needs max_steps"),
        ("", "--cached_dataset a --streaming true --max_steps 9", "cached_dataset cannot be with streaming"),
        ("", "--tuner_type longlora --model Qwen/Qwen3-4B", "longlora is of Llama models"),
        ("", "--eval_strategy always", "eval_strategy must be no, steps or epoch"),
        ("", "--truncation_strategy split", "split is of `swift pt`"),
        ("", "--rlhf_type dpo --ref_model r", "ref_model is of rlhf_type dpo,"),
        ("", "--deepspeed zero2 --fsdp fsdp2", "fsdp and deepspeed cannot both"),
        ("", "--rlhf_type dpo --loss_type kto_pair", "loss_type with rlhf_type dpo must be one of"),
        ("", "--rlhf_type cpo --padding_free true --attn_impl flash_attn", "padding_free cannot be with rlhf_type cpo"),
        ("NPROC_PER_NODE=1", "--rlhf_type kto --gradient_accumulation_steps 1", "kto needs 2 samples or more"),
        ("", "--rlhf_type grpo", "rlhf_type grpo needs reward_funcs or reward_model"),
        ("", "--rlhf_type grpo --reward_funcs format --use_vllm true", "use_vllm needs vllm_mode"),
        ("NPROC_PER_NODE=2", "--rlhf_type grpo --reward_funcs format", "a generation of 2 completions must be whole"),
        ("NPROC_PER_NODE=8", "--rlhf_type grpo --reward_funcs format --split_dataset_ratio 0.1 --num_generations 3",
         "an evaluation of 8 completions"),
        ("NPROC_PER_NODE=2", "--rlhf_type grpo --reward_funcs format --generation_batch_size 7",
         "generation_batch_size must be per_device_train_batch_size x ranks (2)"),
        ("NPROC_PER_NODE=2", "--rlhf_type grpo --reward_funcs format --use_vllm true --vllm_mode colocate "
         "--vllm_tensor_parallel_size 4", "vllm_tensor_parallel_size 4 must divide the ranks; got 2"),
    ],
)  # fmt: skip
def test_what_ends_ms_swift_before_its_first_step_is_told_before(
    before: str, more: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{before} swift {'rlhf' if 'rlhf' in more else 'sft'} --model m {more}\n")
    assert message in "; ".join(explain(path).wrong)


def test_a_reason_with_a_colon_in_it_is_told_whole_of_a_script_of_ms_swift(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("CUDA_VISIBLE_DEVICES=0 swift sft --model m --max_length 64 --optimizer mine\n")
    assert dict(explain(path).lines)["not simulated"].startswith("optimizer: an optimizer of a plugin")
    path.write_text("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=4 swift sft --model m --max_length 64\n")
    with pytest.raises(ConfigError, match=r"4 ranks .* do not divide 2 visible cards"):
        read(path)


def test_ms_swifts_grpo_is_trls_with_its_own_defaults(tmp_path: Path) -> None:
    text = ("NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model m --use_vllm true --vllm_mode colocate "
            "--per_device_train_batch_size 2 --deepspeed zero3 --sleep_level 1 --loss_type fipo "
            "--reward_funcs format")  # fmt: skip
    found = of_script(tmp_path, text)
    assert found.trainer == "grpo"
    assert [found.values[key] for key in ("beta", "num_generations", "max_completion_length")] == [0.04, 8, 512]
    assert found.values["vllm_gpu_memory_utilization"] == 0.9
    assert found.values["vllm_enable_sleep_mode"] is True
    assert found.values["loss_type"] == "grpo"
    assert any("fipo" in note for note in found.notes)
    inner = found.launch["deepspeed_config"]
    assert isinstance(inner, dict)
    assert inner["zero_stage"] == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1\nswift sft --x $a", ("swift", "sft", "--x", "1")),
        ("swift sft --x ${A:-b}", ("swift", "sft", "--x", "b")),
        ("swift sft --x $A", ("swift", "sft", "--x", UNSURE)),
        ("if [ $B ]; then\na=2\nfi\nswift sft --x $a", ("swift", "sft", "--x", UNSURE)),
        ("swift sft --x $((2 * 3)) # --y 1", ("swift", "sft", "--x", "6")),
        ("swift sft --x 'a b' \\\n  --y \"c # d\" 2>&1 | tee log", ("swift", "sft", "--x", "a b", "--y", "c # d")),
        ("swift sft --x $(nproc)", ("swift", "sft", "--x", UNSURE)),
    ],
)
def test_words_of_a_command_are_those_of_bash(text: str, words: tuple[str, ...]) -> None:
    found = next(command.words for command in commands(text) if command.words[0] == "swift")
    assert found[: len(words)] == words


REFUSED: list[tuple[dict[str, object], str]] = [
    ({**LLAMA, "use_unsloth": True}, "use_unsloth: Unsloth's kernels"),
    ({**LLAMA, "use_kt": True, "finetuning_type": "full"}, "use_kt needs finetuning_type lora, as LLaMA-Factory says"),
    ({**LLAMA, "use_kt": True, "stage": "dpo"}, "use_kt is simulated with stage sft or pt"),
    ({**AXO, "context_parallel_size": 2}, "context_parallel_size is simulated with sample_packing: true"),
    ({**AXO, "tensor_parallel_size": 2}, "tensor_parallel_size: tensor parallelism is not simulated"),
    ({**AXO, "plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"], "expert_parallel_size": 2,
      "dp_shard_size": 2}, "expert_parallel_size is simulated with DDP on samples"),
    ({**AXO, "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"], "rl": "dpo"}, "DiffusionPlugin"),
    ({**AXO, "llmcompressor": {"recipe": {"a": {"GPTQModifier": {}}}}}, "got GPTQModifier"),
    ({"model": "m", "rlhf_type": "grpo", "teacher_model": "t"}, "a teacher is simulated with rlhf_type gkd"),
    ({"model": "m", "rlhf_type": "gkd", "teacher_model_server": "http://t"}, "needs gkd_logits_topk"),
    ({"model": "m", "rlhf_type": "gkd", "teacher_model": "t", "deepspeed": "zero3", "teacher_deepspeed": "zero0"},
     "teacher_deepspeed that does not shard, beside a student under ZeRO-3"),
    ({"model": "m", "tuner_type": "lora", "task_type": "reranker"}, "loss_type with task_type reranker must be one of"),
    ({"model": "m", "tuner_type": "lora", "loss_type": "loss_scale"}, "loss_scale ends with an error in ms-swift"),
    ({"model": "JinaAI/jina-reranker-m0", "tuner_type": "lora"}, "trains on images, video or sound"),
    ({**LLAMA, "stage": "ppo"}, "stage ppo: PPO"),
    ({**LLAMA, "finetuning_type": "oft", "stage": "dpo"}, "finetuning_type oft with a reference"),
    ({**LLAMA, "do_train": False}, "does not train"),
    ({**LLAMA, "image_max_pixels": 9}, "image_max_pixels: training on images"),
    ({**LLAMA, "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}, "trains on images, video or sound"),
    ({**LLAMA, "finetuning_type": "full", "use_galore": True, "galore_layerwise": True},
     "galore_layerwise needs gradient_accumulation_steps: 1, as LLaMA-Factory says"),
    ({**LLAMA, "use_asft_loss": True}, "use_asft_loss needs finetuning_type full or freeze"),
    ({**LLAMA, "use_badam": True}, "use_badam needs finetuning_type full or freeze"),
    ({**LLAMA, "finetuning_type": "full", "use_galore": True, "optim": "adafactor"}, "use_galore with optim adafactor"),
    ({**LLAMA, "use_llama_pro": True}, "use_llama_pro is simulated with finetuning_type freeze"),
    ({"model": "m", "tuner_type": "lora", "lisa_activated_layers": 2}, "lisa_activated_layers needs tuner_type full"),
    ({**LLAMA, "optim": "galore_adamw"}, "the states of the optimizer galore_adamw are not simulated"),
    ({**LLAMA, "lora_rnk": 4}, "unknown key 'lora_rnk'; the nearest valid one is 'lora_rank'"),
    ({**LLAMA, "per_device_train_batch_size": 0, "cutoff_len": "long"},
     "per_device_train_batch_size must be a whole number of 1 or more; got 0; cutoff_len must be"),
    ({**AXO, "rl": "ebft"}, "rl: ebft needs ebft, with mode: structured or mode: strided"),
    ({**AXO, "rl": "ebft", "ebft": {"feature_layers": [0.5]}}, "ebft is simulated with 3 feature_layers"),
    ({**AXO, "rl": "ebft", "ebft": {"mode": "strided"}, "torch_compile": True, "gradient_checkpointing": True},
     "ends with an error in Axolotl; omit torch_compile"),
    ({**AXO, "rl": "ebft", "ebft": {"mode": "strided"}, "deepspeed": {"zero_optimization": {"stage": 2}}},
     "simulated on one GPU or with DDP"),
    ({**AXO, "qat": {"weight_dtype": "nvfp4"}}, "qat with weight_dtype nvfp4 ends with an error"),
    ({**AXO_LORA, "qat": {"weight_dtype": "int4"}}, "qat is simulated where all weights"),
    ({**AXO, "tensor_parallel_size": 2}, "tensor_parallel_size:"), ({**AXO, "adapter": "lora"}, "lora_r is missing"),
    ({**AXO, "gradient_accumulation_steps": None}, "at least two of micro_batch_size"),
    ({**AXO, "micro_batch_size": None, "micro_batchsize": 3}, "as Axolotl says; write micro_batch_size for 'micro_bat"),
    ({**AXO, "plugins": ["axolotl.integrations.mine.MinePlugin"]}, "MinePlugin is not simulated"),
    ({"model": "m", "tuner_type": "reft", "reft_layers": [1]}, "reft is simulated with LoreftIntervention"),
    ({"model": "m", "tuner_type": "vera"}, "tuner_type vera is not simulated"),
    ({"model": "m", "tuner_type": "lora", "task_type": "seq_cls"}, "num_labels is missing, and ms-swift needs it"),
    ({"model": "m", "tuner_type": "lora", "task_type": "embedding"}, "loss_type with task_type embedding must be one"),
    ({"model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "tuner_type": "full"}, "quantised with AWQ needs an adapter"),
    ({"model": "m", "tuner_type": "lora", "sequence_parallel_size": 2}, "2 must divide the ranks; got no number of"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_cannot_be_simulated_is_refused_by_name_in_one_sentence(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        of_yaml(tmp_path, values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "run.yaml, read as a file of " in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatron sft --model m", "Megatron, which is not simulated"),
        ("swift infer --model m", "no training is started in .*: it must call"),
        ("CUDA_VISIBLE_DEVICES=0,1 swift sft --model m", "splits the model over them"),
        ("swift sft --model m --max_length $N", "does not say max_length for certain"),
        ("swift sft --model m --lora_rnk 8", "unknown key 'lora_rnk'"),
    ],
)
def test_a_script_that_does_not_train_as_we_simulate_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_script(tmp_path, text)


def test_a_recipe_of_trl_is_of_no_other_tool(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\nnum_generations: 8\n")
    assert read(path) is None


def test_a_file_with_keys_of_two_tools_is_of_neither(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has keys of LLaMA-Factory \(stage, .*\) and of Axolotl \(base_model, "):
        of_yaml(tmp_path, {**LLAMA, **AXO})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lf.yaml", yaml.safe_dump({**LLAMA, "lora_target": ["q_proj,", "v_proj"]})),
        ("axo.yaml", yaml.safe_dump({**AXO_LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj,"]})),
        ("swift.sh", "swift sft --model Qwen/Qwen3-4B --tuner_type lora --dataset d --target_modules q_proj, v_proj\n"),
        ("hf.sh", "python train.py --model_name_or_path m --use_lora True --lora_target_modules q_proj, v_proj\n"),
    ],
)
def test_a_comma_inside_of_a_module_s_name_is_noted(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert any("the comma in 'q_proj,' is read as part of a name" in note for note in explain(path).notes)


def test_explain_says_the_dtype_the_rows_the_defaults_and_what_is_not_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LLAMA, "finetuning_type": "full", "use_unsloth_gc": True}))
    assert main(["explain", str(path)]) == 0
    said = capsys.readouterr().out
    assert "all weights trained, held in float32, computed in bfloat16 (autocast)" in said
    assert "up to 2,048 tokens, padded to the longest of a batch and to a multiple of 8" in said
    assert "cutoff_len 2048" in said
    assert "note: use_unsloth_gc" in said
    for more, held in (({}, "all in bfloat16 under DeepSpeed"), ({"torch_autocast": {"enabled": True}}, "(autocast)")):
        shared = {"deepspeed": {"zero_optimization": {"stage": 2}, **more}}
        path.write_text(yaml.safe_dump({**LLAMA, "finetuning_type": "full", **shared}))
        assert main(["explain", str(path)]) == 0
        assert held in capsys.readouterr().out
    path.write_text(yaml.safe_dump({**LLAMA, "use_unsloth": True}))
    assert main(["explain", str(path)]) == 0  # the batch is told all the same
    assert "not simulated: use_unsloth: Unsloth's kernels" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "run.sh").write_text(SWIFT)
    assert "= 8 samples x 2 ranks = 16" in dict(explain(tmp_path / "run.sh").lines)["effective batch"]


COMMENTED = """# my model
base_model: Qwen/Qwen3-4B   # the small one

datasets:
  - path: a   # mine
    type: alpaca
rl: grpo
trl:
  # as in the paper
  beta: 0.1  # KL
  num_generations: 4
micro_batch_size: 2
gradient_accumulation_steps: 4  # 8 in all
gradient_checkpointing:
optimizer: adamw_torch
learning_rate: 2e-5
"""


def test_changes_are_written_in_the_users_keys_and_comments_and_layout_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(COMMENTED)
    assert written(path, {}) == COMMENTED
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "beta": 0.2, "temperature": 0.7,
               "gradient_checkpointing": True, "optim": "adamw_8bit"}  # fmt: skip
    text = written(path, changes)
    assert "  beta: 0.2  # KL\n  num_generations: 4\n  temperature: 0.7\nmicro_batch_size: 1\n" in text
    assert "\ngradient_accumulation_steps: 8  # 8 in all\ngradient_checkpointing: true\n" in text
    assert text.replace("0.2", "0.1").splitlines()[:9] == COMMENTED.splitlines()[:9]
    again = read(path, text=text)
    assert again is not None
    assert again.values["optim"] == "adamw_8bit"
    with pytest.raises(ConfigError, match="sharding: 'fsdp2' has no key in Axolotl"):
        written(path, {"launch.sharding": "fsdp2"})


@pytest.mark.parametrize(
    ("values", "changes", "meant"),
    [
        (LLAMA, {"cutoff_len": 1024, "per_device_train_batch_size": 2}, {"max_length": 1024, "pad_to_multiple_of": 8}),
        (LLAMA, {"lora_rank": 4}, {"lora_r": 4, "lora_alpha": 8}),  # alpha follows from the rank there
        (AXO, {"micro_batch_size": 4, "sequence_len": 1024}, {"per_device_train_batch_size": 4, "max_length": 1024}),
        (
            AXO,
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 9, "lora_target_linear": True},
            {"use_peft": True, "lora_r": 8},
        ),  # none is valid alone
        ({**AXO, "rl": "grpo"}, {"trl.max_completion_length": 99}, {"max_completion_length": 99}),
        ({"model": "m", "tuner_type": "lora"}, {"lora_rank": 32}, {"lora_r": 32}),
    ],
)
def test_a_change_beside_a_file_of_another_tool_takes_the_tools_own_keys(
    values: Mapping[str, object], changes: Mapping[str, object], meant: Mapping[str, object]
) -> None:
    found = changed(source_of(dict(values)), {**changes, "env.A": "1"})
    assert {key: found.source.values.get(key) for key in meant} == meant
    assert dict(found.changes) == {"env.A": "1"}


def test_a_key_of_the_recipe_goes_on_to_be_taken_beside_a_file_of_another_tool() -> None:
    axolotl = changed(source_of(dict(AXO)), {"per_device_train_batch_size": 4})
    assert dict(axolotl.changes) == {"per_device_train_batch_size": 4}
    generates = changed(source_of(dict(LLAMA)), {"max_length": 512})  # of generation alone there
    assert dict(generates.changes) == {"max_length": 512}


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (LLAMA, "cutof_len=9", "LLaMA-Factory: unknown key 'cutof_len'; the nearest valid one is 'cutoff_len'"),
        (AXO, "micro_batch_sise=9", "Axolotl: unknown key 'micro_batch_sise'; the nearest valid one is 'micro_batch_"),
        (LLAMA, "lora_rank=x", "LLaMA-Factory: lora_rank must be a whole number of 1 or more; got 'x'"),
    ],
)
def test_a_change_that_the_tool_does_not_take_is_said_in_its_words(
    values: Mapping[str, object], change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    assert main(["check", str(path), "--gpu", "rtx4090", "--set", change]) == 2
    assert message in capsys.readouterr().err


def test_the_ranks_of_an_accelerate_config_count_in_the_batch_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file two.yaml -m trl.scripts.sft --model_name_or_path m --max_length 9\n"
    )
    said = dict(explain(tmp_path / "run.sh").lines)
    assert said["effective batch"].endswith("= 8 samples x 2 ranks = 16")
    assert said["launch"] == "2 ranks, FSDP2"
    assert "x 4 ranks = 32" in dict(explain(tmp_path / "run.sh", ranks=4).lines)["effective batch"]


def test_how_the_model_is_shared_is_told_in_the_arguments_of_ms_swift() -> None:
    origin = source_of({"model": "m", "tuner_type": "lora"}).foreign
    changes = {"launch": {"sharding": "fsdp2", "reshard_after_forward": True}, "lora_r": 4}
    assert own_words(origin, changes) == "fsdp: fsdp2, lora_rank: 4"
    again = source_of(yaml.safe_load(own_text(origin, changes)))
    assert again.launch["distributed_type"] == "FSDP"
    assert own_words(origin, {"launch.sharding": "zero3"}) == "deepspeed: zero3"
    assert own_words(again.foreign, {"launch.sharding": "zero3"}) == "sharding zero3 (in its launch)"


def test_a_change_beside_a_script_of_verl_is_an_override(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(VERL_SCRIPT)
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    found = changed(source_of(path), {micro: 8})
    assert found.source.values["ppo_micro_batch_size_per_gpu"] == 8
    assert found.changes == {}
    assert changed(source_of(path), {micro.removeprefix("actor_rollout_ref."): 8}) == found  # as explain writes it
    for wrong in (micro[:-1], micro.removeprefix("actor_rollout_ref.")[:-1]):
        with pytest.raises(ConfigError, match=f"verl has no key {micro[:-1]}, and hydra refuses it"):
            changed(source_of(path), {wrong: 8})


def test_how_the_weights_take_less_is_said_in_the_keys_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**LLAMA, "finetuning_type": "full"}))
    source = source_of(path)
    recipe = replace(grpo_recipe(), resolved=source.values, foreign=source.foreign)
    assert _or_less(recipe, 1) == ", or set pure_bf16: true"
    assert _or_less(replace(recipe, resolved={"dtype": "bfloat16"}), 1) == ""
    assert _or_less(replace(recipe, foreign={}), 1) == ", or set dtype: bfloat16"
    assert in_16_bits(source.foreign) == "pure_bf16: true"
    path.write_text(yaml.safe_dump(LLAMA))
    assert in_16_bits(source_of(path).foreign) == ""  # LoRA's frozen weights are in 16 bits, and it has no key for more


def test_bf16_auto_of_axolotl_is_fp16_on_a_card_without_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    cases: list[tuple[dict[str, object], tuple[object, object, object]]] = [
        ({"bf16": "auto"}, (False, True, "float16")), ({}, (False, True, "float16")),
        ({"bf16": True}, (True, None, "bfloat16")), ({"bf16": "auto", "fp16": False}, (False, None, "float32")),
    ]  # fmt: skip
    for given, expected in cases:
        path.write_text(yaml.safe_dump({**AXO_LORA, **given}))
        able = changed(source_of(path), {})
        assert on_card(able, bfloat16=True) == able
        found = on_card(able, bfloat16=False).source
        assert tuple(map(found.values.get, ("bf16", "fp16", "dtype"))) == expected
        assert found.foreign == able.source.foreign  # the file stays the user's
        assert any("no bfloat16" in note for note in found.notes) == (given.get("bf16", "auto") == "auto")
    assert not has_bfloat16("sim:t4")
    assert has_bfloat16("sim:a100-40gb")


def test_what_a_search_changed_is_said_in_the_names_of_the_users_own_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    cases: list[tuple[dict[str, object], dict[str, object], str]] = [
        (LLAMA | {"cutoff_len": 64}, {"max_length": 32, "gradient_checkpointing": False},
         "cutoff_len 64 -> 32, disable_gradient_checkpointing False -> True"),  # which says the opposite
        (LLAMA | {"flash_attn": "fa2"}, {"attn_implementation": "sdpa"}, "flash_attn fa2 -> sdpa"),
        (AXO_LORA | {"micro_batch_size": 2}, {"per_device_train_batch_size": 1, "lora_r": 4},
         "micro_batch_size 2 -> 1, lora_r 8 -> 4"),
    ]  # fmt: skip
    for values, changes, said in cases:
        path.write_text(yaml.safe_dump(values))
        source = source_of(path)
        assert describe_changes(changes, source.values, own_names(source.foreign)) == said
        assert describe_changes(changes, source.values).startswith(next(iter(changes)))
    assert own_names({}) == own_names({"tool": "Axolotl"}) == {}


def test_a_change_of_a_script_is_in_its_own_training_and_its_own_words(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SWIFT + "swift infer --max_length 1\n")
    text = written(path, {"gradient_accumulation_steps": 4, "max_length": 1024, "lora_r": 4, "optim": "adamw_8bit"})
    assert "--gradient_accumulation_steps 4 \\\n    --learning_rate 1e-4" in text
    assert "--max_length 1024 \\\n    --lora_rank 4 \\\n    --optim adamw_8bit\nswift infer --max_length 1\n" in text
    assert text.startswith(SWIFT[: SWIFT.index("--gradient_accumulation")])


@pytest.mark.parametrize(
    ("values", "changes", "own"),
    [
        (LLAMA, {"gradient_checkpointing": False, "max_length": 9},
         {"disable_gradient_checkpointing": True, "cutoff_len": 9}),
        ({**LLAMA, "finetuning_type": "full"}, {"dtype": "bfloat16"}, {"pure_bf16": True}),
        (LLAMA, {"load_in_4bit": True, "use_liger_kernel": True}, {"quantization_bit": 4, "enable_liger_kernel": True}),
        ({**AXO, "gradient_accumulation_steps": None, "batch_size": 12}, {"per_device_train_batch_size": 3,
         "gradient_accumulation_steps": 4}, {"micro_batch_size": 3, "batch_size": 12}),
        ({**AXO, "val_set_size": 0.1, "eval_steps": 9}, {"per_device_train_batch_size": 1},
         {"micro_batch_size": 1, "eval_batch_size": 2}),  # as many are evaluated as before
        (AXO, {"use_liger_kernel": True}, {"plugins": ["axolotl.integrations.liger.LigerPlugin"],
         "liger_fused_linear_cross_entropy": True}),
        ({"model": "m", "tuner_type": "full"}, {"dtype": "float32", "attn_implementation": "sdpa"},
         {"torch_dtype": "float32", "attn_impl": "sdpa"}),
    ],
)  # fmt: skip
def test_each_tool_has_its_own_key_for_a_change(
    tmp_path: Path, values: dict[str, object], changes: dict[str, object], own: dict[str, object]
) -> None:
    foreign = of_yaml(tmp_path, values)
    assert in_own_keys(foreign, changes) == own
    assert can_say(foreign, "launch.sharding", "fsdp2") == (foreign.tool == "ms-swift")


def test_ligers_loss_of_axolotl_is_that_of_its_plugin(tmp_path: Path) -> None:
    asked = {**AXO, "liger_fused_linear_cross_entropy": True}
    loaded = of_yaml(tmp_path, {**asked, "plugins": ["axolotl.integrations.liger.LigerPlugin"]})
    assert loaded.values["use_liger_kernel"] is True
    alone = of_yaml(tmp_path, asked)
    assert "use_liger_kernel" not in alone.values
    assert any("does nothing here" in note for note in alone.notes)
    others = of_yaml(tmp_path, {**AXO, "plugins": ["axolotl.integrations.kernels.KernelsPlugin"]})
    assert not can_say(others, "use_liger_kernel", True)


def test_reading_loads_no_torch() -> None:
    code = "import sys, autofit.frontends.reading; assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def files(folder: Path, model: str) -> dict[str, Path]:
    """A file of each tool that trains `model`."""
    axolotl = {"base_model": model, "sequence_len": 96, "sample_packing": True, "optimizer": "adamw_torch",
               "attn_implementation": "sdpa"}  # fmt: skip
    yamls = {
        "LLaMA-Factory": {**LLAMA, "model_name_or_path": model, "cutoff_len": 96, "trust_remote_code": True},
        "Axolotl": {**AXO, **axolotl},
    }
    found = {}
    for tool, values in yamls.items():
        found[tool] = folder / f"{tool}.yaml"
        found[tool].write_text(yaml.safe_dump(values))
    found["ms-swift"] = folder / "run.sh"
    found["ms-swift"].write_text(
        f"swift rlhf --rlhf_type dpo --model {model} --max_length 96 --per_device_train_batch_size 2"
    )
    return found


def test_a_file_of_another_tool_is_a_source_with_its_trainer_its_launch_and_its_notes(tmp_path: Path) -> None:
    for tool, path in files(tmp_path, "m").items():
        source = source_of(path, ranks=4)
        assert (source.trainer, source.name) == ("hf", path.stem)
        assert source.notes[0].startswith(f"a file of {tool}: a plain transformers Trainer")
        assert launched(source.values, own=source.launch).launch.ranks == 4
        assert trainer_for(source.values, source.trainer) == "hf"
        told = launched(source.values, LaunchOptions(num_processes=2), own=source.launch)
        assert told.launch.ranks == 2
    zero = source_of({**LLAMA, "deepspeed": {"zero_optimization": {"stage": 2}}}, ranks=2)
    assert launched(zero.values, own=zero.launch).launch.words == "2 ranks, DeepSpeed ZeRO-2"
    assert source_of({"model_name_or_path": "m", "num_generations": 8}).trainer is None


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("tool", "batch", "tokens"),
    [  # CI has a search of an Axolotl file, below, and the page's of an ms-swift script (test_web.py)
        ("LLaMA-Factory", 8, 96),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in [("Axolotl", 8, 128), ("ms-swift", 16, 96)]),
    ],
)
def test_a_command_takes_another_tools_file_where_it_takes_a_recipe(
    tmp_path: Path, tool: str, batch: int, tokens: int
) -> None:
    path = files(tmp_path, str(write_model(tmp_path / "model")))[tool]
    found = autofit.estimate(path, gpu="rtx4090", advice=False)
    assert found.fits
    assert found.recipe.effective_batch_size == batch
    assert found.recipe.longest_sample_tokens == tokens
    assert found.recipe.notes[0].startswith(f"a file of {tool}")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_search_answers_in_the_users_keys_and_promote_writes_the_users_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**AXO, "base_model": str(write_model(tmp_path / "model")), "sequence_len": 32, "adapter": "lora",
              "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "optimizer": "adamw_torch"}  # fmt: skip
    text = "# mine\n" + yaml.safe_dump(values)
    (tmp_path / "mine.yaml").write_text(text)
    at = ["--dir", str(tmp_path / "studies")]
    knobs = {"per_device_train_batch_size": {"tier": "neutral", "values": "solved", "memory": "ascending"}}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({"trainer": "hf", "knobs": knobs}))
    few = ["--space", str(tmp_path / "space.yaml"), "--trials", "2", "--no-advice"]
    assert main(["search", str(tmp_path / "mine.yaml"), "--gpu", "rtx4090", *few, *at]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "In your file: " in said
    assert main(["promote", "best", *at, "--out", str(tmp_path / "tuned.yaml")]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"axolotl train {tmp_path / 'tuned.yaml'}" in told
    tuned = (tmp_path / "tuned.yaml").read_text()
    assert tuned.startswith("# mine\n")
    given = yaml.safe_load(tuned)
    assert given["micro_batch_size"] * given["gradient_accumulation_steps"] == 8
    assert given["micro_batch_size"] != values["micro_batch_size"]


# -- scripts of TRL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "trainer", "ranks", "values"),
    [
        ("trl sft --model_name_or_path m --use_peft --per_device_train_batch_size 2", "sft", None,
         {"use_peft": True, "per_device_train_batch_size": 2}),
        ("n=4\naccelerate launch --num_processes $n --zero_stage 2 trl/scripts/dpo.py --model_name_or_path m", "dpo", 4,
         {"zero_stage": 2, "num_processes": 4}),
        ("torchrun --nproc_per_node=8 --nnodes 2 --master_port 1 examples/scripts/sft.py \\\n --model_name_or_path m",
         "sft", 16, {"num_processes": 16}),
        ("deepspeed --num_gpus 2 examples/scripts/reward_modeling.py --model_name_or_path m --deepspeed z.json",
         "reward", 2, {}),
        ("deepspeed --include localhost:1,3,5 examples/scripts/sft.py --model_name_or_path m", "sft", 3,
         {"num_processes": 3}),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch a/src/open_r1/grpo.py --config r.yaml --max_length 7 "
         "--output_dir $OUT", "grpo", 2, {"max_length": 7, "learning_rate": 1e-05}),
        ("python -m trl.scripts.sft --model_name_or_path m --lora_target_modules q_proj v_proj", "sft", 1,
         {"lora_target_modules": ["q_proj", "v_proj"]}),
        ("accelerate launch --config_file a.yaml trl/scripts/sft.py --model_name_or_path m", "sft", None, {}),
    ],
)  # fmt: skip
def test_a_script_of_trl_is_the_recipe_of_its_arguments_and_of_its_launch(
    text: str, trainer: str, ranks: int | None, values: Mapping[str, object], tmp_path: Path
) -> None:
    (tmp_path / "z.json").write_text("{}")
    (tmp_path / "r.yaml").write_text("model_name_or_path: m\nmax_length: 9\nlearning_rate: 1.0e-5\nbenchmarks: [a]\n")
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    found = of_script(tmp_path, text)
    assert (found.tool, found.trainer, found.ranks) == ("TRL", trainer, ranks)
    assert {**found.values, "model_name_or_path": "m", **values} == dict(found.values)
    for key, name in (("deepspeed", "z.json"), ("accelerate_config", "a.yaml")):
        assert found.values.get(key) in (None, str(tmp_path / name))
    assert not {"benchmarks", "config", "output_dir"} & found.values.keys()


def test_a_script_of_trl_is_launched_as_its_accelerate_config_says_and_explained(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    (tmp_path / "run.sh").write_text("accelerate launch --config_file a.yaml my/sft.py --per_device_train_batch_size 3")
    source = source_of(tmp_path / "run.sh")
    assert launched(source.values, own=source.launch).launch.ranks == 8
    assert any("my/sft.py is taken for TRL's own sft" in note for note in source.notes)
    said = dict(explain(tmp_path / "run.sh", ranks=8).lines)
    assert said["effective batch"].endswith("= 3 samples x 8 ranks = 24")


OWN_SCRIPT = """
import trl
from dataclasses import dataclass, field
@dataclass
class Own:
    base_model: str = field(default="m")
    block_size: int = 4096
    per_device_train_batch_size: int = 2
    use_peft: bool = False
    train_file: str = ""
own, args = transformers.HfArgumentParser((Own, trl.SFTConfig)).parse_args_into_dataclasses()
trl.SFTTrainer(own.base_model, args=args)
"""


def test_a_script_that_makes_a_trainer_of_trls_is_read_with_its_own_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    found = of_script(tmp_path, "python own.py --train_file d.json --block_size 512 --learning_rate 0.1")
    assert (found.tool, found.trainer, found.ranks, found.prompt_tokens) == ("TRL", "sft", 1, 512)
    assert dict(found.values) == {
        "model_name_or_path": "m", "max_length": 512, "learning_rate": 0.1, "per_device_train_batch_size": 2,
        "use_peft": False,
    }  # fmt: skip
    note = "own.py is taken for TRL's own sft: what it does besides is not simulated; left out, as its own: train_file"
    assert note in found.notes
    found = of_script(tmp_path, "python own.py --base_model n --dataset_name d")
    assert (found.prompt_tokens, found.values["model_name_or_path"]) == (None, "n")
    assert found.values["max_length"] == 4096
    text = written(tmp_path / "run.sh", {"max_length": 1024, "per_device_train_batch_size": 2})
    assert text.split("--")[3:] == ["block_size 1024 \\\n    ", "per_device_train_batch_size 2"]
    with pytest.raises(ConfigError, match="the script takes no argument dtype"):
        written(tmp_path / "run.sh", {"dtype": "bfloat16"})


def test_the_trainer_that_a_script_makes_counts_before_its_name(tmp_path: Path) -> None:
    text = "from trl import GRPOTrainer, SFTConfig, TrlParser\nTrlParser(())\nclass Own(GRPOTrainer):\n    pass\n"
    (tmp_path / "sft.py").write_text(text)
    found = of_script(tmp_path, "torchrun --nproc_per_node 2 sft.py --model_name_or_path m")
    assert (found.trainer, found.ranks, found.prompt_tokens) == ("grpo", 2, 512)
    assert found.values["reward_funcs"] == ["think_format_reward"]


def test_adapters_by_a_scripts_own_names_are_trls(tmp_path: Path) -> None:
    own = "parser.add_argument('--lora_rank', default=16)\nparser.add_argument('--target_modules')\n"
    (tmp_path / "own.py").write_text(f"from trl import DPOTrainer, TrlParser\nTrlParser()\nDPOTrainer()\n{own}")
    command = "python own.py --model_name_or_path m --use_peft --target_modules"
    found = of_script(tmp_path, f"{command} all")
    assert (found.values["lora_r"], found.values["lora_target_modules"]) == (16, ["all-linear"])
    assert of_script(tmp_path, f"{command} q_proj,v_proj").values["lora_target_modules"] == ["q_proj", "v_proj"]


def test_the_model_of_a_script_is_its_own_default_by_trls_name_too(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT.replace("base_model", "model_name_or_path"))
    assert of_script(tmp_path, "python own.py").values["model_name_or_path"] == "m"
    assert of_script(tmp_path, "python own.py --model_name_or_path n").values["model_name_or_path"] == "n"


def test_ranks_told_beside_a_script_are_those_that_it_leaves_open(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun --nproc-per-node $GPUS sft.py --model_name_or_path m")
    with pytest.raises(ConfigError, match="does not say nproc_per_node of torchrun for certain"):
        source_of(tmp_path / "run.sh")
    assert source_of(tmp_path / "run.sh", ranks=4).launch["num_processes"] == 4


def test_a_command_in_one_text_is_a_recipe_as_a_script_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"trl sft --model_name_or_path m --dataset_name hf://a//b --run_name {'r' * 300}"
    source = source_of(command)
    assert (source.name, source.values["dataset_name"]) == ("command", "hf://a//b")
    assert own_text(source.foreign, {"max_length": 7}).endswith("--max_length 7")
    with pytest.raises(ConfigError, match=r"no training is started in command\.sh"):
        source_of("python train.py")
    with pytest.raises(ConfigError, match=r"my run\.yaml does not exist"):
        source_of("my run.yaml")


@pytest.mark.parametrize("more", ["", " --load_in_4bit", " --bf16"])
def test_a_script_of_trl_with_lora_has_its_rank_whether_it_says_it_or_not(more: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"trl sft --model_name_or_path m --use_peft --dtype float16{more}")
    assert any("LoRA of rank 16 " in note for note in source_of(tmp_path / "run.sh").notes)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("python run_kto.py --beta 1", "training with kto is not simulated"),
        ("accelerate launch --num_processes $N sft.py --beta 1", "does not say num_processes"),
        ("trl sft --learning_rate $LR", "does not say learning_rate"),
        ("trl sft --config gone.yaml", "there is no file"),
        ("python examples/scripts/sft_vlm.py --beta 1", "trains on images"),
        ("python gold.py --model_name_or_path m", "training with GOLDTrainer is not .* fit-check --gpu NAME gold.py"),
        ("python plain.py --beta 1", "plain.py does not take TRL's own arguments.* fit-check --gpu NAME plain.py"),
        ("python fixed.py --beta 1", "fixed.py names its model itself; autofit fit-check --gpu NAME fixed.py"),
        ("python other.py --beta 1", "no training is started .* fit-check --gpu NAME other.py"),
    ],
)
def test_a_script_of_trl_that_is_not_simulated_is_refused_by_name(text: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "gold.py").write_text("from trl.experimental.gold import GOLDTrainer\nGOLDTrainer()\n")
    (tmp_path / "plain.py").write_text("from trl import DPOTrainer\nDPOTrainer()\n")
    (tmp_path / "fixed.py").write_text("from trl import DPOTrainer, TrlParser\nTrlParser()\nDPOTrainer()\n")
    (tmp_path / "other.py").write_text("no Python")
    with pytest.raises(ConfigError, match=wrong):
        of_script(tmp_path, text)


@pytest.mark.parametrize(
    ("values", "key", "rank"),
    [(LLAMA, "adapter_name_or_path", "lora_rank"), (AXO_LORA, "lora_model_dir", "lora_r"),
     ({}, "adapters", "lora_rank")],
)  # fmt: skip
def test_adapters_to_go_on_with_are_looked_for_and_their_rank_is_read(
    tmp_path: Path, values: dict[str, object], key: str, rank: str
) -> None:
    def said(name: str) -> str:
        if not values:
            return of_script(tmp_path, f"swift sft --model Qwen/Qwen3-4B --dataset a --adapters {name}\n").notes[-1]
        return of_yaml(tmp_path, {**values, key: name}).notes[-1]

    assert said("./gone").startswith(f"{key}: there is no folder ./gone here, without which ")
    assert said("me/gone").endswith("looks for it on the hub")
    adapter = tmp_path / "there"
    adapter.mkdir()
    assert "has no adapter_config.json" in said("./there")
    (adapter / "adapter_config.json").write_text('{"r": 64}')
    assert (
        said(str(adapter))
        == f"{key}: the adapter in {adapter} has rank 64; set {rank} to it, which is what is simulated"
    )
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    assert "there" not in said("./there")


def test_datasets_on_disk_that_are_not_there_are_noted_and_those_of_the_hub_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def gone(notes: tuple[str, ...]) -> list[str]:
        return [note.partition(", without which")[0] for note in notes if "does not start" in note]

    def axolotl(**entry: object) -> list[str]:
        return gone(of_yaml(tmp_path, {**AXO_LORA, "datasets": [{"type": "alpaca", **entry}]}).notes)

    def swift(name: str) -> list[str]:
        return gone(of_script(tmp_path, f"swift sft --model Qwen/Qwen3-4B --dataset {name}\n").notes)

    def llama(**changes: object) -> list[str]:
        return gone(of_yaml(tmp_path, {**LLAMA, **changes}).notes)

    assert axolotl(path="./my.jsonl") == ["datasets: there is no './my.jsonl' here"]
    assert axolotl(path="json", data_files=["a.json"]) == ["datasets: there is no 'a.json' here"]
    assert swift("a/b ./my.jsonl#500") == ["dataset: there is no './my.jsonl' here"]
    assert swift("$DATA a/b#5 HF::a/b:default s3://a/b.jsonl '~x.json'") == ["dataset: there is no '~x.json' here"]
    assert axolotl(path="a/b") == axolotl(path="s3://a/b.json") == axolotl(path="x" * 5000) == []
    assert llama(dataset="a") == llama(dataset="a", dataset_dir="ONLINE") == []
    assert llama(dataset="a", dataset_dir="own") == ["dataset_dir: 'own' has no dataset_info.json here"]

    (tmp_path / "my.jsonl").touch()
    assert axolotl(path="./my.jsonl") == swift("./my.jsonl#500") == []
    (tmp_path / "own").mkdir()
    (tmp_path / "own/dataset_info.json").write_text('{"a": {"file_name": "a.json"}, "b": {"hf_hub_url": "c/d"}}')
    assert llama(dataset="b, c", dataset_dir="own") == ["dataset: dataset_info.json in 'own' has no 'c'"]
    assert llama(dataset="a", dataset_dir="own") == ["dataset: there is no './own/a.json' here"]
    (tmp_path / "own/a.json").touch()
    assert llama(dataset="a,b", dataset_dir="own") == []


# -- as strangers' own files say it ------------------------------------------------------------------------------------

SHARDED = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}}


@pytest.mark.parametrize(
    ("file", "keeps", "weights"),
    [
        ({**AXO, **SHARDED, "optimizer": "adamw_torch_fused"}, None, "sharded in float32 where trained"),
        ({**AXO, **SHARDED, "optimizer": "adamw_torch_fused", "fsdp_version": 2}, True, "trained, held in bfloat16"),
    ],
)
def test_axolotls_fsdp1_casts_what_is_trained_and_its_fsdp2_nothing(
    file: dict[str, object], keeps: bool | None, weights: str, tmp_path: Path
) -> None:
    found = of_yaml(tmp_path, file)
    assert found.values.get("keeps_dtype") is keeps
    assert not any("fsdp" in note for note in found.notes)  # it is read, and no unknown key
    assert weights in dict(explain(tmp_path / "run.yaml").lines)["weights"]


def test_axolotls_dpo_under_fsdp2_is_told_as_an_upper_bound(tmp_path: Path) -> None:
    found = of_yaml(tmp_path, {**AXO, **SHARDED, "optimizer": "adamw_torch_fused", "fsdp_version": 2, "rl": "dpo"})
    assert "keeps_dtype" not in found.values
    assert any("in the dtype that they are loaded in" in note for note in found.notes)


@pytest.mark.parametrize(("version", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_accelerate_of_llama_factory_casts_frozen_weights_under_fsdp2(version: int, dtype: str, tmp_path: Path) -> None:
    found = of_yaml(tmp_path, {**LLAMA, "fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": version}})
    assert (found.values["dtype"], found.values["adapter_dtype"]) == (dtype, "float32")
    assert any("accelerate 1.11" in note for note in found.notes) == (version == 2)


@pytest.mark.parametrize(
    ("file", "batch"),
    [
        ({**AXO, "context_parallel_size": 2}, "= 8 samples x 2 (4 ranks / context_parallel_size 2) = 16"),
        (
            {"model": "m", "tuner_type": "full", "sequence_parallel_size": 4},
            "1 (the default) x 4, ms-swift's own = 4 samples x 1 (4 ranks / sequence_parallel_size 4) = 4",
        ),
    ],
)
def test_ranks_that_share_samples_are_no_factor_of_the_effective_batch(
    file: dict[str, object], batch: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    assert dict(explain(tmp_path / "run.yaml", ranks=4).lines)["effective batch"].endswith(batch)


TUNED = "swift sft --model m --tuner_type full --max_length 64 --gradient_accumulation_steps 3"


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        (f'MORE=()\nNPROC_PER_NODE=2 {TUNED} "${{MORE[@]}}" "$@"\n', 2),
        (f"NPROC_PER_NODE=2 {TUNED} $@\n", 2),
        (f"box exec image.sif /opt/bin/torchrun --nnodes=1 --nproc_per_node=4 /opt/bin/{TUNED}\n", 4),
    ],
)
def test_a_script_that_hands_its_arguments_on_or_starts_swift_in_a_container_is_read(
    script: str, ranks: int, tmp_path: Path
) -> None:
    found = of_script(tmp_path, script)
    assert (found.values["gradient_accumulation_steps"], found.ranks) == (3, ranks)
    assert any("without arguments of its own" in note for note in found.notes) == ("$@" in script)


def test_arguments_of_a_function_are_not_taken_for_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps for certain"):
        of_script(tmp_path, f'train() {{\n  NPROC_PER_NODE=2 {TUNED} "$@"\n}}\ntrain --lora_rank 4\n')


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "swift sft --model_type qwen1half-7b-chat --sft_type lora --batch_size 1 --check_dataset_strategy warning",
            "--model, a name on the hub or a folder, for --model_type qwen1half-7b-chat, --tuner_type for --sft_type, "
            "--per_device_train_batch_size for --batch_size; leave out --check_dataset_strategy;",
        ),
        ("swift dpo --model_id_or_path m --deepspeed default-zero2", "`swift rlhf --rlhf_type dpo` for `swift dpo`, "
         "--model for --model_id_or_path, --deepspeed zero2;"),
        ("swift orpo --model m", "`swift rlhf --rlhf_type orpo` for `swift orpo`;"),
    ],
)  # fmt: skip
def test_words_of_ms_swift_2_are_told_with_those_of_today(command: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="these are words of ms-swift 2") as error:
        of_script(tmp_path, command)
    assert told in str(error.value)
    (tmp_path / "run.sh").write_text(command)
    with pytest.raises(ConfigError, match="these are words of ms-swift 2"):
        explain(tmp_path / "run.sh")


def test_checkpoints_of_ms_swift_are_turned_on_with_fsdp2_which_makes_them_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"NPROC_PER_NODE=2 {TUNED} --gradient_checkpointing false\n")
    changes = {"launch.sharding": "fsdp2", "gradient_checkpointing": True}
    found = of_script(tmp_path, written(path, changes))
    assert isinstance(found.launch["fsdp_config"], dict)
    assert found.launch["fsdp_config"]["fsdp_activation_checkpointing"] is True


def test_a_file_of_ones_own_with_a_mapping_under_model_is_not_ms_swifts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {name: Qwen/Qwen3-4B}\nlora: {r: 8}\nsystem: {log_level: INFO}\n")
    with pytest.raises(ConfigError, match="not recognised as a file of"):
        explain(tmp_path / "run.yaml")


@pytest.mark.parametrize(("checkpoints", "own"), [(True, True), (False, False)])
def test_fsdp2_of_ms_swift_is_written_with_the_checkpoints_that_were_chosen(
    checkpoints: bool, own: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"NPROC_PER_NODE=2 {TUNED}\n")
    origin = source_of(path).foreign
    foreign = of_script(tmp_path, path.read_text())
    changes = {"launch": {"sharding": "fsdp2"}, **({} if checkpoints else {"gradient_checkpointing": False})}
    path.write_text(own_text(origin, changes))
    config = of_script(tmp_path, path.read_text()).launch["fsdp_config"]
    assert isinstance(config, dict)
    assert (config["fsdp_version"], bool(config.get("fsdp_activation_checkpointing"))) == (2, own)
    said = in_own_keys(foreign, {"launch.sharding": "fsdp2", "gradient_checkpointing": checkpoints})["fsdp"]
    assert of_yaml(tmp_path, {"model": "m", "tuner_type": "full", "fsdp": said}).launch["fsdp_config"] == config


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("run.yaml", yaml.safe_dump({**AXO, "reward_model": True}), "reward_model true"),
        ("run.sh", f"{TUNED} --task_type seq_cls --num_labels 2\n", "task_type seq_cls"),
        ("run.sh", f"{TUNED}\n", "swift sft"),
        ("run.sh", TUNED.replace("sft", "rlhf"), "rlhf_type dpo (the default)"),
    ],
)
def test_the_trainer_is_told_where_its_usual_key_is_not_in_the_file(
    name: str, text: str, trainer: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert dict(explain(tmp_path / name).lines)["trainer"] == trainer


def test_what_a_tool_refuses_on_so_many_ranks_is_told_below_the_facts(tmp_path: Path) -> None:
    file = {**AXO, "rl": "grpo", "micro_batch_size": 8, "gradient_accumulation_steps": 1, "trl": {"num_generations": 8}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    assert not explain(tmp_path / "run.yaml").wrong
    found = explain(tmp_path / "run.yaml", ranks=2)
    assert "must be 16 or more" in found.wrong[0]
    assert dict(found.lines)["trainer"] == "rl grpo"


def test_a_loss_of_pairs_is_no_default_of_kto(tmp_path: Path) -> None:
    assert "pref_loss" not in of_yaml(tmp_path, {**LLAMA, "stage": "kto"}).defaults
    assert of_yaml(tmp_path, {**LLAMA, "stage": "dpo"}).defaults["pref_loss"] == "sigmoid"
