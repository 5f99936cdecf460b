"""Answers of workers that their job believes: those with the job's one-time token, which only the worker was given.

Code of the recipe runs in the worker's process: what it writes in the answer's place is no answer.
"""

import os
import secrets
from pathlib import Path

from autofit.files import read_json
from autofit.probing.result import ProbeResult

TOKEN = "AUTOFIT_ANSWER_TOKEN"  # noqa: S105  (the variable's name)


def new_token() -> str:
    return secrets.token_hex(16)


def own_token() -> str | None:
    """The token that this worker was given, read once: no code that runs later finds it in the environment."""
    return os.environ.pop(TOKEN, None)


def refuse_other_answers(path: Path, token: str) -> None:
    """Delete the answer in `path` unless it is whole and has `token`."""
    try:
        content = read_json(path) or {}
        whole = content.get("token") == token and ProbeResult.from_json(content) is not None
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        path.unlink(missing_ok=True)
