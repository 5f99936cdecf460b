"""Values of an accelerate config: what accelerate refuses is one line with the place and the values that work."""

import os
from pathlib import Path
from unittest import mock

import pytest
import yaml

from autofit.errors import ConfigError
from autofit.recipe.launch_keys import CONFIG_KEYS
from autofit.recipe.launching import LaunchOptions, launched
from autofit.recipe.profile import profile

TRANSFORMER, SIZE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"


def read(folder: Path, **config: object) -> None:
    path = folder / "a.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, **config}))
    launched({}, LaunchOptions(accelerate_config=str(path)), environment={})


FSDP = [
    # (keys of fsdp_config, the key that is refused; none)
    ({"fsdp_state_dict_type": "BOGUS"}, "fsdp_state_dict_type"),
    ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "fsdp_state_dict_type"),
    ({"fsdp_state_dict_type": "LOCAL_STATE_DICT", "fsdp_version": 1}, None),
    ({"fsdp_state_dict_type": "sharded_state_dict"}, None),
    ({"fsdp_state_dict_type": 1}, None),
    ({"fsdp_state_dict_type": 4, "fsdp_version": 1}, "fsdp_state_dict_type"),
    ({"fsdp_state_dict_type": None}, None),
    ({"fsdp_auto_wrap_policy": "NONSENSE"}, "fsdp_auto_wrap_policy"),
    ({"fsdp_auto_wrap_policy": None}, None),
    ({"fsdp_backward_prefetch": "X"}, "fsdp_backward_prefetch"),
    ({"fsdp_backward_prefetch": "no_prefetch"}, None),
    ({"fsdp_offload_params": "maybe"}, "fsdp_offload_params"),
    ({"fsdp_offload_params": None}, "fsdp_offload_params"),
    ({"fsdp_offload_params": "on"}, None),
    ({"fsdp_cpu_ram_efficient_loading": 2}, "fsdp_cpu_ram_efficient_loading"),
    ({"fsdp_activation_checkpointing": "x"}, "fsdp_activation_checkpointing"),
    ({"fsdp_use_orig_params": "x"}, None),  # FSDP2 does not look at it
    ({"fsdp_use_orig_params": "x", "fsdp_version": 1}, "fsdp_use_orig_params"),
    ({"fsdp_forward_prefetch": "x", "fsdp_version": 1}, "fsdp_forward_prefetch"),
    ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp_reshard_after_forward"),
    ({"fsdp_reshard_after_forward": "x", "fsdp_version": 1}, None),
    ({"fsdp_sharding_strategy": "FULL_SHRAD", "fsdp_version": 1}, "fsdp_sharding_strategy"),
    ({"fsdp_sharding_strategy": True, "fsdp_version": 1}, "fsdp_sharding_strategy"),
    ({"fsdp_sharding_strategy": 2, "fsdp_version": 1}, None),
    ({"fsdp_auto_wrap_policy": SIZE, "fsdp_min_num_params": "1e8"}, "fsdp_min_num_params"),
    ({"fsdp_auto_wrap_policy": TRANSFORMER, "fsdp_min_num_params": "1e8"}, None),
]


@pytest.mark.parametrize(("keys", "refused"), FSDP)
def test_what_accelerate_refuses_of_fsdp_is_refused_and_nothing_else(
    keys: dict[str, object], refused: str | None, tmp_path: Path
) -> None:
    given = {"fsdp_version": 2, **keys}
    assert accelerate_refuses(given, tmp_path) == (refused is not None)
    if refused is None:
        read(tmp_path, fsdp_config=given)
        return
    with pytest.raises(ConfigError, match=rf"a\.yaml: fsdp_config\.{refused} must be .*; got ") as raised:
        read(tmp_path, fsdp_config=given)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 300


def accelerate_refuses(keys: dict[str, object], folder: Path) -> bool:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": keys}))
    with mock.patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True):
        args, _, _ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", str(path), "--main_process_port", "1", "train.py"])
        )
        os.environ.update(prepare_multi_gpu_env(args))
        try:
            with (  # the rank that sends the weights asks for its card
                mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
                mock.patch("torch.cuda.current_device", return_value=0),
            ):
                FullyShardedDataParallelPlugin()
        except (ValueError, KeyError):
            return True
    return False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mixed_precision": "bf17"}, "mixed_precision must be no, fp8, fp16 or bf16; got 'bf17'; the .* 'bf16"),
        ({"mixed_precision": False}, "got False; YAML reads no as false: write 'no', in quotes"),
        ({"gpu_ids": 0}, "gpu_ids must be text; got 0"),
        ({"gradient_accumulation_steps": 4}, r"a\.yaml: unknown key 'gradient_accumulation_steps'; .* in the recipe"),
        ({"num_procesess": 4}, "the nearest valid one is 'num_processes'"),
        ({"main_process_port": "abc"}, "main_process_port must be a whole number; got 'abc'"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment must be LOCAL_MACHINE"),
        ({"use_cpu": "maybe"}, "use_cpu must be true or false; got 'maybe'"),
        ({"fsdp_config": {"fsdp_version": 3}}, "fsdp_config.fsdp_version must be 1 or 2; got 3"),
        ({"fsdp_config": {"fsdp_state_dict_type": "FULL_STATE"}}, "the nearest valid one is 'FULL_STATE_DICT'"),
        ({"fsdp_config": {"fsdp_auto_wrap_policy": TRANSFORMER, "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}},
         "fsdp_transformer_layer_cls_to_wrap must be text"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "moon"}},
         "offload_optimizer_device must be none, cpu or nvme; got 'moon'"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_save_16bit_model": "on"}}, "true or false"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_clipping": "x"}}, "a number or .auto."),
        ({"mixed_precision": "x", "gpu_ids": 1}, "mixed_precision must .*; .*gpu_ids must"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_one_line_with_what_works(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **config)


def test_every_key_that_accelerate_takes_is_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    assert {*ClusterConfig.__dataclass_fields__} <= {*CONFIG_KEYS}


def test_a_value_in_the_recipe_is_placed_there_and_one_in_a_json_file_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the recipe: mixed_precision must be"):
        launched({"num_processes": 2, "mixed_precision": "bf17"}, environment={})
    with pytest.raises(ConfigError, match=r"the recipe: fsdp_config\.state_dict_type must be"):
        launched({"fsdp": True, "fsdp_config": {"state_dict_type": "X"}}, environment={})
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "moon"}}}')
    with pytest.raises(ConfigError, match=r"ds\.json: zero_optimization\.offload_param\.device must be none, cpu or"):
        read(tmp_path, distributed_type="DEEPSPEED",
             deepspeed_config={"deepspeed_config_file": str(tmp_path / "ds.json")})  # fmt: skip


def test_sections_of_another_type_and_empty_values_are_nobodys_business(tmp_path: Path) -> None:
    read(tmp_path, distributed_type="MULTI_GPU", fsdp_config={"fsdp_state_dict_type": "X"}, mixed_precision=None)
    read(tmp_path, distributed_type="DEEPSPEED",
         deepspeed_config={"zero_stage": None, "offload_optimizer_device": None})  # fmt: skip
    nothing = {"offload_param_device": None, "zero_stage": 3}
    path = tmp_path / "zero.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": nothing}))
    assert launched({}, LaunchOptions(accelerate_config=str(path)), environment={}).launch.offload == "none"


def test_a_type_of_no_without_quotes_is_no_and_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: NO\nnum_processes: 1\n")
    assert launched({}, LaunchOptions(accelerate_config=str(path)), environment={}).launch.is_plain
    path.write_text("num_processes: 1\n")
    with pytest.raises(ConfigError, match="distributed_type is missing"):
        launched({}, LaunchOptions(accelerate_config=str(path)), environment={})


def test_other_trainers_have_their_own_values() -> None:
    launched({"mixed_precision": "bf17"}, of=profile("verl"), environment={})


def test_an_accelerate_config_beside_another_trainer_is_checked_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "x"}))
    with pytest.raises(ConfigError, match=r"a\.yaml: mixed_precision must be"):
        launched(
            {"mixed_precision": "x"}, LaunchOptions(accelerate_config=str(path)), of=profile("verl"), environment={}
        )
