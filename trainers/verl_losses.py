"""Log-probabilities, entropy and the policy loss as verl computes them, with the same tensors.

Read in verl at commit 1dda039b: verl/utils/torch_functional.py, verl/utils/experimental/torch_functional.py (fused
kernels, the backend torch), verl/workers/utils/losses.py and verl/trainer/ppo/core_algos.py. Imports torch.
"""

from typing import Any

import torch

_CHUNK = 512  # tokens at a time in verl's fused kernels (FusedLinearForPPO)
_LEAST, _MOST = -20.0, 20.0  # of a log-ratio, before it is exponentiated (compute_policy_loss_vanilla)


class RowLogProbs(torch.autograd.Function):
    """The bytes of flash-attn's cross-entropy kernel (flash_attn/ops/triton/cross_entropy.py), which verl takes.

    It reads the logits (tokens, words) and writes one float32 number a token, three times; backward writes the
    gradient over the logits with `inplace`, else beside them. The values are not those of the kernel: nothing is
    trained with them.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        sums = logits.amax(-1).float()
        ctx.save_for_backward(logits, sums, labels)
        ctx.inplace = inplace
        return logits.gather(-1, labels[:, None])[:, 0].float() - sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, _, _ = ctx.saved_tensors
        grad = grads[0][:, None].to(logits.dtype)
        return (logits.mul_(grad) if ctx.inplace else logits * grad), None, None


def row_log_probs(logits: torch.Tensor, labels: torch.Tensor, *, inplace: bool) -> torch.Tensor:
    """A float32 number for each row of (tokens, words)."""
    found: torch.Tensor = RowLogProbs.apply(logits, labels, inplace)  # type: ignore[no-untyped-call]
    return found


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of each row of (tokens, words); verl compiles it."""
    shares = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(shares * logits, dim=-1)


def entropy_in_chunks(logits: torch.Tensor, chunk: int) -> torch.Tensor:
    """The same, `chunk` rows at a time in float32 (entropy_from_logits_with_chunking)."""
    entropy = torch.zeros(logits.shape[0], device=logits.device)
    for start in range(0, logits.shape[0], chunk):
        entropy[start : start + chunk] = entropy_of(logits[start : start + chunk].float())
    return entropy


class FusedLogProbs(torch.autograd.Function):
    """(log-probability, entropy) of each token from hidden states and the head's weights, without all logits at once.

    Logits, in float32 too, exist for 512 tokens at a time, and again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        tokens = hidden.shape[0]
        log_probs = torch.zeros(tokens, device=hidden.device, dtype=torch.float32)
        entropy = hidden.new_zeros(tokens)
        for start in range(0, tokens, _CHUNK):
            part = slice(start, start + _CHUNK)
            plain = hidden[part] @ weights.t()
            logits = plain.float()
            entropy[part] = entropy_of(logits).to(plain.dtype)
            log_probs[part] = row_log_probs(logits, labels[part], inplace=False)
        ctx.save_for_backward(hidden, weights, labels)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        hidden, weights, labels = ctx.saved_tensors
        d_log_probs, d_entropy = grads
        d_hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        d_weights = torch.zeros_like(weights) if weights.requires_grad else None
        for start in range(0, hidden.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            plain = hidden[part] @ weights.t()
            logits = plain.float()
            shares = logits.softmax(dim=-1)
            d_logits = torch.zeros((), device=hidden.device)
            if d_log_probs is not None:
                one_hot = torch.zeros_like(logits).scatter_(-1, labels[part][:, None], 1)
                d_logits = d_logits + d_log_probs[part].float()[:, None] * (one_hot - shares)
            if d_entropy is not None:
                logs = logits.log_softmax(dim=-1)
                entropy = torch.logsumexp(logits, dim=-1) - torch.sum(shares * logits, dim=-1)
                d_logits = d_logits + shares * (logs + entropy[:, None]) * -d_entropy[part][:, None]
            back = d_logits.to(plain.dtype)
            if d_hidden is not None:
                d_hidden[part] += back @ weights
            if d_weights is not None:
                d_weights += back.t() @ hidden[part]
        return d_hidden, d_weights, None


def value_loss(found: torch.Tensor, batch: dict[str, torch.Tensor], *, tokens: int) -> torch.Tensor:
    """A micro-batch's share of the critic's clipped loss, a mean over the `tokens` of an optimizer step."""
    values, returns, mask = batch["values"], batch["returns"], batch["response_mask"].to(torch.bool)
    clipped = torch.max(torch.min(found, values + 0.5), values - 0.5)
    plain, other = (found - returns) ** 2, (clipped - returns) ** 2
    loss = 0.5 * _masked_sum(torch.max(plain, other), mask) / tokens
    _told(torch.gt(other, plain).float(), mask)
    _told(found, mask)
    return loss


def policy_loss(
    log_probs: torch.Tensor, batch: dict[str, torch.Tensor], *, entropy: torch.Tensor | None, kl: bool, tokens: int
) -> torch.Tensor:
    """A micro-batch's share of the clipped loss, a mean over the `tokens` of an optimizer step; all are (rows, length).

    The k3 estimate of the divergence from the reference is added with `kl`, and the entropy where it is given.
    """
    mask = batch["response_mask"].to(torch.bool)
    loss = _clipped_loss(log_probs, batch["old_log_probs"], batch["advantages"], mask, tokens=tokens)
    if entropy is not None:
        loss = loss - 1e-3 * (_masked_sum(entropy, mask) / tokens)
    if kl:
        difference = torch.clamp(batch["ref_log_prob"] - log_probs, min=_LEAST, max=_MOST)
        divergence = torch.clamp(difference.exp() - difference - 1, min=-10, max=10)
        loss = loss + 1e-3 * (_masked_sum(divergence, mask) / tokens)
    return loss


def _clipped_loss(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, tokens: int
) -> torch.Tensor:
    """compute_policy_loss_vanilla, with the numbers that it tells."""
    difference = torch.clamp(log_probs - old, min=_LEAST, max=_MOST)
    ratio = torch.exp(difference)
    divergence = _masked_sum(-difference, mask) / mask.sum()
    plain, clipped = -advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)
    losses = torch.maximum(plain, clipped)
    _told(torch.gt(clipped, plain).float(), mask)
    most = -advantages * 3.0
    lower = torch.min(most, losses)
    _told(torch.gt(losses, most) * (advantages < 0).float(), mask)
    loss = _masked_sum(torch.where(advantages < 0, lower, losses), mask) / tokens
    float(divergence.detach())
    return loss


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (torch.where(mask, values, 0.0) * mask).sum()


def _told(values: torch.Tensor, mask: torch.Tensor) -> None:
    """A mean that verl puts into its log."""
    float((_masked_sum(values, mask) / mask.sum()).detach())
