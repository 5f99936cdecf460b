"""A model folder without weights and data of long and short rows, for LLaMA-Factory and autofit alike."""

import json
from pathlib import Path

WORDS = 3000
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")


def write_model(folder: Path) -> None:
    """Qwen3-4B's config.json with a tokenizer of words: a row has as many tokens as words, and its template's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=40960, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip


def write_data(folder: Path) -> None:
    """Rows of each kind of data, every second one cut at `cutoff_len` and the others shorter: batches are padded."""
    folder.mkdir()

    def words(start: int, count: int) -> str:
        return " ".join(f"w{(start + i) % WORDS}" for i in range(count))

    rows = range(64)
    asked: list[dict[str, object]] = [{"instruction": words(i, 1500 if i % 2 else 300), "input": ""} for i in rows]
    data: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {
        "sft": ({}, [row | {"output": words(7 * i, 1500)} for i, row in enumerate(asked)]),
        "text": ({"columns": {"prompt": "text"}}, [{"text": words(i, 3000 if i % 2 else 1500)} for i in rows]),
        "pairs": (
            {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
            [row | {"chosen": words(7 * i, 1500), "rejected": words(5 * i, 1500)} for i, row in enumerate(asked)],
        ),
        "marked": (
            {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "label"}},
            [row | {"output": words(7 * i, 1500), "label": bool(i % 4 < 2)} for i, row in enumerate(asked)],
        ),
    }
    known: dict[str, object] = {}
    for name, (said, lines) in data.items():
        (folder / f"{name}.json").write_text(json.dumps(lines), encoding="utf-8")
        known[name] = {"file_name": f"{name}.json", **said}
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
