"""Losses over answers for a plain `transformers.Trainer`, holding what LLaMA-Factory, TRL and ms-swift hold."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy, kl_div, logsigmoid, mse_loss, pad
from transformers import Trainer
from trl.trainer.utils import selective_log_softmax

from .common import AlikeSteps
from .hf_data import IGNORED, OTHER

Batch = dict[str, torch.Tensor]
_CHUNK = 512  # tokens at a time in GKD's divergence (ms-swift's gkd_loss.py)


class MicroBatchMean(AlikeSteps, Trainer):  # type: ignore[misc]
    """A trainer whose loss is a mean over each micro-batch."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.model_accepts_loss_kwargs = False  # transformers below 5.18 has no loss_is_scaled_for_ga


class _Preferences(MicroBatchMean):
    """A trainer whose loss is over log-probabilities of answers, from the logits of all their tokens at once."""

    def __init__(self, *args: Any, beta: float, float32_logits: bool, **more: Any) -> None:
        super().__init__(*args, **more)
        self.beta, self.float32_logits = beta, float32_logits

    def _logits(self, model: Any, inputs: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
        return logits.to(torch.float32) if self.float32_logits else logits


class _Referenced(_Preferences):
    """A trainer that compares the policy with a reference: a model of its own, or the policy without its adapter."""

    def __init__(self, *args: Any, reference: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.reference = None if reference is None else self._prepared(reference)

    def _prepared(self, reference: Any) -> Any:
        from trl.models import prepare_deepspeed, prepare_fsdp

        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _without_adapter(self, model: Any) -> AbstractContextManager[Any]:
        if self.reference is not None or not hasattr(self.accelerator.unwrap_model(model), "disable_adapter"):
            return nullcontext()
        found: AbstractContextManager[Any] = self.accelerator.unwrap_model(model).disable_adapter()
        return found


class HfDpoTrainer(_Referenced):
    """DPO's sigmoid loss: both answers in one forward pass, and the logits of all their tokens at once.

    The policy goes first and its logits wait for the reference's, as in LLaMA-Factory (train/dpo/trainer.py, of float32
    logits) and in ms-swift (rlhf_trainers/dpo_trainer.py), which makes log-probabilities row by row. The reference is
    a model of its own, or the policy without its adapter.
    """

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the pairs of a micro-batch."""
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        score = _log_probabilities if self.float32_logits else _by_row
        logits = self._logits(model, inputs)
        scores = score(logits, labels)
        with torch.no_grad(), self._without_adapter(model):
            expected = score(self._logits(self.reference or model, inputs), labels)
        chosen, rejected = (scores - expected).chunk(2)
        loss = -logsigmoid(self.beta * (chosen - rejected)).mean()
        return (loss, {"logits": logits}) if return_outputs else loss


class AsftTrainer(_Referenced):
    """LLaMA-Factory's ASFT (train/trainer_utils.py): each token's loss by its probability, and a divergence.

    The reference goes first, and its logits and keys and values stay; the model computes its usual loss too, which is
    not used.
    """

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the tokens of a micro-batch."""
        labels = inputs["labels"][:, 1:].contiguous().view(-1)
        with torch.no_grad(), self._without_adapter(model):
            expected = (self.reference or model)(
                input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")
            )
        outputs = model(**inputs)
        logits = outputs.logits.float()
        own, others = (found[:, :-1].contiguous().view(-1, found.shape[-1]) for found in (logits, expected.logits))
        each = cross_entropy(own, labels, ignore_index=IGNORED, reduction="none")
        counted = labels != IGNORED
        each = each[counted]
        loss = (each * torch.exp(-each.detach())).mean()
        divergence = kl_div(own.log_softmax(-1), others.softmax(-1), reduction="none").sum(-1)
        loss = loss + self.beta * (divergence * counted.float()).sum() / counted.sum()
        return (loss, outputs) if return_outputs else loss


class GkdTrainer(_Referenced, alike=False):
    """Distillation from a frozen teacher: a divergence of the logits of all words, as in ms-swift's GKD trainer.

    The student goes first and its logits wait for the teacher's (rlhf_trainers/gkd_trainer.py, gkd_loss.py). The
    teacher is a model of its own, the policy without its adapter, or a server that sends `words` log-probabilities a
    token. The model's usual loss counts beside it with `nll_weight`.
    """

    def __init__(
        self, *args: Any, nll_weight: float, temperature: float, words: int | None, answer: int | None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.nll_weight, self.temperature, self.words, self.answer = nll_weight, temperature, words, answer
        self.served = words is not None and self.reference is None

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the tokens of a micro-batch."""
        asked: dict[str, Any] = dict(inputs)
        if self.answer is not None:  # logits from the last token of the prompt on
            asked["labels"] = asked["labels"][:, -(self.answer + 1) :]
            asked["logits_to_keep"] = self.answer + 1
        labels = asked["labels"] if self.nll_weight else asked.pop("labels")
        outputs = model(**asked, use_cache=False)
        counted = torch.roll(labels, shifts=-1, dims=1) != IGNORED
        if not self.served:
            asked.pop("labels", None)
            with torch.no_grad(), self._without_adapter(model):
                taught = (self.reference or model)(**asked, use_cache=False).logits
        if self.words is None:
            own, others = outputs.logits[counted], taught[counted]
            scores, targets = _same_width(own, others)
        else:
            shape = (*counted.shape, self.words)
            told, places = (
                torch.topk(taught, self.words)
                if not self.served
                else (
                    torch.zeros(shape, device=counted.device),
                    torch.zeros(shape, dtype=torch.long, device=counted.device),
                )
            )
            own, targets = outputs.logits[counted], told[counted]
            scores = torch.gather(own, -1, places[counted])
        scores, targets = scores / self.temperature, targets / self.temperature
        loss = _divergence(scores, targets, self.beta) / len(own)
        if self.nll_weight:
            loss = loss + self.nll_weight * outputs.loss
        return (loss, outputs) if return_outputs else loss


def _same_width(own: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two vocabularies, the smaller one filled up from the other (gkd_loss.py, _align_vocab)."""
    words, taught = own.shape[-1], others.shape[-1]
    if words < taught:
        own = pad(own, (0, taught - words))
        own[..., words:] = others[..., words:]
    elif taught < words:
        others = pad(others, (0, words - taught))
        others[..., taught:] = own[..., taught:]
    return own, others


def _divergence(scores: torch.Tensor, targets: torch.Tensor, beta: float) -> torch.Tensor:
    """The sum over rows (N, V) of the generalised Jensen-Shannon divergence, in chunks (gkd_loss.py, jsd_loss)."""
    total = scores.new_zeros(())
    share = torch.tensor(beta, dtype=scores.dtype, device=scores.device)
    for start in range(0, len(scores), _CHUNK):
        own, others = (found[start : start + _CHUNK].log_softmax(-1) for found in (scores, targets))
        if beta in (0, 1):
            each = _kl(own, others) if beta == 0 else _kl(others, own)
        else:
            mixed = torch.logsumexp(torch.stack([own + torch.log1p(-share), others + torch.log(share)]), dim=0)
            each = share * _kl(mixed, others) + (1 - share) * _kl(mixed, own)
        total = total + each.sum()
    return total


def _kl(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (torch.exp(targets) * (targets - inputs)).sum(-1)


class KtoTrainer(_Referenced):
    """KTO's loss: each sample beside another answer to its prompt, of which the policy and the reference need no graph.

    The mean of what they say of the other answers is subtracted from each sample's. LLaMA-Factory
    (train/kto/trainer.py) and TRL 1.8 keep copies of the samples' logits, by rating, for their logs.
    """

    def __init__(self, *args: Any, keeps_logits: bool, **more: Any) -> None:
        super().__init__(*args, **more)
        self.keeps_logits = keeps_logits

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the samples of a micro-batch."""
        desirable = inputs["desirable"]
        sample = {name: tensor for name, tensor in inputs.items() if not name.startswith(OTHER) and name != "desirable"}
        other = {name.removeprefix(OTHER): tensor for name, tensor in inputs.items() if name.startswith(OTHER)}
        scores, kept = self._scored(model, sample, desirable)
        with torch.no_grad():
            others, _ = self._scored(model, other)
            with self._without_adapter(model):
                expected, expected_others = self._expected(self.reference or model, sample, other, desirable)
        shift = self.accelerator.gather((others - expected_others).mean()).mean().clamp(min=0)
        signs = torch.where(desirable, 1.0, -1.0)
        loss = (1 - torch.sigmoid(self.beta * signs * (scores - expected - shift))).mean()
        return (loss, {"logits": kept}) if return_outputs else loss

    def _expected(
        self, model: Any, sample: Batch, other: Batch, desirable: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities that the reference has of the samples and of the other answers, (B,) each.

        LLaMA-Factory keeps the samples' logits while the other answers are scored; TRL and ms-swift score these first.
        """
        if self.float32_logits:
            found = self._scored(model, sample, desirable)
            return found[0], self._scored(model, other)[0]
        others = self._scored(model, other)[0]
        return self._scored(model, sample)[0], others

    def _scored(
        self, model: Any, inputs: Batch, desirable: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(the log-probability of each row (B,), the logits that are kept for logs)."""
        labels = inputs["labels"]
        logits = self._logits(model, {name: tensor for name, tensor in inputs.items() if name != "labels"})
        found = _log_probabilities(logits, labels) if self.float32_logits else _by_row(logits, labels)
        if not self.keeps_logits or desirable is None:
            return found, ()
        kept = (logits[desirable], logits[~desirable])
        return found, kept if self.float32_logits else (logits, *kept)


class PairsTrainer(_Preferences):
    """A loss over pairs without a reference: ORPO, SimPO or CPO.

    Of float32 logits all log-probabilities are made at once, as in LLaMA-Factory (train/dpo/trainer.py), whose ORPO
    takes its cross-entropy from them. Of others they are made row by row, and the cross-entropy of the chosen answers
    from a copy of their logits, as in TRL's experimental trainers, from which Axolotl's and ms-swift's are derived.
    """

    def __init__(self, *args: Any, loss: str, gamma: float, nll_weight: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self.loss, self.gamma, self.nll_weight = loss, gamma, nll_weight

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the pairs of a micro-batch, and the cross-entropy of the chosen answers where it counts."""
        labels = inputs["labels"]
        logits = self._logits(model, {name: tensor for name, tensor in inputs.items() if name != "labels"})
        half = len(labels) // 2
        nll = 0.0 if self.float32_logits or not self.nll_weight else _cross_entropy(logits[:half], labels[:half])
        scores = _log_probabilities(logits, labels) if self.float32_logits else _by_row(logits, labels)
        if self.loss != "cpo":
            scores = scores / (labels[:, 1:] != IGNORED).sum(-1).clamp(min=1)
        chosen, rejected = scores.float().chunk(2)
        if self.loss == "orpo":
            odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            loss = -self.beta * logsigmoid(odds).mean()
        else:
            margin = self.gamma / self.beta if self.loss == "simpo" else 0.0
            loss = -logsigmoid(self.beta * (chosen - rejected - margin)).mean()
        if self.float32_logits and self.nll_weight:
            nll = -chosen.mean()
        loss = loss + self.nll_weight * nll
        return (loss, {"logits": logits}) if return_outputs else loss


class LabelTrainer(MicroBatchMean):
    """The loss of a sequence classifier: cross-entropy over classes, or the squared error of one score."""

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the samples of a micro-batch."""
        scores = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"}).logits.float()
        labels = inputs["labels"]
        loss = mse_loss(scores.squeeze(-1), labels) if scores.shape[-1] == 1 else cross_entropy(scores, labels)
        return (loss, {"logits": scores}) if return_outputs else loss


class RewardTrainer(MicroBatchMean):
    """A reward model's pairwise loss: of a sequence classifier with one label, or a causal model with a value head."""

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the pairs of a micro-batch."""
        if self.args.value_head:  # a value for each token, of which the last one counts; the words' loss is not used
            values = model(**inputs)[-1]
            scores = values.gather(1, inputs["attention_mask"].sum(-1, keepdim=True) - 1).squeeze(-1)
        else:
            scores = model(**{name: found for name, found in inputs.items() if name != "labels"}).logits.squeeze(-1)
        chosen, rejected = scores.chunk(2)
        loss = -logsigmoid(chosen.float() - rejected.float()).mean()
        return (loss, {"logits": scores}) if return_outputs else loss


def _log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's labels (B,), of logits (B, T, V)."""
    labels = labels[:, 1:].clone()
    counted = labels != IGNORED
    labels[~counted] = 0
    each = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (each * counted).sum(-1)


def _by_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's labels (B,), made row by row, as TRL's trainers do."""
    labels = labels[:, 1:]
    counted = labels != IGNORED
    each: torch.Tensor = selective_log_softmax(logits[:, :-1], torch.where(counted, labels, 0))
    return (each * counted).sum(-1)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the labels, from a copy of the logits."""
    flat = logits[:, :-1].contiguous().view(-1, logits.shape[-1])
    found: torch.Tensor = cross_entropy(flat, labels[:, 1:].contiguous().view(-1), ignore_index=IGNORED)
    return found
