"""The config.json of a model that the catalogue lacks, as somebody pasted it: its shape, and nothing that is loaded."""

import json
from pathlib import Path

from autofit.errors import ConfigError, printable

# Keys that name code, files or other models.
_DROPPED = ("auto_map", "_name_or_path", "_commit_hash", "custom_pipelines", "quantization_config", "name_or_path")


def write_config(text: str, folder: Path) -> str:
    """The folder with the config.json in `text`. Raises ConfigError for what is no config of a model."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError("config.json must be a JSON object with a model_type, as models on the hub have one")
    kept = {key: value for key, value in content.items() if key not in _DROPPED and not key.startswith("_")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return str(folder)
