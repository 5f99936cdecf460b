"""Answers of workers that their job believes: those with the job's one-time token, which only the worker was given.

Code of the recipe runs in the worker's process: what it writes in the answer's place is no answer.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from autofit.files import read_json
from autofit.probing.result import ProbeResult

TOKEN = "AUTOFIT_ANSWER_TOKEN"  # noqa: S105  (the variable's name)


def new_token() -> str:
    return secrets.token_hex(16)


def own_token() -> str | None:
    """The token that this worker was given, read once: no code that runs later finds it in the environment."""
    return os.environ.pop(TOKEN, None)


class Seal:
    """What a job puts on the answer once it is final. It shows the hash before; nobody else knows the seal until then.

    So nothing that runs in the probe can write an answer that seems final while the probe still runs.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_hex(16)

    @property
    def shown(self) -> dict[str, str]:
        """For the note of the job that it has started."""
        return {"seal": _hash(self._secret)}

    def put_on(self, answer: Mapping[str, object]) -> dict[str, object]:
        """`answer`, final."""
        return {**answer, "seal": self._secret}


def is_final(answer: Mapping[str, object], started: Mapping[str, object] | None) -> bool:
    """Whether the job that noted `started` has put its seal on `answer`; without a job, an earlier one did."""
    if started is None or "seal" not in started:
        return answer.get("wall_s") is not None
    return _hash(str(answer.get("seal"))) == started["seal"]


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def refuse_other_answers(path: Path, token: str) -> None:
    """Delete the answer in `path` unless it is whole and has `token`."""
    try:
        content = read_json(path) or {}
        whole = content.get("token") == token and ProbeResult.from_json(content) is not None
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        path.unlink(missing_ok=True)
