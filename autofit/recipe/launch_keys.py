"""The keys of a training's launch: accelerate's, and transformers' own. Free of torch.

The tables are of accelerate 1.15, whose own parser and plugins judge them in `tests/test_launching.py`. What is not in
them accelerate refuses late and in other words (KeyError: 'BOGUS'), or takes for something else: its launcher
(commands/launch.py, utils/launch.py) makes text of the values, and FullyShardedDataParallelPlugin and DeepSpeedPlugin
(utils/dataclasses.py) read that text when the training starts. DeepSpeed checks devices, when its engine is made.

transformers' keys are `fsdp`, `fsdp_config` and `deepspeed` of TrainingArguments (transformers 5.23:
`_process_fsdp_args`, `_apply_legacy_fsdp_to_config`, `HfTrainerDeepSpeedConfig`).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, nearest, quoted
from autofit.files import regular_bytes
from autofit.recipe.keys import LAUNCH
from autofit.recipe.yaml_file import may_read

DEEPSPEED_JSON = "deepspeed_json"  # key of deepspeed_config: the content of the user's DeepSpeed JSON file

CONFIG_KEYS = (  # of a file: ClusterConfig; process_config takes fp16 and dynamo_backend too; ipex_config is older
    "command_file", "commands", "compute_environment", "debug", "deepspeed_config", "distributed_type", "downcast_bf16",
    "dynamo_backend", "dynamo_config", "enable_cpu_affinity", "fp16", "fp8_config", "fsdp_config", "gpu_ids",
    "ipex_config",
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "megatron_lm_config",
    "mixed_precision", "mpirun_config", "num_machines", "num_processes", "parallelism_config", "rdzv_backend",
    "same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu",
)  # fmt: skip
TYPES = {"multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}  # flags of `accelerate launch`
REFUSED = ("tpu", "use_megatron_lm", "use_parallelism_config", "parallelism_config", "megatron_lm_config")
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

_LAUNCH = {  # the key of `launch` that says the same
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
    """Raise ConfigError for values that accelerate would refuse; `place` gives the place where the user set a key."""
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


def place(
    path: str, values: Mapping[str, object], *, config: Mapping[str, object], config_name: str,
    file: str = "the recipe",
) -> str:  # fmt: skip
    """File and key, for error messages, at which accelerate's key `path` is set, or can be set.

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


_MOST_BYTES = 128 * 1024
_STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
_LEGACY = (*_STRATEGIES, "offload", "auto_wrap")
# Key of `fsdp_config`, without the prefix fsdp_ that it may have -> key of accelerate's `fsdp_config`.
_NOT_TRANSFORMERS = ("fsdp_offload_params", "fsdp_sharding_strategy", "fsdp_activation_checkpointing_offload")
_FSDP_KEYS = {name.removeprefix("fsdp_"): name for name in FLAGS["fsdp_config"] if name not in _NOT_TRANSFORMERS} | {
    "cpu_offload": "fsdp_offload_params"
}
# accelerate has none of these; transformers (training_args.py, line 2830) reads cpu_offload alone
_UNSEEN = ("limit_all_gathers", "offload_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
# Where accelerate has another default than transformers, transformers passes its own.
_USUAL: dict[str, object] = {
    "cpu_ram_efficient_loading": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "state_dict_type": "FULL_STATE_DICT",
}  # fmt: skip


def fsdp_config(fsdp: object, given: object) -> dict[str, object] | None:
    """accelerate's `fsdp_config` of the recipe's keys `fsdp` and `fsdp_config`, if they turn FSDP on."""
    words = _words(fsdp)
    if words is None:
        return None
    config = {key.removeprefix("fsdp_"): value for key, value in _json_mapping(given, "fsdp_config").items()}
    unknown = [key for key in config if key not in _FSDP_KEYS and key not in _UNSEEN]
    if unknown:
        raise ConfigError(f"unknown key {quoted(unknown[0])} in fsdp_config{nearest(unknown[0], _FSDP_KEYS)}")
    if config.get("xla"):
        raise ConfigError("fsdp_config: xla is for TPUs, which autofit does not know; omit it")
    version = _version(config.get("version", 2))
    for word in words:
        if word == "offload":
            config.setdefault("cpu_offload", True)
        elif word in _STRATEGIES:
            config.setdefault("reshard_after_forward", _reshard(word, version))
    if not config.get("cpu_offload"):
        config.pop("cpu_offload", None)  # false is not passed on, so that an accelerate config still counts
    config = {**_USUAL, **({"reshard_after_forward": True} if version == 2 else {}), **config}
    if config["auto_wrap_policy"] not in WRAP_POLICIES:
        raise ConfigError(
            f"fsdp_config: auto_wrap_policy must be {', '.join(WRAP_POLICIES[:2])} or {WRAP_POLICIES[2]}, in capitals; "
            f"got {quoted(config['auto_wrap_policy'])}"
        )
    named = {_FSDP_KEYS[key]: value for key, value in config.items() if key in _FSDP_KEYS}
    classes = named.get("fsdp_transformer_layer_cls_to_wrap")
    if isinstance(classes, list):
        named["fsdp_transformer_layer_cls_to_wrap"] = ",".join(map(str, classes))
    reshard = str(named.get("fsdp_reshard_after_forward", "full_shard")).lower()
    if version == 1 and reshard not in _STRATEGIES:  # accelerate: KeyError
        raise ConfigError(
            f"fsdp_config: reshard_after_forward must be one of {', '.join(_STRATEGIES)} with version: 1; got "
            f"{quoted(named['fsdp_reshard_after_forward'])}"
        )
    return {**named, "fsdp_version": version}


def fsdp_place(values: Mapping[str, object], key: str, file: str, known: bool) -> str | None:
    """Place at which `fsdp` and `fsdp_config` of the recipe in `file` set accelerate's `key`, if they do.

    They could say any key unless it is `known` from an accelerate config.
    """
    words = _words(values.get("fsdp"))
    if words is None:
        return None
    given = values.get("fsdp_config")
    base = f"{given}: " if isinstance(given, str) and not given.lstrip().startswith("{") else f"{file}: fsdp_config."
    names = {name for name, known_as in _FSDP_KEYS.items() if known_as == key}
    written = [name for name in _json_mapping(given, "fsdp_config") if name.removeprefix("fsdp_") in names]
    if written:
        return base + written[0]
    option = {"fsdp_offload_params": ("offload",), "fsdp_reshard_after_forward": _STRATEGIES}.get(key, ())
    if set(words) & set(option):
        return f"{file}: fsdp"
    own = key.removeprefix("fsdp_")
    return base + own if names and (own in _USUAL or not known) else None


def ignored_keys(given: object) -> list[str]:
    """Keys of `fsdp_config` that transformers ignores, though they name an ability of it."""
    return [name for name in _json_mapping(given, "fsdp_config") if name.removeprefix("fsdp_") == "offload_params"]


def _words(fsdp: object) -> list[str] | None:
    """The options that `fsdp` lists, if it is given; [] for true."""
    if fsdp is None or fsdp is False or (isinstance(fsdp, str | list) and not fsdp):
        return None
    if fsdp is True:
        return []
    words = fsdp.split() if isinstance(fsdp, str) else fsdp
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"fsdp must be true, false or options such as full_shard offload; got {quoted(fsdp)}")
    words = [word.lower() for word in words]
    if words in (["true"], ["false"]):
        return [] if words == ["true"] else None
    wrong = [word for word in words if word not in _LEGACY]
    if wrong:
        raise ConfigError(f"fsdp must be true or list {', '.join(_LEGACY)}; got {quoted(wrong[0])}")
    return words


def _reshard(word: str, version: int) -> object:
    if version == 1:
        return word
    if word not in ("full_shard", "shard_grad_op"):
        raise ConfigError(f"fsdp: {word} is an option of FSDP1; choose full_shard, or set version: 1 in fsdp_config")
    return word == "full_shard"


def _version(given: object) -> int:
    if str(given) not in ("1", "2"):
        raise ConfigError(f"fsdp_config: version must be 1 or 2; got {quoted(given)}")
    return int(str(given))


def deepspeed_config(given: object) -> dict[str, object] | None:
    """accelerate's `deepspeed_config` of the recipe's key `deepspeed`, a file or a mapping, if it is given.

    The JSON itself is under DEEPSPEED_JSON.
    """
    if given is None or given is False or given == "":
        return None
    return deepspeed_fields(_json_mapping(given, "deepspeed"))


def deepspeed_fields(content: Mapping[str, object]) -> dict[str, object]:
    """{field of accelerate's `deepspeed_config`: value} of a DeepSpeed JSON, and the JSON under DEEPSPEED_JSON."""
    zero = _inner(content, "zero_optimization")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"deepspeed: zero_optimization.stage must be 0, 1, 2 or 3; got {quoted(stage)}")
    moved = {key: _inner(zero, key).get("device", "none") for key in ("offload_optimizer", "offload_param")}
    if zero.get("cpu_offload") is True:  # the older name
        moved["offload_optimizer"] = "cpu"
    fields = {f"{key}_device": device for key, device in moved.items()}
    return {"zero_stage": stage, **fields, DEEPSPEED_JSON: dict(content)}


def _inner(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"deepspeed: {key} must be a mapping; got {quoted(value)}")
    return cast("Mapping[str, object]", value)


def _json_mapping(given: object, key: str) -> dict[str, object]:
    """The mapping that `key` has: itself, JSON text, or in a JSON file."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    if not isinstance(given, str):
        raise ConfigError(f"{key} must be a mapping or the path of a JSON file; got {quoted(given)}")
    text = given if given.lstrip().startswith("{") else _file_text(given, key)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {quoted(given)} is not valid JSON: {str(error)[:80]}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: {quoted(given)} must hold a JSON object")
    return found


def read_deepspeed_file(path: str) -> dict[str, object]:
    """The content of a DeepSpeed JSON file. Raises ConfigError."""
    return _json_mapping(path, "deepspeed_config_file")


def _file_text(given: str, key: str) -> str:
    path = Path(given)
    if not may_read(path) or not os.path.isfile(path):
        raise ConfigError(f"{key} must be a mapping or the path of a JSON file; there is no file {quoted(given)}")
    try:
        return regular_bytes(path, most=_MOST_BYTES, what="a JSON file")[0].decode()
    except ConfigError as error:
        raise ConfigError(f"{key}: {quoted(given)} {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {quoted(given)} cannot be read: {str(error)[:80]}") from error
