"""A plain `transformers.Trainer` made from a recipe: its model and its batches."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import get_peft_model
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Trainer,
    set_seed,
)
from trl import get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from autofit.errors import ConfigError, quoted
from autofit.fakegpu.linear_loss import CUT, fuse

from .common import on_host
from .hf_data import Blocks, Collate, Labelled, Pairs, Rated, SampleCollator
from .hf_ebft import EbftTrainer, Strides
from .hf_losses import AsftTrainer, GkdTrainer, HfDpoTrainer, KtoTrainer, LabelTrainer, PairsTrainer, RewardTrainer
from .hf_parts import (
    Allocates,
    add_bottlenecks,
    add_layers,
    add_reft,
    checkpoint_trained_layers_alone,
    freeze_all_but,
    keep_dtype,
    other_adapter,
    to_host,
)
from .hf_script import SAMPLES, WITH_REFERENCE
from .hf_tasks import DiffusionTrainer, EmbeddingTrainer, RerankTrainer, SharedTrainer, with_two_words, without_words
from .trl_config import TrlConfig

_SCORED = ("classify", "reward", "rerank")  # objectives over a model with a head for scores in place of words
_LABELLED = ("classify", "label_tokens")
_SCORED_BY = {"classify": LabelTrainer, "reward": RewardTrainer, "rerank": RerankTrainer}
_WITH_NO_OTHER = {"embed": EmbeddingTrainer, "diffusion": DiffusionTrainer}
_VARIABLE_LENGTHS = ("flash_attention_2", "flash_attention_3")  # attention that reads packed samples by positions


# -- the trainer ------------------------------------------------------------------------------------------------------


def made(config: TrlConfig, rows: Dataset, *, evaluation: Dataset | None = None, tokenizer: Any = None) -> Trainer:
    """The trainer of a recipe over `rows` of tokens (hf_data.tokenised)."""
    trainer = _made(config, rows, evaluation, tokenizer)
    if config.training.keeps_dtype and trainer.accelerator.is_fsdp2:
        keep_dtype(trainer.accelerator)
    return trainer


def _made(config: TrlConfig, rows: Dataset, evaluation: Dataset | None, tokenizer: Any) -> Trainer:
    training = config.training
    set_seed(training.seed)  # of the adapters; the Trainer sets it again
    training.remove_unused_columns = False  # the collator reads them
    tokenizer = tokenizer or tokenizer_of(config)
    with on_host() if training.host_experts else nullcontext():
        model = model_of(config)
    if training.host_experts:
        to_host(model)
    model = adapted(model, config, padding=int(tokenizer.pad_token_id))
    if training.expert_parallel_size > 1:  # each rank has its own, so DDP leaves them alone
        names = [name for name, _ in model.named_parameters() if ".experts." in name]
        model._ddp_params_and_buffers_to_ignore = names
    if training.cut_cross_entropy and not fuse(model, CUT):
        raise ConfigError(
            "cut_cross_entropy needs a model whose head is one linear layer without a bias; omit it for "
            f"{quoted(config.model.model_name_or_path)}"
        )
    common: dict[str, Any] = {
        "model": model, "args": training, "train_dataset": rows, "eval_dataset": evaluation,
        "data_collator": collator_of(config, model, tokenizer), "processing_class": tokenizer,
    }  # fmt: skip
    if (training.peft_adapter or {}).get("peft_type") == "ADALORA":
        common["callbacks"] = [Allocates()]
    if training.objective in ("sft", "label_tokens"):
        return (SharedTrainer if training.sequence_parallel_size > 1 else Trainer)(**common)
    if training.objective in _SCORED:
        return _SCORED_BY[training.objective](**common)
    if training.objective in _WITH_NO_OTHER:
        return _WITH_NO_OTHER[training.objective](**common)
    if training.objective == "ebft":
        return EbftTrainer(**common, strides=Strides.of(training.ebft or {}))
    common |= {"beta": training.beta, "float32_logits": training.float32_logits}
    if training.objective == "gkd":
        common |= {"nll_weight": training.nll_weight, "temperature": training.temperature}
        common["answer"] = training.answer_tokens
        return GkdTrainer(**common, words=training.teacher_words, reference=_teacher_of(config))
    if training.objective not in WITH_REFERENCE:
        gamma, weight = training.simpo_gamma, training.nll_weight
        return PairsTrainer(**common, loss=training.objective, gamma=gamma, nll_weight=weight)
    common["reference"] = None if config.model.use_peft else _reference_of(config)
    if training.objective == "asft":
        return AsftTrainer(**common)
    if training.objective == "kto":
        return KtoTrainer(**common, keeps_logits=training.keeps_logits)
    return HfDpoTrainer(**common)


def tokenizer_of(config: TrlConfig) -> Any:
    """The model's tokenizer, with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(
        config.model.model_name_or_path, revision=config.model.model_revision,
        trust_remote_code=bool(config.training.trust_remote_code),
    )  # fmt: skip
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def architecture_of(config: TrlConfig) -> Any:
    if config.training.objective == "label_tokens":
        return AutoModelForTokenClassification
    in_words = config.training.value_head or config.training.word_scores
    is_classifier = config.training.objective in _SCORED and not in_words
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def model_of(config: TrlConfig, *, dtype: object = None, teacher: str | None = None) -> Any:
    """The model as it is loaded, in the recipe's `dtype` or another; or the `teacher` of that name."""
    model = config.model
    kwargs: dict[str, Any] = {
        "revision": None if teacher else model.model_revision, "trust_remote_code": config.training.trust_remote_code,
        "attn_implementation": model.attn_implementation, "dtype": dtype or model.dtype,
    }  # fmt: skip
    quantization = get_quantization_config(model)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if architecture_of(config) is not AutoModelForCausalLM:
        kwargs["num_labels"] = config.training.num_labels if config.training.objective in _LABELLED else 1
    if config.training.expert_parallel_size > 1:
        kwargs["experts_over"] = config.training.expert_parallel_size
    if config.training.distributed_state.num_processes > 1 or config.training.deepspeed:
        kwargs["device_map"] = _own_card() if config.training.loads_on_card and not config.training.deepspeed else None
    return create_model_from_path(teacher or model.model_name_or_path, architecture_of(config), **kwargs)


def _own_card() -> dict[str, int] | None:
    """The `device_map` of a rank of DDP that loads onto its card; None under FSDP, and where it has none."""
    device = PartialState().device
    if device.type != "cuda" or os.environ.get("ACCELERATE_USE_FSDP", "false") == "true":
        return None
    return {"": device.index or 0}


def _reference_of(config: TrlConfig) -> Any:
    """The frozen model beside a policy, in the type in which that computes: LLaMA-Factory's `create_ref_model`."""
    training = config.training
    half = "bfloat16" if training.bf16 else "float16" if training.fp16 else None
    return model_of(config, dtype=half).requires_grad_(False).eval()


def _teacher_of(config: TrlConfig) -> Any:
    """GKD's frozen model, loaded as the student is (ms-swift's pipelines/train/rlhf.py), if it has one."""
    name = config.training.teacher_model_name_or_path
    return None if name is None else model_of(config, teacher=name).requires_grad_(False).eval()


def adapted(model: Any, config: TrlConfig, *, padding: int) -> Any:
    """`model` as it is trained: with LoRA, or with all but its last layers frozen."""
    training = config.training
    lora = get_peft_config(config.model)
    if lora is not None and training.peft_adapter is not None:
        lora = other_adapter(lora, training.peft_adapter, total_steps=training.max_steps)
    if training.qat is not None:
        prepare(model, training.qat)
    if training.pruning_masks:  # llmcompressor/modifiers/pruning/utils/pytorch/layer_mask.py
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
                module.register_buffer("mask", torch.ones_like(module.weight, dtype=torch.bool), persistent=False)
    if training.objective == "embed":
        without_words(model)
    elif training.word_scores:
        with_two_words(model)
    elif training.objective in _SCORED and not training.value_head:
        model.config.pad_token_id = padding  # the score is that of the last token that is no padding
        if lora is not None:
            lora.task_type = "SEQ_CLS"
    if training.objective == "label_tokens" and lora is not None:
        lora.task_type = "TOKEN_CLS"
    if lora is not None:
        model = get_peft_model(model, lora, autocast_adapter_dtype=training.adapter_dtype != "bfloat16")
        if training.gradient_checkpointing:  # the first checkpointed layer has no other input that needs a gradient
            model.enable_input_require_grads()
    elif training.bottleneck is not None or training.reft_rank is not None:
        if training.bottleneck is not None:
            add_bottlenecks(model, training.bottleneck)
        else:
            add_reft(model, training.reft_rank)
        if training.gradient_checkpointing:
            model.enable_input_require_grads()
    elif training.trainable_layers is not None or training.added_layers is not None:
        if training.added_layers is None:
            freeze_all_but(
                model, training.trainable_layers, spread=training.spread_layers, with_rest=training.trains_rest,
                parts=training.layer_modules or (), extra=training.extra_modules or (),
            )  # fmt: skip
            if not training.trains_rest:
                checkpoint_trained_layers_alone(model)
            # LLaMA-Factory's own `gradient_checkpointing_enable` lays no hook on the embeddings, so that frozen layers
            # keep nothing; transformers' does (`_gradient_checkpointing_enable` in its model_utils/checkpointing.py)
            model.enable_input_require_grads = lambda: None
        else:
            add_layers(model, training.added_layers)
        # With re-entrant checkpointing the first trained layer, whose input needs no gradient, would get none
        for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # its newer name
            if hasattr(training, name):
                setattr(training, name, {**(getattr(training, name) or {}), "use_reentrant": False})
    partly = lora is not None or training.trainable_layers is not None or training.added_layers is not None
    if training.adapter_dtype is not None and partly:
        dtype = getattr(torch, training.adapter_dtype)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    return WithValueHead(model) if training.value_head else model


def collator_of(config: TrlConfig, model: Any, tokenizer: Any) -> Collate:
    """Collator of the batches of a recipe."""
    training = config.training
    common: dict[str, Any] = {"padding": int(tokenizer.pad_token_id), "multiple": training.pad_to_multiple_of}
    if training.packing or training.pad_to_max_length:
        common["width"] = training.max_length
    if training.objective in _LABELLED:
        tokens = training.objective == "label_tokens"
        return Labelled(**common, classes=training.num_labels, tokens=tokens)
    if training.objective not in SAMPLES:
        if training.objective == "kto":
            return Rated(**common)
        return Pairs(**common, negatives=training.negatives if training.objective == "rerank" else 1)
    if training.block_diagonal:
        flash = model.config._attn_implementation in _VARIABLE_LENGTHS
        return Blocks(**common, flash=flash, dtype=computed_in(config, model))
    return SampleCollator(**common, attends=bool(training.packing))


def computed_in(config: TrlConfig, model: Any) -> torch.dtype:
    """The type in which attention computes: that of autocast, else that of the weights."""
    if config.training.bf16:
        return torch.bfloat16
    return torch.float16 if config.training.fp16 else model.dtype


# Quantisation-aware training by torchao, as Axolotl prepares a model for it (utils/quantization.py). Imports torchao.
#
# Each linear layer rounds a copy of its weights, and of its inputs, to the values of a smaller type.

KEYS = ("weight_dtype", "activation_dtype", "group_size", "quantize_embedding")
_FLOAT8 = ("float8_e4m3fn", "fp8", "float8")
_MX_BLOCK = 32  # values that share a scale


def prepare(model: Any, given: Mapping[str, Any]) -> None:
    """Replace the linear layers of `model`, and its embeddings if these are asked for. Raises ConfigError."""
    if given.get("weight_dtype") == "ternary":
        if len(given) > 1:
            raise ConfigError("qat: weight_dtype ternary has no other keys")
        _with_ternary_weights(model)
        return
    try:
        from torchao.quantization import quantize_
    except ImportError as error:
        raise ConfigError("qat needs the package torchao, which is not installed here: pip install torchao") from error

    wrong = [key for key in given if key not in KEYS]
    if wrong:
        raise ConfigError(f"qat has no key {quoted(wrong[0])}; its keys are {', '.join(KEYS)}")
    weight, inputs, group = given.get("weight_dtype", "int8"), given.get("activation_dtype"), given.get("group_size")
    quantize_(model, _config(weight, inputs, group))
    if given.get("quantize_embedding"):
        quantize_(model, _config(weight, None, group), filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding))


def _with_ternary_weights(model: torch.nn.Module) -> None:
    """Let all linear layers but the head round copies of inputs and weights, as onebitllms' BitNetLinear."""

    def rounded(layer: Any, states: torch.Tensor) -> torch.Tensor:
        weights = layer.weight
        states = states + (_to_8_bits(states) - states).detach()
        weights = weights + (_to_thirds(weights) - weights).detach()
        return linear(states, weights, layer.bias)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            module.forward = MethodType(rounded, module)  # type: ignore[method-assign]


def _to_8_bits(states: torch.Tensor) -> torch.Tensor:
    """Rows rounded to 255 steps of their largest number; onebitllms' kernel makes one tensor."""
    found = torch.empty_like(states)
    with torch.no_grad():
        scale = 127.0 / states.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        found.copy_((states * scale).round().clamp(-128, 127) / scale)
    return found


def _to_thirds(weights: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(weights)
    with torch.no_grad():
        scale = 1.0 / weights.abs().mean().clamp(min=1e-5)
        found.copy_((weights * scale).round().clamp(-1, 1) / scale)
    return found


def _config(weight: str, inputs: str | None, group: int | None) -> Any:
    from torchao.quantization.qat import QATConfig
    from torchao.quantization.qat.fake_quantize_config import (
        Float8FakeQuantizeConfig,
        Int4WeightFakeQuantizeConfig,
        IntxFakeQuantizeConfig,
    )

    activation: Any = None
    if weight == "mxfp4":
        if group not in (None, _MX_BLOCK):
            raise ConfigError(f"qat: group_size must be {_MX_BLOCK} with weight_dtype mxfp4; got {group}")
        from torchao.prototype.qat import MXFakeQuantizeConfig

        both = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2, block_size=_MX_BLOCK)
        return QATConfig(activation_config=both, weight_config=both)
    if inputs == "int8":
        activation = IntxFakeQuantizeConfig(dtype=torch.int8, granularity="per_token", is_symmetric=False)
    elif inputs in _FLOAT8:
        activation = Float8FakeQuantizeConfig(dtype=torch.float8_e4m3fn)
    if weight == "int4" and inputs != "int4":
        more = {"int8": {"activation_dtype": torch.bfloat16}}.get(str(inputs), {})
        more = {"activation_dtype": torch.float8_e4m3fn} if inputs in _FLOAT8 else more
        weights: Any = Int4WeightFakeQuantizeConfig(group_size=group or 128, **more)
    elif weight in _FLOAT8 and inputs in _FLOAT8:
        weights = Float8FakeQuantizeConfig(dtype=torch.float8_e4m3fn)
    else:
        raise ConfigError(
            f"qat: weight_dtype {weight} with activation_dtype {inputs} is not trained by torchao; int4 with int8, fp8 "
            "or none, fp8 with fp8 and mxfp4 are"
        )
    return QATConfig(weight_config=weights, activation_config=activation)


# A causal model with a value head: the reward model that LLaMA-Factory trains.


class WithValueHead(torch.nn.Module):
    """A causal model and a linear head on its last hidden states: a value for each token.

    TRL's AutoModelForCausalLMWithValueHead (models/modeling_value_head.py of TRL 0.24), which LLaMA-Factory wraps its
    model in: the model makes all hidden states, the logits of all words and their loss too, and the logits are cast to
    float32.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.dropout = torch.nn.Dropout(0.1)
        self.v_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(logits (B, T, V) in float32, the causal model's loss if there are labels, values (B, T))."""
        found = self.pretrained_model(**inputs, output_hidden_states=True, use_cache=False)
        hidden = self.dropout(found.hidden_states[-1]).to(self.v_head.weight.dtype)
        values = self.v_head(hidden).squeeze(-1)
        return found.logits.float(), found.loss, values

    def __getattr__(self, name: str) -> Any:
        """Attribute of the causal model, which a Trainer asks of a model of transformers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("pretrained_model"), name)
