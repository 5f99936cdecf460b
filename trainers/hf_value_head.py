"""A causal model with a value head: the reward model that LLaMA-Factory trains."""

from typing import Any

import torch


class WithValueHead(torch.nn.Module):
    """A causal model and a linear head on its last hidden states: a value for each token.

    TRL's AutoModelForCausalLMWithValueHead (models/modeling_value_head.py of TRL 0.24), which LLaMA-Factory wraps its
    model in: the model makes all hidden states, the logits of all words and their loss too, and the logits are cast to
    float32.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.dropout = torch.nn.Dropout(0.1)
        self.v_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(logits (B, T, V) in float32, the causal model's loss if there are labels, values (B, T))."""
        found = self.pretrained_model(**inputs, output_hidden_states=True, use_cache=False)
        hidden = self.dropout(found.hidden_states[-1]).to(self.v_head.weight.dtype)
        values = self.v_head(hidden).squeeze(-1)
        return found.logits.float(), found.loss, values

    def __getattr__(self, name: str) -> Any:
        """What a Trainer asks a model of transformers is asked of the causal model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("pretrained_model"), name)
