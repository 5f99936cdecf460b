"""Model that a gradient proof trains: one of the same architecture, few layers and narrow, on fixed samples.

The samples are equal for every split, and diverse enough to expose a wrong claim. Equal lengths would hide the
normalisation of a loss, so lengths alternate between prompts and between the completions of a prompt, even with only
two completions of at most two tokens. Each prompt's rewards have their own spread; every fourth prompt has equal
rewards. A quarter of the completions, long and short ones, is truncated (no end token).
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from autofit.fakegpu.depth.stack import NotRepeatingError, layer_prints, with_layers

PAD, END, UNKNOWN, FIRST_WORD = 0, 1, 2, 3
VOCABULARY = 256
LONGEST = 16  # tokens of the longest completion, unless the recipe allows fewer

# Settings for every recipe: no GPU features, no randomness, and the gradient is neither clipped nor scaled.
# None removes the key; a key that a trainer does not have is skipped.
SAME: dict[str, object] = {
    "use_cpu": True, "bf16": False, "fp16": False, "tf32": None, "dtype": "float32", "load_in_4bit": False,
    "load_in_8bit": False, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
    "deepspeed": None, "fsdp": None, "fsdp_config": None,
    "use_liger_kernel": False, "lora_dropout": 0.0, "neftune_noise_alpha": None, "max_grad_norm": 0.0,
    "optim": "sgd", "optim_args": None, "learning_rate": 1e-3, "weight_decay": 0.0, "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None, "warmup_steps": 0, "report_to": "none", "push_to_hub": False, "eval_strategy": "no",
    "do_eval": False, "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "run_name": None,
    "dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False,
    "resume_from_checkpoint": None, "load_best_model_at_end": False, "env": None, "chat_template_kwargs": None,
    "model_init_kwargs": None, "model_revision": "main", "dataset_num_proc": None, "auto_find_batch_size": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one prompt, as token ids, and its reward."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float


def sample(prompt: int, generation: int, *, longest: int = LONGEST) -> Sample:
    """Completion number `generation` of prompt number `prompt`, of 1 to `longest` tokens."""
    asked = Random(f"prompt {prompt}")
    words = tuple(asked.randrange(FIRST_WORD, VOCABULARY) for _ in range(2 + prompt % 5))
    spread = asked.uniform(0.3, 2.0)
    given = Random(f"completion {prompt} {generation}")
    tokens = [given.randrange(FIRST_WORD, VOCABULARY) for _ in range(_length(prompt, generation, longest, given))]
    if (prompt // 2 + generation) % 4 != 2 and longest > 1:
        tokens[-1] = END
    reward = given.gauss(0.0, spread) if prompt % 4 != 3 else 1.0  # 1.0: an exact mean, so no rounding is scaled up
    return Sample(words, tuple(tokens), reward)


def _length(prompt: int, generation: int, longest: int, given: Random) -> int:
    """Tokens of a completion. Even prompts alternate between long and short ones, odd prompts have short ones only.

    The long ones of an even prompt differ in length. Half of the odd prompts have two tokens if possible: if all
    completions of a group are only the end token, the group's advantages cancel.
    """
    if prompt % 2 or (prompt % 4 and longest < 4):
        return 1 if longest < 5 else 2 if prompt % 4 == 1 else given.randint(1, 2)
    most = longest // (1 + prompt % 4 // 2)
    if generation % 2:
        return given.randint(1, max(1, most // 4))
    return most if generation == 0 else given.randint(most - most // 4, most)


def name_of(prompt: int) -> str:
    """The text in the dataset for prompt number `prompt`."""
    return f"prompt {prompt}"


def number_of(name: str) -> int:
    """The number of the prompt with the text `name`; the inverse of `name_of`."""
    return int(name.removeprefix("prompt "))


_MOST_PARAMETERS = 20_000_000
_MOST_KINDS = 4  # most layers kept, each of a different kind
_MOST_LAYERS = 12  # most layers kept where they cannot be chosen
_HEAD_DIM, _WINDOW, _EXPERTS = 16, 8, 4
# Configs use the same names for these sizes (transformers 5.23); a size that a config lacks is not added.
_SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
    "num_experts": _EXPERTS, "num_local_experts": _EXPERTS, "n_routed_experts": _EXPERTS, "n_shared_experts": 1,
    "n_group": 1, "initializer_range": 0.2, "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": _HEAD_DIM,
    "linear_value_head_dim": _HEAD_DIM, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
}  # fmt: skip


def small_model(config: Any, folder: Path) -> tuple[str, str | None]:
    """Save a small model of `config`'s architecture in `folder`; (its description, reason for a replacement or None).

    If the architecture cannot be made small, a plain Llama replaces it, or a plain mixture of experts if the routing
    has a loss. Apart from that loss, the normalisation of a loss does not depend on the architecture.
    """
    text = config.get_text_config()
    why = ""
    for narrow in (True, False):
        try:
            model = _built(_small(text, narrow=narrow))
        except Exception as error:  # 200 architectures, each with its own errors
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        else:
            model.save_pretrained(folder)
            return _description(model), None
    model = _built(_stand_in(text))
    model.save_pretrained(folder)
    return _description(model), why


def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of the small vocabulary: each word is one token."""
    names = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(FIRST_WORD, VOCABULARY))]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    assert names[UNKNOWN] == "<unk>"
    return cast(
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
        ),
    )


def _built(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"it has {parameters} parameters even in its small form")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 12).reshape(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return cast(PreTrainedModel, model)


def _description(model: PreTrainedModel) -> str:
    config = model.config
    parts = [f"{type(model).__name__}", f"{config.num_hidden_layers} layers", f"hidden {config.hidden_size}"]
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if heads:
        parts.append(f"{heads} heads" + (f" over {groups} key-value heads" if groups and groups != heads else ""))
    if getattr(config, "tie_word_embeddings", False):
        parts.append("tied embeddings")
    return ", ".join(parts)


def _small(config: Any, *, narrow: bool) -> Any:
    """A config of the same class with few layers and a small vocabulary; with `narrow`, also with small widths."""
    names = getattr(config, "attribute_map", {})
    content = {**config.to_dict(), "dtype": "float32"}
    content.pop("quantization_config", None)
    for name, value in {**_SMALL, **(_widths(content, names) if narrow else {})}.items():
        real = names.get(name, name)
        if content.get(real) is not None:
            content[real] = value
    content |= {key: 0.0 for key, value in content.items() if "drop" in key and isinstance(value, float)}
    if content.get("sliding_window"):
        content["sliding_window"] = _WINDOW
    return _few_layers(type(config).from_dict(_plain_positions(content)))


def _few_layers(config: Any) -> Any:
    """`config` with one layer of each kind, in order, and at least two layers; kinds are told by the real modules.

    Where its lists do not choose layers freely, the first layers up to the last new kind; where its layers cannot be
    told apart, the first two.
    """
    try:
        prints = layer_prints(config)
    except NotRepeatingError:
        return with_layers(config, range(min(2, config.num_hidden_layers)))
    kinds = [i for i in range(len(prints)) if prints[i] not in prints[:i]][:_MOST_KINDS]
    others = [i for i in range(len(prints)) if i not in kinds]
    chosen = sorted([*kinds, *others[: max(0, 2 - len(kinds))]])
    few = with_layers(config, chosen)
    with suppress(NotRepeatingError):
        if layer_prints(few) == [prints[i] for i in chosen]:
            return few
    return with_layers(config, range(min(max(2, kinds[-1] + 1), _MOST_LAYERS)))


def _widths(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Small widths with the same number of query heads per key-value head, at most 16."""
    heads = int(content.get(names.get("num_attention_heads", "num_attention_heads")) or 2)
    groups = int(content.get(names.get("num_key_value_heads", "num_key_value_heads")) or heads)
    ratio = max(1, min(16, heads // groups))
    groups = 2 if ratio <= 4 and groups > 1 else 1
    hidden = ratio * groups * _HEAD_DIM
    return {
        "num_attention_heads": ratio * groups, "num_key_value_heads": groups,
        "head_dim": _SMALL["qk_rope_head_dim"] if content.get("qk_rope_head_dim") else _HEAD_DIM,
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden, "global_head_dim": _HEAD_DIM, "query_pre_attn_scalar": _HEAD_DIM,
        "num_experts_per_tok": min(2, int(content.get("num_experts_per_tok") or 2)),
    }  # fmt: skip


def _plain_positions(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with plain rotary positions: the scaling factors for long texts must match the original head width."""
    content.pop("rope_scaling", None)
    found = content.get("rope_parameters")
    if isinstance(found, dict):
        nested = {k: _plain_rope(v) for k, v in found.items() if isinstance(v, dict)}
        content["rope_parameters"] = nested or _plain_rope(found)
    return content


def _plain_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default"} | {k: parameters[k] for k in kept if parameters.get(k) is not None}


def _stand_in(config: Any) -> PreTrainedConfig:
    plain: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD, "eos_token_id": END,
        "bos_token_id": None, "initializer_range": _SMALL["initializer_range"],
    }  # fmt: skip
    if not hasattr(config, "output_router_logits"):
        return LlamaConfig(**plain)
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    return MixtralConfig(**plain, num_local_experts=_EXPERTS, router_aux_loss_coef=coefficient)
