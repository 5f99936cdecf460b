"""The keys of a recipe for verl, and the micro-batches that follow from them. No torch here."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of a recipe: verl's own by their last names, and three that follow from its batch."""

    model_path: str
    ppo_micro_batch_size_per_gpu: int = 1
    gradient_accumulation_steps: int = 1  # micro-batches of an optimizer step on each rank
    steps_per_generation: int = 1  # micro-batches of a generation on each rank
    rollout_n: int = 1
    ppo_epochs: int = 1
    max_prompt_length: int = 512
    max_response_length: int = 512
    max_steps: int = 1
    # -- sizes
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    log_prob_micro_batch_size_per_gpu: int = 1
    log_prob_max_token_len_per_gpu: int = 16384
    ref_log_prob_micro_batch_size_per_gpu: int = 1
    ref_log_prob_max_token_len_per_gpu: int = 16384
    # -- what is computed
    reference: bool = False
    use_kl_loss: bool = False
    calculate_entropy: bool = False  # in the update
    use_fused_kernels: bool = False
    enable_gradient_checkpointing: bool = True
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: str | list[str] = "all-linear"
    attn_implementation: str = "flash_attention_2"
    use_torch_compile: bool = True
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    trust_remote_code: bool = False
    # -- how the model is held
    model_dtype: str = "fp32"
    param_dtype: str = "bf16"
    ref_model_dtype: str = "fp32"
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_prefetch: bool = False
    use_no_sync_for_gradient_accumulation: bool = True
    lr: float = 1e-6
    clip_grad: float = 1.0
    # -- vLLM
    gpu_memory_utilization: float = 0.5
    tensor_model_parallel_size: int = 2
    free_cache_engine: bool = True
    enforce_eager: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    update_weights_bucket_megabytes: int = 2048

    @property
    def tokens(self) -> int:
        """Of the longest sample."""
        return self.max_prompt_length + self.max_response_length

    @property
    def samples(self) -> int:
        """Of an optimizer step on each rank."""
        return self.ppo_micro_batch_size_per_gpu * self.gradient_accumulation_steps

    @property
    def generated(self) -> int:
        """Samples of a generation on each rank."""
        return self.ppo_micro_batch_size_per_gpu * self.steps_per_generation

    @property
    def steps_of_a_generation(self) -> int:
        return max(1, self.generated // self.samples) * self.ppo_epochs

    def split(self, samples: int, *, rows: int, budget: int) -> list[int]:
        """Samples of each micro-batch, all of full length.

        With a token budget verl takes the fewest micro-batches that hold all tokens and deals the samples out evenly,
        so that one may be above the budget (verl/utils/seqlen_balancing.py, rearrange_micro_batches).
        """
        if not self.use_dynamic_bsz:
            return [rows] * (samples // rows) + ([samples % rows] if samples % rows else [])
        number = min(samples, math.ceil(samples * self.tokens / budget))
        more = samples % number
        return [samples // number + 1] * more + [samples // number] * (number - more)
