"""What the oracle compares: the campaign's configurations, and what it lacks of the spaces' values, and two ranks."""

from typing import Any, get_args

from gpu.configs import CONFIGS, LORA, generating, samples
from gpu.ranks import RANKS, Ranks

from autofit.recipe.launch import Sharding

_SMALL, _MIDDLE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-1.7B"
_OFF: dict[str, Any] = {"gradient_checkpointing": False}
_SPLIT = (4, 2, 2)
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


_FLOAT32: dict[str, Any] = {"dtype": "float32"}  # weights in float32 under autocast: "bf16: true" of most tools
_HF = (
    samples("hf-lora", "hf", _MIDDLE, 1024, (4, 2), "LoRA", **LORA),
    samples("hf-lora-plain", "hf", _MIDDLE, 1024, (4, 2), "LoRA, no checkpointing", **LORA, **_OFF),
    samples("hf-lora-f32", "hf", _SMALL, 1024, (4, 2), "LoRA in float32", adapter_dtype="float32", **LORA),
    samples("hf-qlora", "hf", _MIDDLE, 1024, (4, 2), "4-bit weights, LoRA in float32", load_in_4bit=True,
            adapter_dtype="float32", **LORA),
    samples("hf-8bit", "hf", _SMALL, 1024, (2, 2), "8-bit weights", load_in_8bit=True, **LORA),
    samples("hf-full", "hf", _SMALL, 1024, (4, 2), "float32 weights under autocast", **_FLOAT32),
    samples("hf-bf16", "hf", _SMALL, 1024, (4, 2), "pure bfloat16, 8-bit Adam", optim="adamw_8bit"),
    samples("hf-adafactor", "hf", _SMALL, 1024, (4, 1), "Adafactor", optim="adafactor"),
    samples("hf-packed", "hf", _SMALL, 2048, (2, 2), "packed", packing=True, **LORA),
    samples("hf-apart", "hf", _SMALL, 2048, (2, 2), "packed, samples apart", packing=True, block_diagonal=True, **LORA),
    samples("hf-cut", "hf", _SMALL, 2048, (4, 2), "Cut Cross-Entropy", cut_cross_entropy=True, **LORA),
    samples("hf-freeze", "hf", _MIDDLE, 1024, (2, 2), "the last 2 layers", trainable_layers=2),
    samples("hf-rest", "hf", _SMALL, 1024, (2, 2), "4 layers spread, and the rest", trainable_layers=4,
            spread_layers=True, trains_rest=True),
    samples("hf-added", "hf", _SMALL, 1024, (2, 2), "4 layers added", added_layers=4),
    samples("hf-dora", "hf", _SMALL, 1024, (4, 2), "DoRA", use_dora=True, **LORA),
    samples("hf-oft", "hf", _SMALL, 1024, (2, 2), "OFT", use_peft=True, peft_adapter={"peft_type": "OFT"}),
    samples("hf-neck", "hf", _SMALL, 1024, (2, 2), "a bottleneck", bottleneck=128),
    samples("hf-reft", "hf", _SMALL, 1024, (2, 2), "LoReFT", reft_rank=4),
    samples("hf-asft", "hf", _SMALL, 1024, (2, 2), "asft", objective="asft", **LORA),
    samples("hf-dpo", "hf", _MIDDLE, 1024, (2, 2), "dpo", objective="dpo", **LORA),
    samples("hf-dpo-f32", "hf", _SMALL, 1024, (2, 2), "logits in float32", objective="dpo", float32_logits=True,
            **LORA),
    samples("hf-dpo-full", "hf", _SMALL, 512, (2, 2), "a reference model", objective="dpo"),
    samples("hf-kto", "hf", _SMALL, 1024, (2, 2), "kto", objective="kto", float32_logits=True, **LORA),
    samples("hf-kto-keeps", "hf", _SMALL, 512, (4, 2), "keeps its logits", objective="kto", keeps_logits=True, **LORA),
    samples("hf-orpo", "hf", _SMALL, 1024, (2, 2), "orpo", objective="orpo", nll_weight=1.0, **LORA),
    samples("hf-simpo", "hf", _SMALL, 1024, (2, 2), "simpo", objective="simpo", float32_logits=True, **LORA),
    samples("hf-cpo", "hf", _SMALL, 1024, (2, 2), "cpo", objective="cpo", nll_weight=1.0, **LORA),
    samples("hf-reward", "hf", _SMALL, 1024, (2, 2), "reward", objective="reward", **LORA),
    samples("hf-value", "hf", _SMALL, 1024, (2, 2), "a head of values", objective="reward", value_head=True, **LORA),
    samples("hf-classes", "hf", _SMALL, 512, (8, 1), "classify", objective="classify", num_labels=5),
    samples("hf-tokens", "hf", _SMALL, 512, (8, 1), "label_tokens", objective="label_tokens", num_labels=9, **LORA),
    samples("hf-gkd", "hf", _SMALL, 512, (2, 2), "learns from itself without the adapter", objective="gkd", **LORA),
    samples("hf-embed", "hf", _SMALL, 256, (16, 1), "embed", objective="embed", **LORA),
    samples("hf-rerank", "hf", _SMALL, 256, (4, 2), "rerank", objective="rerank", negatives=3, **LORA),
    samples("hf-diffusion", "hf", _SMALL, 512, (4, 2), "diffusion", objective="diffusion", **LORA),
    samples("hf-eval", "hf", _SMALL, 1024, (2, 2), "evaluates more than it trains", eval_strategy="steps", eval_steps=1,
            per_device_eval_batch_size=8, **LORA),
    samples("hf-gemma", "hf", "google/gemma-3-1b-it", 1024, (2, 2), "Gemma 3", **LORA),
    samples("hf-gemma2", "hf", "google/gemma-2-2b", 1024, (1, 2), "Gemma 2: soft caps", **_EAGER, **LORA),
    samples("hf-phi", "hf", "microsoft/phi-1_5", 1024, (2, 2), "Phi", use_peft=True, lora_target_modules="all-linear"),
    samples("hf-opt", "hf", "facebook/opt-350m", 1024, (4, 2), "OPT", **_FLOAT32),
    samples("hf-gpt2", "hf", "openai-community/gpt2-medium", 1024, (4, 2), "GPT-2 with dropout", **_FLOAT32),
    samples("hf-neox", "hf", "EleutherAI/pythia-410m", 1024, (4, 2), "GPT-NeoX", **_FLOAT32),
    samples("hf-moe", "hf", "small-moe", 1024, (2, 2), "experts", **_OFF),
    samples("hf-smol", "hf", "HuggingFaceTB/SmolLM3-3B", 2048, (1, 4), "SmolLM3", **LORA),
)  # fmt: skip

_UNTRIED = (  # of 2026-11-28: nothing of it was compared before, whatever it showed
    samples("u-offload", "sft", _MIDDLE, 1024, (2, 2), "activations in host memory", activation_offloading=True,
            **LORA, **_OFF),
    samples("u-dft", "sft", _SMALL, 1024, (4, 2), "loss dft", loss_type="dft", **LORA),
    samples("u-nll", "sft", _SMALL, 1024, (4, 2), "loss nll", loss_type="nll", **LORA),
    samples("u-neft", "sft", _SMALL, 1024, (4, 2), "noise on embeddings", neftune_noise_alpha=5.0, **LORA),
    samples("u-dora", "sft", _MIDDLE, 1024, (2, 2), "DoRA", use_dora=True, **LORA),
    samples("u-dora-4bit", "sft", _SMALL, 1024, (2, 2), "DoRA on 4 bits", use_dora=True, load_in_4bit=True, **LORA),
    samples("u-rslora", "sft", _SMALL, 1024, (2, 2), "rank 256", **LORA | {"lora_r": 256, "use_rslora": True}),
    samples("u-heads", "sft", _SMALL, 1024, (2, 2), "embeddings and head beside LoRA",
            lora_modules_to_save=["embed_tokens", "lm_head"], **LORA),
    samples("u-reentrant", "sft", _MIDDLE, 1024, (2, 2), "reentrant checkpointing",
            gradient_checkpointing_kwargs={"use_reentrant": True}, **LORA),
    samples("u-bfd", "sft", _SMALL, 2048, (2, 2), "packed by best fit", packing=True, **LORA),
    samples("u-free", "sft", _SMALL, 1024, (4, 2), "padding-free", padding_free=True, max_length=None, **LORA),
    samples("u-experts", "sft", "small-moe", 1024, (2, 2), "LoRA on experts", use_peft=True, lora_r=8,
            lora_target_modules=["q_proj", "v_proj"],
            lora_target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    samples("u-norm", "sft", _SMALL, 1024, (4, 1), "no clipping", max_grad_norm=0.0),
    samples("u-eval", "sft", _SMALL, 1024, (2, 2), "evaluates more than it trains", eval_strategy="steps",
            eval_steps=1, per_device_eval_batch_size=16, **LORA),
    *(samples(f"u-{optim}", "sft", _SMALL, 1024, (4, 1), optim, optim=optim)
      for optim in ("adamw_torch_fused", "rmsprop", "adamw_bnb_8bit", "ademamix", "lion_32bit", "paged_adamw_32bit",
                    "rmsprop_bnb_8bit", "sgd", "adamw_torch_8bit", "adamw_torch_4bit", "stable_adamw")),
    samples("u-phi", "sft", "microsoft/phi-1_5", 1024, (2, 2), "Phi", use_peft=True, lora_target_modules="all-linear"),
    samples("u-gpt2", "sft", "openai-community/gpt2-medium", 1024, (4, 2), "GPT-2"),
    samples("u-neox", "sft", "EleutherAI/pythia-410m", 1024, (4, 2), "GPT-NeoX", **_OFF),
    samples("u-opt", "sft", "facebook/opt-350m", 1024, (4, 2), "OPT", **_OFF),
    samples("u-starcoder", "sft", "bigcode/starcoder2-3b", 1024, (1, 2), "StarCoder 2", use_peft=True,
            lora_target_modules="all-linear"),
    samples("u-gemma2", "sft", "google/gemma-2-2b", 1024, (1, 2), "Gemma 2", **LORA, **_EAGER),
    samples("u-smol", "sft", "HuggingFaceTB/SmolLM3-3B", 2048, (1, 2), "SmolLM3", **LORA, **_OFF),
    samples("u-phi3", "sft", "microsoft/Phi-3-mini-4k-instruct", 1024, (1, 2), "Phi 3", load_in_4bit=True,
            use_peft=True, lora_target_modules="all-linear"),
    *(samples(f"u-dpo-{name}", "dpo", _SMALL, 1024, (2, 2), name, loss_type=loss, **LORA)
      for name, loss in (("ipo", ["ipo"]), ("hinge", ["hinge"]), ("apo", ["apo_zero"]), ("sft", ["sigmoid", "sft"]),
                         ("bco", ["bco_pair"]), ("disco", ["discopop"]))),
    samples("u-dpo-sync", "dpo", _SMALL, 512, (2, 2), "a reference that follows", sync_ref_model=True),
    samples("u-dpo-free", "dpo", _SMALL, 1024, (2, 2), "padding-free", padding_free=True, max_length=None, **LORA),
    samples("u-dpo-weights", "dpo", _SMALL, 1024, (2, 2), "weighted", use_weighting=True, **LORA),
    samples("u-dpo-offload", "dpo", _SMALL, 1024, (2, 2), "activations in host memory", activation_offloading=True,
            **LORA, **_OFF),
    samples("u-reward-centre", "reward", _SMALL, 1024, (4, 1), "centred", center_rewards_coefficient=0.01),
    samples("u-reward-gemma", "reward", "google/gemma-3-1b-it", 1024, (2, 2), "Gemma 3", **LORA),
    *(generating(f"u-grpo-{name}", _SMALL, 256, 64, _SPLIT, why, **more) for name, why, more in (
        ("ref", "full, a reference model", {"beta": 0.04}),
        ("sync", "a reference that follows", {"beta": 0.04, "sync_ref_model": True}),
        ("dapo", "loss dapo", {"loss_type": "dapo", **LORA}),
        ("dr", "loss dr_grpo", {"loss_type": "dr_grpo", **LORA}),
        ("cispo", "loss cispo", {"loss_type": "cispo", **LORA}),
        ("gspo", "weights of whole sequences", {"importance_sampling_level": "sequence", **LORA}),
        ("entropy", "the tokens of most entropy", {"top_entropy_quantile": 0.2, **LORA}),
        ("twice", "two iterations", {"num_iterations": 2, **LORA}),
        ("trunc", "without truncated completions", {"mask_truncated_completions": True, **LORA}),
        ("8bit", "8-bit weights", {"load_in_8bit": True, **LORA}),
        ("offload", "8-bit Adam", {"optim": "paged_adamw_8bit"}),
        ("dora", "DoRA", {"use_dora": True, **LORA}))),
    generating("u-grpo-gemma", "google/gemma-3-1b-it", 256, 64, _SPLIT, "Gemma 3", **LORA),
    generating("u-grpo-llama", "meta-llama/Llama-3.2-1B", 256, 64, _SPLIT, "Llama", beta=0.04, **LORA),
    generating("u-grpo-smol", "HuggingFaceTB/SmolLM3-3B", 256, 32, _SPLIT, "SmolLM3", **LORA),
    generating("u-grpo-moe", "small-moe", 256, 32, _SPLIT, "experts"),
    generating("u-rloo-ref", _SMALL, 256, 64, _SPLIT, "full, a reference model", trainer="rloo", beta=0.05),
)  # fmt: skip

_ALL = (*_MORE, *_HF, *_UNTRIED, *(config for config in CONFIGS if not config.name.startswith("grid-")))
SINGLE = tuple(sorted(_ALL, key=lambda config: config.trainer in ("grpo", "rloo")))  # a rollout takes a minute or more

_ON_RANKS = (
    samples("hf-lora-2", "hf", _SMALL, 1024, (2, 2), "LoRA", **LORA),
    samples("hf-full-2", "hf", _SMALL, 1024, (2, 2), "float32 weights under autocast", **_FLOAT32),
    samples("hf-dpo-2", "hf", _SMALL, 512, (2, 1), "DPO with LoRA", objective="dpo", **LORA),
)
_SHARDINGS = get_args(Sharding)  # ZeRO where DeepSpeed is installed
SEVERAL = (
    *RANKS, *(Ranks(config=one, ranks=2, sharding=kind) for one in _ON_RANKS for kind in _SHARDINGS),
    Ranks(config=generating("grpo-2", _SMALL, 256, 64, _SPLIT, "LoRA", **LORA), ranks=2, sharding="ddp"),
    Ranks(config=generating("grpo-full-2", _SMALL, 256, 32, _SPLIT, "full", beta=0.04), ranks=2, sharding="fsdp2"),
    Ranks(config=samples("sft-4", "sft", _SMALL, 1024, (1, 2), "LoRA", **LORA), ranks=4, sharding="ddp"),
)  # fmt: skip
