"""A config of verl as a recipe of the trainer `verl`: its values with verl's defaults, its GPUs, and what is left out.

Defaults are those of verl at commit 1dda039b (0.9): verl/trainer/config/_generated_ppo_trainer.yaml. No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, quoted
from autofit.frontends.draft import number
from autofit.frontends.foreign import Foreign
from autofit.frontends.verl import (
    DEFAULTS,
    UNSURE,
    Batch,
    VerlConfig,
    batch_of,
    likely_overrides,
    on_gpus,
    overrides,
    sequence_parallel,
)
from autofit.frontends.verl_rules import critic_values, has_critic

VERSION = "verl 0.9 (1dda039b)"
_A, _R, _F, _M = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model")
)  # actor, rollout, reference, model
_FSDP = f"{_A}.fsdp_config"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of verl that the recipe takes over: its path, verl's default of it, and a path whose value comes before."""

    path: str
    other: object = None  # verl's default of a key that is not among those of the batch
    like: str | None = None

    @property
    def usual(self) -> object:
        return DEFAULTS.get(self.path, self.other)


# {key of the recipe: verl's}
KEYS: Mapping[str, Key] = {
    "model_path": Key(f"{_M}.path"),
    "ppo_micro_batch_size_per_gpu": Key(f"{_A}.ppo_micro_batch_size_per_gpu"),
    "rollout_n": Key(f"{_R}.n"),
    "ppo_epochs": Key(f"{_A}.ppo_epochs"),
    "max_prompt_length": Key("data.max_prompt_length"),
    "max_response_length": Key("data.max_response_length"),
    "use_dynamic_bsz": Key(f"{_A}.use_dynamic_bsz"),
    "ppo_max_token_len_per_gpu": Key(f"{_A}.ppo_max_token_len_per_gpu"),
    "log_prob_micro_batch_size_per_gpu": Key(f"{_R}.log_prob_micro_batch_size_per_gpu"),
    "log_prob_max_token_len_per_gpu": Key(
        f"{_R}.log_prob_max_token_len_per_gpu", 16384, f"{_A}.ppo_max_token_len_per_gpu"
    ),
    "ref_log_prob_micro_batch_size_per_gpu": Key(f"{_F}.log_prob_micro_batch_size_per_gpu"),
    "ref_log_prob_max_token_len_per_gpu": Key(
        f"{_F}.log_prob_max_token_len_per_gpu", 16384, f"{_A}.ppo_max_token_len_per_gpu"
    ),
    "use_kl_loss": Key(f"{_A}.use_kl_loss"),
    "use_fused_kernels": Key(f"{_M}.use_fused_kernels", False),
    "enable_gradient_checkpointing": Key(f"{_M}.enable_gradient_checkpointing", True),
    "lora_rank": Key(f"{_M}.lora_rank", like=f"{_M}.lora.rank"),
    "lora_alpha": Key(f"{_M}.lora_alpha", 16),
    "target_modules": Key(f"{_M}.target_modules", "all-linear"),
    "attn_implementation": Key(f"{_M}.override_config.attn_implementation", "flash_attention_2"),
    "trust_remote_code": Key(f"{_M}.trust_remote_code", False),
    "use_torch_compile": Key(f"{_FSDP}.use_torch_compile", True),
    "entropy_from_logits_with_chunking": Key(
        f"{_FSDP}.entropy_from_logits_with_chunking", False, f"{_A}.entropy_from_logits_with_chunking"
    ),
    "entropy_from_logits_chunk_size": Key(
        f"{_FSDP}.entropy_from_logits_chunk_size", 2048, f"{_A}.entropy_from_logits_chunk_size"
    ),
    "entropy_checkpointing": Key(f"{_FSDP}.entropy_checkpointing", False, f"{_A}.entropy_checkpointing"),
    "param_dtype": Key(f"{_FSDP}.mixed_precision.param_dtype", "bf16"),
    "reduce_dtype": Key(f"{_FSDP}.mixed_precision.reduce_dtype", "fp32"),
    "model_dtype": Key(f"{_FSDP}.model_dtype", "fp32"),
    "ref_model_dtype": Key(f"{_F}.fsdp_config.model_dtype", "fp32"),
    "param_offload": Key(f"{_FSDP}.param_offload", False),
    "optimizer_offload": Key(f"{_FSDP}.optimizer_offload", False),
    "forward_prefetch": Key(f"{_FSDP}.forward_prefetch", False),
    "use_no_sync_for_gradient_accumulation": Key(f"{_FSDP}.use_no_sync_for_gradient_accumulation", True),
    "lr": Key(f"{_A}.optim.lr", 1e-6),
    "gpu_memory_utilization": Key(f"{_R}.gpu_memory_utilization", 0.5),
    "tensor_model_parallel_size": Key(f"{_R}.tensor_model_parallel_size"),
    "free_cache_engine": Key(f"{_R}.free_cache_engine", True),
    "enforce_eager": Key(f"{_R}.enforce_eager", False),
    "max_num_seqs": Key(f"{_R}.max_num_seqs", 256),
    "max_num_batched_tokens": Key(f"{_R}.max_num_batched_tokens", 8192),
    "max_model_len": Key(f"{_R}.max_model_len"),
    "layered_summon": Key(f"{_R}.layered_summon", False),
    "update_weights_bucket_megabytes": Key(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", 2048),
    "critic_model_path": Key("critic.model.path", "~/models/deepseek-llm-7b-chat"),
    "critic_ppo_epochs": Key("critic.ppo_epochs", 1, f"{_A}.ppo_epochs"),
    "critic_forward_max_token_len_per_gpu": Key("critic.ppo_infer_max_token_len_per_gpu", 32768),
    "critic_ulysses_sequence_parallel_size": Key("critic.fsdp.ulysses_sequence_parallel_size", 1),
    "critic_enable_gradient_checkpointing": Key("critic.model.enable_gradient_checkpointing", True),
    "critic_model_dtype": Key("critic.fsdp.model_dtype", "fp32"),
    "critic_param_offload": Key("critic.fsdp.param_offload", False),
    "critic_optimizer_offload": Key("critic.fsdp.optimizer_offload", False),
    "critic_reshard_after_forward": Key("critic.fsdp.reshard_after_forward", True),
    "critic_forward_prefetch": Key("critic.fsdp.forward_prefetch", False),
    "critic_use_no_sync_for_gradient_accumulation": Key("critic.fsdp.use_no_sync_for_gradient_accumulation", True),
    "critic_lr": Key("critic.optim.lr", 1e-5),
    "critic_clip_grad": Key("critic.optim.clip_grad", 1.0),
}
_CRITIC = "critic_"  # begins the recipe's keys of a critic
# What the worker sets in its allocator for all passes (engine_workers.py, the end of update_weights).
_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_MICRO = "ppo_micro_batch_size_per_gpu"
_SCORED = "log_prob_micro_batch_size_per_gpu"
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_ON, _OFF = ("true", "1"), ("false", "0", "none", "null", "")


def of_script(text: str, *, ranks: int | None = None) -> Foreign:
    """The recipe of a shell script that starts verl; what hangs on conditions is taken as if they held, with a note."""
    found, unread = overrides(text)
    likely = {key: UNSURE if value is None else value for key, value in likely_overrides(text).items()}
    return recipe({**likely, **found}, ranks=ranks, unread=unread)


def recipe(
    values: Mapping[str, object], *, folder: Path | None = None, ranks: int | None = None, unread: tuple[str, ...] = ()
) -> Foreign:
    """The recipe of a config's `values` (nested, or by dotted paths), of which the keys `unread` are not certain.

    Nothing in it is read from the config's `folder`. `ranks` are the GPUs where they are told beside the file.

    Raises ConfigError for what is not simulated, and for a config that verl would refuse or that does not say its
    batch.
    """
    config = VerlConfig.of(on_gpus(values, ranks))
    if refused := next(_refusals(config), None):
        raise ConfigError(refused)
    batch = batch_of(config)
    if batch is None or config.unsure:
        open_keys = ", ".join(config.unsure) or "data.train_batch_size, ppo_mini_batch_size and rollout.n"
        raise ConfigError(
            f"the batch of this verl config is not certain: {open_keys} must be whole numbers in the file"
        )
    critic = has_critic(config)
    keys = {key: named for key, named in KEYS.items() if critic or not key.startswith(_CRITIC)}
    found = {key: _value(config, named) for key, named in keys.items() if _said(config, named) is not None}
    found |= _sizes(config, batch, found)
    if critic:
        found |= critic_values(config, batch)
        found["critic_model_dtype"] = _dtype("critic_model_dtype", str(found["critic_model_dtype"]))
    if not found.get("model_path"):
        raise ConfigError(f"the verl config must name its model; give {_M}.path")
    found["reference"] = _references(config)
    found["calculate_entropy"] = config.is_on(f"{_A}.calculate_entropy") or _number(config, f"{_A}.entropy_coeff") != 0
    found["ulysses_sequence_parallel_size"] = sequence_parallel(config)
    found["ref_ulysses_sequence_parallel_size"] = sequence_parallel(config, _F)
    for key in ("model_dtype", "ref_model_dtype", "param_dtype", "reduce_dtype"):
        usual = "bf16" if key == "ref_model_dtype" else KEYS[key].usual  # null of a model that is not trained
        found[key] = _dtype(key, str(found.get(key) or usual))
    sharding = "fsdp2" if config.strategy == "fsdp2" else "fsdp1"
    nodes = config.whole("trainer.nnodes") or 1
    reshards = _truth(f"{_FSDP}.reshard_after_forward", config.said.get(f"{_FSDP}.reshard_after_forward", True))
    launch: dict[str, object] = {
        "ranks": batch.gpus, "sharding": sharding, "reshard_after_forward": reshards, "machines": nodes,
        "config": {"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}},  # each rank saves its share
    }  # fmt: skip
    return Foreign(
        tool="verl", trainer="verl", values={**found, "launch": launch, "env": dict(_ENVIRONMENT)}, ranks=batch.gpus,
        prompt_tokens=cast(int, found["max_prompt_length"]),
        keys={key: named.path for key, named in KEYS.items()}, notes=tuple(_notes(config, unread)),
    )  # fmt: skip


# -- values -----------------------------------------------------------------------------------------------------------


def _said(config: VerlConfig, named: Key) -> object:
    """The value of the config, else verl's default; None where neither has one."""
    own = config.said.get(named.path)
    if own is None and named.like is not None:
        own = config.said.get(named.like)
    return named.usual if own is None or own == UNSURE else own


def _value(config: VerlConfig, named: Key) -> object:
    """The value in the type of verl's default."""
    given = _said(config, named)
    if isinstance(named.usual, bool):
        return _truth(named.path, given)
    if isinstance(named.usual, float) and isinstance(given, int | float | str):
        return _finite(named.path, given)
    if isinstance(named.usual, int) and (isinstance(given, bool) or not isinstance(given, int)):
        raise ConfigError(f"{named.path} must be a whole number; got {quoted(given)}")
    return given


def _truth(path: str, given: object) -> bool:
    text = str(given).lower()
    if text not in (*_ON, *_OFF):
        raise ConfigError(f"{path} must be True or False; got {quoted(given)}")
    return text in _ON


def _number(config: VerlConfig, path: str) -> float:
    return _finite(path, config.said.get(path, 0))


def _finite(path: str, given: object) -> float:
    found = number(given)
    if found is None:
        raise ConfigError(f"{path} must be a number; got {quoted(given)}")
    return found


def _dtype(key: str, given: str) -> str:
    if given not in _DTYPES:
        raise ConfigError(f"{KEYS[key].path} must be fp32 or bf16; got {quoted(given)}")
    return _DTYPES[given]


def _sizes(config: VerlConfig, batch: Batch, found: Mapping[str, object]) -> dict[str, object]:
    """The micro-batches, and how many are in an optimizer step and in a generation of each rank.

    With a token budget the micro-batches follow from it, and 1 sample stands in the keys of the batch.
    """
    dynamic = bool(found["use_dynamic_bsz"])
    micro = 1 if dynamic else batch.micro
    if micro is None:
        raise ConfigError(f"{_A}.{_MICRO} must be set, or {_A}.use_dynamic_bsz; verl refuses it at the start")
    if batch.effective % batch.shards or batch.each % micro:
        raise ConfigError(
            f"{_A}.{_MICRO} {micro} must divide the samples of a rank and optimizer step, ppo_mini_batch_size x "
            f"rollout.n / GPUs = {batch.effective} / {batch.shards}; verl ends at the first update"
        )
    if batch.generation % (batch.shards * micro) or batch.generation % batch.effective:
        raise ConfigError(
            f"data.train_batch_size {batch.prompts} must be a multiple of ppo_mini_batch_size {batch.mini_prompts}, "
            f"and its {batch.generation} samples of {batch.shards} ranks with micro-batches of {micro}"
        )
    sizes: dict[str, object] = {
        _MICRO: micro, "gradient_accumulation_steps": batch.each // micro,
        "steps_per_generation": batch.generation // batch.shards // micro,
    }  # fmt: skip
    scored = [(_SCORED, f"{_R}.{_SCORED}")]
    if _references(config):
        scored.append((f"ref_{_SCORED}", f"{_F}.{_SCORED}"))
    for key, path in () if dynamic else scored:
        if config.whole(path) is None:
            raise ConfigError(
                f"{path} must be a whole number, or {_A}.use_dynamic_bsz: True; verl refuses it at the start"
            )
        sizes[key] = config.whole(path)
    return sizes


def _references(config: VerlConfig) -> bool:
    """verl/trainer/ppo/utils.py, need_reference_policy."""
    return config.is_on(f"{_A}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")


# -- back in verl's own keys -------------------------------------------------------------------------------------------

# {key of the recipe: verl's} of those that verl derives from its batch
_FOLLOW = ("gradient_accumulation_steps", "steps_per_generation")
_ABSENT = f"{_M}.override_config."  # keys below it are not in verl's config, which hydra must be told


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{verl's key: value} of changes of a recipe. Raises ConfigError for what verl has no key for."""
    if unknown := [key for key in changes if key not in KEYS and key not in _FOLLOW]:
        raise ConfigError(f"{unknown[0]}: {changes[unknown[0]]} has no key in verl")
    own = {KEYS[key].path: value for key, value in changes.items() if key in KEYS}
    return {f"++{path}" if path.startswith(_ABSENT) else path: value for path, value in own.items()}


# -- what is not simulated --------------------------------------------------------------------------------------------


def _refusals(config: VerlConfig) -> Iterator[str]:
    """Why a config is not read as a recipe, the first reason first."""
    strategy, said = config.strategy, config.said
    if strategy not in ("fsdp", "fsdp2"):
        yield f"verl with {strategy} is not simulated, only its FSDP engines: set actor.strategy to fsdp or fsdp2"
    engine = str(said.get(f"{_R}.name", "vllm"))
    names = {"sglang": "SGLang", "trtllm": "TensorRT-LLM"}
    if engine != "vllm":
        yield f"the rollout of verl by {names.get(engine, engine)} is not simulated, only vLLM's: set rollout.name=vllm"
    mode = str(said.get("trainer.v1.trainer_mode", "sync"))
    if config.is_on(f"{_R}.disaggregation.enabled") or (config.whole(f"{_R}.nnodes") or 0) > 0 or mode != "sync":
        yield "a rollout on GPUs of its own (rollout.nnodes, disaggregation, trainer_mode) is not simulated for verl"
    if config.is_on(f"{_R}.multi_turn.enable") or f"{_R}.agent.agent_loop_config_path" in said:
        yield "agent loops with tools are not simulated for verl; set multi_turn.enable=False"
    if str(said.get("data.image_key", "")) not in ("", "images", UNSURE) or f"{_M}.freeze_vision_tower" in said:
        yield "verl with images is not simulated; take a text model"
    for path, why in _NOT_SIMULATED.items():
        if config.is_on(path):
            yield f"{path} is not simulated for verl ({why}); turn it off"
    yield from _unshared(config)
    if config.is_on(f"{_R}.layered_summon") and "dummy" in str(said.get(f"{_R}.load_format", "dummy")):
        yield f"{_R}.layered_summon needs {_R}.load_format=safetensors; verl ends at the first weight sync"
    size, gpus = said.get(f"{_FSDP}.fsdp_size", -1), batch_of(config)
    if isinstance(size, int) and gpus is not None and 0 <= size < gpus.gpus:
        yield f"{_FSDP}.fsdp_size {size} shards over some of the {gpus.gpus} GPUs, which is not simulated; set it to -1"


def _unshared(config: VerlConfig) -> Iterator[str]:
    """Why samples cannot be shared by so many ranks, as Ulysses does; transformer_impl.py, line 107 and 220."""
    batch, attention = batch_of(config), f"{_M}.override_config.attn_implementation"
    for section in (_A, _F):
        size = sequence_parallel(config, section)
        if size > 1 and batch is not None and batch.gpus % size:
            yield f"{section}.ulysses_sequence_parallel_size {size} must divide the {batch.gpus} GPUs; verl ends there"
        if size > 1 and not config.is_on(f"{_M}.use_remove_padding"):
            yield "ulysses_sequence_parallel_size above 1 needs use_remove_padding: true; verl refuses it at the start"
        if size > 1 and config.said.get(attention, "flash_attention_2") != "flash_attention_2":
            yield (
                f"ulysses_sequence_parallel_size {size} needs attn_implementation flash_attention_2: in others verl "
                f"lets each GPU attend to its own part alone; got {quoted(config.said[attention])}"
            )


_OPTIMIZER = {"optimizer_impl": "torch.optim", "optimizer": "AdamW"}
_NOT_SIMULATED = {
    f"{_M}.enable_activation_offload": "its copies run between the layers",
    f"{_M}.tiled_mlp.enabled": "it computes each layer's MLP in parts",
    f"{_M}.mtp.enable": "it trains further layers",
    f"{_FSDP}.offload_policy": "FSDP2's own offloading of the actor",
    f"{_FSDP}.qat.enable": "quantised training",
    "distillation.enabled": "a teacher on the same or other GPUs",
    f"{_A}.use_prefix_grouper": "shared prompts",
    f"{_A}.calculate_sum_pi_squared": "another pass over the logits",
}


def _notes(config: VerlConfig, unread: tuple[str, ...]) -> Iterator[str]:
    yield (
        f"verl's config with the defaults of {VERSION}; all samples are taken at max_prompt_length + "
        "max_response_length tokens, the worst case"
    )
    batch = batch_of(config)
    if batch is not None and batch.generation > batch.effective:
        steps = batch.generation // batch.effective * batch.epochs
        yield f"a step here is an optimizer step; a step of verl, from one rollout to the next, has {steps} of them"
    if not config.is_on(f"{_M}.use_remove_padding"):
        yield "use_remove_padding False is simulated as True: samples of full length have no padding"
    if config.is_on(f"{_M}.use_liger"):
        yield "Liger's kernels were not simulated; the layers ran without them, which needs at least as many bytes"
    optimizer = [str(config.said.get(f"{_A}.optim.{key}") or usual) for key, usual in _OPTIMIZER.items()]
    if optimizer != list(_OPTIMIZER.values()):
        yield f"actor.optim {'.'.join(optimizer)} is simulated as torch's AdamW, whose states have 8 bytes a parameter"
    for path in ("reward_model.enable", "reward.reward_model.enable"):
        if config.is_on(path):
            yield f"{path}: the reward model is not simulated, and takes memory besides"
    known = {named.path for named in KEYS.values()} | set(DEFAULTS)
    if unsure := [f"{path} {config.said[path]}" for path in sorted(unread) if path in known and path in config.said]:
        yield f"conditions in the script decide these, which are taken as if the first held: {', '.join(unsure)}"
    if left := [path for path in sorted(unread) if path in known and path not in config.said]:
        yield f"the script sets these only under conditions, so verl's defaults are taken: {', '.join(left)}"
