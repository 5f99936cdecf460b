"""A model folder without weights, a small one with them, and data of long and short rows, for each tool and autofit."""

import json
from collections.abc import Iterable
from pathlib import Path

WORDS = 3000
SPECIAL = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
ROWS = range(64)
LONGEST = 2024  # words of an answer that make 2,048 tokens with four of a question in the template of ms-swift


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


def write_weights(model: Path, folder: Path) -> None:
    """A small Qwen3 with weights and the tokenizer of `model`: ms-swift loads a checkpoint."""
    import torch
    from transformers import AutoTokenizer
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=32000, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def _words(start: int, count: int) -> str:
    return " ".join(f"w{(start + i) % WORDS}" for i in range(count))


def write_data(folder: Path) -> None:
    """Rows of each kind of data: the longest as long as a case allows, the others shorter, so that rows are padded."""
    folder.mkdir()
    _write_files(folder)
    _write_lines(folder)


def _write_files(folder: Path) -> None:
    """LLaMA-Factory's: it cuts the long rows at `cutoff_len`."""
    asked: list[dict[str, object]] = [{"instruction": _words(i, 1500 if i % 2 else 300), "input": ""} for i in ROWS]
    data: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {
        "sft": ({}, [row | {"output": _words(7 * i, 1500)} for i, row in enumerate(asked)]),
        "text": ({"columns": {"prompt": "text"}}, [{"text": _words(i, 3000 if i % 2 else 1500)} for i in ROWS]),
        "pairs": (
            {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
            [row | {"chosen": _words(7 * i, 1500), "rejected": _words(5 * i, 1500)} for i, row in enumerate(asked)],
        ),
        "marked": (
            {"columns": {"prompt": "instruction", "response": "output", "kto_tag": "label"}},
            [row | {"output": _words(7 * i, 1500), "label": bool(i % 4 < 2)} for i, row in enumerate(asked)],
        ),
    }
    known: dict[str, object] = {}
    for name, (said, rows) in data.items():
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        known[name] = {"file_name": f"{name}.json", **said}
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")


def _write_lines(folder: Path) -> None:
    """ms-swift's: it leaves out rows longer than `max_length`, so the longest are just as long."""

    def talk(i: int) -> list[dict[str, str]]:
        answer = _words(7 * i, LONGEST if i % 4 else LONGEST - 100)
        return [{"role": "user", "content": _words(i, 4)}, {"role": "assistant", "content": answer}]

    def lines(name: str, rows: Iterable[dict[str, object]]) -> None:
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")

    lines("messages", ({"messages": talk(i)} for i in ROWS))
    lines("preferences", ({"messages": talk(i), "rejected_response": _words(5 * i, LONGEST - 10)} for i in ROWS))
    lines("judged", ({"messages": talk(i), "label": bool(i % 4 < 2)} for i in ROWS))
