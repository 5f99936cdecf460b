"""Rewards by hidden states, as Axolotl's structured energy-based fine-tuning has them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from autofit.errors import ConfigError
from autofit.trainers.features import Features
from autofit.trainers.grpo import TRAINER
from autofit.trainers.offline import FEATURES, overrides


def trainer(*, lora: bool) -> Any:
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    )
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    accelerator = SimpleNamespace(unwrap_model=lambda found: found, device=torch.device("cpu"))
    return SimpleNamespace(model=model, accelerator=accelerator, num_generations=2)


@pytest.mark.parametrize("whitening", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_texts_and_true_answers_go_through_the_model_and_with_an_adapter_through_its_head(
    lora: bool, whitening: bool
) -> None:
    own, heads = trainer(lora=lora), list[tuple[int, ...]]()
    reward = Features(whitening=whitening)
    reward.bound(own, tokens=3000)
    assert (reward.copy is None) == lora
    for model in filter(None, (own.model, reward.copy)):
        model.get_output_embeddings().register_forward_hook(lambda _, __, out: heads.append(tuple(out.shape)))
    own.model.train()
    assert len(reward(completions=["a"] * 4)) == 4
    assert heads == ([(4, 2048, 64), (2, 2048, 64)] if lora else [])  # cut to 2,048 tokens; logits of all
    assert own.model.training


def test_they_are_kept_in_a_simulation_and_refused_in_a_run(tmp_path: Any) -> None:
    (tmp_path / "made_up_samples").mkdir()
    found = overrides({"reward_funcs": [FEATURES[0], "mine.exact"]}, tmp_path)
    assert found["reward_funcs"] == [FEATURES[0], "autofit.trainers.offline.no_reward"]
    config: Any = SimpleNamespace(script=SimpleNamespace(reward_funcs=[FEATURES[0]], reward_model_name_or_path=None))
    with pytest.raises(ConfigError, match="rewards by features are simulated and not run"):
        TRAINER.real(config)
