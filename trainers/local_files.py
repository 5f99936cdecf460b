"""Files and folders that a recipe names, looked for without an import of torch."""

import os
from pathlib import Path

from autofit.errors import ConfigError

NO_MODEL = "a recipe needs a model: give model_name_or_path"
_DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def with_local_file(values: dict[str, object], *, needed: bool = True) -> dict[str, object]:
    """`values` with `dataset_name: data.jsonl` in the form of TRL's parser: `datasets: [{path: json, ...}]`."""
    name = values.get("dataset_name")
    if not isinstance(name, str) or Path(name).suffix not in _DATA_FORMATS or values.get("datasets"):
        return values
    if needed and not os.path.isfile(name):
        raise ConfigError(f"dataset_name {name!r} looks like a file, but there is no such file in {Path.cwd()}")
    rest = {key: value for key, value in values.items() if key != "dataset_name"}
    return rest | {"datasets": [{"path": _DATA_FORMATS[Path(name).suffix], "data_files": name}]}
