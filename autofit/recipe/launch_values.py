"""Keys and values of an accelerate config that accelerate 1.15 takes. No torch here.

Everything else it refuses late and in other words (KeyError: 'BOGUS'), or takes for something else: its launcher
(commands/launch.py, utils/launch.py) makes text of the values, and FullyShardedDataParallelPlugin and DeepSpeedPlugin
(utils/dataclasses.py) read that text when the training starts. DeepSpeed checks devices, when its engine is made.
"""

from collections.abc import Callable, Iterator, Mapping

from autofit.errors import ConfigError, nearest, quoted

# Flags of `accelerate launch` with a value, which TRL passes on from the YAML: {section of an accelerate config: names}
FLAGS: dict[str, tuple[str, ...]] = {
    "": ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision",
         "gpu_ids", "rdzv_backend", "num_cpu_threads_per_process", "main_training_function"),
    "fsdp_config": (
        "fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy",
        "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params",
        "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing",
        "fsdp_activation_checkpointing_offload",
    ),
    "deepspeed_config": (
        "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
        "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_clipping", "zero3_init_flag",
        "zero3_save_16bit_model", "deepspeed_hostfile", "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    ),
}  # fmt: skip
# Keys of an accelerate config (1.15: ClusterConfig, process_config; ipex_config of older ones): it refuses any other.
CONFIG_KEYS = (
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "ipex_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
    "dynamo_backend", "fp16",
)  # fmt: skip
SECTION_KEYS = {  # with the keys that are no flags, or flags that the recipe has for itself
    "fsdp_config": (*FLAGS["fsdp_config"], "fsdp_ignored_modules"),
    "deepspeed_config": (*FLAGS["deepspeed_config"], "gradient_accumulation_steps"),
}
NOT_BESIDE_JSON = (  # DeepSpeedPlugin._deepspeed_config_checks, which refuses mixed_precision too
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")

_Words = tuple[str, ...]
_SWITCH: _Words = ("true", "false", "1", "0", "yes", "no", "on", "off", "y", "n", "t", "f")  # str_to_bool
_TEXT: _Words = ("text",)
_WHOLE: _Words = ("a whole number",)
_NUMBER: _Words = ("a number", '"auto"')
_DEVICE: _Words = ("none", "cpu", "nvme")
_ALWAYS: dict[str, _Words] = {
    "mixed_precision": ("no", "fp8", "fp16", "bf16"), "gpu_ids": _TEXT, "main_process_port": _WHOLE,
    "compute_environment": ("LOCAL_MACHINE",),
    "use_cpu": _SWITCH, "debug": _SWITCH, "same_network": _SWITCH, "enable_cpu_affinity": _SWITCH,
}  # fmt: skip
_FSDP: dict[str, _Words] = {
    "fsdp_version": ("1", "2"),
    "fsdp_auto_wrap_policy": WRAP_POLICIES,
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_offload_params": _SWITCH, "fsdp_cpu_ram_efficient_loading": _SWITCH,
    "fsdp_activation_checkpointing": _SWITCH, "fsdp_activation_checkpointing_offload": _SWITCH,
}  # fmt: skip
_OF_VERSION: dict[str, dict[str, _Words]] = {  # what the other version does not look at
    "1": {"fsdp_sharding_strategy": SHARDING_STRATEGIES, "fsdp_state_dict_type": STATE_DICT_TYPES,
          "fsdp_forward_prefetch": _SWITCH, "fsdp_use_orig_params": _SWITCH, "fsdp_sync_module_states": _SWITCH},
    "2": {"fsdp_reshard_after_forward": _SWITCH, "fsdp_state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT")},
}  # fmt: skip
_OF_POLICY: dict[str, dict[str, _Words]] = {
    "TRANSFORMER_BASED_WRAP": {"fsdp_transformer_layer_cls_to_wrap": _TEXT},
    "SIZE_BASED_WRAP": {"fsdp_min_num_params": _WHOLE},
}
_ZERO: dict[str, _Words] = {
    "offload_optimizer_device": _DEVICE, "offload_param_device": _DEVICE, "zero3_init_flag": _SWITCH,
    "zero3_save_16bit_model": ("true", "false"), "gradient_clipping": _NUMBER,
}  # fmt: skip
# Empty (null) is left out; any other key of FSDP becomes the text "None", which is refused
_MAY_BE_EMPTY = ("fsdp_auto_wrap_policy", "fsdp_backward_prefetch", "fsdp_state_dict_type",
                 "fsdp_transformer_layer_cls_to_wrap")  # fmt: skip
_NUMBERED = {"fsdp_sharding_strategy": 5, "fsdp_state_dict_type": 3, "fsdp_backward_prefetch": 2}  # torch's enums


def check_values(config: Mapping[str, object], place: Callable[[str], str]) -> None:
    """Raise ConfigError for values that accelerate would not take; `place` says where the user gives a key."""
    wrong = [wrong for wrong in _checked(config) if not _fits(*wrong)]
    told, seen = list[str](), ""
    for path, value, words in wrong:
        file, _, key = place(path).rpartition(": ")
        hint = _hint(value, words) if len(wrong) == 1 else ""
        told.append(f"{key if file == seen else place(path)} must be {_listed(words)}; got {quoted(value)}{hint}")
        seen = file
    if told:
        raise ConfigError("; ".join(told))


def _checked(config: Mapping[str, object]) -> Iterator[tuple[str, object, _Words]]:
    """(place, value, words) of each key that accelerate will look at."""
    tables: dict[str, Mapping[str, _Words]] = {"": _ALWAYS}
    if config.get("distributed_type") == "FSDP" and isinstance(given := config.get("fsdp_config"), Mapping):
        policy = str(given.get("fsdp_auto_wrap_policy")).upper()
        version = str(given.get("fsdp_version", 1))
        tables["fsdp_config"] = _FSDP | _OF_VERSION.get(version, {}) | _OF_POLICY.get(policy, {})
    elif config.get("distributed_type") == "DEEPSPEED":
        tables["deepspeed_config"] = _ZERO
    for section, table in tables.items():
        inner = config.get(section) if section else config
        if isinstance(inner, Mapping):
            yield from (
                (f"{section}.{key}".lstrip("."), inner[key], words) for key, words in table.items() if key in inner
            )


def _fits(path: str, value: object, words: _Words) -> bool:
    key, text = path.rpartition(".")[2], str(value)
    if value is None:
        return key in _MAY_BE_EMPTY or not path.startswith("fsdp_config")
    if words is _TEXT:
        return isinstance(value, str)
    if words is _WHOLE:
        return text.removeprefix("-").isdecimal()
    if words is _NUMBER:
        return value == "auto" or _is_number(text)
    return text.lower() in map(str.lower, words) or (text.isdecimal() and 1 <= int(text) <= _NUMBERED.get(key, 0))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(words: _Words) -> str:
    *first, last = words[:2] if words is _SWITCH else words
    return f"{', '.join(first)} or {last}" if first else last


def _hint(value: object, words: _Words) -> str:
    if value is False and "no" in words:
        return "; YAML reads no as false: write 'no', in quotes"
    return nearest(str(value).upper() if words[0].isupper() else str(value).lower(), words)
