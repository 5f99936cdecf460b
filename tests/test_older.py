"""A recipe of an older TRL is read in the keys of the installed one: names, lengths of prompts, keys without effect."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import yaml

from autofit.errors import ConfigError
from autofit.frontends.writing import source_of
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare
from autofit.trainers.key_table import table_of
from autofit.trainers.names import installed, parser_of
from autofit.trainers.older import _LEFT_OUT, _ONCE, modern

SIMULATED = Inspection(device="sim:t4", worst_case=WorstCase(path=Path(os.devnull)))
GENERATES = {"dtype", "warmup_steps", "optim", "train_sampling_strategy", "max_completion_length", "lora_r"}
PREFERS = {"dtype", "max_length"}


def test_a_key_with_another_name_now_is_read_by_that_name() -> None:
    read = modern({"torch_dtype": "bfloat16", "warmup_ratio": 0.1, "lora_r": 4}, GENERATES, SIMULATED)
    assert read.values == {"dtype": "bfloat16", "warmup_steps": 0.1, "lora_r": 4}
    (note,) = read.notes
    assert note.startswith(f"keys of older libraries were read by their names in {installed()}: torch_dtype as dtype, ")


def test_the_name_of_now_wins_over_the_older_one_unless_the_older_one_is_given_beside_the_recipe() -> None:
    both = {"torch_dtype": "bfloat16", "dtype": "float32"}
    assert modern(both, GENERATES, SIMULATED).values == {"dtype": "float32"}
    said = modern(both, GENERATES, replace(SIMULATED, changed=("torch_dtype",)))
    assert (said.values, said.inspection.changed) == ({"dtype": "bfloat16"}, ("dtype",))


def test_a_switch_that_became_a_choice_is_that_choice_where_it_is_on() -> None:
    assert modern({"adafactor": True, "group_by_length": False}, GENERATES, SIMULATED).values == {"optim": "adafactor"}


def test_keys_without_an_effect_are_left_out_and_named() -> None:
    read = modern({"save_safetensors": True, "logging_dir": "x", "torch_dtype": None}, GENERATES, SIMULATED)
    assert read.values == {}
    assert read.notes == (
        "keys of older libraries without an effect here were left out: save_safetensors, logging_dir",
    )


@pytest.mark.parametrize(
    ("inspection", "tokens", "said"),
    [
        (SIMULATED, 256, "prompts of 256 tokens are taken"),
        (replace(SIMULATED, prompt_tokens=90), 90, "prompts count as they are"),
        (replace(SIMULATED, device="cuda"), None, "prompts count as they are"),
    ],
)
def test_prompts_that_were_cut_count_as_long_as_they_were_cut_where_no_length_is_given(
    inspection: Inspection, tokens: int | None, said: str
) -> None:
    read = modern({"max_prompt_length": 256}, GENERATES, inspection)
    assert (read.values, read.inspection.prompt_tokens) == ({}, tokens)
    assert read.notes[0].endswith(said)


def test_of_preferences_whole_samples_are_cut_now() -> None:
    read = modern({"max_prompt_length": 512, "max_completion_length": 128}, PREFERS, SIMULATED)
    assert (read.values, read.inspection) == ({}, SIMULATED)
    assert [note.partition(" is a key")[0] for note in read.notes] == [
        "max_prompt_length 512",
        "max_completion_length 128",
    ]


def test_a_key_that_no_release_had_and_a_wrong_value_are_left_for_the_check_of_the_keys() -> None:
    given = {"max_lenght": 1, "rpo_alpha": 1.0, "max_prompt_length": "long", "adafactor": "yes"}
    assert modern(given, PREFERS, SIMULATED).values == given


@pytest.mark.parametrize("tokens", [0, -3, 10**9])
def test_a_length_of_prompts_that_cannot_be_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length must be from 1 to 4,194,304 tokens; got"):
        modern({"max_prompt_length": tokens}, GENERATES, SIMULATED)


@pytest.mark.parametrize("trainer", ["grpo", "sft", "dpo", "reward", "rloo", "hf"])
def test_no_key_of_the_installed_libraries_counts_as_older(trainer: str) -> None:
    known = table_of(trainer, parser_of(trainer), {}).keys
    given = dict.fromkeys(known, 1)
    assert modern(given, known, SIMULATED).values == given
    assert {new for new, _ in _ONCE.values()} <= set(known)
    assert not _LEFT_OUT & set(known)


def test_a_recipe_of_an_older_trl_is_read_and_its_prompts_need_no_data(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    path = tiny.write_recipe(tmp_path, tiny_model)
    values = yaml.safe_load(path.read_text())
    values |= {"reward_funcs": ["think_format_reward"]}
    values |= {
        "torch_dtype": "bfloat16",
        "max_prompt_length": 19,
        "save_safetensors": True,
        "dataset_name": "not/there",
    }
    path.write_text(yaml.safe_dump(values))
    recipe = prepare(path, trainer="grpo", device="sim:t4", folder=tmp_path / "i", server=fork_server)
    assert (recipe.resolved["dtype"], recipe.longest_prompt_tokens) == ("bfloat16", 19)
    assert not {"torch_dtype", "max_prompt_length", "save_safetensors"} & set(recipe.values)
    own = "with your torch_dtype as dtype and without your max_prompt_length, save_safetensors"
    assert recipe.spelling == f"in the keys of {installed()}, {own}"
    assert [note.partition(":")[0] for note in recipe.notes][:3] == [
        f"keys of older libraries were read by their names in {installed()}",
        f"an older TRL cut prompts to max_prompt_length 19, and {installed()} cuts none",
        "keys of older libraries without an effect here were left out",
    ]


def test_a_list_of_one_word_on_a_command_line_is_a_list(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --model_name_or_path a/b --reward_funcs accuracy_reward --lora_target_modules q_proj\n")
    values = source_of(script).values
    assert (values["reward_funcs"], values["lora_target_modules"]) == (["accuracy_reward"], ["q_proj"])
