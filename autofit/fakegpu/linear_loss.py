"""Losses of a causal model that hold few logits at a time: Liger's fused linear loss and Cut Cross-Entropy.

Both are plain torch, so that they run anywhere and are counted on a simulated card; their gradients are those of the
cross-entropy. Each holds the same bytes as its own kernels:

- Liger (liger_kernel/ops/fused_linear_cross_entropy.py, 2026-08): a few tokens at a time, all words of them; gradients
  of the hidden states and of the head are made in the forward pass and kept to the backward one.
- Cut Cross-Entropy (cut_cross_entropy/cce.py, cce_backward.py): one number a token is kept; the logits are made again
  in the backward pass. Its kernels hold blocks in registers; here a few words at a time, of all tokens, stand for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch

_IGNORED = -100
_WORDS = 2048  # of a block of Cut Cross-Entropy: enough for a matmul at full speed, few beside any vocabulary


_PROPORTIONAL_TO: ContextVar[int] = ContextVar("_PROPORTIONAL_TO", default=0)


@contextlib.contextmanager
def in_proportion(tokens: int) -> Iterator[None]:
    """Context in which Liger's loss takes tokens in proportion to those it takes of `tokens`; 0: as it does.

    It takes a power of 2 of them, which no formula of few samples follows to many: this one is right at `tokens`, and
    at each power of 2 times as many.
    """
    token = _PROPORTIONAL_TO.set(tokens)
    try:
        yield
    finally:
        _PROPORTIONAL_TO.reset(token)


def _step(tokens: int, words: int, width: int) -> int:
    """Number of tokens at a time."""
    at = _PROPORTIONAL_TO.get() or tokens
    step = 1 << max(0, -(-at // -(-words // width)) - 1).bit_length()  # the next power of 2
    return max(1, round(step * tokens / at))


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
        tokens, width = hidden.shape
        words = weight.shape[0]
        step = _step(tokens, words, width)
        grad = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for begin in range(0, tokens, step):
            part, wanted = hidden[begin : begin + step], labels[begin : begin + step]
            logits = part @ weight.t()
            with torch.no_grad():
                _to_gradient(logits, wanted, losses[begin : begin + step])
            grad[begin : begin + step] = logits @ weight
            if grad_weight is not None:
                grad_weight += torch.mm(logits.t(), part).float()
            del logits
        ctx.save_for_backward(grad, grad_weight)
        ctx.count = count
        return cast(torch.Tensor, losses.sum() / count)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        grad, grad_weight = ctx.saved_tensors
        scale = grads[0] / ctx.count
        return grad.mul_(scale), None if grad_weight is None else grad_weight.mul_(scale), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        total = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        said = torch.zeros_like(total)
        for begin in range(0, weight.shape[0], _WORDS):
            logits = hidden @ weight[begin : begin + _WORDS].t()
            inside, places = _places(labels, begin, logits.shape[1])
            said.add_(logits.gather(1, places)[:, 0] * inside)
            total = torch.logaddexp(total, _log_sum(logits)[:, 0])
            del logits
        ctx.save_for_backward(hidden, weight, labels, total)
        ctx.count = count
        return cast(torch.Tensor, ((total - said) * (labels != _IGNORED)).sum() / count)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, total = ctx.saved_tensors
        scale = (grads[0] / ctx.count) * (labels != _IGNORED)
        grad = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for begin in range(0, weight.shape[0], _WORDS):
            block = weight[begin : begin + _WORDS]
            share = (hidden @ block.t()).sub_(total[:, None]).exp_().mul_(scale[:, None])
            inside, places = _places(labels, begin, block.shape[0])
            share.scatter_add_(1, places, (-scale * inside).to(share.dtype)[:, None])
            grad.addmm_(share, block)
            if grad_weight is not None:
                torch.mm(share.t(), hidden, out=grad_weight[begin : begin + _WORDS])
            del share
        return grad, grad_weight, None, None


LIGER: Callable[..., torch.Tensor] = _Liger.apply
CUT: Callable[..., torch.Tensor] = _Cut.apply


def fuse(model: Any, loss: Callable[..., torch.Tensor]) -> bool:
    """True if the model (or that within a PEFT model) now takes its loss by LIGER or CUT wherever labels are given.

    False if its head is more than a plain linear layer. Without labels the logits are made. In evaluation LIGER makes
    them too (its `skip_logits` is `training`) and CUT does not (its `train_only` is off).
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    trained = getattr(head, "modules_to_save", None)
    head = head if trained is None else trained[cast(Any, head).active_adapters[0]]
    if not isinstance(head, torch.nn.Linear) or head.bias is not None or hasattr(head, "base_layer"):
        return False
    made, whole = model.forward, head.forward

    @functools.wraps(made)
    def forward(*args: Any, **given: Any) -> Any:
        labels = given.get("labels")
        if labels is None or (loss is LIGER and not model.training):
            return made(*args, **given)

        def lost(hidden: torch.Tensor) -> torch.Tensor:  # in the head's place, where sharded weights are whole
            wanted = given.get("shift_labels")
            if wanted is None:
                wanted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:].contiguous()
            wanted = wanted.view(-1)
            count = given.get("num_items_in_batch")
            count = (wanted != _IGNORED).sum() if count is None else count
            return loss(hidden.reshape(-1, hidden.shape[-1]), head.weight, wanted, count)

        head.forward, model.loss_function = lost, lambda logits, *_, **__: logits
        try:
            output = made(*args, **given)
        finally:
            del model._loss_function
            head.forward = whole
        if isinstance(output, dict):
            output["logits"] = None
        return output

    model.forward = forward
    return True


def _to_gradient(logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> None:
    """The logits (tokens, words) become their gradient in place, as Liger's kernel does, and `losses` is filled."""
    used = labels != _IGNORED
    places = labels.clamp(min=0)[:, None]
    said = logits.gather(1, places)[:, 0].float()
    top = logits.amax(dim=-1, keepdim=True)
    total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True, dtype=torch.float32)
    losses.copy_((total.log()[:, 0] + top[:, 0] - said) * used)
    logits.mul_(used[:, None] / total)
    logits.scatter_add_(1, places, -used.to(logits.dtype)[:, None])


def _log_sum(logits: torch.Tensor) -> torch.Tensor:
    """log of the sum of exp of each row of the logits, in float32 (tokens, 1); the logits are used up."""
    top = logits.amax(dim=-1, keepdim=True)
    return logits.sub_(top).exp_().sum(dim=-1, keepdim=True, dtype=torch.float32).log_().add_(top)


def _places(labels: torch.Tensor, begin: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are among the `words` from `begin` on (tokens,), and where there (tokens, 1)."""
    return (labels >= begin) & (labels < begin + words), (labels - begin).clamp(0, words - 1)[:, None]
