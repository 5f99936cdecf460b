"""Stand-ins for the models that a script loads by name and that are not on this machine. Imports transformers.

The config is the catalogue's, the tokenizer a small one, and the weights are random ones of the same shape, which go
through transformers' own loading: quantisation, device map and dtype are the script's.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import torch
import transformers.configuration_utils as configurations
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from autofit.errors import ConfigError, quoted
from autofit.recipe import catalogue
from autofit.scripts.older import forget_downloads, modernise
from autofit.trainers.offline import has_vocabulary, small_tokenizer, stand_in_model, stand_in_of
from autofit.trainers.random_checkpoint import READS_SLICES, random_checkpoint
from autofit.units import format_bytes

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
    """The models that stand in for missing ones, each in a folder below `folder`; `note` is told of each."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._homes: dict[str, str] = {}
        self.longest = 0  # tokens of the longest sequence that a model was given
        self._making = False  # the making of a stand-in asks for what it stands for

    def home(self, name: str) -> str:
        """The folder that stands for the model `name`. Raises ConfigError where its config is not known."""
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
        """Context in which what is not on this machine is stood in."""
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
            if self._making or not isinstance(name, str) or Path(name).exists():
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
        """What `load` makes of the stand-in of the model `name`."""
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
        """Tell of weights in float32, which a script gets that asks for no dtype of a model without one."""
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
    """Give a model a head of its own: T5's config says tied whatever its file says, and the stored weights are not."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embeddings is not None and head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(embeddings.weight.detach().clone())


def _name(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """(a model's name among the arguments of a call, the other ones by place)."""
    return (given[0], given[1:]) if given else (named.pop(_NAME, None), ())


def _nothing(*_: object, **__: object) -> None:
    pass
