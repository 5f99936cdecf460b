"""What scripts for older releases of TRL, transformers and PEFT say, in the words of the installed ones."""

import argparse
import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import peft
import transformers
import trl
from transformers import HfArgumentParser
from trl import TrlParser

from autofit.plugin.protocol import Inspection, WorstCase
from autofit.scripts.packages import Nothing
from autofit.trainers.older import modern

_TRAINERS = ("SFT", "DPO", "GRPO", "RLOO", "Reward", "KTO")
_OF_DOWNLOADS = ("use_auth_token", "resume_download", "from_tf", "from_flax")
_TOKENIZER = "tokenizer", "processing_class"  # of a trainer


@contextmanager
def understood(code: str, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the script with this `code` may say what is gone; `note` is told of it."""
    trainers = [name for name in _TRAINERS if f"{name}Trainer" in code]
    moved = dict(_moved(code))
    of_trl = {getattr(trl, f"{name}Trainer"): getattr(trl, f"{name}Config") for name in trainers}
    of_trl |= {moved[name]: moved[f"{name[:-7]}Config"] for name in moved if f"{name[:-7]}Config" in moved}
    configs = [
        transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments, trl.ModelConfig, trl.ScriptArguments,
        *of_trl.values(),
    ]  # fmt: skip
    with ExitStack() as patches:
        for name, instead in moved.items():
            setattr(trl, name, instead)
            patches.callback(delattr, trl, name)
        for config in configs:
            patches.enter_context(mock.patch.object(config, "__init__", _of_config(config, note)))
        for kind, config in {transformers.Trainer: None, transformers.Seq2SeqTrainer: None, **of_trl}.items():
            patches.enter_context(mock.patch.object(kind, "__init__", _of_trainer(kind, config, note)))
        for module, name, instead, what in _gone():
            named = module is not trl.ModelConfig or "ModelConfig" in code  # else another's argument has that name
            if named and re.search(rf"\b{name}\b", code) and not hasattr(module, name):
                setattr(module, name, instead)
                patches.callback(delattr, module, name)
                note(f"{name} is gone from {module.__name__}: {what}")
        yield


def modernise(named: dict[str, Any]) -> None:
    """Say arguments of older releases of transformers, by which a model was loaded, in those of today."""
    bits = {key: named.pop(key) for key in ("load_in_4bit", "load_in_8bit") if key in named}
    if any(bits.values()) and named.get("quantization_config") is None:
        named["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
    if named.pop("use_flash_attention_2", False):
        named.setdefault("attn_implementation", "flash_attention_2")
    forget_downloads(named)


def forget_downloads(named: dict[str, Any]) -> None:
    """Take out arguments of older releases that only say how a file is fetched."""
    for key in _OF_DOWNLOADS:
        named.pop(key, None)


def _gone() -> Iterator[tuple[Any, str, Any, str]]:
    """(module, name that it had, what stands for it, and what that does)."""
    as_they_are = "the model and its vocabulary stay as they are"
    yield trl, "setup_chat_format", lambda model, tokenizer, *_, **__: (model, tokenizer), as_they_are
    yield trl, "DataCollatorForCompletionOnlyLM", _completions_only, "the loss is taken of prompts too"
    yield trl, "get_kbit_device_map", lambda: {"": 0}, "the model is loaded onto the card"
    yield trl.ModelConfig, "torch_dtype", property(lambda self: self.dtype), "dtype is read"
    yield trl.ModelConfig, "trust_remote_code", False, "a model's own code is not run"
    new = peft.prepare_model_for_kbit_training
    yield peft, "prepare_model_for_int8_training", new, f"{new.__name__} is called"
    yield huggingface_hub, "HfFolder", Nothing(), "nothing is asked of the hub"
    tokenizer = transformers.PreTrainedTokenizerBase
    yield tokenizer, "_pad_token", property(lambda self: self.pad_token), "pad_token is read"


def _moved(code: str) -> Iterator[tuple[str, Any]]:
    """(name, class) of the trainers and configs in the `code` that trl had, and trl.experimental has."""
    for name in dict.fromkeys(re.findall(r"\b([A-Za-z]+)(?:Trainer|Config)\b", code)):
        if all(hasattr(trl, f"{name}{kind}") for kind in ("Trainer", "Config")):
            continue
        part = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()  # OnlineDPO is in online_dpo
        try:
            with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
                module = importlib.import_module(f"trl.experimental.{part}")
        except ImportError:
            continue
        for whole in (f"{name}Trainer", f"{name}Config"):
            if hasattr(module, whole) and not hasattr(trl, whole):
                yield whole, getattr(module, whole)


def _completions_only(*_: object, tokenizer: Any, **__: object) -> Any:
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)


def _of_config(config: type, note: Callable[[str], None]) -> Any:
    original: Callable[..., None] = config.__init__  # type: ignore[misc]
    known = _fields(config)

    @functools.wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **_modern(named, known, note))

    return __init__


def _of_trainer(kind: type, config: Any, note: Callable[[str], None]) -> Any:
    """Its `tokenizer`, and settings that stand in its config today."""
    original: Callable[..., None] = kind.__init__  # type: ignore[misc]
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        named = dict(zip(list(known)[1:], given, strict=False)) | named
        was, now = _TOKENIZER
        if was in named and was not in known:
            named[now] = named.pop(was)
        if isinstance(named.get("model"), peft.PeftModel) and named.get("peft_config") is not None:
            del named["peft_config"]
            note("peft_config is left out, as the model has its adapters already; an older TRL did the same")
        others = {key: named.pop(key) for key in list(named) if key not in known} if config is not None else {}
        if others:
            arguments = named.get("args")
            whole = {name: getattr(arguments, name) for name in (() if arguments is None else _fields(arguments))}
            named["args"] = config(**whole | _modern(others, _fields(config), note))
        original(self, **named)

    return __init__


def _fields(config: Any) -> list[str]:
    """What the dataclass of a config, or one of it, is made with."""
    return [field.name for field in fields(config) if field.init]


def _modern(named: Mapping[str, Any], known: list[str], note: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of a config in the words of today."""
    if set(named) <= set(known):
        return dict(named)
    return in_words_of_today(named, known, note)


def in_words_of_today(named: Mapping[str, Any], known: Collection[str], note: Callable[[str], None]) -> dict[str, Any]:
    """Arguments of an older release by the names that are `known` today; `note` is told of them."""
    found = modern(named, known, Inspection(device="sim:", worst_case=WorstCase(path=Path()), prompt_tokens=1))
    if found.renamed:
        note(f"older names were read by those of today: {', '.join(found.renamed)}")
    for text in found.notes[bool(found.renamed) :]:
        note(text)
    return dict(found.values)


# -- the command line -------------------------------------------------------------------------------------------------


@contextmanager
def options_understood(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which options that are gone are read by their names of today, and two dataclasses may share a field.

    transformers adds fields to TrainingArguments that a script's own dataclass may have had before; both get the value.
    """
    original, reading = HfArgumentParser.__init__, HfArgumentParser.parse_known_args

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **{"conflict_handler": "resolve", **named})

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        found, rest = reading(self, words, namespace)
        instead = _options_of_today(rest, _parsed(self), note)
        if instead is not None:
            words = [*_without(words, rest), *instead]
            found, rest = reading(self, words, namespace)
        return _shared(found, self), rest

    file_read = TrlParser.set_defaults_with_config

    def set_defaults_with_config(self: Any, **values: Any) -> Any:
        return file_read(self, **in_words_of_today(values, list(_parsed(self)), note))

    with (
        mock.patch.object(TrlParser, "set_defaults_with_config", set_defaults_with_config),
        mock.patch.object(HfArgumentParser, "__init__", __init__),
        mock.patch.object(HfArgumentParser, "parse_known_args", parse_known_args),
    ):
        yield


def _parsed(parser: Any) -> Counter[str]:
    """How many of a parser's dataclasses have each field."""
    kinds = parser.dataclass_types
    return Counter(field.name for kind in kinds for field in dataclasses.fields(kind) if field.init)


def _options_of_today(rest: Sequence[str], known: Counter[str], note: Callable[[str], None]) -> list[str] | None:
    """Options of today for the unknown ones in `rest`, with what is not known then either; None: all stay."""
    named: dict[str, object] = {}
    for word in rest:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            named[key] = value or None
        elif named and (last := next(reversed(named))) and named[last] is None:
            named[last] = word
        else:
            return None
    values = {key: _value(value) for key, value in named.items()}
    found = in_words_of_today(values, known, note)
    if found == values:
        return None
    return [f"--{key}={value}" for key, value in found.items()]


def _value(word: object) -> object:
    """What an option of the command line says; one without a word is true."""
    if word is None or str(word).lower() == "true":
        return True
    return False if str(word).lower() == "false" else word


def _without(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """`words` without those in `rest`, which stand there in the same order."""
    left, kept = list(rest), []
    for word in words:
        if left and word == left[0]:
            del left[0]
        else:
            kept.append(word)
    return kept


def _shared(found: argparse.Namespace, parser: Any) -> argparse.Namespace:
    """The namespace `found`, of which each dataclass takes out its fields, and the last one a shared field."""
    times = _parsed(parser)

    class Shared(argparse.Namespace):
        def __delattr__(self, name: str) -> None:
            times[name] -= 1
            if not times[name]:
                super().__delattr__(name)

    return Shared(**vars(found))
