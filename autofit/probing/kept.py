"""Answers of simulated probes, kept on disk under a hash of all their inputs: such a probe always answers the same."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from autofit.errors import EnvironmentFault
from autofit.files import cache_folder, read_json, write_json
from autofit.hardware import calibration
from autofit.probing.code import code_hash
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus

_UNREAD = ("output_dir", "run_name", "logging_dir")  # keys of a recipe that no simulated probe depends on
_KEPT = (ProbeStatus.FIT, ProbeStatus.OOM)
_ENV = "PYTORCH_"  # variables of the environment that the simulated allocator reads


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
    values = {k: v for k, v in request.values.items() if k not in _UNREAD}
    settings = {name: value for name, value in os.environ.items() if name.startswith(_ENV)}
    parts = [
        request.trainer, values, request.recipe_hash, request.device, request.limit_bytes, request.measured_steps,
        request.least_of_fits, request.capped, read_json(request.worst_case), settings, code_hash(),
        calibration.fingerprint(request.device),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "probes" / f"{name}.json"
