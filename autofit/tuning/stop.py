"""The reason why a search ended."""

from dataclasses import dataclass
from enum import StrEnum


class StopKind(StrEnum):
    TRIALS = "trials"  # the requested number of trials is done
    BUDGET = "budget"  # the time budget is spent
    PLATEAU = "plateau"  # the last trials did not improve on the winner
    GAIN = "gain"  # the best candidate left has a small expected gain
    HOPELESS = "hopeless"  # nothing fits, and no candidate left is likely to fit
    EXHAUSTED = "exhausted"  # every candidate is tried or ruled out
    BROKEN = "broken"  # every probe failed: the recipe or the machine is broken
    INTERRUPTED = "interrupted"  # by the user


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a search ended: `kind` for decisions, `words` for people."""

    kind: StopKind
    words: str
