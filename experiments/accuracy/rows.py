"""The measured rows: who measured them, on which card, with which versions of whose code."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSet:
    """One project's measurements. `requirements` are installed over the packages of the current environment.

    Where there is no `repository`, the program comes with one of these packages, and a row's commit is its version.
    """

    name: str
    card: str
    repository: str
    requirements: tuple[str, ...]
    compared: tuple[str, ...]  # columns of the measured file that are simulated too

    def rows(self) -> list[Row]:
        with (HERE / "measured" / f"{self.name}.csv").open(encoding="utf-8", newline="") as file:
            return [Row(set=self, name=line.pop("row"), columns=line) for line in csv.DictReader(file)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run: its name in its project, and the columns of its file."""

    set: MeasuredSet
    name: str
    columns: Mapping[str, str]

    @property
    def commit(self) -> str:
        """The commit of the project's code that was measured."""
        return self.columns["commit"]

    def measured(self, column: str) -> float | None:
        return float(self.columns[column]) if self.columns.get(column) else None


SETS = {
    each.name: each
    for each in (
        MeasuredSet(
            name="peft_l40s",
            card="l40s",
            repository="huggingface/peft",
            requirements=("transformers==5.13.1", "bitsandbytes==0.49.2"),
            compared=("reserved_max_bytes", "allocated_mean_bytes", "step_s"),
        ),
        MeasuredSet(
            name="litgpt_a10g",
            card="a10g",
            repository="Lightning-AI/litgpt",
            requirements=("lightning==2.6.6", "jsonargparse[signatures]==4.53.0"),
            compared=("peak_allocated_bytes",),
        ),
        MeasuredSet(
            name="preflight_t4",
            card="t4",
            repository="highwaterlabs/torch-preflight",
            requirements=("torchvision==0.28.0",),
            compared=("peak_allocated_bytes", "reserved_max_bytes"),
        ),
        MeasuredSet(
            name="vramcalc_a6000",
            card="a6000",
            repository="",
            requirements=("vramcalc==0.1.2", "transformers==4.57.6", "datasets==4.8.5"),  # later ones need a later hub
            compared=("peak_allocated_bytes",),
        ),
    )
}
