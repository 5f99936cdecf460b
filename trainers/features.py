"""Rewards of a GRPO trainer by hidden states of the model itself, as Axolotl's structured EBFT has them. Imports torch.

Read in Axolotl at 067b021c, core/trainers/ebft/trainer.py and rewards.py: prompts with completions, and those with the
true answers, go through the model without its adapter, or through a frozen copy of it; three layers' hidden states are
kept. Of a model with an adapter the head makes logits too, because `model.model` of PEFT's model is the whole causal
model; of one without it is the layers alone. Simulated only: a run needs the true answers and Axolotl's collator.
"""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, normalize

LAYERS = (0.25, 0.5, 0.75)  # of all, whose states are kept
_MOST = 2048  # tokens of a text (max_seq_length in core/training_args_base.py)
_TOKEN = 1
_LEAST = 1e-5  # a singular value below this share of the largest counts as none


class Features:
    """A reward function of the trainer that it is bound to; every text has the tokens of a prompt and a completion."""

    def __init__(self, *, whitening: bool) -> None:
        self.__name__ = "whitened_features" if whitening else "features"
        self.whitening = whitening
        self.trainer: Any = None

    def bound(self, trainer: Any, tokens: int) -> None:
        """Take `trainer`, and a frozen copy of its model where that has no adapter, for texts of `tokens` tokens."""
        self.trainer, self.tokens = trainer, min(tokens, _MOST)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.shared = hasattr(model, "disable_adapter")
        self.copy = None if self.shared else copy.deepcopy(model).requires_grad_(False).eval()
        layers = model.config.get_text_config().num_hidden_layers
        self.places = [int(part * layers) for part in LAYERS]

    @torch.no_grad()
    def __call__(self, completions: list[object], **_: object) -> list[float]:
        assert self.trainer is not None
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model) if self.shared else self.copy
        samples = int(self.trainer.num_generations)
        with model.disable_adapter() if self.shared else nullcontext():
            trains = model.training
            model.eval()
            own = self._states(model, len(completions))
            true = self._states(model, len(completions) // samples)
            model.train(trains)
        own, true = own[:, -1], true[:, -1]
        if self.whitening:
            pairs = [whitened(part, true[i : i + 1]) for i, part in enumerate(own.view(-1, samples, own.shape[-1]))]
            own, true = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        else:
            own, true = normalize(own, p=2, dim=-1), normalize(true, p=2, dim=-1)
        alike = cosine_similarity(own, true.repeat_interleave(samples, dim=0), dim=-1)
        grouped = own.view(-1, samples, own.shape[-1])
        among = torch.bmm(grouped, grouped.transpose(1, 2)).sum(-1).view(-1) / max(1, samples - 1)
        rewards: list[float] = (2 * alike - 2 * among).cpu().tolist()
        return rewards

    def _states(self, model: Any, texts: int) -> torch.Tensor:
        """Hidden states of some layers, side by side (texts, tokens, layers x hidden)."""
        ids = torch.full((texts, self.tokens), _TOKEN, device=self.trainer.accelerator.device)
        body = getattr(model, "model", None) or model
        outputs = body(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, return_dict=True)
        chosen = torch.cat([outputs.hidden_states[place] for place in self.places], dim=-1)
        return torch.cat([chosen], dim=0)  # one more copy, as Axolotl joins its batches


def whitened(own: torch.Tensor, true: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sets of vectors (samples, D) without the correlation of the first, by its singular vectors."""
    wide, other = own.float(), true.float()
    vectors, sizes, _ = torch.linalg.svd(wide.T.unsqueeze(0), full_matrices=False)
    vectors, sizes = vectors.squeeze(0), sizes.squeeze(0)
    inverse = torch.where(sizes > _LEAST * sizes.max(), 1.0 / (sizes + 1e-12), torch.zeros_like(sizes))
    weights = (vectors * inverse.unsqueeze(0)) @ vectors.T
    return (wide @ weights).to(own.dtype), (other @ weights).to(true.dtype)


features, whitened_features = Features(whitening=False), Features(whitening=True)
