"""Errors of a recipe of TRL's, as far as they can be told in milliseconds: keys, values, files. No torch here.

The inspection says the same, in the same words, and much more. What is not certain here is left to it.
"""

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection
from autofit.recipe import catalogue

from .key_table import KeyTable, kept_table, taken_env
from .names import overridden_by
from .offline import NO_DATA, NO_MODEL, STATE_IT, or_stated, unknown_model, with_local_file
from .older import modern


def check(trainer: str, values: Mapping[str, object], inspection: Inspection) -> None:
    """Raise ConfigError for a key, a value or a file of the recipe `values` that the inspection would refuse."""
    table = kept_table(trainer)
    if table is not None:
        read = modern(values, table.keys, inspection)
        values, inspection = read.values, read.inspection
        _check_keys(table, values, inspection)
    with or_stated(inspection):
        with_local_file(dict(values), needed=inspection.prompt_tokens is None)
    model = values.get("model_name_or_path")
    if not model and table is not None:  # else a misspelt key may be the model's
        raise ConfigError(NO_MODEL)
    if isinstance(model, str) and (_is_path(model) or _is_nowhere(model)) and not os.path.exists(model):
        raise ConfigError(unknown_model(model, simulated=inspection.simulated))
    has_data = values.get("dataset_name") or values.get("datasets")
    if table is not None and inspection.prompt_tokens is None and not has_data:
        raise ConfigError(f"{NO_DATA}, {STATE_IT}" if inspection.simulated else NO_DATA)


def _check_keys(table: KeyTable, values: Mapping[str, object], inspection: Inspection) -> None:
    given = copy.deepcopy(dict(values))
    taken_env(given)
    given = overridden_by(table.synonyms, given, inspection.changed)
    if inspection.device != "cuda":
        given.pop("use_cpu", None)  # replaced, whatever it is
    table.check(given, ranks=inspection.ranks)


def _is_path(name: str) -> bool:
    """True if `name` can only be a folder: no name on the hub looks like that."""
    return Path(name).is_absolute() or name.startswith(("./", "../"))


# Names without an owner that the hub still knows, of the models that it began with; no other one has been added since.
_FIRST_MODELS = re.compile(r"(albert|bert|camembert|ctrl|distil|gpt2|openai-gpt|roberta|t5|transfo-xl|xlm|xlnet)")


def _is_nowhere(name: str) -> bool:
    """True if `name`, where it is no folder, can be no model of the hub or the catalogue either."""
    if "$" in name or catalogue.architecture(name) is not None:  # ${stage} of a pipeline
        return False
    is_bare = re.fullmatch(r"[\w.-]+", name) and not _FIRST_MODELS.match(name) and not os.environ.get("HF_ENDPOINT")
    return bool(is_bare) or name.count("/") > 1 or (_is_offline() and not _is_kept(name))


def _is_offline() -> bool:
    """True if the hub's client fetches nothing, by the variables and values that it reads."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in {"1", "ON", "YES", "TRUE"}


def _is_kept(name: str) -> bool:
    """True if the cache of the hub's client has a folder of the model `name`."""
    variables = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    places = [Path(home) / "hub", *(Path(os.environ[v]) for v in variables if os.environ.get(v))]
    return any((place.expanduser() / f"models--{name.replace('/', '--')}").is_dir() for place in places)
