"""How the bytes of a micro-batch grow with its tokens: a line through what was seen, and the bounds of its error.

The model: the bytes that a micro-batch works with, above those held when it begins, are the largest of several amounts
(attention, loss, a layer that is computed again, ...), each a constant that is not negative plus a part that grows with
the tokens. Tokens are padded: sequences times the length of the longest. Where attention keeps its matrix ("eager") a
part grows with sequences times length squared, which `Size.square` counts.

Two bounds follow without a fit. More tokens need at least the bytes already seen at fewer. They need at most those
bytes times the ratio of the tokens (of the squares, where attention is eager). The line lies between them; it is too
low where an amount that was never the largest so far grows faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_LEAST = 4  # different sizes that a line needs


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Padded tokens of a micro-batch, and the sum of its squared padded lengths where attention is eager, else 0."""

    tokens: int
    square: int = 0

    def over(self, other: "Size") -> float:
        """How many times larger than `other` this is: the larger of the ratios of tokens and squares."""
        square = self.square / other.square if other.square else 0.0
        return max(self.tokens / max(1, other.tokens), square)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Bytes of a micro-batch that was not trained yet: the estimate, and its upper bound under the model above."""

    estimate: float
    at_most: float
    fitted: bool  # whether a line gave the estimate; else it is the lower bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What the bytes seen so far tell of other sizes. Making one takes some 100 microseconds, asking it a few."""

    largest: Size
    largest_bytes: float
    line: tuple[float, ...] | None  # bytes of no token, of each token, of each of `Size.square`

    @classmethod
    def of(cls, seen: Mapping[Size, float]) -> "Law":
        """The law of micro-batches of which at least one was `seen`."""
        points = sorted(seen.items(), key=lambda point: point[0].tokens)
        # Of several amounts, the one that decides at the largest sizes decides beyond them: the upper half is fitted.
        line = _fit(points[-max(_LEAST, (len(points) + 1) // 2) :])
        return cls(largest=points[-1][0], largest_bytes=max(seen.values()), line=line)

    def at(self, size: Size) -> Projection:
        """The bytes of a micro-batch that is larger than all seen."""
        at_least = self.largest_bytes
        at_most = at_least * max(1.0, size.over(self.largest))
        if self.line is None:
            return Projection(estimate=at_least, at_most=at_most, fitted=False)
        base, of_token, of_square = self.line
        value = base + of_token * size.tokens + of_square * size.square
        return Projection(estimate=min(max(value, at_least), at_most), at_most=at_most, fitted=True)


def _fit(points: Sequence[tuple[Size, float]]) -> tuple[float, float, float] | None:
    """The least squares through `points`; None for too few, or for bytes that fall."""
    squared = any(size.square for size, _ in points)
    if len(points) < _LEAST:
        return None
    columns = np.array([(1.0, size.tokens, size.square)[: 3 if squared else 2] for size, _ in points], dtype=float)
    columns /= (scale := columns.max(axis=0))
    try:
        found = np.linalg.solve(columns.T @ columns, columns.T @ np.array([b for _, b in points])) / scale
    except np.linalg.LinAlgError:
        return None
    return None if (found[1:] < 0).any() else (float(found[0]), float(found[1]), float(found[2]) if squared else 0.0)
