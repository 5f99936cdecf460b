"""Small real models and TRL trainers, built the same way with and without a simulated card."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from rank_peaks import allocator_bytes
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 4003


@dataclass(frozen=True, kw_only=True)
class Case:
    """One whole training run: which trainer, and the settings that change its memory."""

    kind: str
    lora_rank: int | None = None
    checkpointing: bool = False
    beta: float = 0.0
    attention: str = "sdpa"
    bf16: bool = False
    dtype: torch.dtype = torch.float32
    micro_batch_size: int = 2
    steps: int = 2
    use_cpu: bool = True

    def __str__(self) -> str:
        lora = f"lora{self.lora_rank}" if self.lora_rank else "full"
        checkpointing = "checkpointed" if self.checkpointing else "plain"
        return f"{self.kind}-{lora}-{checkpointing}-beta{self.beta}-{self.attention}"


def config(**changes: object) -> AutoConfig:
    sizes: dict[str, object] = {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "eos_token_id": 4000, "pad_token_id": 4001, "bos_token_id": None,
    }  # fmt: skip
    return AutoConfig.for_model("qwen3", **(sizes | changes))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{i}": i for i in range(VOCABULARY - 3)} | {"<eos>": 4000, "<pad>": 4001, "<unk>": 4002}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


def build_model(case: Case, **changes: object) -> PreTrainedModel:
    shape = config(**changes)
    if case.kind == "reward":
        shape.num_labels = 1
        return AutoModelForSequenceClassification.from_config(
            shape, dtype=case.dtype, attn_implementation=case.attention
        )
    return AutoModelForCausalLM.from_config(shape, dtype=case.dtype, attn_implementation=case.attention)


def saved_model(folder: Path) -> Path:
    """The `folder` with a small causal model and its tokenizer."""
    torch.manual_seed(0)
    build_model(Case(kind="sft")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def train(case: Case, folder: Path, *, length: int = 128, model: Callable[[], PreTrainedModel] | None = None) -> object:
    """Build the trainer of a case and run its public `train()`; returns the trainer."""
    build = model or (lambda: build_model(case))
    common: dict[str, object] = {
        "output_dir": str(folder), "per_device_train_batch_size": case.micro_batch_size,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": case.checkpointing, "bf16": case.bf16, "report_to": [], "save_strategy": "no",
        "max_steps": case.steps, "logging_steps": 1, "disable_tqdm": True, "use_cpu": case.use_cpu, "seed": 1,
    }  # fmt: skip
    peft = None
    if case.lora_rank:
        task = "SEQ_CLS" if case.kind == "reward" else "CAUSAL_LM"
        peft = LoraConfig(r=case.lora_rank, target_modules="all-linear", task_type=task)
    rows = case.micro_batch_size * 2 * case.steps
    trainer = _MAKERS[case.kind](case, build, common, rows, length, peft)
    trainer.train()  # type: ignore[attr-defined]
    return trainer


def _sft(
    case: Case, build: Callable[[], PreTrainedModel], common: dict[str, object], rows: int, length: int, peft: object
) -> object:
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": [[5] * length] * rows})
    args = SFTConfig(max_length=length, dataset_kwargs={"skip_prepare_dataset": True}, **common)
    return SFTTrainer(model=build(), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=peft)


def _pairs(rows: int, length: int) -> Dataset:
    half = " ".join(["t1"] * (length // 2 - 1))
    return Dataset.from_dict({"prompt": [half] * rows, "chosen": [" " + half] * rows, "rejected": [" " + half] * rows})


def _dpo(
    case: Case, build: Callable[[], PreTrainedModel], common: dict[str, object], rows: int, length: int, peft: object
) -> object:
    from trl import DPOConfig, DPOTrainer

    reference = None if case.lora_rank else build()
    return DPOTrainer(
        model=build(), ref_model=reference, args=DPOConfig(max_length=length, **common),
        train_dataset=_pairs(rows, length), processing_class=tokenizer(), peft_config=peft,
    )  # fmt: skip


def _reward(
    case: Case, build: Callable[[], PreTrainedModel], common: dict[str, object], rows: int, length: int, peft: object
) -> object:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=build(), args=RewardConfig(max_length=length, **common), train_dataset=_pairs(rows, length),
        processing_class=tokenizer(), peft_config=peft,
    )  # fmt: skip


def _grpo(
    case: Case, build: Callable[[], PreTrainedModel], common: dict[str, object], rows: int, length: int, peft: object
) -> object:
    import trl.trainer.grpo_trainer as module
    from trl import GRPOConfig, GRPOTrainer

    completion = length // 2
    original, module.create_model_from_path = module.create_model_from_path, lambda *a, **k: build().eval()
    try:
        trainer = GRPOTrainer(
            model=build(), reward_funcs=lambda completions, **_: [0.5] * len(completions),
            args=GRPOConfig(max_completion_length=completion, beta=case.beta, num_generations=2, **common),
            train_dataset=Dataset.from_dict({"prompt": [" ".join(["t1"] * (length // 2))] * rows}),
            processing_class=tokenizer(), peft_config=peft,
        )  # fmt: skip
    finally:
        module.create_model_from_path = original
    trainer._generate_single_turn = lambda prompts, *a, **k: ([[5] * completion for _ in prompts], None)
    return trainer


_MAKERS = {"sft": _sft, "dpo": _dpo, "reward": _reward, "grpo": _grpo}


def profiler_peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes the real CPU allocator held during `run`, from the profiler's record of every allocation."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return allocator_bytes(profile)[0]
