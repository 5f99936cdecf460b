"""Evaluation within a training, which is not simulated: a file that evaluates more at once than it trains is told.

A plain trainer makes the logits of all its samples at once, in 16 bits, as float32 and as their log-softmax
(transformers, loss/loss_utils.py, ForCausalLMLoss): 10 bytes a word of each token. No torch here.
"""

from __future__ import annotations

from autofit.frontends.draft import Draft, number
from autofit.recipe import catalogue
from autofit.units import format_bytes

_BYTES = 10
_ALL_LOGITS = ("sft", "asft")  # objectives whose evaluation makes the logits of every token


def told(draft: Draft, key: str, *, usual: int, tokens: int | None, objective: object) -> None:
    """Note that evaluation takes more samples at once than training; `usual` ones where the file has no `key`."""
    trained = number(draft.values.get("per_device_train_batch_size")) or 0
    samples = int(number(draft.given.get(key)) or usual)
    if samples <= trained:
        return
    said = key if draft.given.get(key) is not None else f"by {draft.tool}'s default {key}"
    words = catalogue.text_config(str(draft.values.get("model_name_or_path"))).get("vocab_size")
    size = ""
    if objective in _ALL_LOGITS and tokens and isinstance(words, int):
        size = (
            f"; their logits are at most {samples} x {tokens:,} tokens x {words:,} words x {_BYTES} bytes = "
            f"{format_bytes(samples * tokens * words * _BYTES)}"
        )
    draft.note(f"evaluation is not simulated, and takes {samples} samples at once ({said}), training {trained:g}{size}")
