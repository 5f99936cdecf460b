"""A plain `transformers.Trainer` whose ranks share their samples, as ms-swift's and Axolotl's do. Imports torch."""

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

from .hf_data import IGNORED
from .sequence import SharedSequence

Batch = dict[str, torch.Tensor]


class Shares(Trainer):  # type: ignore[misc]
    """A trainer that may be one of a group of ranks with parts of the same samples."""

    @cached_property
    def shared(self) -> SharedSequence | None:
        """The group of this rank; None where each rank has samples of its own."""
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
