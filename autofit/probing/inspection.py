"""What a recipe means, found out once before any probe: TRL's parse, the longest prompt, the size of the model.

Runs in the fork server's child or in a process of its own, because it imports torch and may import the user's code.
"""

import hashlib
import importlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.probing.model_check import check_model
from autofit.probing.offline import clear, made_up_dataset, read_config, stand_in_model, unknown_model
from autofit.recipe.trl_config import TrlConfig, parse, plain

_STATE_IT = "or give --prompt-tokens N, the longest prompt in tokens, and a made-up one stands in for the dataset"
_DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def run(request_path: str) -> int:
    """Inspect the recipe of the request at `request_path`; answer in `answer` beside it. 0 either way."""
    request = read_json(Path(request_path))
    assert request is not None
    values = cast(dict[str, object], request["values"])
    worst_case = Path(str(request["worst_case"]))
    try:
        prompt_tokens = cast(int | None, request.get("prompt_tokens"))
        answer = inspect(str(request["trainer"]), values, str(request["device"]), worst_case, prompt_tokens)
    except ConfigError as error:
        answer = {"error": str(error)}
    write_json(Path(str(request["answer"])), answer)
    return 0


def inspect(
    trainer: str, values: dict[str, object], device: str, worst_case: Path, prompt_tokens: int | None = None
) -> dict[str, object]:
    """The resolved recipe as JSON; writes the row with the longest prompt to `worst_case`. Raises ConfigError.

    On a simulated card `prompt_tokens` asks for a made-up prompt of so many tokens in place of the dataset.
    """
    clear(worst_case.parent)
    with _or_stated(device, prompt_tokens):
        values = with_local_file(values, needed=prompt_tokens is None)
    go_offline_without_a_hub()
    config = parse(trainer, values, overrides=device_overrides(device))
    answer: dict[str, object] = {"values": plain(values), "resolved": config.resolved}
    if device.startswith("sim:"):
        config = _with_stand_ins(trainer, values, config, worst_case.parent, prompt_tokens)
    plug_in = importlib.import_module(f"autofit.trainers.{trainer}")
    answer |= _model_size(config, plug_in.MODEL)
    if trainer != "grpo":
        with _or_stated(device, prompt_tokens):
            return answer | _longest_sample(plug_in, config, worst_case)
    rewards = plug_in.reward_functions(config)  # a wrong path is said before a large dataset is read
    with _or_stated(device, prompt_tokens):
        rows = plug_in.prompts(config)
    index, tokens = longest_prompt(rows, config)
    _keep(rows.select([index]), {"prompt_tokens": tokens}, worst_case)
    content = content_hash(rewards, rows if prompt_tokens is None else None)  # made-up ones are told by their length
    count = len(rows) if prompt_tokens is None else None
    return answer | {"longest_prompt_tokens": tokens, "num_prompts": count, "content_hash": content}


def _with_stand_ins(
    trainer: str, values: dict[str, object], config: TrlConfig, folder: Path, prompt_tokens: int | None
) -> TrlConfig:
    """`config` with what cannot be reached replaced by what stands in for it in `folder`. Raises ConfigError."""
    from transformers import AutoTokenizer

    name = config.model.model_name_or_path
    if not name:
        raise ConfigError("a recipe needs a model: give model_name_or_path")
    trust = bool(config.training.trust_remote_code)
    loading = {"revision": config.model.model_revision, "trust_remote_code": trust}
    model = stand_in_model(name, folder, **loading)
    changes: dict[str, object] = {"model_name_or_path": model}
    if prompt_tokens is None:
        if model != name:
            raise ConfigError(f"the tokenizer of {name!r} cannot be reached to count the longest prompt; {_STATE_IT}")
    else:
        tokenizer = AutoTokenizer.from_pretrained(model, **(loading if model == name else {}))
        column = getattr(config.training, "dataset_text_field", None)
        made_up = made_up_dataset(trainer, prompt_tokens, tokenizer, folder, text_column=column)
        changes |= {"dataset_name": made_up, "dataset_train_split": "train", "dataset_streaming": False}
        values = {k: v for k, v in values.items() if k not in ("datasets", "dataset_config")}
    return parse(trainer, values, overrides={**device_overrides("sim:"), **changes})


@contextmanager
def _or_stated(device: str, prompt_tokens: int | None) -> Iterator[None]:
    """On a simulated card an error about the dataset says what would do without one."""
    try:
        yield
    except ConfigError as error:
        if not device.startswith("sim:") or prompt_tokens is not None:
            raise
        raise ConfigError(f"{error}; {_STATE_IT}") from error


def _longest_sample(plug_in: Any, config: TrlConfig, worst_case: Path) -> dict[str, object]:
    """The longest sample as TRL tokenises and truncates it, kept in `worst_case`; {key: value} of the answer."""
    row, facts = plug_in.worst_case(config)
    _keep(row, facts, worst_case)
    digest = hashlib.sha256(repr((facts, row[0])).encode())
    return {"longest_sample_tokens": facts["longest_tokens"], "content_hash": digest.hexdigest()[:16]}


def _keep(row: Any, facts: Mapping[str, object], worst_case: Path) -> None:
    """As datasets keeps a row: dates, bytes and images stay what they are."""
    row.save_to_disk(str(worst_case.parent / "worst_row"))
    write_json(worst_case, dict(facts))


def content_hash(rewards: list[Any], rows: Any) -> str:
    """A hash of what the recipe only names: the files of its reward functions, and the data where there is any."""
    files = {f for f in (getattr(sys.modules.get(r.__module__), "__file__", None) for r in rewards if callable(r)) if f}
    digest = hashlib.sha256(b"" if rows is None else str(rows._fingerprint).encode())
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def device_overrides(device: str) -> dict[str, object]:
    """What a recipe written for a GPU needs to be parsed, or to run, where there is none."""
    return {} if device == "cuda" else {"use_cpu": True}


def with_local_file(values: dict[str, object], *, needed: bool = True) -> dict[str, object]:
    """`dataset_name: data.jsonl` said as TRL's parser takes a file: `datasets: [{path: json, data_files: ...}]`."""
    name = values.get("dataset_name")
    if not isinstance(name, str) or Path(name).suffix not in _DATA_FORMATS or values.get("datasets"):
        return values
    if needed and not Path(name).is_file():
        raise ConfigError(f"dataset_name {name!r} looks like a file, and there is no such file in {Path.cwd()}")
    rest = {key: value for key, value in values.items() if key != "dataset_name"}
    return rest | {"datasets": [{"path": _DATA_FORMATS[Path(name).suffix], "data_files": name}]}


def go_offline_without_a_hub() -> None:
    """Tell the hub's client to stay offline when the hub cannot be reached; it would retry for 23 s a file."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    url = urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=3):
            return
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True


def _model_size(config: TrlConfig, kind: Any) -> dict[str, object]:
    """Parameters of the model that the auto class `kind` makes, and bytes of its weights."""
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
    dtype = importlib.import_module("autofit.trainers.common").dtype_of(config.model.dtype, found)
    quantised = 0.53 if config.model.load_in_4bit else 1.0 if config.model.load_in_8bit else dtype.itemsize
    weights_bytes = int(parameters * quantised)
    balances = _balances_experts(found.get_text_config(), config)
    return {
        "model_parameters": parameters, "weights_bytes": weights_bytes, "balances_experts": balances,
        "counts_padding": _counts_padding(model),
    }  # fmt: skip


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
