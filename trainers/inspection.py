"""The inspection of a TRL recipe, once, before any probe: its stand-ins, its longest prompt, its model's size."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, nearest
from autofit.files import write_json
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.recipe.keys import OTHER_MODELS
from autofit.units import format_bytes

from .common import dtype_of
from .offline import (
    NO_DATA,
    NO_MODEL,
    STATE_IT,
    OutOfReachError,
    made_up_dataset,
    read_config,
    stand_in_model,
    unknown_model,
    without_tokens,
)
from .trl_config import ON_CPU, TrlConfig, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The size of a recipe's model, and the properties of its architecture that decide which knobs are neutral."""

    parameters: int
    weights_bytes: int
    vocab_size: int | None
    embedding_parameters: int | None
    balances_experts: bool  # True: the loss has a term over each micro-batch's expert routing
    counts_padding: bool  # True: positions are learned and include the padding of a rollout to its longest prompt
    notes: tuple[str, ...] = ()  # a sentence each, for the recipe's user


def with_stand_ins(trainer: str, values: dict[str, object], config: TrlConfig, inspection: Inspection) -> TrlConfig:
    """`config` with stand-ins for an unreachable model or dataset.

    Raises OutOfReachError if the dataset is to be read, and the model's tokenizer cannot be; ConfigError.
    """
    from transformers import AutoTokenizer

    folder, prompt_tokens = inspection.worst_case.folder, inspection.prompt_tokens
    name = config.model.model_name_or_path
    if not name:
        raise ConfigError(NO_MODEL)
    trust = bool(config.training.trust_remote_code)
    loading = {"revision": config.model.model_revision, "trust_remote_code": trust}
    model = stand_in_model(name, folder, **loading)
    changes: dict[str, object] = {"model_name_or_path": model}
    for key in OTHER_MODELS:
        other = getattr(config.script, key, None) or getattr(config.training, key, None)
        if other:
            changes[key] = stand_in_model(other, folder, key=key, trust_remote_code=trust)
    if prompt_tokens is None:
        if not (config.script.dataset_name or config.datasets.datasets):
            raise ConfigError(f"{NO_DATA}, {STATE_IT}")
        if model != name:
            raise OutOfReachError(
                f"the tokenizer of {name!r} must be reachable to count the longest prompt; connect to it, {STATE_IT}"
            )
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, **(loading if model == name else {}))
        column = getattr(config.training, "dataset_text_field", None)
        objective = getattr(config.training, "objective", None)
        kind = trainer if objective is None else f"{trainer} {objective}"
        made_up = made_up_dataset(
            kind, prompt_tokens, tokenizer, folder, text_column=column,
            max_length=getattr(config.training, "max_length", None),
        )  # fmt: skip
        changes |= {"dataset_name": made_up, "dataset_train_split": "train", "dataset_streaming": False}
        if model != name:
            changes |= without_tokens(vars(config.training))
        values = {k: v for k, v in values.items() if k not in ("datasets", "dataset_config")}
    return parse(trainer, values, overrides={**ON_CPU, **changes})


def keep(row: Any, facts: Mapping[str, object], worst_case: WorstCase) -> None:
    """Save the longest sample and its facts. In the format of `datasets`, to preserve dates, bytes and images."""
    row.save_to_disk(str(worst_case.folder / "worst_row"))
    write_json(worst_case.path, dict(facts))


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_hash(rewards: list[Any], rows: Any) -> str:
    """A hash of the files of the reward functions, and of the data unless `rows` is None."""
    files = {f for f in (getattr(sys.modules.get(r.__module__), "__file__", None) for r in rewards if callable(r)) if f}
    digest = hashlib.sha256(b"" if rows is None else str(rows._fingerprint).encode())
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def architecture_hash(model: str) -> str:
    """A hash of the architecture in the folder `model`; "" if `model` is a name on the hub."""
    path = Path(model) / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if os.path.isfile(path) else ""


def model_facts(config: TrlConfig, kind: Any, *, simulated: bool = False) -> ModelFacts:
    """The facts of the recipe's model, built by the auto class `kind` without memory. Raises ConfigError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from .images import sees

    name = config.model.model_name_or_path
    if not name:
        raise ConfigError(NO_MODEL)
    trust = bool(config.training.trust_remote_code)
    if os.path.isdir(name):
        read_config(Path(name))
    try:
        found = AutoConfig.from_pretrained(name, revision=config.model.model_revision, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        if not os.path.isdir(name):
            raise ConfigError(unknown_model(name, simulated=False)) from error
        raise ConfigError(f"{name}/config.json cannot be used: {' '.join(str(error).split())[:200]}") from error
    if kind is AutoModelForCausalLM and sees(found):
        kind = AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            model = kind.from_config(found, trust_remote_code=trust)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if "Unrecognized configuration class" in problem:  # goes on with the names of all classes
            problem = f"it has no class for model_type {found.model_type!r}"
        raise ConfigError(f"{name!r} cannot be built by {kind.__name__} of transformers: {problem[:300]}") from error
    check_model(model, config, simulated=simulated)
    parameters = sum(p.numel() for p in model.parameters())
    dtype = dtype_of(config.model.dtype, found)
    key = "load_in_4bit" if config.model.load_in_4bit else "load_in_8bit" if config.model.load_in_8bit else ""
    packed = quantised_parameters(model) if key else 0
    weights_bytes = (parameters - packed) * dtype.itemsize + int(packed * (0.53 if key == "load_in_4bit" else 1.0))
    vocabulary, heads = _embeddings(model)
    return ModelFacts(
        vocab_size=vocabulary, embedding_parameters=heads,
        parameters=parameters, weights_bytes=weights_bytes, counts_padding=_counts_padding(model),
        balances_experts=_balances_experts(found.get_text_config(), config),
        notes=note_of_experts(model, key, dtype.itemsize) if key else (),
    )  # fmt: skip


def _embeddings(model: Any) -> tuple[int | None, int | None]:
    """(vocabulary, parameters of the input embeddings and of a head of its own); None for each that the model lacks."""
    try:
        inner, head = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None, None
    weights = {id(one.weight): one.weight for one in (inner, head) if getattr(one, "weight", None) is not None}
    if inner is None or not weights:
        return None, None
    return int(inner.weight.shape[0]), sum(weight.numel() for weight in weights.values())


def _balances_experts(model: Any, config: TrlConfig) -> bool:
    """True if the trainer adds the expert-routing loss, which is a mean over each micro-batch (TRL 1.16)."""
    asked = getattr(config.training, "router_aux_loss_coef", 0.0)
    if getattr(config.training, "objective", None) == "sft":  # transformers adds it where the model's config says so
        asked = None if getattr(model, "output_router_logits", False) else 0.0
    coefficient = getattr(model, "router_aux_loss_coef", 0.0) if asked is None else asked
    return hasattr(model, "output_router_logits") and coefficient != 0.0


def _counts_padding(model: Any) -> bool:
    """True if the model has learned positions (GPT-2). TRL passes no positions, so padding on the left shifts them."""
    import torch

    places = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return any(type(m) is torch.nn.Embedding and m.num_embeddings == places for m in model.modules())


def longest_prompt(rows: Any, config: TrlConfig) -> tuple[int, int, int]:
    """(index of its row, tokens) of the longest prompt as TRL tokenizes it, chat template included; the least tokens.

    Tokenizes in order of decreasing text size, equal texts once, and stops when no shorter text can win: a token has at
    least one byte.
    """
    from transformers import AutoTokenizer

    name = config.model.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.model.model_revision, trust_remote_code=bool(config.training.trust_remote_code)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{name!r} has no tokenizer that transformers can load: {str(error)[:200]}") from error
    if len(rows) == 0:
        raise ConfigError("the train split of the dataset is empty; GRPO needs at least one prompt")
    first: dict[tuple[str, bool], int] = {}  # {text and whether it gets special tokens: the first row that has it}
    for index, prompt in enumerate(rows["prompt"][:]):  # at once: row by row is slow
        first.setdefault(_rendered(prompt, tokenizer, config), index)
    ordered = sorted(first, key=lambda one: len(one[0].encode()), reverse=True)

    def count(one: tuple[str, bool]) -> int:
        text, special = one
        return len(tokenizer(text, add_special_tokens=special)["input_ids"])

    best, best_tokens = 0, -1
    for one in ordered:
        if len(one[0].encode()) + 8 < best_tokens:  # 8: special tokens that a tokenizer adds around a text
            break
        if (tokens := count(one)) > best_tokens:
            best, best_tokens = first[one], tokens
    least = min(len(one[0].encode()) for one in ordered)
    return best, best_tokens, count(next(one for one in ordered if len(one[0].encode()) == least))


def _rendered(prompt: object, tokenizer: Any, config: TrlConfig) -> tuple[str, bool]:
    """(text of a prompt, whether the tokenizer must add special tokens). A chat template contains its own."""
    if isinstance(prompt, str):
        return prompt, True
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        raise ConfigError(
            f"a prompt must be text or a list of messages with role and content; got {str(prompt)[:80]!r}"
        )
    kwargs = config.training.chat_template_kwargs or {}
    if tokenizer.chat_template is None:
        raise ConfigError("the prompts are messages, but the model's tokenizer has no chat template; use plain text")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **kwargs), False


# Checks, before any probe, that the model supports the recipe. Uses a model built on the `meta` device.

_ATTENTION_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_SHOWN = 12  # names of modules in one error


def check_model(model: Any, config: TrlConfig, *, simulated: bool = False) -> None:
    """Raise ConfigError if `model` does not support the recipe.

    The causes: an attention package that is not installed, LoRA targets that match no module, or a quantisation without
    weights to quantise.
    """
    _check_attention(config, simulated=simulated)
    _check_quantization(model, config)
    if config.model.use_peft:
        _check_targets(model, config)


def _check_attention(config: TrlConfig, *, simulated: bool) -> None:
    asked = config.model.attn_implementation
    if simulated and asked == "flash_attention_2":
        return  # by torch's copy of its kernels
    package = _ATTENTION_PACKAGES.get(asked)
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"attn_implementation {asked} needs the package {package}, which is not installed here; sdpa needs none "
            "and uses torch's own flash kernels"
        )


def _check_quantization(model: Any, config: TrlConfig) -> None:
    key = "load_in_4bit" if config.model.load_in_4bit else "load_in_8bit" if config.model.load_in_8bit else None
    if key is None:
        return
    if not config.model.use_peft:
        raise ConfigError(f"{key} needs LoRA, because quantised weights get no gradient; set use_peft: true")
    head = model.get_output_embeddings()
    if not any(_is_linear(module) and module is not head for module in model.modules()):
        raise ConfigError(
            f"{key} quantises linear layers, but {type(model).__name__} has none besides its output head; "
            f"set {key}: false"
        )


def _check_targets(model: Any, config: TrlConfig) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
    from trl import get_peft_config

    lora = get_peft_config(config.model)
    kind = model.config.model_type
    if lora.target_parameters:
        return
    if lora.target_modules is None:
        if kind not in DEFAULTS:
            raise ConfigError(
                f"PEFT has no default lora_target_modules for model_type {kind!r}; name some: {_linear_names(model)}"
            )
        lora.target_modules = DEFAULTS[kind]
    if lora.target_modules == "all-linear":
        return
    if not any(check_target_module_exists(lora, name) for name, _ in model.named_modules()):
        given = lora.target_modules
        shown = ", ".join(sorted(given)) if not isinstance(given, str) else given
        own = _names(model)
        alone = isinstance(given, str) and given in own
        hint = f"; a single name is a pattern for the whole path of a module: write '.*{given}'" if alone else ""
        near = "" if alone else nearest(shown.split(", ")[0], own)
        raise ConfigError(
            f"lora_target_modules must match modules of the model; {shown} matches none{hint}{near}; it has "
            f"{_linear_names(model)}"
        )


def quantised_parameters(model: Any) -> int:
    """Parameters that bitsandbytes packs: the matrices of linear layers, without the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return sum(module.weight.numel() for module in model.modules() if _is_linear(module) and module is not head)


def note_of_experts(model: Any, key: str, itemsize: int) -> tuple[str, ...]:
    """A note on stacks of matrices that are parameters and no linear layers: the experts of a mixture.

    transformers 5.23 quantises linear layers only (integrations/bitsandbytes.py, replace_with_bnb_linear).
    """
    stacks: dict[str, int] = {}
    for module in model.modules():
        kind, own = type(module), module.parameters(recurse=False)
        if not kind.__module__.startswith("torch.nn.") and (count := sum(p.numel() for p in own if p.dim() > 2)):
            stacks[kind.__name__] = stacks.get(kind.__name__, 0) + count
    if not stacks:
        return ()
    return (
        f"{key} leaves {format_bytes(sum(stacks.values()) * itemsize)} of weights as they are: bitsandbytes quantises "
        f"linear layers, and {', '.join(stacks)} holds its matrices as parameters",
    )


def _is_linear(module: Any) -> bool:
    """True if bitsandbytes' integration replaces `module`: a linear layer, also GPT-2's transposed kind."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or type(module) is torch.nn.Linear


def _names(model: Any) -> list[str]:
    """The last parts of the linear layers' names, in the model's order, each once."""
    head = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if _is_linear(module) and module is not head)
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))


def _linear_names(model: Any) -> str:
    names = [name for name in _names(model) if not name.isdigit()]
    return ", ".join(names[:_SHOWN]) if names else "no linear layers"
