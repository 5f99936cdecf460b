"""Values of a recipe without its secrets: MLflow's params are read by everyone who can open its page."""

import re
from collections.abc import Mapping

MASK = "***"
_SECRET_KEY = re.compile(
    r"^token$|(^|_)(hub|hf|api|access|auth|bearer|refresh|wandb)_?(token|key)$|passw|secret|credential", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{8,}|(?<=://)[^/@\s]+(?=@)")


def masked(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with `***` for tokens, passwords, keys and all environment variables; other keys and values stay."""
    return {key: MASK if _SECRET_KEY.search(key) and value else _masked(key, value) for key, value in values.items()}


def _masked(key: str, value: object) -> object:
    if key == "env" and isinstance(value, Mapping):
        return dict.fromkeys(value, MASK)
    if isinstance(value, Mapping):
        return masked(value)
    if isinstance(value, list):
        return [_masked("", entry) for entry in value]
    return _SECRET_VALUE.sub(MASK, value) if isinstance(value, str) else value
