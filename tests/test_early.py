"""What is told before TRL is imported: keys, values and files, in the words of the inspection."""

import importlib
import inspect
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import key_tables
import pytest
import tiny
from before_imports import refused

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.frontends.writing import source_of
from autofit.plugin import registry
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.recipe.yaml_file import read_source
from autofit.trainers import key_table, rules
from autofit.trainers.early import check
from autofit.trainers.key_table import table_of
from autofit.trainers.names import parser_of
from autofit.trainers.older import modern
from autofit.trainers.trl import keep_keys
from autofit.trainers.trl_config import ON_CPU, parse

TRAINERS = ("grpo", "sft", "dpo", "reward", "rloo")
WRONG: list[dict[str, Any]] = [
    {"lora_rr": 8}, {"torch_dtyp": "bfloat16", "max_seq_length": 3}, {"device_map": "auto"}, {"callbacks": []},
    {"gradient_accumulation_steps": "many"}, {"gradient_accumulation_steps": "1.5"}, {"learning_rate": "fast"},
    {"use_peft": "perhaps"}, {"use_peft": 3}, {"per_device_train_batch_size": 0}, {"lora_r": True},
    {"lr_scheduler_type": 7}, {"lora_target_modules": 5}, {"gradient_checkpointing_kwargs": [1]}, {"bf16": {}},
    {"model_name_or_path": 5}, {"env": "A=1"}, {"save_strategy": ["no"]}, {"learning_rate": [1e-5]},
    {"max_grad_norm": "abc", "lora_rr": 8}, {"save_total_limit": "many"}, {"save_total_limit": "1.5"},
    {"optim": "adamw_8bitt"}, {"dtype": "bf16"}, {"trainer": "sft"}, {"bf16": True, "fp16": True},
    {"bf16_full_eval": True, "fp16_full_eval": True},
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"learning_rate": "1e-5"}, {"learning_rate": 1}, {"gradient_accumulation_steps": "4"}, {"use_peft": "yes"},
    {"lora_target_modules": "all-linear"}, {"lora_target_modules": ["q_proj"]}, {"optim": "adamw_torch"},
    {"env": {"A": 1}}, {"report_to": "none"}, {"report_to": ["none"]}, {"fsdp": ""},
    {"lr_scheduler_kwargs": {"a": 1}}, {"warmup_steps": 0.1}, {"use_cpu": True}, {"save_total_limit": "None"},
    {"save_total_limit": "5"},
]  # fmt: skip


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the tables that inspections keep, without those that came with autofit."""
    monkeypatch.setattr(key_table, "TABLES", tmp_path / "none.json")
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "keys"


@pytest.fixture(autouse=True)
def asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that may be asked, so that no owner's name is known to be wrong."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


ASKED = Inspection(device="sim:a100-80gb", worst_case=WorstCase(path=Path("none")), prompt_tokens=64)


def refusal(trainer: str, values: dict[str, Any]) -> str | None:
    """What TRL's own parser, asked as the inspection does, says of the keys and values."""
    read = modern(values, table_of(trainer, parser_of(trainer), {}).keys, ASKED).values
    try:
        parse(trainer, read, overrides={"use_cpu": True, "bf16": values.get("bf16", False)})
    except ConfigError as error:
        return str(error)
    return None


def early_refusal(trainer: str, values: dict[str, Any]) -> str | None:
    try:
        check(trainer, {"model_name_or_path": "a/b", **values}, ASKED)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "trainer", [name if name in ("grpo", "sft") else pytest.param(name, marks=pytest.mark.slow) for name in TRAINERS]
)
def test_the_early_check_says_what_the_inspection_says(kept: Path, trainer: str) -> None:
    keep_keys(trainer)
    for values in WRONG:
        said = early_refusal(trainer, values)
        assert said is not None, values
        assert said == refusal(trainer, values)
    for values in RIGHT:
        assert early_refusal(trainer, values) is None
        assert refusal(trainer, values) is None, values


# (trainer, values, what is said, whether TRL's config refuses them too: its trainer does the others)
BROKEN: list[tuple[str, dict[str, Any], str, bool]] = [
    ("grpo", {"generation_batch_size": 16, "steps_per_generation": 2}, "say the same, .* got 16 and 2$", True),
    ("grpo", {"num_generations": 1}, "num_generations must be 2 or more", True),
    ("rloo", {"num_generations": 1}, "num_generations must be 2 or more", True),
    ("grpo", {"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations \(3\). It is "
     r"per_device_train_batch_size 8 x gradient_accumulation_steps 1 x ranks, and holds whole groups: change", True),
    ("grpo", {"num_generations": 4, "generation_batch_size": 12}, "train_batch_size x ranks, 8 x 1", True),
    ("grpo", {"num_generations": 6, "generation_batch_size": 16}, r"by num_generations \(6\). Change one", True),
    ("grpo", {"eval_strategy": "steps", "per_device_eval_batch_size": 3}, "3 x 1 = 3, must be divisible", True),
    ("grpo", {"auto_find_batch_size": True}, "auto_find_batch_size must be false", True),
    ("grpo", {"log_completions_hub_repo": "a/b"}, "needs log_completions: true", True),
    ("grpo", {"vllm_importance_sampling_clip_min": 3, "vllm_importance_sampling_clip_max": 2}, "got 3 and 2", True),
    ("grpo", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
     "token_truncate needs", True),
    ("grpo", {"loss_type": "vespo", "use_vllm": True}, "it is sequence_mask", False),
    ("sft", {"load_best_model_at_end": True}, "eval_strategy is no and save_strategy steps; make", True),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch"}, "is epoch and save_strategy steps", True),
    ("dpo", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30}, "got 500 and 30", True),
    ("dpo", {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 15},
     "a multiple of logging_steps, which stands in for eval_steps; got 15 and 10", True),
    ("dpo", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.3}, "got 500 and 0.3", True),
    ("sft", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "set eval_strategy to steps or epoch", True),
    ("sft", {"learning_rate": -1.0}, "learning_rate must be 0 or more; got -1", False),
    ("sft", {"lora_dropout": 5}, "lora_dropout must be from 0 to 1; got 5", False),
    ("rloo", {"temperature": 0}, "temperature must be more than 0", False),
    ("sft", {"warmup_steps": -3}, "warmup_steps must be 0 or more; got -3", True),
    ("sft", {"dataloader_prefetch_factor": 2}, "needs dataloader_num_workers of 1 or more", True),
    ("sft", {"logging_steps": 0}, "logging_steps must be more than 0", True),
    ("sft", {"save_steps": 2.5}, "save_steps must be a whole number where it is more than 1; got 2.5", True),
    ("sft", {"eval_strategy": "steps", "logging_strategy": "no", "logging_steps": 0}, "needs eval_steps", True),
    ("sft", {"torch_empty_cache_steps": 0}, "torch_empty_cache_steps must be 1 or more", True),
    ("sft", {"load_in_4bit": True, "load_in_8bit": True}, "cannot both be true", True),
    ("sft", {"packing": True, "max_length": None}, "packing needs a max_length", False),
    ("sft", {"padding_free": True}, "does not cut samples to max_length, which is 1024", False),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, r"each of loss_type \(2\); got 1", True),
    ("dpo", {"loss_type": ["sigmoid", "sigmod"]}, "the nearest valid one is 'sigmoid'", False),
    ("grpo", {"scale_rewards": "groups"}, "the nearest valid one is 'group'", False),
    ("grpo", {"vllm_mode": "colocated"}, "the nearest valid one is 'colocate'", False),
    ("sft", {"debug": "underflow"}, "got 'underflow'; the nearest valid one is 'underflow_overflow'", True),
    ("grpo", {"accelerator_config": {"split_batch": True}}, "no key 'split_batch'; the nearest valid one is", True),
    ("sft", {"accelerator_config": "none.json"}, "a mapping or a JSON file; there is no file 'none.json'", True),
    ("sft", {"eval_strategy": False}, 'YAML reads an unquoted no as false: write "no"', True),
]  # fmt: skip
KEPT: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"generation_batch_size": 16}), ("grpo", {"num_generations": 3, "gradient_accumulation_steps": 3}),
    ("grpo", {"num_generations": "8"}), ("grpo", {"scale_rewards": False}), ("rloo", {}),
    ("grpo", {"eval_strategy": "steps", "per_device_eval_batch_size": 2, "num_generations_eval": 2}),
    ("sft", {"load_best_model_at_end": True, "save_strategy": "best"}), ("sft", {"save_steps": 0.1}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}),
    ("sft", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3}),
    ("dpo", {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 250}), ("sft", {"packing": True}),
    ("sft", {"padding_free": True, "max_length": None}), ("sft", {"logging_strategy": "epoch", "logging_steps": 0}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}), ("dpo", {"loss_type": "ipo"}),
    ("sft", {"debug": "underflow_overflow", "max_steps": 0, "accelerator_config": {"split_batches": False}}),
    ("sft", {"accelerator_config": '{"even_batches": true}'}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "values", "said", "by_config"), BROKEN)
def test_a_rule_that_several_keys_break_is_told_before_the_imports(
    kept: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, values: dict[str, Any], said: str, by_config: bool
) -> None:
    keep_keys(trainer)
    assert re.search(said, early_refusal(trainer, values) or "")
    monkeypatch.setattr(key_table, "broken", lambda *_: ())
    assert not by_config or refusal(trainer, values) is not None


@pytest.mark.parametrize(("trainer", "values"), KEPT)
def test_what_keeps_the_rules_is_refused_neither_early_nor_by_trl(
    kept: Path, trainer: str, values: dict[str, Any]
) -> None:
    keep_keys(trainer)
    assert early_refusal(trainer, values) is None
    assert refusal(trainer, values) is None


@pytest.mark.parametrize("key", ["accelerator_config", "chat_template_path"])
def test_a_file_that_trl_would_read_whole_has_a_limit(kept: Path, tmp_path: Path, key: str) -> None:
    keep_keys("sft")
    large, pipe = tmp_path / "large", tmp_path / "pipe"
    with large.open("wb") as file:
        file.truncate(3 * 2**30)
    os.mkfifo(pipe)
    assert re.search(f"{key} must have at most 1 MiB; .* has 3072", early_refusal("sft", {key: str(large)}) or "")
    said = early_refusal("sft", {key: str(pipe)}) or ""
    assert re.search("must be a file; .* is a pipe|there is no file", said)


def test_tf32_is_no_error_where_the_recipe_is_read_without_a_card() -> None:
    assert parse("sft", {"tf32": True, "bf16": False}, overrides=ON_CPU).resolved["tf32"] is None


def test_whole_groups_are_counted_over_the_ranks(kept: Path) -> None:
    keep_keys("grpo")
    values = {"model_name_or_path": "a/b", "per_device_train_batch_size": 2}
    check("grpo", values, replace(ASKED, ranks=4))
    with pytest.raises(ConfigError, match=r"generation_batch_size \(6\) must be divisible by num_generations \(8\)"):
        check("grpo", values, replace(ASKED, ranks=3))


def test_the_losses_that_are_told_early_are_those_of_the_installed_trl() -> None:
    source = inspect.getsource(importlib.import_module("trl.trainer.dpo_trainer"))
    assert set(re.findall(r'if loss_type == "(\w+)"', source)) == set(key_table.DPO_LOSSES)


def test_the_parts_of_values_that_are_told_early_are_those_of_the_installed_transformers() -> None:
    config = importlib.import_module("transformers.trainer_pt_utils").AcceleratorConfig
    options = importlib.import_module("transformers.debug_utils").DebugOption
    assert {field.name for field in fields(config)} == set(rules.ACCELERATOR_KEYS)
    assert [option.value for option in options] == list(rules.DEBUG_OPTIONS)


def test_wrong_values_are_told_beside_an_unknown_key(kept: Path) -> None:
    keep_keys("grpo")
    said = early_refusal("grpo", {"learning_rat": 1, "max_completion_length": "abc", "lora_r": 0}) or ""
    assert "unknown key 'learning_rat'" in said
    assert said.endswith(
        "max_completion_length must be a whole number or null; got the text 'abc'; lora_r must be 1 or more; got 0"
    )


@pytest.mark.parametrize(
    ("trainer", "key", "said"),
    [("grpo", "max_seq_lenght", "'max_seq_length' is an older name of 'max_length', which is a key of `trl sft`, "
      "`trl dpo`, `trl reward`; of a completion max_completion_length is the limit"),
     ("grpo", "torch_dtyp", "'torch_dtype' is called 'dtype' here: use 'dtype'"),
     ("grpo", "max_prompt_lenght", "'max_prompt_length' is a key of older libraries, which is read too if"),
     ("sft", "num_generation", "'num_generations' is a key of `trl grpo`")],
)  # fmt: skip
def test_a_misspelt_key_of_another_release_or_trainer_is_told_by_the_name_that_is_meant(
    kept: Path, trainer: str, key: str, said: str
) -> None:
    keep_keys(trainer)
    assert f"unknown key {key!r}; {said}" in (early_refusal(trainer, {key: 512}) or "")


def test_a_wrong_change_is_told_as_the_options_and_not_as_the_files(kept: Path) -> None:
    keep_keys("grpo")
    source = read_source({"model_name_or_path": "a/b", "dataset_name": "a/b", "num_generations": 4})

    def said(changes: dict[str, object], **own: object) -> str:
        given = replace(source, values={**source.values, **own})
        with pytest.raises(ConfigError) as error:
            registry.check_source_early(given, trainer="grpo", device="sim:t4", changes=changes)
        return str(error.value)

    assert said({"lora_rr": 8}).startswith("--set: every key must be one")
    assert said({"learning_rate": "fast"}).startswith("--set: learning_rate must be a number")
    assert said({"learning_rate": 1}, lora_rr=8).startswith("the recipe: ")
    assert said({}, lora_rr=8).startswith("the recipe: ")


def test_a_reward_in_text_hides_no_other_error(kept: Path) -> None:
    keep_keys("grpo")
    said = early_refusal("grpo", {"reward_funcs": "my_reward", "learning_rate": "fast", "lora_rr": 8}) or ""
    for part in ("write reward_funcs: [my_reward]", "learning_rate must be a number", "unknown key 'lora_rr'"):
        assert part in said


def test_of_many_choices_the_nearest_is_told_and_not_the_list(kept: Path) -> None:
    keep_keys("grpo")
    said = early_refusal("grpo", {"optim": "adamw_8bitt"}) or ""
    assert said.endswith("names; got 'adamw_8bitt'; the nearest valid one is 'adamw_8bit'")
    assert "adafactor" in (early_refusal("grpo", {"optim": "xyz"}) or "")


def test_the_tables_that_come_with_autofit_are_those_of_its_versions() -> None:
    content = json.loads(key_table.TABLES.read_text())
    if content["versions"] != key_table.versions():
        pytest.skip(f"they are of {content['versions']}; experiments/key_tables.py writes those of what is installed")
    assert content == json.loads(key_tables.text())
    for trainer in TRAINERS:
        assert key_table.kept_table(trainer) is not None


def test_the_tables_that_come_with_autofit_count_for_no_other_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    whole = key_table.kept_table("dpo")
    if whole is None:
        pytest.skip("they are of other versions")
    monkeypatch.setattr(key_table, "versions", lambda: {"trl": "0.9", "transformers": "4.0"})
    assert key_table.kept_table("dpo") is None
    monkeypatch.undo()
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(key_table, "hash_of", lambda file: "edited")
    assert key_table.kept_table("dpo") is None


def test_every_default_of_trl_passes_the_early_check(kept: Path) -> None:
    for trainer in TRAINERS:
        keep_keys(trainer)
        known = parse(trainer, {}, overrides={"use_cpu": True, "bf16": False}).resolved
        known.pop("generation_batch_size", None)  # TRL refuses it beside its steps_per_generation
        assert early_refusal(trainer, known | {"model_name_or_path": "a/b"}) is None


def test_the_other_name_of_a_changed_key_is_not_looked_at(kept: Path) -> None:
    keep_keys("grpo")
    table = key_table.kept_table("grpo")
    assert table is not None
    new, older = next((new, older) for new, older in table.synonyms.items() if new == "activation_checkpointing")
    asked = Inspection(device="cpu", worst_case=WorstCase(path=Path("none")), prompt_tokens=64, changed=(new,))
    check("grpo", {"model_name_or_path": "a/b", new: True, older[0]: [3]}, asked)
    unchanged = Inspection(device="cpu", worst_case=WorstCase(path=Path("none")))
    with pytest.raises(ConfigError, match=older[0]):
        check("grpo", {"model_name_or_path": "a/b", new: True, older[0]: [3]}, unchanged)


def test_a_table_counts_only_while_the_files_of_trl_are_as_they_were(kept: Path) -> None:
    keep_keys("sft")
    (path,) = kept.iterdir()
    assert key_table.kept_table("sft") is not None
    content = json.loads(path.read_text())
    changed = next(file for file in content["files"] if file.endswith("sft_config.py"))
    content["files"][changed][1] += 1
    path.write_text(json.dumps(content))
    assert key_table.kept_table("sft") is None
    assert early_refusal("sft", {"lora_rr": 8}) is None  # left to the inspection
    keep_keys("sft")
    assert early_refusal("sft", {"lora_rr": 8}) is not None


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"files": 3}', '{"files": {}, "keys": {"a": 1}, "synonyms": {}}'])
def test_a_torn_table_is_made_again(kept: Path, torn: str) -> None:
    keep_keys("reward")
    (path,) = kept.iterdir()
    path.write_text(torn)
    assert key_table.kept_table("reward") is None
    keep_keys("reward")
    assert key_table.kept_table("reward") is not None


def test_a_file_that_is_missing_is_told_without_a_table(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"model_name_or_path": "a/b", "dataset_name": "data.jsonl", "reward_funcs": ["accuracy_reward"]}
    with pytest.raises(ConfigError, match=r"the recipe: dataset_name 'data.jsonl' .* no such file .*--prompt-tokens N"):
        registry.check_source_early(read_source(recipe), trainer=None, device="sim:t4", changes={})
    registry.check_source_early(read_source(recipe), trainer=None, device="sim:t4", changes={}, prompt_tokens=64)
    keep_keys("grpo")
    for model, said in {
        "./weights": "model_name_or_path: there is no folder './weights' with a config.json",
        "weights": "must be a folder with a config.json, .* got 'weights'",
        "Qwen3-8B": "got 'Qwen3-8B'; similar names: Qwen/Qwen3-8B",
    }.items():
        with pytest.raises(ConfigError, match=said):
            registry.check_source_early(
                read_source({**recipe, "model_name_or_path": model}), trainer=None, device="sim:t4", changes={},
                prompt_tokens=64,
            )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    for model in ("weights", "gpt2", "someone/weights", "${first}"):
        check("grpo", {"model_name_or_path": model}, ASKED)


def test_where_the_hub_is_not_asked_a_name_that_its_cache_lacks_is_told_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("sft", {"model_name_or_path": "a/b"}, ASKED)
    with pytest.raises(ConfigError, match="there is no folder 'a/b/c'"):
        check("sft", {"model_name_or_path": "a/b/c"}, ASKED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"got 'Qwen/Qwen3-8BB'; similar names: Qwen/Qwen3-8B"):
        check("sft", {"model_name_or_path": "Qwen/Qwen3-8BB"}, ASKED)
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)
    for known in ("a/b", "Qwen/Qwen3-8B"):
        check("sft", {"model_name_or_path": known}, ASKED)


def test_what_is_wrong_is_said_in_the_names_of_another_tools_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "base_model: weights\ndatasets: [{path: a, type: alpaca}]\nmicro_batch_size: 1\n"
        "gradient_accumulation_steps: 1\nsequence_len: 64\nlearning_rate: 1e-5\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml: base_model must be a folder .* got 'weights'$"):
        registry.check_source_early(source_of(path), trainer=None, device="sim:t4", changes={})


def test_a_recipe_without_a_dataset_is_told_with_what_may_stand_in() -> None:
    values: dict[str, object] = {"model_name_or_path": "a/b"}
    with pytest.raises(ConfigError, match=r"needs a dataset: .*, or give --prompt-tokens N"):
        check("sft", values, replace(ASKED, prompt_tokens=None))
    with pytest.raises(ConfigError, match=r"needs a dataset: .* or datasets$"):
        check("sft", values, replace(ASKED, prompt_tokens=None, device="cuda"))
    check("sft", values, ASKED)
    check("sft", {**values, "datasets": [{"path": "c/d"}]}, replace(ASKED, prompt_tokens=None))


def test_a_file_that_is_no_recipe_is_said_to_be_none_and_no_key_is_guessed(kept: Path) -> None:
    """`services` shares half of its letters with vllm_server_host."""
    keep_keys("grpo")
    files: list[dict[str, object]] = [{"services": {"web": {}}}, {"kind": "Pod", "spec": {}}]
    for values in files:
        with pytest.raises(ConfigError, match=r"none of its keys \('.*'\) is one of TRL's, or of a tool"):
            registry.check_source_early(read_source(values), trainer=None, device="sim:t4", changes={})


def test_a_trainer_of_ones_own_has_no_early_check(kept: Path) -> None:
    keep_keys("grpo")
    recipe = {"whatever": 1, "dataset_name": "none.jsonl"}
    registry.check_source_early(read_source(recipe), trainer="my_loop:TRAINER", device="sim:t4", changes={})


def test_a_typo_is_told_without_an_import_of_torch(kept: Path, tmp_path: Path, tiny_model: Path) -> None:
    keep_keys("grpo")
    recipe = tiny.write_recipe(tmp_path, tiny_model, lora_rr=8)
    for command in (["check", "--gpu", "t4"], ["search", "--target-vram", "16GB"], ["doctor"], ["advise"]):
        said = refused(command[0], str(recipe), *command[1:])
        assert "unknown key 'lora_rr'; the nearest valid one is 'lora_r'" in said


@pytest.mark.parametrize("command", ["check", "estimate", "search", "doctor"])
def test_an_unknown_card_is_told_before_the_imports(tmp_path: Path, command: str) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\nreward_funcs: [r.f]\noutput_dir: o\n")
    assert "unknown GPU 'a100x'" in refused(command, str(recipe), "--gpu", "a100x")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--cards", "a100x", "--cards: unknown GPU 'a100x'"), ("--counts", "0", "--counts must be 1 to 8 numbers"),
     ("--prices", "none.yaml", "none.yaml")],
)  # fmt: skip
def test_wrong_cards_counts_and_prices_of_advise_are_told_before_the_imports(
    tmp_path: Path, option: str, value: str, said: str
) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\nreward_funcs: [r.f]\noutput_dir: o\n")
    assert said in refused("advise", str(recipe), option, value)


@pytest.mark.parametrize("name", ["out.x", "out"])
def test_a_picture_of_another_kind_is_told_before_the_simulation(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--gpu", "l4", "--plot", name]) == 2
    assert f'--plot must name a picture that ends in .png, .svg, .pdf, .jpg, .jpeg, .webp; got "{name}"' in (
        capsys.readouterr().err.replace("'", '"')
    )


def test_a_generation_that_splits_a_group_is_told_with_what_to_change() -> None:
    values = {"per_device_train_batch_size": 6, "num_generations": 8, "output_dir": "o", "bf16": False}
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size 6 x .* and holds whole groups: change"):
        parse("grpo", values, overrides={})
