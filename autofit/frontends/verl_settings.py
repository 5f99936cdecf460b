"""The keys of a recipe for verl: each with verl's own key and default; and the micro-batches that follow from them.

Also all keys of a config of verl (verl_keys.yaml), and the nearest to one that it does not have.

Defaults are those of verl at commit 1dda039b (0.9): verl/trainer/config/_generated_ppo_trainer.yaml. No torch here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any

from autofit.frontends.verl import (
    CONFIG_NAME,
    DEFAULTS,
    ENGINE,
    FSDP_STRATEGIES,
    NVIDIA,
    VerlConfig,
    asks_for_npus,
    bare_keys,
    entry,
    typos,
)
from autofit.recipe.yaml_file import parse_yaml

# actor, rollout, reference, model
A, R, F, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
FSDP = f"{A}.fsdp_config"
SGLANG = "sglang"  # a rollout.name
_USUAL = object()


@dataclass(frozen=True, slots=True)
class Key:
    """A key of verl that the recipe takes over: its path, verl's default of it, and a path whose value comes before."""

    path: str
    other: object = None  # verl's default of a key that is not among those of the batch
    like: str | None = None

    @property
    def usual(self) -> object:
        return DEFAULTS.get(self.path, self.other)


def _key(path: str, other: object = None, like: str | None = None, *, default: object = _USUAL) -> Any:
    """A setting that is the key `path` of verl: its default is verl's, unless another one is said."""
    key = Key(path, other, like)
    return field(default=key.usual if default is _USUAL else default, metadata={"key": key})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a recipe: verl's own by their last names, and three that follow from its batch."""

    model_path: str = field(metadata={"key": Key(f"{M}.path")})
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
        default="all-linear", metadata={"key": Key(f"{M}.target_modules", "all-linear")}
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
KEYS: Mapping[str, Key] = {f.name: f.metadata["key"] for f in fields(Settings) if "key" in f.metadata}


# -- all keys of a config of verl -------------------------------------------------------------------------------------

_ALIKE = 0.85
_MOST_TOLD = 5  # unknown keys of a file
_LONGEST = "actor_rollout_ref"  # the part of most keys


def is_below_a_part(key: str) -> bool:
    """Whether a key is a dotted path below one of the parts of verl's config."""
    head, dot, _ = key.lstrip("+").partition(".")
    return bool(dot) and head in {section.partition(".")[0] for section in _sections()}


def whole_key(key: str) -> str:
    """`key` as hydra wants it, also where it has no actor_rollout_ref, which `explain` leaves out of its lines."""
    path, head = f"{_LONGEST}.{key}", key.partition(".")[0]
    below = any(f"{section}.".startswith(f"{_LONGEST}.{head}.") for section in _sections())
    return path if below and "." in key and not is_below_a_part(key) else key


def is_in_config(path: str) -> bool:
    """Whether hydra finds a path in verl's config, so that it may be overridden without a `+`."""
    section, _, name = path.rpartition(".")
    return path in _sections() or name in _sections().get(section, ())


def unknown_key(key: str) -> str | None:
    """What is wrong with a key that verl's config does not have; None of one that it has, or that is added with `+`."""
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
    """What hydra would refuse of the overrides in a script that starts verl's FSDP engines; `who` may have them."""
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
    """A note on the keys of a YAML that verl does not have, which hydra adds to the config, for FSDP engines."""
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
    """The key that was meant: without its actor_rollout_ref, like it in its section, or of its name near it."""
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
