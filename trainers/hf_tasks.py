"""Embedding models, rerankers and diffusion models for a plain `transformers.Trainer`.

Read in ms-swift at 3602360a: swift/model/patcher.py and register.py (what stands in place of the head),
swift/loss/embedding.py and reranker.py, swift/trainers/reranker_trainer.py; in Axolotl at 067b021c:
integrations/diffusion. Imports torch.
"""

from types import MethodType
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, normalize

from autofit.errors import ConfigError

from .hf_data import IGNORED
from .hf_losses import Batch, MicroBatchMean
from .hf_sequence import Shares

_TEMPERATURE = 0.1  # of InfoNCE (INFONCE_TEMPERATURE)
_LEAST = 1e-3  # chance of a word to be masked (DiffusionConfig.eps)
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


class DiffusionTrainer(MicroBatchMean):
    """Cross-entropy of words that were masked at random, predicted from all words of a sample, as Axolotl's.

    Each sample has a chance of its own that a word is masked, by which its losses are weighed. The logits, by one place
    to the right, and those of the masked words are copies; a simulation masks all words (`masks_all`).
    """

    masks_all = False

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over all tokens of a micro-batch."""
        ids, seen, labels = inputs["input_ids"], inputs["attention_mask"], inputs["labels"]
        chances = (_LEAST + (1 - _LEAST) * torch.rand(len(ids), device=ids.device))[:, None].repeat(1, ids.shape[1])
        chances = chances * seen.float()
        masked = torch.rand(ids.shape, device=ids.device) < chances
        masked = labels != IGNORED if self.masks_all else masked & (labels != IGNORED)
        noisy = torch.where(masked, torch.full_like(ids, self.args.mask_token), ids)
        both = (seen.unsqueeze(2) == seen.unsqueeze(1)) & (seen.unsqueeze(2) > 0)
        outputs = model(input_ids=noisy, attention_mask=both.unsqueeze(1), use_cache=False)
        logits = torch.cat([outputs.logits[:, :1], outputs.logits[:, :-1]], dim=1)
        own, targets = logits[masked], ids[masked]
        each = cross_entropy(own.float(), targets, reduction="none")
        loss = (each / chances[masked]).sum() / ids.numel()
        return (loss, outputs) if return_outputs else loss


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
