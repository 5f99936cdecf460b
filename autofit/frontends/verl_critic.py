"""PPO's critic in a config of verl: its keys, the samples of its optimizer steps, and what verl does with its sizes.

Read in verl at commit 1dda039b (0.9): verl/trainer/config/_generated_ppo_trainer.yaml, verl/trainer/ppo/v1/
trainer_base.py (line 250) and verl/workers/config/engine.py. No torch here.
"""

from collections.abc import Iterator

from autofit.errors import ConfigError
from autofit.frontends.verl import ACTOR, FSDP_STRATEGIES, Batch, VerlConfig

_C = "critic"
_TOKENS = f"{_C}.ppo_infer_max_token_len_per_gpu"  # the only size of it that the trainer v1 hands on
_MOST_TOKENS = 32768
_WITHOUT_EFFECT = (
    "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu",
    "forward_max_token_len_per_gpu", "forward_micro_batch_size_per_gpu", "ulysses_sequence_parallel_size",
)  # fmt: skip
_NOT_SIMULATED = {
    f"{_C}.model.enable_activation_offload": "its copies run between the layers",
    f"{_C}.model.tiled_mlp.enabled": "it computes each layer's MLP in parts",
    f"{_C}.fsdp.offload_policy": "FSDP2's own offloading",
}


def has_critic(config: VerlConfig) -> bool:
    """trainer/ppo/utils.py, need_critic."""
    if config.value("critic.enable") is not None:
        return config.is_on("critic.enable")
    return config.value("algorithm.adv_estimator") == "gae"


def _samples(config: VerlConfig, batch: Batch) -> int:
    """Of an optimizer step of the critic, over all GPUs."""
    return (config.whole(f"{_C}.ppo_mini_batch_size") or batch.mini_prompts) * batch.group


def _sharers(config: VerlConfig) -> int:
    return config.whole(f"{_C}.fsdp.ulysses_sequence_parallel_size") or 1


def _update_tokens(config: VerlConfig) -> int:
    """Tokens of a micro-batch of the critic's update on each GPU."""
    older = config.whole(f"{_C}.ppo_max_token_len_per_gpu") or _MOST_TOKENS
    return (config.whole(_TOKENS) or _MOST_TOKENS) if config.is_on("trainer.use_v1") else older


def critic_line(config: VerlConfig, batch: Batch) -> str:
    """What `explain` says of the critic."""
    named = "critic.ppo_infer_max_token_len_per_gpu" if config.is_on("trainer.use_v1") else "ppo_max_token_len_per_gpu"
    left = [key for key in _WITHOUT_EFFECT if config.said.get(f"{_C}.{key}") not in (None, False)]
    if not config.is_on("trainer.use_v1") and "ppo_max_token_len_per_gpu" in left:
        left.remove("ppo_max_token_len_per_gpu")
    without = f"; critic.{', critic.'.join(left)} without effect in verl 0.9" if left else ""
    return (
        f"a further model is trained, {_samples(config, batch):,} samples an optimizer step, packed by tokens: "
        f"{_update_tokens(config)} a GPU ({named}{without})"
    )


def critic_rules(config: VerlConfig, batch: Batch) -> Iterator[str]:
    """What of the critic's batch ends in an error: at the start, or at its first update."""
    if not has_critic(config):
        return
    dynamic = config.said.get(f"{_C}.use_dynamic_bsz", config.value(f"{ACTOR}.use_dynamic_bsz"))
    given = [key for key in _WITHOUT_EFFECT[:2] if config.said.get(f"{_C}.{key}") is not None]
    if str(dynamic).lower() not in ("true", "1") and len(given) != 1:  # workers/config/critic.py, line 96
        yield "critic.ppo_micro_batch_size_per_gpu must be set, or critic.use_dynamic_bsz; verl refuses it at the start"
    samples, shards = _samples(config, batch), max(1, batch.gpus // _sharers(config))
    if samples % shards:
        yield (f"critic.ppo_mini_batch_size x rollout.n = {samples:,} must be a multiple of the critic's {shards} "
               "data-parallel ranks; verl ends at its first update")  # fmt: skip
    if batch.generation % samples:
        yield (f"the {batch.generation:,} samples of a generation must be a multiple of critic.ppo_mini_batch_size x "
               f"rollout.n = {samples:,}; verl ends at the critic's first update")  # fmt: skip


def critic_refusals(config: VerlConfig, batch: Batch) -> Iterator[str]:
    """Why a critic is not simulated, or would not train."""
    strategy = str(config.said.get(f"{_C}.strategy", "fsdp"))
    if strategy not in FSDP_STRATEGIES:
        yield f"verl's critic with {strategy} is not simulated, only its FSDP engines: set critic.strategy to fsdp"
    for path, why in _NOT_SIMULATED.items():
        if config.is_on(path):
            yield f"{path} is not simulated for verl ({why}); turn it off"
    if config.whole(f"{_C}.model.lora_rank") is not None:
        yield "a critic with LoRA is not simulated for verl; set critic.model.lora_rank=0"
    size = config.said.get(f"{_C}.fsdp.fsdp_size", -1)
    if isinstance(size, int) and 0 <= size < batch.gpus:
        yield f"{_C}.fsdp.fsdp_size {size} shards over some of the {batch.gpus} GPUs, which is not simulated"
    if batch.gpus % _sharers(config):
        yield f"critic.fsdp.ulysses_sequence_parallel_size {_sharers(config)} must divide the {batch.gpus} GPUs"
    yield from critic_rules(config, batch)


def critic_values(config: VerlConfig, batch: Batch) -> dict[str, object]:
    """The values of the recipe that follow from the critic's batch and strategy. Raises ConfigError."""
    if refused := next(critic_refusals(config, batch), None):
        raise ConfigError(refused)
    epochs = config.whole(f"{_C}.ppo_epochs") or batch.epochs
    return {
        "critic": True, "critic_steps_per_generation": batch.generation // _samples(config, batch) * epochs,
        "critic_max_token_len_per_gpu": _update_tokens(config),
        "critic_sharding": "fsdp2" if config.said.get(f"{_C}.strategy") == "fsdp2" else "fsdp1",
    }  # fmt: skip
