"""What was pasted, as files: of a training, which the commands' own readers then read, and of a model's config."""

import json
from pathlib import Path

from autofit.errors import ConfigError, printable
from autofit.frontends.reading import is_script

SUFFIXES = (".sh", ".yaml")  # of the file of a training
# Keys that name code, files or other models.
_DROPPED = ("auto_map", "_name_or_path", "_commit_hash", "custom_pipelines", "quantization_config", "name_or_path")
_UNQUANTISED = (
    "quantization_config of config.json is left out: weights count in the recipe's dtype; load_in_4bit: true in the "
    "recipe holds them in 4 bits"
)


def write_training(text: str, folder: Path) -> Path:
    """The file in `folder` with the `text` of a training: a recipe, or a script that starts one."""
    if not text.strip():
        raise ConfigError("paste a recipe (YAML) or the command of a training first, or choose a model")
    if _is_config(text):
        raise ConfigError("this is the config.json of a model: paste it under More, and here a recipe of the training")
    path = folder / f"training{SUFFIXES[0 if is_script(text) else 1]}"
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def _is_config(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def write_config(text: str, folder: Path) -> tuple[str, tuple[str, ...]]:
    """(folder with the config.json in `text`, notes of what was left out). Raises ConfigError for what is no config."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError("config.json must be a JSON object with a model_type, as models on the hub have one")
    kept = {key: value for key, value in content.items() if key not in _DROPPED and not key.startswith("_")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    quantised = "quantization_config" in content
    return str(folder), (_UNQUANTISED,) if quantised else ()
