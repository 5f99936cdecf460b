"""Estimate each lever of docs/levers.md alone, and keep the figures in docs/levers.json.

    python docs/levers.py [BASE ...]          then: python docs/tables.py

A base is a recipe on a simulated card; a lever is one change of it, as `--set` makes it. Figures are predictions: no
GPU is used. A lever that does not fit has the bytes of the smallest card that would do.
"""

import datetime
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import autofit
from autofit.errors import AutofitError

HERE = Path(__file__).parent
FILE = HERE / "levers.json"
VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
Change = dict[str, object]
Row = dict[str, Any]

GRPO: list[tuple[str, str, Change]] = [  # the words for a reader, the tier, what changes
    ("micro-batch 8 -> 2, accumulation x 4", "neutral",
     {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16, "steps_per_generation": 16}),
    ("micro-batch 8 -> 32, accumulation / 4", "neutral",
     {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "steps_per_generation": 1}),
    ("generate 8 completions at a time, not 32", "neutral", {"steps_per_generation": 1}),
    ("activation_checkpointing off", "neutral", {"activation_checkpointing": False}),
    ("expandable_segments on", "neutral", {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("attn_implementation eager", "neutral", {"model_init_kwargs.attn_implementation": "eager"}),
    ("dtype float32, TRL's default", "approximate", {"dtype": "float32"}),
    ("optim adamw_8bit", "approximate", {"optim": "adamw_8bit"}),
    ("vLLM on the same card, asleep in the update", "approximate",
     {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4, "vllm_enable_sleep_mode": True,
      "vllm_max_model_length": 1024}),
    ("continuous batching of transformers", "approximate", {"use_transformers_continuous_batching": True}),
    ("load_in_4bit", "recipe", {"load_in_4bit": True}),
    ("lora_r 16 -> 64", "recipe", {"lora_r": 64}),
    ("all weights trained, not LoRA", "recipe", {"use_peft": False}),
    ("max_completion_length 512 -> 1024", "recipe", {"max_completion_length": 1024}),
    ("beta 0 -> 0.04", "recipe", {"beta": 0.04}),
]  # fmt: skip
SFT: list[tuple[str, str, Change]] = [
    ("micro-batch 2 -> 1, accumulation x 2", "neutral",
     {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}),
    ("micro-batch 2 -> 8, accumulation / 4", "neutral",
     {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
    ("activation_checkpointing off", "neutral", {"activation_checkpointing": False}),
    ("activation_offloading on, checkpointing off", "neutral",
     {"activation_offloading": True, "activation_checkpointing": False}),
    ("expandable_segments on", "neutral", {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ("attn_implementation eager", "neutral", {"model_init_kwargs.attn_implementation": "eager"}),
    ("dtype float32, TRL's default", "approximate", {"dtype": "float32"}),
    ("optim adamw_8bit", "approximate", {"optim": "adamw_8bit"}),
    ("load_in_4bit", "recipe", {"load_in_4bit": True}),
    ("load_in_8bit", "recipe", {"load_in_8bit": True}),
    ("lora_r 16 -> 64", "recipe", {"lora_r": 64}),
    ("max_length 2048 -> 4096", "recipe", {"max_length": 4096}),
    ("all weights trained, not LoRA", "recipe", {"use_peft": False}),
    ("all weights, optim adamw_8bit", "recipe", {"use_peft": False, "optim": "adamw_8bit"}),
]  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "grpo": {
        "trainer": "grpo", "gpu": "a100-80gb", "prompt_tokens": 512, "levers": GRPO,
        "recipe": {
            "model_name_or_path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16", "loss_type": "grpo", "num_generations": 8,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_completion_length": 512,
            "use_peft": True, "lora_r": 16, "reward_funcs": ["accuracy_reward"],
        },
    },
    "sft": {
        "trainer": "sft", "gpu": "a100-80gb", "prompt_tokens": 2048, "levers": SFT,
        "recipe": {
            "model_name_or_path": "Qwen/Qwen3-8B", "dtype": "bfloat16", "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8, "max_length": 2048, "use_peft": True, "lora_r": 16,
        },
    },
}  # fmt: skip


def figures(base: dict[str, Any], changes: Change) -> Row:
    """Bytes, seconds and verdict of a base with these changes; `error` where it cannot be."""
    longer = {"prompt_tokens": changes["max_length"]} if "max_length" in changes else {}
    try:
        found = autofit.estimate(
            base["recipe"],
            trainer=base["trainer"],
            gpu=base["gpu"],
            changes=changes,
            advice=False,
            **{"prompt_tokens": base["prompt_tokens"], **longer},
        )
    except AutofitError as error:
        return {"error": str(error)}
    return {
        "fits": found.fits,
        "device_used_bytes": found.device_used_bytes if found.fits else found.least_capacity_bytes,
        "step_s": found.step_s,
    }


def estimated(name: str, known: Sequence[Row]) -> Iterator[Row]:
    """The figures of a base and of each of its levers; those of `known` are not made again."""
    base = BASES[name]
    had = {row["lever"]: row for row in known}
    for words, tier, changes in [("as it is", "", {}), *base["levers"]]:
        said: Row = {"lever": words, "tier": tier, "changes": changes}
        old = had.get(words, {})
        yield old if said.items() <= old.items() else {**said, **figures(base, changes)}


def main(names: Sequence[str]) -> None:
    """Estimate the bases of these names, or all, and write the file after each row; delete it to begin anew."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"bases": {}}
    for name in names or BASES:
        stated = {key: BASES[name][key] for key in ("trainer", "gpu", "prompt_tokens", "recipe")}
        rows: list[Row] = []
        for row in estimated(name, kept["bases"].get(name, {}).get("rows", [])):
            print(row, flush=True)
            rows.append(row)
            kept["date"] = str(datetime.date.today())
            kept["versions"] = {package: importlib.metadata.version(package) for package in VERSIONS}
            whole = {**kept, "bases": {**kept["bases"], name: {**stated, "rows": rows}}}
            FILE.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        kept["bases"][name] = {**stated, "rows": rows}


if __name__ == "__main__":
    main(sys.argv[1:])
