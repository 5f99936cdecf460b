"""A plain training loop of a row, as a user would write it: `python loop.py FOLDER`, which has row.json and model/.

It runs under `autofit fit-check`, and mem_tracker.py runs the same functions.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM


def told(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((folder / "row.json").read_text(encoding="utf-8")))


def built(row: SimpleNamespace, folder: Path) -> Any:
    """The model with its adapters, on no card yet."""
    config = AutoConfig.from_pretrained(folder / "model")
    config.use_cache = row.cache
    kind = AutoModelForCausalLM if row.task == "causal" else AutoModel
    dtype = torch.bfloat16 if row.precision == "bf16" else torch.float32
    attention = "sdpa" if row.attention == "flash_attention_2" else row.attention
    model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    if row.method != "full":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=row.lora_r, lora_alpha=2 * row.lora_r, lora_dropout=row.lora_dropout, target_modules=row.lora_targets
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=row.adapter == "float32")
    if row.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def stepper(row: SimpleNamespace, model: Any, device: str) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """The optimizer, and a function that does one step on random tokens."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=True)
    ids = torch.randint(0, model.config.vocab_size - 1, (row.micro_batch, row.tokens), device=device)
    amp = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(row.precision)

    def step() -> None:
        for _ in range(row.accumulation):
            micro_step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not row.keeps_gradients)

    def micro_step() -> None:
        with torch.autocast(device, dtype=amp) if amp else contextlib.nullcontext():
            out = model(input_ids=ids, labels=ids) if row.task == "causal" else model(input_ids=ids)
            loss = out.loss if row.task == "causal" else out.last_hidden_state.float().pow(2).mean()
        loss.backward()
        del out, loss

    return optimizer, step


def main() -> None:
    folder = Path(sys.argv[1])
    row = told(folder)
    model: Any = built(row, folder).cuda()
    _, step = stepper(row, model, "cuda")
    for _ in range(3):
        step()


if __name__ == "__main__":
    main()
