"""The recipe keys that the search interprets: those that batch the samples; older names of keys; tiers of changes."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Tier = Literal["neutral", "approximate", "recipe"]
TIERS: tuple[Tier, ...] = get_args(Tier)
QUANT_STORAGE = "bnb_4bit_quant_storage"  # as which type 4-bit weights lie in memory: FSDP shards floats only
OTHER_MODELS = ("reward_model_name_or_path", "teacher_model_name_or_path")  # models besides the one that is trained
LAUNCH = "launch"  # how a training is launched; no trainer sees it
ALLOCATOR, GROWS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"  # a variable, and a value of it
GROWING = f"env.{ALLOCATOR}"
SYNC_EACH_BATCH = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"  # the key of transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKeys:
    """The names of the keys by which a trainer batches its samples; None for a key that it lacks.

    Effective batch = micro-batch x accumulation x ranks; where `sharers` ranks compute parts of the same samples, they
    count as one. A trainer with `rollout` generates micro-batch x rollout completions at once on each rank, in groups
    of `group` completions of one prompt.
    """

    micro_batch: str = "per_device_train_batch_size"  # samples in one forward and backward on one rank
    accumulation: str = "gradient_accumulation_steps"  # micro-batches in one optimizer step
    rollout: str | None = None  # micro-batches whose completions are generated at once
    rollout_batch: str | None = None  # the same as a number of completions; a tuned recipe has only one of the two
    group: str | None = None  # completions of one prompt
    reuse: str | None = None  # number of passes of training over one rollout
    completion: str | None = None  # tokens of the longest completion
    length: str | None = None  # tokens of the longest sample
    sharers: str | None = None  # ranks that compute parts of the same samples (sequence parallelism)
    packed: str | None = None  # True if micro-batches are made by tokens, so that their size is irrelevant
    budget: str | None = None  # tokens of such a micro-batch
    scored: str | None = None  # samples in a forward pass over a rollout without gradients, which it must divide
    referred: str | None = None  # the same of the reference
    referrers: str | None = None  # ranks that compute parts of the same samples there
    evaluation: str | None = None  # samples in one batch of an evaluation within the training
    evaluation_group: str | None = None  # completions of one prompt there; unset they are those of `group`
    engine_share: str | None = None  # the part of the card that a rollout engine takes
    engine_length: str | None = None  # tokens of the longest sequence that it must be able to serve
    engine_ranks: str | None = None  # ranks that hold one copy of its model together, which must divide the ranks
    unreduced: str | None = None  # whether whole gradients wait for a step's end; None: transformers' SYNC_EACH_BATCH

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, str | None]) -> "BatchKeys":
        return cls(**content)  # type: ignore[arg-type]


def evaluates(values: Mapping[str, object]) -> bool:
    """True if the recipe `values` evaluates within its training: TRL's scripts then give their trainer a dataset."""
    return values.get("eval_strategy") not in (None, False, "no")


def weight_bits(values: Mapping[str, object]) -> int | None:
    """Bits of a weight as the recipe `values` loads it, 4 or 8 by bitsandbytes, if it quantises."""
    return 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None


def divisors(number: int) -> set[int]:
    """Every divisor of `number`, found by trying up to its square root."""
    small = {n for n in range(1, math.isqrt(number) + 1) if number % n == 0}
    return small | {number // n for n in small}


# (older name, newer name) of one setting with the same values, from the fields and deprecation notices of transformers
# 4.44 to 5.23 and TRL 0.12 to 1.16. A deprecated field whose help text names its successor need not be listed.
RENAMED = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), ("evaluation_strategy", "eval_strategy"),
    ("no_cuda", "use_cpu"), ("per_gpu_train_batch_size", "per_device_train_batch_size"),
    ("per_gpu_eval_batch_size", "per_device_eval_batch_size"), ("push_to_hub_token", "hub_token"),
    ("push_to_hub_model_id", "hub_model_id"), ("warmup_ratio", "warmup_steps"), ("torch_dtype", "dtype"),
    ("max_seq_length", "max_length"), ("use_liger", "use_liger_kernel"),
    ("use_transformers_paged", "use_transformers_continuous_batching"),
    ("vllm_guided_decoding_regex", "vllm_structured_outputs_regex"),
    ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
    ("vllm_max_model_len", "vllm_max_model_length"), ("wandb_log_unique_prompts", "log_unique_prompts"),
)  # fmt: skip
