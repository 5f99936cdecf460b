"""Launch of a training: its ranks and their sharding, under the key `launch` of a recipe. Free of torch.

Users say it with an accelerate config (a file, or one that TRL ships, such as fsdp2), with flags of `accelerate launch`
in the recipe's YAML, which `trl grpo --config` passes on, or with the keys fsdp, fsdp_config and deepspeed. `launch`
has what all of these mean, so that a search space can vary it like any other mapping of the recipe.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

from autofit.errors import ConfigError, nearest, option, quoted
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch_keys import (
    CONFIG_KEYS,
    DEEPSPEED_JSON,
    NOT_BESIDE_JSON,
    SHARDING_STRATEGIES,
    STATE_DICT_TYPES,
)
from autofit.recipe.yaml_file import may_read, read_yaml_mapping

Sharding = Literal["ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "parameters"]
_NAMES_JSON = "; a JSON file is named in it, as deepspeed_config_file, with distributed_type: DEEPSPEED"
THREADS = "num_cpu_threads_per_process"  # a flag of `accelerate launch` that has no place in its config
MOST_RANKS = 4096
# Whether a strategy of FSDP1 frees what it gathered. On one machine torch's hybrid ones shard over all ranks and have
# nothing to copy to (torch/distributed/fsdp/_init_utils.py, _init_intra_and_inter_node_groups).
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_MOST_GBIT = 100_000
_LOCAL = {"compute_environment": "LOCAL_MACHINE", "machine_rank": 0, "main_training_function": "main",
          "rdzv_backend": "static", "same_network": True, "use_cpu": False}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Ranks of a training, one a card, and how they share the model.

    `ddp` holds everything on each rank (on one rank: no wrapper at all), as does `zero0`, DeepSpeed's engine without
    ZeRO. `offload` says what lives in host memory between its uses: the optimizer's state, or parameters, gradients
    and the optimizer's state. With `reshard_after_forward` FSDP frees the gathered parameters between forward and
    backward. `server_ranks` are further cards, of a vLLM server. `config` has the rest of the user's accelerate config.
    `network_gbit` is what all network adapters of a machine have together by their data sheets, in Gbit/s; None: as
    machines of such cards mostly have. Predictions of several machines read it.
    """

    ranks: int = 1
    sharding: Sharding = "ddp"
    reshard_after_forward: bool = True
    offload: Offload = "none"
    server_ranks: int = 0
    machines: int = 1
    network_gbit: int | None = None
    config: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("machines", 1), ("server_ranks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_RANKS:
                raise ConfigError(f"{name} must be a whole number from {least} to {MOST_RANKS}; got {quoted(value)}")
        gbit = self.network_gbit
        if gbit is not None and (isinstance(gbit, bool) or not isinstance(gbit, int) or not 1 <= gbit <= _MOST_GBIT):
            raise ConfigError(
                f"network_gbit must be a whole number from 1 to {_MOST_GBIT}, the Gbit/s of all network adapters of a "
                f"machine; got {quoted(gbit)}"
            )
        for name, known in (("sharding", get_args(Sharding)), ("offload", get_args(Offload))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {quoted(value)}")
        if self.ranks % self.machines:
            raise ConfigError(f"num_processes={self.ranks} must be a multiple of num_machines={self.machines}")
        if self.offload == "optimizer" and not self.is_deepspeeds:
            raise ConfigError(f"{self.sharding} cannot offload the optimizer alone; choose offload: parameters or none")
        if self.offload != "none" and self.sharding in ("ddp", "zero0"):
            raise ConfigError(f"{self.sharding} cannot offload; choose sharding: fsdp2, zero2 or zero3")
        if self.offload == "parameters" and self.sharding in ("zero1", "zero2"):
            raise ConfigError(f"{self.sharding} cannot offload parameters; choose optimizer, or zero3")

    @property
    def is_plain(self) -> bool:
        """True if one process trains, free of any wrapper."""
        return self.ranks == 1 and self.sharding == "ddp" and self.server_ranks == 0

    @property
    def is_deepspeeds(self) -> bool:
        """True if DeepSpeed's engine trains, at any ZeRO stage, 0 included."""
        return self.sharding.startswith("zero")

    @property
    def shares_of_weights(self) -> int:
        """Parts into which the weights are split at rest."""
        return self.ranks if self.sharding in ("fsdp1", "fsdp2", "zero3") else 1

    @property
    def is_alone(self) -> bool:
        """True if one process trains by itself, perhaps beside a vLLM server."""
        return self.ranks == 1 and self.sharding == "ddp"

    def changed_to(self, ranks: int, machines: int) -> dict[str, object]:
        """{key: value} with which a file sets `ranks` in place of this launch's; {} if they are the same."""
        if ranks == self.ranks:
            return {}
        own = {} if machines == self.machines else {"launch.machines": machines}
        return {"launch.ranks": ranks, **own}

    def batching(self, resolved: Mapping[str, object], keys: BatchKeys) -> "Launch":
        """This launch, with "auto" for the batch in the user's DeepSpeed JSON, as transformers fills it in.

        Raises ConfigError, as transformers does, where the JSON has another batch than the recipe.
        """
        zero = cast("Mapping[str, object]", self.config.get("deepspeed_config") or {})
        content = zero.get(DEEPSPEED_JSON)
        if not isinstance(content, Mapping):
            return self
        micro, accumulation = (cast(int, resolved[key]) for key in (keys.micro_batch, keys.accumulation))
        wanted = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
                  "train_batch_size": micro * accumulation * self.ranks}  # fmt: skip
        wrong = [
            f"{key} {content[key]}" for key, value in wanted.items() if content.get(key, "auto") not in ("auto", value)
        ]
        if wrong:
            raise ConfigError(
                f"the DeepSpeed config has {', '.join(wrong)}, and the recipe {keys.micro_batch}={micro} x "
                f'{keys.accumulation}={accumulation} x {self.ranks} rank(s); write "auto" there, or the recipe\'s'
            )
        # accelerate takes an accumulation that is missing for 1 (utils/dataclasses.py, line 1274)
        batch = {key: "auto" for key in wanted if key in content or key == "gradient_accumulation_steps"}
        return replace(self, config={**self.config, "deepspeed_config": {**zero, DEEPSPEED_JSON: {**content, **batch}}})

    @property
    def words(self) -> str:
        """Ranks, sharding and offload for a reader: `8 ranks, FSDP2, parameters in host memory`."""
        named = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero0": "DeepSpeed without ZeRO"}
        shared = named.get(self.sharding) or f"DeepSpeed ZeRO-{self.sharding[-1]}"
        parts = ["1 rank" if self.ranks == 1 else f"{self.ranks} ranks"]
        if self.machines > 1:
            parts[0] += f" on {self.machines} machines"
            parts[0] += "" if self.network_gbit is None else f" with {self.network_gbit} Gbit/s each"
        if self.ranks > 1 or self.sharding != "ddp":
            parts.append(shared)
        if self.sharding.startswith("fsdp") and not self.reshard_after_forward:
            parts.append("parameters kept whole between forward and backward")
        if self.offload != "none":
            held = "parameters and the optimizer's state" if self.offload == "parameters" else "the optimizer's state"
            parts.append(f"{held} in host memory")
        if self.server_ranks:
            parts.append(f"{self.server_ranks} more for a vLLM server")
        return ", ".join(parts)

    @property
    def cards(self) -> int:
        """Cards of the training and of its vLLM server."""
        return self.ranks + self.server_ranks

    def to_values(self) -> dict[str, object]:
        """The mapping under the key `launch` of a recipe."""
        return {key: value for key, value in asdict(self).items() if key != "network_gbit" or value is not None}

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "Launch":
        """The launch of a recipe whose `launch` is in the form of `to_values`; one plain rank by default."""
        given = values.get(LAUNCH) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"launch must be a mapping; got {quoted(given)}")
        unknown = [key for key in given if key not in cls.__slots__]
        if unknown:
            raise ConfigError(
                f"unknown key launch.{unknown[0]}; launch takes {', '.join(cls.__slots__)}; keys of accelerate belong "
                "into a file: accelerate_config: FILE"
            )
        return cls(**cast("dict[str, object]", dict(given)))  # type: ignore[arg-type]

    @classmethod
    def of_accelerate(cls, config: Mapping[str, object], *, what: str) -> "Launch":
        """The launch that an accelerate config means; `what` names it in errors. Raises ConfigError."""
        kind = str(config.get("distributed_type", "NO"))
        rest = dict(config)
        for key, named in (("fsdp_config", ""), ("deepspeed_config", _NAMES_JSON)):
            _mapping(config.get(key), key, what, named)
        ranks = _integer(rest.pop("num_processes", 1), "num_processes", what)
        machines = _integer(rest.get("num_machines", 1), "num_machines", what)
        for key, count in (("num_processes", ranks), ("num_machines", machines)):
            if not 1 <= count <= MOST_RANKS:
                raise ConfigError(f"{what}: {key} must be from 1 to {MOST_RANKS}; got {count}")
        if kind == "NO":  # accelerate starts one process, whatever num_processes says
            return cls(config=rest)
        shared = {"FSDP": _fsdp, "DEEPSPEED": _zero}
        if kind not in ("MULTI_GPU", "MULTI_CPU", *shared):
            raise ConfigError(
                f"{what}: distributed_type must be NO, MULTI_GPU, MULTI_CPU, FSDP or DEEPSPEED; got {quoted(kind)}"
            )
        fields = shared[kind](config, what) if kind in shared else {}
        try:
            return cls(ranks=ranks, machines=machines, config=rest, **fields)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{what}: {error.marked}") from error

    @property
    def sharding_strategy(self) -> str:
        """FSDP1's own word for the sharding."""
        return "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"

    @property
    def flags(self) -> dict[str, object]:
        """Flags of `accelerate launch` that stay in the recipe's YAML, from which TRL passes them on."""
        return {THREADS: self.config[THREADS]} if THREADS in self.config else {}

    def to_accelerate(self) -> dict[str, object]:
        """The accelerate config that `accelerate launch --config_file` and `trl NAME --accelerate_config` take."""
        own = {key: value for key, value in self.config.items() if key not in self.flags}
        config = {**_LOCAL, **own, "num_processes": self.ranks, "num_machines": self.machines}
        if self.machines > 1:
            config.setdefault("main_process_port", 29500)  # the default of torch's launcher
        if named_cards(config) not in (None, self.ranks // self.machines):
            config.pop("gpu_ids")  # of another number of cards
        config.setdefault("mixed_precision", "no")  # transformers decides by the recipe's bf16 and fp16
        for key in ("fsdp_config", "deepspeed_config"):
            config.pop(key, None)
        if self.sharding == "ddp":
            return {**config, "distributed_type": "MULTI_GPU" if self.ranks > 1 else "NO"}
        if self.sharding.startswith("fsdp"):
            return {**config, "distributed_type": "FSDP", "fsdp_config": self._fsdp_config()}
        zero = self._zero_config()
        if "deepspeed_config_file" in zero:  # accelerate refuses both; transformers fills in the file's "auto"
            config.pop("mixed_precision", None)
        return {**config, "distributed_type": "DEEPSPEED", "deepspeed_config": zero}

    def to_deepspeed(self) -> dict[str, object] | None:
        """The user's DeepSpeed JSON with this sharding and offload, if such a file was given."""
        given = cast("Mapping[str, object]", self.config.get("deepspeed_config") or {}).get(DEEPSPEED_JSON)
        if not isinstance(given, Mapping):
            return None
        zero = {**cast("Mapping[str, object]", given.get("zero_optimization") or {}), "stage": int(self.sharding[-1])}
        zero.pop("cpu_offload", None)
        for key, moved in (
            ("offload_optimizer", self.offload != "none"),
            ("offload_param", self.offload == "parameters"),
        ):
            old = cast("Mapping[str, object]", zero.pop(key, None) or {})
            if moved:
                zero[key] = {**old, "device": old.get("device") if old.get("device") in ("cpu", "nvme") else "cpu"}
        return {**given, "zero_optimization": zero}

    def _fsdp_config(self) -> dict[str, object]:
        version = int(self.sharding[-1])
        given = cast("Mapping[str, object]", self.config.get("fsdp_config") or {})
        usual: dict[str, object] = {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }  # fmt: skip
        own: dict[str, object] = {"fsdp_version": version, "fsdp_offload_params": self.offload == "parameters"}
        if version == 1:
            usual |= {"fsdp_use_orig_params": True, "fsdp_sync_module_states": True,
                      "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False}  # fmt: skip
            own["fsdp_sharding_strategy"] = self.sharding_strategy
            given_one = sharding_strategy(given)
            if self.machines == 1 and _RESHARDS.get(given_one) == self.reshard_after_forward:
                own["fsdp_sharding_strategy"] = given_one  # the user's own word
        else:
            own["fsdp_reshard_after_forward"] = self.reshard_after_forward
        other = {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"} - own.keys()
        given = {key: value for key, value in given.items() if key not in other}
        return {**({} if given else usual), **given, **own}  # what the user's file leaves out, accelerate fills in

    def _zero_config(self) -> dict[str, object]:
        stage = int(self.sharding[-1])
        given = cast("Mapping[str, object]", self.config.get("deepspeed_config") or {})
        usual: dict[str, object] = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": stage == 3}
        content = self.to_deepspeed()
        if content is not None:  # accelerate takes the JSON itself in place of a path
            left_out = (*NOT_BESIDE_JSON, DEEPSPEED_JSON)
            beside = {key: value for key, value in given.items() if key not in left_out}
            return {**usual, **beside, "deepspeed_config_file": json.dumps(content)}
        if stage == 3:
            usual["zero3_save_16bit_model"] = True
        given = {key: value for key, value in given.items() if key != "gradient_accumulation_steps"}  # "auto"
        moved = {
            "offload_optimizer_device": self.offload != "none",
            "offload_param_device": self.offload == "parameters",
        }
        places = {key: ("nvme" if given.get(key) == "nvme" else "cpu") if on else "none" for key, on in moved.items()}
        return {**usual, **given, "zero_stage": stage, **places}


def named_cards(config: Mapping[str, object]) -> int | None:
    """Number of cards of each machine that the `gpu_ids` of an accelerate config name; None for all."""
    ids = [part for part in str(config.get("gpu_ids") or "all").split(",") if part.strip()]
    return None if ids == ["all"] else len(ids)


def wrap_policy(config: Mapping[str, object]) -> str:
    """The wrapping policy in this `fsdp_config`; NO_WRAP, one group of all weights, by default."""
    return str(config.get("fsdp_auto_wrap_policy") or "NO_WRAP").upper()


def sharding_strategy(config: Mapping[str, object]) -> str:
    """The strategy of FSDP1 in this `fsdp_config`, where it may be a number (torch's ShardingStrategy)."""
    given = str(config.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    return dict(zip("12345", SHARDING_STRATEGIES, strict=True)).get(given, given)


def state_dict_type(config: object, sharding: str) -> str:
    """Way in which FSDP saves with this `fsdp_config` (accelerate 1.15, set_state_dict_type); by default, whole."""
    if not isinstance(config, Mapping) or not config:
        return "FULL_STATE_DICT"
    usual = "FULL_STATE_DICT" if sharding == "fsdp1" else "SHARDED_STATE_DICT"
    given = str(config.get("fsdp_state_dict_type") or usual).upper()
    return STATE_DICT_TYPES[int(given) - 1] if given in ("1", "2", "3") else given


def split(values: Mapping[str, object]) -> tuple[Launch, dict[str, object]]:
    """(the launch of a recipe, the values for its trainer: all except `launch`)."""
    return Launch.of(values), {key: value for key, value in values.items() if key != LAUNCH}


def check_installed(launch: Launch) -> None:
    """Raises ConfigError where the library of the launch's sharding is missing, which predictions run too."""
    if launch.is_deepspeeds and find_spec("deepspeed") is None:
        raise ConfigError(
            f"{launch.sharding} trains with DeepSpeed, whose own code predictions run too; it is not installed: run "
            "`DS_BUILD_OPS=0 pip install deepspeed` (no GPU is needed), or share the model by FSDP2"
        )


def check_on_cpu(launch: Launch) -> None:
    """Raise ConfigError if ranks on the CPU are unable to train with `launch`."""
    if launch.is_plain:
        return
    if launch.sharding not in ("ddp", "fsdp2"):
        raise ConfigError(
            f"ranks on the CPU train with ddp or fsdp2; got {launch.sharding}; choose another accelerate config, or "
            f"predict it on a simulated card with {option('gpu', 'NAME')}"
        )
    if launch.offload != "none":
        raise ConfigError(f"ranks on the CPU have nothing to offload to; got offload: {launch.offload}; remove it")


def read_accelerate_config(given: str) -> tuple[dict[str, object], str]:
    """(content, description in words) of an accelerate config: a file, or the name of one that TRL ships."""
    path = Path(given)
    if not may_read(path) or not os.path.isfile(path):
        shipped = shipped_with_trl()
        if given not in shipped:
            known = ", ".join(sorted(shipped)) or "none, as TRL is not installed"
            raise ConfigError(
                f"an accelerate config is a file or one that TRL ships ({known}); got {quoted(given)}"
                f"{nearest(given, shipped)}"
            )
        path = shipped[given]
    config = read_yaml_mapping(path, what="accelerate config")
    if "distributed_type" not in config:
        raise ConfigError(f"the accelerate config {given}: distributed_type is missing, and accelerate refuses that")
    for key in config:
        if key not in CONFIG_KEYS:
            raise ConfigError(
                f"the accelerate config {given}: unknown key {quoted(key)}{nearest(str(key), CONFIG_KEYS)}; accelerate "
                "refuses the file. The trainer's own keys belong in the recipe"
            )
    if config["distributed_type"] in (False, None):  # NO without quotes, which accelerate takes too
        config["distributed_type"] = "NO"
    for key in ("num_processes", "num_machines"):  # accelerate takes them in quotes too
        if isinstance(config.get(key), str) and str(config[key]).isdecimal():
            config[key] = int(str(config[key]))
    if config.pop("fp16", None):  # the older way to say it (accelerate, process_config)
        config.setdefault("mixed_precision", "fp16")
    if isinstance(inner := config.get("fsdp_config"), Mapping):  # accelerate takes its keys without the prefix too
        config["fsdp_config"] = {k if str(k).startswith("fsdp") else f"fsdp_{k}": v for k, v in inner.items()}
    return config, f"the accelerate config {given}"


def shipped_with_trl() -> dict[str, Path]:
    """{name: file} of the accelerate configs that the installed TRL ships, found without importing it."""
    spec = find_spec("trl")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return {path.stem: path for folder in folders for path in (Path(folder) / "accelerate_configs").glob("*.yaml")}


def _fsdp(config: Mapping[str, object], what: str) -> dict[str, object]:
    inner = _mapping(config.get("fsdp_config"), "fsdp_config", what)
    version = str(inner.get("fsdp_version", 1))
    # accelerate launch sets FSDP_SHARDING_STRATEGY for FSDP1 whatever the file says, and it wins; FSDP2 has no such key
    reshard = is_on(inner.get("fsdp_reshard_after_forward", True))
    if version == "1":
        strategy = sharding_strategy(inner)
        if strategy == "NO_SHARD":
            raise ConfigError(
                f"{what}: fsdp_sharding_strategy NO_SHARD shards nothing, and torch deprecates it for DDP; take "
                f"distributed_type: MULTI_GPU ({option('accelerate_config')} multi_gpu)"
            )
        if strategy.startswith("HYBRID") and config.get("num_machines", 1) != 1:
            raise ConfigError(
                f"{what}: fsdp_sharding_strategy {strategy} on several machines is not supported; take "
                f"{'FULL_SHARD' if _RESHARDS[strategy] else 'SHARD_GRAD_OP'}, which shards over all of them"
            )
        reshard = _RESHARDS[strategy]
    offload = "parameters" if is_on(inner.get("fsdp_offload_params", False)) else "none"
    return {"sharding": f"fsdp{version}", "reshard_after_forward": reshard, "offload": offload}


def _zero(config: Mapping[str, object], what: str) -> dict[str, object]:
    inner = _mapping(config.get("deepspeed_config"), "deepspeed_config", what)
    stage = _integer(2 if inner.get("zero_stage") is None else inner["zero_stage"], "zero_stage", what)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{what}: zero_stage must be 0, 1, 2 or 3; got {stage}")
    devices = {key: str(inner.get(f"offload_{key}_device") or "none") for key in ("optimizer", "param")}
    moved = [key for key, device in devices.items() if device.lower() != "none"]
    offload = "parameters" if "param" in moved else "optimizer" if moved else "none"
    return {"sharding": f"zero{stage}", "offload": offload}


def _integer(value: object, key: str, what: str) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 9:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what}: {key} must be a whole number; got {quoted(value)}")
    return value


def _mapping(value: object, key: str, what: str, named: str = "") -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: {key} must be a mapping; got {quoted(value)}{named}")
    return cast("Mapping[str, object]", value)


def is_on(value: object) -> bool:
    """True if a key is on, as YAML or text spells it."""
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")
