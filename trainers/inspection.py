"""What a recipe of TRL means, found out once before any probe: its stand-ins, the longest prompt, the model's size."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.plugin.protocol import Inspection, WorstCase

from .common import dtype_of
from .model_check import check_model
from .offline import STATE_IT, made_up_dataset, read_config, stand_in_model, unknown_model
from .trl_config import TrlConfig, parse

_DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The size of a recipe's model, and what of its architecture decides which knobs are neutral."""

    parameters: int
    weights_bytes: int
    balances_experts: bool  # a loss over each micro-batch's routing
    counts_padding: bool  # positions are learned and count it, and a rollout is padded to its longest prompt


def with_stand_ins(trainer: str, values: dict[str, object], config: TrlConfig, inspection: Inspection) -> TrlConfig:
    """`config` with stand-ins for the model and the data that cannot be reached. Raises ConfigError."""
    from transformers import AutoTokenizer

    folder, prompt_tokens = inspection.worst_case.folder, inspection.prompt_tokens
    name = config.model.model_name_or_path
    if not name:
        raise ConfigError("a recipe needs a model: give model_name_or_path")
    trust = bool(config.training.trust_remote_code)
    loading = {"revision": config.model.model_revision, "trust_remote_code": trust}
    model = stand_in_model(name, folder, **loading)
    changes: dict[str, object] = {"model_name_or_path": model}
    if prompt_tokens is None:
        if model != name:
            raise ConfigError(f"the tokenizer of {name!r} cannot be reached to count the longest prompt; {STATE_IT}")
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, **(loading if model == name else {}))
        column = getattr(config.training, "dataset_text_field", None)
        made_up = made_up_dataset(trainer, prompt_tokens, tokenizer, folder, text_column=column)
        changes |= {"dataset_name": made_up, "dataset_train_split": "train", "dataset_streaming": False}
        values = {k: v for k, v in values.items() if k not in ("datasets", "dataset_config")}
    return parse(trainer, values, overrides={"use_cpu": True, **changes})


def keep(row: Any, facts: Mapping[str, object], worst_case: WorstCase) -> None:
    """Keep the longest sample as datasets keeps a row: dates, bytes and images stay what they are."""
    row.save_to_disk(str(worst_case.folder / "worst_row"))
    write_json(worst_case.path, dict(facts))


def data_hash(rewards: list[Any], rows: Any) -> str:
    """A hash of the files of the reward functions, and of the data where there is any."""
    files = {f for f in (getattr(sys.modules.get(r.__module__), "__file__", None) for r in rewards if callable(r)) if f}
    digest = hashlib.sha256(b"" if rows is None else str(rows._fingerprint).encode())
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def architecture_hash(model: str) -> str:
    """A hash of the architecture in the folder `model`; "" where a name of the hub stands for it."""
    path = Path(model) / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def with_local_file(values: dict[str, object], *, needed: bool = True) -> dict[str, object]:
    """`dataset_name: data.jsonl` said as TRL's parser takes a file: `datasets: [{path: json, data_files: ...}]`."""
    name = values.get("dataset_name")
    if not isinstance(name, str) or Path(name).suffix not in _DATA_FORMATS or values.get("datasets"):
        return values
    if needed and not Path(name).is_file():
        raise ConfigError(f"dataset_name {name!r} looks like a file, and there is no such file in {Path.cwd()}")
    rest = {key: value for key, value in values.items() if key != "dataset_name"}
    return rest | {"datasets": [{"path": _DATA_FORMATS[Path(name).suffix], "data_files": name}]}


def model_facts(config: TrlConfig, kind: Any) -> ModelFacts:
    """The facts of the model that the auto class `kind` makes. Raises ConfigError."""
    import torch
    from transformers import AutoConfig

    name = config.model.model_name_or_path
    if not name:
        raise ConfigError("a recipe needs a model: give model_name_or_path")
    trust = bool(config.training.trust_remote_code)
    if Path(name).is_dir():
        read_config(Path(name))
    try:
        found = AutoConfig.from_pretrained(name, revision=config.model.model_revision, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        if not Path(name).is_dir():
            raise ConfigError(unknown_model(name, simulated=False)) from error
        raise ConfigError(f"{name}/config.json cannot be used: {' '.join(str(error).split())[:200]}") from error
    try:
        with torch.device("meta"):
            model = kind.from_config(found, trust_remote_code=trust)
    except Exception as error:
        raise ConfigError(f"{name!r} is no model for {kind.__name__} of transformers: {str(error)[:300]}") from error
    check_model(model, config)
    parameters = sum(p.numel() for p in model.parameters())
    dtype = dtype_of(config.model.dtype, found)
    quantised = 0.53 if config.model.load_in_4bit else 1.0 if config.model.load_in_8bit else dtype.itemsize
    return ModelFacts(
        parameters=parameters, weights_bytes=int(parameters * quantised), counts_padding=_counts_padding(model),
        balances_experts=_balances_experts(found.get_text_config(), config),
    )  # fmt: skip


def _balances_experts(model: Any, config: TrlConfig) -> bool:
    """Whether the trainer adds the loss of a mixture's routing, which is a mean over each micro-batch (TRL 1.16)."""
    asked = getattr(config.training, "router_aux_loss_coef", 0.0)
    coefficient = getattr(model, "router_aux_loss_coef", 0.0) if asked is None else asked
    return hasattr(model, "output_router_logits") and coefficient != 0.0


def _counts_padding(model: Any) -> bool:
    """Whether positions have embeddings of their own (GPT-2): TRL gives none, so padding on the left moves a prompt."""
    import torch

    places = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return any(type(m) is torch.nn.Embedding and m.num_embeddings == places for m in model.modules())


def longest_prompt(rows: Any, config: TrlConfig) -> tuple[int, int]:
    """(row, tokens) of the longest prompt as TRL tokenizes it, chat template included.

    Tokenizes from the longest text down and stops when no shorter one can win: no token is shorter than a byte.
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
    texts = [_rendered(prompt, tokenizer, config) for prompt in rows["prompt"]]
    sizes = [len(text.encode()) for text, _ in texts]
    best, best_tokens = 0, -1
    for index in sorted(range(len(texts)), key=sizes.__getitem__, reverse=True):
        if sizes[index] + 8 < best_tokens:  # 8: special tokens that a tokenizer adds around a text
            break
        text, special = texts[index]
        tokens = len(tokenizer(text, add_special_tokens=special)["input_ids"])
        if tokens > best_tokens:
            best, best_tokens = index, tokens
    return best, best_tokens


def _rendered(prompt: object, tokenizer: Any, config: TrlConfig) -> tuple[str, bool]:
    """The text of a prompt, and whether the tokenizer adds its special tokens to it (a chat template has its own)."""
    if isinstance(prompt, str):
        return prompt, True
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        raise ConfigError(
            f"a prompt must be text or a list of messages with role and content; got {str(prompt)[:80]!r}"
        )
    kwargs = config.training.chat_template_kwargs or {}
    if tokenizer.chat_template is None:
        raise ConfigError("the prompts are messages, and the model's tokenizer has no chat template; use plain text")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **kwargs), False
