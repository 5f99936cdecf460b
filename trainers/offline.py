"""Stand-ins on a simulated card for an unreachable model or dataset: a config.json, and a synthetic longest prompt.

A simulated card keeps no values, so it needs only the config of a model, and only the length of a prompt. Imports
transformers.
"""

import difflib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, option, printable, quoted
from autofit.plugin.protocol import Inspection
from autofit.recipe import catalogue
from autofit.recipe.keys import OTHER_MODELS

# Bounds of a model's config.json: a file whose model would build for ever is refused before it is built.
#
# Far above what is published: Llama 3.1 405B has 126 layers and a hidden size of 16,384, Kimi K2 384 experts a layer,
# Gemma 3 a vocabulary of 262,208.

MOST_BYTES = 2**22  # of the file; those with a list entry a layer have 20 KB
# The last words of a key, and the largest number that it may have.
_MOST = {
    "layers": 2_000, "n_layer": 2_000, "depth": 2_000, "experts": 20_000, "heads": 20_000, "n_head": 20_000,
    "hidden_size": 2**20, "hidden_dim": 2**20, "d_model": 2**20, "n_embd": 2**20, "head_dim": 2**16,
    "vocab_size": 2**25, "intermediate_size": 2**22, "ffn_dim": 2**22, "d_ff": 2**22,
}  # fmt: skip
_MOST_OF_ANY = 2**40


def read_config_file(path: Path) -> dict[str, object]:
    """The JSON object in `path`, a regular file of at most 4 MiB with believable sizes. Raises ConfigError."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"model_name_or_path must be a folder with a config.json; {path.parent} has none") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} must be a regular file")
    if found.st_size > MOST_BYTES:
        raise ConfigError(f"{path} must have at most {MOST_BYTES >> 20} MiB; it has {found.st_size / 2**20:.1f}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object; got {quoted(content)}")
    wrong = next(_unbelievable(content), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    return content


def _unbelievable(content: Mapping[str, object]) -> Iterator[str]:
    """Error of each number that no model has, in words."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _unbelievable(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = next((most for words, most in _MOST.items() if key.endswith(words)), _MOST_OF_ANY)
            low = 0 if most != _MOST_OF_ANY else -_MOST_OF_ANY
            if not low <= value <= most:
                yield f"{printable(key, 60)} must be a number from {low} to {most:,}; got {quoted(value, 40)}"


# Files and folders that a recipe names, looked for without an import of torch.

NO_MODEL = "a recipe needs a model: give model_name_or_path"
NO_DATA = "a recipe needs a dataset: give dataset_name (a folder or a name) or datasets"
_DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def with_local_file(values: dict[str, object], *, needed: bool = True) -> dict[str, object]:
    """`values` with `dataset_name: data.jsonl` in the form of TRL's parser: `datasets: [{path: json, ...}]`."""
    name = values.get("dataset_name")
    if not isinstance(name, str) or Path(name).suffix not in _DATA_FORMATS or values.get("datasets"):
        return values
    if needed and not os.path.isfile(name):
        raise ConfigError(f"dataset_name {name!r} looks like a file, but there is no such file in {Path.cwd()}")
    rest = {key: value for key, value in values.items() if key != "dataset_name"}
    return rest | {"datasets": [{"path": _DATA_FORMATS[Path(name).suffix], "data_files": name}]}


SAMPLES = "made_up_samples"
_WORDS = 260  # tokens of the small tokenizer, which loads in 2 ms; bytes and times depend on the model's vocabulary
_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tokenizer.tiktoken",
)  # fmt: skip
_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
# Subfolders of the folder that an inspection passes to its probes, as is that of the samples.
_MODELS = {key: f"stand_in_{key.removesuffix('_name_or_path')}" for key in ("model_name_or_path", *OTHER_MODELS)}
# Columns of a synthetic sample, each with its share of the tokens; TRL's DPO adds its answers to its prompt. Columns of
# `_ids` hold tokens in place of text.
_COLUMNS = {
    "grpo": {"prompt": 1.0},
    "rloo": {"prompt": 1.0},
    "sft": {"text": 1.0},
    "dpo": {"prompt": 0.5, "chosen": 0.5, "rejected": 0.5},
    "reward": {"chosen": 1.0, "rejected": 1.0},
    "hf sft": {"input_ids": 1.0},
    "hf asft": {"input_ids": 1.0},
    "hf classify": {"input_ids": 1.0},
    "hf label_tokens": {"input_ids": 1.0},
    "hf gkd": {"input_ids": 1.0},
    "hf diffusion": {"input_ids": 1.0},
    "hf ebft": {"input_ids": 1.0},
    **{f"hf {objective}": {"chosen_ids": 1.0, "rejected_ids": 1.0}
       for objective in ("dpo", "kto", "orpo", "simpo", "cpo", "reward", "embed", "rerank")},
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


# Reward functions that need no column of a dataset, but the trainer that calls them (features.py).
FEATURES = tuple(f"{__package__}.features.{name}" for name in ("features", "whitened_features"))


def overrides(values: Mapping[str, object], folder: Path) -> dict[str, object]:
    """{key: value} by which a probe overrides the recipe, to use the stand-ins in the inspection's `folder`."""
    changes: dict[str, object] = {
        key: str((folder / home).resolve())
        for key, home in _MODELS.items()
        if values.get(key) and (folder / home).is_dir()
    }
    if "model_name_or_path" in changes:
        changes |= without_tokens(values)
    rewards = values.get("reward_funcs")
    if (folder / SAMPLES).is_dir() and isinstance(rewards, list):  # may need columns of the real dataset
        changes["reward_funcs"] = [name if name in FEATURES else f"{__name__}.no_reward" for name in rewards]
    return changes


def without_tokens(values: Mapping[str, object]) -> dict[str, object]:
    """Changes of a recipe for the tokenizer of a stand-in, which has none of the model's own tokens."""
    return {key: None for key in ("eos_token", "pad_token") if values.get(key)}


class OutOfReachError(ConfigError):
    """A tokenizer or a dataset of the hub cannot be reached from here."""


STATE_IT = (
    f"or give {option('prompt-tokens', 'N')}: a made-up sample of N tokens (of grpo and rloo: a prompt) then replaces "
    "the dataset"
)


def cut_samples(tokens: int) -> str:
    """The note of a recipe whose dataset or tokenizer cannot be read, and whose samples are cut to `tokens`."""
    return f"the dataset or tokenizer cannot be read from here: every sample counts as max_length, {tokens:,} tokens"


@contextmanager
def or_stated(inspection: Inspection) -> Iterator[None]:
    """Context that adds to a dataset error, on a simulated card, the option that needs no dataset."""
    try:
        yield
    except ConfigError as error:
        if not inspection.simulated or inspection.prompt_tokens is not None:
            raise
        raise type(error)(f"{error.marked}; {STATE_IT}") from error


def clear(folder: Path) -> None:
    """Remove the stand-ins of an earlier inspection from `folder`."""
    for name in (*_MODELS.values(), SAMPLES):
        shutil.rmtree(folder / name, ignore_errors=True)


def no_reward(completions: list[object], **_: object) -> list[float]:
    """0.0 for each completion. The cost of the recipe's own rewards is not simulated: they are arbitrary code."""
    return [0.0] * len(completions)


# -- models -----------------------------------------------------------------------------------------------------------


def stand_in_of(config: Mapping[str, object], folder: Path) -> str:
    """A folder below `folder` with a model's `config` and a small tokenizer."""
    return _write(folder / _MODELS["model_name_or_path"], config, copied=None)


def stand_in_model(name: str, folder: Path, *, key: str = "model_name_or_path", **loading: Any) -> str:
    """`name` if its config and tokenizer can be loaded, else a folder below `folder` with both.

    Search order for the config: a local folder (its config.json is enough), the hub's cache and the hub, the catalogue.
    Raises ConfigError if none of them knows the name.
    """
    from transformers import AutoConfig, AutoTokenizer

    home = folder / _MODELS[key]
    if os.path.isdir(name):
        config: Mapping[str, object] = read_config(Path(name))
    else:
        known = catalogue.architecture(name)
        try:
            config = AutoConfig.from_pretrained(name, **loading).to_dict()
        except (OSError, ValueError, KeyError) as error:
            if known is None:
                raise ConfigError(unknown_model(name, key=key)) from error
            config = known.config
            return _write(home, config, copied=None)
    try:
        AutoTokenizer.from_pretrained(name, **loading)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    else:
        if has_vocabulary(name, loading.get("revision")):  # some classes load without a file, with no vocabulary
            return name
    return _write(home, config, copied=Path(name) if os.path.isdir(name) else None)


def has_vocabulary(name: str, revision: str | None) -> bool:
    """True if a vocabulary file of `name` is in its folder, or in the hub's cache (loading has fetched it)."""
    from huggingface_hub import try_to_load_from_cache

    if os.path.isdir(name):
        return any((Path(name) / file).exists() for file in _VOCABULARIES)
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _VOCABULARIES)


def unknown_model(name: str, *, simulated: bool = True, key: str = "model_name_or_path") -> str:
    """The error text for an unknown model (no folder, not on the hub, not in the catalogue), with similar names."""
    if not simulated and catalogue.architecture(name) is not None:
        return (
            f"{key} must be a folder with a config.json or a name on the model hub; got {name!r}, but "
            f"the hub does not answer; a simulated card does not need it: {option('gpu', 'NAME')}"
        )
    names = {n.lower(): n for n in catalogue.names()} | {n.lower().rpartition("/")[2]: n for n in catalogue.names()}
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    asked = re.sub("_+", ".", Path(name).name) if is_path else name  # ModelScope's folders say 1___7B for 1.7B
    close = dict.fromkeys(names[n] for n in difflib.get_close_matches(asked.lower(), names, n=4, cutoff=0.6))
    near = f"; similar names: {', '.join(close)}" if close else ""
    if is_path:
        same = f", such as {option('set', f'{key}={next(iter(close))}')}" if close else ""
        return (
            f"{key}: there is no folder {name!r} with a config.json here; to simulate it, give the model's name on the "
            f"hub{same}, or put its config.json into a folder of that name"
        )
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    give = (
        f"; to simulate it, save https://huggingface.co/{name}/raw/main/config.json into a folder and give the folder, "
        "with the model's own .py files if it has any (as Baichuan and InternLM have), and trust_remote_code: true"
    )
    return (
        f"{key} must be a folder with a config.json, a name on the model hub (if reachable) or a name in "
        f"autofit's catalogue; got {name!r}{near}{give if on_hub else ''}"
    )


# transformers 5.23, quantizers/quantizer_mxfp4.py: validate_environment, is_trainable
_MXFP4 = (
    "transformers trains them only unpacked, which it does by itself where the package kernels is not installed and "
    "refuses where it is; a copy in 16 bits trains with both"
)


def quantised_already(name: str, **loading: Any) -> tuple[dict[str, object], tuple[str, ...]]:
    """The settings ({load_in_4bit: True, ...}) that the weights of the model `name` are stored by already; and notes.

    Empty where its config has no quantisation, or none is at hand.
    """
    from autofit.plugin.models import model_config

    try:
        found = model_config(name, **loading).to_dict().get("quantization_config")
    except (OSError, ValueError, KeyError, TypeError):
        return {}, ()
    if not isinstance(found, Mapping):
        return {}, ()
    if found.get("quant_method") != "bitsandbytes":
        method = printable(str(found.get("quant_method")), 40)
        words = f"{name} holds {method} weights, which are simulated in 16 bits or as dtype says: "
        return {}, (words + (_MXFP4 if method == "mxfp4" else "an upper bound"),)
    bits = "4bit" if found.get("load_in_4bit") else "8bit"
    settings: dict[str, object] = {f"load_in_{bits}": True}
    if bits == "4bit":
        settings["bnb_4bit_quant_type"] = found.get("bnb_4bit_quant_type", "fp4")
        settings["use_bnb_nested_quant"] = bool(found.get("bnb_4bit_use_double_quant", False))
    words = ", ".join(f"{key}: {str(value).lower()}" for key, value in settings.items())
    skipped = " (the layers that it leaves in 16 bits are counted in 4)" if "unsloth-bnb" in name.lower() else ""
    return settings, (f"{name} holds weights of {bits[0]} bits{skipped}, so the recipe is read with {words}",)


def read_config(folder: Path) -> dict[str, object]:
    """The config.json in `folder`. Raises ConfigError if it is missing, not valid, or lacks the keys of the size."""
    path = folder / "config.json"
    content = read_config_file(path)
    missing = _missing(content)
    if missing:
        raise ConfigError(f"{path} must have {', '.join(missing)}, because the model's size depends on it; add it")
    return content


def _missing(content: Mapping[str, object]) -> list[str]:
    """Missing keys that decide a model's size; transformers would silently use defaults for them.

    For a config with nested configs (`text_config`) only the type is required: published ones omit many keys.
    """
    from transformers import CONFIG_MAPPING

    kind = content.get("model_type")
    if kind is None:
        return ["model_type", *(key for key in _SHAPE[:4] if key not in content)]
    if kind not in CONFIG_MAPPING or getattr(CONFIG_MAPPING[kind], "sub_configs", None):
        return []
    default = CONFIG_MAPPING[kind]()
    stored = default.to_dict()  # without what a config works out: nemotron_h counts its list of layers
    names = {key: default.attribute_map.get(key, key) for key in _SHAPE}
    asked = {key: own for key, own in names.items() if stored.get(own) is not None}
    return [own for key, own in asked.items() if content.get(key) is None and content.get(own) is None]


def _write(home: Path, config: Mapping[str, object], *, copied: Path | None) -> str:
    """Write `home`: `config`, a small tokenizer, and a `copied` model's code and limits of images. Returns its path."""
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for path in (*copied.glob("*.py"), *copied.glob("preprocessor_config.json")) if copied is not None else ():
        shutil.copy(path, home)
    vocabulary = config.get("vocab_size")
    small_tokenizer(min(vocabulary, _WORDS) if isinstance(vocabulary, int) else _WORDS).save_pretrained(home)
    return str(home)


def small_tokenizer(words: int = _WORDS) -> Any:
    """A tokenizer with a chat template and at most `words` tokens: all bytes, and " a", the word of synthetic prompts.

    A byte-level tokenizer, because transformers loads some models' tokenizers (Qwen2's) by a class for this kind only.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<eos>", "<pad>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda byte: (byte not in "aĠ", byte))
    names = [*special, *alphabet[:2], "Ġa", *alphabet[2:]][:words]
    vocabulary = {name: i for i, name in enumerate(names)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # as language models have; older transformers add more
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


# -- samples ----------------------------------------------------------------------------------------------------------


def made_up_dataset(
    trainer: str, tokens: int, tokenizer: Any, folder: Path, *, text_column: str | None, max_length: int | None = None
) -> str:
    """The path of a dataset for the trainer below `folder`, with one sample (for GRPO, one prompt) of `tokens` tokens.

    TRL's reward trainer adds an end token to each answer, and drops answers over `max_length`: they have that length.
    """
    if trainer == "reward":
        tokens = min(tokens, max_length or tokens) - 1
    home = folder / SAMPLES
    home.mkdir(parents=True, exist_ok=True)
    row: dict[str, object] = {}
    for column, share in _COLUMNS[trainer].items():
        text = _text(max(1, round(tokens * share)), tokenizer)
        row[column] = list(tokenizer(text)["input_ids"]) if column.endswith("_ids") else text
    if trainer == "sft" and text_column:
        row = {text_column: row["text"]}
    (home / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return str(home)


def _text(tokens: int, tokenizer: Any) -> str:
    """A text of `tokens` tokens: one word repeated, which is one token in every tokenizer."""
    words = found = 0
    for _ in range(8):
        words = max(1, words + tokens - found)
        text = " ".join(["a"] * words)
        found = len(tokenizer(text)["input_ids"])
        if found == tokens:
            return text
    raise ConfigError(
        f"the model's tokenizer makes {found} tokens instead of {tokens} for the synthetic prompt; give "
        f"{option('prompt-tokens')} {found}"
    )
