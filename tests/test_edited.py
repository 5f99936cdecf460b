"""A recipe that was edited after its search is told when a trial is promoted."""

import os
from pathlib import Path

import pytest

from autofit.promotion.promotion import edit_note
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
