"""`autofit init`: a recipe that TRL takes, for the model and the data that were named."""

from pathlib import Path
from unittest import mock

import pytest
import yaml

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.recipe.profile import TRAINERS, profile, recipe_text, told_by_columns, trainer_of


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trl_takes_the_recipe_of_every_trainer(trainer: str) -> None:
    from autofit.trainers.trl_config import parse

    values = yaml.safe_load(recipe_text(trainer))
    training = parse(trainer, values, overrides={"use_cpu": True, "bf16": False}).training
    assert training.learning_rate == values["learning_rate"]
    assert values["dataset_name"] == profile(trainer).dataset
    assert max(map(len, recipe_text(trainer).splitlines())) <= 120


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_keys_of_a_recipe_say_its_trainer(trainer: str) -> None:
    assert trainer_of(yaml.safe_load(recipe_text(trainer)), None) == trainer


@pytest.mark.parametrize(
    ("name", "line", "trainer"),
    [
        ("a.jsonl", '{"prompt": "a"}', "grpo"),
        ("a.jsonl", '{"prompt": "a", "completion": "b"}', "sft"),
        ("a.jsonl", '{"messages": []}', "sft"),
        ("a.json", '[{"chosen": "a", "rejected": "b"},', "dpo"),
        ("a.csv", "prompt,answer", "grpo"),
    ],
)
def test_the_columns_of_a_file_say_the_trainer(
    name: str, line: str, trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(line + "\n")
    assert main(["init", "--dataset", name, "--model", "my: model #1"]) == 0
    values = yaml.safe_load(Path(f"{trainer}.yaml").read_text())
    assert (values["dataset_name"], values["model_name_or_path"]) == (name, "my: model #1")


@pytest.mark.parametrize(
    ("line", "keys", "trainer"),
    [
        ('{"messages": []}', {"max_length": 64}, "sft"),
        ('{"messages": []}', {}, "sft"),
        ('{"prompt": "a"}', {}, "grpo"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c"}',
            {"loss_type": "sigmoid", "precompute_ref_log_probs": True},
            "dpo",
        ),
        ('{"question": "a"}', {}, "grpo"),
    ],
)
def test_the_columns_of_a_recipes_dataset_say_its_trainer_where_keys_do_not(
    line: str, keys: dict[str, object], trainer: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    values = {"dataset_name": str(tmp_path / "a.jsonl"), **keys}
    assert trainer_of(values, None) == trainer
    assert told_by_columns(values) == (trainer == "sft")  # the others by their keys, or as the usual one
    assert trainer_of(values | {"dataset_name": str(tmp_path)}, None) == trainer  # a folder of files


@pytest.mark.parametrize("name", [f"{'a' * 5000}.jsonl", "a\0.csv", ".", "gone.json", ["a.jsonl"], None])
def test_a_dataset_that_is_no_file_here_says_nothing(name: object) -> None:
    assert trainer_of({"dataset_name": name}, None) == TRAINERS[0]


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("x" * 200_000 + "\n")  # longer than a field of csv may be
    assert trainer_of({"dataset_name": str(tmp_path / "a.csv")}, None) == TRAINERS[0]
    (tmp_path / "a.json").write_text('{"a":' * 100_000)
    assert trainer_of({"dataset_name": str(tmp_path / "a.json")}, None) == TRAINERS[0]
    (tmp_path / "a.jsonl").write_text('{"messages": 1}')
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=PermissionError))
    assert trainer_of({"dataset_name": str(tmp_path / "a.jsonl")}, None) == TRAINERS[0]


def test_data_for_kto_is_not_taken_for_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    assert main(["init", "--dataset", str(path)]) == 2
    assert "has the columns of KTO" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="max_length may belong to a recipe of sft or dpo or reward"):
        trainer_of({"dataset_name": str(path), "max_length": 64}, None)


def test_columns_that_two_trainers_take_are_told_with_both(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"chosen": "b", "rejected": "c"}\n')
    with pytest.raises(ConfigError, match=r"the columns of .*a.jsonl may belong to a recipe of dpo or reward"):
        trainer_of({"dataset_name": str(path)}, None)
    with pytest.raises(ConfigError, match="max_length may belong to a recipe of dpo or reward"):
        trainer_of({"dataset_name": str(path), "max_length": 64}, None)


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    check = "  autofit check grpo.yaml --gpu rtx4090"
    search = "  autofit search grpo.yaml --target-vram 24GB"
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == ["wrote grpo.yaml; next:", check, search], "each on a line to copy"
    assert "without a way to the model hub add --prompt-tokens N" in told[3]
    Path("grpo.yaml").write_text("mine")
    assert main(["init", "grpo"]) == 2
    assert "grpo.yaml exists" in capsys.readouterr().err
    assert Path("grpo.yaml").read_text() == "mine"
    assert main(["init", "grpo", "--out", "other.yaml"]) == 0


@pytest.mark.parametrize("content", ['{"question": 1}\n', "", "[1, 2]\n", "\x00"])
def test_a_file_whose_columns_say_nothing_needs_the_trainers_name(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(content)
    assert main(["init", "--dataset", "data.jsonl"]) == 2
    assert "autofit init grpo|sft|dpo|reward" in capsys.readouterr().err
