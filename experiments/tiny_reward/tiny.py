"""A tiny model that solves part of a task, and a GRPO recipe that improves it within one or two minutes.

Run with `python -m`, as a child process, it makes the model and trains it on demonstrations.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.demo.smollm2 import (
    DATASET_SEED,
    REWARD,
    Problem,
    Progress,
    Prompt,
    Recipe,
    chain_sums,
    ensure_built,
    locked_cache,
    recipe_text,
    run_module,
    write_splits,
)
from autofit.files import write_atomically

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DEFAULT_SFT_STEPS = 300


def _quiet(_: str) -> None:
    """Discard the progress message."""


def prepare_tiny(
    cache_dir: Path, *, seed: int = 0, sft_steps: int = DEFAULT_SFT_STEPS, progress: Progress = _quiet
) -> Path:
    """The path of a recipe for `trl grpo --config`, with its model (under 1 M parameters) and data in `cache_dir`.

    The model is first trained for `sft_steps` steps on demonstrations, some of them without an answer; with 0 it keeps
    its random weights.
    """
    cache_dir = cache_dir.expanduser().resolve()
    name = f"tiny-seed{seed}-sft{sft_steps}"
    with locked_cache(cache_dir, progress=progress):
        data = ensure_built(cache_dir / "chain-sum-bare", _build_data, needed_bytes=10_000_000, progress=progress)
        model = ensure_built(
            cache_dir / name,
            partial(_build_model, data=data, seed=seed, sft_steps=sft_steps, progress=progress),
            needed_bytes=10_000_000,
            progress=progress,
        )
        recipe = cache_dir / f"{name}-grpo.yaml"
        write_atomically(recipe, recipe_text(tiny_recipe(model=model, data=data, seed=seed)))
    return recipe


def _build_data(folder: Path) -> None:
    problems = chain_sums(max_terms=3, draws=20_000, seed=DATASET_SEED)
    write_splits(folder, problems, held_out=400, prompt=bare_prompt)


def _build_model(folder: Path, *, data: Path, seed: int, sft_steps: int, progress: Progress) -> None:
    progress(f"training the tiny model on demonstrations, once ({sft_steps} steps)")
    options = {"--data": str(data / "train.jsonl"), "--seed": str(seed), "--steps": str(sft_steps)}
    arguments = [word for pair in options.items() for word in pair]
    run_module("experiments.tiny_reward.tiny", [str(folder), *arguments], timeout_s=900)


def tiny_recipe(*, model: Path, data: Path, seed: int) -> Recipe:
    """GRPO on the tiny model: 256 completions of at most 5 characters per step."""
    return {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "dataset_name": str(data),
        "reward_funcs": [REWARD],
        "output_dir": f"outputs/tiny-chain-sum-{seed}",
        "per_device_train_batch_size": 128,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "num_generations": 8,
        "max_completion_length": 5,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "learning_rate": 1.0e-3,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "max_steps": 100,
        "use_peft": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": seed,
    }


def bare_prompt(problem: Problem) -> Prompt:
    """The prompt for the tiny model, whose vocabulary has digits and signs only."""
    return f"{problem.expression} ="


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
