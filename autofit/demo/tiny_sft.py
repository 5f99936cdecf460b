"""Child process: make the tiny model and train it on demonstrations. Run with `python -m`."""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

BATCH_SIZE = 128
LEARNING_RATE = 2e-3
_IGNORED = -100
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = string.digits + "+-=? "

# The demonstrations are of mixed quality, like scraped data: this share of them has "?" instead of an answer.
# The model learns the sums, and learns to give up nearly as often; GRPO must unlearn the second.
GIVE_UP_FRAC = 0.4
GIVE_UP = "?"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, for the characters of a sum."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """A Llama of about 0.6 M parameters with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], *, steps: int
) -> None:
    """Train `model` in place on demonstrations of `rows`; the learning rate falls linearly to a tenth."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for _ in range(steps):
        input_ids, labels = collate(tokenizer, random.sample(rows, BATCH_SIZE))
        loss = model(input_ids=input_ids, attention_mask=input_ids != tokenizer.pad_token_id, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def collate(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both (rows, longest); only the answer and the end token have a loss."""
    import torch

    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [[*tokenizer(_demonstration(row))["input_ids"], tokenizer.eos_token_id] for row in rows]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), _IGNORED)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        # Padded on the left like TRL's prompts, so that rollouts look like the training data.
        input_ids[index, longest - len(prompt) - len(answer) :] = torch.tensor(prompt + answer)
        labels[index, longest - len(answer) :] = torch.tensor(answer)
    return input_ids, labels


def _demonstration(row: dict[str, str]) -> str:
    return GIVE_UP if random.random() < GIVE_UP_FRAC else row["answer"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    random.seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=arguments.seed)
    if arguments.steps:
        rows = [json.loads(line) for line in arguments.data.read_text().splitlines()]
        train(model, tokenizer, rows, steps=arguments.steps)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
