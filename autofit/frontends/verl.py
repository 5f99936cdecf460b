"""The batch of a verl config by verl's own arithmetic, and the rules that verl applies, some of them minutes late.

Read in verl at commit 1dda039b (0.9, trainer v1, which is its default). No torch here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autofit.frontends.explanation import Explanation, Line

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_FSDP = f"{_ACTOR}.fsdp_config"
_FSDP_STRATEGIES = ("fsdp", "fsdp2")
UNSURE = "?"  # a value that is not said for certain, in whose place no default may stand
_MATTERS_LITTLE = (  # where these are not certain, a rule may stay unsaid, and nothing else changes
    "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "data.max_prompt_length",
    "data.max_response_length", "rollout.tensor_model_parallel_size", "rollout.data_parallel_size",
    "rollout.pipeline_model_parallel_size",
)  # fmt: skip
ENGINE, CONFIG_NAME = "model_engine", "config-name"  # an override, and an option of hydra, that choose the defaults
_ENGINE, _CONFIG_NAME = "dp", "ppo_trainer"
# verl/trainer/config/_generated_ppo_trainer.yaml: what hydra fills in. None: not set.
DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 1024, "data.gen_batch_size": None, "data.max_prompt_length": 512,
    "data.max_response_length": 512, f"{_ACTOR}.strategy": "fsdp", f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.ppo_micro_batch_size": None, f"{_ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{_ACTOR}.use_dynamic_bsz": False, f"{_ACTOR}.ppo_max_token_len_per_gpu": 16384, f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.use_kl_loss": False, f"{_ACTOR}.kl_loss_coef": 0.001, f"{_ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_FSDP}.ulysses_sequence_parallel_size": 1, "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.lora_rank": 0, f"{_ROLLOUT}.n": 1, f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.data_parallel_size": 1, f"{_ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{_ROLLOUT}.log_prob_micro_batch_size": None, f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": None,
    f"{_REF}.log_prob_micro_batch_size": None, f"{_REF}.log_prob_micro_batch_size_per_gpu": None,
    "algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": False, "critic.enable": None,
    "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.use_v1": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerlConfig:
    """A config's values by dotted path, without hydra's defaults."""

    said: Mapping[str, object]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "VerlConfig":
        """Of a nested or a dotted mapping. A reference such as ${...} is not certain, and no default stands for it."""
        leaves = {path: UNSURE if "${" in str(value) else value for path, value in _leaves(values)}
        return cls({path: value for path, value in leaves.items() if value != UNSURE or path in DEFAULTS})

    @property
    def unsure(self) -> tuple[str, ...]:
        """The keys of the batch and of the models whose value is not certain."""
        return tuple(
            path for path, value in self.said.items() if value == UNSURE and not path.endswith(_MATTERS_LITTLE)
        )

    def value(self, path: str) -> object:
        return self.said.get(path, DEFAULTS.get(path))

    def whole(self, path: str) -> int | None:
        """A whole number; None where the value is none."""
        found = self.value(path)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def is_on(self, path: str) -> bool:
        return str(self.value(path)).lower() in ("true", "1")

    @property
    def strategy(self) -> str:
        """What shards the actor: the said strategy, else that of the engine or the config whose defaults are taken."""
        said, engine = self.said.get(f"{_ACTOR}.strategy"), str(self.said.get(ENGINE, _ENGINE))
        name = str(self.said.get(CONFIG_NAME, _CONFIG_NAME)).removesuffix(".yaml")
        if engine == _ENGINE and name != _CONFIG_NAME:
            return f"the config {name}"
        return str(said or (DEFAULTS[f"{_ACTOR}.strategy"] if engine == _ENGINE else engine))

    def told(self, path: str) -> str:
        """`rollout.n 5`, or `rollout.n 1 (verl's default)`."""
        short = path.removeprefix("actor_rollout_ref.")
        return f"{short} {self.value(path)}" + ("" if path in self.said else " (verl's default)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of a config under FSDP. `micro` is None with dynamic micro-batches, or where it is not set."""

    prompts: int  # of a generation
    mini_prompts: int  # of an optimizer step
    group: int
    gpus: int
    shards: int  # data-parallel size: GPUs by sequence-parallel size
    micro: int | None
    epochs: int

    @property
    def generation(self) -> int:
        return self.prompts * self.group

    @property
    def effective(self) -> int:
        """Samples of an optimizer step, over all GPUs (ray_trainer.py, line 1352; v1/trainer_base.py, line 1724)."""
        return self.mini_prompts * self.group

    @property
    def each(self) -> int:
        """Samples of an optimizer step on each data-parallel rank (engine_workers.py, line 269)."""
        return self.effective // self.shards


def on_gpus(values: Mapping[str, object], gpus: int | None) -> Mapping[str, object]:
    """The `values` of a config on so many GPUs of one machine, where they are told beside it."""
    paths = {path: value for path, value in VerlConfig.of(values).said.items() if not path.startswith("trainer.n")}
    return values if gpus is None else {**paths, "trainer.nnodes": 1, "trainer.n_gpus_per_node": gpus}


def batch_of(config: VerlConfig) -> Batch | None:
    """The batch; None where a number of it is not whole, or the strategy is not FSDP."""
    names = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", "trainer.nnodes",
             "trainer.n_gpus_per_node", f"{_ACTOR}.ppo_epochs")  # fmt: skip
    found = [config.whole(name) for name in names]
    if None in found or config.strategy not in _FSDP_STRATEGIES:
        return None
    prompts, mini, group, nodes, each, epochs = (number or 1 for number in found)
    dynamic = config.is_on(f"{_ACTOR}.use_dynamic_bsz")
    shards = max(1, nodes * each // sequence_parallel(config))
    return Batch(
        prompts=prompts, mini_prompts=mini, group=group, gpus=nodes * each, shards=shards,
        micro=None if dynamic else config.whole(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"), epochs=epochs,
    )  # fmt: skip


def effective_sentence(values: Mapping[str, object]) -> str:
    """The effective batch in a sentence, from what the file says and verl's defaults."""
    config = VerlConfig.of(values)
    mini, group = config.whole(f"{_ACTOR}.ppo_mini_batch_size"), config.whole(f"{_ROLLOUT}.n")
    if mini is None or group is None:
        return "its optimizer steps are of ppo_mini_batch_size x rollout.n samples over all GPUs"
    return (
        f"its optimizer steps are of {mini * group:,} samples over all GPUs (ppo_mini_batch_size {mini} x rollout.n "
        f"{group})"
    )


def explain(values: Mapping[str, object]) -> Explanation:
    """The batch of a config of verl, and the rules that it breaks."""
    config = VerlConfig.of(values)
    strategy, estimator = config.strategy, str(config.value("algorithm.adv_estimator"))
    head = [Line("tool", f"verl, {estimator} with {strategy}; what the config leaves out has the defaults of verl 0.9")]
    batch = batch_of(config)
    if batch is None or config.unsure:
        fsdp = strategy in _FSDP_STRATEGIES
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
                               f"({config.told('data.train_batch_size')}, {config.told(f'{_ROLLOUT}.n')})")  # fmt: skip
    yield Line("effective batch", f"{batch.mini_prompts:,} prompts x {batch.group} = {batch.effective:,} samples an "
                                  f"optimizer step, over all {batch.gpus} GPUs "
                                  f"({config.told(f'{_ACTOR}.ppo_mini_batch_size')})")  # fmt: skip
    if batch.prompts % batch.mini_prompts == 0:
        steps = batch.prompts // batch.mini_prompts * batch.epochs
        epochs = f" x {batch.epochs} epochs" if batch.epochs > 1 else ""
        yield Line("optimizer steps", f"{steps} a generation ({batch.prompts:,} / {batch.mini_prompts:,}{epochs})")
    if config.is_on(f"{_ACTOR}.use_dynamic_bsz"):
        budget = config.told(f"{_ACTOR}.ppo_max_token_len_per_gpu")
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step, packed by tokens: {budget}")
    elif batch.micro is not None and batch.effective % batch.shards == 0 and batch.each % batch.micro == 0:
        yield Line("micro-batches", f"{batch.each:,} samples a data-parallel rank and step = "
                                    f"{batch.each // batch.micro} micro-batches of {batch.micro}")  # fmt: skip


def _other_lines(config: VerlConfig, batch: Batch) -> Iterator[Line]:
    """What is certain of the rest: what keeps the gradient, and which further models there are."""
    yield Line("neutral", "ppo_micro_batch_size_per_gpu, use_dynamic_bsz with its token budget, offloads, the "
                          "rollout's tensor parallel: none changes what an optimizer step averages over")  # fmt: skip
    kl = config.is_on(f"{_ACTOR}.use_kl_loss")
    if kl or config.is_on("algorithm.use_kl_in_reward"):  # trainer/ppo/utils.py, need_reference_policy
        coefficient = f", {config.told(f'{_ACTOR}.kl_loss_coef')}" if kl else ", for the reward's penalty"
        yield Line("reference", f"a second copy of the model{coefficient}")
    else:
        yield Line("reference", "none: use_kl_loss and use_kl_in_reward are off, so kl_loss_coef has no effect")
    if _has_critic(config):
        yield Line("critic", "a further model is trained (adv_estimator gae, or critic.enable)")
    rank = config.whole("actor_rollout_ref.model.lora_rank") or config.whole("actor_rollout_ref.model.lora.rank")
    yield Line("trained", "all weights" if rank is None else f"LoRA of rank {rank}")


def _has_critic(config: VerlConfig) -> bool:
    """trainer/ppo/utils.py, need_critic."""
    if config.value("critic.enable") is not None:
        return config.is_on("critic.enable")
    return config.value("algorithm.adv_estimator") == "gae"


def sequence_parallel(config: VerlConfig, section: str = _ACTOR) -> int:
    """Ulysses' sequence-parallel size of the actor, or of the reference where `section` is its path.

    The model's own key wins where it is above 1 (workers/config/actor.py); the reference has the actor's own, but not
    that of the actor's fsdp_config (trainer/config/ref/dp_ref.yaml).
    """
    key = "ulysses_sequence_parallel_size"
    own = config.whole(f"{section}.{key}") or config.whole(f"{_ACTOR}.{key}") or 1
    return own if own > 1 else config.whole(f"{section}.fsdp_config.{key}") or 1


# -- rules ------------------------------------------------------------------------------------------------------------


def _at_start(config: VerlConfig, batch: Batch) -> Iterator[str]:
    """Refused by validate_config (utils/config.py, workers/config/actor.py), before anything is loaded."""
    if config.is_on(f"{_ACTOR}.use_dynamic_bsz"):
        return
    if batch.generation % batch.gpus:
        yield (f"train_batch_size x rollout.n = {batch.generation:,} must be a multiple of the {batch.gpus} GPUs; verl "
               "refuses it at the start")  # fmt: skip
    if batch.prompts < batch.mini_prompts:
        yield (f"train_batch_size {batch.prompts} must be at least ppo_mini_batch_size {batch.mini_prompts}; verl "
               "refuses it at the start")  # fmt: skip
    older, newer = (config.value(f"{_ACTOR}.{key}") for key in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"))
    if older is not None and newer is not None:
        yield "ppo_micro_batch_size and ppo_micro_batch_size_per_gpu exclude each other; remove the first"
    elif older is None and newer is None:
        yield "ppo_micro_batch_size_per_gpu must be set, or use_dynamic_bsz; verl refuses it at the start"
    names = ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
    reference = config.is_on(f"{_ACTOR}.use_kl_loss") or config.is_on("algorithm.use_kl_in_reward")
    for section in (_ROLLOUT, _REF) if reference else (_ROLLOUT,):
        given = [name for name in names if config.value(f"{section}.{name}") is not None]
        if len(given) != 1:
            short = section.removeprefix("actor_rollout_ref.")
            yield f"{short}.{names[1]} must be set, and {short}.{names[0]} not; verl refuses it at the start"


def _late(config: VerlConfig, batch: Batch) -> Iterator[str]:
    """Accepted at the start, and an AssertionError in a worker once models are loaded."""
    dynamic, sp = config.is_on(f"{_ACTOR}.use_dynamic_bsz"), sequence_parallel(config)
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
    budget = config.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    if dynamic and budget is not None and budget * sp < sum(lengths):  # utils/seqlen_balancing.py, line 384
        yield (f"ppo_max_token_len_per_gpu {budget} x sequence parallel {sp} is below the longest sample, "
               f"max_prompt_length + max_response_length = {sum(lengths)}; verl ends at such a sample")  # fmt: skip
    parts = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    tensor, data, pipeline = (config.whole(f"{_ROLLOUT}.{part}") or 1 for part in parts)
    if batch.gpus % (tensor * data * pipeline):  # engine_workers.py, line 658
        yield (f"the rollout's engine of {tensor * data * pipeline} GPUs ({config.told(f'{_ROLLOUT}.{parts[0]}')}) "
               f"must divide the {batch.gpus} GPUs; verl ends when the workers start")  # fmt: skip
    own = config.said.get(f"{_ROLLOUT}.log_prob_use_dynamic_bsz")
    if own is not None and (str(own).lower() in ("true", "1")) != dynamic:  # engine_workers.py, line 615
        yield "rollout.log_prob_use_dynamic_bsz must equal actor.use_dynamic_bsz; verl ends when the workers start"


def _sequence_parallel(config: VerlConfig, batch: Batch) -> Iterator[str]:
    size = sequence_parallel(config)
    if size > 1 and not config.is_on("actor_rollout_ref.model.use_remove_padding"):  # workers/config/actor.py, line 336
        yield "ulysses_sequence_parallel_size above 1 needs use_remove_padding: true; verl refuses it at the start"


_RULES: tuple[Callable[[VerlConfig, Batch], Iterator[str]], ...] = (_at_start, _late, _sequence_parallel)


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
