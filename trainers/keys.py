"""TRL's keys as the search needs them, and the knobs with a lower tier under some losses. No torch here.

The tiers were measured (experiments/neutrality, TRL 1.16): these knobs change the gradient by 0.01 % to more than
100 %, all others by rounding only. `launch.ranks` is with the recipe's own micro-batch.
"""

from collections.abc import Mapping

from autofit.recipe.keys import BatchKeys, Tier

SPLIT, ROLLOUT = "per_device_train_batch_size", "steps_per_generation"
RANKS = "launch.ranks"
SAMPLES = BatchKeys(length="max_length", evaluation="per_device_eval_batch_size")
ROLLOUTS = BatchKeys(
    rollout=ROLLOUT, rollout_batch="generation_batch_size", group="num_generations", reuse="num_iterations",
    completion="max_completion_length", engine_share="vllm_gpu_memory_utilization",
    engine_length="vllm_max_model_length", evaluation="per_device_eval_batch_size",
    evaluation_group="num_generations_eval",
)  # fmt: skip
_SPLIT_CHANGES_DPO = ("aot", "aot_unpaired", "sft")  # losses that sort, or average tokens, within a micro-batch
_ROLLOUT_CHANGES_GRPO = ("dapo", "cispo", "vespo", "bnpo")

# Tokens of a micro-batch that TRL 1.16's losses process at once (trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE).
TILE_TOKENS = 4096

# Keys that the small trainings of a gradient proof use unchanged.
COMPARED = (
    SPLIT, "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "pad_to_multiple_of", "router_aux_loss_coef",
    "accelerator_config",
)  # fmt: skip


def grpo_tiers(
    resolved: Mapping[str, object], *, balances_experts: bool = False, counts_padding: bool = False
) -> dict[str, Tier]:
    """The tiers of GRPO's split, rollout and ranks.

    Another number of ranks or another rollout size groups other completions in a micro-batch and pads them to another
    length, which shifts learned positions (`counts_padding`).
    """
    loss = resolved.get("loss_type", "grpo")
    bonus = bool(resolved.get("entropy_coef")) or bool(resolved.get("use_adaptive_entropy"))
    split = loss == "bnpo" or resolved.get("top_entropy_quantile", 1.0) != 1.0 or bonus or balances_experts
    rollout = (
        split
        or loss in _ROLLOUT_CHANGES_GRPO
        or resolved.get("scale_rewards") == "batch"
        or resolved.get("multi_objective_aggregation") == "normalize_then_sum"
        or counts_padding
    )
    return {**_tiers(split, rollout, split or counts_padding), **weights_tiers(resolved)}


def rloo_tiers(
    resolved: Mapping[str, object], *, balances_experts: bool = False, counts_padding: bool = False
) -> dict[str, Tier]:
    """The tiers of RLOO: its loss is a mean over completions, and advantages may be normalised over a rollout."""
    rollout = balances_experts or bool(resolved.get("normalize_advantages")) or counts_padding
    ranks = balances_experts or counts_padding
    return {**_tiers(balances_experts, rollout, ranks), **weights_tiers(resolved)}


def dpo_tiers(
    resolved: Mapping[str, object], *, balances_experts: bool = False, counts_padding: bool = False
) -> dict[str, Tier]:
    """The tier of DPO's split."""
    given = resolved.get("loss_type")
    losses = given if isinstance(given, list) else [given]
    split = balances_experts or any(name in _SPLIT_CHANGES_DPO for name in losses)
    return {**_tiers(split, False, False), **weights_tiers(resolved)}


def sample_tiers(
    resolved: Mapping[str, object], *, balances_experts: bool = False, counts_padding: bool = False
) -> dict[str, Tier]:
    """The tier of the split if the loss is a mean over a whole optimizer step, as for SFT and reward models."""
    apart = resolved.get("average_tokens_across_devices") is False and "loss_type" in resolved
    return {**_tiers(balances_experts, False, apart), **weights_tiers(resolved)}


def hf_tiers(
    resolved: Mapping[str, object], *, balances_experts: bool = False, counts_padding: bool = False
) -> dict[str, Tier]:
    """The tiers of the split and of the ranks: a loss over pairs is a mean over them, the others one over tokens.

    KTO subtracts the mean over a micro-batch of all ranks, and an embedding is compared with all others of it. The
    losses of ASFT, GKD, diffusion and labelled tokens are means over the tokens of a micro-batch, as is TRL's
    cross-entropy beside ORPO, SimPO and CPO. EBFT begins behind the longest prompt of a micro-batch.
    """
    objective = resolved.get("objective")
    apart = objective == "sft" and resolved.get("average_tokens_across_devices") is False
    tokens = objective in ("orpo", "simpo", "cpo") and resolved.get("nll_weight") and not resolved["float32_logits"]
    means = objective in ("asft", "kto", "label_tokens", "gkd", "embed", "diffusion", "ebft") or bool(tokens)
    return {**_tiers(balances_experts or means, False, apart or means), **weights_tiers(resolved)}


def weights_tiers(resolved: Mapping[str, object]) -> dict[str, Tier]:
    """The tiers of what changes the precision of the weights: `recipe` where these are the trained ones.

    Without LoRA `dtype` is that of the trained weights. Continuous batching casts the whole model to the 16-bit type of
    its autocast and not back (TRL 1.16): also float32 adapters, though not those of a quantised model, which TRL keeps
    in bfloat16 anyway.
    """
    lora = bool(resolved.get("use_peft"))
    quantised = bool(resolved.get("load_in_4bit") or resolved.get("load_in_8bit"))
    trained_half = quantised if lora else resolved.get("dtype") in ("bfloat16", "float16")
    casts = bool(resolved.get("bf16") or resolved.get("fp16")) and not trained_half
    changed = {"dtype": not lora, "use_transformers_continuous_batching": casts}
    return {key: "recipe" for key, more in changed.items() if more and key in resolved}


def on_ranks(tiers: Mapping[str, Tier], *, many: bool, generates: bool) -> dict[str, Tier]:
    """`tiers` as they are where `many` ranks train, or one: what each rank normalises by itself counts on several.

    Another micro-batch deals samples to other ranks then. Completions stay with the rank that generates them.
    """
    found = {key: tier for key, tier in tiers.items() if many or key != RANKS}
    if RANKS in found and not generates:
        found.setdefault(SPLIT, found[RANKS])
    return found


def note_of_ranks(tiers: Mapping[str, Tier]) -> tuple[str, ...]:
    """Sentences on a recipe on several ranks: whether its gradient depends on their number."""
    if RANKS not in tiers:
        return ()
    return ("its gradient depends on the number of ranks: each of them normalises, or pads, its own micro-batches",)


def _tiers(split: bool, rollout: bool, ranks: bool) -> dict[str, Tier]:
    changed = {SPLIT: split, ROLLOUT: rollout, RANKS: ranks}
    return {key: "approximate" for key, more in changed.items() if more}
