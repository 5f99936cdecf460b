"""The model that verl's engine shards: built from its config with random weights, with LoRA where that is trained.

Read in verl at commit 1dda039b: verl/workers/engine/fsdp/transformer_impl.py, _build_module and _build_lora_module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.frontends.verl import VerlSettings

from .verl_engine import DTYPES, Engine, checkpointed, fuse_head
from .verl_losses import value_loss


def random_model(settings: VerlSettings, folder: str, *, dtype: str, lora: bool) -> torch.nn.Module:
    """The model of the config in `folder` with random weights in host memory, before it is sharded."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    with _by_flash_attn(config):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=settings.attn_implementation
        )
    model.to(DTYPES[dtype])
    if settings.use_fused_kernels:
        fuse_head(model)
    if settings.enable_gradient_checkpointing:
        checkpointed(model)
    return _with_lora(model, settings) if lora else model


@contextmanager
def _by_flash_attn(config: Any) -> Iterator[None]:
    """Context in which a model that has kernels of the Hub in flash-attn's place is made with flash-attn's own."""
    made = AutoModelForCausalLM._model_mapping.get(type(config), object)
    owner = next((each for each in made.__mro__ if vars(each).get(_OWN_KERNELS)), None)
    if owner is None:
        yield
        return
    if (gpu := active_gpu()) is not None:
        gpu.note(_HUB_KERNELS)
    with mock.patch.object(owner, _OWN_KERNELS, None):
        yield


_OWN_KERNELS = "_compatible_flash_implementations"
_HUB_KERNELS = (
    "attention with sinks, of a kernel of the Hub (vllm-flash-attn3), is simulated as flash-attn's without them"
)


def value_model(settings: VerlSettings, folder: str) -> torch.nn.Module:
    """The critic: the layers of the config in `folder` and a head of one number (utils/model.py, load_valuehead_model).

    verl sets its attention itself.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code, num_labels=1)
    config.classifier_dropout = 0.0
    dtype = DTYPES[settings.critic_model_dtype]
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "flash_attention_2"}
    model: Any = AutoModelForTokenClassification.from_config(config, **options)
    model.to(dtype)
    if settings.critic_enable_gradient_checkpointing:
        checkpointed(model)
    made: torch.nn.Module = model
    return made


def _with_lora(model: Any, settings: VerlSettings) -> torch.nn.Module:
    """verl's adapters, cast to the dtype of the base (transformer_impl.py, _build_lora_module)."""
    from peft import LoraConfig, TaskType, get_peft_model

    model.enable_input_require_grads()
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=settings.lora_rank, lora_alpha=settings.lora_alpha,
        target_modules=settings.target_modules, bias="none",
    )  # fmt: skip
    made: torch.nn.Module = get_peft_model(model, adapters)
    base = next(p.dtype for p in made.parameters() if not p.requires_grad)
    for parameter in made.parameters():
        if parameter.requires_grad and parameter.dtype != base:
            parameter.data = parameter.data.to(base)
    return made


def inner(model: Any) -> Any:
    """The transformers model, with adapters or without."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# The longest samples of a verl config, packed as its engines take them, and runs of equal micro-batches of them.

# What verl's agent loop says of each sample, all of which goes to the card with a micro-batch: whole numbers of the
# response, and float32 ones (experimental/agent_loop/agent_loop.py, as_dict; ppo/v1/agent_loop_tq.py, line 182).
_WHOLE = ("responses", "response_mask", "loss_mask")
_TOLD = ("rollout_log_probs", "rm_scores")
MASK = "response_mask"


class Samples:
    """Synthetic samples of full length on a device, for a number of `rows`."""

    def __init__(self, settings: VerlSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device

    def micro_batch(self, rows: int, *names: str) -> dict[str, torch.Tensor]:
        """Tensors that verl moves to the card: ids and positions, (1, tokens), the rest packed; `names` are float32."""
        whole = rows * self._settings.tokens
        answered = rows * self._settings.max_response_length
        prompted, device = whole - answered, self._device
        sizes = {"prompts": prompted, **dict.fromkeys(_WHOLE, answered)}
        return {
            "input_ids": torch.zeros((1, whole), dtype=torch.long, device=device),
            "position_ids": torch.arange(self._settings.tokens, device=device).repeat(rows)[None],
            **{name: torch.zeros(size, dtype=torch.long, device=device) for name, size in sizes.items()},
            **{name: torch.zeros(answered, device=device) for name in (*_TOLD, *names)},
        }

    def padded(self, batch: dict[str, torch.Tensor], rows: int, *names: str) -> dict[str, torch.Tensor]:
        """Copies of what a loss reads of a micro-batch, each (rows, tokens of a response), with the mask."""
        return {name: batch[name].view(rows, -1).clone() for name in (MASK, *names)}

    def of_responses(self, packed: torch.Tensor, rows: int) -> torch.Tensor:
        """The part of the responses, (rows, length), of a number for each packed token (no_padding_2_padding)."""
        start = self._settings.max_prompt_length - 1
        parts = packed.view(rows, self._settings.tokens)[:, start : start + self._settings.max_response_length]
        return torch.stack([part.clone() for part in parts])


def runs_of(sizes: list[int]) -> list[tuple[int, int]]:
    """(size, how often in a row) of equal neighbours."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        if found and found[-1][0] == size:
            found[-1] = (size, found[-1][1] + 1)
        else:
            found.append((size, 1))
    return found


def marked_last(sizes: list[int]) -> list[tuple[int, int, bool]]:
    """(size, how often in a row, whether it is the last) of a step's micro-batches, the first and the last alone."""
    *first, last = sizes
    runs = [(size, times, False) for size, times in runs_of(first[1:])]
    return [*[(size, 1, False) for size in first[:1]], *runs, (last, 1, True)]


@contextmanager
def stands_for(times: int) -> Iterator[None]:
    """Context whose work happens `times` times: on a simulated card it is traced once."""
    gpu = active_gpu()
    with nullcontext() if gpu is None else gpu.standing_for(times):
        yield


def score(
    engine: Engine, sizes: list[int], tokens: int, kinds: tuple[torch.dtype, ...], run: Callable[[int], object]
) -> None:
    """All passes without gradients of samples of so many `tokens`, `run` of each micro-batch's size.

    Each returns a number of each of the `kinds` a token. They stay on the card until all passes are done, so of equal
    passes the last is traced (forward_backward_batch).
    """
    kept: list[torch.Tensor] = []

    def keep(rows: int) -> None:
        kept.extend(torch.empty(rows * tokens, dtype=kind, device=engine.device) for kind in kinds)

    engine.module.eval()
    engine.count()
    engine.gather_root()
    for rows, times in runs_of(sizes):
        keep(rows * (times - 1))
        with torch.no_grad(), stands_for(times), engine.attending():
            run(rows)
        keep(rows)
    for numbers in kept:
        numbers.cpu()


# PPO's critic as verl trains it: a model with a value for each token, with FSDP, an optimizer and phases of its own.
#
# Read in verl at commit 1dda039b: verl/trainer/ppo/v1/trainer_base.py (_compute_values, _update_critic), verl/workers/
# engine/fsdp/transformer_impl.py (FSDPEngineWithValueHead) and verl/workers/utils/losses.py (value_loss). Imports
# torch.


class Critic:
    """The critic of one rank; it makes its micro-batches by tokens, whatever the config says (`Settings.critic_*`)."""

    def __init__(self, settings: VerlSettings, folder: str, device: torch.device) -> None:
        version = 2 if settings.critic_sharding == "fsdp2" else 1
        offloads = version == 2 and settings.critic_offload_policy
        if offloads:  # the engine turns verl's own offloads off
            settings = replace(settings, critic_param_offload=False, critic_optimizer_offload=False)
        self._settings, self._device, self._samples = settings, device, Samples(settings, device)
        self._engine = Engine(
            value_model(settings, folder), version=version, device=device, offloads=offloads,
            reshards=settings.critic_reshard_after_forward, dtype=torch.bfloat16, compiles=False,
            sharers=settings.critic_ulysses_sequence_parallel_size, prefetches=settings.critic_forward_prefetch,
            defers_sync=settings.critic_use_no_sync_for_gradient_accumulation,
        )  # fmt: skip
        weights = list(self._engine.module.parameters())
        self._engine.optimizer = torch.optim.AdamW(weights, lr=settings.critic_lr, weight_decay=0.01)
        if settings.critic_param_offload:
            self._engine.offload_model()

    def _sizes(self, samples: int, budget: int) -> list[int]:
        return self._settings.by_tokens(samples, budget, self._settings.critic_ulysses_sequence_parallel_size)

    def values(self) -> None:
        """The values of a generation's samples, without gradients."""
        settings, engine = self._settings, self._engine
        if settings.critic_param_offload:
            engine.load_model()
        sizes = self._sizes(settings.judged, settings.critic_forward_max_token_len_per_gpu)
        score(
            engine, sizes, settings.tokens, (engine.dtype,), lambda rows: engine.values(self._samples.micro_batch(rows))
        )
        if settings.critic_param_offload:
            engine.offload_model()

    def update(self) -> None:
        """All optimizer steps of a generation; they are alike, so one is traced."""
        settings, engine, optimizer = self._settings, self._engine, self._engine.optimizer
        assert optimizer is not None
        if settings.critic_param_offload:
            engine.load_model()
        if settings.critic_optimizer_offload:
            engine.move_optimizer(self._device)
        engine.module.train()
        with stands_for(settings.critic_steps_per_generation):
            engine.count()
            sizes = self._sizes(settings.judged_at_once, settings.critic_max_token_len_per_gpu)
            for rows, times, last in marked_last(sizes):
                with stands_for(times):
                    engine.backward(partial(self._loss, rows), last=last)
            engine.clip(settings.critic_clip_grad)
            optimizer.step()
            optimizer.zero_grad()
        if settings.critic_param_offload:
            engine.offload_model()
        if settings.critic_optimizer_offload:
            engine.move_optimizer(torch.device("cpu"))

    def _loss(self, rows: int) -> torch.Tensor:
        names = "values", "returns"
        batch = self._samples.micro_batch(rows, *names)
        found = self._samples.of_responses(self._engine.values(batch), rows)
        padded = self._samples.padded(batch, rows, *names)
        return value_loss(found, padded, tokens=self._settings.judged_at_once * self._settings.max_response_length)
