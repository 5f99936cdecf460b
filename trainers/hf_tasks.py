"""Embedding models and rerankers for a plain `transformers.Trainer`, as ms-swift trains them.

Read in ms-swift at 3602360a: swift/model/patcher.py and register.py (what stands in place of the head),
swift/loss/embedding.py and reranker.py, swift/trainers/reranker_trainer.py. Imports torch.
"""

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, normalize

from autofit.errors import ConfigError

from .hf_losses import Batch, MicroBatchMean
from .hf_sequence import Shares

_TEMPERATURE = 0.1  # of InfoNCE (INFONCE_TEMPERATURE)
_ANSWERS = (0, 1)  # places of the two words whose logits are compared; the bytes are those of any two


class EmbeddingTrainer(Shares, MicroBatchMean):
    """InfoNCE over the last hidden states of texts, of which each stands beside one that means the same.

    Texts of the other ranks are compared too, without a gradient.
    """

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the pairs of all ranks."""
        texts = self._embedded(model, inputs)
        anchors, positives = texts.chunk(2)
        if (ranks := self.accelerator.num_processes) > self.args.sequence_parallel_size:
            gathered = self.accelerator.gather(texts.detach()).chunk(ranks)
            own = self.accelerator.process_index // self.args.sequence_parallel_size * self.args.sequence_parallel_size
            every = [texts if rank == own else one for rank, one in enumerate(gathered)]
            halves = [one.chunk(2) for one in every[:: self.args.sequence_parallel_size]]
            anchors, positives = (torch.cat([pair[side] for pair in halves]) for side in (0, 1))
        scores = anchors @ positives.T / _TEMPERATURE
        loss = cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        return (loss, {"logits": texts}) if return_outputs else loss

    def _embedded(self, model: Any, inputs: Batch) -> torch.Tensor:
        """The normalised hidden states of each text's last token (B, H)."""
        hidden = model(**self.parts(inputs), use_cache=False).logits
        if self.shared is not None:
            hidden = self.shared.whole(hidden)
        last = hidden[torch.arange(len(hidden), device=hidden.device), _last(inputs["attention_mask"])]
        return normalize(last, p=2, dim=1)


class RerankTrainer(MicroBatchMean):
    """Cross-entropy of one score for each document: of a classifier's head, or the difference of two words' logits."""

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the documents of a micro-batch; the first ones are those that fit."""
        asked = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        scores = model(**asked, **({"use_cache": False} if self.args.word_scores else {})).logits
        if self.args.word_scores:
            scores = scores[torch.arange(len(scores), device=scores.device), _last(asked["attention_mask"])]
        scores = scores.squeeze(1)
        fits = torch.zeros_like(scores)
        fits[: len(scores) // (1 + self.args.negatives)] = 1
        loss = binary_cross_entropy_with_logits(scores, fits)
        return (loss, {"logits": scores}) if return_outputs else loss


def _last(mask: torch.Tensor) -> torch.Tensor:
    """The place of each row's last token (B,)."""
    return mask.sum(-1) - 1


def without_words(model: Any) -> None:
    """Let `model` return its last hidden states in place of logits (patch_output_normalizer); its head stays."""
    _head(model).forward = MethodType(lambda _, hidden: hidden, _head(model))


def with_two_words(model: Any) -> None:
    """Let `model` return the difference of two words' logits in place of all (get_generative_reranker_logits)."""

    def scores(head: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, head.weight[list(_ANSWERS)])
        return logits[..., 0:1] - logits[..., 1:2]

    _head(model).forward = MethodType(scores, _head(model))


def _head(model: Any) -> Any:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"a model with a linear head for words is needed here; {type(model).__name__} has none")
    return head
