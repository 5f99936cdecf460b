"""The training that every tuner is given: 32 samples of 808 tokens a step, as 8 x 4, of Qwen2.5-0.5B."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from autofit.fakegpu import FakeGpu
from autofit.recipe.catalogue import architecture

CARD = "rtx4090"
MODEL = "Qwen/Qwen2.5-0.5B"
TOKENS = 808  # at 8 samples a micro-batch just too much for the card, at 7 not
MICRO, ACCUMULATION = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a tuner tried and what it left behind. `ooms` are attempts that ran out of memory."""

    probes: int
    ooms: int
    micro_batch: int | None
    accumulation: int
    samples_per_s: float | None  # simulated, of the last optimizer step

    @property
    def effective_batch(self) -> int | None:
        return None if self.micro_batch is None else self.micro_batch * self.accumulation


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many samples of TOKENS tokens as any tuner asks for."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids, "attention_mask": ids}


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    known = architecture(MODEL)
    assert known is not None
    config = AutoConfig.for_model(**known.config)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Steps(TrainerCallback):  # type: ignore[misc]
    """The simulated seconds at which optimizer steps ended, and the batch sizes that were begun."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.ends_s, self.begun = gpu, list[float](), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.begun, self.ends_s = self.begun + 1, []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ends_s.append(self.gpu.elapsed_s)

    @property
    def step_s(self) -> float:
        return self.ends_s[-1] - self.ends_s[-2]


def trainer(
    gpu: FakeGpu,
    micro: int,
    accumulation: int,
    *,
    finds: bool = False,
    steps: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Trainer, Steps]:
    """transformers' Trainer of the task, and what it reports."""
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation,
        max_steps=steps, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False, optim="adamw_torch",
        gradient_checkpointing=False, auto_find_batch_size=finds, logging_strategy="no",
    )  # fmt: skip
    seen = Steps(gpu)
    return Trainer(model=model(dtype), args=arguments, train_dataset=Samples(), callbacks=[seen]), seen
