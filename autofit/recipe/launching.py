"""Launch of a recipe, from all its sources, as TRL 1.16 and accelerate 1.15 take it. Free of torch.

Later ones win, with a note: the accelerate config (a file, or one that TRL ships), the flags of `accelerate launch` in
the recipe's YAML, those of the command line, transformers' keys fsdp and deepspeed, and the key `launch`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from autofit.errors import ConfigError, at_least_one, option, quoted
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, is_on, read_accelerate_config
from autofit.recipe.launch_keys import (
    DEEPSPEED_JSON,
    FLAGS,
    NOT_BESIDE_JSON,
    REFUSED,
    TYPES,
    check_values,
    deepspeed_config,
    deepspeed_fields,
    fsdp_config,
    ignored_keys,
    place,
    read_deepspeed_file,
)
from autofit.recipe.profile import Profile

_NAMES = ("accelerate_config", "config_file")  # keys of the YAML that name an accelerate config
_TRAINERS = ("fsdp", "fsdp_config", "deepspeed")  # transformers' own keys
_OF_TYPE = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of a launch from the command line, or the caller of the API.

    `num_processes` are the ranks that the recipe is written for; `gpus` are the cards that it is to train on, at the
    effective batch that it has on its own ranks, divided over `machines`.
    """

    accelerate_config: str | os.PathLike[str] | None = None
    num_processes: int | None = None
    gpus: int | None = None
    machines: int | None = None

    def check(self) -> None:
        """Raise ConfigError for impossible numbers."""
        for name, value in (("num_processes", self.num_processes), ("gpus", self.gpus), ("nodes", self.machines)):
            at_least_one(name, value)


NO_OPTIONS = LaunchOptions()


def launch_options(
    *, gpu: str | None, accelerate_config: str | os.PathLike[str] | None, num_processes: int | None, gpus: int | None
) -> tuple[str | None, LaunchOptions]:
    """(the card that `gpu` names, the options of the launch). Raises ConfigError.

    `8xa100-80gb` is 8 cards, `4x8xa100-80gb` is 4 machines of 8.
    """
    named = None if gpu is None else re.fullmatch(r"(?:(\d{1,5}) ?x ?)?(\d{1,5}) ?x ?(\w.*)", gpu)  # 8 x h100 too
    machines = None
    if named is not None:
        asked, gpu, each = named[0], named[3], int(named[2])
        cards = int(named[1] or 1) * each
        machines = int(named[1]) if named[1] else None
        if cards < 1:
            raise ConfigError(f"{option('gpu', asked)} must name 1 card or more")
        if gpus is not None and gpus != cards:
            raise ConfigError(
                f"{option('gpu', asked)} says {cards} cards, and {option('gpus')} {gpus}; give one of them"
            )
        gpus = cards
    options = LaunchOptions(
        accelerate_config=accelerate_config, num_processes=num_processes, gpus=gpus, machines=machines
    )
    options.check()
    return gpu, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launch, the keys of the recipe that are its trainer's, and what the user should know, a sentence each."""

    launch: Launch
    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Reading:
    """One reading: the accelerate config as it grows, and the notes."""

    config: dict[str, object] = field(default_factory=dict)
    what: str = "the recipe"
    named: bool = False  # by an accelerate config
    file: Mapping[str, object] = field(default_factory=dict)  # that config as it was read
    notes: list[str] = field(default_factory=list)


_OF_TRL = Profile(name="", of_trl=True)


def launched(
    values: Mapping[str, object], options: LaunchOptions = NO_OPTIONS, *, of: Profile = _OF_TRL,
    environment: Mapping[str, str] = os.environ, own: Mapping[str, object] | None = None,
) -> Launched:  # fmt: skip
    """The launch of a recipe's `values`, by the keys that say it to the trainer `of` this profile.

    `own` has keys of an accelerate config that the recipe itself means, in place of which one may be named.

    Raises ConfigError for sources that cannot hold together.
    """
    if "distributed_type" in values:  # an accelerate config in place of a recipe: its trainer says so
        return Launched(launch=Launch(), values=values)
    found = _Reading(config=dict(own or {}))
    rest = dict(values)
    read = (LAUNCH, *_TRAINERS) if of.of_transformers else (LAUNCH,)
    kept = {} if of.of_trl else {key: rest.pop(key) for key in values if key not in read}
    _start(found, {key: rest.pop(key) for key in _NAMES if key in rest}, options)
    flags = {key: rest.pop(key) for key in list(rest) if is_launch_key(key)}
    _apply_flags(found, flags)
    _apply_trainers(found, {key: rest.pop(key) for key in _TRAINERS if key in rest})
    _apply_ranks(found, "num_processes" in flags, options, environment)
    given = rest.pop(LAUNCH, None)
    _read_json(found)
    _check_beside_json(found, flags)
    said = values if of.of_trl or of.of_transformers else {}
    check_values(found.config, partial(place, values=said, config=found.file, config_name=found.what))
    launch = _made(found, given)
    if launch.sharding == "zero3" and launch.offload == "parameters" and _optimizer_stays(found.config):
        found.notes.append("parameters in host memory take the optimizer's state along here; both are written so")
    asked = options.gpus is not None or (isinstance(given, Mapping) and "ranks" in given)
    if found.named and "num_processes" not in found.config and found.config["distributed_type"] != "NO" and not asked:
        found.notes.append(
            f"{found.what} has no num_processes, without which accelerate does not start: 1 rank is taken; give "
            "--num_processes N, or write it there"
        )
    alone = launch.ranks == 1 and options.gpus in (None, 1) and given is None
    if alone and launch.sharding.startswith("fsdp") and not found.named:
        found.notes.append("one rank has nothing to share, so fsdp has no effect; give --num_processes N or --gpus N")
        launch = replace(launch, sharding="ddp", offload="none", reshard_after_forward=True)
    return Launched(launch=launch, values={**rest, **kept}, notes=tuple(found.notes))


def is_launch_key(key: str) -> bool:
    """True if `key` is a flag of `accelerate launch`, which a recipe of TRL may have among its keys."""
    return any(key in names for names in FLAGS.values()) or key in TYPES or key in REFUSED


def _start(found: _Reading, named: Mapping[str, object], options: LaunchOptions) -> None:
    """Begin with the accelerate config that the command line names, else the recipe."""
    names = list(named.values())
    if len(names) > 1:
        raise ConfigError("accelerate_config and config_file name the same thing; keep one of them")
    given = names[0] if names else None
    if options.accelerate_config is not None:
        asked = os.fspath(options.accelerate_config)
        if given is not None and given != asked:
            found.notes.append(f"--accelerate_config {asked} replaces accelerate_config: {given} of the recipe")
        given = asked
    if given is None:
        return
    if not isinstance(given, str):
        raise ConfigError(f"accelerate_config must be a file, or a name such as fsdp2; got {quoted(given)}")
    config, found.what = read_accelerate_config(given)
    if config.get("parallelism_config"):
        raise ConfigError(
            f"{found.what}: parallelism_config (copies of a sharded model, tensor, context or sequence parallel) is "
            "not supported; without it FSDP2 shards over all ranks"
        )
    found.config, found.file, found.named = config, dict(config), True


def _apply_flags(found: _Reading, flags: Mapping[str, object]) -> None:
    """Lay flags of `accelerate launch` over the config."""
    refused = [key for key in flags if key in REFUSED]
    if refused:
        raise ConfigError(f"{refused[0]} is not supported: autofit launches DDP, FSDP and DeepSpeed ZeRO; omit it")
    on = [key for key in TYPES if _is_true(key, flags.get(key))]
    if len(on) > 1:
        raise ConfigError(f"only one of {', '.join(TYPES)} can be true; got {' and '.join(on)}")
    if on:
        found.config["distributed_type"] = TYPES[on[0]]
        found.notes.append(
            f"`trl` cannot take {on[0]}: true from a YAML (accelerate gets `--{on[0]} True` and takes True for the "
            "script); the accelerate config that is written with the tuned recipe says it"
        )
    for section, names in FLAGS.items():
        given = {name: flags[name] for name in names if flags.get(name) is not None}
        if not section:
            found.config |= given
        elif given:
            _into(found, section, given)


def _into(found: _Reading, section: str, given: Mapping[str, object]) -> None:
    """Lay the flags `given` over a section of the config. Raises ConfigError unless the section is turned on."""
    kind = next(kind for kind, name in _OF_TYPE.items() if name == section)
    if found.config.get("distributed_type") != kind:
        name = next(iter(given))
        on = "fsdp2" if kind == "FSDP" else "zero2 or zero3"
        raise ConfigError(f"{name} has no effect without {kind}; give accelerate_config: {on}, or omit {name}")
    old = found.config.get(section)
    found.config[section] = {**(old if isinstance(old, Mapping) else {}), **given}


def _apply_trainers(found: _Reading, keys: Mapping[str, object]) -> None:
    """Lay transformers' own keys over the config: they win there too, as arguments of its plugins."""
    fsdp = fsdp_config(keys.get("fsdp"), keys.get("fsdp_config"))
    zero = deepspeed_config(keys.get("deepspeed"))
    if fsdp is not None and zero is not None:
        raise ConfigError("fsdp and deepspeed exclude each other; keep one of them")
    if fsdp is None and zero is None:
        if keys.get("fsdp_config"):
            found.notes.append("fsdp_config has no effect without fsdp: true (transformers ignores it)")
        return
    if (
        fsdp
        and fsdp["fsdp_version"] == 1
        and str(fsdp.get("fsdp_reshard_after_forward", "")).upper() not in ("", "FULL_SHARD")
    ):
        # accelerate/accelerator.py, line 1947: sharding_strategy or reshard_after_forward; the first is never empty
        found.notes.append(
            f"{fsdp['fsdp_reshard_after_forward']} has no effect in fsdp with version: 1: accelerate prefers "
            "fsdp_sharding_strategy, which is FULL_SHARD unless an accelerate config says otherwise; take version: 2"
        )
    if fsdp is not None and (ignored := ignored_keys(keys.get("fsdp_config"))):
        found.notes.append(f"fsdp_config.{ignored[0]} has no effect: transformers reads cpu_offload")
    kind, key, new = ("DEEPSPEED", "deepspeed", zero) if fsdp is None else ("FSDP", "fsdp", fsdp)
    before = found.config.get("distributed_type")
    other = "DEEPSPEED" if kind == "FSDP" else "FSDP"
    if before == other:
        raise ConfigError(f"{key} of the recipe and {found.what} with distributed_type {other} exclude each other")
    section = _OF_TYPE[kind]
    old = found.config.get(section)
    if before == kind and isinstance(old, Mapping):
        changed = [name for name, value in (new or {}).items() if name in old and str(old[name]) != str(value)]
        if changed:
            found.notes.append(f"{key} of the recipe replaces {', '.join(changed)} of {found.what}")
    found.config |= {"distributed_type": kind, section: {**(old if isinstance(old, Mapping) else {}), **(new or {})}}


def _apply_ranks(found: _Reading, flagged: bool, options: LaunchOptions, environment: Mapping[str, str]) -> None:
    """Settle num_processes; several default to DDP."""
    config = found.config
    if options.num_processes is not None:
        if flagged and config["num_processes"] != options.num_processes:
            found.notes.append(
                f"--num_processes {options.num_processes} replaces num_processes: {config['num_processes']}"
            )
        config["num_processes"] = options.num_processes
    elif config.get("num_processes") == -1:
        raise ConfigError(f"{found.what} leaves num_processes open; give {option('num_processes', 'N')}")
    elif "num_processes" not in config and (told := environment.get("WORLD_SIZE")) is not None:
        if not told.isdecimal() or int(told) < 1:
            raise ConfigError(f"the environment variable WORLD_SIZE must be 1 or more; got {quoted(told)}; unset it")
        config["num_processes"] = int(told)
    ranks = config.get("num_processes", 1)
    kind = config.get("distributed_type")
    if kind is None and ranks != 1:
        config["distributed_type"] = "MULTI_GPU"
    elif kind == "NO" and ranks != 1:
        text = f"{found.what} has distributed_type NO, so accelerate starts one process"
        if options.num_processes is not None:
            raise ConfigError(
                f"{text}; give {option('accelerate_config', 'multi_gpu')} with {option('num_processes')} {ranks}"
            )
        found.notes.append(f"{text}, whatever num_processes: {ranks} says")


def _optimizer_stays(config: Mapping[str, object]) -> bool:
    """True if a DeepSpeed config moves the parameters to the host, but keeps the optimizer's state on the card."""
    zero = config.get("deepspeed_config")
    return isinstance(zero, Mapping) and str(zero.get("offload_optimizer_device") or "none").lower() == "none"


def _read_json(found: _Reading) -> None:
    """Put the content of a DeepSpeed JSON in the place of its path."""
    zero = found.config.get("deepspeed_config")
    if isinstance(zero, Mapping) and isinstance(zero.get("deepspeed_config_file"), str):
        content = deepspeed_fields(read_deepspeed_file(zero["deepspeed_config_file"]))
        rest = {key: value for key, value in zero.items() if key != "deepspeed_config_file"}
        found.config["deepspeed_config"] = {**rest, **content}  # accelerate: the file's fields replace its own


def _check_beside_json(found: _Reading, flags: Mapping[str, object]) -> None:
    """Raise ConfigError if the accelerate config repeats a setting of a DeepSpeed JSON, which accelerate refuses.

    DeepSpeedPlugin sees only the keys in the config file, not flags.
    """
    zero, own = found.config.get("deepspeed_config"), found.file.get("deepspeed_config") or {}
    if found.file.get("distributed_type") != "DEEPSPEED" or not (isinstance(zero, Mapping) and DEEPSPEED_JSON in zero):
        return
    wrong = [f"deepspeed_config.{key}" for key in NOT_BESIDE_JSON if isinstance(own, Mapping) and key in own]
    if found.file.get("mixed_precision") is not None and flags.get("mixed_precision") is None:
        wrong.append("mixed_precision")
    if wrong:
        raise ConfigError(
            f"{found.what}: accelerate refuses {', '.join(wrong)} beside a DeepSpeed JSON; omit them here"
        )


def _made(found: _Reading, given: object) -> Launch:
    """The launch that the config means, with the recipe's mapping `launch` laid over it."""
    launch = Launch.of_accelerate(found.config, what=found.what)
    if given is None:
        return launch
    if not isinstance(given, Mapping):
        raise ConfigError(f"launch must be a mapping; got {quoted(given)}")
    return Launch.of({LAUNCH: {**launch.to_values(), **given}})


def _is_true(key: str, given: object) -> bool:
    if given is None or isinstance(given, bool):
        return bool(given)
    raise ConfigError(f"{key} must be true or false; got {quoted(given)}")


# -- the vLLM server that a recipe trains beside (`vllm_mode: server`) ------------------------------------------------

COMMAND = ("trl", "vllm-serve")
_OWN_HOSTS = (None, "localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104  # the last is TRL's default
_PATIENCE_S = 1800.0  # TRL's clients wait 240 s, in which a large model is not loaded from a network's file system
# Key of a recipe -> option of the command. Its dtype stays "auto", as in TRL's colocate mode and as predicted: weights
# that are trained in float32 are served in half precision.
_OPTIONS = {
    "model_revision": "revision", "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len", "vllm_model_impl": "vllm_model_impl",
}  # fmt: skip


def needs_server(resolved: Mapping[str, object], values: Mapping[str, object]) -> bool:
    """True if the recipe `values`, with defaults `resolved`, generates with a vLLM server whose place is left open."""
    asked = {**resolved, **values}
    return (
        is_on(asked.get("use_vllm"))
        and asked.get("vllm_mode") == "server"
        and not asked.get("vllm_server_base_url")
        and asked.get("vllm_server_host") in _OWN_HOSTS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServer:
    """A vLLM server on `cards`: copies of the model, each on `tensor_parallel` cards, as predictions have them.

    It is to answer within `timeout_s` of its start.
    """

    model: str
    cards: int = 1
    tensor_parallel: int = 1
    options: tuple[str, ...] = ()
    timeout_s: float = _PATIENCE_S

    def __post_init__(self) -> None:
        if self.cards % self.tensor_parallel:
            raise ConfigError(
                f"vllm_tensor_parallel_size={self.tensor_parallel} must divide the {self.cards} cards of the vLLM "
                f"server; change it, or launch.server_ranks ({option('set')} launch.server_ranks=N)"
            )

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "RolloutServer":
        """The server of the recipe `values`. Raises ConfigError."""
        parallel = _count(values, "vllm_tensor_parallel_size")
        options = [f"--{option}={values[key]}" for key, option in _OPTIONS.items() if values.get(key) is not None]
        if is_on(values.get("trust_remote_code")):
            options.append("--trust_remote_code=true")
        patience = values.get("vllm_server_timeout")
        return cls(
            model=str(values["model_name_or_path"]), cards=Launch.of(values).server_ranks or parallel,
            tensor_parallel=parallel, options=tuple(options),
            timeout_s=_PATIENCE_S if patience is None else float(cast(float, patience)),
        )  # fmt: skip

    def arguments(self, host: str, port: int) -> list[str]:
        """Arguments after COMMAND for a server that listens on `port` of `host`."""
        copies = self.cards // self.tensor_parallel
        return [
            f"--model={self.model}", f"--host={host}", f"--port={port}",
            f"--tensor_parallel_size={self.tensor_parallel}", f"--data_parallel_size={copies}", *self.options,
        ]  # fmt: skip


def _count(values: Mapping[str, object], key: str) -> int:
    value = values.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a whole number from 1; got {quoted(value)}")
    return value
