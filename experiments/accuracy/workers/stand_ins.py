"""Stand-ins for what the hub has and this machine has not: tokenizers, weights and texts of chosen lengths.

Their contents decide no byte: weights are fake, and a text of n words is n tokens.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

WORD = "a"


def words(count: int) -> str:
    """A text of `count` tokens of the stand-in tokenizer."""
    return " ".join([WORD] * count)


def tokenizer(*, vocabulary: int, eos_id: int) -> object:
    """A fast tokenizer of transformers that makes one token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {0: WORD, 1: "<unk>", eos_id: "<eos>"}
    known = {names.get(number, f"<{number}>"): number for number in range(vocabulary)}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", unk_token="<unk>")


def write_checkpoint(folder: Path, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A folder that `from_pretrained` loads: the config, and a sparse safetensors file of bfloat16 zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
