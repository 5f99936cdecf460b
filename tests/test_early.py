"""What is told before TRL is imported: keys, values and files, in the words of the inspection."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import key_tables
import pytest
import tiny
from before_imports import refused

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.plugin import registry
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.recipe.yaml_file import read_source
from autofit.trainers import key_table
from autofit.trainers.early import check
from autofit.trainers.key_table import table_of
from autofit.trainers.names import parser_of
from autofit.trainers.older import modern
from autofit.trainers.trl import keep_keys
from autofit.trainers.trl_config import parse

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


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_early_check_says_what_the_inspection_says(kept: Path, trainer: str) -> None:
    keep_keys(trainer)
    for values in WRONG:
        said = early_refusal(trainer, values)
        assert said is not None, values
        assert said == refusal(trainer, values)
    for values in RIGHT:
        assert early_refusal(trainer, values) is None
        assert refusal(trainer, values) is None, values


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
        assert early_refusal(trainer, known | {"model_name_or_path": "a/b"}) is None


def test_the_other_name_of_a_changed_key_is_not_looked_at(kept: Path) -> None:
    keep_keys("grpo")
    table = key_table.kept_table("grpo")
    assert table is not None
    new, older = next((new, older) for new, older in table.synonyms.items() if new == "activation_checkpointing")
    asked = Inspection(device="cpu", worst_case=WorstCase(path=Path("none")), changed=(new,))
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


def test_a_file_that_is_missing_is_told_without_a_table(kept: Path, tmp_path: Path) -> None:
    recipe = {"model_name_or_path": "a/b", "dataset_name": "data.jsonl", "reward_funcs": ["accuracy_reward"]}
    with pytest.raises(ConfigError, match=r"the recipe: dataset_name 'data.jsonl' .* no such file .*--prompt-tokens N"):
        registry.check_source_early(read_source(recipe), trainer=None, device="sim:t4", changes={})
    registry.check_source_early(read_source(recipe), trainer=None, device="sim:t4", changes={}, prompt_tokens=64)
    keep_keys("grpo")
    with pytest.raises(ConfigError, match=r"model_name_or_path: there is no folder './weights' with a config.json"):
        registry.check_source_early(
            read_source({**recipe, "model_name_or_path": "./weights"}), trainer=None, device="sim:t4", changes={},
            prompt_tokens=64,
        )  # fmt: skip


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
