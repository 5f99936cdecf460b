"""The small training of a gradient proof of a plain `transformers.Trainer`."""

from typing import Any

from ..hf_data import tokenised
from ..hf_training import made
from ..trl_config import TrlConfig
from .pairs import common_factor, rows, samples_per_step, shrunken, steps_of_a_round
from .small_model import tokenizer

__all__ = ["SAME", "build", "common_factor", "samples_per_step", "shrunken", "steps_of_a_round"]

# Packing and rounding are off: they change rows and weights, not the normalisation of the loss. No row is as long as
# the limit.
SAME: dict[str, object] = {
    "max_length": 64,
    "packing": False,
    "block_diagonal": False,
    "adapter_dtype": None,
    "qat": None,
    "teacher_model_name_or_path": None,
    "teacher_words": None,
    "answer_tokens": None,
    "sequence_parallel_size": 1,
    "host_experts": False,
    "pruning_masks": False,
    "expert_parallel_size": 1,
    "engine_share": 0.0,
    "loss_chunk": None,
}
_COLUMNS = {
    **dict.fromkeys(("sft", "asft", "kto", "label_tokens", "gkd", "diffusion"), ("prompt", "completion")),
    **dict.fromkeys(("reward", "embed", "rerank"), ("chosen", "rejected")), "classify": ("text",),
}  # fmt: skip


def build(config: TrlConfig, steps: int) -> Any:
    """The trainer over `steps` optimizer steps of fixed rows."""
    training, words = config.training, tokenizer()
    found = rows(config, steps, *_COLUMNS.get(training.objective, ("prompt", "chosen", "rejected")))
    if training.objective in ("kto", "classify"):
        classes = max(2, training.num_labels)
        found = found.add_column("label", [number % classes for number in range(len(found))])
    tokens = tokenised(found, words, objective=training.objective, max_length=training.max_length)
    return made(config, tokens, tokenizer=words)
