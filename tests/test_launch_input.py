"""Recipes for several ranks, read by their trainer: what its rules count, and the batch on other cards."""

import json
from pathlib import Path

import pytest
import tiny
import yaml
from recipes import grpo_recipe

from autofit.api import planning, reading
from autofit.cluster.nodes import check_count
from autofit.errors import ConfigError
from autofit.hardware.nvml import Gpu
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import on_machines, prepare
from autofit.promotion import place
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch
from autofit.recipe.launching import LaunchOptions, launch_options
from autofit.recipe.recipe import Recipe, with_launch

WHOLE = Gpu(name="NVIDIA A100-SXM4-40GB", uuid="GPU-1", capacity_bytes=40 << 30)
SLICE = Gpu(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid="MIG-1", capacity_bytes=5 << 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder: Path, server: ForkServer, path: Path, **options: object) -> Recipe:
    return prepare(
        path, trainer="grpo", device="cpu", folder=folder / "i", server=server, trains=False,
        launch=LaunchOptions(**options),  # type: ignore[arg-type]
    )  # fmt: skip


def with_keys(path: Path, **changes: object) -> Path:
    values = yaml.safe_load(path.read_text()) | changes
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_recipe_for_eight_ranks_is_held_to_trls_rules_over_all_of_them(
    folder: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    path = tiny.write_recipe(
        folder, tiny_model, per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=8,
        accelerate_config="fsdp2", num_processes=8,
    )  # fmt: skip
    found = read(folder, fork_server, path)
    assert (found.world_size, found.effective_batch_size, found.generation_batch_size) == (8, 8, 8)
    assert found.launch.sharding == "fsdp2"
    assert found.values[LAUNCH] == found.resolved[LAUNCH] == found.launch.to_values()
    assert "accelerate_config" not in found.values
    assert ("launch", "8 ranks, FSDP2") in found.describe()

    moved = read(folder, fork_server, path, gpus=2)
    assert (moved.world_size, moved.effective_batch_size, moved.generation_batch_size) == (2, 8, 8)
    assert moved.values["per_device_train_batch_size"] == 1
    assert moved.values["gradient_accumulation_steps"] == moved.resolved["gradient_accumulation_steps"] == 4
    assert any("the effective batch 8" in note for note in moved.notes)

    with pytest.raises(ConfigError, match="cannot be divided by 3 ranks; numbers that work: 1, 2, 4, 8"):
        read(folder, fork_server, path, gpus=3)
    with pytest.raises(ConfigError, match="must be divisible by num_generations"):
        read(folder, fork_server, path, num_processes=2)


def test_a_generation_batch_in_completions_stays_as_it_is_on_other_cards(
    folder: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    path = tiny.write_recipe(
        folder, tiny_model, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
    )  # fmt: skip
    values = {k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "steps_per_generation"}
    path.write_text(yaml.safe_dump(values | {"generation_batch_size": 16}))
    whole = read(folder, fork_server, path)
    split = read(folder, fork_server, path, gpus=4)
    assert whole.launch.is_plain
    assert split.launch.sharding == "ddp"
    assert (split.effective_batch_size, split.generation_batch_size) == (8, 16)
    assert "generation_batch_size" not in split.values
    assert split.values["steps_per_generation"] == split.resolved["steps_per_generation"]


def test_a_deepspeed_file_with_another_batch_is_refused_and_its_own_becomes_auto(
    folder: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    content: dict[str, object] = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    (folder / "ds.json").write_text(json.dumps(content))
    path = tiny.write_recipe(
        folder, tiny_model, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
        deepspeed="ds.json", num_processes=2,
    )  # fmt: skip
    found = read(folder, fork_server, path)
    kept = found.launch.to_deepspeed()
    assert kept is not None
    assert kept["train_micro_batch_size_per_gpu"] == "auto"
    (folder / "ds.json").write_text(json.dumps({**content, "train_micro_batch_size_per_gpu": 2}))
    with pytest.raises(ConfigError, match=r"has train_micro_batch_size_per_gpu 2, and the recipe .*=4 x .* write"):
        read(folder, fork_server, path)


def test_the_environment_of_torchrun_counts_and_starts_no_process_group(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    path = tiny.write_recipe(
        folder, tiny_model, per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=4
    )
    server = ForkServer(folder / "server")
    try:
        found = read(folder, server, path)
    finally:
        server.close()
    assert (found.world_size, found.effective_batch_size) == (2, 4)


def test_a_server_whose_cards_are_not_said_gets_the_fewest_that_divide_the_batch(
    folder: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    path = tiny.write_recipe(
        folder, tiny_model, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
        use_vllm=True, vllm_mode="server",
    )  # fmt: skip
    found = prepare(path, trainer="grpo", device="sim:a100-40gb", folder=folder / "i", server=fork_server,
                    launch=LaunchOptions(gpus=8))  # fmt: skip
    assert (found.launch.server_ranks, found.world_size, found.effective_batch_size) == (4, 4, 8)
    assert any("4 of the 8 cards serve" in note for note in found.notes)


@pytest.mark.parametrize(("cards", "ranks", "at_once"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (4, 4, 1)])
def test_as_many_probes_run_at_once_as_there_are_cards_for_their_ranks(
    cards: int, ranks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "gpus", lambda: ("card",) * cards)
    assert planning._probes_at_once("cuda", ranks) == at_once
    assert planning._probes_at_once("cpu", ranks) == 1


def test_more_ranks_than_cards_is_refused_with_what_keeps_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "gpus", lambda: (WHOLE, WHOLE))
    recipe = with_launch(grpo_recipe(world_size=8), Launch(ranks=8))
    with pytest.raises(ConfigError, match="trains on 8 cards, and this machine has 2; give --gpus 2"):
        reading.check_cards(recipe, "cuda")
    for device in ("cpu", "sim:t4"):
        reading.check_cards(recipe, device)


def test_slices_of_a_card_are_refused_to_several_ranks_and_given_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "gpus", lambda: (SLICE, SLICE))
    of_two = with_launch(grpo_recipe(world_size=2), Launch(ranks=2))
    with pytest.raises(ConfigError, match=r"trains on 2 cards, and on this machine 2 .* MIG slices.* give --gpus 1"):
        reading.check_cards(of_two, "cuda")
    reading.check_cards(of_two, "sim:t4")
    reading.check_cards(grpo_recipe(), "cuda")
    with pytest.raises(ConfigError, match="of a job 1 of its cards is a MIG slice"):
        check_count((WHOLE, WHOLE, SLICE), 2)
    monkeypatch.setattr(place, "gpus", lambda: (SLICE, SLICE))
    with pytest.raises(ConfigError, match=r"the run trains on 2 cards, and on this machine 2 .* are MIG slices"):
        place.check_ranks(Launch(ranks=2), "cuda")
    place.check_ranks(Launch(), "cuda")


@pytest.mark.parametrize(
    ("gpu", "gpus", "name", "cards"),
    [("8xa100-80gb", None, "a100-80gb", 8), ("2xrtx4090", 2, "rtx4090", 2), ("t4", 4, "t4", 4), (None, 2, None, 2)],
)
def test_the_name_of_a_card_may_say_how_many(
    gpu: str | None, gpus: int | None, name: str | None, cards: int | None
) -> None:
    found, options = launch_options(gpu=gpu, accelerate_config=None, num_processes=None, gpus=gpus)
    assert (found, options.gpus, options.machines) == (name, cards, None)


def test_the_name_of_a_card_may_say_how_many_machines_of_how_many() -> None:
    found, options = launch_options(gpu="8 x h100", accelerate_config=None, num_processes=None, gpus=None)
    assert (found, options.gpus) == ("h100", 8)  # as answers have it
    with pytest.raises(ConfigError, match="--gpu 0xh100 must name 1 card or more"):
        launch_options(gpu="0xh100", accelerate_config=None, num_processes=None, gpus=None)
    found, options = launch_options(gpu="4x8xh100", accelerate_config=None, num_processes=None, gpus=None)
    assert (found, options.gpus, options.machines) == ("h100", 32, 4)
    with pytest.raises(ConfigError, match="--gpu 4x8xh100 says 32 cards, and --gpus 8"):
        launch_options(gpu="4x8xh100", accelerate_config=None, num_processes=None, gpus=8)


@pytest.mark.parametrize(
    ("ranks", "asked", "device", "machines"),
    [
        (8, None, "sim:h100", 1), (64, None, "sim:h100", 8), (12, None, "sim:h100", 1), (64, None, "cuda", 1),
        (16, 4, "sim:h100", 4), (8, 2, "sim:h100", 2),
    ],
)  # fmt: skip
def test_many_simulated_ranks_are_on_machines_of_eight_unless_more_is_said(
    ranks: int, asked: int | None, device: str, machines: int
) -> None:
    recipe = with_launch(grpo_recipe(world_size=ranks), Launch(ranks=ranks))
    assert on_machines(recipe, asked, device).launch.machines == machines
    said = with_launch(recipe, Launch(ranks=ranks, machines=2))
    assert on_machines(said, None, device).launch.machines == 2
