"""Where the user says what a key of an accelerate config says: in it, or in the recipe by another name. No torch."""

from collections.abc import Mapping

from autofit.recipe.launch import LAUNCH
from autofit.recipe.launch_keys import fsdp_place
from autofit.recipe.launch_values import FLAGS

TYPES = {"multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}  # flags of `accelerate launch`
_LAUNCH = {
    "num_processes": "ranks", "num_machines": "machines", "distributed_type": "sharding",
    "fsdp_config.fsdp_version": "sharding", "fsdp_config.fsdp_offload_params": "offload",
    "fsdp_config.fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_config.fsdp_sharding_strategy": "reshard_after_forward", "deepspeed_config.zero_stage": "sharding",
    "deepspeed_config.offload_optimizer_device": "offload", "deepspeed_config.offload_param_device": "offload",
}  # fmt: skip
_JSON = {  # accelerate/utils/dataclasses.py, DeepSpeedPlugin: plugin_to_config_mapping
    "zero_stage": "zero_optimization.stage", "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip


def place(
    path: str, values: Mapping[str, object], *, config: Mapping[str, object], config_name: str,
    file: str = "the recipe",
) -> str:  # fmt: skip
    """Where the user says, or could say, what the key `path` of an accelerate config says.

    `fsdp_config.fsdp_version` may be `run.yaml: fsdp_config.version`. `values` are those of the recipe in `file`,
    `config` is the accelerate config as it stands in the file `config_name`. The last that is read comes first.
    """
    section, _, key = path.rpartition(".")
    given = values.get(LAUNCH)
    if isinstance(given, Mapping) and _LAUNCH.get(path) in given:
        return f"{file}: {LAUNCH}.{_LAUNCH[path]}"
    for name, kind in (("fsdp", "fsdp_config"), ("deepspeed", "deepspeed_config")):
        if path == "distributed_type" and values.get(name):
            return f"{file}: {name}"
        if section == kind and values.get(name):
            known = section in config
            found = fsdp_place(values, key, file, known) if name == "fsdp" else _in_json(values[name], key, file)
            if found is not None:
                return found
    if path == "distributed_type":
        flag = next((name for name in TYPES if values.get(name) is True), "")
    else:  # a key that is no flag, such as gradient_accumulation_steps, is the trainer's own in the recipe
        flag = key if key in FLAGS.get(section, ()) else ""
    if flag in values:
        return f"{file}: {flag}"
    inner = config.get(section)
    if isinstance(inner, Mapping) and key in _JSON and (json_file := inner.get("deepspeed_config_file")):
        return f"{json_file}: {_JSON[key]}"
    return f"{config_name}: {path}"


def _in_json(given: object, key: str, file: str) -> str | None:
    """The place in the DeepSpeed JSON that `deepspeed` is, or names."""
    if key not in _JSON:
        return None
    return f"{given}: {_JSON[key]}" if isinstance(given, str) else f"{file}: deepspeed.{_JSON[key]}"
