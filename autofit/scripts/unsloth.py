"""A stand-in for Unsloth, which imports only where there is a card, and whose kernels are not simulated.

A script of it gets transformers' model, PEFT's adapters and TRL's trainer, with the settings and dtypes that Unsloth
gives them (read at unsloth 015bdef0 and unsloth-zoo ce232d6c): 4 bits, adapters of float32, samples of up to
`max_seq_length`, checkpoints. Imports torch.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any
from unittest import mock

import peft
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from autofit.errors import ConfigError
from autofit.recipe.findings import CHECKPOINTING
from autofit.scripts.packages import UNSLOTH, IdleModule
from autofit.scripts.stand_ins import TRAINERS

_UPPER_BOUND = (
    "Unsloth is stood in for by transformers, PEFT and TRL: its kernels, batches without padding and checkpoints on "
    "the host take less, so the bytes and seconds are upper bounds"
)
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WHOLE = ("embed_tokens", "lm_head")  # trained as a copy, and not by an adapter
_BF16_SINCE = 8  # compute capability
# What takes a tokenizer, a dataset or a trainer, and gives it back: the words of samples, not how many there are.
_SAME = (
    "get_chat_template", "to_sharegpt", "standardize_sharegpt", "standardize_data_formats", "apply_chat_template",
    "train_on_responses_only", "for_inference", "for_training",
)  # fmt: skip


@contextmanager
def unsloth_stood_in(code: str, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the `code` of a script that imports Unsloth has the stand-in; `note` is told of it."""
    note(_UPPER_BOUND)
    stand_in = _Unsloth(note)
    with ExitStack() as patches:
        for name, module in stand_in.modules():  # mock.patch.dict would forget all that the script imports
            patches.callback(_replace_module, name, sys.modules.get(name))
            sys.modules[name] = module
        for name in (name for name in TRAINERS if f"{name}Config" in code or f"{name}Trainer" in code):
            kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
            patches.enter_context(mock.patch.object(config, "__init__", stand_in.of_config(config)))
            patches.enter_context(mock.patch.object(kind, "__init__", _as_unsloth_trains(kind)))
        yield


def _replace_module(name: str, before: ModuleType | None) -> None:
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


def _has_bf16() -> bool:
    return bool(torch.cuda.get_device_capability()[0] >= _BF16_SINCE)


class _Unsloth:
    """`FastLanguageModel` and its like, and the modules in which scripts look for what Unsloth has."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._longest: int | None = None  # tokens of a sample that the model takes

    def of_config(self, config: Any) -> Any:
        """The config's `__init__`, where the script does not say: bfloat16 if the card has it, the model's length."""
        original: Callable[..., None] = config.__init__
        has_length = any(field.name == "max_length" for field in fields(config))

        @functools.wraps(original)
        def __init__(of: Any, *given: Any, **named: Any) -> None:
            if not named.get("bf16") and not named.get("fp16"):
                named |= {"bf16": _has_bf16(), "fp16": not _has_bf16()}
            if has_length and self._longest is not None:
                named["max_length"] = min(named.get("max_length") or self._longest, self._longest)
            if named.pop("use_vllm", False):
                self._note("use_vllm: transformers generates in its place, and the memory of vLLM is not simulated")
            original(of, *given, **_with_whole_groups(named))

        return __init__

    def modules(self) -> Iterator[tuple[str, ModuleType]]:
        """(name, module) of the packages and of the parts of them that scripts import from."""
        same = {name: lambda given, *_, **__: given for name in _SAME}
        model = type("FastLanguageModel", (), {
            "from_pretrained": staticmethod(self.from_pretrained), "get_peft_model": staticmethod(self.get_peft_model),
            **{name: staticmethod(instead) for name, instead in same.items()},
        })  # fmt: skip
        found = {
            **same, **dict.fromkeys(("FastLanguageModel", "FastModel", "FastTextModel"), model),
            "FastVisionModel": _Pictures, "UnslothTrainer": trl.SFTTrainer, "UnslothTrainingArguments": _Arguments,
            "__version__": "0", **dict.fromkeys(("is_bfloat16_supported", "is_bf16_supported"), _has_bf16),
        }  # fmt: skip
        for package in UNSLOTH:
            for part in ("", ".chat_templates", ".trainer", ".models", ".models.loader", ".dataset_utils", ".save"):
                module = IdleModule(f"{package}{part}")
                module.__dict__.update(found)
                yield module.__name__, module

    def from_pretrained(
        self, model_name: str, max_seq_length: int | None = 2048, dtype: Any = None, load_in_4bit: bool = True,
        load_in_8bit: bool = False, load_in_16bit: bool = False, full_finetuning: bool = False,
        quantization_config: Any = None, trust_remote_code: bool = False,
        float32_mixed_precision: bool | None = None, **_: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The model on the card and its tokenizer, by Unsloth's defaults."""
        half = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        half = half or (torch.bfloat16 if _has_bf16() else torch.float16)
        whole = full_finetuning or load_in_16bit
        if full_finetuning and float32_mixed_precision:
            half = torch.float32
        if quantization_config is None and not whole and (load_in_4bit or load_in_8bit):
            quantization_config = BitsAndBytesConfig(load_in_8bit=True) if load_in_8bit else BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=half,
            )  # fmt: skip
        if load_in_4bit and not whole:
            self._note("Unsloth's own copies in 4 bits keep some layers in 16, which all count as 4 bits here")
        named = {} if quantization_config is None else {"quantization_config": quantization_config}
        model = AutoModelForCausalLM.from_pretrained(
            model_name, dtype=half, device_map={"": 0}, trust_remote_code=trust_remote_code, **named
        )
        self._longest, model.of_unsloth = max_seq_length, True
        return model, AutoTokenizer.from_pretrained(model_name)

    def get_peft_model(
        self, model: Any, r: int = 16, target_modules: str | Sequence[str] = _TARGETS, lora_alpha: int = 16,
        lora_dropout: float = 0.0, bias: str = "none", layers_to_transform: Any = None, layers_pattern: Any = None,
        use_gradient_checkpointing: str | bool = "unsloth", use_rslora: bool = False,
        modules_to_save: Sequence[str] | None = None, init_lora_weights: Any = True, **_: Any,
    ) -> Any:  # fmt: skip
        """The model with adapters of float32; embeddings and head among `target_modules` are trained as copies."""
        names = target_modules if isinstance(target_modules, str) else [n for n in target_modules if n not in _WHOLE]
        whole = [n for n in _WHOLE if not isinstance(target_modules, str) and n in target_modules]
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=r, target_modules=names, lora_alpha=lora_alpha, lora_dropout=lora_dropout,
            bias=bias, layers_to_transform=layers_to_transform, layers_pattern=layers_pattern, use_rslora=use_rslora,
            modules_to_save=[*dict.fromkeys((*(modules_to_save or ()), *whole))] or None,
            init_lora_weights=init_lora_weights,
        )  # fmt: skip
        found = peft.get_peft_model(model, config)
        found.of_unsloth, found.checkpoints = True, bool(use_gradient_checkpointing)
        _make_float32(found)
        return found


class _Pictures:
    """Unsloth's models of pictures."""

    @staticmethod
    def from_pretrained(*_: object, **__: object) -> Any:
        raise ConfigError("FastVisionModel trains on images, and of Unsloth only training on text is simulated")


class _Arguments(trl.SFTConfig):  # type: ignore[misc]
    """TRL's config with the learning rate of embeddings, which counts neither in bytes nor in seconds."""

    def __init__(self, *given: Any, embedding_learning_rate: float | None = None, **named: Any) -> None:
        super().__init__(*given, **named)


def _with_whole_groups(named: Mapping[str, Any]) -> dict[str, Any]:
    """A config's arguments, with a micro-batch of a group's completions where it holds no whole groups."""
    group = named.get("num_generations")
    micro, steps = named.get("per_device_train_batch_size", 8), named.get("gradient_accumulation_steps", 1)
    return {**named, "per_device_train_batch_size": group} if group and micro * steps % group else dict(named)


def _make_float32(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _as_unsloth_trains(kind: Any) -> Any:
    """The trainer's `__init__`: the checkpoints that the model was given, and adapters kept in float32."""
    original: Callable[..., None] = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        model, arguments = named.get("model", given[0] if given else None), named.get("args")
        mine = getattr(model, "of_unsloth", False)
        if mine and arguments is not None:
            for key in (key for key in CHECKPOINTING if hasattr(arguments, key)):
                setattr(arguments, key, getattr(model, "checkpoints", getattr(arguments, key)))
        original(self, *given, **named)
        if mine and isinstance(model, peft.PeftModel):
            _make_float32(self.model)  # TRL makes those of a quantised model bfloat16

    return __init__
