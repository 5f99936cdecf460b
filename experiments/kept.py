"""Which of two answers of one row is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIMED_OUT = "timed_out"  # of an answer: the seconds after which it was given up
OLDER = "asked_again"  # of an older answer that was kept: when it was asked again, and what came of it


def newer(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """The new answer; the older one, marked, where the new one ran out of time and the older one did not.

    A busy machine says nothing of what is asked, so it takes no figure away.
    """
    if TIMED_OUT not in new or old is None or "error" in old:
        return dict(new)
    return {**old, OLDER: f"{new['date']}, autofit {new['autofit']}: not done after {new[TIMED_OUT]} s"}
