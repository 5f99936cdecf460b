"""DeepSpeed and FSDP as other tools' files set them, in the form of an accelerate config. Free of torch."""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.recipe.launch_keys import DEEPSPEED_JSON, deepspeed_fields, fsdp_config, read_deepspeed_file
from autofit.recipe.yaml_file import is_open

_FSDP1_ONLY = ("use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch")
_WITHOUT = (  # keys without effect on what a step holds
    "limit_all_gathers", "final_state_dict_type", "cpu_offload_pin_memory", "mixed_precision_policy",
    "activation_cpu_offload", "mixed_precision",
)  # fmt: skip


class UnreadFileError(ConfigError):
    """A file is named although files are forbidden."""


def zero(given: object, folder: Path, shipped: Mapping[str, Mapping[str, object]] | None = None) -> dict[str, object]:
    """The accelerate config of a DeepSpeed JSON: a mapping, one of the `shipped` by name, or a file near `folder`."""
    if isinstance(given, Mapping):
        content = {str(key): value for key, value in given.items()}
    elif not isinstance(given, str):
        raise ConfigError(f"deepspeed must be a mapping or the path of a JSON file; got {quoted(given)}")
    elif shipped and given in shipped:
        content = dict(shipped[given])
    else:
        content = read_deepspeed_file(
            given if given.lstrip().startswith("{") else str(near(given, folder, otherwise=OTHERWISE))
        )
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed_fields(content)}


def fsdp(given: object, config: Mapping[str, object], version: object = None) -> dict[str, object]:
    """The accelerate config of `fsdp` and `fsdp_config`, whose keys may have the prefix fsdp_."""
    keys = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    keys = {key: value for key, value in keys.items() if key not in _WITHOUT}
    if version is not None:
        keys.setdefault("version", version)
    keys.setdefault("version", 1)
    if "offload_params" in keys:
        keys["cpu_offload"] = keys.pop("offload_params")
    strategy = str(keys.pop("sharding_strategy", "") or "").lower()
    if str(keys["version"]) == "1":
        if strategy and not isinstance(keys.get("reshard_after_forward"), str):
            keys["reshard_after_forward"] = strategy
        if isinstance(keys.get("reshard_after_forward"), bool):
            del keys["reshard_after_forward"]
    else:
        keys = {key: value for key, value in keys.items() if key not in _FSDP1_ONLY}
        if strategy and "reshard_after_forward" not in keys:
            keys["reshard_after_forward"] = strategy == "full_shard"
    found = fsdp_config(given or True, keys)
    if found is None:
        return {}
    if str(keys["version"]) == "1":
        found["fsdp_sharding_strategy"] = str(keys.get("reshard_after_forward") or "full_shard").upper()
    return {"distributed_type": "FSDP", "fsdp_config": found}


def of_accelerate(config: Mapping[str, object]) -> dict[str, object]:
    """Arguments of `transformers.TrainingArguments` that share the model as an accelerate config does; {} for DDP."""
    kind = str(config.get("distributed_type") or "NO").upper()
    inner = config.get("deepspeed_config" if kind == "DEEPSPEED" else "fsdp_config")
    keys = {str(key): value for key, value in inner.items()} if isinstance(inner, Mapping) else {}
    if kind == "FSDP":
        return {"fsdp": "full_shard", "fsdp_config": keys}
    if kind == "DEEPSPEED":
        if (file := keys.get("deepspeed_config_file")) is not None:
            return {"deepspeed": file}
        offloads = {
            part: {"device": keys[f"{part}_device"]}
            for part in ("offload_optimizer", "offload_param")
            if str(keys.get(f"{part}_device") or "none") != "none"
        }
        return {"deepspeed": {"zero_optimization": {"stage": keys.get("zero_stage", 2), **offloads}}}
    if kind not in ("NO", "MULTI_GPU"):
        raise ConfigError(f"distributed_type {quoted(kind)} of the accelerate config is not simulated")
    return {}


OTHERWISE = "leave it out, and choose beside the file how the cards share the model"


def near(given: str, folder: Path, *, otherwise: str = "paste its lines in its place") -> Path:
    """The file that a tool's file names, from the folder where the tool is started: one of those above it.

    Raises ConfigError where there is none; where no file may be named, UnreadFileError with what to do `otherwise`.
    """
    if not is_open():
        raise UnreadFileError(f"{quoted(given, 100)} is a file, and no file that is named is read here: {otherwise}")
    path = Path(given).expanduser()
    places = (
        [path] if path.is_absolute() else [Path.cwd() / path, *(above / path for above in (folder, *folder.parents))]
    )
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"there is no file {quoted(given, 100)} in the current folder, in that of the file or above it, as the tool "
        "would need it; name its whole path"
    )


def casts_by_deepspeed(launch: Mapping[str, object]) -> bool:
    """True if DeepSpeed's engine trains in its own precision, which casts all weights, instead of torch's autocast."""
    inner = launch.get("deepspeed_config")
    content = inner.get(DEEPSPEED_JSON) if isinstance(inner, Mapping) else None
    autocast = content.get("torch_autocast") if isinstance(content, Mapping) else None
    own = not (isinstance(autocast, Mapping) and autocast.get("enabled"))
    return launch.get("distributed_type") == "DEEPSPEED" and own


def casts_by_accelerate(launch: Mapping[str, object]) -> bool:
    """True if accelerate shards trained weights in float32 under mixed precision: its `prepare_model` with FSDP."""
    return launch.get("distributed_type") == "FSDP"


def checkpoints_itself(launch: Mapping[str, object]) -> bool:
    """True if FSDP checkpoints the layers that it wraps, in place of the trainer."""
    inner = launch.get("fsdp_config")
    return isinstance(inner, Mapping) and bool(inner.get("fsdp_activation_checkpointing"))


def words(launch: Mapping[str, object]) -> str:
    """Sharding of a launch, for a reader."""
    kind = launch.get("distributed_type")
    inner = launch.get("deepspeed_config") if kind == "DEEPSPEED" else launch.get("fsdp_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if kind == "DEEPSPEED":
        stage = inner.get("zero_stage")
        return f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed without ZeRO"
    return f"FSDP{inner.get('fsdp_version')}" if kind == "FSDP" else "DDP"
