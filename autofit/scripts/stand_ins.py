"""Stand-ins for missing models that a script loads by name. Imports transformers.

The config is the catalogue's, the tokenizer a small one, and the weights are random ones of the same shape, which go
through transformers' own loading: quantisation, device map and dtype are the script's. What scripts for older releases
of TRL, transformers and PEFT say is put in the words of the installed ones.

Unsloth imports only where there is a card, and its kernels are not simulated. A script of it gets transformers' model,
PEFT's adapters and TRL's trainer, with the settings and dtypes that Unsloth gives them (read at unsloth 015bdef0 and
unsloth-zoo ce232d6c): 4 bits, adapters of float32, samples of up to `max_seq_length`, checkpoints.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import accelerate
import huggingface_hub
import peft
import torch
import transformers
import transformers.configuration_utils as configurations
import trl
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import TrlParser

from autofit.errors import ConfigError, quoted
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.recipe import catalogue
from autofit.recipe.findings import CHECKPOINTING
from autofit.scripts.packages import UNSLOTH, IdleModule, Nothing
from autofit.trainers.offline import has_vocabulary, small_tokenizer, stand_in_model, stand_in_of
from autofit.trainers.older import modern
from autofit.trainers.random_checkpoint import READS_SLICES, random_checkpoint
from autofit.units import format_bytes

TRAINERS = ("SFT", "DPO", "GRPO", "RLOO", "Reward", "KTO")
_OF_DOWNLOADS = ("use_auth_token", "resume_download", "from_tf", "from_flax")
_TOKENIZER = "tokenizer", "processing_class"  # of a trainer


@contextmanager
def understood(code: str, note: Callable[[str], None]) -> Iterator[None]:
    """Context in which the script with this `code` may use removed names; `note` is called with each."""
    trainers = [name for name in TRAINERS if f"{name}Trainer" in code]
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
    """Translate arguments of older releases of transformers, by which a model was loaded, to today's."""
    bits = {key: named.pop(key) for key in ("load_in_4bit", "load_in_8bit") if key in named}
    if any(bits.values()) and named.get("quantization_config") is None:
        named["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
    if named.pop("use_flash_attention_2", False):
        named.setdefault("attn_implementation", "flash_attention_2")
    if named.get("use_cache", True) is None:  # a config of today takes no None
        del named["use_cache"]
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
    for name in ("HfFolder", "Repository"):
        yield huggingface_hub, name, Nothing(), "nothing is asked of the hub"
    yield accelerate.utils, "is_ccl_available", lambda: False, "oneCCL counts as missing"
    yield transformers, "is_torch_tpu_available", lambda *_, **__: False, "a TPU counts as missing"
    half = property(lambda self: self.mixed_precision == "fp16")
    yield accelerate.Accelerator, "use_fp16", half, "mixed_precision is read"
    tell = "nothing is told to the hub"
    yield transformers.utils, "send_example_telemetry", Nothing(), tell
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
    set_always = {field.name for field in fields(config) if field.default not in (None, MISSING)}

    @functools.wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        unset = {key for key, value in named.items() if value is None and key in set_always}  # older ones took None
        original(self, *given, **_modern({key: named[key] for key in named if key not in unset}, known, note))

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
    """Names of the arguments of a config's dataclass, or of one of its objects."""
    return [field.name for field in fields(config) if field.init]


def _modern(named: Mapping[str, Any], known: list[str], note: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of a config in the words of today."""
    if set(named) <= set(known):
        return dict(named)
    return in_words_of_today(named, known, note)


def in_words_of_today(named: Mapping[str, Any], known: Collection[str], note: Callable[[str], None]) -> dict[str, Any]:
    """Arguments of an older release by the names that are `known` today; `note` is called with them."""
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
    """Number of a parser's dataclasses that have each field."""
    kinds = parser.dataclass_types
    return Counter(field.name for kind in kinds for field in dataclasses.fields(kind) if field.init)


def _options_of_today(rest: Sequence[str], known: Counter[str], note: Callable[[str], None]) -> list[str] | None:
    """Options of today for the unknown ones in `rest`, and the still unknown ones; None: all stay."""
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
    """Value of an option of the command line; one that has no word is true."""
    if word is None or str(word).lower() == "true":
        return True
    return False if str(word).lower() == "false" else word


def _without(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """`words` less those in `rest`, which stand there in the same order."""
    left, kept = list(rest), []
    for word in words:
        if left and word == left[0]:
            del left[0]
        else:
            kept.append(word)
    return kept


def _shared(found: argparse.Namespace, parser: Any) -> argparse.Namespace:
    """The namespace `found`, from which each dataclass takes its fields, and the last one a shared field."""
    times = _parsed(parser)

    class Shared(argparse.Namespace):
        def __delattr__(self, name: str) -> None:
            times[name] -= 1
            if not times[name]:
                super().__delattr__(name)

    return Shared(**vars(found))


# Its name before transformers 5.
PreTrainedConfig: Any = getattr(configurations, "PreTrainedConfig", None) or configurations.PretrainedConfig
_BY_NAME = (AutoConfig, AutoTokenizer, AutoProcessor, PreTrainedConfig, PreTrainedTokenizerBase)
_OF_LOADING = ("revision", "trust_remote_code")
_OF_MODEL = ("dtype", "torch_dtype", "attn_implementation")  # which a config has too
_NAME = "pretrained_model_name_or_path"
_SMALL = "a small one, in which a letter is a token"
# What says that a file is not here; older ones open the file None without a hub.
_OLDER = () if READS_SLICES else (AttributeError, TypeError)
_NO_WEIGHTS, _NO_FILE = (OSError, *_OLDER), (OSError, ValueError, *_OLDER)
_MUCH = 10**9  # bytes of weights in float32 that are told


class StandIns:
    """The models that stand in for missing ones, each in a folder below `folder`; `note` is called for each."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._homes: dict[str, str] = {}
        self.longest = 0  # tokens of the longest sequence that a model was given
        self._making = False  # the making of a stand-in asks for what it stands for

    def home(self, name: str) -> str:
        """The folder that stands for the model `name`. Raises ConfigError if its config is unknown."""
        if name not in self._homes:
            own = self._folder / hashlib.sha256(name.encode()).hexdigest()[:12]
            self._making = True
            try:
                self._homes[name] = self._made(name, own)
            finally:
                self._making = False
            self._note(f"{name} is not on this machine: a small tokenizer, in which a letter is a token, and random "
                       "weights of the same shape stand in")  # fmt: skip
        return self._homes[name]

    def _made(self, name: str, folder: Path) -> str:
        try:
            return str(stand_in_model(name, folder))
        except ConfigError:
            known, base = catalogue.others().get(name.lower()), catalogue.base_of(name)
            if known is not None:
                return str(stand_in_of(known.config, folder))
            if base is None:
                raise ConfigError(
                    f"the model {quoted(name, 100)} is not on this machine, and autofit does not know its shape; save "
                    f"its config.json as {name}/config.json in {Path.cwd()}, where the script then finds it"
                ) from None
            self._note(f"the shape of {name} is not known here: that of {base.name}, by its name, stands in")
            return str(stand_in_model(base.name, folder))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which missing models are stood in."""
        with ExitStack() as patches:
            for kind in _BY_NAME:
                patches.enter_context(mock.patch.object(kind, "from_pretrained", self._named(kind)))
            loaded = self._weights(vars(PreTrainedModel)["from_pretrained"])
            patches.enter_context(mock.patch.object(PreTrainedModel, "from_pretrained", loaded))
            for login in ("login", "notebook_login"):
                patches.enter_context(mock.patch.object(huggingface_hub, login, _nothing))
            yield

    def _named(self, kind: Any) -> Any:
        original = vars(kind)["from_pretrained"]

        def from_pretrained(cls: Any, *rest: Any, **named: Any) -> Any:
            load = original.__get__(None, cls)
            name, rest = _name(rest, named)
            forget_downloads(named)
            if self._making or not isinstance(name, str):
                return load(name, *rest, **named)
            if kind is AutoTokenizer and os.path.isdir(name) and not has_vocabulary(name, None):
                self._note(f"there is no tokenizer in {name}: {_SMALL}, stands in")
                return small_tokenizer()
            if Path(name).exists():
                return load(name, *rest, **named)
            try:
                found = load(name, *rest, **named)
            except _NO_FILE:
                return self._loaded(kind, load, name, rest, named)
            if isinstance(found, PreTrainedTokenizerBase) and not has_vocabulary(name, named.get("revision")):
                return self._loaded(kind, load, name, rest, named)  # some load without a file, with no vocabulary
            return found

        return classmethod(from_pretrained)

    def _loaded(self, kind: Any, load: Callable[..., Any], name: str, rest: tuple[Any, ...], named: Any) -> Any:
        """Result of `load` for the stand-in of the model `name`."""
        try:
            home = self.home(name)
        except ConfigError:
            if kind is not AutoTokenizer:
                raise
            self._note(f"the tokenizer {name} is not on this machine: {_SMALL}, stands in")
            return small_tokenizer()  # of a repository with nothing but a tokenizer
        named.pop("tokenizer_type", None)  # the stand-in's is its own
        try:
            return load(home, *rest, **named)
        except OSError:
            if kind is not AutoProcessor:
                raise
            self._note(f"{name} takes pictures, whose processor is not on this machine: texts alone are simulated")
            return AutoTokenizer.from_pretrained(home)
        except TypeError:
            if kind not in (AutoTokenizer, PreTrainedTokenizerBase):
                raise
            return small_tokenizer()  # of a class that takes no bytes for tokens, as T5's

    def _weights(self, original: Any) -> Any:
        def from_pretrained(cls: Any, *rest: Any, **named: Any) -> Any:
            load = original.__get__(None, cls)
            name, rest = _name(rest, named)
            modernise(named)
            try:
                found = load(name, *rest, **named)
            except _NO_WEIGHTS:
                if not isinstance(name, str):
                    raise
                found = self._random(cls, load, name, named)
            self._look_at(found, str(name))
            found.register_forward_pre_hook(self._measure, with_kwargs=True)
            return found

        return classmethod(from_pretrained)

    def _look_at(self, model: PreTrainedModel, name: str) -> None:
        """Note weights in float32, the dtype that a script gets if both it and the model leave the dtype open."""
        whole = sum(each.nbytes for each in model.parameters() if each.dtype == torch.float32)
        if whole > _MUCH:
            self._note(
                f"the weights of {name} are float32, {format_bytes(whole)}; half with dtype=torch.bfloat16 in "
                "from_pretrained, or model_init_kwargs={'dtype': 'bfloat16'} in the config of a trainer of TRL"
            )

    def _measure(self, _: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", given[0] if given else None)
        joined = named.get("position_ids") is not None  # several samples in one row
        if isinstance(ids, torch.Tensor) and ids.dim() > 1 and not joined:
            self.longest = max(self.longest, ids.shape[-1])

    def _random(self, kind: Any, load: Callable[..., Any], name: str, named: dict[str, Any]) -> Any:
        """The model `name` as `load` makes it of random weights."""
        config = named.pop("config", None)
        if not isinstance(config, PreTrainedConfig):
            loading = {key: named[key] for key in _OF_LOADING if key in named}
            config = kind.config_class.from_pretrained(name, **loading)
            for key in [key for key in named if hasattr(config, key) and key not in _OF_MODEL]:
                setattr(config, key, named.pop(key))
        dtype = "dtype" if READS_SLICES else "torch_dtype"
        if getattr(config, dtype, None) is None:  # as transformers reads weights in float32
            setattr(config, dtype, torch.float32)
        stored = getattr(config, "quantization_config", None)  # of a checkpoint that is quantised already
        if stored is not None:
            del config.quantization_config
            if dict(stored).get("quant_method") != "bitsandbytes":
                self._note(f"{name} holds quantised weights, which are simulated in 16 bits: an upper bound")
            elif named.get("quantization_config") is None:
                named["quantization_config"] = BitsAndBytesConfig.from_dict(dict(stored))
        made = random_checkpoint(kind, config, device="cpu")
        found = load(None, config=config, state_dict=made, **named)
        found.config._name_or_path = name
        stated, _ = kind.config_class.get_config_dict(self._homes.get(name, name))
        if stated.get("tie_word_embeddings") is False:
            _untie(found)
        if name not in self._homes:
            self._note(f"the weights of {name} are not on this machine: random ones of the same shape stand in")
        return found


def _untie(model: Any) -> None:
    """Give a model a head of its own: T5's config says tied in any case, and the stored weights are not."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embeddings is not None and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(embeddings.weight.detach().clone())


def _name(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """(a model's name among the arguments of a call, the other ones by place)."""
    return (given[0], given[1:]) if given else (named.pop(_NAME, None), ())


def _nothing(*_: object, **__: object) -> None:
    pass


# -- Unsloth ----------------------------------------------------------------------------------------------------------

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
    """Context in which the `code` of a script that imports Unsloth has the stand-in; `note` is called with it."""
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
        """The config's `__init__` with defaults: bfloat16 if the card has it, and the model's length."""
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
                module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)  # for who asks whether it is there
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
    """TRL's config with the learning rate of embeddings, which is free in bytes and in seconds."""

    def __init__(self, *given: Any, embedding_learning_rate: float | None = None, **named: Any) -> None:
        super().__init__(*given, **named)


def _with_whole_groups(named: Mapping[str, Any]) -> dict[str, Any]:
    """A config's arguments, with a micro-batch of a group's completions if its own splits groups."""
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
