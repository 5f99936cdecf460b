"""Bounds of a model's config.json: a file whose model would build for ever is refused before it is built.

Far above what is published: Llama 3.1 405B has 126 layers and a hidden size of 16,384, Kimi K2 384 experts a layer,
Gemma 3 a vocabulary of 262,208.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from autofit.errors import ConfigError, printable, quoted

MOST_BYTES = 2**22  # of the file; those with a list entry a layer have 20 KB
# The last words of a key, and the largest number that it may have.
_MOST = {
    "layers": 2_000, "n_layer": 2_000, "depth": 2_000, "experts": 20_000, "heads": 20_000, "n_head": 20_000,
    "hidden_size": 2**20, "hidden_dim": 2**20, "d_model": 2**20, "n_embd": 2**20, "head_dim": 2**16,
    "vocab_size": 2**25, "intermediate_size": 2**22, "ffn_dim": 2**22, "d_ff": 2**22,
}  # fmt: skip
_MOST_OF_ANY = 2**40


def read_config_file(path: Path) -> dict[str, object]:
    """The JSON object in `path`, a regular file of at most 4 MiB with believable sizes. Raises ConfigError."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"model_name_or_path must be a folder with a config.json; {path.parent} has none") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} must be a regular file")
    if found.st_size > MOST_BYTES:
        raise ConfigError(f"{path} must have at most {MOST_BYTES >> 20} MiB; it has {found.st_size / 2**20:.1f}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {printable(str(error), 100)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a JSON object; got {quoted(content)}")
    wrong = next(_unbelievable(content), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    return content


def _unbelievable(content: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with each number that no model has, in words."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _unbelievable(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = next((most for words, most in _MOST.items() if key.endswith(words)), _MOST_OF_ANY)
            low = 0 if most != _MOST_OF_ANY else -_MOST_OF_ANY
            if not low <= value <= most:
                yield f"{printable(key, 60)} must be a number from {low} to {most:,}; got {quoted(value, 40)}"
