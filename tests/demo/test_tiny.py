"""The tiny model: quick without skill, and with skill a model that GRPO improves."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from experiments.tiny_reward import tiny
from experiments.tiny_reward.heldout import held_out_reward
from experiments.tiny_reward.tiny import prepare_tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def here(_: str, arguments: Sequence[str], *, timeout_s: float) -> str:
    """As a process of its own builds a model, which imports for as long as the rest takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny", *arguments])
        tiny.main()
    return ""


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of this test are built in this process."""
    monkeypatch.setattr(tiny, "run_module", here)


@pytest.mark.usefixtures("_here")
def test_random_weights_are_quick_and_small(cache: Path) -> None:
    recipe = yaml.safe_load(prepare_tiny(cache, sft_steps=0).read_text())
    assert (Path(recipe["model_name_or_path"]) / "model.safetensors").stat().st_size < 4 * 1_000_000


@pytest.mark.usefixtures("_here")
def test_held_out_problems_are_not_trained_on(cache: Path) -> None:
    data = Path(yaml.safe_load(prepare_tiny(cache, sft_steps=0).read_text())["dataset_name"])
    train, test = (
        [json.loads(line)["prompt"] for line in (data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert len(test) == len(set(test)) == 400
    assert not set(train) & set(test)


@pytest.mark.slow
def test_a_damaged_model_is_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = yaml.safe_load(prepare_tiny(cache, sft_steps=0, seed=7).read_text())
    weights = Path(recipe["model_name_or_path"]) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    monkeypatch.setattr(tiny, "run_module", here)
    prepare_tiny(cache, sft_steps=0, seed=7)
    assert weights.read_bytes() == whole


def train(recipe: Path, output_dir: Path, *options: str) -> None:
    command = [sys.executable, "-m", "trl.scripts.grpo", "--config", str(recipe), "--use_cpu", "true"]
    command += ["--output_dir", str(output_dir), *options]
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.thorough
def test_trls_own_script_takes_a_step_on_it(cache: Path, tmp_path: Path) -> None:
    recipe = prepare_tiny(cache, sft_steps=0)
    train(recipe, tmp_path / "out", "--max_steps", "1", "--per_device_train_batch_size", "8")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_grpo_raises_the_held_out_reward(cache: Path, tmp_path: Path) -> None:
    recipe = prepare_tiny(cache)
    settings = yaml.safe_load(recipe.read_text())
    test = Path(settings["dataset_name"]) / "test.jsonl"
    before = held_out_reward(Path(settings["model_name_or_path"]), test)
    # 20 of its 100 steps at twice the rate: from 0.275 to 0.404 (2 cores, torch 2.13.0, TRL 1.16.0, 2026-11-23)
    train(recipe, tmp_path / "out", "--max_steps", "20", "--learning_rate", "2e-3")
    after = held_out_reward(tmp_path / "out", test)
    assert after.sampled > before.sampled + 0.05
