"""The inspection of a recipe by its trainer, once, before any probe.

Runs in a child of the fork server, because trainers import torch and may import the user's code.
"""

from pathlib import Path
from typing import cast

from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.plugin.registry import load


def run(request_path: str) -> int:
    """Inspect the recipe of the request at `request_path` and write the request's `answer` file. Always returns 0."""
    request = read_json(Path(request_path))
    assert request is not None
    inspection = Inspection(
        device=str(request["device"]), worst_case=WorstCase(path=Path(str(request["worst_case"]))),
        prompt_tokens=cast(int | None, request.get("prompt_tokens")),
    )  # fmt: skip
    try:
        trainer = load(str(request["trainer"]))
        answer = trainer.inspect(cast(dict[str, object], request["values"]), inspection).to_json()
    except ConfigError as error:
        answer = {"error": str(error)}
    write_json(Path(str(request["answer"])), answer)
    return 0
