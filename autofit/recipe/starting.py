"""Recipes to start from: a commented YAML for each trainer, with a model and a dataset. No torch here."""

import csv
import json
from collections.abc import Iterable
from importlib import resources
from itertools import islice
from pathlib import Path

import yaml

from autofit.errors import ConfigError
from autofit.recipe.trainer_keys import TRAINERS

MODEL = "Qwen/Qwen3-1.7B"
# Datasets of TRL's own documentation, in the format of each trainer.
DATASETS = {
    "grpo": "trl-lib/tldr",
    "sft": "trl-lib/Capybara",
    "dpo": "trl-lib/ultrafeedback_binarized",
    "reward": "trl-lib/ultrafeedback_binarized",
}
_MOST_OF_A_LINE = 2**20  # characters
_NO_GUESS = "the trainer cannot be told from the columns"


def recipe_text(trainer: str, *, model: str | None = None, dataset: str | None = None) -> str:
    """The YAML of a recipe for `trainer`."""
    text = resources.files("autofit.recipe").joinpath("templates", f"{trainer}.yaml").read_text(encoding="utf-8")
    named = {"model_name_or_path: MODEL": model or MODEL, "dataset_name: DATASET": dataset or DATASETS[trainer]}
    for line, name in named.items():
        key = line.partition(":")[0]
        text = text.replace(line, f"{key}: {_scalar(name)}", 1)
    return text


def trainer_of_data(dataset: str) -> str:
    """The trainer that the columns of the file `dataset` are for. Raises ConfigError where they do not say."""
    columns = _columns(Path(dataset))
    if {"chosen", "rejected"} <= columns:
        return "dpo"
    if columns & {"messages", "text", "conversations"} or {"prompt", "completion"} <= columns:
        return "sft"
    if "prompt" in columns:
        return "grpo"
    found = f"{dataset} has {', '.join(sorted(columns))}" if columns else f"{dataset} is no file that can be looked at"
    raise ConfigError(f"{_NO_GUESS}: {found}; name it: autofit init {'|'.join(TRAINERS)}")


def _columns(path: Path) -> set[str]:
    """The columns of a JSONL, JSON or CSV file; none for another file."""
    if not path.is_file() or path.suffix not in (".jsonl", ".json", ".csv"):
        return set()
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix == ".csv":
            return set(next(csv.reader(islice(file, 1)), []))
        return _keys(file.readline(_MOST_OF_A_LINE).strip().removeprefix("[").rstrip(","))


def _keys(text: str) -> set[str]:
    try:
        found = json.loads(text)
    except ValueError:
        return set()
    return set(_texts(found)) if isinstance(found, dict) else set()


def _texts(keys: Iterable[object]) -> Iterable[str]:
    return (key for key in keys if isinstance(key, str))


def _scalar(text: str) -> str:
    """`text` as one YAML scalar."""
    return yaml.safe_dump(text, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
