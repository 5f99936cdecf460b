"""verl's training worker on a simulated card: rollout, old log-probabilities, reference and update under torch's FSDP.

verl itself needs Ray and vLLM's processes. Its phases, in its order and with its sizes, run here on one simulated rank:
the real transformers model in torch's real FSDP1 or FSDP2 (`verl_engine`), verl's losses (`verl_losses`), and vLLM's
share of the card (`autofit.fakegpu.engines.vllm`). Read in verl at commit 1dda039b (0.9). Imports torch.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from autofit.errors import ConfigError, option
from autofit.fakegpu.depth.stack import full_config, text_config
from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import VllmEngine, adapter_bytes
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.fakegpu.patches.vllm import FakeEngine, weights_bytes
from autofit.fakegpu.rates.collectives import nccl_bytes
from autofit.frontends import verl_recipe
from autofit.frontends.verl import SGLANG, VerlSettings
from autofit.frontends.verl_rules import SHARDED_HEAD, cut_responses, without_room
from autofit.plugin.loop import Loop, LoopTrainer, Setup
from autofit.plugin.models import go_offline_without_a_hub, model_config
from autofit.plugin.protocol import (
    CRITIC,
    LOADING,
    LOG_PROBS,
    REFERENCE,
    ROLLOUT,
    SYNC,
    UPDATE,
    VALUES,
    Facts,
    Inspection,
    Report,
    Task,
)
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch import Launch

from .verl_engine import DTYPES, Engine, empty_cache
from .verl_losses import policy_loss
from .verl_models import Critic, Samples, inner, marked_last, random_model, score, stands_for

_MODEL, _CRITIC_MODEL = "model", "critic"  # folders of the models' configs, beside the longest sample
_ONLY_SIMULATED = (
    f"verl trains with Ray and vLLM's processes, which autofit does not start: give {option('gpu', 'NAME')}, such as "
    f"{option('gpu', '8xh100')}, and put the overrides that it finds behind verl's own command"
)

_NOT_COMPARED = (
    "verl trains with Ray and vLLM's processes, which autofit does not start, so no gradient is compared; `autofit "
    "export TRIAL --to verl` prints a trial's overrides, to put behind verl's own command"
)


class VerlLoop(Loop):
    """The phases of verl's worker for one generation and each of its optimizer steps."""

    optimizer: torch.optim.Optimizer

    def __init__(self, settings: VerlSettings, setup: Setup, *, folder: Path, version: int, reshards: bool) -> None:
        offloads = version == 2 and settings.offload_policy
        if offloads:  # the engine turns verl's own offloads off
            settings = replace(settings, param_offload=False, optimizer_offload=False)
        self._settings, self._device = settings, setup.device
        self._samples = Samples(settings, setup.device)
        model, critic = str(folder / _MODEL), str(folder / _CRITIC_MODEL)
        common: dict[str, Any] = {
            "version": version, "reshards": reshards, "device": setup.device,
            "prefetches": settings.forward_prefetch, "fused": settings.use_fused_kernels,
            "compiles": settings.use_torch_compile, "recomputes_entropy": settings.entropy_checkpointing,
            "chunk": settings.entropy_from_logits_chunk_size if settings.entropy_from_logits_with_chunking else None,
        }  # fmt: skip
        self._reference: Engine | None = None
        if settings.reference and not settings.lora_rank:  # with LoRA it is the actor without its adapters
            made = random_model(settings, model, dtype=settings.ref_model_dtype, lora=False)
            sharers = settings.ref_ulysses_sequence_parallel_size
            self._reference = Engine(made, forward_only=True, sharers=sharers, dtype=torch.bfloat16, **common)
        actor = random_model(settings, model, dtype=settings.model_dtype, lora=bool(settings.lora_rank))
        self._actor, self._actor_bytes = inner(actor), weights_bytes(inner(actor))
        law = self._law()
        self._sharers = settings.ulysses_sequence_parallel_size
        self.actor = Engine(
            actor, defers_sync=settings.use_no_sync_for_gradient_accumulation, sharers=self._sharers,
            dtype=DTYPES[settings.param_dtype], reduce_dtype=DTYPES[settings.reduce_dtype], offloads=offloads, **common,
        )  # fmt: skip
        self.model = self.actor.module
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.actor.optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.01)
        if settings.param_offload:
            self.actor.offload_model()
        self._critic = Critic(settings, critic, setup.device) if settings.critic else None
        self._sends_adapters = bool(settings.lora_rank) and not settings.lora_merge
        self._base_is_there = not self._sends_adapters or "dummy" not in settings.load_format
        self._engine, self._law_at_work = None if law is None else _started(law, self._actor), law
        self.sleep()
        self.rollout_share = 1 / settings.steps_of_a_generation  # a simulated step has a whole generation

    def take(self, settings: VerlSettings) -> None:
        """Go on with other sizes, offloads, ways to compute and another engine, between two steps.

        What the engine of the rollout holds is freed before the next one starts.
        """
        actor, before = self.actor, self._settings
        if self._settings.offload_policy:
            settings = replace(settings, param_offload=False, optimizer_offload=False)
        self._settings = settings
        fused, defers = settings.use_fused_kernels, settings.use_no_sync_for_gradient_accumulation
        actor.take(fused=fused, defers_sync=defers, checkpoints=settings.enable_gradient_checkpointing)
        if self._reference is not None:
            self._reference.take(fused=fused, defers_sync=True, checkpoints=settings.enable_gradient_checkpointing)
        if settings.param_offload != before.param_offload:
            actor.offload_model() if settings.param_offload else actor.load_model()
        if settings.optimizer_offload != before.optimizer_offload:
            actor.move_optimizer(torch.device("cpu") if settings.optimizer_offload else self._device)
        law = self._law()
        if self._engine is not None and law is not None and law != self._law_at_work:
            self._engine.end()
            self._law_at_work = None
            self._engine, self._law_at_work = _started(law, self._actor), law
            self.sleep()

    # ------------------------------------------------------------------ vLLM
    def _law(self) -> VllmEngine | None:
        """The engine that verl starts, of which each rank has a share; None if nothing simulates it.

        SGLang's share is of weights and cache alone, and with LoRA it keeps its weights while it sleeps (verl/workers/
        rollout/sglang_rollout/async_sglang_server.py, `mem_fraction_static` and `sleep`).
        """
        gpu, settings = active_gpu(), self._settings
        if gpu is None or self._device.type == "cpu":
            return None
        config = full_config(text_config(self._actor.config))
        tensor, by_sglang = settings.tensor_model_parallel_size, settings.rollout_name == SGLANG
        decoder, adapters = Decoder.of(config), 0 if settings.lora_merge else settings.lora_rank
        served = self._actor_bytes // tensor + adapter_bytes(decoder, rank=adapters, ranks=tensor)
        return VllmEngine(
            spec=gpu.spec, costs=gpu.clock.costs, decoder=decoder, weights_bytes=served,
            utilization=settings.gpu_memory_utilization, share_key="actor_rollout_ref.rollout.gpu_memory_utilization",
            length_key="actor_rollout_ref.rollout.max_model_len",
            longest=int(settings.max_model_len or settings.max_position_embeddings
                        or getattr(config, "max_position_embeddings", None) or settings.tokens),
            most_sequences=settings.max_num_seqs, ranks=tensor, batched_tokens=settings.max_num_batched_tokens,
            eager=settings.enforce_eager, sleeps=settings.free_cache_engine, lora_rank=adapters,
            static_share=by_sglang, keeps_weights=by_sglang and bool(adapters),
        )  # fmt: skip

    def sleep(self) -> None:
        """Let the engine hold nothing but what it keeps between two generations."""
        if self._engine is not None and self._settings.free_cache_engine:
            self._engine.sleep(level=2)

    @property
    def gathers_adapters(self) -> bool:
        """True if the whole model of FSDP1 is gathered to give the adapters to the engine."""
        return self._engine is not None and self._sends_adapters and self.actor.version == 1

    def wake_up(self) -> None:
        """Let the engine have its weights."""
        if self._engine is not None and self._settings.free_cache_engine:
            self._engine.wake_up(tags=["weights"])

    def _synchronise(self) -> None:
        """Give the weights to the engine, which wakes up for them (engine_workers.py, update_weights).

        FSDP1 and LoRA want the shards on the card; FSDP2 stages one tensor at a time.
        """
        settings, actor, engine = self._settings, self.actor, self._engine
        if engine is None:
            return
        empty_cache()
        self.wake_up()
        staged = settings.param_offload and (actor.version == 1 or bool(settings.lora_rank))
        if staged:
            actor.load_model()
        self._send_weights(engine)
        if settings.param_offload:
            actor.offload_model()

    @torch.no_grad()
    def _send_weights(self, engine: FakeEngine) -> None:
        """One whole tensor after another, through a buffer that both processes have; of LoRA the adapters alone.

        With `lora_merge` they are of the weights with the adapters in them.
        """
        settings, actor = self._settings, self.actor
        if self._sends_adapters:
            actor.send_adapters_by_layer() if settings.layered_summon else actor.send_adapters()
        if not self._base_is_there:
            actor.send_base()
            self._base_is_there = True
        bucket = torch.empty(settings.update_weights_bucket_megabytes << 20, dtype=torch.uint8, device=self._device)
        if not self._sends_adapters:
            engine.load_weights(actor.merged_weights() if settings.lora_rank else actor.whole_weights())
        del bucket

    def _generate(self) -> None:
        """One engine's part of the prompts; every response has its full length."""
        if self._engine is None:
            return
        settings = self._settings
        empty_cache()
        if settings.free_cache_engine:
            self._engine.wake_up(tags=["kv_cache"])
        prompts = [{"prompt_token_ids": [0] * settings.max_prompt_length}]
        self._engine.group = settings.rollout_n
        asked: Any = SimpleNamespace(max_tokens=settings.max_response_length, logprobs=1)
        served = max(1, settings.generated * settings.tensor_model_parallel_size // self._sharers)
        self._engine.generate(prompts * served, asked)
        self.sleep()
        if settings.bypass_mode:
            empty_cache()

    def _scored(self, engine: Engine, sizes: list[int], *, entropy: bool) -> None:
        """Log-probabilities of all samples of a generation, without gradients."""
        kinds = (torch.float32, engine.entropy_dtype) if entropy else (torch.float32,)

        def run(rows: int) -> object:
            return engine.log_probs(self._samples.micro_batch(rows), entropy=entropy, training=False)

        score(engine, sizes, self._settings.tokens, kinds, run)

    # ------------------------------------------------------------------ the loop
    def micro_batches(self, step: int, report: Report) -> list[tuple[int, int, bool]]:
        """(rows, how many such micro-batches it stands for, whether it is the last) of an optimizer step."""
        for phase, begun in self.before_update().items():  # between two of them vLLM may still hold its share
            report.enter(phase)
            begun()
        report.enter(UPDATE)
        return self.begin_update()

    def begin_update(self) -> list[tuple[int, int, bool]]:
        """The micro-batches of an optimizer step, of weights that are on the card."""
        settings = self._settings
        self.actor.module.train()
        self.actor.count()
        sizes = settings.split(
            settings.samples, rows=settings.ppo_micro_batch_size_per_gpu, budget=settings.ppo_max_token_len_per_gpu,
            sharers=self._sharers,
        )  # fmt: skip
        return marked_last(sizes)

    def before_update(self) -> dict[str, Callable[[], None]]:
        """The phases of a generation in their order."""
        settings, critic = self._settings, self._critic
        found: dict[str, Callable[[], None]] = {SYNC: self._synchronise, ROLLOUT: self._generate}
        if not settings.bypass_mode:
            found[LOG_PROBS] = self._score_again
        if settings.reference:
            found[REFERENCE] = self._refer
        if critic is not None:
            found |= {VALUES: critic.values, CRITIC: critic.update}
        return found | {LOADING: self._load}

    def _load(self) -> None:
        """For all optimizer steps of a generation."""
        if self._settings.param_offload:
            self.actor.load_model()
        if self._settings.optimizer_offload:
            self.actor.move_optimizer(self._device)

    def _score_again(self) -> None:
        """Old log-probabilities, of the weights that generated, by the training's own engine."""
        empty_cache()  # the worker cached nothing while vLLM worked, which gave its share back
        settings, actor = self._settings, self.actor
        rows, budget = settings.log_prob_micro_batch_size_per_gpu, settings.log_prob_max_token_len_per_gpu
        if settings.param_offload:
            actor.load_model()
        sizes = settings.split(settings.generated, rows=rows, budget=budget, sharers=self._sharers)
        self._scored(actor, sizes, entropy=True)
        if settings.param_offload:
            actor.offload_model()

    def _refer(self) -> None:
        settings = self._settings
        rows, budget = settings.ref_log_prob_micro_batch_size_per_gpu, settings.ref_log_prob_max_token_len_per_gpu
        engine = self._reference
        adapters: AbstractContextManager[Any] = nullcontext()
        if engine is None:  # it scores as the actor does (v1/trainer_base.py, _compute_ref_log_prob)
            rows, budget = settings.log_prob_micro_batch_size_per_gpu, settings.log_prob_max_token_len_per_gpu
            engine = self.actor
            adapters = engine.without_adapters()
            if settings.param_offload:
                engine.load_model()
        sharers = self._sharers if engine is self.actor else settings.ref_ulysses_sequence_parallel_size
        referred = settings.generated if engine is self.actor else settings.referred
        with adapters:
            self._scored(engine, settings.split(referred, rows=rows, budget=budget, sharers=sharers), entropy=False)
        if engine is self.actor and settings.param_offload:
            engine.offload_model()

    def loss(self, micro_batch: Any) -> torch.Tensor:
        rows = int(micro_batch)
        settings, samples = self._settings, self._samples
        names = ("old_log_probs", "advantages", *(("ref_log_prob",) if settings.use_kl_loss else ()))
        batch = samples.micro_batch(rows, *names)
        found = self.actor.log_probs(batch, entropy=settings.calculate_entropy, training=True)
        return policy_loss(
            samples.of_responses(found["log_probs"], rows),
            samples.padded(batch, rows, *names),
            kl=settings.use_kl_loss,
            entropy=samples.of_responses(found["entropy"], rows) if settings.calculate_entropy else None,
            tokens=settings.samples * settings.max_response_length,
        )

    def update(self, step: int, report: Report) -> None:
        """A generation, and one optimizer step."""
        self.train(self.micro_batches(step, report), report)

    def train(self, micro_batches: list[tuple[int, int, bool]], report: Report) -> None:
        """One optimizer step, of what is on the card."""
        settings, actor, optimizer = self._settings, self.actor, self.optimizer
        for rows, times, last in micro_batches:
            with stands_for(times):
                actor.backward(partial(self.loss, rows), last=last)
        report.gradient_is_whole(actor.module, optimizer)
        actor.clip(settings.clip_grad)
        optimizer.step()
        report.optimizer_ends()
        optimizer.zero_grad()
        self.rest(report)

    def rest(self, report: Report) -> None:
        """Offload what is offloaded between two generations."""
        settings, actor = self._settings, self.actor
        with report.phase(LOADING):
            if settings.param_offload:
                actor.offload_model()
            if settings.optimizer_offload:
                actor.move_optimizer(torch.device("cpu"))


class VerlRun:
    """The loop as a run of a probe on a simulated card, or of a rank on the CPU."""

    scoring_share = 0.0
    steps_between_saves = 1

    def __init__(self, loop: VerlLoop, settings: VerlSettings, *, steps: int) -> None:
        self.loop, self.last_step = loop, steps
        self.samples_per_step = settings.samples / settings.ulysses_sequence_parallel_size  # each rank's share of them
        self.tokens_per_step = int(self.samples_per_step * settings.tokens)
        self.rollout_share = loop.rollout_share

    @property
    def model(self) -> torch.nn.Module:
        return self.loop.model

    def train(self, report: Report, *, resume_from: Path | None = None) -> None:
        report.train_begins()
        for step in range(self.last_step):
            report.step_begins(step)
            self.loop.update(step, report)
            if report.step_ends(step + 1).stop:
                return

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        return False  # verl alone saves and continues

    def save_model(self, folder: Path) -> None:
        raise ConfigError(_ONLY_SIMULATED)


class VerlVisits:
    """The phases of a loop one by one, each with a recipe of its own, after a step that made the optimizer's states.

    Before and after each the card holds what it holds between two generations.
    """

    def __init__(
        self, loop: VerlLoop, settings: Callable[[Mapping[str, object]], VerlSettings], report: Report
    ) -> None:
        self._loop, self._settings = loop, settings
        self.rollout_share = loop.rollout_share
        loop.update(0, report)

    def take(self, values: Mapping[str, object]) -> None:
        """Go on with the recipe `values`."""
        self._loop.sleep()  # after a synchronisation the engine waits for prompts
        self._loop.actor.shard_root()  # as after an update
        self._loop.take(self._settings(values))

    def visit(self, phase: str, report: Report) -> None:
        """Run `phase`; the update and the optimizer's step are one."""
        loop = self._loop
        if phase == UPDATE:
            loop.before_update()[LOADING]()
            report.enter(UPDATE)
            loop.train(loop.begin_update(), report)
        elif (begun := loop.before_update().get(phase)) is not None:
            if phase == ROLLOUT:
                loop.wake_up()
            if phase == LOG_PROBS and loop.gathers_adapters:  # the pass after that takes longer under FSDP1
                loop.before_update()[SYNC]()
                loop.sleep()
            report.enter(phase)
            begun()
            if phase == LOADING:
                loop.rest(report)


# {phase: groups of keys that it reads}: what two groups do to its bytes and seconds adds up, and a group that it does
# not read changes its bytes by what that changes of those between two generations.
_OFFLOADS = ("param_offload",), ("optimizer_offload",)
_ENGINE = "tensor_model_parallel_size", "gpu_memory_utilization"
_SCORED = "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "use_fused_kernels"
_REFERRED = "ref_log_prob_micro_batch_size_per_gpu", "ref_log_prob_max_token_len_per_gpu", "use_fused_kernels"
_UPDATED = (
    "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "enable_gradient_checkpointing",
    "use_no_sync_for_gradient_accumulation", "use_fused_kernels",
)  # fmt: skip


def read_by(settings: VerlSettings) -> Mapping[str, tuple[tuple[str, ...], ...]]:
    """The keys that each phase reads. Of an engine that never sleeps each phase holds its share, as between two."""
    served = ("tensor_model_parallel_size",) if settings.free_cache_engine else _ENGINE
    found: dict[str, tuple[tuple[str, ...], ...]] = {
        SYNC: (("param_offload",), served), ROLLOUT: (_ENGINE,),
        LOG_PROBS: (_SCORED, ("param_offload",)), REFERENCE: (_REFERRED,), VALUES: (), CRITIC: (),
        LOADING: _OFFLOADS, UPDATE: (_UPDATED, *_OFFLOADS),
    }  # fmt: skip
    if settings.lora_rank:  # the reference is the actor
        found[REFERENCE] = found[LOG_PROBS]
    gone = {
        LOG_PROBS: settings.bypass_mode, REFERENCE: not settings.reference,
        VALUES: not settings.critic, CRITIC: not settings.critic,
    }  # fmt: skip
    return {phase: groups for phase, groups in found.items() if not gone.get(phase)}


class VerlTrainer(LoopTrainer):
    """`python -m verl.trainer.main_ppo` with FSDP and vLLM, simulated."""

    name: ClassVar[str] = "verl"
    settings: ClassVar[type] = VerlSettings
    space: ClassVar[Path] = Path(str(resources.files("autofit.search_spaces").joinpath("verl.yaml")))
    keys: ClassVar[BatchKeys] = BatchKeys(
        micro_batch="ppo_micro_batch_size_per_gpu", rollout="steps_per_generation", group="rollout_n",
        reuse="ppo_epochs", completion="max_response_length", sharers="ulysses_sequence_parallel_size",
        packed="use_dynamic_bsz", budget="ppo_max_token_len_per_gpu", engine_share="gpu_memory_utilization",
        engine_ranks="tensor_model_parallel_size",
        scored="log_prob_micro_batch_size_per_gpu", referred="ref_log_prob_micro_batch_size_per_gpu",
        referrers="ref_ulysses_sequence_parallel_size",
        unreduced="use_no_sync_for_gradient_accumulation",
    )  # fmt: skip

    @property
    def compared(self) -> tuple[str, ...]:
        """The keys of its space: a proof of any of them is refused in one sentence, as nothing trains here."""
        return (
            *super().compared, "steps_per_generation", "ppo_max_token_len_per_gpu", "enable_gradient_checkpointing",
            "log_prob_micro_batch_size_per_gpu", "ref_log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu", "ref_log_prob_max_token_len_per_gpu",
            "param_offload", "optimizer_offload", "gpu_memory_utilization", "tensor_model_parallel_size",
            "use_no_sync_for_gradient_accumulation",
        )  # fmt: skip

    def loop(self, settings: Any, setup: Setup) -> Loop:
        raise ConfigError(_ONLY_SIMULATED)

    def model_name(self, settings: VerlSettings) -> str:
        return settings.model_path

    def longest_sample(self, settings: VerlSettings) -> dict[str, Any]:
        return {"tokens": settings.max_prompt_length}

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        if not inspection.simulated and inspection.device != "cpu":
            raise ConfigError(_ONLY_SIMULATED)
        given = {key: value for key, value in values.items() if key != LAUNCH}
        if inspection.prompt_tokens is not None:
            given["max_prompt_length"] = inspection.prompt_tokens
        settings = self.parse(given)
        facts = super().inspect(given, replace(inspection, ranks=1))
        go_offline_without_a_hub()
        alone = _reads_shards_of_the_head(values, settings, inspection)
        if alone and settings.use_fused_kernels:
            raise ConfigError(SHARDED_HEAD)
        config = _text_config(settings, settings.model_path, "model_path")
        settings, cut = _served(settings, config)
        parameters = self._keep_model(settings, config, inspection)
        itemsize = DTYPES[settings.model_dtype].itemsize
        return replace(
            facts, longest_prompt_tokens=settings.max_prompt_length, trains_on_data=False,
            model_parameters=parameters, weights_bytes=parameters * itemsize,
            resolved=asdict(settings), version=verl_recipe.VERSION, read_by=read_by(settings),
            notes=(*facts.notes, *((cut,) if cut else ())),
            left_out={"use_fused_kernels": SHARDED_HEAD} if alone else {},
        )  # fmt: skip

    def _keep_model(self, settings: VerlSettings, config: Any, inspection: Inspection) -> int:
        """The parameters of the actor; its config and the critic's are kept beside the longest sample."""
        _check_sharing(settings, config)
        config.save_pretrained(inspection.worst_case.folder / _MODEL)
        if settings.critic:
            critic = _text_config(settings, settings.critic_model_path or settings.model_path, "critic_model_path")
            _check_values(critic)
            critic.save_pretrained(inspection.worst_case.folder / _CRITIC_MODEL)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return sum(parameter.numel() for parameter in model.parameters())

    def build(self, values: Mapping[str, object], task: Task) -> Any:
        settings = self._settings(values, task)
        return VerlRun(self._loop(settings, task), settings, steps=task.steps or 1)

    def visits(self, values: Mapping[str, object], task: Task, report: Report) -> VerlVisits:
        return VerlVisits(
            self._loop(self._settings(values, task), task), lambda changed: self._settings(changed, task), report
        )

    def _settings(self, values: Mapping[str, object], task: Task) -> VerlSettings:
        if task.worst_case is None:
            raise ConfigError(_ONLY_SIMULATED)
        settings = self.parse({key: value for key, value in values.items() if key != LAUNCH})
        return _served(settings, model_config(str(task.worst_case.folder / _MODEL)))[0]

    def _loop(self, settings: VerlSettings, task: Task) -> VerlLoop:
        assert task.worst_case is not None
        device = torch.device("cpu" if task.device == "cpu" else "cuda")
        if not torch.distributed.is_initialized():  # a rank on the CPU
            torch.distributed.init_process_group("gloo")
        version = 2 if os.environ.get("FSDP_VERSION") == "2" else 1
        setup = Setup(device=device, sample={})
        folder = task.worst_case.folder
        return VerlLoop(settings, setup, folder=folder, version=version, reshards=_reshards(version))

    def small_trainings(self, *args: Any, **options: Any) -> Any:
        raise ConfigError(_NOT_COMPARED)


def _served(settings: VerlSettings, config: Any) -> tuple[VerlSettings, str]:
    """(the settings with responses as long as the engine makes them, why they are cut). Raises ConfigError."""
    positions = settings.max_position_embeddings or getattr(config, "max_position_embeddings", None)
    prompt, stated = settings.max_prompt_length, settings.max_model_len
    if refused := next(without_room(stated=stated, positions=positions, prompt=prompt), None):
        raise ConfigError(refused)
    longest, response = stated or positions, settings.max_response_length
    cut = cut_responses(longest=longest, prompt=prompt, response=response, stated=stated is not None)
    return replace(settings, max_response_length=min(response, (longest or prompt + response) - prompt)), cut


def _text_config(settings: VerlSettings, name: str, key: str) -> Any:
    """The config of the model `name`, which the setting `key` gave. Raises ConfigError."""
    try:
        config = model_config(name, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model {name!r} must be a folder with a config.json, or a name that the hub or autofit's catalogue "
            f"has; give one with {option('set')} {key}=NAME"
        ) from error
    if hasattr(config, "vision_config"):
        raise ConfigError(f"{name} has a vision tower, which is not simulated for verl; take a text model")
    return config


def _reads_shards_of_the_head(values: Mapping[str, object], settings: VerlSettings, inspection: Inspection) -> bool:
    """True if fused kernels would read weights of the head that FSDP2 has sharded."""
    if inspection.device == "cpu" or Launch.of(values).sharding != "fsdp2":
        return False
    config = _text_config(settings, settings.model_path, "model_path")
    return not getattr(config, "tie_word_embeddings", False)


def _check_values(config: Any) -> None:
    """Raise ConfigError where transformers has no model of this kind with a number for each token."""
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise ConfigError(
            f"a critic of the model type {config.model_type} is not simulated: transformers has no token classifier of "
            "it, in whose place verl takes a class of TRL; set critic.model.path to another model"
        )


def _check_sharing(settings: VerlSettings, config: Any) -> None:
    """Raise ConfigError where Ulysses cannot deal the heads to its ranks (apply_monkey_patch)."""
    size = max(settings.ulysses_sequence_parallel_size, settings.ref_ulysses_sequence_parallel_size)
    heads = getattr(config, "num_attention_heads", size)
    pairs = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or (pairs % size and size % pairs):
        raise ConfigError(
            f"ulysses_sequence_parallel_size {size} must divide the {heads} heads of {settings.model_path}, and divide "
            f"its {pairs} key-value heads or be a multiple of them; verl ends when it loads the model"
        )


def _reshards(version: int) -> bool:
    """True if what FSDP gathered is freed after the forward, by the rank's environment."""
    if version == 2:
        return os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in ("true", "1")
    return os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD") in ("FULL_SHARD", "1")


def _started(law: VllmEngine, model: torch.nn.Module) -> FakeEngine:
    gpu = active_gpu()
    assert gpu is not None
    beside = law.spec.context_bytes + nccl_bytes(law.spec, law.ranks)  # vLLM's workers are processes of their own
    return FakeEngine(gpu, model, law, process_bytes=beside)


TRAINER = VerlTrainer()
