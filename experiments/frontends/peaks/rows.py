"""Rows of `rows.json`: what a tool's own authors say that a training of theirs took, and what is known of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROWS = HERE / "rows.json"
Part = tuple[int, float, float, int, int]  # samples of a dataset, their mean, deviation, fewest and most tokens
KINDS = ("reserved", "reserved or nvidia-smi", "not said")  # what was read: torch's most reserved, or the driver's


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured training. `file` is a path in a checkout of `tool`; `recipe` holds keys of `hf` where there is none.

    `longest_tokens` is (fewest, most) tokens that the run's longest sample has, None where nothing is known of it.
    `samples` are the datasets from whose lengths the run's are drawn, up to the most of `longest_tokens`; none where
    all samples are alike (padded, or cut) or where their lengths are not known.
    """

    name: str
    tool: str
    version: str
    source: str  # page or file, and where in it
    date: str
    measured_gib: float
    half_digit_gib: float  # how far the figure may be off by its rounding
    kind: str  # one of KINDS
    card: str = "a100-80gb"
    card_said: bool = False
    file: str | None = None
    commit: str = ""  # at which the figure was written, where the file has changed since
    path: str = ""  # of the file at that commit
    recipe: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)  # what the text beside the figure says otherwise
    shape: Mapping[str, object] = field(default_factory=dict)  # config.json of a model that the catalogue lacks
    trainer: str = ""  # in place of hf, where the code of then is known (then.py); `changes` has its keys
    ranks: int = 1
    longest_tokens: tuple[int, int] | None = None
    lengths: str = ""  # how they are known
    samples: tuple[Part, ...] = ()
    packed_together: int = 0  # samples that ms-swift packs at a time, and does not pad; 0: each is a row by itself
    measured_step_s: float | None = None
    why: str = ""  # what is known of the difference, found after the prediction
    kernels_bytes: int = 0  # of all kernels of torch's libraries on the card, under a CUDA that loads them eagerly
    undecided: str = ""  # what decides the figure, and cannot be known; the row has no error
    older: str = ""  # why the run's code is not what is simulated; the row is shown apart

    @property
    def kept_out(self) -> bool:
        """Whether nobody looks at it before the last run: the CRC-32 of its file's path, or of its name, is odd."""
        return is_odd(self.file or self.name)

    @property
    def drawn(self) -> bool:
        """Whether it is predicted: all rows of today's tools, and one in four of the older tables, by their CRC-32."""
        return self.file is not None or zlib.crc32(self.name.encode()) // 2 % 4 == 0

    @property
    def method(self) -> str:
        """The table's group."""
        return self.name.split("/")[0]


def is_odd(text: str) -> bool:
    """Whether the CRC-32 of a text is odd."""
    return zlib.crc32(text.encode()) % 2 == 1


def read_rows(path: Path = ROWS) -> tuple[Row, ...]:
    """Every row, in the file's order."""
    listed = json.loads(path.read_text("utf-8"))["rows"]
    return tuple(
        Row(
            **{
                **row,
                "longest_tokens": tuple(row["longest_tokens"]) if row.get("longest_tokens") else None,
                "samples": tuple(tuple(part) for part in row.get("samples", ())),
            }
        )
        for row in listed
    )
