"""How long a command of the campaign may take."""

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Moments of the monotonic clock: nothing begins after the first, and nothing runs beyond the second."""

    begins_until: float
    ends_by: float = math.inf
    each_s: float  # most seconds of one configuration

    @classmethod
    def of(cls, until_s: float, each_s: float) -> "Allowance":
        """As the command line has it: nothing begins after `until_s` seconds from now."""
        return cls(begins_until=time.monotonic() + until_s, each_s=each_s)

    def in_time(self) -> bool:
        """Whether one more may begin."""
        return time.monotonic() < min(self.begins_until, self.ends_by)

    def deadline_s(self) -> float:
        """Seconds that the next one may take."""
        return max(1.0, min(self.each_s, self.ends_by - time.monotonic()))
