"""A hash of the code of the simulation: what is kept of it counts only for the same code."""

import hashlib
import json
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "vllm")
_FOLDERS = ("fakegpu", "forecast", "plugin", "probing")


@cache
def code_hash() -> str:
    """A hash of the simulation's own code and the versions of the packages that it runs."""
    digest = hashlib.sha256(json.dumps([_version(p) for p in _PACKAGES]).encode())
    package = Path(__file__).parent.parent
    for folder in (*(package / name for name in _FOLDERS), Path(str(resources.files("autofit.trainers")))):
        for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.npz"))):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
