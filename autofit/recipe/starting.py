"""The TRL trainer of a recipe, found by its keys without loading TRL; and recipes to start from. No torch here.

A test compares the table of keys with TRL's own parsers.
"""

import csv
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from itertools import islice
from pathlib import Path

import yaml

from autofit.errors import ConfigError
from autofit.recipe.recipe import TrainerName

TRAINERS: tuple[TrainerName, ...] = ("grpo", "sft", "dpo", "reward")  # trainers that a recipe's keys can distinguish
OF_TRL = (*TRAINERS, "rloo")  # trainers whose YAML TRL hands on to `accelerate launch`

HF_KEY = "objective"  # of the plain transformers.Trainer alone

# Keys of TRL 1.16's YAML -> the trainers that take them. Keys that all four take are omitted, as are most of GRPO's
# own: the table only has to distinguish a GRPO recipe with a wrong key from a recipe of another trainer.
TAKEN_BY: dict[str, tuple[TrainerName, ...]] = {
    **dict.fromkeys(
        ("reward_funcs", "reward_model_name_or_path", "num_generations", "max_completion_length", "generation_kwargs",
         "steps_per_generation", "generation_batch_size", "num_iterations", "scale_rewards", "use_vllm", "vllm_mode"),
        ("grpo",),
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "dataset_kwargs", "dataset_text_field", "eval_packing",
         "packing", "packing_strategy"),
        ("sft",),
    ),
    **dict.fromkeys(
        ("discopop_tau", "f_alpha_divergence_coef", "f_divergence_type", "label_smoothing", "ld_alpha", "loss_weights",
         "precompute_ref_batch_size", "precompute_ref_log_probs", "use_weighting"),
        ("dpo",),
    ),
    "center_rewards_coefficient": ("reward",),
    **dict.fromkeys(("activation_offloading", "dataset_num_proc", "max_length", "pad_token"), ("sft", "dpo", "reward")),
    **dict.fromkeys(("beta", "ref_model_mixup_alpha", "ref_model_sync_steps", "sync_ref_model"), ("grpo", "dpo")),
    **dict.fromkeys(("chat_template_path", "eos_token"), ("sft", "reward")),
    **dict.fromkeys(("padding_free", "truncation_mode"), ("sft", "dpo")),
    **dict.fromkeys(("loss_type", "router_aux_loss_coef"), ("grpo", "sft", "dpo")),
    "disable_dropout": ("grpo", "dpo", "reward"),
    "shuffle_dataset": ("grpo", "sft"),
}  # fmt: skip


def trainer_of(values: Mapping[str, object], asked: str | None) -> TrainerName:
    """`asked` (--trainer), or the TRL trainer that takes every key of the recipe; GRPO if it is one of several.

    `hf` is found by its key `objective`.

    Raises ConfigError if `asked` cannot take the recipe, or if several other trainers can.
    """
    if asked is not None and asked not in TRAINERS:
        return asked
    if asked is None and HF_KEY in values:
        return "hf"
    telling = {key: TAKEN_BY[key] for key in values if key in TAKEN_BY}
    possible = [t for t in TRAINERS if all(t in takers for takers in telling.values())]
    if asked is not None:
        foreign = [key for key, takers in telling.items() if asked not in takers]
        if foreign and len(possible) == 1:
            raise ConfigError(
                f"--trainer {asked} does not take {', '.join(foreign)}; these are keys of `trl {possible[0]}`: give "
                f"--trainer {possible[0]} or omit --trainer"
            )
        return asked
    if "grpo" in possible or not possible:
        return "grpo"
    if len(possible) > 1:
        raise ConfigError(
            f"{', '.join(telling)} may belong to a recipe of {' or '.join(possible)}: choose one with --trainer"
        )
    return possible[0]


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
