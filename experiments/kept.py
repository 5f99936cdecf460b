"""Of results: the commit that they are kept with, how long an answer is waited for, which of two answers is kept."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMED_OUT = "timed_out"  # of an answer: the seconds after which it was given up
OLDER = "asked_again"  # of an older answer that was kept: when it was asked again, and what came of it


def commit() -> str:
    """The last commit of the code that a result is made with.

    Results from before 2026-12-01 that were kept without one name the commit that recorded them.
    """
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def patience(limit_s: float) -> float:
    """Wall seconds in which a machine as busy as this one does what an idle one does in `limit_s`."""
    return limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def newer(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """The new answer; the older one, marked, where the new one ran out of time and the older one did not.

    A busy machine says nothing of what is asked, so it takes no figure away.
    """
    if TIMED_OUT not in new or old is None or "error" in old:
        return dict(new)
    return {**old, OLDER: f"{new['date']}, autofit {new['autofit']}: not done after {new[TIMED_OUT]} s"}
