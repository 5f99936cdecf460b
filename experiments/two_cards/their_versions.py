"""A row with the libraries of the measurements: `python -m experiments.two_cards.their_versions ROW OUT`.

Install them in a folder and put it first on PYTHONPATH: pip install --no-deps --target FOLDER transformers==4.48.1
accelerate==1.0.1 peft==0.13.2 tokenizers==0.21.0 huggingface_hub==0.36.0. Newer libraries that these versions would
import, and cannot, are hidden; flash-attn is torch's copy of its kernel.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

HIDDEN = ("datasets", "trl", "mlflow", "deepspeed")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """flash_attn_func: (batch, tokens, heads, size) in and out; fewer heads of k and v are not repeated."""
    lengths = q.shape[1], k.shape[1]
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, *lengths, dropout_p, causal, False, scale=softmax_scale
    )[0]
    return found


def unused(*_: Any, **__: Any) -> None:
    raise NotImplementedError("packed samples need no padding")


def provide(name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(functions)
    sys.modules[name] = module


def prepare() -> None:
    """Must be called before transformers is imported."""
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in HIDDEN else found(name, *rest)
    provide("flash_attn", flash_attn_func=attention, flash_attn_varlen_func=unused, __version__="2.7.0")
    provide("flash_attn.bert_padding", index_first_axis=unused, pad_input=unused, unpad_input=unused)
    provide("flash_attn.layers")
    provide("flash_attn.layers.rotary", apply_rotary_emb=unused)
    version, metadata = importlib.metadata.version, cast(Any, importlib.metadata)
    metadata.version = lambda name: "2.7.0" if name == "flash_attn" else version(name)
    import transformers.utils
    import transformers.utils.import_utils as choices

    transformers.utils.is_flash_attn_2_available = choices.is_flash_attn_2_available = lambda: True


if __name__ == "__main__":
    prepare()
    from experiments.two_cards.program import run
    from experiments.two_cards.rows import rows

    chosen = next(row for row in rows() if row.name == sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(run(chosen), indent=1), encoding="utf-8")
