"""PPO's critic as verl trains it: a model with a value for each token, with FSDP, an optimizer and phases of its own.

Read in verl at commit 1dda039b: verl/trainer/ppo/v1/trainer_base.py (_compute_values, _update_critic), verl/workers/
engine/fsdp/transformer_impl.py (FSDPEngineWithValueHead) and verl/workers/utils/losses.py (value_loss). Imports torch.
"""

from functools import partial

import torch

from .verl_engine import Engine
from .verl_losses import value_loss
from .verl_models import value_model
from .verl_samples import Samples, marked_last, runs_of, stands_for
from .verl_settings import Settings


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
