"""Common parts of the plug-ins: datasets and trainers as TRL's scripts make them, and random weights."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ClassVar, cast
from unittest import mock

import numpy as np
import torch
import transformers
from accelerate.utils import get_max_memory
from datasets import Dataset, load_dataset, load_from_disk
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.trainer_utils import IntervalStrategy
from trl import get_dataset, get_peft_config, get_quantization_config
from trl.data_utils import is_conversational

from autofit.errors import ConfigError
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.files import ScratchFolder
from autofit.plugin.protocol import WorstCase

from .images import sees
from .offline import NO_DATA, SAMPLES, OutOfReachError
from .random_checkpoint import random_checkpoint
from .trl_config import TrlConfig

# Settings turned off in a trainer that only prepares its dataset: each acts outside the process or needs a real model.
_IDLE: dict[str, object] = {
    "push_to_hub": False, "report_to": [], "eval_strategy": IntervalStrategy.NO, "load_best_model_at_end": False,
    "use_liger_kernel": False, "activation_offloading": False, "router_aux_loss_coef": None, "deepspeed": None,
    "precompute_ref_log_probs": False, "sync_ref_model": False,
}  # fmt: skip
_TEMPLATE = "chat_template_path"  # key of SFT
_ROWS = 1000  # rows per batch when lengths are read
LARGEST = 64  # rows that are tokenised before the whole dataset
_MOST_CHARACTERS = 8_000_000  # some two seconds of a tokenizer
Counts = np.ndarray[Any, np.dtype[np.int64]]


# -- the dataset ------------------------------------------------------------------------------------------------------


def split(config: TrlConfig, *, evaluation: bool = False) -> Any:
    """The train (or test) split of the dataset, loaded as TRL's script loads it.

    Raises OutOfReachError for a name on the hub, if that cannot be reached; ConfigError.
    """
    script, mixture = config.script, config.datasets
    if not mixture.datasets and not script.dataset_name:
        raise ConfigError(NO_DATA)
    try:
        if mixture.datasets:
            splits = get_dataset(mixture)
        else:
            splits = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    except (OSError, ValueError, TypeError) as error:
        text = f"the dataset {dataset_name(config)} cannot be loaded: {short(error)}"
        named = not mixture.datasets and not os.path.exists(script.dataset_name)  # on the hub, if anywhere
        raise (OutOfReachError if named and constants.HF_HUB_OFFLINE else ConfigError)(text) from error
    except Exception as error:  # datasets raises classes of its own for broken files
        raise ConfigError(f"the dataset {dataset_name(config)} cannot be read: {short(error)}") from error
    key = "dataset_test_split" if evaluation else "dataset_train_split"
    wanted = getattr(script, key)
    if wanted not in splits:
        raise ConfigError(f"{key} {wanted!r} is not in the dataset; it has {', '.join(splits)}")
    return splits[wanted]


def dataset_name(config: TrlConfig) -> str:
    """The dataset's name in the recipe, in words where samples were made up in its place."""
    if config.datasets.datasets:
        return ", ".join(str(d.data_files or d.path) for d in config.datasets.datasets)
    name = str(config.script.dataset_name)
    return "the made-up samples" if os.path.basename(name) == SAMPLES else name


def short(error: BaseException) -> str:
    """The text of an error in one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def samples_per_step(config: TrlConfig) -> int:
    """Samples (completions, for GRPO) that one optimizer step of one rank trains on."""
    training = config.training
    return int(training.per_device_train_batch_size) * int(training.gradient_accumulation_steps)


def train_rows(config: TrlConfig, trainer: str, kinds: Mapping[str, tuple[str, ...]]) -> Dataset:
    """The train split, checked to have the columns of one of `kinds` ({name of the format: its columns})."""
    if config.script.dataset_streaming:
        raise ConfigError("a search must read the whole dataset for its longest sample; set dataset_streaming to false")
    rows = split(config)
    found = set(rows.column_names)
    if not any(found >= set(columns) for columns in kinds.values()):
        wanted = ", or ".join(f"{' and '.join(columns)} ({name})" for name, columns in kinds.items())
        raise ConfigError(
            f"{trainer} needs a dataset with the columns {wanted}; {dataset_name(config)} has "
            f"{', '.join(rows.column_names)}; rename the columns"
        )
    if found & {"image", "images"}:
        raise ConfigError(
            f"{trainer} cannot be predicted on images with this model yet: the dataset {dataset_name(config)} must be "
            "text only here; GRPO, RLOO and SFT of an image-text model read images on a simulated card"
        )
    if len(rows) == 0:
        raise ConfigError(f"the train split of the dataset is empty; {trainer} needs at least one sample")
    return rows


def prepared(kind: type, module: ModuleType, config: TrlConfig, rows: Dataset, **more: Any) -> Dataset:
    """`rows` as the trainer `kind` trains on them: after TRL's own templates, tokens, truncation, filters and packing.

    Builds the trainer with a stand-in model of a few hundred parameters, so its checks of the recipe run too; their
    errors become a ConfigError. Changes `config.training`. `more` are further arguments of `kind`.
    """
    training = config.training
    for key in _IDLE.keys() & set(vars(training)):
        setattr(training, key, _IDLE[key])
    with ScratchFolder() as folder, _models_from(module, _stand_in):
        training.output_dir = folder
        try:
            trainer = kind(model=config.model.model_name_or_path, args=training, train_dataset=rows, **more)
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError, OSError, ImportError) as error:
            if _lacks_template(config, rows):
                instead = "use plain text" + (", or set chat_template_path" if hasattr(training, _TEMPLATE) else "")
                text = f"the samples are messages, but the model's tokenizer has no chat template; {instead}"
                raise ConfigError(text) from error
            kind_of = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"TRL's {kind.__name__} cannot use {dataset_name(config)}: {kind_of}{short(error)}"
            ) from error
    return trainer.train_dataset


def _lacks_template(config: TrlConfig, rows: Dataset) -> bool:
    """True if `rows` are messages and the tokenizer has no template for them."""
    if not is_conversational(rows[0]) or getattr(config.training, _TEMPLATE, None):
        return False
    name, revision = config.model.model_name_or_path, config.model.model_revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError):
        return False
    return tokenizer.chat_template is None


def prepared_longest(
    kind: type,
    module: ModuleType,
    config: TrlConfig,
    rows: Dataset,
    widths: Callable[[Dataset], Counts] | None,
    **more: Any,
) -> tuple[Dataset, Sequence[int] | None]:
    """`prepared` rows, including the longest: only the largest texts if one of them fills `max_length` by `widths`.

    Second, where only the largest were prepared, their places in `rows`; else None.

    No sample is longer than `max_length` after TRL's truncation, so the others need not be tokenised. Pass None as
    `widths` for a trainer that drops long samples. Raises ConfigError if no sample is left to train on.
    """
    limit = config.training.max_length
    if widths is not None and limit is not None and len(rows) > LARGEST:
        largest = largest_rows(rows)
        some = prepared(kind, module, config, rows.select(largest), **more)
        if len(some) and int(widths(some).max()) >= limit:
            return some, largest if len(some) == len(largest) else None
    found = prepared(kind, module, config, rows, **more)
    if len(found) == 0:
        raise ConfigError(f"none of the {len(rows)} samples is left to train on at max_length={limit}; increase it")
    return found, None


def largest_rows(rows: Dataset) -> list[int]:
    """Indices of the rows with the most text, at most 64, and of a few others whose answers have the most."""
    sizes, answers = zip(*((len(str(row)), _answer_size(row)) for row in rows), strict=True)
    found = sorted(range(len(rows)), key=sizes.__getitem__, reverse=True)[:LARGEST]
    longest = sorted(range(len(rows)), key=answers.__getitem__, reverse=True)[: LARGEST // 8]
    return [*found, *(place for place in longest if answers[place] and place not in found)]


def _answer_size(row: Mapping[str, Any]) -> int:
    """Characters of what a loss that counts answers alone counts; 0 where all of a row is counted."""
    told = [row[name] for name in ("completion", "chosen", "rejected") if name in row]
    messages = row.get("messages")
    if isinstance(messages, list):
        told += [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"]
    return sum(len(str(text)) for text in told)


def sampled(rows: Dataset, most: int) -> Dataset:
    """`most` rows drawn at random, in their order; fewer where they are so long that tokenising them takes seconds."""
    places = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
    some = rows.select(places[:: max(1, len(places) // LARGEST)])
    characters = sum(len(str(row)) for row in some) / max(1, len(some))
    step = int(np.ceil(len(places) * characters / _MOST_CHARACTERS))
    return rows.select(places[:: max(1, step)])


def lengths(rows: Dataset, column: str) -> Counts:
    """Tokens of each row in `column`, a column of lists (rows,)."""
    parts = [
        batch[column].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
        for batch in rows.select_columns([column]).with_format("arrow").iter(_ROWS)
    ]
    return np.concatenate(parts).astype(np.int64)


def limit_of(config: TrlConfig, worst_case: Mapping[str, Any]) -> int | None:
    """The candidate's `max_length`. Raises ConfigError if it has none and the recipe's own limit truncated samples."""
    limit: int | None = config.training.max_length
    if limit is None and worst_case["cut"]:
        raise ConfigError(
            f"a candidate must have a max_length, as the recipe's max_length={worst_case['max_length']} cut samples"
        )
    return limit


def read_worst_case(worst_case: WorstCase) -> dict[str, Any]:
    """Facts of the longest sample (for GRPO, of the longest prompt), plus `rows`, a dataset with only that row."""
    return {
        **worst_case.facts,
        "padded": worst_case.padded,
        "rows": load_from_disk(str(worst_case.folder / "worst_row")),
    }


def documents(lengths: list[int], count: int) -> list[int]:
    """The lengths of packed documents, cut or repeated to a total of `count` tokens."""
    kept: list[int] = []
    while sum(kept) < count:
        kept.append(min(lengths[len(kept) % len(lengths)], count - sum(kept)))
    return kept


def fitted(tokens: list[int], count: int) -> list[int]:
    """`tokens`, cut or repeated to `count` tokens."""
    return (tokens * (count // max(1, len(tokens)) + 1))[:count]


# -- the trainer ------------------------------------------------------------------------------------------------------


class AlikeSteps:
    """A mixin whose subclasses here say that each of their steps computes the same, but those with `alike` false.

    A class that someone derives from one may do otherwise, so it says nothing (fakegpu/patches/same_calls.py).
    """

    steps_alike: ClassVar[bool]

    def __init_subclass__(cls, *, alike: bool = True, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.steps_alike = alike and cls.__module__.startswith(f"{__package__}.")


class PreparedRows(AlikeSteps):
    """A mixin for one of TRL's trainers: it trains on rows that TRL has tokenised already."""

    def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
        return dataset


def real(kind: Callable[..., Any], config: TrlConfig, **more: Any) -> Any:
    """The trainer that TRL's script makes from `config`; `more` are its further arguments (rewards)."""
    evaluation = split(config, evaluation=True) if config.training.eval_strategy != "no" else None
    return made(kind, config, train_dataset=split(config), eval_dataset=evaluation, **more)


def probed(
    kind: Callable[..., Any], module: ModuleType, config: TrlConfig, row: Mapping[str, Any], *,
    evaluated: Mapping[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """A trainer with random weights, whose dataset repeats `row` for every step of a probe; `more` as for `real`.

    A recipe that evaluates does so on a batch of the row `evaluated`; None: of `row`.
    """
    more["eval_dataset"] = one_batch(evaluated or row, config)
    with random_weights(module):
        trainer = made(kind, config, train_dataset=repeated(row, config), **more)
    trainer.repeats_one_row = True
    return trainer


def repeated(row: Mapping[str, Any], config: TrlConfig) -> Dataset:
    """A dataset of `row` alone, for every step of a probe."""
    count = samples_per_step(config) * int(config.training.world_size) * (config.training.max_steps + 1)
    return Dataset.from_list([dict(row)]).select([0] * count)


def one_batch(row: Mapping[str, Any], config: TrlConfig, *, samples_of_row: int = 1) -> Dataset | None:
    """The rows of one batch of the evaluation on every rank; None for a recipe that does not evaluate.

    The trainer makes `samples_of_row` samples of each row. No metrics are computed of the predictions, so a batch
    leaves only its loss behind (Trainer.evaluate, `prediction_loss_only`), and a second one takes as much.
    """
    if not config.evaluates:
        return None
    samples = int(config.training.per_device_eval_batch_size) * int(config.training.world_size)
    return Dataset.from_list([dict(row)]).select([0] * max(1, samples // samples_of_row))


def made(kind: Callable[..., Any], config: TrlConfig, **more: Any) -> Any:
    """`kind` called as TRL's scripts call their trainers, with `more` (datasets, rewards)."""
    training, model = config.training, config.model
    kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    training.model_init_kwargs = kwargs | (training.model_init_kwargs or {})
    return kind(
        model=model.model_name_or_path, args=training, quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model), **more,
    )  # fmt: skip


# -- weights ----------------------------------------------------------------------------------------------------------


def random_weights(module: ModuleType) -> Any:
    """Context in which the trainer of `module` makes its models from their config: full size, without a download."""
    return _models_from(module, random_model)


@contextmanager
def _models_from(module: ModuleType, source: Callable[..., PreTrainedModel]) -> Iterator[None]:
    original = module.create_model_from_path
    module.create_model_from_path = source  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.create_model_from_path = original  # type: ignore[attr-defined]


def _stand_in(model_id: str, architecture: Any = None, **_: Any) -> PreTrainedModel:
    """A minimal Llama with the name `model_id`, so that the trainer loads the tokenizer of `model_id`."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, num_labels=1)
    scores = architecture is AutoModelForSequenceClassification
    model: PreTrainedModel = (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)
    model.config._name_or_path = model_id
    return model


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configs of models


def random_model(model_id: str, architecture: Any = None, **kwargs: Any) -> PreTrainedModel:
    """A model of `model_id`'s architecture with random weights, in the dtype, attention and quantisation of TRL."""
    trust = kwargs.get("trust_remote_code", False)
    config = AutoConfig.from_pretrained(model_id, revision=kwargs.get("revision") or "main", trust_remote_code=trust)
    if "num_labels" in kwargs:
        config.num_labels = kwargs["num_labels"]
    if "experts_over" in kwargs:
        share_experts(config, kwargs["experts_over"])
    architecture = _concrete(architecture, config) or _architecture(config)
    if getattr(architecture, "config_class", None) is config.sub_configs.get("text_config", ""):
        config = config.get_text_config()  # as an auto class does for the words of a model that takes images
    on_card = torch.cuda.is_available() and not _cpu_wanted()
    dtype = dtype_of(kwargs.get("dtype", "float32"), config)
    options = {"dtype": dtype, "attn_implementation": kwargs.get("attn_implementation")}
    quantization = kwargs.get("quantization_config")
    if hasattr(config, "quantization_config"):  # of a checkpoint that is quantised already, which is not loaded here
        del config.quantization_config
    auto = trust and hasattr(architecture, "from_config")  # code of the Hub, which only an auto class finds
    given = kwargs.get("device_map")
    own_card = given if isinstance(given, dict) else None  # of a rank that loads onto it
    stays = not on_card or (quantization is None and _loads_on_host(own_card))
    device, places = ("cpu", None) if stays else ("cuda", own_card or _device_map())
    by_deepspeed = device == "cuda" and places is None
    if quantization is None and (auto or not on_card or by_deepspeed):
        make = architecture.from_config if auto else architecture._from_config
        with torch.device(device), _values_of_a_checkpoint():
            model = make(config, **options)
        model.tie_weights()  # which making one without first values leaves out
    else:
        model = _loaded(architecture, config, device, places, quantization_config=quantization, **options)
    if kwargs.get("use_kernels"):  # as from_pretrained does
        model.set_use_kernels(True)
    model.config._name_or_path = model_id
    return model


def _loaded(
    architecture: Any, config: Any, device: str, places: dict[str, int] | None, **options: Any
) -> PreTrainedModel:
    """A model with random weights, made on `device`, that transformers loads as it loads a checkpoint."""
    if places:
        get_max_memory()  # it takes a little of each card, and device_map="auto", which TRL says, asks it first
    saved = _concrete(_architecture(config), config)  # a reward model's head is not in the checkpoint it begins with
    saved = saved if hasattr(saved, "_from_config") else architecture
    kinds = {name: options[name] for name in ("dtype", "attn_implementation")}
    state = random_checkpoint(saved, config, device=device, **kinds)
    with mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1"):  # threads would draw the values in any order
        loaded = architecture.from_pretrained(None, config=config, state_dict=state, device_map=places, **options)
    return cast("PreTrainedModel", loaded)


def _values_of_a_checkpoint() -> AbstractContextManager[object]:
    """Context in which a model's weights get no first values, as where `from_pretrained` makes it.

    On a simulated card alone, which keeps no values: a probe on a device trains on random ones.
    """
    return nullcontext() if active_gpu() is None else no_init_weights()


def share_experts(config: Any, ranks: int) -> None:
    """Leave `config` one rank's share of its experts. Raises ConfigError where they cannot be dealt out evenly."""
    text = config.get_text_config()
    key = next((name for name in _EXPERTS if getattr(text, name, None)), None)
    if key is None:
        raise ConfigError("expert_parallel_size needs a mixture of experts; this model has no experts")
    count, chosen = getattr(text, key), getattr(text, "num_experts_per_tok", 1)
    if count % ranks or count // ranks < chosen:
        raise ConfigError(
            f"expert_parallel_size {ranks} must divide the {count} experts and leave each rank {chosen} or more"
        )
    setattr(text, key, count // ranks)


def _concrete(architecture: Any, config: Any) -> Any:
    """The class that an auto class selects for `config`; any other class unchanged."""
    mapping = getattr(architecture, "_model_mapping", None)
    return mapping[type(config)] if mapping is not None and type(config) in mapping else architecture


def _architecture(config: Any) -> Any:
    names = config.architectures or []
    usual = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    return getattr(transformers, names[0], usual) if names else _concrete(usual, config)


def dtype_of(asked: Any, config: Any) -> torch.dtype:
    """The torch dtype of a recipe's `dtype`; "auto" is the model's own."""
    if isinstance(asked, torch.dtype):
        return asked
    if asked in ("auto", None):
        found = getattr(config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32
    dtype = getattr(torch, str(asked))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _device_map() -> dict[str, int] | None:
    """Device map of a model on the card, as TRL says it: on several ranks and under DeepSpeed it says nothing.

    bitsandbytes then takes the card that is this rank's, and ZeRO-3 refuses to be told.
    """
    from accelerate import DistributedType, PartialState

    distributed = PartialState().distributed_type in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED)
    return None if distributed else {"": 0}


_STAYS: ContextVar[bool] = ContextVar("stays on the host", default=False)


@contextmanager
def on_host() -> Iterator[None]:
    """Context in which a model is made in host memory, from where a trainer moves it."""
    before = _STAYS.set(True)
    try:
        yield
    finally:
        _STAYS.reset(before)


def _loads_on_host(own_card: dict[str, int] | None) -> bool:
    """True if the model is loaded into host memory: by TRL on several ranks, for which DDP or FSDP moves it."""
    from accelerate import DistributedType, PartialState

    several = PartialState().distributed_type == DistributedType.MULTI_GPU
    return _STAYS.get() or (several and own_card is None)


def _cpu_wanted() -> bool:
    from accelerate import PartialState

    return PartialState().device.type == "cpu"  # type: ignore[no-any-return]
