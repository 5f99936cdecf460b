"""The promoted runs of a study: promised against actual, the verdict and the events of each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from autofit.folding import Folding
from autofit.probing.launch import is_alive
from autofit.promotion.run_folder import RunFolder, State
from autofit.watching.contract import Row, contract_of, verdict_of
from autofit.watching.events import Kind, RunEvent, events_of, read_progress

_SHOWN = 12  # the last events in a report as text; JSON has all


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedRun:
    """The full run of one trial, as its folder tells it."""

    folder: Path
    study: str
    trial: int
    device: str
    state: State
    step: int  # the last logged one
    last_step: int | None
    rows: tuple[Row, ...]  # promised against actual; empty for a run without a promise
    verdict: str  # "" before the end
    events: tuple[RunEvent, ...]

    @property
    def kept(self) -> bool | None:
        """Whether every comparable figure is as promised; None where nothing could be compared."""
        known = [row.kept for row in self.rows if row.kept is not None]
        return all(known) if known else None

    def to_dict(self) -> dict[str, object]:
        """Plain values only."""
        return {
            "trial": self.trial, "device": self.device, "state": self.state, "step": self.step,
            "last_step": self.last_step, "kept": self.kept, "verdict": self.verdict,
            "contract": [row.to_json() for row in self.rows], "events": [event.to_json() for event in self.events],
            "folder": str(self.folder),
        }  # fmt: skip

    def parts(self) -> list[Table | str]:
        """The table of the contract, the verdict, and the last events but what the table has."""
        told = [e for e in self.events if e.kind not in (Kind.START, Kind.VERDICT) and "promise" not in e.data]
        lines = [f"{_clock(e.time)} step {e.step}, {e.kind}: {e.text}" for e in told[-_SHOWN:]]
        table: list[Table | str] = [contract_table(self.rows, title=self._title)] if self.rows else [self._title]
        return [*table, *([f"{_sentence(self.verdict)}"] if self.verdict else []), *lines]

    @property
    def _title(self) -> str:
        of = "" if self.last_step is None else f" of {self.last_step}"
        return f"Full run of trial {self.trial} on {self.device}: {self.state}, step {self.step}{of}"


def promoted_runs(folder: Path, study: str) -> tuple[PromotedRun, ...]:
    """The promoted runs of `study` among those in `folder`, by their trial."""
    found = (promoted_run(path.parent) for path in (folder / "promoted").glob("*/request.json"))
    return tuple(sorted((r for r in found if r is not None and r.study == study), key=lambda r: r.trial))


def promoted_run(folder: Path) -> PromotedRun | None:
    """The promoted run in `folder`; None where nothing was launched."""
    request = _request(folder)
    if request is None:
        return None
    lines = read_progress(folder)
    last = lines[-1] if lines else {}
    return PromotedRun(
        folder=folder, study=str(request["study"]), trial=int(str(request["trial"])), device=str(request["device"]),
        state=RunFolder(folder).state(lambda: is_alive(folder)), step=int(str(last.get("step", 0))),
        last_step=int(str(last["max_steps"])) if "max_steps" in last else None,
        rows=contract_of(folder) or (), verdict=verdict_of(folder), events=tuple(events_of(folder)),
    )  # fmt: skip


def _request(folder: Path) -> dict[str, object] | None:
    """What the run was launched with; None for a file that is not a run's."""
    try:
        found = RunFolder(folder).request()
    except ValueError:  # torn, or another program's
        return None
    return found if isinstance(found, dict) and {"study", "trial", "device"} <= set(found) else None


def contract_table(rows: Sequence[Row], *, title: str) -> Table:
    """Promised beside actual, a figure a row."""
    table = Folding(title=escape(title))
    for name in ("", "promised", "actual"):
        table.add_column(name, overflow="fold")
    table.add_column("kept", no_wrap=True)
    for row in rows:
        kept = {True: "yes", False: "NO", None: "-"}[row.kept]
        table.add_row(row.what, escape(row.promised_text), escape(row.actual_text), kept)
    return table


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
