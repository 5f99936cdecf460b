"""The built-in baseline, and a recipe changed on the command line: a search and an estimate with nothing at hand."""

import json
import subprocess
from pathlib import Path

import command_line
import pytest
import yaml

from autofit.commands.common import settings
from autofit.errors import ConfigError
from autofit.recipe.yaml_file import baseline_path


def autofit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.run(folder, *arguments)


def test_the_baseline_keeps_the_field_notes_groups_and_effective_batch() -> None:
    values = yaml.safe_load(baseline_path().read_text())
    completions = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert completions == 4 * values["num_generations"]  # an effective batch of 4 prompts
    assert values["per_device_train_batch_size"] == 2 * values["num_generations"]  # 2 prompts at a time


@pytest.mark.thorough
def test_a_search_needs_nothing_but_a_target_and_its_winner_waits_for_a_dataset(tmp_path: Path) -> None:
    done = autofit(tmp_path, "search", "--target-vram", "40GB", "--device", "sim", "--trials", "1",
                   "--no-advice", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["fidelity"], found["counts"]["fit"], found["target_bytes"]) == ("predicted", 1, 40 * 10**9)
    assert found["device"] == "sim:a100-40gb"
    assert "a100-40gb (NVIDIA A100-SXM4-40GB, 42.28 GB) simulated, 40.00 GB of it: predicted" in done.stderr
    assert "1024 prompt + 128 completion tokens" in done.stderr
    promoted = autofit(tmp_path, "promote", "best")
    assert promoted.returncode == 2
    assert "no dataset to train on" in promoted.stderr
    tuned = autofit(tmp_path, "promote", "best", "--write-only", "--out", "tuned.yaml")
    assert tuned.returncode == 0, tuned.stderr
    text = (tmp_path / "tuned.yaml").read_text()
    assert "its prompts were synthetic: add dataset_name" in text
    assert yaml.safe_load(text)["model_name_or_path"] == "Qwen/Qwen3-4B"
    assert "use_cpu" not in text  # it was predicted for a card


@pytest.mark.slow
def test_an_estimate_takes_settings_and_the_card_of_its_target(tmp_path: Path) -> None:
    model = "model_name_or_path=Qwen/Qwen3-0.6B"
    done = autofit(tmp_path, "estimate", "--target-vram", "24GB", "--set", model, "--set", "lora_r=4", "--set",
                   "lora_r=8", "--prompt-tokens", "40", "--no-advice", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["capacity_bytes"] == 24 * 10**9
    assert "Qwen/Qwen3-0.6B on rtx4090" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate"], "give --target-vram SIZE .* or --gpu NAME"),
        (["estimate", "--gpu", "a1000"], "unknown GPU 'a1000'"),
        (["estimate", "--gpu", "t4", "--set", "lora_rank=8"], "unknown key 'lora_rank'; the nearest .* 'lora_r'"),
        (["estimate", "--gpu", "t4", "--set", "lora_r"], "--set takes key=value, .* got 'lora_r'"),
        (["estimate", "--gpu", "t4", "--prompt-tokens", "0"], "--prompt-tokens must be 1 or more; got 0"),
        (["estimate", "--gpu", "t4", "--trainer", "ppo"], "--trainer must be one of"),
        pytest.param(["search", "--target-vram", "3GB", "--device", "sim"], "at least the model's weights",
                     marks=pytest.mark.slow),
        (["search", "--target-vram", "3GB", "--device", "cpu"], "the built-in baseline has synthetic prompts"),
        (["search", "--demo", "--target-vram", "3GB", "--prompt-tokens", "5", "--device", "cpu"], "simulated card"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    import re

    done = autofit(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("autofit: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(message, lines[0]), done.stderr


def test_settings_are_typed_by_yaml_and_the_last_of_a_key_counts() -> None:
    given = ["lora_r=4", "bf16=false", "lora_r=8", "lora_target_modules=[q_proj, v_proj]", "beta=null", "run_name=a=b"]
    assert settings(given) == {
        "lora_r": 8, "bf16": False, "lora_target_modules": ["q_proj", "v_proj"], "beta": None, "run_name": "a=b",
    }  # fmt: skip
    assert settings(["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]) == {  # as a verdict names it
        "env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    }
    for wrong in ("lora_r", "=8", "lora_r=["):
        with pytest.raises(ConfigError, match="--set"):
            settings([wrong])
