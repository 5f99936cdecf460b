"""A tiny model, dataset and recipe for tests: real files that TRL's own script runs in seconds."""

import json
from collections.abc import Callable
from pathlib import Path

import yaml

WORDS = 60


def write_model(folder: Path, *, hidden: int = 32, layers: int = 2) -> Path:
    """A random Llama of a few thousand parameters with a word-level tokenizer, saved as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = [f"t{i}" for i in range(WORDS - 3)] + ["<eos>", "<pad>", "<unk>"]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=WORDS - 3, pad_token_id=WORDS - 2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_dataset(path: Path, *, rows: int = 24) -> Path:
    """Prompts of 1 to 7 words; the longest is row 6."""
    lines = [json.dumps({"prompt": " ".join(f"t{(i + j) % 9}" for j in range(1 + i % 7)), "answer": "t1"})
             for i in range(rows)]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


ROWS: dict[str, Callable[[int], dict[str, object]]] = {  # a row of i words more than the shortest
    "sft": lambda i: {"prompt": "t1 t2", "completion": " " + _words(i)},
    "dpo": lambda i: {"prompt": "t1 t2", "chosen": " " + _words(i), "rejected": " t4"},
    "reward": lambda i: {"chosen": _words(i), "rejected": "t4 t5"},
    "hf": lambda i: {"prompt": "t1 t2", "completion": " " + _words(i)},
}
ROWS |= dict.fromkeys(("hf reward", "hf rerank"), ROWS["reward"])
ROWS["hf embed"] = lambda i: {"chosen": _words(i), "rejected": _words(i + 1)}
ROWS |= {f"hf {objective}": ROWS["dpo"] for objective in ("dpo", "orpo")}
ROWS["hf classify"] = lambda i: {"text": _words(i), "label": i % 7 % 2}
ROWS["hf kto"] = lambda i: {**ROWS["sft"](i), "label": i % 3 > 0}


def _words(i: int) -> str:
    return " ".join(f"t{(i + j) % 9}" for j in range(1 + i % 7))


def write_offline_recipe(trainer: str, folder: Path, model: Path, **changes: object) -> Path:
    """A recipe of a trainer on samples over files in `folder`, with `changes` laid over it (None removes a key)."""
    data = folder / "data" / "train.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    row = ROWS.get(f"{trainer} {changes.get('objective')}") or ROWS[trainer]
    data.write_text("".join(json.dumps(row(i)) + "\n" for i in range(24)))
    values: dict[str, object] = {
        "model_name_or_path": str(model), "dataset_name": str(folder / "data"), "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 32, "max_steps": 4,
        "learning_rate": 1e-3, "use_peft": True, "lora_r": 4, "lora_alpha": 8, "bf16": False, "report_to": "none",
        "logging_steps": 1, "seed": 7, **({"lora_task_type": "SEQ_CLS"} if trainer == "reward" else {}),
    }  # fmt: skip
    values |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


REWARD = '''"""Rewards for the tests."""

def share_of_t1(completions, **kwargs):
    return [c.split().count("t1") / max(1, len(c.split())) for c in completions]
'''


def write_recipe(folder: Path, model: Path, **changes: object) -> Path:
    """A GRPO recipe over files in `folder`, with `changes` laid over it (None removes a key)."""
    (folder / "tiny_rewards.py").write_text(REWARD)
    write_dataset(folder / "data" / "train.jsonl")
    values: dict[str, object] = {
        "model_name_or_path": str(model), "dataset_name": str(folder / "data"),
        "reward_funcs": ["tiny_rewards.share_of_t1"], "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 8, "max_steps": 4, "learning_rate": 1e-3, "use_peft": True, "lora_r": 4,
        "lora_alpha": 8, "bf16": False, "logging_steps": 1, "report_to": "none", "seed": 7,
    }  # fmt: skip
    values |= changes
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path
