"""Why a search ended."""

from dataclasses import dataclass
from enum import StrEnum


class StopKind(StrEnum):
    TRIALS = "trials"  # as many as were asked for are done
    BUDGET = "budget"  # the time is spent
    PLATEAU = "plateau"  # the last trials did not improve on the winner
    GAIN = "gain"  # little is left to gain
    HOPELESS = "hopeless"  # nothing fits, and nothing that is left is likely to
    EXHAUSTED = "exhausted"  # every candidate is tried or ruled out
    BROKEN = "broken"  # nothing but failures: the recipe or the machine is at fault
    INTERRUPTED = "interrupted"  # by the user


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a search ended: `kind` for decisions, `words` for people."""

    kind: StopKind
    words: str
