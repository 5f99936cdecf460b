"""Answers of simulated probes, kept on disk under a hash of all their inputs: such a probe always answers the same."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import cache_folder, read_json, write_json
from autofit.hardware import calibration
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus

_UNREAD = ("output_dir", "run_name", "logging_dir")  # keys of a recipe that no simulated probe depends on
_KEPT = (ProbeStatus.FIT, ProbeStatus.OOM)
_ENV = ("PYTORCH_", "TORCH_CUDNN_")  # variables that the simulated allocator and attention read


def kept_answer(request: ProbeRequest) -> dict[str, object] | None:
    """The answer of an earlier probe with the same inputs; None without a whole one, and on a real device."""
    if not _is_kept(request):
        return None
    try:
        answer = read_json(_path(request)) or {}
        return answer if ProbeResult.from_json(answer).status in _KEPT else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def keep_answer(request: ProbeRequest, answer: Mapping[str, object]) -> None:
    """Keep `answer` for a later probe with the same inputs, if it is a measurement. Ignores a full disk."""
    if _is_kept(request) and answer.get("status") in _KEPT:
        with contextlib.suppress(EnvironmentFault):
            write_json(_path(request), answer)


def _is_kept(request: ProbeRequest) -> bool:
    return request.device.startswith("sim:") and request.recipe_hash is not None


def _path(request: ProbeRequest) -> Path:
    values = by_content({k: v for k, v in request.values.items() if k not in _UNREAD})
    settings = {name: value for name, value in os.environ.items() if name.startswith(_ENV)}
    parts = [
        request.trainer, values, request.recipe_hash, request.device, request.limit_bytes, request.measured_steps,
        request.least_of_fits, request.capped, read_json(request.worst_case), settings, code_hash(),
        calibration.fingerprint(request.device),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "probes" / f"{name}.json"


def by_content(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with what a model's folder says in place of its path: a copy of it elsewhere answers the same.

    Its weights are not among that, which no simulation reads.
    """
    return {key: _content(value) if isinstance(value, str) else value for key, value in values.items()}


def _content(value: str) -> object:
    folder = Path(value)
    if not folder.is_absolute() or not os.path.isfile(folder / "config.json"):
        return value
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.json"))}
    return {"files": files}


# A hash of the code of the simulation: what is kept of it counts only for the same code.

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
