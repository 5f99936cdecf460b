"""The line in which questions wait for their turn."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Full(Exception):
    """The line is full, or has too many of one address; the text says which."""


@dataclass(slots=True, kw_only=True)
class Line:
    """Places in the order of arrival, of which the first `at_once` have their turn."""

    at_once: int
    waiting: int
    of_address: int
    _places: list[tuple[object, str]] = field(default_factory=list)  # (ticket, address), those at work first
    _moved: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def turn(self, address: str, *, waits: Callable[[int], None], every_s: float = 1.0) -> Iterator[None]:
        """Context of a turn. `waits` is called with the number of those ahead, at each move and every `every_s`.

        Whatever `waits` raises gives up the place. Raises Full where there is none.
        """
        ticket = object()
        with self._moved:
            if sum(whose == address for _, whose in self._places) >= self.of_address:
                raise Full(f"at most {self.of_address} questions of one address are answered at a time; wait for those")
            if len(self._places) >= self.at_once + self.waiting:
                raise Full("too many questions are waiting; try again in a minute")
            self._places.append((ticket, address))
        try:
            while (ahead := self._ahead(ticket)) >= 0:
                waits(ahead + 1)
                with self._moved:
                    self._moved.wait_for(lambda: self._ahead(ticket) != ahead, every_s)
            yield
        finally:
            with self._moved:
                self._places = [place for place in self._places if place[0] is not ticket]
                self._moved.notify_all()

    def _ahead(self, ticket: object) -> int:
        """Places in line before `ticket`; below 0 once it is its turn."""
        with self._moved:
            return next(n for n, (other, _) in enumerate(self._places) if other is ticket) - self.at_once
