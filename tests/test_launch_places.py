"""The place of a finding is the user's own: the file and the key as it was written."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from autofit.recipe.launch_keys import place

FSDP2: Mapping[str, object] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
VERSION, STAGE, DEVICE = "fsdp_config.fsdp_version", "deepspeed_config.zero_stage", "offload_param_device"


def found(path: str, values: Mapping[str, object], config: Mapping[str, object] | None = None) -> str:
    name = "fsdp2.yaml" if config else "run.yaml (launch)"
    return place(path, values, file="run.yaml", config=config or {}, config_name=name)


@pytest.mark.parametrize(
    ("path", "values", "config", "told"),
    [
        (VERSION, {}, FSDP2, "fsdp2.yaml: fsdp_config.fsdp_version"),
        (VERSION, {"fsdp_version": 1}, FSDP2, "run.yaml: fsdp_version"),
        (VERSION, {"fsdp": True, "fsdp_config": {"version": 2}}, None, "run.yaml: fsdp_config.version"),
        (VERSION, {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}, None, "run.yaml: fsdp_config.fsdp_version"),
        (VERSION, {"fsdp": True}, None, "run.yaml: fsdp_config.version"),
        (VERSION, {"fsdp": True}, FSDP2, "fsdp2.yaml: fsdp_config.fsdp_version"),
        (VERSION, {"launch": {"sharding": "fsdp2"}}, None, "run.yaml: launch.sharding"),
        ("fsdp_config.fsdp_offload_params", {"fsdp": "full_shard offload"}, None, "run.yaml: fsdp"),
        ("fsdp_config.fsdp_offload_params", {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, None,
         "run.yaml: fsdp_config.cpu_offload"),
        ("distributed_type", {"fsdp": True}, None, "run.yaml: fsdp"),
        ("distributed_type", {"use_fsdp": True}, None, "run.yaml: use_fsdp"),
        ("num_processes", {"num_processes": 8}, FSDP2, "run.yaml: num_processes"),
        (STAGE, {"deepspeed": "ds.json"}, None, "ds.json: zero_optimization.stage"),
        (STAGE, {"deepspeed": {"zero_optimization": {"stage": 2}}}, None,
         "run.yaml: deepspeed.zero_optimization.stage"),
        (f"deepspeed_config.{DEVICE}", {}, {"deepspeed_config": {"deepspeed_config_file": "ds.json"}},
         "ds.json: zero_optimization.offload_param.device"),
        (STAGE, {}, None, "run.yaml (launch): deepspeed_config.zero_stage"),
        # the trainer's own key in the recipe, and another of that name in the accelerate config
        ("deepspeed_config.gradient_accumulation_steps", {"gradient_accumulation_steps": 8},
         {"deepspeed_config": {"gradient_accumulation_steps": 4}},
         "fsdp2.yaml: deepspeed_config.gradient_accumulation_steps"),
    ],
)  # fmt: skip
def test_each_way_of_saying_a_key_is_named(
    path: str, values: Mapping[str, object], config: Mapping[str, object] | None, told: str
) -> None:
    assert found(path, values, config) == told


def test_a_key_in_a_json_file_of_fsdp_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text('{"version": 1}')
    values = {"fsdp": True, "fsdp_config": str(path)}
    assert found(VERSION, values) == f"{path}: version"
    assert found("fsdp_config.fsdp_cpu_ram_efficient_loading", values) == f"{path}: cpu_ram_efficient_loading"
