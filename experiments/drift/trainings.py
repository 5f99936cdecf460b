"""Small real TRL trainings on a simulated card, watched as a full run is, with or without one longer sample."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from autofit.fakegpu import fake_gpu, gpu_spec
from autofit.watching.contract import StepFacts, Watched
from autofit.watching.events import RunEvent
from autofit.watching.memory import MemoryWatcher, since_beginning

VOCABULARY = 4003
STEPS, ACCUMULATION = 8, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One dataset and its training. `longer` is the row of the longer sample, None without."""

    kind: str  # sft, dpo or grpo
    lengths: tuple[int, ...]  # tokens of each sample (of its prompt, where the trainer generates)
    longer: int | None
    seed: int
    micro_batch_size: int = 2
    checkpointing: bool = False
    attention: str = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training went."""

    steps: int  # finished
    oom: bool
    least_capacity_bytes: int | None  # of the smallest card that completes it; None after an OOM
    warnings: tuple[RunEvent, ...]
    seconds: float
    watcher_s: float


def trained(case: Case, folder: Path, *, capacity_bytes: int | None = None) -> Outcome:
    """The training of a case on a card with so many bytes; None: with as many as it needs."""
    spec = gpu_spec("a100-40gb")
    spec = spec if capacity_bytes is None else replace(spec, capacity_bytes=capacity_bytes)
    harness, began = _Harness(), time.monotonic()
    with fake_gpu(spec, enforce_capacity=capacity_bytes is not None, record_places=False) as gpu:
        trainer = _MAKERS[case.kind](case, folder)
        harness.trainer = trainer
        trainer.add_callback(harness)
        oom = False
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            oom = True
    return Outcome(
        steps=int(trainer.state.global_step), oom=oom, warnings=tuple(harness.events), watcher_s=harness.seconds,
        least_capacity_bytes=None if oom else gpu.least_capacity_bytes, seconds=time.monotonic() - began,
    )  # fmt: skip


class _Harness(TrainerCallback):  # type: ignore[misc]
    """Passes a training on to the watcher, as the recorder of a promoted run does."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.events: list[RunEvent] = []
        self.seconds = 0.0
        self._watcher = MemoryWatcher()
        self._began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        watched = Watched(
            folder=None, trainer="", values={}, device="cuda", generates=hasattr(args, "num_generations"),
            samples_per_step=0, first_step=state.global_step, last_step=state.max_steps, hf_trainer=self.trainer,
        )  # fmt: skip
        self._tell(lambda: self._watcher.begins(watched))

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        facts = StepFacts(number=state.global_step, step_s=time.monotonic() - self._began, **since_beginning())
        self._tell(lambda: self._watcher.step_ends(facts))

    def _tell(self, ask: Any) -> None:
        began = time.perf_counter()
        found: Iterable[RunEvent] = ask()
        self.events += found
        self.seconds += time.perf_counter() - began


# ---------------------------------------------------------------------- the trainers
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{i}": i for i in range(VOCABULARY - 3)} | {"<eos>": 4000, "<pad>": 4001, "<unk>": 4002}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


def _model(case: Case) -> Any:
    shape = AutoConfig.for_model(
        "qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, vocab_size=VOCABULARY, tie_word_embeddings=True,
        max_position_embeddings=65536, eos_token_id=4000, pad_token_id=4001, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=case.attention)


def _arguments(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": case.micro_batch_size, "max_steps": STEPS,
        "gradient_accumulation_steps": ACCUMULATION, "gradient_checkpointing": case.checkpointing, "bf16": True,
        "report_to": [], "save_strategy": "no", "logging_steps": 1000, "disable_tqdm": True, "seed": case.seed,
    }  # fmt: skip


def _words(count: int) -> str:
    return " ".join(["t1"] * count)


def _sft(case: Case, folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"input_ids": [[5] * count for count in case.lengths]})
    args = SFTConfig(max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, **_arguments(case, folder))
    return SFTTrainer(model=_model(case), args=args, train_dataset=rows, processing_class=tokenizer())


def _dpo(case: Case, folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_dict({
        "prompt": ["t1 t2"] * len(case.lengths), "chosen": [" " + _words(max(1, n - 3)) for n in case.lengths],
        "rejected": [" t4 t5"] * len(case.lengths),
    })  # fmt: skip
    return DPOTrainer(
        model=_model(case), ref_model=_model(case), args=DPOConfig(max_length=None, **_arguments(case, folder)),
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip


def _grpo(case: Case, folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(num_generations=2, max_completion_length=8, **_arguments(case, folder))
    return GRPOTrainer(
        model=_model(case), args=args, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": [_words(n) for n in case.lengths]}), processing_class=tokenizer(),
    )  # fmt: skip


_MAKERS = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}


def samples_of(kind: str, micro_batch_size: int) -> int:
    """Samples that the training visits, each once."""
    each = micro_batch_size * ACCUMULATION * STEPS
    return each // 2 if kind == "grpo" else each


def drawn(kind: str, number: int, *, with_longer: bool) -> Case:
    """Dataset `number`: lengths around a median of its own, and one sample 4 to 100 times the longest, up to 20,000.

    The longer sample is never in the first step.
    """
    random = np.random.default_rng(1000 + number)
    micro_batch_size = int(random.choice([2, 4]))
    count = samples_of(kind, micro_batch_size)
    lengths = np.clip(random.lognormal(np.log(random.integers(100, 300)), 0.4, count), 30, 800).astype(int)
    row = int(random.choice(_after_first_step(kind, number, count, micro_batch_size)))
    times = float(np.exp(random.uniform(np.log(4), np.log(100))))
    if with_longer:
        lengths[row] = min(int(lengths.max() * times), 20_000)
    return Case(
        kind=kind, lengths=tuple(int(n) for n in lengths), longer=row if with_longer else None, seed=number,
        micro_batch_size=micro_batch_size, checkpointing=bool(random.integers(2)),
        attention="eager" if number % 5 == 4 else "sdpa",
    )  # fmt: skip


def _after_first_step(kind: str, seed: int, count: int, micro_batch_size: int) -> list[int]:
    """The rows that are trained after the first step, by transformers' and TRL's shuffle of the seed."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    each = micro_batch_size * ACCUMULATION
    return order[each // 2 if kind == "grpo" else each :]
