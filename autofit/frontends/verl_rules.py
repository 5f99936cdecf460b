"""What `explain` says of a verl config: its batch, and the rules that verl applies, some of them minutes late.

Read in verl at commit 1dda039b (0.9, trainer v1, which is its default). No torch here.
"""

from collections.abc import Callable, Iterator, Mapping

from autofit.frontends.explanation import Explanation, Line
from autofit.frontends.verl import (
    ACTOR,
    FSDP_STRATEGIES,
    REF,
    ROLLOUT,
    Batch,
    VerlConfig,
    batch_of,
    effective_sentence,
    sequence_parallel,
)
from autofit.frontends.verl_critic import critic_line, critic_rules, has_critic


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
            else "a number of the batch is no whole number"
        )
        why = why if fsdp else f"{strategy} is not read, only FSDP"
        lines = (*head, Line("effective batch", effective_sentence(values)), Line("micro-batches", f"not known: {why}"))
        return Explanation(tool="verl", lines=lines)
    lines = (*head, *_batch_lines(config, batch), *_other_lines(config, batch))
    return Explanation(tool="verl", lines=lines, wrong=tuple(w for rule in _RULES for w in rule(config, batch)))


def _batch_lines(config: VerlConfig, batch: Batch) -> Iterator[Line]:
    yield Line("a generation", f"{batch.prompts:,} prompts x {batch.group} = {batch.generation:,} samples "
                               f"({config.told('data.train_batch_size')}, {config.told(f'{ROLLOUT}.n')})")  # fmt: skip
    yield Line("effective batch", f"{batch.mini_prompts:,} prompts x {batch.group} = {batch.effective:,} samples an "
                                  f"optimizer step, over all {batch.gpus} GPUs "
                                  f"({config.told(f'{ACTOR}.ppo_mini_batch_size')})")  # fmt: skip
    if batch.prompts % batch.mini_prompts == 0:
        steps = batch.prompts // batch.mini_prompts * batch.epochs
        epochs = f" x {batch.epochs} epochs" if batch.epochs > 1 else ""
        yield Line("optimizer steps", f"{steps} a generation ({batch.prompts:,} / {batch.mini_prompts:,}{epochs})")
    if config.is_on(f"{ACTOR}.use_dynamic_bsz"):
        budget = config.told(f"{ACTOR}.ppo_max_token_len_per_gpu")
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step, packed by tokens: {budget}")
    elif batch.micro is not None and batch.effective % batch.shards == 0 and batch.each % batch.micro == 0:
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step = "
                                    f"{batch.each // batch.micro} micro-batches of {batch.micro}")  # fmt: skip


def _other_lines(config: VerlConfig, batch: Batch) -> Iterator[Line]:
    """What is certain of the rest: what keeps the gradient, and which further models there are."""
    yield Line("neutral", "ppo_micro_batch_size_per_gpu, use_dynamic_bsz with its token budget, offloads, the "
                          "rollout's tensor parallel: none changes what an optimizer step averages over")  # fmt: skip
    kl = config.is_on(f"{ACTOR}.use_kl_loss")
    if kl or config.is_on("algorithm.use_kl_in_reward"):  # trainer/ppo/utils.py, need_reference_policy
        coefficient = f", {config.told(f'{ACTOR}.kl_loss_coef')}" if kl else ", for the reward's penalty"
        yield Line("reference", f"a second copy of the model{coefficient}")
    else:
        yield Line("reference", "none: use_kl_loss and use_kl_in_reward are off, so kl_loss_coef has no effect")
    if has_critic(config):
        yield Line("critic", critic_line(config, batch))
    rank = config.whole("actor_rollout_ref.model.lora_rank") or config.whole("actor_rollout_ref.model.lora.rank")
    yield Line("trained", "all weights" if rank is None else f"LoRA of rank {rank}")


# -- rules ------------------------------------------------------------------------------------------------------------


def _at_start(config: VerlConfig, batch: Batch) -> Iterator[str]:
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
    names = ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
    reference = config.is_on(f"{ACTOR}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")
    for section in (ROLLOUT, REF) if reference else (ROLLOUT,):
        given = [name for name in names if config.value(f"{section}.{name}") is not None]
        if len(given) != 1:
            short = section.removeprefix("actor_rollout_ref.")
            yield f"{short}.{names[1]} must be set, and {short}.{names[0]} not; verl refuses it at the start"


def _late(config: VerlConfig, batch: Batch) -> Iterator[str]:
    """Accepted at the start, and an AssertionError in a worker once models are loaded."""
    dynamic, sp = config.is_on(f"{ACTOR}.use_dynamic_bsz"), sequence_parallel(config)
    if batch.effective % batch.shards:  # engine_workers.py, line 266
        yield (f"ppo_mini_batch_size x rollout.n = {batch.effective:,} must be a multiple of the {batch.shards} "
               "data-parallel ranks; verl ends at the first update")  # fmt: skip
    elif batch.micro is not None and batch.each % batch.micro:  # engine/utils.py, line 125
        works = [n for n in range(1, batch.each + 1) if batch.each % n == 0 and n <= 2 * batch.micro][-4:]
        yield (f"ppo_micro_batch_size_per_gpu {batch.micro} must divide the {batch.each} samples of a data-parallel "
               f"rank; verl ends after the first rollout; {', '.join(map(str, works))} work")  # fmt: skip
    if batch.prompts > batch.mini_prompts and batch.prompts % batch.mini_prompts:  # tensordict_utils.py, line 588
        yield (f"train_batch_size {batch.prompts:,} must be a multiple of ppo_mini_batch_size {batch.mini_prompts:,}; "
               "verl ends at the first update")  # fmt: skip
    lengths = [config.whole(f"data.max_{part}_length") or 0 for part in ("prompt", "response")]
    budget = config.whole(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if dynamic and budget is not None and budget * sp < sum(lengths):  # utils/seqlen_balancing.py, line 384
        yield (f"ppo_max_token_len_per_gpu {budget} x sequence parallel {sp} is below the longest sample, "
               f"max_prompt_length + max_response_length = {sum(lengths)}; verl ends at such a sample")  # fmt: skip
    parts = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    tensor, data, pipeline = (config.whole(f"{ROLLOUT}.{part}") or 1 for part in parts)
    if batch.gpus % (tensor * data * pipeline):  # engine_workers.py, line 658
        yield (f"the rollout's engine of {tensor * data * pipeline} GPUs ({config.told(f'{ROLLOUT}.{parts[0]}')}) "
               f"must divide the {batch.gpus} GPUs; verl ends when the workers start")  # fmt: skip
    own = config.said.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz")
    if own is not None and (str(own).lower() in ("true", "1")) != dynamic:  # engine_workers.py, line 615
        yield "rollout.log_prob_use_dynamic_bsz must equal actor.use_dynamic_bsz; verl ends when the workers start"


def _sequence_parallel(config: VerlConfig, batch: Batch) -> Iterator[str]:
    size = sequence_parallel(config)
    if size > 1 and not config.is_on("actor_rollout_ref.model.use_remove_padding"):  # workers/config/actor.py, line 336
        yield "ulysses_sequence_parallel_size above 1 needs use_remove_padding: true; verl refuses it at the start"


_RULES: tuple[Callable[[VerlConfig, Batch], Iterator[str]], ...] = (_at_start, _late, _sequence_parallel, critic_rules)
