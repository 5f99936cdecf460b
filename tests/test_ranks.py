"""The environment of ranks, and what runs on them: real gloo ranks on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autofit.errors import ConfigError
from autofit.plugin.ranks import rank_environment, threads_per_rank
from autofit.probing.supervise import free_port
from autofit.recipe.launch import Launch

_SCRIPT = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(dict(os.environ)))
"""
_OF_A_LAUNCH = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["fsdp2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ddp", "fsdp1"))]
)
def test_a_rank_has_the_environment_that_accelerate_launch_gives_it(sharding: str, tmp_path: Path) -> None:
    launch = Launch(ranks=2, sharding=sharding, config={"mixed_precision": "bf16"})  # type: ignore[arg-type]
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch.to_accelerate()))
    (tmp_path / "script.py").write_text(_SCRIPT)
    port = free_port()
    subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml"),
         "--main_process_port", str(port), str(tmp_path / "script.py"), str(tmp_path)],
        check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    for rank in range(2):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        ours = rank_environment(launch, rank=rank, port=port, device="cuda")
        assert {key: value for key, value in theirs.items() if key.startswith(_OF_A_LAUNCH)} == {
            key: value for key, value in ours.items() if key.startswith(_OF_A_LAUNCH)
        }
        assert ours["OMP_NUM_THREADS"] == "1"


def test_the_environment_depends_on_no_earlier_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("RANK", "7")
    plain = rank_environment(Launch(ranks=2), rank=1, port=29600, device="cuda")
    assert not {key for key in plain if "FSDP" in key}
    assert plain["RANK"] == "1"
    sharded = rank_environment(Launch(ranks=2, sharding="fsdp2"), rank=0, port=29600, device="cuda")
    assert sharded["FSDP_VERSION"] == "2"
    assert os.environ["RANK"] == "7"


def test_ranks_on_the_cpu_share_the_cores_and_look_for_no_card() -> None:
    made = rank_environment(Launch(ranks=2), rank=0, port=29600, device="cpu")
    assert made["ACCELERATE_USE_CPU"] == "true"
    assert int(made["OMP_NUM_THREADS"]) == threads_per_rank(Launch(ranks=2)) >= 1
    assert threads_per_rank(Launch(ranks=4096)) == 1


def test_zero_is_configured_as_accelerate_does_it() -> None:
    made = rank_environment(Launch(ranks=2, sharding="zero3", offload="optimizer"), rank=0, port=29600, device="cuda")
    assert made["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert made["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"


def test_a_rank_outside_of_the_launch_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank must be from 0 to 1; got 2"):
        rank_environment(Launch(ranks=2), rank=2, port=29600, device="cpu")


def test_a_launch_that_accelerate_refuses_is_one_error() -> None:
    launch = Launch(ranks=2, config={"mixed_precision": "int3"})
    with pytest.raises(ConfigError, match=r"accelerate does not take this launch: .*int3"):
        rank_environment(launch, rank=0, port=29600, device="cpu")
