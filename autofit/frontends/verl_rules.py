"""Lines of `explain` on a verl config: its batch, and the rules that verl applies, some of them minutes late.

Read in verl at commit 1dda039b (0.9, trainer v1, which is its default). No torch here.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from autofit.errors import ConfigError, quoted
from autofit.frontends.draft import Explanation, Line
from autofit.frontends.verl import (
    ACTOR,
    BATCH_KEYS,
    FSDP_STRATEGIES,
    MODEL_PATH,
    REF,
    ROLLOUT,
    UNSURE,
    VerlBatch,
    VerlConfig,
    batch_of,
    effective_sentence,
    has_critic,
    sequence_parallel,
    typos,
)
from autofit.recipe import catalogue

# PPO's critic in a config of verl: its keys, the samples of its optimizer steps, and what verl does with its sizes.
#
# Read in verl at commit 1dda039b (0.9): verl/trainer/config/_generated_ppo_trainer.yaml, verl/trainer/ppo/v1/
# trainer_base.py (line 250) and verl/workers/config/engine.py. No torch here.

_C = "critic"
_TOKENS = f"{_C}.ppo_infer_max_token_len_per_gpu"  # the only size of it that the trainer v1 hands on
_MOST_TOKENS = 32768
_WITHOUT_EFFECT = (
    "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu",
    "forward_max_token_len_per_gpu", "forward_micro_batch_size_per_gpu", "ulysses_sequence_parallel_size",
)  # fmt: skip
_NOT_SIMULATED = {
    f"{_C}.model.tiled_mlp.enabled": "it computes each layer's MLP in parts",
}


def _samples(config: VerlConfig, batch: VerlBatch) -> int:
    """Of an optimizer step of the critic, over all GPUs."""
    return (config.whole(f"{_C}.ppo_mini_batch_size") or batch.mini_prompts) * batch.group


def _sharers(config: VerlConfig) -> int:
    return config.whole(f"{_C}.fsdp.ulysses_sequence_parallel_size") or 1


def _update_tokens(config: VerlConfig) -> int:
    """Tokens of a micro-batch of the critic's update on each GPU."""
    older = config.whole(f"{_C}.ppo_max_token_len_per_gpu") or _MOST_TOKENS
    return (config.whole(_TOKENS) or _MOST_TOKENS) if config.is_on("trainer.use_v1") else older


def critic_line(config: VerlConfig, batch: VerlBatch) -> str:
    """Line of `explain` on the critic."""
    named = "critic.ppo_infer_max_token_len_per_gpu" if config.is_on("trainer.use_v1") else "ppo_max_token_len_per_gpu"
    left = [key for key in _WITHOUT_EFFECT if config.said.get(f"{_C}.{key}") not in (None, False)]
    if not config.is_on("trainer.use_v1") and "ppo_max_token_len_per_gpu" in left:
        left.remove("ppo_max_token_len_per_gpu")
    without = f"; critic.{', critic.'.join(left)} without effect in verl 0.9" if left else ""
    return (
        f"a further model is trained, {_samples(config, batch):,} samples an optimizer step, packed by tokens: "
        f"{_update_tokens(config)} a GPU ({named}{without})"
    )


def critic_rules(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """Errors of the critic's batch: at the start, or at its first update."""
    if not has_critic(config):
        return
    dynamic = config.said.get(f"{_C}.use_dynamic_bsz", config.value(f"{ACTOR}.use_dynamic_bsz"))
    given = [key for key in _WITHOUT_EFFECT[:2] if config.said.get(f"{_C}.{key}") is not None]
    # workers/config/critic.py, line 96; critic.yaml takes the deprecated key for the other too, and both are refused
    if str(dynamic).lower() not in ("true", "1") and given != [_WITHOUT_EFFECT[0]]:
        yield "critic.ppo_micro_batch_size_per_gpu must be set, or critic.use_dynamic_bsz; verl refuses it at the start"
    samples, shards = _samples(config, batch), max(1, batch.gpus // _sharers(config))
    if samples % shards:
        yield (f"critic.ppo_mini_batch_size x rollout.n = {samples:,} must be a multiple of the critic's {shards} "
               "data-parallel ranks; verl ends at its first update")  # fmt: skip
    if batch.padded % samples:
        yield (f"the {batch.generation:,} samples of a generation must be a multiple of critic.ppo_mini_batch_size x "
               f"rollout.n = {samples:,}; verl ends at the critic's first update")  # fmt: skip


def critic_refusals(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """Reasons why a critic is unsupported, or would fail to train."""
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


def critic_values(config: VerlConfig, batch: VerlBatch) -> dict[str, object]:
    """The values of the recipe that follow from the critic's batch and strategy. Raises ConfigError."""
    if refused := next(critic_refusals(config, batch), None):
        raise ConfigError(refused)
    epochs = config.whole(f"{_C}.ppo_epochs") or batch.epochs
    return {
        "critic": True, "critic_steps_per_generation": batch.padded // _samples(config, batch) * epochs,
        "critic_max_token_len_per_gpu": _update_tokens(config),
        "critic_sharding": "fsdp2" if config.said.get(f"{_C}.strategy") == "fsdp2" else "fsdp1",
    }  # fmt: skip


def explain(values: Mapping[str, object]) -> Explanation:
    """The batch of a config of verl, and the rules that it breaks."""
    config = VerlConfig.of(values)
    strategy, estimator = config.strategy, str(config.value("algorithm.adv_estimator"))
    head = [Line("tool", f"verl, {estimator} with {strategy}; what the config leaves out has the defaults of verl 0.9")]
    batch = batch_of(config)
    if batch is None or config.unsure:
        fsdp = strategy in FSDP_STRATEGIES
        open_keys = ", ".join(path.removeprefix("actor_rollout_ref.") for path in config.unsure)
        why = (
            f"the file does not say {open_keys} for certain"
            if open_keys
            else "; ".join(
                f"{key} must be a whole number; got {quoted(config.value(key))}"
                for key in BATCH_KEYS
                if config.whole(key) is None
            )
        )
        why = why if fsdp else f"{strategy} is not read, only FSDP"
        lines = (*head, Line("effective batch", effective_sentence(values)), Line("micro-batches", f"not known: {why}"))
        return Explanation(tool="verl", lines=lines)
    lines = (*head, *_batch_lines(config, batch), *_other_lines(config, batch))
    return Explanation(tool="verl", lines=lines, wrong=broken(config, batch))


def _gpus(batch: VerlBatch) -> str:
    return "one GPU" if batch.gpus == 1 else f"all {batch.gpus} GPUs"


def broken(config: VerlConfig, batch: VerlBatch) -> tuple[str, ...]:
    """The rules of verl that a config breaks: where verl ends, and why."""
    return tuple(wrong for rule in _RULES for wrong in rule(config, batch))


def _batch_lines(config: VerlConfig, batch: VerlBatch) -> Iterator[Line]:
    yield Line("a generation", f"{batch.prompts:,} prompts x {batch.group} = {batch.generation:,} samples "
                               f"({config.told('data.train_batch_size')}, {config.told(f'{ROLLOUT}.n')})")  # fmt: skip
    yield Line("effective batch", f"{batch.mini_prompts:,} prompts x {batch.group} = {batch.effective:,} samples an "
                                  f"optimizer step, over {_gpus(batch)} "
                                  f"({config.told(f'{ACTOR}.ppo_mini_batch_size')})")  # fmt: skip
    if batch.padded % batch.effective == 0:
        epochs = f" x {batch.epochs} epochs" if batch.epochs > 1 else ""
        parts = f"{batch.prompts:,} / {batch.mini_prompts:,}"
        if batch.padded > batch.generation:
            parts = (f"{batch.generation:,} samples and {batch.padded - batch.generation:,} without loss, which verl "
                     f"adds, = {batch.padded:,} / {batch.effective:,}")  # fmt: skip
        yield Line("optimizer steps", f"{batch.steps} a generation ({parts}{epochs})")
    if config.is_on(f"{ACTOR}.use_dynamic_bsz"):
        budget = config.told(f"{ACTOR}.ppo_max_token_len_per_gpu")
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step, packed by tokens: {budget}")
    elif batch.micro is not None and batch.effective % batch.shards == 0 and batch.each % batch.micro == 0:
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step = "
                                    f"{batch.each // batch.micro} micro-batches of {batch.micro}")  # fmt: skip
    elif batch.micro is None and (older := older_micro(config, batch)):
        yield Line("micro-batches", f"not known: {older}")


def older_micro(config: VerlConfig, batch: VerlBatch) -> str:
    """Way to set a micro-batch that only the deprecated key sets; "" if that is unset.

    It counts over all GPUs (verl/workers/config/actor.py, `validate`).
    """
    older = config.whole(f"{ACTOR}.ppo_micro_batch_size")
    if older is None:
        return ""
    each = f", here {older // batch.gpus}" if older % batch.gpus == 0 else ""
    return (f"ppo_micro_batch_size {older} is deprecated and counts over {_gpus(batch)}; give "
            f"{ACTOR}.ppo_micro_batch_size_per_gpu{each}")  # fmt: skip


def _other_lines(config: VerlConfig, batch: VerlBatch) -> Iterator[Line]:
    """Certain facts of the rest: the settings that keep the gradient, and further models."""
    yield Line("neutral", "ppo_micro_batch_size_per_gpu, the log_prob sizes, use_dynamic_bsz with its token budget, "
                          "offloads, the rollout's tensor parallel: none changes what an optimizer step averages "
                          "over")  # fmt: skip
    kl = config.is_on(f"{ACTOR}.use_kl_loss")
    rank = lora_rank(config)
    adapters = rank > 0 or "actor_rollout_ref.model.lora_adapter_path" in config.said
    if kl or config.is_on("algorithm.use_kl_in_reward"):  # trainer/ppo/utils.py, need_reference_policy
        coefficient = f", {config.told(f'{ACTOR}.kl_loss_coef')}" if kl else ", for the reward's penalty"
        model = "the model without its adapters, no second copy" if adapters else "a second copy of the model"
        yield Line("reference", f"{model}{coefficient}")  # v1/trainer_base.py, ref_in_actor
    else:
        yield Line("reference", "none: use_kl_loss and use_kl_in_reward are off, so kl_loss_coef has no effect")
    prompt, response = (config.whole(f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    stated = config.whole(f"{ROLLOUT}.max_model_len")
    longest = stated or _positions(config)
    if cut := cut_responses(longest=longest, prompt=prompt, response=response, stated=stated is not None):
        yield Line("responses", cut)
    if has_critic(config):
        yield Line("critic", critic_line(config, batch))
    yield Line("trained", f"LoRA of rank {rank}" if rank else "all weights")


# -- rules ------------------------------------------------------------------------------------------------------------


def _at_start(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """Refused by validate_config (utils/config.py, workers/config/actor.py), before anything is loaded."""
    if config.is_on(f"{ACTOR}.use_dynamic_bsz"):
        return
    if batch.generation % batch.gpus:
        yield (f"train_batch_size x rollout.n = {batch.generation:,} must be a multiple of the {batch.gpus} GPUs; verl "
               "refuses it at the start")  # fmt: skip
    if batch.prompts < batch.mini_prompts:
        yield (f"train_batch_size {batch.prompts} must be at least ppo_mini_batch_size {batch.mini_prompts}; verl "
               "refuses it at the start")  # fmt: skip
    older, newer = (config.value(f"{ACTOR}.{key}") for key in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"))
    if older is not None and newer is not None:
        yield "ppo_micro_batch_size and ppo_micro_batch_size_per_gpu exclude each other; remove the first"
    elif older is None and newer is None:
        yield "ppo_micro_batch_size_per_gpu must be set, or use_dynamic_bsz; verl refuses it at the start"
    elif newer is None:  # `validate` in workers/config/actor.py, and else engine_workers.py, line 631
        yield (f"ppo_micro_batch_size {older} without ppo_micro_batch_size_per_gpu is deprecated; verl ends when the "
               "workers start")  # fmt: skip
    names = ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
    reference = config.is_on(f"{ACTOR}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")
    adapters = lora_rank(config)  # the actor is the reference then
    for section in (ROLLOUT, REF) if reference else (ROLLOUT,):
        given = [name for name in names if config.value(f"{section}.{name}") is not None]
        if given != [names[1]] and not (adapters and section == REF and given):
            short = section.removeprefix("actor_rollout_ref.")
            # the deprecated one alone: engine_workers.py, line 630; of the reference engine/utils.py, line 125
            ends = "refuses it at the start" if len(given) != 1 else (
                "ends when the workers start" if section == ROLLOUT else "ends at the reference's first pass"
            )  # fmt: skip
            yield f"{short}.{names[1]} must be set, and {short}.{names[0]} not; verl {ends}"


_PARTS = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")  # of the rollout


def engine_sizes(config: VerlConfig) -> Iterator[str]:
    """Sizes of the rollout's engine that fail to divide any number of GPUs (engine_workers.py, line 657)."""
    for part in _PARTS:
        path = f"{ROLLOUT}.{part}"
        if config.value(path) != UNSURE and config.whole(path) is None:
            yield f"rollout.{part} must be 1 or more; got {config.value(path)}; verl ends when the workers start"


def engine_settings(config: VerlConfig) -> Iterator[str]:
    """Settings that the rollout's engine refuses, on any number of GPUs."""
    yield from engine_sizes(config)
    if (parts := config.whole(f"{ROLLOUT}.{_PARTS[2]}") or 1) > 1:  # workers/config/rollout.py, line 317
        yield f"rollout.{_PARTS[2]} must be 1; got {parts}; verl refuses it at the start"
    share = config.value(f"{ROLLOUT}.gpu_memory_utilization")
    if isinstance(share, int | float) and not 0 < share <= 1:  # vllm/config/cache.py
        yield f"rollout.gpu_memory_utilization must be above 0 and at most 1; got {share}; vLLM refuses it"
    dummy = "dummy" in str(config.said.get(f"{ROLLOUT}.load_format", "dummy"))
    adapters = lora_rank(config) and not config.is_on("actor_rollout_ref.model.lora.merge")
    if config.is_on(f"{ROLLOUT}.layered_summon") and dummy and adapters:  # utils/fsdp_utils.py, line 726
        yield "rollout.layered_summon needs rollout.load_format=safetensors; verl ends at the first weight sync"


# The engine's longest sequence is rollout.max_model_len, else what the model's config says; a response that would be
# longer is cut to it, with vLLM as with SGLang (workers/rollout/vllm_rollout/vllm_async_server.py, `_validate_configs`
# and `generate`). An older verl asserts at the start that prompt and response have room.


def _positions(config: VerlConfig) -> int | None:
    """The model's max_position_embeddings, if the file or the catalogue has them."""
    override = "actor_rollout_ref.model.override_config"
    said = [config.whole(f"{override}.{part}max_position_embeddings") for part in ("", "model_config.")]
    model = catalogue.text_config(str(config.said.get(f"actor_rollout_ref.{MODEL_PATH}")))
    found = model.get("max_position_embeddings")
    return said[0] or said[1] or (found if isinstance(found, int) else None)


def longest_sample(config: VerlConfig) -> int:
    """Tokens of the longest prompt and response, which the engine cuts at its longest sequence."""
    lengths = sum(config.whole(f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    return min(lengths, config.whole(f"{ROLLOUT}.max_model_len") or _positions(config) or lengths)


def without_room(*, stated: int | None, positions: int | None, prompt: int) -> Iterator[str]:
    """Reason why the engine fails to start, or leaves the longest prompt unanswered."""
    longest = stated or positions
    if stated is not None and positions is not None and stated > positions:
        yield (f"rollout.max_model_len {stated:,} is above the model's max_position_embeddings {positions:,}; verl "
               "ends when the rollout's servers start")  # fmt: skip
    elif longest is not None and prompt >= longest:
        of = "rollout.max_model_len" if stated else "the model's max_position_embeddings"
        yield (f"data.max_prompt_length {prompt:,} leaves no token of {of} {longest:,} to generate; verl ends at such "
               "a prompt")  # fmt: skip


def cut_responses(*, longest: int | None, prompt: int, response: int, stated: bool) -> str:
    """Sentence that responses end before max_response_length; "" if they reach it."""
    if longest is None or prompt + response <= longest:
        return ""
    of = "rollout.max_model_len" if stated else "the model's max_position_embeddings"
    return (
        f"a response ends after {longest - prompt:,} tokens, not after max_response_length {response:,}: prompt and "
        f"response have at most {of}, {longest:,}, and verl cuts there without a word (an older verl refuses to start)"
    )


def _context(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    prompt, stated = config.whole("data.max_prompt_length") or 0, config.whole(f"{ROLLOUT}.max_model_len")
    yield from without_room(stated=stated, positions=_positions(config), prompt=prompt)
    batched, most = (config.whole(f"{ROLLOUT}.max_num_{part}") for part in ("batched_tokens", "seqs"))
    if (batched or 8192) < (most or 256):  # vllm/config/scheduler.py, verify_max_model_len
        yield (f"rollout.max_num_batched_tokens {batched or 8192} must be at least rollout.max_num_seqs {most or 256}; "
               "vLLM ends when the rollout's servers start")  # fmt: skip


def _late(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """Accepted at the start, and an AssertionError in a worker once models are loaded."""
    dynamic, sp = config.is_on(f"{ACTOR}.use_dynamic_bsz"), sequence_parallel(config)
    if batch.effective % batch.shards:  # engine_workers.py, line 266
        yield (f"ppo_mini_batch_size x rollout.n = {batch.effective:,} must be a multiple of the {batch.shards} "
               "data-parallel ranks; verl ends at the first update")  # fmt: skip
    elif batch.micro is not None and batch.each % batch.micro:  # engine/utils.py, line 125
        works = [n for n in range(1, batch.each + 1) if batch.each % n == 0 and n <= 2 * batch.micro][-4:]
        yield (f"ppo_micro_batch_size_per_gpu {batch.micro} must divide the {batch.each} samples of a data-parallel "
               f"rank; verl ends after the first rollout; {', '.join(map(str, works))} work")  # fmt: skip
    known = not dynamic and batch.prompts < batch.mini_prompts  # told as refused at the start
    if batch.padded % batch.effective and not known:  # tensordict_utils.py, line 588; the trainer v1 pads
        yield (f"train_batch_size {batch.prompts:,} must be a multiple of ppo_mini_batch_size {batch.mini_prompts:,}; "
               "verl ends at the first update")  # fmt: skip
    longest, budget = longest_sample(config), config.whole(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if dynamic and budget is not None and budget * sp < longest:  # utils/seqlen_balancing.py, line 384
        yield (f"ppo_max_token_len_per_gpu {budget} x sequence parallel {sp} is below the longest sample, "
               f"max_prompt_length + max_response_length = {longest}; verl ends at such a sample")  # fmt: skip
    yield from engine_settings(config)
    size = math.prod(config.whole(f"{ROLLOUT}.{part}") or 1 for part in _PARTS)
    if batch.gpus % size:  # engine_workers.py, line 658
        yield (f"the rollout's engine of {size} GPUs ({config.told(f'{ROLLOUT}.{_PARTS[0]}')}) "
               f"must divide the {batch.gpus} GPUs; verl ends when the workers start")  # fmt: skip
    own = config.said.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    if own is not None and (str(own).lower() in ("true", "1")) != dynamic:  # engine_workers.py, line 615
        yield "rollout.log_prob_use_dynamic_bsz must equal actor.use_dynamic_bsz; verl ends when the workers start"


def uneven(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """Micro-batches of a gradient-free pass that fail to divide a rank's samples (engine/utils.py, line 125)."""
    if config.is_on(f"{ACTOR}.use_dynamic_bsz"):
        return
    reference = config.is_on(f"{ACTOR}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")
    adapters = lora_rank(config)
    bypassed = config.is_on("algorithm.rollout_correction.bypass_mode")  # no pass of the actor's own
    sections = [ROLLOUT] if not bypassed or (reference and adapters) else []
    for section in [*sections, REF] if reference and not adapters else sections:
        micro = config.whole(f"{section}.log_prob_micro_batch_size_per_gpu")
        shards = max(1, batch.gpus // sequence_parallel(config, REF if section == REF else ACTOR))
        if micro is not None and batch.padded % shards == 0 and batch.padded // shards % micro:
            key = f"{section.removeprefix('actor_rollout_ref.')}.log_prob_micro_batch_size_per_gpu"
            yield (f"{key} {micro} must divide the {batch.padded // shards:,} samples of a generation on a "
                   "data-parallel rank; verl ends after the first rollout")  # fmt: skip


_VLLMS_RANK = 512  # the largest (workers/rollout/vllm_rollout/utils.py)


def lora_rank(config: VerlConfig) -> int:
    """The rank of the adapters; 0 if there are none."""
    model = "actor_rollout_ref.model"
    return config.whole(f"{model}.lora.rank") or config.whole(f"{model}.lora_rank") or 0


def largest_rank(config: VerlConfig) -> Iterator[str]:
    """Reason why vLLM refuses the adapters."""
    rank, named = lora_rank(config), str(config.said.get(f"{ROLLOUT}.name", "vllm"))
    if rank > _VLLMS_RANK and named == "vllm" and not config.is_on("actor_rollout_ref.model.lora.merge"):
        yield f"lora_rank {rank} is above vLLM's largest, {_VLLMS_RANK}; verl refuses it at the start"


def _ranks(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    yield from largest_rank(config)


_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _aggregation(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    mode = config.said.get(f"{ACTOR}.loss_agg_mode", _AGGREGATIONS[0])
    if mode not in (*_AGGREGATIONS, UNSURE):  # workers/config/actor.py
        yield f"actor.loss_agg_mode must be one of {', '.join(_AGGREGATIONS)}; got {mode}; verl refuses it"


def _baseline(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    """ppo/ray_trainer.py, line 265; the trainer v1 leaves out a quantity that it asks for."""
    estimator = str(config.value("algorithm.adv_estimator"))
    if estimator in ("optimal_token_baseline", "tir_optimal_token_baseline") and config.is_on("trainer.use_v1"):
        yield (f"algorithm.adv_estimator {estimator} reads sum_pi_squared, which verl's trainer v1 does not compute; "
               "verl ends at the first advantages; trainer.use_v1=False computes it")  # fmt: skip


# workers/config/actor.py, line 336, for the actor's own key; for that of fsdp_config the engine itself does, once the
# workers have started (workers/engine/fsdp/transformer_impl.py, line 129)
UNPACKED = "ulysses_sequence_parallel_size above 1 needs use_remove_padding: true; verl ends before it trains"


def _sequence_parallel(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    packed = config.is_on("actor_rollout_ref.model.use_remove_padding")
    if sequence_parallel(config) > 1 and not packed:
        yield UNPACKED


# The head is a unit of its own where it has weights of its own (utils/fsdp_utils.py, _select_fsdp2_wrap_targets), and
# the fused forwards read them without calling it (models/transformers/dense_common.py).
SHARDED_HEAD = (
    "use_fused_kernels with fsdp2 reads the shards of a head that has weights of its own; verl ends at the first "
    'log-probabilities ("got mixed torch.Tensor and DTensor"); set actor.strategy=fsdp, or use_fused_kernels=False'
)


def sharded_head(config: VerlConfig) -> Iterator[str]:
    """Reason why fused kernels fail to find the weights of the head."""
    model = str(config.said.get(f"actor_rollout_ref.{MODEL_PATH}"))
    fused = config.strategy == "fsdp2" and config.is_on("actor_rollout_ref.model.use_fused_kernels")
    if fused and catalogue.text_config(model).get("tie_word_embeddings") is False:
        yield SHARDED_HEAD


def _fused(config: VerlConfig, batch: VerlBatch) -> Iterator[str]:
    yield from sharded_head(config)


_RULES: tuple[Callable[[VerlConfig, VerlBatch], Iterator[str]], ...] = (
    lambda config, _: typos(config), _at_start, _late, uneven, _ranks, _aggregation, _baseline, _sequence_parallel,
    _context, _fused, critic_rules,
)  # fmt: skip
