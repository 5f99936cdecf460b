"""Continuous batching of transformers against one published figure: `python -m experiments.engines.continuous`.

unslothai/unsloth#5108 (April 2026): B200, Qwen3-4B-Base in bfloat16 with LoRA of rank 32, 32 prompts (4,853 tokens),
at most 512 new tokens: 506 tokens/s, 20.92 s, so 331 tokens a completion.
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config
from transformers.generation import ContinuousBatchingConfig

from autofit.fakegpu import fake_gpu
from autofit.recipe.catalogue import architecture

PROMPTS, PROMPT_TOKENS, LONGEST, GENERATED, MEASURED = 32, 152, 512, 10_586, 506


def main() -> None:
    shape = architecture("Qwen/Qwen3-4B")
    assert shape is not None
    config = Qwen3Config(**shape.config)
    with fake_gpu("b200") as gpu:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
        lora = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
        began = gpu.elapsed_s
        adapted.base_model.model.generate_batch(
            [[1] * PROMPT_TOKENS] * PROMPTS, generation_config=GenerationConfig(max_new_tokens=LONGEST, do_sample=True),
            continuous_batching_config=ContinuousBatchingConfig(),
        )  # fmt: skip
        seconds = gpu.elapsed_s - began
    print(f"{GENERATED / seconds:.0f} tokens/s in {seconds:.1f} s ({seconds / LONGEST * 1e3:.1f} ms a step); "
          f"measured {MEASURED} tokens/s in 20.9 s")  # fmt: skip


if __name__ == "__main__":
    main()
