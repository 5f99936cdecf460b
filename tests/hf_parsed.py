"""Configs of the trainer hf, and its trainings."""

from pathlib import Path

from datasets import Dataset

from autofit.trainers.hf_script import SAMPLES
from autofit.trainers.trl_config import TrlConfig, parse

LENGTH = 128
LORA: dict[str, object] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
TAUGHT: dict[str, object] = {"teacher_model_name_or_path": ""}  # the small model


def parsed(model: Path, folder: Path, **changes: object) -> TrlConfig:
    if changes.get("teacher_model_name_or_path") == "":
        changes["teacher_model_name_or_path"] = str(model)
    values: dict[str, object] = {
        "model_name_or_path": str(model), "output_dir": str(folder), "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "max_steps": 2, "max_length": LENGTH, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 1, **changes,
    }  # fmt: skip
    return parse("hf", values, overrides={})


def rows(config: TrlConfig, count: int = 8) -> Dataset:
    """Rows of `LENGTH` tokens; packed ones of two samples."""
    tokens = {"ids": [5] * LENGTH, "labels": [5] * LENGTH}
    if config.training.objective in SAMPLES:
        row: dict[str, object] = {"input_ids": tokens["ids"], "labels": tokens["labels"]}
        if config.training.packing:
            row["seq_lengths"] = [LENGTH // 2, LENGTH // 2]
    else:
        row = {f"{side}_{name}": found for side in ("chosen", "rejected") for name, found in tokens.items()}
    return Dataset.from_list([row] * count)
