"""The keys of a recipe for verl, and the micro-batches that follow from them. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.frontends.verl_recipe import KEYS

_USUAL: Mapping[str, Any] = {key: named.usual for key, named in KEYS.items()}  # verl's own defaults


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a recipe: verl's own by their last names, and three that follow from its batch."""

    model_path: str
    ppo_micro_batch_size_per_gpu: int = 1
    gradient_accumulation_steps: int = 1  # micro-batches of an optimizer step on each rank
    steps_per_generation: int = 1  # micro-batches of a generation on each rank
    rollout_n: int = _USUAL["rollout_n"]
    ppo_epochs: int = _USUAL["ppo_epochs"]
    max_prompt_length: int = _USUAL["max_prompt_length"]
    max_response_length: int = _USUAL["max_response_length"]
    max_steps: int = 1
    # -- sizes
    use_dynamic_bsz: bool = _USUAL["use_dynamic_bsz"]
    ppo_max_token_len_per_gpu: int = _USUAL["ppo_max_token_len_per_gpu"]
    log_prob_micro_batch_size_per_gpu: int = 1
    log_prob_max_token_len_per_gpu: int = _USUAL["log_prob_max_token_len_per_gpu"]
    ref_log_prob_micro_batch_size_per_gpu: int = 1
    ref_log_prob_max_token_len_per_gpu: int = _USUAL["ref_log_prob_max_token_len_per_gpu"]
    ulysses_sequence_parallel_size: int = 1  # ranks that share their samples
    ref_ulysses_sequence_parallel_size: int = 1
    # -- what is computed
    reference: bool = False
    use_kl_loss: bool = _USUAL["use_kl_loss"]
    calculate_entropy: bool = False  # in the update
    use_fused_kernels: bool = _USUAL["use_fused_kernels"]
    enable_gradient_checkpointing: bool = _USUAL["enable_gradient_checkpointing"]
    lora_rank: int = _USUAL["lora_rank"]
    lora_alpha: int = _USUAL["lora_alpha"]
    target_modules: str | list[str] = _USUAL["target_modules"]
    attn_implementation: str = _USUAL["attn_implementation"]
    use_torch_compile: bool = _USUAL["use_torch_compile"]
    entropy_from_logits_with_chunking: bool = _USUAL["entropy_from_logits_with_chunking"]
    entropy_from_logits_chunk_size: int = _USUAL["entropy_from_logits_chunk_size"]
    entropy_checkpointing: bool = _USUAL["entropy_checkpointing"]
    trust_remote_code: bool = _USUAL["trust_remote_code"]
    # -- the critic of PPO
    critic: bool = False
    critic_model_path: str | None = None
    critic_steps_per_generation: int = 1  # its optimizer steps, of all epochs
    critic_ppo_epochs: int = 1
    critic_max_token_len_per_gpu: int = _USUAL["critic_forward_max_token_len_per_gpu"]  # of an update
    critic_forward_max_token_len_per_gpu: int = _USUAL["critic_forward_max_token_len_per_gpu"]
    critic_ulysses_sequence_parallel_size: int = _USUAL["critic_ulysses_sequence_parallel_size"]
    critic_enable_gradient_checkpointing: bool = _USUAL["critic_enable_gradient_checkpointing"]
    critic_sharding: str = "fsdp1"
    critic_model_dtype: str = _USUAL["critic_model_dtype"]
    critic_param_offload: bool = _USUAL["critic_param_offload"]
    critic_optimizer_offload: bool = _USUAL["critic_optimizer_offload"]
    critic_reshard_after_forward: bool = _USUAL["critic_reshard_after_forward"]
    critic_forward_prefetch: bool = _USUAL["critic_forward_prefetch"]
    critic_use_no_sync_for_gradient_accumulation: bool = _USUAL["critic_use_no_sync_for_gradient_accumulation"]
    critic_lr: float = _USUAL["critic_lr"]
    critic_clip_grad: float = _USUAL["critic_clip_grad"]
    # -- how the model is held
    model_dtype: str = _USUAL["model_dtype"]
    param_dtype: str = _USUAL["param_dtype"]
    reduce_dtype: str = _USUAL["reduce_dtype"]
    ref_model_dtype: str = _USUAL["ref_model_dtype"]
    param_offload: bool = _USUAL["param_offload"]
    optimizer_offload: bool = _USUAL["optimizer_offload"]
    forward_prefetch: bool = _USUAL["forward_prefetch"]
    use_no_sync_for_gradient_accumulation: bool = _USUAL["use_no_sync_for_gradient_accumulation"]
    lr: float = _USUAL["lr"]
    clip_grad: float = 1.0
    # -- vLLM
    gpu_memory_utilization: float = _USUAL["gpu_memory_utilization"]
    tensor_model_parallel_size: int = _USUAL["tensor_model_parallel_size"]
    free_cache_engine: bool = _USUAL["free_cache_engine"]
    enforce_eager: bool = _USUAL["enforce_eager"]
    max_num_seqs: int = _USUAL["max_num_seqs"]
    max_num_batched_tokens: int = _USUAL["max_num_batched_tokens"]
    max_model_len: int | None = None
    layered_summon: bool = _USUAL["layered_summon"]  # only LoRA's adapters are sent, a layer at a time
    update_weights_bucket_megabytes: int = _USUAL["update_weights_bucket_megabytes"]

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
