"""The model that verl's engine shards: built from its config with random weights, with LoRA where that is trained.

Read in verl at commit 1dda039b: verl/workers/engine/fsdp/transformer_impl.py, _build_module and _build_lora_module.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.frontends.verl_settings import Settings

from .verl_engine import DTYPES, Engine, fuse_head
from .verl_losses import value_loss


def random_model(settings: Settings, folder: str, *, dtype: str, lora: bool) -> torch.nn.Module:
    """The model of the config in `folder` with random weights in host memory, before it is sharded."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    model = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[dtype], attn_implementation=settings.attn_implementation
    )
    model.to(DTYPES[dtype])
    if settings.use_fused_kernels:
        fuse_head(model)
    if settings.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _with_lora(model, settings) if lora else model


def value_model(settings: Settings, folder: str) -> torch.nn.Module:
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
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made: torch.nn.Module = model
    return made


def _with_lora(model: Any, settings: Settings) -> torch.nn.Module:
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


class Samples:
    """Synthetic samples of full length on a device; every function takes their number."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """What a model takes: packed, (1, tokens)."""
        each = self._settings.tokens
        ids = torch.zeros((1, rows * each), dtype=torch.long, device=self._device)
        positions = torch.arange(each, device=self._device).repeat(rows)[None]
        return {"input_ids": ids, "position_ids": positions}

    def answers(self, rows: int, *names: str) -> dict[str, torch.Tensor]:
        """What a loss reads beside the model's outputs, each (rows, tokens of a response)."""
        shape = (rows, self._settings.max_response_length)
        return {name: torch.zeros(shape, device=self._device) for name in names}

    def of_responses(self, packed: torch.Tensor, rows: int) -> torch.Tensor:
        """The part of the responses, (rows, length), of a number for each packed token."""
        start = self._settings.max_prompt_length - 1
        return packed.view(rows, self._settings.tokens)[:, start : start + self._settings.max_response_length]


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
    """What runs inside happens `times` times: on a simulated card it is traced once."""
    gpu = active_gpu()
    with nullcontext() if gpu is None else gpu.standing_for(times):
        yield


# PPO's critic as verl trains it: a model with a value for each token, with FSDP, an optimizer and phases of its own.
#
# Read in verl at commit 1dda039b: verl/trainer/ppo/v1/trainer_base.py (_compute_values, _update_critic), verl/workers/
# engine/fsdp/transformer_impl.py (FSDPEngineWithValueHead) and verl/workers/utils/losses.py (value_loss). Imports
# torch.


class Critic:
    """The critic of one rank; it makes its micro-batches by tokens, whatever the config says (`Settings.critic_*`)."""

    def __init__(self, settings: Settings, folder: str, device: torch.device) -> None:
        self._settings, self._device, self._samples = settings, device, Samples(settings, device)
        self._engine = Engine(
            value_model(settings, folder), version=2 if settings.critic_sharding == "fsdp2" else 1, device=device,
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
        engine.module.eval()
        engine.count()
        for rows, times in runs_of(self._sizes(settings.judged, settings.critic_forward_max_token_len_per_gpu)):
            with torch.no_grad(), stands_for(times), engine.attending():
                engine.values(self._samples.inputs(rows)).cpu()
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
        found = self._samples.of_responses(self._engine.values(self._samples.inputs(rows)), rows)
        batch = self._samples.answers(rows, "values", "returns", "mask")
        return value_loss(found, batch, tokens=self._settings.judged_at_once * self._settings.max_response_length)
