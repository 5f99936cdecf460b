"""The values of a verl config, its batch by verl's own arithmetic, and the keys of a recipe for verl.

Each key has verl's own key and default; the micro-batches follow from them. All keys of a config of verl
(verl_keys.yaml) are here too, and the nearest to one that it does not have. Read in verl at commit 1dda039b (0.9,
trainer v1, which is its default), defaults in verl/trainer/config/_generated_ppo_trainer.yaml. No torch here.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from autofit.errors import ConfigError
from autofit.frontends.command import ASKS_FOR_NPUS, Command, commands
from autofit.frontends.command import UNSURE as OPEN
from autofit.recipe.yaml_file import parse_yaml

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_FSDP = f"{ACTOR}.fsdp_config"
FSDP_STRATEGIES = ("fsdp", "fsdp2")
MODEL_PATH = "model.path"  # ends the keys of the actor's model and the critic's
UNSURE = "?"  # a value that is not said for certain, in whose place no default may stand
_MATTERS_LITTLE = (  # where these are not certain, a rule may stay unsaid, and nothing else changes
    "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "data.max_prompt_length",
    "data.max_response_length", "rollout.tensor_model_parallel_size", "rollout.data_parallel_size",
    "rollout.pipeline_model_parallel_size",
)  # fmt: skip
ENGINE, CONFIG_NAME = "model_engine", "config-name"  # an override, and an option of hydra, that choose the defaults
_ENGINE, _CONFIG_NAME = "dp", "ppo_trainer"
# verl/trainer/config/_generated_ppo_trainer.yaml: what hydra fills in. None: not set.
DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 1024, "data.gen_batch_size": None, "data.max_prompt_length": 512,
    "data.max_response_length": 512, f"{ACTOR}.strategy": "fsdp", f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size": None, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_max_token_len_per_gpu": 16384, f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 0.001, f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_FSDP}.ulysses_sequence_parallel_size": 1, "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.lora_rank": 0, f"{ROLLOUT}.n": 1, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.data_parallel_size": 1, f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size": None, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None,
    f"{REF}.log_prob_micro_batch_size": None, f"{REF}.log_prob_micro_batch_size_per_gpu": None,
    "algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": False, "critic.enable": None,
    "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.use_v1": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerlConfig:
    """A config's values by dotted path, leaving out hydra's defaults."""

    said: Mapping[str, object]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "VerlConfig":
        """Config of a nested or a dotted mapping. A reference such as ${...} stays unsure, even if it has a default."""
        leaves = {path: UNSURE if "${" in str(value) else value for path, value in _leaves(values)}
        return cls({path: value for path, value in leaves.items() if value != UNSURE or path in DEFAULTS})

    @property
    def unsure(self) -> tuple[str, ...]:
        """The keys of the batch and of the models whose value is unsure."""
        return tuple(
            path for path, value in self.said.items() if value == UNSURE and not path.endswith(_MATTERS_LITTLE)
        )

    def value(self, path: str) -> object:
        return self.said.get(path, DEFAULTS.get(path))

    def whole(self, path: str) -> int | None:
        """The value, if it is a whole number."""
        found = self.value(path)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def is_on(self, path: str) -> bool:
        return str(self.value(path)).lower() in ("true", "1")

    @property
    def strategy(self) -> str:
        """Strategy that shards the actor: the stated one, else that of the engine or the config with the defaults."""
        said, engine = self.said.get(f"{ACTOR}.strategy"), str(self.said.get(ENGINE, _ENGINE))
        name = str(self.said.get(CONFIG_NAME, _CONFIG_NAME)).removesuffix(".yaml")
        if engine == _ENGINE and name != _CONFIG_NAME:
            return f"the config {name}"
        return str(said or (DEFAULTS[f"{ACTOR}.strategy"] if engine == _ENGINE else engine))

    def told(self, path: str) -> str:
        """`rollout.n 5`, or `rollout.n 1 (verl's default)`."""
        short = path.removeprefix("actor_rollout_ref.")
        return f"{short} {self.value(path)}" + ("" if path in self.said else " (verl's default)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlBatch:
    """The batch of a config under FSDP. `micro` is None with dynamic micro-batches, or if it is unset."""

    prompts: int  # of a generation
    mini_prompts: int  # of an optimizer step
    group: int
    gpus: int
    shards: int  # data-parallel size: GPUs by sequence-parallel size
    micro: int | None
    epochs: int
    multiple: int = 1  # of samples, to which verl pads a generation before it trains

    @property
    def generation(self) -> int:
        return self.prompts * self.group

    @property
    def padded(self) -> int:
        """Samples of a generation with the loss-free ones of two tokens that the trainer v1 adds.

        v1/trainer_base.py, _balance_batch; the older trainer adds none.
        """
        return -(-self.generation // self.multiple) * self.multiple

    @property
    def steps(self) -> int:
        """Optimizer steps of the actor in a generation."""
        return self.padded // self.effective * self.epochs

    @property
    def effective(self) -> int:
        """Samples of an optimizer step, over all GPUs (ray_trainer.py, line 1352; v1/trainer_base.py, line 1724)."""
        return self.mini_prompts * self.group

    @property
    def each(self) -> int:
        """Samples of an optimizer step on each data-parallel rank (engine_workers.py, line 269)."""
        return self.effective // self.shards


def typos(config: VerlConfig) -> Iterator[str]:
    """Keys that are one of the batch's but for a letter or two: the default would stand in place of what was meant."""
    for path in config.said:
        section, _, name = path.rpartition(".")
        near = [known for known in DEFAULTS if known.rpartition(".")[0] == section and path not in DEFAULTS]
        names = {known.rpartition(".")[2]: known for known in near if abs(len(known) - len(path)) <= 2}
        if close := get_close_matches(name, names, n=1, cutoff=0.9):
            yield f"verl has no key {path}; write {names[close[0]]}"


def on_gpus(values: Mapping[str, object], gpus: int | None) -> Mapping[str, object]:
    """The `values` of a config on so many GPUs of one machine, where they are told beside it."""
    paths = {path: value for path, value in VerlConfig.of(values).said.items() if not path.startswith("trainer.n")}
    return values if gpus is None else {**paths, "trainer.nnodes": 1, "trainer.n_gpus_per_node": gpus}


BATCH_KEYS = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", "trainer.nnodes",
              "trainer.n_gpus_per_node", f"{ACTOR}.ppo_epochs")  # fmt: skip


def batch_of(config: VerlConfig) -> VerlBatch | None:
    """The batch, if its numbers are whole, and the strategy is FSDP."""
    found = [config.whole(name) for name in BATCH_KEYS]
    if None in found or config.strategy not in FSDP_STRATEGIES:
        return None
    prompts, mini, group, nodes, each, epochs = (number or 1 for number in found)
    dynamic = config.is_on(f"{ACTOR}.use_dynamic_bsz")
    shards = max(1, nodes * each // sequence_parallel(config))
    minis = [mini, config.whole("critic.ppo_mini_batch_size") or mini] if has_critic(config) else [mini]
    multiple = math.lcm(shards, *(group * size for size in minis)) if config.is_on("trainer.use_v1") else 1
    return VerlBatch(
        prompts=prompts, mini_prompts=mini, group=group, gpus=nodes * each, shards=shards,
        micro=None if dynamic else config.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu"), epochs=epochs,
        multiple=multiple,
    )  # fmt: skip


def has_critic(config: VerlConfig) -> bool:
    """trainer/ppo/utils.py, need_critic."""
    if config.value("critic.enable") is not None:
        return config.is_on("critic.enable")
    return config.value("algorithm.adv_estimator") == "gae"


def effective_sentence(values: Mapping[str, object]) -> str:
    """The effective batch in a sentence, from what the file says and verl's defaults."""
    config = VerlConfig.of(values)
    mini, group = config.whole(f"{ACTOR}.ppo_mini_batch_size"), config.whole(f"{ROLLOUT}.n")
    if mini is None or group is None:
        return "its optimizer steps are of ppo_mini_batch_size x rollout.n samples over all GPUs"
    return (
        f"its optimizer steps are of {mini * group:,} samples over all GPUs (ppo_mini_batch_size {mini} x rollout.n "
        f"{group})"
    )


def sequence_parallel(config: VerlConfig, section: str = ACTOR) -> int:
    """Ulysses' sequence-parallel size of the actor, or of the reference where `section` is its path.

    The model's own key wins where it is above 1 (workers/config/actor.py); the reference has the actor's own, but not
    that of the actor's fsdp_config (trainer/config/ref/dp_ref.yaml).
    """
    key = "ulysses_sequence_parallel_size"
    own = config.whole(f"{section}.{key}") or config.whole(f"{ACTOR}.{key}") or 1
    return own if own > 1 else config.whole(f"{section}.fsdp_config.{key}") or 1


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


# The overrides of a shell script that starts verl: `data.train_batch_size=${BATCH:-1024}`. Nothing is run.
#
# What the script sets outside of conditions and loops is certain. A value that hangs on a condition, on the environment
# or on a command is not, and its key is named instead.

_ENTRY = "verl.trainer.main_ppo"
_ACTOR = "actor_rollout_ref."  # of the keys of every training with verl's workers
_NO_TRAINING = re.compile(r"generat|(?:^|[._])(?:eval|serve|merge)")  # in the name of what is started
_OVERRIDE = re.compile(r"(?:\+{0,2}(model_engine|[a-z_]+(?:\.[a-z0-9_]+)+)|--(config-name))=(.*)", re.DOTALL)


# What is taken for granted where a script has other values for Ascend's cards.
NVIDIA = "the script asks for torch_npu; its values for NVIDIA's cards were read, not those for Ascend's NPUs"


def asks_for_npus(text: str) -> bool:
    return ASKS_FOR_NPUS.search(text) is not None


def starts_verl(text: str) -> bool:
    return (_ENTRY in text or _ACTOR in text) and next(_trainings(text), None) is not None


def entry(text: str) -> str | None:
    """The module or file that a script trains with in place of verl's own, as projects built on verl have one."""
    found = next((_program(command) for command in _trainings(text)), None)
    return None if found == _ENTRY else found


def overrides(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """({dotted key: value} of the certain overrides, the keys of the others)."""
    found: dict[str, object] = {}
    unread: dict[str, None] = {}
    for command in _trainings(text):
        said = _overrides(command)
        for key, value in said.items():
            if value == UNSURE or command.conditional or found.get(key, value) != value:
                unread[key] = None
            else:
                found[key] = value
    return {key: value for key, value in found.items() if key not in unread}, tuple(unread)


def bare_keys(text: str) -> tuple[str, ...]:
    """The keys of the overrides of a script that hydra must find in verl's config: without a `+` or `++`."""
    words = [word for command in _trainings(text) for word in command.words if not word.startswith(("+", "-"))]
    found = [match[1] for word in words if (match := _OVERRIDE.fullmatch(word))]
    return tuple(dict.fromkeys(key for key in found if "." in key))


def likely_overrides(text: str) -> dict[str, object]:
    """The values of uncertain overrides, as they would be if conditions that set a variable held.

    The first value stands where several conditions set one, None if it comes from a command. Of a model in a folder
    that the environment names, the last part of the path stands. A training that itself hangs on a condition is left
    out, unless all do: then the first is taken.
    """
    perhaps: dict[str, object] = {}
    trainings = list(_trainings(text, likely=True))
    for command in [each for each in trainings if not each.conditional] or trainings[:1]:
        for key, value in _overrides(command, folders=True).items():
            perhaps.setdefault(key, None if value == UNSURE else value)
    return {key: perhaps[key] for key in overrides(text)[1] if key in perhaps}


def span(text: str) -> tuple[int, int]:
    """(start, end) of the text of the first training that a script starts. Raises ConfigError if it starts none."""
    for command in _trainings(text):
        return command.start, command.end
    raise ConfigError(f"no `python -m {_ENTRY}` is started in it, so it does not train")


def _trainings(text: str, *, likely: bool = False) -> Iterator[Command]:
    """The commands of a script that start verl, or a project's own trainer with verl's keys."""
    return (command for command in commands(text, likely=likely) if _program(command) is not None)


def _program(command: Command) -> str | None:
    """The module or file with which a command trains by verl's keys, if it is such a training."""
    words = command.words
    if _ENTRY in words:
        return _ENTRY
    if not any(word.lstrip("+").startswith(_ACTOR) for word in words):
        return None
    files = (word for before, word in pairwise(words) if before == "-m" or word.endswith(".py"))
    return next((word for word in files if OPEN not in word and not _NO_TRAINING.search(word)), None)


def _overrides(command: Command, *, folders: bool = False) -> dict[str, object]:
    """{key: value} of a command, the last one if a key is given twice; UNSURE for an uncertain one.

    With `folders` a model's path is at least the name of its folder.
    """
    said: dict[str, object] = {}
    words = iter(command.words)
    for word in words:
        word = f"{word}={next(words, '')}" if word == "--config-name" else word
        word = re.sub(r"^\+{0,2}\w+@actor_rollout_ref\.actor=", f"{ENGINE}=", word)  # the whole group is another one
        if found := _OVERRIDE.fullmatch(word):
            key, value = found[1] or found[2], found[3]
            if folders and key.endswith(MODEL_PATH):
                value = value.rpartition("/")[2] if OPEN in value else value
            said[key] = UNSURE if OPEN in value else _parsed(value)
    return said


def _parsed(value: str) -> object:
    """The value as YAML has it; hydra's null is None here as well."""
    try:
        return parse_yaml(value)
    except ConfigError:
        return value


# -- the keys of a recipe ---------------------------------------------------------------------------------------------

# actor, rollout, reference, model
A, R, F, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
FSDP = f"{A}.fsdp_config"
SGLANG = "sglang"  # a rollout.name
_USUAL = object()


@dataclass(frozen=True, slots=True)
class VerlKey:
    """A key of verl that the recipe takes over: its path, verl's default of it, and a path whose value comes before."""

    path: str
    other: object = None  # verl's default of a key that is not among those of the batch
    like: str | None = None

    @property
    def usual(self) -> object:
        return DEFAULTS.get(self.path, self.other)


def _key(path: str, other: object = None, like: str | None = None, *, default: object = _USUAL) -> Any:
    """A setting that is the key `path` of verl: its default is verl's, unless another one is given."""
    key = VerlKey(path, other, like)
    return field(default=key.usual if default is _USUAL else default, metadata={"key": key})


@dataclass(frozen=True, kw_only=True)
class VerlSettings:
    """The keys of a recipe: verl's own by their last names, and three that follow from its batch."""

    model_path: str = field(metadata={"key": VerlKey(f"{M}.path")})
    ppo_micro_batch_size_per_gpu: int = _key(f"{A}.ppo_micro_batch_size_per_gpu", default=1)
    gradient_accumulation_steps: int = 1  # micro-batches of an optimizer step on each rank
    steps_per_generation: int = 1  # micro-batches of a generation on each rank
    rollout_n: int = _key(f"{R}.n")
    ppo_epochs: int = _key(f"{A}.ppo_epochs")
    max_prompt_length: int = _key("data.max_prompt_length")
    max_response_length: int = _key("data.max_response_length")
    max_steps: int = 1
    # -- sizes
    use_dynamic_bsz: bool = _key(f"{A}.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = _key(f"{A}.ppo_max_token_len_per_gpu")
    log_prob_micro_batch_size_per_gpu: int = _key(f"{R}.log_prob_micro_batch_size_per_gpu", default=1)
    log_prob_max_token_len_per_gpu: int = _key(
        f"{R}.log_prob_max_token_len_per_gpu", 16384, f"{A}.ppo_max_token_len_per_gpu"
    )
    ref_log_prob_micro_batch_size_per_gpu: int = _key(f"{F}.log_prob_micro_batch_size_per_gpu", default=1)
    ref_log_prob_max_token_len_per_gpu: int = _key(
        f"{F}.log_prob_max_token_len_per_gpu", 16384, f"{A}.ppo_max_token_len_per_gpu"
    )
    ulysses_sequence_parallel_size: int = 1  # ranks that share their samples
    ref_ulysses_sequence_parallel_size: int = 1
    # -- what is computed
    reference: bool = False
    use_kl_loss: bool = _key(f"{A}.use_kl_loss")
    calculate_entropy: bool = False  # in the update
    bypass_mode: bool = _key("algorithm.rollout_correction.bypass_mode", False)  # the rollout's log-probabilities count
    use_fused_kernels: bool = _key(f"{M}.use_fused_kernels", False)
    enable_gradient_checkpointing: bool = _key(f"{M}.enable_gradient_checkpointing", True)
    lora_rank: int = _key(f"{M}.lora_rank", like=f"{M}.lora.rank")
    lora_alpha: int = _key(f"{M}.lora_alpha", 16)
    lora_merge: bool = _key(f"{M}.lora.merge", False)  # the rollout engine has merged weights, and no adapters
    target_modules: str | list[str] = field(
        default="all-linear", metadata={"key": VerlKey(f"{M}.target_modules", "all-linear")}
    )
    attn_implementation: str = _key(f"{M}.override_config.attn_implementation", "flash_attention_2")
    use_torch_compile: bool = _key(f"{FSDP}.use_torch_compile", True)
    entropy_from_logits_with_chunking: bool = _key(
        f"{FSDP}.entropy_from_logits_with_chunking", False, f"{A}.entropy_from_logits_with_chunking"
    )
    entropy_from_logits_chunk_size: int = _key(
        f"{FSDP}.entropy_from_logits_chunk_size", 2048, f"{A}.entropy_from_logits_chunk_size"
    )
    entropy_checkpointing: bool = _key(f"{FSDP}.entropy_checkpointing", False, f"{A}.entropy_checkpointing")
    trust_remote_code: bool = _key(f"{M}.trust_remote_code", False)
    # -- the critic of PPO
    critic: bool = False
    critic_model_path: str | None = _key("critic.model.path", "~/models/deepseek-llm-7b-chat", default=None)
    critic_steps_per_generation: int = 1  # its optimizer steps, of all epochs
    critic_ppo_epochs: int = _key("critic.ppo_epochs", 1, f"{A}.ppo_epochs")
    critic_max_token_len_per_gpu: int = 32768  # of an update
    critic_forward_max_token_len_per_gpu: int = _key("critic.ppo_infer_max_token_len_per_gpu", 32768)
    critic_ulysses_sequence_parallel_size: int = _key("critic.fsdp.ulysses_sequence_parallel_size", 1)
    critic_enable_gradient_checkpointing: bool = _key("critic.model.enable_gradient_checkpointing", True)
    critic_sharding: str = "fsdp1"
    critic_model_dtype: str = _key("critic.fsdp.model_dtype", "fp32")
    critic_param_offload: bool = _key("critic.fsdp.param_offload", False)
    critic_optimizer_offload: bool = _key("critic.fsdp.optimizer_offload", False)
    critic_offload_policy: bool = _key("critic.fsdp.offload_policy", False)
    critic_reshard_after_forward: bool = _key("critic.fsdp.reshard_after_forward", True)
    critic_forward_prefetch: bool = _key("critic.fsdp.forward_prefetch", False)
    critic_use_no_sync_for_gradient_accumulation: bool = _key("critic.fsdp.use_no_sync_for_gradient_accumulation", True)
    critic_lr: float = _key("critic.optim.lr", 1e-5)
    critic_clip_grad: float = _key("critic.optim.clip_grad", 1.0)
    # -- how the model is held
    model_dtype: str = _key(f"{FSDP}.model_dtype", "fp32")
    param_dtype: str = _key(f"{FSDP}.mixed_precision.param_dtype", "bf16")
    reduce_dtype: str = _key(f"{FSDP}.mixed_precision.reduce_dtype", "fp32")
    ref_model_dtype: str = _key(f"{F}.fsdp_config.model_dtype", "fp32")
    param_offload: bool = _key(f"{FSDP}.param_offload", False)
    optimizer_offload: bool = _key(f"{FSDP}.optimizer_offload", False)
    offload_policy: bool = _key(f"{FSDP}.offload_policy", False)  # of FSDP2 alone
    forward_prefetch: bool = _key(f"{FSDP}.forward_prefetch", False)
    use_no_sync_for_gradient_accumulation: bool = _key(f"{FSDP}.use_no_sync_for_gradient_accumulation", True)
    lr: float = _key(f"{A}.optim.lr", 1e-6)
    clip_grad: float = 1.0
    # -- the engine of the rollout
    rollout_name: str = _key(f"{R}.name", "vllm")
    gpu_memory_utilization: float = _key(f"{R}.gpu_memory_utilization", 0.5)
    tensor_model_parallel_size: int = _key(f"{R}.tensor_model_parallel_size")
    free_cache_engine: bool = _key(f"{R}.free_cache_engine", True)
    enforce_eager: bool = _key(f"{R}.enforce_eager", False)
    max_num_seqs: int = _key(f"{R}.max_num_seqs", 256)
    max_num_batched_tokens: int = _key(f"{R}.max_num_batched_tokens", 8192)
    max_model_len: int | None = _key(f"{R}.max_model_len")
    max_position_embeddings: int | None = _key(
        f"{M}.override_config.max_position_embeddings",
        like=f"{M}.override_config.model_config.max_position_embeddings",
    )  # in place of the model's own
    load_format: str = _key(f"{R}.load_format", "dummy")  # else vLLM loads the weights below LoRA's adapters itself
    layered_summon: bool = _key(f"{R}.layered_summon", False)  # only LoRA's adapters are sent, a layer at a time
    update_weights_bucket_megabytes: int = _key(f"{R}.checkpoint_engine.update_weights_bucket_megabytes", 2048)

    @property
    def tokens(self) -> int:
        """Of the longest sample."""
        return self.max_prompt_length + self.max_response_length

    @property
    def samples(self) -> int:
        """Of an optimizer step on each data-parallel rank."""
        return self.ppo_micro_batch_size_per_gpu * self.gradient_accumulation_steps

    @property
    def generated(self) -> int:
        """Samples of a generation on each data-parallel rank."""
        return self.ppo_micro_batch_size_per_gpu * self.steps_per_generation

    @property
    def referred(self) -> int:
        """The same on a rank of the reference, which may share samples with other ranks than the actor's."""
        return self.generated * self.ref_ulysses_sequence_parallel_size // self.ulysses_sequence_parallel_size

    @property
    def judged(self) -> int:
        """The same on a rank of the critic."""
        return self.generated * self.critic_ulysses_sequence_parallel_size // self.ulysses_sequence_parallel_size

    @property
    def judged_at_once(self) -> int:
        """Samples of an optimizer step of the critic on each of its data-parallel ranks."""
        return self.judged * self.critic_ppo_epochs // self.critic_steps_per_generation

    @property
    def steps_of_a_generation(self) -> int:
        return max(1, self.generated // self.samples) * self.ppo_epochs

    def split(self, samples: int, *, rows: int, budget: int, sharers: int) -> list[int]:
        """Samples of each micro-batch, all of full length: `rows`, or with use_dynamic_bsz by tokens."""
        if self.use_dynamic_bsz:
            return self.by_tokens(samples, budget, sharers)
        return [rows] * (samples // rows) + ([samples % rows] if samples % rows else [])

    def by_tokens(self, samples: int, budget: int, sharers: int) -> list[int]:
        """The fewest micro-batches that hold all tokens, with the samples dealt out evenly, as verl makes them.

        One may be above the budget (verl/utils/seqlen_balancing.py, rearrange_micro_batches), which is of each of the
        `sharers` ranks that share a sample (engine/utils.py, line 110).
        """
        number = min(samples, math.ceil(samples * self.tokens / (budget * sharers)))
        more = samples % number
        return [samples // number + 1] * more + [samples // number] * (number - more)


# {key of the recipe: verl's}
KEYS: Mapping[str, VerlKey] = {f.name: f.metadata["key"] for f in fields(VerlSettings) if "key" in f.metadata}


# -- all keys of a config of verl -------------------------------------------------------------------------------------

_ALIKE = 0.85
_MOST_TOLD = 5  # unknown keys of a file
_LONGEST = "actor_rollout_ref"  # the part of most keys


def is_below_a_part(key: str) -> bool:
    """True if a key is a dotted path below one of the parts of verl's config."""
    head, dot, _ = key.lstrip("+").partition(".")
    return bool(dot) and head in {section.partition(".")[0] for section in _sections()}


def whole_key(key: str) -> str:
    """`key` as hydra wants it, also if it lacks its actor_rollout_ref, which `explain` leaves out of its lines."""
    path, head = f"{_LONGEST}.{key}", key.partition(".")[0]
    below = any(f"{section}.".startswith(f"{_LONGEST}.{head}.") for section in _sections())
    return path if below and "." in key and not is_below_a_part(key) else key


def is_in_config(path: str) -> bool:
    """True if hydra finds a path in verl's config, so that it may be overridden as it is, with no `+`."""
    section, _, name = path.rpartition(".")
    return path in _sections() or name in _sections().get(section, ())


def unknown_key(key: str) -> str | None:
    """Error of a key that verl's config lacks; None of one that it has, or that is added with `+`."""
    read = {path for named in KEYS.values() for path in (named.path, named.like)}
    below_open = any(key.startswith(f"{section}.") for section, names in _sections().items() if not names)
    if key.startswith("+") or key in read or below_open or is_in_config(key):
        return None
    return f"verl has no key {key}, and hydra refuses it at the start" + (
        f"; write {near}" if (near := _near(key)) else ""
    )


def script_notes(text: str, found: Mapping[str, object], unread: Sequence[str]) -> tuple[str, ...]:
    """The notes on a whole script with the overrides `found`, and `unread` ones: its start, cards and keys."""
    own = entry(text)
    return (
        *(() if own is None else (f"{own} is taken for verl's main_ppo: what it does besides is not simulated",)),
        *((NVIDIA,) if asks_for_npus(text) else ()), *_unknown_overrides(text, found, unread, own or "an older verl"),
    )  # fmt: skip


def _unknown_overrides(text: str, found: Mapping[str, object], unread: Sequence[str], who: str) -> tuple[str, ...]:
    """Overrides that hydra would refuse in a script that starts verl's FSDP engines; `who` may have them."""
    config = VerlConfig.of(found)
    if config.strategy not in FSDP_STRATEGIES or {ENGINE, CONFIG_NAME}.intersection(unread):
        return ()  # another engine's config has keys of its own
    told = "".join(typos(config))
    unknown = [key for key in bare_keys(text) if f" {key};" not in told and unknown_key(key)]
    named = [f"{key} (write {near})" if (near := _near(key)) else key for key in unknown]
    it = "it" if len(named) == 1 else "them"
    told = f"verl 0.9 has no key {', '.join(named)}; hydra refuses {it} at the start ({who} may have {it})"
    return (told,) if named else ()


def file_notes(values: Mapping[str, object]) -> tuple[str, ...]:
    """A note on the keys of a YAML that verl lacks, which hydra adds to the config, for FSDP engines."""
    config = VerlConfig.of(values)
    told = "".join(typos(config))
    unknown = [
        path for path in config.said
        if is_below_a_part(path) and "._" not in path and f" {path};" not in told and unknown_key(path)
    ] if config.strategy in FSDP_STRATEGIES else []  # fmt: skip
    if not unknown:
        return ()
    named = [f"{path} (write {near})" if (near := _beside(path)) else path for path in unknown[:_MOST_TOLD]]
    more = f" and {len(unknown) - _MOST_TOLD} more" if len(unknown) > _MOST_TOLD else ""
    return (
        f"verl 0.9 has no key {', '.join(named)}{more}; hydra takes it from a file without a word, so it has no "
        "effect, or ends the run where verl makes a dataclass of its section (another verl may have it)",
    )  # fmt: skip


def _near(key: str) -> str | None:
    """The key that was meant: the one less its actor_rollout_ref, like it in its section, or of its name near it."""
    if is_in_config(whole := whole_key(key)):
        return whole
    if beside := _beside(key):
        return beside
    name = key.rpartition(".")[2]
    sections = [section for section in _sections() if section.partition(".")[0] == key.partition(".")[0]]
    elsewhere = [f"{section}.{name}" for section in sections if name in _sections()[section]]
    return next(iter(get_close_matches(key, elsewhere, n=1, cutoff=0.0)), None)


def _beside(key: str) -> str | None:
    """The key of its section that is nearly the same."""
    section, _, name = key.rpartition(".")
    close = get_close_matches(name, _sections().get(section, ()), n=1, cutoff=_ALIKE)
    return f"{section}.{close[0]}" if close else None


@cache
def _sections() -> dict[str, tuple[str, ...]]:
    """{section: its keys}; () of one below which any key may be added."""
    text = resources.files("autofit.frontends").joinpath("verl_keys.yaml").read_text(encoding="utf-8")
    sections = parse_yaml(text)
    assert isinstance(sections, dict)
    return {section: tuple(str(names).split()) for section, names in sections.items()}
