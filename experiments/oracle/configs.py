"""What the oracle compares: the campaign's configurations, and what it lacks of the spaces' values, and two ranks."""

from typing import Any

from gpu.configs import CONFIGS, LORA, generating, samples

_SMALL, _MIDDLE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-1.7B"
_OFF: dict[str, Any] = {"gradient_checkpointing": False}
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}

_MORE = (
    *(samples(f"optim-{name}", "sft", _SMALL, 2048, (4, 1), f"{name}", optim=name)
      for name in ("adamw_torch", "sgd", "paged_adamw_8bit", "lion_8bit", "adagrad")),
    samples("r-optim", "reward", _SMALL, 1024, (4, 1), "8-bit Adam", optim="adamw_8bit"),
    samples("d-4bit", "dpo", _MIDDLE, 1024, (2, 1), "4-bit weights", load_in_4bit=True, **LORA),
    samples("r-8bit", "reward", _MIDDLE, 1024, (2, 1), "8-bit weights", load_in_8bit=True, **LORA),
    generating("l-4bit", _SMALL, 512, 64, (8, 1, 1), "4-bit weights", trainer="rloo", load_in_4bit=True, **LORA),
    samples("d-4bit-double", "dpo", _SMALL, 1024, (2, 1), "4-bit, twice quantised", load_in_4bit=True,
            use_bnb_nested_quant=True, **LORA),
    samples("e-lora", "sft", _MIDDLE, 1024, (2, 1), "eager attention", **LORA, **_EAGER),
    samples("e-dpo", "dpo", _SMALL, 512, (2, 1), "eager attention", **_EAGER),
    generating("e-grpo", _SMALL, 512, 64, (8, 1, 1), "eager attention", **LORA, **_EAGER),
    samples("fp32", "sft", _SMALL, 1024, (4, 1), "float32: efficient attention", dtype="float32", bf16=False),
    samples("fp16", "sft", _SMALL, 1024, (4, 1), "float32 weights under float16", dtype="float32", bf16=False,
            fp16=True),
    samples("dpo-off", "dpo", _SMALL, 512, (4, 1), "full, precomputed", precompute_ref_log_probs=True, **_OFF),
    samples("packed", "sft", _SMALL, 2048, (2, 1), "packed samples", packing=True, padding_free=True,
            packing_strategy="wrapped", **LORA),
    samples("untied", "sft", "small-moe", 1024, (2, 1), "untied, no checkpointing", **_OFF),
)  # fmt: skip


_ALL = (*_MORE, *(config for config in CONFIGS if not config.name.startswith("grid-")))
SINGLE = tuple(sorted(_ALL, key=lambda config: config.trainer in ("grpo", "rloo")))  # a rollout takes a minute or more
