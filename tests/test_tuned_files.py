"""The files of a tuned recipe for several ranks are taken by accelerate's launcher and by TRL, as they are."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tiny
import yaml

from autofit.errors import ConfigError
from autofit.plugin.ranks import rank_environment
from autofit.promotion.place import Tuned, check_ranks
from autofit.promotion.promotion import _of_made_up, _spelling
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch import THREADS, Launch
from autofit.recipe.launching import launched
from autofit.tracking.runs import with_launch
from autofit.tuning.record import StudyRecord

LAUNCHES = [
    Launch(ranks=2), Launch(ranks=4, sharding="fsdp2", offload="parameters"),
    Launch(ranks=2, sharding="fsdp1", reshard_after_forward=False), Launch(ranks=2, sharding="zero2"),
    Launch(ranks=8, sharding="zero3", offload="parameters"),
]  # fmt: skip


def tuned(path: Path, launch: Launch, **more: str) -> Tuned:
    values = {**yaml.safe_load(path.read_text()), LAUNCH: launch.to_values()}
    return Tuned(values=values, comment="autofit: trial 3", command="trl sft --config", **more)


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    return tiny.write_offline_recipe("sft", tmp_path, tiny_model, max_steps=2)


def test_a_flag_that_an_accelerate_config_has_no_place_for_stays_in_the_yaml(recipe: Path, tmp_path: Path) -> None:
    launch = launched({THREADS: 8, "num_processes": 2, "multi_gpu": True}).launch
    assert rank_environment(launch, rank=0, port=29500, device="cuda")["WORLD_SIZE"] == "2"  # accelerate takes it
    for one in (launch, Launch(config={THREADS: 8})):
        out, *others = tuned(recipe, one).write(tmp_path / "best.yaml")
        assert yaml.safe_load(out.read_text())[THREADS] == 8
        assert all(THREADS not in path.read_text() for path in others)
    assert launched(yaml.safe_load(out.read_text())).launch.config[THREADS] == 8


def test_a_recipe_of_one_rank_is_one_file_as_before(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "own.yaml"
    found = tuned(recipe, Launch())
    assert found.write(out) == (out,)
    assert out.read_text().startswith("# autofit: trial 3\n# run it with: trl sft --config THIS_FILE\n")
    assert yaml.safe_load(out.read_text()) == yaml.safe_load(recipe.read_text())
    assert found.command_line((out,)) == f"trl sft --config {out}"


@pytest.mark.parametrize("launch", LAUNCHES, ids=[f"{one.ranks} {one.sharding} {one.offload}" for one in LAUNCHES])
def test_accelerate_and_trl_take_the_files(
    recipe: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    out = tmp_path / "best.yaml"
    found = tuned(recipe, launch)
    written = found.write(out)
    assert written == (out, tmp_path / "best.accelerate.yaml")
    assert "--config best.yaml --accelerate_config best.accelerate.yaml" in out.read_text()
    assert found.command_line(written) == f"trl sft --config {out} --accelerate_config {written[1]}"
    config = load_config_from_file(str(written[1]))
    assert config.num_processes == launch.ranks
    for name in ("ACCELERATE_USE_CPU", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    args, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(written[1]), "x.py"])
    )
    assert args.num_processes == launch.ranks
    assert args.use_fsdp is launch.sharding.startswith("fsdp")
    assert args.use_deepspeed is launch.sharding.startswith("zero")
    assert args.multi_gpu is (launch.sharding == "ddp")
    assert Launch.of_accelerate(yaml.safe_load(written[1].read_text()), what="it").sharding == launch.sharding
    parsed = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config(["--config", str(out)])
    assert parsed[1].max_steps == 2


def test_the_place_of_the_accelerate_config_can_be_told(recipe: Path, tmp_path: Path) -> None:
    written = tuned(recipe, Launch(ranks=2), remark="add a dataset").write(
        tmp_path / "tuned.yaml", accelerate=tmp_path / "accelerate.yaml"
    )
    assert [path.name for path in written] == ["tuned.yaml", "accelerate.yaml"]
    text = (tmp_path / "tuned.yaml").read_text()
    assert "# run it with: trl sft --config tuned.yaml --accelerate_config accelerate.yaml\n# add a dataset\n" in text


@pytest.mark.slow
def test_torchrun_trains_the_tuned_yaml_on_two_ranks(recipe: Path, tmp_path: Path) -> None:
    """Until the model is saved: with torch 2.13 a script that leaves its gloo group to the interpreter's end, as TRL's
    do, may wait there for a thread of the group for ever."""
    out, model = tmp_path / "best.yaml", tmp_path / "model"
    tuned(recipe, Launch(ranks=2)).write(out)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trl.scripts.sft"]
    with (tmp_path / "log").open("wb") as log:
        ranks = subprocess.Popen(
            [*command, "--config", str(out), "--use_cpu", "true", "--output_dir", str(model)], cwd=tmp_path,
            env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
        )  # fmt: skip
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 300
        while not (model / "adapter_model.safetensors").exists():
            started = psutil.Process(ranks.pid).children(recursive=True) or started
            assert ranks.poll() in (None, 0), (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        ranks.kill()
        ranks.wait()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_mlflow_has_the_parts_of_a_launch() -> None:
    launch = Launch(ranks=2, sharding="fsdp2")
    found = with_launch({"seed": 1, LAUNCH: launch.to_values(), "launch.offload": "parameters"})
    assert (found["launch.ranks"], found["launch.sharding"], found["seed"]) == (2, "fsdp2", 1)
    assert found["launch.offload"] == "parameters"  # the knob of a trial is above the recipe's own
    assert LAUNCH not in found
    assert with_launch({"seed": 1}) == {"seed": 1}


@pytest.mark.parametrize(
    ("launch", "device", "words"),
    [
        (Launch(ranks=4, machines=2), "cuda", "on 2 machines, and autofit starts it on one"),
        (Launch(ranks=2, sharding="zero2"), "cpu", "with ddp or fsdp2, and the run has zero2"),
        (Launch(ranks=99), "cuda", "on 99 cards, and this machine has"),
    ],
)
def test_ranks_that_this_machine_cannot_start_are_refused(launch: Launch, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_ranks(launch, device)
    assert "--write-only" in str(refused.value)
    assert len(str(refused.value)) <= 300
    check_ranks(Launch(ranks=2, sharding="fsdp2"), "cpu")


def test_a_tuned_recipe_of_an_older_trl_names_the_keys_that_are_called_otherwise() -> None:
    record = StudyRecord(spelling="in the keys of TRL 1.16.0, with your torch_dtype as dtype", values={"dtype": "auto"})
    changes = {"activation_checkpointing_kwargs.offload": True, "activation_checkpointing": True, "dtype": "bfloat16"}
    said = _spelling(record, changes)
    assert said == (
        "written in the keys of TRL 1.16.0, with your torch_dtype as dtype, activation_checkpointing_kwargs was "
        "gradient_checkpointing_kwargs, activation_checkpointing was gradient_checkpointing: an older TRL needs the "
        "older names"
    )
    assert not _spelling(StudyRecord(), changes)


@pytest.mark.parametrize(("rollout", "rewards"), [(None, False), ("steps_per_generation", True)])
def test_only_a_recipe_that_generates_is_asked_for_rewards_beside_its_data(rollout: str | None, rewards: bool) -> None:
    assert ("reward_funcs" in _of_made_up(StudyRecord(keys=BatchKeys(rollout=rollout)))) is rewards
