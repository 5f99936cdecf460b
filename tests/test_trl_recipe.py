"""YAML of open-r1 and the alignment-handbook as recipes of TRL, and changes back in them."""

from pathlib import Path
from typing import cast

import pytest
import yaml

from autofit.api.reading import read_recipe
from autofit.errors import ConfigError
from autofit.frontends.reading import explain, read
from autofit.frontends.trl_recipe import HANDBOOK, OPEN_R1, tool_of
from autofit.frontends.writing import OwnFile, changed, own_words, source_of, written
from autofit.probing.fork_server import ForkServer

GRPO = """# Model arguments
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
torch_dtype: bfloat16  # as the weights are
dataset_name: open-r1/OpenR1-Math-220k
dataset_prompt_column: problem
system_prompt: "You think."
gradient_checkpointing: true
max_prompt_length: 700
max_completion_length: 1024
num_generations: 16
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
reward_funcs: [accuracy, format]
reward_weights: [1.0, 0.5]
"""
DPO = {
    "model_name_or_path": "a/b", "dataset_mixer": {"a/data": 1.0}, "dataset_splits": ["train"], "max_length": 900,
    "max_prompt_length": 512, "beta": 0.01,
}  # fmt: skip


def file(folder: Path, text: str | dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def test_a_recipe_of_open_r1_trains_with_grpo_on_made_up_prompts_of_the_length_that_it_cuts_to(tmp_path: Path) -> None:
    source = source_of(file(tmp_path, GRPO))
    assert (source.trainer, source.prompt_tokens) == ("grpo", 700)
    assert source.values["dtype"] == "bfloat16"
    assert source.values["reward_funcs"] == ["think_format_reward"]
    gone = {"torch_dtype", "system_prompt", "dataset_prompt_column", "max_prompt_length", "reward_weights"}
    assert not gone & set(source.values)
    assert source.notes[0].startswith("a file of open-r1: TRL's GRPO trainer")
    assert "made-up prompt of 700 tokens" in source.notes[-1]


@pytest.mark.parametrize(
    ("folder", "changes", "trainer", "tokens"),
    [
        ("dpo", {}, "dpo", 900),
        ("recipes", {}, "dpo", 900),
        ("sft", {"beta": None}, "sft", 900),
        ("recipes", {"beta": ..., "max_prompt_length": ..., "max_length": ...}, "sft", 1024),
    ],
)
def test_a_recipe_of_the_handbook_trains_as_its_folder_or_its_keys_say(
    folder: str, changes: dict[str, object], trainer: str, tokens: int, tmp_path: Path
) -> None:
    values = {key: value for key, value in {**DPO, **changes}.items() if value is not ...}
    found = read(file(tmp_path / folder, values))
    assert found is not None
    assert (found.tool, found.trainer, found.prompt_tokens) == (HANDBOOK, trainer, tokens)
    assert not {"dataset_mixer", "dataset_splits"} & set(found.values)


def test_a_training_that_is_not_simulated_is_refused_by_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alignment-handbook: training with orpo is not simulated; grpo, sft, dpo"):
        read(file(tmp_path / "orpo", DPO))


@pytest.mark.parametrize(("kind", "runs"), [("kto", "-m trl.scripts.kto"), ("orpo", "SCRIPT.py"), ("gkd", "SCRIPT.py")])
def test_a_command_of_trl_that_is_not_simulated_names_the_command_that_runs_a_script(
    kind: str, runs: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"trl {kind} --model_name_or_path m --dataset_name d\n")
    with pytest.raises(ConfigError, match=f"{kind} is not simulated; .*; autofit fit-check --gpu NAME {runs} "):
        read(path)
    path.write_text(f"accelerate launch {kind}.py --model_name_or_path m --dataset_name d\n")
    with pytest.raises(ConfigError, match=f"{kind} is not simulated; .*; autofit fit-check --gpu NAME {kind}.py"):
        read(path)


@pytest.mark.parametrize(
    ("more", "tool"),
    [
        ({}, None),
        ({"torch_dtype": "bfloat16"}, None),
        ({"chat_template": "x"}, HANDBOOK),
        ({"chat_template": "x", "hub_model_revision": "v1"}, HANDBOOK),
        ({"dataset_mixture": {}, "benchmarks": ["x"]}, OPEN_R1),
        ({"dataset_mixture": {}, "reward_funcs": ["accuracy", "tag_count"]}, OPEN_R1),
    ],
)
def test_whose_a_recipe_is(more: dict[str, object], tool: str | None) -> None:
    assert tool_of({"model_name_or_path": "a/b", **more}) == tool
    assert tool_of(more) is None


def test_changes_are_written_in_the_names_and_beside_the_comments_of_the_users_file(tmp_path: Path) -> None:
    path = file(tmp_path, GRPO)
    text = written(path, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "dtype": "float32"})
    assert "torch_dtype: float32  # as the weights are\n" in text
    assert text.startswith("# Model arguments\n")
    changed = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "torch_dtype": "float32"}
    assert yaml.safe_load(text) == {**yaml.safe_load(GRPO), **changed}


def test_a_script_that_is_given_such_a_recipe_reads_it_so_and_lays_its_arguments_over_it(tmp_path: Path) -> None:
    file(tmp_path / "recipes/demo", GRPO)
    script = tmp_path / "train.sh"
    script.write_text(
        "accelerate launch --num_processes=7 src/open_r1/grpo.py --config recipes/demo/config.yaml \\\n"
        "  --per_device_train_batch_size 4 --system_prompt 'Be brief.'\n"
    )
    found = read(script)
    assert found is not None
    assert (found.trainer, found.ranks, found.prompt_tokens) == ("grpo", 7, 700)
    assert found.values["reward_funcs"] == ["think_format_reward"]
    assert found.values["per_device_train_batch_size"] == 4
    assert found.keys["dtype"] == "torch_dtype"
    assert not {"system_prompt", "max_prompt_length", "torch_dtype"} & set(found.values)
    assert any("made-up prompt of 700 tokens" in note for note in found.notes)
    told = explain(script)
    assert told is not None
    assert "x 7 ranks = 112" in dict(told.lines)["effective batch"]


def test_a_script_of_trl_comes_back_with_its_comments_its_older_names_and_other_arguments(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "# mine\naccelerate launch --num_processes 1 sft.py \\\n  --model_name_or_path a/b \\\n"
        "  --torch_dtype float32 `# older` \\\n  --per_device_train_batch_size 8 \\\n"
        "  --gradient_checkpointing \\\n  --output_dir out  # here\necho done\n"
    )
    changes = {"per_device_train_batch_size": 2, "dtype": "bfloat16", "gradient_checkpointing": False,
               "accelerator_config.split_batches": True}  # fmt: skip
    assert written(path, changes) == (
        "# mine\naccelerate launch --num_processes 1 sft.py \\\n  --model_name_or_path a/b \\\n"
        "  --torch_dtype bfloat16 `# older` \\\n  --per_device_train_batch_size 2 \\\n"
        "  --gradient_checkpointing false \\\n  --output_dir out \\\n"
        "    --accelerator_config '{\"split_batches\": true}'  # here\necho done\n"
    )
    origin = source_of(path).foreign
    assert (
        own_words(origin, {"dtype": "bfloat16", "env": {"A": "1"}})
        == "--torch_dtype bfloat16, A 1 (in the environment)"
    )
    assert OwnFile.of(origin, changes).command == "bash"


@pytest.mark.parametrize(("bits", "dtype"), [("", "float32"), ("load_in_4bit: true\n", "bfloat16")])
def test_adapters_of_a_quantised_model_are_told_in_the_dtype_that_trl_casts_them_to(
    tmp_path: Path, bits: str, dtype: str
) -> None:
    said = explain(file(tmp_path, f"{GRPO}use_peft: true\n{bits}"))
    assert f"LoRA of rank 16 in {dtype}," in dict(said.lines)["weights"]


def test_explain_says_the_batch_and_what_stands_for_the_data(tmp_path: Path) -> None:
    said = explain(file(tmp_path, GRPO), ranks=7)
    assert (said.tool, dict(said.lines)["trainer"]) == (OPEN_R1, "grpo of TRL")
    batch = "per_device_train_batch_size 16 x gradient_accumulation_steps 4 = 64 completions x 7 ranks = 448"
    assert dict(said.lines)["effective batch"] == batch
    assert any("its own rewards are not run" in note for note in said.notes)


def test_a_sample_that_would_take_gigabytes_to_make_up_is_refused(tmp_path: Path) -> None:
    source = source_of(file(tmp_path, {**DPO, "max_length": 10**8}))
    with pytest.raises(ConfigError, match=r"must have at most 4,194,304 tokens; got 100,000,000"):
        read_recipe(
            changed(source, None), trainer=None, device="sim:t4", scratch=tmp_path / "s", server=cast(ForkServer, None)
        )
