"""The promoted runs of a study: promised against actual, verdict and events; each read when its files have changed."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from autofit.files import stamp
from autofit.folding import Folding
from autofit.probing.launch import is_listed
from autofit.promotion.run_folder import RunFolder, State
from autofit.watching.contract import Row, contract_of, verdict_of
from autofit.watching.events import EVENTS, PROGRESS, EventKind, RunEvent, events_of, read_lines, read_progress
from autofit.watching.progress import RunProgress, progress_of

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
        """True if every comparable figure is as promised; None if none is comparable."""
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
        told = [
            e for e in self.events if e.kind not in (EventKind.START, EventKind.VERDICT) and "promise" not in e.data
        ]
        lines = [f"{_clock(e.time)} step {e.step}{_kind(e)}: {e.text}" for e in told[-_SHOWN:]]
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
    """The promoted run in `folder`, if one was launched."""
    request = _request(folder)
    if request is None:
        return None
    lines = read_progress(folder)
    last = lines[-1] if lines else {}
    return PromotedRun(
        folder=folder, study=str(request["study"]), trial=int(str(request["trial"])), device=str(request["device"]),
        state=RunFolder(folder).state(lambda: is_listed(folder)), step=int(str(last.get("step", 0))),
        last_step=int(str(last["max_steps"])) if "max_steps" in last else None,
        rows=contract_of(folder) or (), verdict=verdict_of(folder), events=tuple(events_of(folder)),
    )  # fmt: skip


def _request(folder: Path) -> dict[str, object] | None:
    """The request that the run was launched with; None for a file of anything else."""
    try:
        found = RunFolder(folder).request()
    except ValueError:  # torn, or another program's
        return None
    return found if isinstance(found, dict) and {"study", "trial", "device"} <= set(found) else None


def contract_table(rows: Sequence[Row], *, title: str) -> Table:
    """Promised beside actual, a figure a row."""
    table = Folding(title=escape(title), from_width=80)  # below, three columns of sentences are a few words wide
    for name in ("", "promised", "actual"):
        table.add_column(name, overflow="fold")
    table.add_column("kept", no_wrap=True)
    for row in rows:
        kept = {True: "yes", False: "NO", None: "-"}[row.kept]
        table.add_row(row.what, escape(row.promised_text), escape(row.actual_text), kept)
    return table


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _kind(event: RunEvent) -> str:
    """Kind of the event, as the end of a heading; "" if its text begins with it."""
    return "" if event.text.startswith(f"{event.kind} ") else f", {event.kind}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


_ENDED_SHOWN = 3  # of the runs that ended, the last
_REST = 10.0  # a long run is read anew after this multiple of its reading time
_TAIL_BYTES = 2**16  # of the logged steps, about a hundred lines


@dataclass(slots=True)
class _Read:
    stamp: Hashable
    run: PromotedRun | None
    at_s: float
    took_s: float
    lines: list[dict[str, object]] = field(default_factory=list)


class Runs:
    """`now` gives the running ones and the last that ended."""

    def __init__(self, folder: Path) -> None:
        self._home = folder / "promoted"
        self._read: dict[Path, _Read] = {}

    def now(self) -> list[PromotedRun]:
        """The running ones first, then the last that ended, newest first."""
        folders = sorted(path.parent for path in self._home.glob("*/request.json"))
        found = [run for folder in folders if (run := self._run(folder)) is not None]
        ended = sorted((r for r in found if r.state != "running"), key=lambda r: -_changed_s(r.folder))
        return [r for r in found if r.state == "running"] + ended[:_ENDED_SHOWN]

    def progress(self, run: PromotedRun) -> RunProgress | None:
        """Progress of the run, after its first logged step."""
        return progress_of(self._read[run.folder].lines)

    def last_line(self, run: PromotedRun) -> dict[str, object]:
        """The figures of the last logged step; {} before the first."""
        lines = self._read[run.folder].lines
        return lines[-1] if lines else {}

    def _run(self, folder: Path) -> PromotedRun | None:
        known, state = self._read.get(folder), RunFolder(folder).state(lambda: _alive(folder))
        files = (state, stamp(folder / PROGRESS), stamp(folder / EVENTS))
        now = time.monotonic()
        if known is not None and isinstance(known.stamp, tuple):
            resting = now - known.at_s < _REST * known.took_s and known.stamp[0] == state
            if known.stamp == files or resting:
                known.lines = _last_lines(folder / PROGRESS) if known.stamp != files else known.lines
                return known.run
        run = _readable(folder)
        self._read[folder] = _Read(
            files, run, time.monotonic(), time.monotonic() - now, _last_lines(folder / PROGRESS) if run else []
        )
        return run


def _readable(folder: Path) -> PromotedRun | None:
    """The run in `folder`; None for files of anything else."""
    try:
        return promoted_run(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_lines(path: Path) -> list[dict[str, object]]:
    """The logged steps at the end of a file; a line that is cut off is left out."""
    try:
        return read_lines(path, most_bytes=_TAIL_BYTES)
    except OSError:
        return []


def _alive(folder: Path) -> bool:
    try:
        return is_listed(folder)
    except (OSError, ValueError, KeyError):
        return False


def _changed_s(folder: Path) -> float:
    """Time at which the run last logged, in seconds since 1970."""
    sizes = [stamp(folder / name) for name in (PROGRESS, "request.json")]
    return max((size[1] for size in sizes if size is not None), default=0) / 1e9
