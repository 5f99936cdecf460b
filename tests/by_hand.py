"""A TRL trainer in `fake_gpu`, as the script of that TRL makes it: `python -P by_hand.py sft|grpo MODEL OUT`.

MODEL is a folder with weights. Runs beside old libraries too, so nothing but `fake_gpu` is autofit's. Writes peak
bytes: allocated, reserved, device-used.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autofit.fakegpu import fake_gpu

TOKENS, STEPS = {"sft": 128, "grpo": 32}, 2
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True,
    "max_steps": STEPS + 1, "save_strategy": "no", "report_to": "none", "logging_nan_inf_filter": False,
}  # fmt: skip


class Enough(BaseException):
    """The steps are done."""


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "<pad>": 2, "<unk>": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def model_of(folder: str, dtype: torch.dtype) -> Any:
    """The folder, which a trainer loads from; with transformers 4 a model, as fakes are not read from a file there."""
    import transformers

    if not transformers.__version__.startswith("4."):
        return folder
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**json.loads((Path(folder) / "config.json").read_text()))
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in Qwen2ForCausalLM(config).state_dict().items()}
    state = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return Qwen2ForCausalLM.from_pretrained(None, config=config, state_dict=state, torch_dtype=dtype)


def trainer(kind: str, folder: str, output: str) -> Any:
    import transformers
    import trl
    from datasets import Dataset

    tokens = TOKENS[kind]
    rows = [" ".join(["a"] * (tokens - 2 * (number % 2))) for number in range(64)]
    if kind == "sft":
        known = trl.SFTConfig.__dataclass_fields__
        limit = next(name for name in ("max_seq_length", "max_length") if name in known)

        class InOrder(trl.SFTTrainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: object) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

        loading = {} if transformers.__version__.startswith("4.") else {"model_init_kwargs": {"dtype": torch.bfloat16}}
        args = trl.SFTConfig(**COMMON, output_dir=output, **loading, **{limit: tokens})
        data = Dataset.from_dict({"text": rows})
        return InOrder(
            model=model_of(folder, torch.bfloat16), args=args, train_dataset=data, processing_class=tokenizer()
        )
    known = trl.GRPOConfig.__dataclass_fields__
    order = {"shuffle_dataset": False} if "shuffle_dataset" in known else {}
    lengths = {name: tokens for name in ("max_prompt_length", "max_completion_length") if name in known}
    args = trl.GRPOConfig(**COMMON, output_dir=output, num_generations=4, **lengths, **order)
    return trl.GRPOTrainer(
        model=model_of(folder, torch.float32), args=args, train_dataset=Dataset.from_dict({"prompt": rows}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions), processing_class=tokenizer(),
    )  # fmt: skip


def main(kind: str, folder: str, out: str) -> None:
    done = []

    def after_step(*_: object) -> None:
        done.append(1)
        if len(done) == STEPS:
            raise Enough

    with fake_gpu("a100-80gb", enforce_capacity=False) as gpu:
        register_optimizer_step_post_hook(after_step)
        made = trainer(kind, folder, f"{out}.output")
        with contextlib.suppress(Enough):
            made.train()
        found = gpu.peak_allocated_bytes, gpu.peak_reserved_bytes, gpu.device_used_bytes
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
