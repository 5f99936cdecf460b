"""A recipe that was edited after its search is told when a trial is promoted."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.promotion.promotion import edit_note
from autofit.recipe.secrets import sealed, sealed_text
from autofit.tuning.record import StudyRecord

RECORD = StudyRecord(
    recipe_name="run", used="2026-11-24T12:00:00+00:00", values={"max_steps": 60, "env": {"A": "sealed"}, "dtype": "a"},
    resolved={"max_steps": 60, "learning_rate": 1e-6, "dtype": "a"}, other_names={"torch_dtype": "dtype"},
)  # fmt: skip
AFTER, BEFORE = 1796000000, 1700000000  # seconds; the search is between


def written(folder: Path, text: str, at: int = AFTER) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    os.utime(path, (at, at))
    return folder


def test_an_edit_is_told_with_both_values(tmp_path: Path) -> None:
    said = edit_note(RECORD, written(tmp_path, "max_steps: 300\nlearning_rate: 1.0e-5\nenv: {A: open}\n"))
    assert said.startswith(
        "run.yaml was edited after the search and says max_steps 300 (the study: 60), learning_rate "
    )
    assert "1e-05 (the study: not given); the study's copy is what is trained" in said
    assert "open" not in said


def test_a_token_is_neither_told_nor_taken_for_an_edit(tmp_path: Path) -> None:
    values = sealed({"hub_token": "hf_" + "a" * 20, "max_steps": 60})
    record = replace(RECORD, values=values, resolved=values)
    for token, edited in (("a", "says max_steps 300"), ("b", "says hub_token '***' (the study: '***'), max_steps 300")):
        said = edit_note(record, written(tmp_path, f"hub_token: hf_{token * 20}\nmax_steps: 300\n"))
        assert edited in said
        assert "hf_" not in said


def test_an_edit_of_another_tools_file_is_told_in_its_keys(tmp_path: Path) -> None:
    text = "base_model: m\nhub_token: hf_aaaaaaaaaaaaaaaaaaaa\nlora_r: 8\n"
    origin = {"tool": "Axolotl", "path": str(written(tmp_path, text) / "run.yaml"), "text": sealed_text(text)}
    record = replace(RECORD, foreign=origin)
    assert edit_note(record, tmp_path) == ""
    written(tmp_path, text.replace("8", "16"))
    assert "run.yaml was edited after the search and says lora_r 16 (the study: 8);" in edit_note(record, tmp_path)


SWIFT = "NPROC_PER_NODE=2 swift sft \\\n  --model m --hub_token hf_aaaaaaaaaaaaaaaaaaaa \\\n  --lora_rank 8 --packing\n"
VERL = "python -m verl.trainer.main_ppo a.b=1 \\\n  data.train_batch_size=64\n"


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (SWIFT, "_rank 8", "_rank 16", "lora_rank '16' (the study: '8');"),
        (SWIFT, "--packing", "--max_length=64", "packing not given (the study: True), max_length '64' (the study: not"),
        (SWIFT, "NODE=2", "NODE=4", "NPROC_PER_NODE '4' (the study: '2');"),
        (SWIFT, "aaaa", "aaab", "hub_token '***' (the study: '***');"),
        (SWIFT, "NPROC", "echo begins\nNPROC", ""),
        (VERL, "=64", "=32", "data.train_batch_size '32' (the study: '64');"),
        ("torchrun sft.py --model_name_or_path m --lr 1e-5\n", "1e-5", "1e-4", "lr '1e-4' (the study: '1e-5');"),
    ],
)
def test_an_edit_of_a_script_is_told_in_its_arguments(tmp_path: Path, text: str, old: str, new: str, said: str) -> None:
    path = tmp_path / "run.sh"
    record = replace(RECORD, foreign={"tool": "ms-swift", "path": str(path), "text": sealed_text(text)})
    for content, expected in ((text, ""), (text.replace(old, new), said)):
        path.write_text(content)
        os.utime(path, (AFTER, AFTER))
        found = edit_note(record, tmp_path)
        assert (expected in found) if expected else found == ""
        assert "hf_" not in found


@pytest.mark.parametrize(
    ("text", "at"), [("max_steps: 60\n", AFTER), ("max_steps: 300\n", BEFORE), ("- a list\n", AFTER), ("{", AFTER)]
)
def test_the_same_settings_an_older_file_and_a_broken_one_are_no_edit(tmp_path: Path, text: str, at: int) -> None:
    assert edit_note(RECORD, written(tmp_path, text, at)) == ""


def test_keys_of_an_older_trl_are_compared_by_their_names_of_now(tmp_path: Path) -> None:
    assert edit_note(RECORD, written(tmp_path, "torch_dtype: a\nsave_safetensors: true\n")) == ""
    said = edit_note(RECORD, written(tmp_path, "torch_dtype: b\n"))
    assert "says torch_dtype 'b' (the study: 'a');" in said


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert edit_note(RECORD, tmp_path) == ""


def test_a_dataset_that_is_a_file_here_is_no_edit_and_another_one_is(tmp_path: Path) -> None:
    values = {"max_steps": 60, "datasets": [{"path": "json", "data_files": "a.jsonl"}]}
    record = replace(RECORD, values=values, resolved={**values, "dataset_name": None})
    assert edit_note(record, written(tmp_path, "max_steps: 60\ndataset_name: a.jsonl\n")) == ""
    said = edit_note(record, written(tmp_path, "max_steps: 60\ndataset_name: b.jsonl\n"))
    assert "says dataset_name 'b.jsonl' (the study: 'a.jsonl');" in said
