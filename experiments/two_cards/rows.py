"""The measured rows."""

import csv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured training on two cards: the largest and the last bytes that torch had allocated on rank 0."""

    name: str
    model: str
    method: str
    micro_batch: int
    peak_allocated_bytes: int
    allocated_bytes: int
    seconds_per_step: float


def rows() -> list[Row]:
    with (HERE / "measured.csv").open(encoding="utf-8", newline="") as file:
        return [
            Row(
                name=line["row"], model=line["model"], method=line["method"], micro_batch=int(line["micro_batch"]),
                peak_allocated_bytes=int(line["peak_allocated_bytes"]), allocated_bytes=int(line["allocated_bytes"]),
                seconds_per_step=float(line["seconds_per_step"]),
            )
            for line in csv.DictReader(file)
        ]  # fmt: skip
