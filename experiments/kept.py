"""How long an answer is waited for, and which of two answers of one row is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

TIMED_OUT = "timed_out"  # of an answer: the seconds after which it was given up
OLDER = "asked_again"  # of an older answer that was kept: when it was asked again, and what came of it


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
