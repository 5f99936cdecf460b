"""A config of verl as a recipe of the trainer `verl`: its values with verl's defaults, its GPUs, and the rest.

And the other way: a GRPO recipe of TRL as overrides of verl. Defaults are those of verl at commit 1dda039b (0.9):
verl/trainer/config/_generated_ppo_trainer.yaml; read besides: verl/trainer/ppo/core_algos.py, and TRL 1.16
(trl/trainer/grpo_trainer.py). No torch here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, quoted
from autofit.frontends.draft import GROWING_SEGMENTS, Draft, Foreign, number
from autofit.frontends.verl import (
    DEFAULTS,
    FSDP,
    KEYS,
    MODEL_PATH,
    SGLANG,
    UNSURE,
    A,
    F,
    M,
    R,
    VerlBatch,
    VerlConfig,
    VerlKey,
    batch_of,
    file_notes,
    has_critic,
    is_in_config,
    likely_overrides,
    on_gpus,
    overrides,
    script_notes,
    sequence_parallel,
    typos,
)
from autofit.frontends.verl_rules import (
    UNPACKED,
    broken,
    critic_values,
    engine_settings,
    explain,
    largest_rank,
    longest_sample,
    older_micro,
    sharded_head,
    uneven,
)
from autofit.recipe import catalogue
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch

VERSION = "verl 0.9 (1dda039b)"
_CRITIC = "critic_"  # begins the recipe's keys of a critic
_MICRO = "ppo_micro_batch_size_per_gpu"
_SCORED = "log_prob_micro_batch_size_per_gpu"
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_ON, _OFF = ("true", "1"), ("false", "0", "none", "null", "")


def of_script(text: str, *, ranks: int | None = None) -> Foreign:
    """The recipe of a shell script that starts verl; what hangs on conditions is taken as if they held, with a note."""
    found, unread = overrides(text)
    likely = {key: UNSURE if value is None else value for key, value in likely_overrides(text).items()}
    folders = {key: str(likely[key]) for key in likely if key.endswith(MODEL_PATH) and likely[key] != UNSURE}
    for key, name in folders.items():
        likely[key] = name if "/" in name else catalogue.of_folder(name) or UNSURE
    made = recipe({**likely, **found}, ranks=ranks, unread=unread, model_folder=folders.get(f"{M}.path"))
    return replace(made, notes=(*made.notes, *script_notes(text, found, unread)))


def of_file(values: Mapping[str, object], *, folder: Path | None = None, ranks: int | None = None) -> Foreign:
    """The recipe of a YAML's `values`, as `recipe` has it, with a note on keys that verl lacks."""
    made = recipe(values, folder=folder, ranks=ranks)
    return replace(made, notes=(*made.notes, *file_notes(values)))


def recipe(
    values: Mapping[str, object], *, folder: Path | None = None, ranks: int | None = None,
    unread: tuple[str, ...] = (), model_folder: str | None = None,
) -> Foreign:  # fmt: skip
    """The recipe of a config's `values` (nested, or by dotted paths), whose keys `unread` are uncertain.

    Nothing in it is read from the config's `folder`. `ranks` are the GPUs if they are told beside the file, and
    `model_folder` is the name of the model's folder if only the environment knows its place.

    Raises ConfigError for unsupported settings, and for a config that verl would refuse or that leaves its batch open.
    """
    config = VerlConfig.of(on_gpus(values, ranks))
    if refused := next(chain(typos(config), _refusals(config)), None):
        raise ConfigError(refused)
    batch = batch_of(config)
    if batch is None or config.unsure:
        open_keys = ", ".join(config.unsure) or "data.train_batch_size, ppo_mini_batch_size and rollout.n"
        raise ConfigError(
            f"the batch of this verl config is not certain: {open_keys} must be whole numbers in the file"
        )
    Draft("verl", {}).check_model(config.said.get(f"{M}.path"), model_folder)
    critic = has_critic(config)
    keys = {key: named for key, named in KEYS.items() if critic or not key.startswith(_CRITIC)}
    found = {key: _value(config, named) for key, named in keys.items() if _said(config, named) is not None}
    found |= _sizes(config, batch, found)
    if critic:
        found |= critic_values(config, batch)
        found["critic_model_dtype"] = _dtype("critic_model_dtype", str(found["critic_model_dtype"]))
    if not found.get("model_path"):
        known = "" if model_folder is None else f" as on the hub: no model of its folder's name {model_folder} is known"
        if model_folder is None and f"{M}.path" in unread:
            known = ": the script takes it from a variable that it does not set; set it there to a name on the hub"
        raise ConfigError(f"the verl config must name its model; give {M}.path{known}")
    wrong = broken(config, batch)
    if wrong and not unread:
        raise ConfigError("; ".join(wrong))
    found["reference"] = _references(config)
    found["calculate_entropy"] = config.is_on(f"{A}.calculate_entropy") or _number(config, f"{A}.entropy_coeff") != 0
    found["ulysses_sequence_parallel_size"] = sequence_parallel(config)
    found["ref_ulysses_sequence_parallel_size"] = sequence_parallel(config, F)
    for key in ("model_dtype", "ref_model_dtype", "param_dtype", "reduce_dtype"):
        usual = "bf16" if key == "ref_model_dtype" else KEYS[key].usual  # null of a model that is not trained
        found[key] = _dtype(key, str(found.get(key) or usual))
    sharding = "fsdp2" if config.strategy == "fsdp2" else "fsdp1"
    nodes = config.whole("trainer.nnodes") or 1
    reshards = _truth(f"{FSDP}.reshard_after_forward", config.said.get(f"{FSDP}.reshard_after_forward", True))
    launch: dict[str, object] = {
        "ranks": batch.gpus, "sharding": sharding, "reshard_after_forward": reshards, "machines": nodes,
        "config": {"fsdp_config": _on_the_host(str(found["model_path"]))},
    }  # fmt: skip
    return Foreign(
        tool="verl", trainer="verl", values={**found, "launch": launch, "env": dict(GROWING_SEGMENTS)},
        ranks=batch.gpus, prompt_tokens=cast(int, found["max_prompt_length"]),
        keys={key: named.path for key, named in keys.items()}, derived=_FOLLOW, notes=(*wrong, *_notes(config, unread)),
    )  # fmt: skip


def _on_the_host(model: str) -> dict[str, object]:
    """accelerate's words for what verl's ranks have in host memory: each saves its share of the model.

    The first loads it for all, unless it has one weight for its embedding and its head: then each does
    (get_init_weight_context_manager in utils/fsdp_utils.py).
    """
    tied = catalogue.text_config(model).get("tie_word_embeddings") is True
    return {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": not tied}


# -- values -----------------------------------------------------------------------------------------------------------


def _said(config: VerlConfig, named: VerlKey) -> object:
    """The value of the config, else verl's default, if either has one."""
    own = config.said.get(named.path)
    if own is None and named.like is not None:
        own = config.said.get(named.like)
    return named.usual if own is None or own == UNSURE else own


def _value(config: VerlConfig, named: VerlKey) -> object:
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


def _sizes(config: VerlConfig, batch: VerlBatch, found: Mapping[str, object]) -> dict[str, object]:
    """The micro-batches, and how many are in an optimizer step and in a generation of each rank.

    With a token budget the micro-batches follow from it, and 1 sample stands in the keys of the batch.
    """
    dynamic = bool(found["use_dynamic_bsz"])
    micro = 1 if dynamic else batch.micro
    if micro is None and (older := older_micro(config, batch)):
        raise ConfigError(older)
    if micro is None:
        raise ConfigError(f"{A}.{_MICRO} must be set, or {A}.use_dynamic_bsz; verl refuses it at the start")
    if batch.effective % batch.shards or batch.each % micro:
        raise ConfigError(
            f"{A}.{_MICRO} {micro} must divide the samples of a rank and optimizer step, ppo_mini_batch_size x "
            f"rollout.n / GPUs = {batch.effective} / {batch.shards}; verl ends at the first update"
        )
    if batch.padded % (batch.shards * micro) or batch.padded % batch.effective:
        raise ConfigError(
            f"data.train_batch_size {batch.prompts} must be a multiple of ppo_mini_batch_size {batch.mini_prompts}, "
            f"and its {batch.generation} samples of {batch.shards} ranks with micro-batches of {micro}"
        )
    sizes: dict[str, object] = {
        _MICRO: micro, "gradient_accumulation_steps": batch.each // micro,
        "steps_per_generation": batch.padded // batch.shards // micro,
    }  # fmt: skip
    scored = [(_SCORED, f"{R}.{_SCORED}")]
    if _references(config):
        scored.append((f"ref_{_SCORED}", f"{F}.{_SCORED}"))
    for key, path in () if dynamic else scored:
        if config.whole(path) is None:
            raise ConfigError(
                f"{path} must be set, to a whole number, or {A}.use_dynamic_bsz to True; verl refuses it at the start"
            )
        sizes[key] = config.whole(path)
    if refused := next(uneven(config, batch), None):
        raise ConfigError(refused)
    return sizes


def _references(config: VerlConfig) -> bool:
    """verl/trainer/ppo/utils.py, need_reference_policy."""
    return config.is_on(f"{A}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")


# -- back in verl's own keys -------------------------------------------------------------------------------------------

_FOLLOW = ("gradient_accumulation_steps", "steps_per_generation")
_GPUS = ("launch.ranks", "launch.machines")  # which verl's config says itself


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{verl's key: value} of changes of a recipe. Raises ConfigError for one that verl has no key for."""
    if unknown := [key for key in changes if key not in KEYS and key not in (*_FOLLOW, *_GPUS)]:
        raise ConfigError(f"{unknown[0]}: {changes[unknown[0]]} has no key in verl")
    if unshared := next(_attending_alone({**foreign.values, **changes}), None):
        raise ConfigError(unshared)
    ranks, machines = (cast("int | None", changes.get(key)) for key in _GPUS)
    gpus = {"trainer.n_gpus_per_node": None if ranks is None else ranks // (machines or 1), "trainer.nnodes": machines}
    own: dict[str, object] = {path: value for path, value in gpus.items() if value is not None}
    said = {KEYS[key].path: value for key, value in changes.items() if key in KEYS}
    own |= dict(_kept(foreign, said)) | said
    # of a key that is not in verl's config hydra must be told
    return {path if is_in_config(path) else f"++{path}": value for path, value in own.items()}


def _kept(foreign: Foreign, said: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """(verl's key, value) of what stays as it is, where verl would let it follow a key that is `said`."""
    refers = foreign.values.get("reference") and not foreign.values.get("lora_rank")  # else the actor scores for it
    for key, named in KEYS.items():
        value = foreign.values.get(key)
        if named.like in said and value is not None and (refers or not key.startswith("ref_")):
            yield named.path, value


# -- what is not simulated --------------------------------------------------------------------------------------------


def _refusals(config: VerlConfig) -> Iterator[str]:
    """Reasons why a config is refused as a recipe, the first reason first."""
    strategy, said = config.strategy, config.said
    if strategy not in ("fsdp", "fsdp2"):
        yield f"verl with {strategy} is not simulated, only its FSDP engines: set actor.strategy to fsdp or fsdp2"
    engine = str(said.get(f"{R}.name", "vllm"))
    if engine not in ("vllm", SGLANG):
        named = {"trtllm": "TensorRT-LLM"}.get(engine, engine)
        yield f"the rollout of verl by {named} is not simulated, only vLLM's and SGLang's: set rollout.name=vllm"
    mode = str(said.get("trainer.v1.trainer_mode", "sync"))
    if config.is_on(f"{R}.disaggregation.enabled") or (config.whole(f"{R}.nnodes") or 0) > 0 or mode != "sync":
        yield "a rollout on GPUs of its own (rollout.nnodes, disaggregation, trainer_mode) is not simulated for verl"
    if config.is_on(f"{R}.multi_turn.enable") or f"{R}.agent.agent_loop_config_path" in said:
        yield "agent loops with tools are not simulated for verl; set multi_turn.enable=False"
    if str(said.get("data.image_key", "")) not in ("", "images", UNSURE) or f"{M}.freeze_vision_tower" in said:
        yield "verl with images is not simulated; take a text model"
    for path, why in _NOT_SIMULATED.items():
        if config.is_on(path):
            yield f"{path} is not simulated for verl ({why}); turn it off"
    if config.is_on(_SUM_OF_SQUARES) and not config.is_on("trainer.use_v1"):
        yield f"{_SUM_OF_SQUARES} is not simulated for verl's older trainer (another pass over the logits); turn it off"
    loss = str(config.said.get("distillation.distillation_loss.loss_mode", "k3"))
    if config.is_on("distillation.enabled") and loss not in _OF_ONE_TOKEN:
        yield (
            f"distillation with {loss}, which computes on the logits, is not simulated for verl; set "
            f"distillation.distillation_loss.loss_mode to one of {', '.join(_OF_ONE_TOKEN)}"
        )
    yield from sharded_head(config)
    yield from largest_rank(config)
    yield from engine_settings(config)
    yield from _unshared(config)
    size, gpus = said.get(f"{FSDP}.fsdp_size", -1), batch_of(config)
    if isinstance(size, int) and gpus is not None and 0 <= size < gpus.gpus:
        yield f"{FSDP}.fsdp_size {size} shards over some of the {gpus.gpus} GPUs, which is not simulated; set it to -1"


def _unshared(config: VerlConfig) -> Iterator[str]:
    """Reason why the ranks fail to share samples, as Ulysses does; transformer_impl.py, line 107 and 220."""
    batch, attention = batch_of(config), f"{M}.override_config.attn_implementation"
    for section in (A, F):
        size = sequence_parallel(config, section)
        if size > 1 and batch is not None and batch.gpus % size:
            yield f"{section}.ulysses_sequence_parallel_size {size} must divide the {batch.gpus} GPUs; verl ends there"
        if size > 1 and not config.is_on(f"{M}.use_remove_padding"):
            yield UNPACKED
        said = config.said.get(attention, _FLASH)
        yield from _attending_alone({"ulysses_sequence_parallel_size": size, "attn_implementation": said})


def _attending_alone(values: Mapping[str, object]) -> Iterator[str]:
    """Reason why an attention misses the tokens of the ranks with which it shares samples."""
    sizes = [cast(int, values.get(key, 1)) for key in _SHARERS]
    attention = values.get("attn_implementation", _FLASH)
    if max(sizes) > 1 and attention != _FLASH:
        yield (
            f"ulysses_sequence_parallel_size {max(sizes)} needs attn_implementation {_FLASH}: in others verl lets each "
            f"GPU attend to its own part alone; got {quoted(attention)}"
        )


_FLASH = "flash_attention_2"
_SHARERS = ("ulysses_sequence_parallel_size", "ref_ulysses_sequence_parallel_size")
_LEVEL_1 = (
    "with LoRA vLLM sleeps at level 1: it keeps a copy of its weights in host memory (vllm_async_server.py, "
    "_resolve_sleep_level), which comes on top of the ranks' host memory"
)
_SGLANG = (
    "SGLang was not run: vLLM stands for it, with gpu_memory_utilization of the whole card for weights and cache (it "
    "takes no more: that part of the memory that is free when it starts), and with graphs and computing beside it; "
    "these and the rollout's seconds are vLLM's; with LoRA its weights stay on the card while it sleeps"
)
_WHOLE_GRADIENT = (
    "between the micro-batches of an optimizer step each card holds the gradient of all weights, told as temporaries "
    "(verl's default since 0.9); only its share with actor.fsdp_config.use_no_sync_for_gradient_accumulation=False"
)
_RAY = (
    "what Ray, vLLM's processes and the samples of a generation take of host memory is not counted; where it is short, "
    "Ray ends a worker at 95 % (verl's issues 429 and 2950)"
)
_SUM_OF_SQUARES = f"{A}.calculate_sum_pi_squared"
_IDLE = (f"{A}.use_prefix_grouper", _SUM_OF_SQUARES)  # keys that the trainer v1 and its FSDP engine do not read
_ACTIVATIONS = (f"{M}.enable_activation_offload", "critic.model.enable_activation_offload")
_OPTIMIZER = {"optimizer_impl": "torch.optim", "optimizer": "AdamW"}
_NOT_SIMULATED = {
    f"{M}.tiled_mlp.enabled": "it computes each layer's MLP in parts",
    f"{M}.mtp.enable": "it trains further layers",
    f"{FSDP}.qat.enable": "quantised training",
}
# Losses of distillation that read the teacher's log-probability of each token alone (trainer/distillation/losses.py).
_OF_ONE_TOKEN = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def _defers(config: VerlConfig, batch: VerlBatch) -> bool:
    """True if whole gradients of all weights wait for the last micro-batch of a step."""
    said = config.said.get(f"{FSDP}.use_no_sync_for_gradient_accumulation", True)
    adapters = config.whole(f"{M}.lora_rank") or config.whole(f"{M}.lora.rank")
    if str(said).lower() in _OFF or adapters or batch.gpus == 1:
        return False
    if not config.is_on(f"{A}.use_dynamic_bsz"):
        return batch.each > (batch.micro or 1)
    budget = config.whole(f"{A}.ppo_max_token_len_per_gpu") or 1
    return batch.each * longest_sample(config) > budget * sequence_parallel(config)


def _notes(config: VerlConfig, unread: tuple[str, ...]) -> Iterator[str]:
    yield (
        f"verl's config with the defaults of {VERSION}; all samples are taken at max_prompt_length + "
        "max_response_length tokens, the worst case"
    )
    batch = batch_of(config)
    if batch is not None and batch.padded > batch.effective:
        steps = batch.steps
        yield f"a step here is an optimizer step; a step of verl, from one rollout to the next, has {steps} of them"
    if batch is not None and batch.padded > batch.generation:
        yield (
            f"verl adds {batch.padded - batch.generation:,} samples of two tokens and without loss to the "
            f"{batch.generation:,} of a generation, for whole optimizer steps; they are taken at full length, so the "
            "seconds are an upper bound"
        )
    if batch is not None and _defers(config, batch):
        yield _WHOLE_GRADIENT
    if not config.is_on(f"{M}.use_remove_padding"):
        yield "use_remove_padding False is simulated as True: samples of full length have no padding"
    if config.is_on(f"{M}.use_liger"):
        yield "Liger's kernels were not simulated; the layers ran without them, which needs at least as many bytes"
    for path in _ACTIVATIONS:
        if config.is_on(path):
            yield (
                f"{path} is simulated as False: activations stay on the card, which needs at least as many bytes; the "
                "seconds of its copies are not counted"
            )
    for path in (f"{FSDP}.offload_policy", "critic.fsdp.offload_policy"):
        if config.is_on(path):
            yield f"{path}: the optimizer works on the processor, whose seconds are not counted; with FSDP1 no effect"
    for path in _IDLE:
        if config.is_on(path):
            yield f"{path} has no effect: verl's trainer v1 and its FSDP engine do not read it"
    adapters = config.whole(f"{M}.lora_rank") or config.whole(f"{M}.lora.rank")
    if str(config.said.get(f"{R}.name")) == SGLANG:
        yield _SGLANG
    elif adapters and not config.is_on(f"{M}.lora.merge"):
        yield _LEVEL_1
    yield _RAY
    optimizer = [str(config.said.get(f"{A}.optim.{key}") or usual) for key, usual in _OPTIMIZER.items()]
    if optimizer != list(_OPTIMIZER.values()):
        yield f"actor.optim {'.'.join(optimizer)} is simulated as torch's AdamW, whose states have 8 bytes a parameter"
    if config.is_on("distillation.enabled"):
        yield (
            "the teachers of distillation work on GPUs of their own (distillation.nnodes x n_gpus_per_node), which are "
            "not simulated; their log-probabilities, 8 to 12 bytes a token, are not counted"
        )
    if any(key.startswith("linear_") for key in catalogue.text_config(str(config.said.get(f"{M}.path")))):
        yield (
            "linear attention runs in transformers' own operations, as where flash-linear-attention is not installed; "
            "its kernels need no more bytes, and fewer seconds"
        )
    for path in ("reward_model.enable", "reward.reward_model.enable"):
        if config.is_on(path):
            yield f"{path}: the reward model is not simulated, and takes memory besides"
    known = {named.path for named in KEYS.values()} | set(DEFAULTS)
    if unsure := [f"{path} {config.said[path]}" for path in sorted(unread) if path in known and path in config.said]:
        yield f"conditions in the script decide these, which are taken as if the first held: {', '.join(unsure)}"
    if left := [path for path in sorted(unread) if path in known and path not in config.said]:
        yield f"the script sets these only under conditions, so verl's defaults are taken: {', '.join(left)}"


# -- a recipe of TRL as overrides of verl, and what of it changes on the way ------------------------------------------

# {key of TRL: verl's} of those with one meaning in both
_SAME: Mapping[str, str] = {
    "model_name_or_path": f"{M}.path",
    "num_generations": f"{R}.n",
    "num_iterations": f"{A}.ppo_epochs",
    "max_completion_length": "data.max_response_length",
    "learning_rate": f"{A}.optim.lr",
    "weight_decay": f"{A}.optim.weight_decay",
    "max_grad_norm": f"{A}.optim.clip_grad",
    "temperature": f"{R}.temperature",
    "epsilon": f"{A}.clip_ratio_low",
    "gradient_checkpointing": f"{M}.enable_gradient_checkpointing",
    "activation_checkpointing": f"{M}.enable_gradient_checkpointing",  # its name in transformers 5
    "seed": "data.seed",
}
_OF_VLLM = {
    "vllm_gpu_memory_utilization": f"{R}.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{R}.tensor_model_parallel_size",
    "vllm_enable_sleep_mode": f"{R}.free_cache_engine",
}  # fmt: skip
_OF_LORA = {
    "lora_r": f"{M}.lora_rank", "lora_alpha": f"{M}.lora_alpha", "lora_target_modules": f"{M}.target_modules",
}  # fmt: skip
_LOSSES = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
_READ = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "beta", "epsilon_high", "loss_type", "scale_rewards", "lr_scheduler_type", "warmup_steps", "dtype", "use_peft",
    "use_vllm", "vllm_mode", "max_steps", "num_train_epochs", LAUNCH, "output_dir", "bf16", "dataset_name",
    "reward_funcs",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Overrides behind `python -m verl.trainer.main_ppo`, and a sentence for each thing that is another in verl."""

    overrides: Mapping[str, object]
    changes: tuple[str, ...]


def exported(resolved: Mapping[str, object], given: Mapping[str, object]) -> Exported:
    """The recipe with all of TRL's keys in `resolved`, and the user's in `given`, in verl's keys.

    Raises ConfigError for a batch that verl holds only inexactly.
    """
    launch = Launch.of({LAUNCH: resolved[LAUNCH]} if resolved.get(LAUNCH) else {})
    found = {**_batch(resolved, launch), **dict(_settings(resolved, launch))}
    wrong = explain(found).wrong
    batch = batch_of(VerlConfig.of(found))
    if wrong or batch is None:
        raise ConfigError(f"verl does not train this batch: {'; '.join(wrong) or 'a number of it is not whole'}")
    return Exported(overrides=found, changes=tuple(_changes(resolved, given, launch)))


def _batch(resolved: Mapping[str, object], launch: Launch) -> dict[str, object]:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
    micro, accumulation, rollout, group = (cast(int, resolved[key]) for key in keys)
    effective, generated = micro * accumulation * launch.ranks, micro * rollout * launch.ranks
    if generated % effective or effective % group:
        raise ConfigError(
            f"verl trains on a generation in whole optimizer steps of whole groups: the {generated} completions of a "
            f"generation must be a multiple of the effective batch {effective}, and that of num_generations={group}; "
            "change steps_per_generation or gradient_accumulation_steps"
        )
    return {
        "algorithm.adv_estimator": "grpo", "data.train_batch_size": generated // group,
        f"{A}.ppo_mini_batch_size": effective // group, f"{A}.ppo_micro_batch_size_per_gpu": micro,
        f"{R}.log_prob_micro_batch_size_per_gpu": micro, "trainer.nnodes": launch.machines,
        "trainer.n_gpus_per_node": launch.ranks // launch.machines,
    }  # fmt: skip


def _settings(resolved: Mapping[str, object], launch: Launch) -> Iterator[tuple[str, object]]:
    """(verl's key, value) of all settings outside the batch."""
    yield from ((own, resolved[key]) for key, own in _SAME.items() if resolved.get(key) is not None)
    high = resolved.get("epsilon_high")
    yield f"{A}.clip_ratio_high", resolved.get("epsilon") if high is None else high
    beta = cast(float, resolved.get("beta") or 0.0)
    yield f"{A}.use_kl_loss", beta != 0
    if beta:
        yield f"{A}.kl_loss_coef", beta
        yield f"{A}.kl_loss_type", "low_var_kl"
        yield "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", resolved["per_device_train_batch_size"]
    loss = str(resolved.get("loss_type"))
    yield f"{A}.loss_agg_mode", _LOSSES.get(loss, "token-mean")
    if loss == "dr_grpo":
        yield f"{A}.loss_scale_factor", resolved["max_completion_length"]
    yield "algorithm.norm_adv_by_std_in_grpo", str(resolved.get("scale_rewards")).lower() not in ("none", "false")
    yield f"{A}.optim.lr_scheduler_type", _SCHEDULES.get(str(resolved.get("lr_scheduler_type")), "constant")
    if isinstance(warm := resolved.get("warmup_steps"), int) and warm > 0:
        yield f"{A}.optim.lr_warmup_steps", warm
    yield f"{A}.fsdp_config.model_dtype", _DTYPES.get(str(resolved.get("dtype")), "fp32")
    yield f"{A}.strategy", "fsdp2" if launch.sharding == "fsdp2" else "fsdp"
    if resolved.get("use_peft"):
        yield from ((own, resolved[key]) for key, own in _OF_LORA.items() if resolved.get(key) is not None)
    yield f"{R}.name", "vllm"
    if resolved.get("use_vllm"):
        yield from ((own, resolved[key]) for key, own in _OF_VLLM.items() if resolved.get(key) is not None)
    else:
        yield f"{R}.tensor_model_parallel_size", 1
    yield from _length(resolved)


def _length(resolved: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """verl's steps are generations, each with one or several optimizer steps."""
    steps, epochs = resolved.get("max_steps"), resolved.get("num_train_epochs")
    if isinstance(steps, int) and steps > 0:
        keys = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")
        rollout, accumulation, iterations = (cast(int, resolved.get(key) or 1) for key in keys)
        yield "trainer.total_training_steps", math.ceil(steps / (rollout // accumulation * iterations))
    elif isinstance(epochs, int | float):
        yield "trainer.total_epochs", math.ceil(epochs)


def _changes(resolved: Mapping[str, object], given: Mapping[str, object], launch: Launch) -> Iterator[str]:
    """Differences of verl, a sentence each."""
    yield (
        "data: verl reads parquet files with a column `prompt` (data.train_files, data.val_files), and its reward from "
        "reward.custom_reward_function.path; TRL's dataset and reward functions must be written so"
    )
    yield "data.max_prompt_length: verl drops or refuses longer prompts (512 by default); set it to your longest prompt"
    yield ("samples: verl packs them without padding, makes the logits of a whole micro-batch and keeps the reference "
           "in host memory, so check the bytes: autofit estimate on what is written")  # fmt: skip
    yield ("clip_ratio_c: verl also bounds the loss of negative advantages at 3 times them"
           + (f", for TRL's delta {resolved['delta']}" if resolved.get("delta") is not None else ""))  # fmt: skip
    if not resolved.get("use_vllm"):
        yield "use_vllm false: verl always generates with vLLM, which holds rollout.gpu_memory_utilization of the card"
    loss, schedule, dtype = (str(resolved.get(key)) for key in ("loss_type", "lr_scheduler_type", "dtype"))
    if loss not in _LOSSES:
        yield f"loss_type {loss}: verl has none; loss_agg_mode token-mean is another loss"
    if str(resolved.get("scale_rewards")).lower() == "batch":
        yield "scale_rewards batch: verl divides by the deviation of the group"
    if schedule not in _SCHEDULES:
        yield f"lr_scheduler_type {schedule}: verl has constant and cosine; constant is another schedule"
    if dtype not in _DTYPES:
        yield f"dtype {dtype}: verl holds the weights in fp32 unless fsdp_config.model_dtype says bf16"
    if launch.sharding not in ("fsdp1", "fsdp2"):
        kept = "one card" if launch.ranks == 1 else str(launch.sharding)
        yield f"launch: TRL's recipe is for {kept}; verl shards weights, gradients and optimizer with FSDP"
    known = {*_SAME, *_OF_VLLM, *_OF_LORA, *_READ}
    if left := sorted(key for key in given if key not in known):
        yield f"not carried over: {', '.join(left)}"
