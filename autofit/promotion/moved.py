"""What a recipe needs from the disk, and where it is looked for once the study was moved or copied."""

import importlib.machinery
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from autofit.errors import ConfigError

_NAMES_FILES = re.compile(r"dataset|data_files|data_dir|model_name_or_path|reward|teacher|tokenizer|chat_template_path")
_IS_A_PATH = re.compile(r"(/|\./|\.\./|~/).*|.*\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|jinja)")
_MODULE = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)+")


def working_folder(searched_from: Path, studies: Path, values: Mapping[str, object]) -> Path:
    """The folder that a full run works in: the search's, or where that is gone the one that has most of the recipe.

    Looked at are the folder beside the studies and the working directory.
    """
    if searched_from.is_dir():
        return searched_from
    places = (studies.absolute().parent, Path.cwd())
    return max(places, key=lambda place: sum(_is_there(key, text, place) for key, text in _named(values)))


def check_found(values: Mapping[str, object], place: Path, *, searched_from: Path) -> None:
    """Raise ConfigError for data, a model or a reward module of the recipe that is not found from `place`."""
    lost = missing(values, place)
    if not lost:
        return
    gone = "" if place == searched_from else f" (the search's folder {searched_from} is gone)"
    raise ConfigError(
        f"the recipe needs {', '.join(lost)}, not found from {place}{gone}; put it back there, or run `autofit search` "
        f"again with paths that are there"
    )


def missing(values: Mapping[str, object], place: Path) -> list[str]:
    """The files and modules that the recipe names and that are not there, seen from `place`: `data.jsonl (key)`."""
    lost = [(key, text) for key, text in _named(values) if _must_be_there(key, text)]
    return [f"{text} ({key})" for key, text in lost if not _is_there(key, text, place)]


def _named(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """(key, text) of all that may name a file or a module."""
    found = ((key, text) for key, value in values.items() if _NAMES_FILES.search(key) for text in _texts(value))
    return [*dict.fromkeys(found)]


def _must_be_there(key: str, text: str) -> bool:
    """Whether `text` can only be a file or a module; `data` may also be a dataset of the Hub."""
    path = _IS_A_PATH.fullmatch(text) and "://" not in text and "*" not in text
    return bool(path) or _module(key, text) is not None


def _is_there(key: str, text: str, place: Path) -> bool:
    module = _module(key, text)
    if module is not None and not _IS_A_PATH.fullmatch(text):
        return importlib.machinery.PathFinder.find_spec(module, [str(place), *filter(None, sys.path)]) is not None
    try:
        return bool(text) and (place / Path(text).expanduser()).exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False


def _module(key: str, text: str) -> str | None:
    """The outermost package of a reward function's dotted path."""
    found = _MODULE.fullmatch(text) if "reward_func" in key else None
    return None if found is None else found[1]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
