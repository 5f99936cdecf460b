"""A plain `transformers.Trainer` whose ranks may share samples; for embedding models, rerankers and diffusion models.

Read in ms-swift at 3602360a: swift/model/patcher.py and register.py (what stands in place of the head),
swift/loss/embedding.py and reranker.py, swift/trainers/reranker_trainer.py; in Axolotl at 067b021c:
integrations/diffusion. Imports torch.
"""

from contextlib import nullcontext
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, normalize
from transformers import Trainer

from autofit.errors import ConfigError

from .common import AlikeSteps
from .hf_data import IGNORED
from .hf_losses import Batch, MicroBatchMean
from .sequence import SharedSequence


class Shares(AlikeSteps, Trainer):  # type: ignore[misc]
    """A trainer that may be one of a group of ranks with parts of the same samples."""

    @cached_property
    def shared(self) -> SharedSequence | None:
        """The group of this rank; None if each rank has samples of its own."""
        size = self.args.sequence_parallel_size
        deals = self.args.sequence_parallel == "ulysses"
        return None if size == 1 else SharedSequence(size, self.model.config, heads=deals)

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        with nullcontext() if self.shared is None else self.shared.attending():  # backward repeats attention
            found: torch.Tensor = super().training_step(*args, **more)
        return found

    def parts(self, inputs: Batch) -> Batch:
        """The tokens of this rank, without labels; all of them where it shares none."""
        if self.shared is None:
            return {name: tensor for name, tensor in inputs.items() if name != "labels"}
        ids = inputs["input_ids"]
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        own = self.shared.part(ids)
        return {"input_ids": own, "position_ids": self.shared.part(positions), "attention_mask": torch.ones_like(own)}


class SharedTrainer(Shares):
    """The loss of a causal model of a group's tokens, each rank's from the logits of its part.

    ms-swift makes a loss for each token and gathers them (per_token_loss_func_sp); Axolotl takes the
    model's own loss of a part.
    """

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The sum over the tokens of a group, or of this rank, by the tokens of an optimizer step."""
        assert self.shared is not None
        parts = self.parts(inputs)
        if not self.shared.deals:
            labels = self.shared.part(inputs["labels"], filled=IGNORED)
            outputs = model(**parts, labels=labels, num_items_in_batch=num_items_in_batch, use_cache=False)
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        labels = self.shared.part(torch.roll(inputs["labels"], shifts=-1, dims=1), filled=IGNORED)
        outputs = model(**parts, use_cache=False)
        logits = outputs.logits.view(-1, outputs.logits.shape[-1])
        if self.args.loss_chunk is None:
            each = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
        else:
            each = InChunks.apply(logits, labels.flatten(), self.args.loss_chunk)  # type: ignore[no-untyped-call]
        each = self.shared.whole(each.reshape(labels.shape))
        loss = each.sum() / (num_items_in_batch if num_items_in_batch is not None else max(1, each.numel()))
        return (loss, outputs) if return_outputs else loss


class InChunks(torch.autograd.Function):
    """Cross-entropy of each row of (tokens, words), some at a time; backward writes over the logits.

    ms-swift's ChunkedCrossEntropyLoss (swift/sequence_parallel/utils.py).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.chunk = chunk
        return torch.cat(
            [
                cross_entropy(logits[start : start + chunk], labels[start : start + chunk], reduction="none")
                for start in range(0, len(logits), chunk)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        for start in range(0, len(logits), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            own = logits[part].detach().requires_grad_(True)
            with torch.enable_grad():
                each = cross_entropy(own, labels[part], reduction="none")
                (grad,) = torch.autograd.grad((each * grads[0][part]).sum(), own)
            logits[part] = grad
        return logits, None, None


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


class DiffusionTrainer(MicroBatchMean, alike=False):
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
