"""Random tiny architectures, and a plain training loop of them as a trainer: for forecasts against full traces."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.plugin.protocol import Report, Task, WorstCase
from autofit.recipe.keys import BatchKeys

VOCABULARY, PROMPT = 97, 8
Sizes = dict[str, Any]
Draw = Callable[[random.Random, int], Sizes]


def _sliding(draw: random.Random, layers: int) -> Sizes:
    every = draw.choice((2, 3, 4))
    kinds = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]
    return {"layer_types": kinds, "sliding_window": 512}


def _linear(draw: random.Random, layers: int) -> Sizes:
    every = draw.choice((2, 4))
    return {
        "layer_types": ["full_attention" if i % every == every - 1 else "linear_attention" for i in range(layers)],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip


def _qwen_experts(draw: random.Random, layers: int) -> Sizes:
    alone = draw.choice(([], [0], [0, 1], sorted(draw.sample(range(layers), 2))))
    sparse = draw.choice((1, 1, 2, 3))
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": sparse,
            "mlp_only_layers": alone}  # fmt: skip


def _deepseek(draw: random.Random, layers: int) -> Sizes:
    return {
        "first_k_dense_replace": draw.randint(0, min(4, layers)), "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "head_dim": 4,
    }  # fmt: skip


def _glm(draw: random.Random, layers: int) -> Sizes:
    return {"first_k_dense_replace": draw.randint(0, min(3, layers)), "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}  # fmt: skip


def _llama4(draw: random.Random, layers: int) -> Sizes:
    return {"interleave_moe_layer_step": draw.choice((1, 2)), "num_local_experts": 4, "intermediate_size_mlp": 64,
            "no_rope_layer_interval": draw.choice((2, 4)), "attention_chunk_size": 512}  # fmt: skip


def _jamba(draw: random.Random, layers: int) -> Sizes:
    return {
        "attn_layer_period": draw.choice((2, 4)), "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    }  # fmt: skip


def _mixture(draw: random.Random, layers: int) -> Sizes:
    return {"num_local_experts": 4, "num_experts_per_tok": 2}


ARCHITECTURES: Mapping[str, Draw] = {
    "llama": lambda draw, layers: {},
    "qwen2": lambda draw, layers: {},
    "qwen3": lambda draw, layers: {},
    "phi3": lambda draw, layers: {},
    "olmo2": lambda draw, layers: {},
    "gpt2": lambda draw, layers: {"n_embd": 32, "n_head": 4},
    "gpt_neox": lambda draw, layers: {},
    "smollm3": lambda draw, layers: {"no_rope_layer_interval": draw.choice((2, 4))},
    "gemma2": _sliding,
    "gemma3_text": _sliding,
    "cohere2": _sliding,
    "olmo3": _sliding,
    "gpt_oss": lambda draw, layers: _sliding(draw, layers) | _mixture(draw, layers),
    "mixtral": _mixture,
    "granitemoe": _mixture,
    "olmoe": lambda draw, layers: {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": lambda draw, layers: _qwen_experts(draw, layers) | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _qwen_experts,
    "qwen3_next": lambda draw, layers: (
        _linear(draw, layers) | _qwen_experts(draw, layers) | {"shared_expert_intermediate_size": 32}
    ),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm,
    "llama4_text": _llama4,
    "jamba": _jamba,
}


def random_config(name: str, draw: random.Random, *, layers: int) -> Any:
    """A tiny config of the architecture `name` with a random pattern of `layers` layers; tied or untied heads."""
    groups = draw.choice((1, 2, 4))
    sizes: Sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": groups, "head_dim": 8, "max_position_embeddings": 256,
        "tie_word_embeddings": draw.random() < 0.5, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    if name == "gpt2":
        sizes = {k: v for k, v in sizes.items() if "size" not in k and "heads" not in k} | {"vocab_size": VOCABULARY}
    config = AutoConfig.for_model(name, **sizes | ARCHITECTURES[name](draw, layers))
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


class PlainTrainer:
    """Rollouts (if `generates`), micro-batches and AdamW on random tokens, of the model in the folder `model`.

    Further keys: `dtype`, `checkpointing`, `tokens` of a sample without rollouts, and `lora_r`, 0 for all weights.
    """

    name = "plain"
    space = Path()

    def __init__(self, *, generates: bool) -> None:
        self.generates = generates
        self.keys = BatchKeys()
        if generates:
            self.keys = BatchKeys(rollout="chunk", group="group", completion="completion")

    def layers(self, values: Mapping[str, Any], worst_case: WorstCase) -> Any:
        return AutoConfig.from_pretrained(values["model"])

    def inspect(self, *args: object) -> Any:
        raise NotImplementedError

    def small_trainings(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError

    def build(self, values: Mapping[str, Any], task: Task) -> Any:
        return PlainRun(values, generates=self.generates)


class PlainRun:
    def __init__(self, values: Mapping[str, Any], *, generates: bool) -> None:
        self._values, self._generates = values, generates

    def train(self, report: Report) -> None:
        values = self._values
        config = AutoConfig.from_pretrained(values["model"])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, values["dtype"]))
        if values["lora_r"]:
            model = get_peft_model(model, LoraConfig(r=values["lora_r"], target_modules="all-linear"))
        model = model.cuda()
        model.train()
        if values["checkpointing"]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        micro, accumulation = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
        chunk = values["chunk"] if self._generates else 1
        for step in range(2):
            report.step_begins(step)
            for number in range(1 if report.one_in_first_step and step == 0 else accumulation):
                if number % chunk == 0:
                    ids = self._samples(model, micro * chunk, report)
                part = ids[number % chunk * micro :][:micro]
                model(input_ids=part, labels=part, use_cache=False).loss.backward()
                report.micro_step_ends()
            report.gradient_is_whole(model, optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            report.optimizer_ends()

    def _samples(self, model: Any, count: int, report: Report) -> torch.Tensor:
        if not self._generates:
            return torch.randint(2, VOCABULARY, (count, self._values["tokens"]), device="cuda")
        prompts = torch.randint(2, VOCABULARY, (count, PROMPT), device="cuda")
        model.eval()
        with report.phase("rollout"), torch.no_grad():
            ids = model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                max_new_tokens=self._values["completion"], pad_token_id=0, eos_token_id=[10**9],
            )  # fmt: skip
        model.train()
        return cast(torch.Tensor, ids)


SAMPLES, ROLLOUTS = PlainTrainer(generates=False), PlainTrainer(generates=True)


def write_model(folder: Path, config: Any) -> Path:
    """The config in `folder/model`, and what a worst case says of its samples."""
    config.save_pretrained(folder / "model")
    (folder / "worst_case.json").write_text(json.dumps({"longest_tokens": 24, "prompt_tokens": PROMPT}))
    return folder / "model"
