"""Every causal language model of transformers that these sizes make: one small model of each, trained in three ways."""

from typing import Any

from gpu.configs import LORA, OWN_MODELS, Config, generating, samples

_LAYERS = 8
# Sizes that most configs know; each takes those that it has, and keeps its own default of what is not here.
_SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 352, "shared_expert_intermediate_size": 352, "n_shared_experts": 1, "n_group": 1,
    "moe_shared_expert_intermediate_size": 352, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 128,
    "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
# Latent attention has as many heads of keys as of queries.
_LATENT = ("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
           "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu")  # fmt: skip
# What these sizes make too large, or no language model of text; encoders that are listed as decoders.
_NOT = ("blt", "gemma3", "gemma4", "gemma4_unified", "phi4_multimodal")
_SLOW = ("recurrent_gemma", "rwkv", "zamba")  # a loop over the tokens in Python, minutes of it
_ENCODERS = (
    "aria_text", "bart", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot",
    "blenderbot-small", "camembert", "cpmant", "ctrl", "data2vec-text", "electra", "emu3", "ernie", "fuyu", "git",
    "got_ocr2", "gpt-sw3", "marian", "mbart", "megatron-bert", "mllama", "modernbert-decoder", "moshi",
    "moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod",
)  # fmt: skip
_OFF: dict[str, Any] = {"gradient_checkpointing": False}
# Experts that are one parameter take no dropout (peft 0.21).
_ALL_LINEAR: dict[str, Any] = LORA | {"lora_target_modules": "all-linear", "lora_dropout": 0.0}


def families() -> tuple[Config, ...]:
    """NAME-full, NAME-lora and NAME-grpo of each model; their shapes join the campaign's own models."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: list[Config] = []
    for name in NAMES:
        if name in (*_NOT, *_SLOW, *_ENCODERS):
            continue
        try:
            config = AutoConfig.for_model(name, **_SIZES | ({"num_key_value_heads": 8} if name in _LATENT else {}))
            kind = AutoModelForCausalLM._model_mapping[type(config)]
            config.architectures = [kind.__name__]
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
        except Exception as error:  # each architecture has its own rules about sizes
            print(f"{name} is not made by these sizes: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        OWN_MODELS[f"a-{name}"] = config.to_dict()
        found += [
            samples(f"{name}-full", "sft", f"a-{name}", 512, (2, 2), "all weights, no checkpointing", **_OFF),
            samples(f"{name}-lora", "sft", f"a-{name}", 512, (2, 2), "LoRA on all linear layers", **_ALL_LINEAR),
            generating(f"{name}-grpo", f"a-{name}", 128, 64, (4, 2, 2), "GRPO with LoRA", **_ALL_LINEAR),
        ]
    return tuple(found)
