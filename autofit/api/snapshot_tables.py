"""A snapshot of the monitor as tables: cards and host, running probes, promoted runs."""

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autofit.api.monitoring import Card, Host, Probe, Run, Snapshot
from autofit.folding import Folding
from autofit.units import format_bytes, format_seconds

_NONE = "-"
_STATES = {"running": "green", "done": "cyan", "failed": "red", "interrupted": "yellow"}
_KEPT = {True: Text("yes"), False: Text("NO", style="bold red"), None: Text(_NONE)}


def tables_of(snapshot: Snapshot) -> list[Table | str]:
    """The tables from the top down; a sentence stands for an empty one."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    probes = _probes(snapshot.probes) if snapshot.probes else "No probe is running."
    runs = _runs(snapshot.runs) if snapshot.runs else "No trial was promoted."
    devices = _devices(snapshot.cards, snapshot.host, f"Devices at {clock}, studies in {snapshot.folder}")
    return [devices, *_processes(snapshot.cards), probes, runs, *_contracts(snapshot.runs)]


def _table(title: str, names: Sequence[str], rows: Sequence[Sequence[Text]], *, texts: Sequence[str] = ()) -> Table:
    """A table with the columns of `names` that say something in any row; `texts` have more lines where it is narrow."""
    table = _plain(title)
    for place, name in enumerate(names):
        cells = [row[place] for row in rows]
        if any(cell.plain != _NONE for cell in cells):
            table.add_column(name, overflow="fold", no_wrap=name not in texts)
    for row in rows:
        said = (cell for place, cell in enumerate(row) if any(other[place].plain != _NONE for other in rows))
        table.add_row(*said)
    return table


def _plain(title: str) -> Folding:
    return Folding(title=Text(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _devices(cards: Sequence[Card], host: Host, title: str) -> Table:
    names = ("device", "device-used", "busy", "ours", "peak allocated", "peak reserved", "retries", "processes")
    rows = [
        _texts(
            f"{card.index}: {card.name}", _share(card.device_used_bytes, card.capacity_bytes),
            _percent(card.utilisation_frac), _NONE, _bytes(card.peak_allocated_bytes), _bytes(card.peak_reserved_bytes),
            _number(card.alloc_retries), _number(None if card.processes is None else len(card.processes)),
        )
        for card in cards
    ]  # fmt: skip
    rows.append(
        _texts(f"cpu, {host.cores} cores", _share(host.used_bytes, host.capacity_bytes),
               _percent(host.utilisation_frac), _bytes(host.ours_rss_bytes), *([_NONE] * 4))
    )  # fmt: skip
    return _table(title, names, rows)


def _processes(cards: Sequence[Card]) -> list[Table | str]:
    rows = [
        _texts(str(card.index), str(process.pid), _bytes(process.used_bytes), process.what or _NONE)
        for card in cards for process in card.processes or ()
    ]  # fmt: skip
    names = ("card", "pid", "device-used", "what")
    return [_table("Processes on the cards", names, rows, texts=("what",))] if rows else []


def _probes(probes: Sequence[Probe]) -> Table:
    rows = [
        _texts(
            probe.name, probe.device, probe.phase or "waits or starts", format_seconds(probe.elapsed_s),
            _bytes(probe.limit_bytes), _bytes(probe.device_used_bytes), _bytes(probe.rss_bytes),
            _number(probe.cpu_frac), probe.study, probe.changes or _NONE,
        )
        for probe in probes
    ]  # fmt: skip
    names = ("probe", "device", "phase", "time", "limit", "on the card", "resident", "cores", "study", "changes")
    return _table("Running probes", names, rows, texts=("study", "changes"))


def _runs(runs: Sequence[Run]) -> Table:
    names = ("run", "device", "state", "step", "left", "a step", "tokens/s", "reward", "memory", "retries", "cores",
             "study")  # fmt: skip
    rows = [
        (
            *_texts(f"trial {run.trial}", run.device), Text(run.state, style=_STATES.get(run.state, "")),
            *_texts(*_progress(run), _number(run.alloc_retries), _number(run.cpu_frac)),
            Text(run.study),
        )
        for run in runs
    ]  # fmt: skip
    return _table("Promoted runs", names, rows, texts=("study",))


def _texts(*cells: str) -> tuple[Text, ...]:
    return tuple(map(Text, cells))


def _progress(run: Run) -> tuple[str, ...]:
    now = run.progress
    if now is None:
        return (_NONE,) * 6
    left = _NONE if now.eta_s is None or run.state != "running" else format_seconds(now.eta_s)
    step_s = _NONE if now.step_s is None else format_seconds(now.step_s)
    memory = _NONE if now.memory_bytes is None else f"{format_bytes(now.memory_bytes)} {_kind(now.memory_kind)}"
    return f"{now.step}/{now.last_step}", left, step_s, _number(now.tokens_per_s), _number(now.reward), memory


def _kind(of_memory: str) -> str:
    """One word for a column: device-used, reserved or host."""
    return of_memory.removeprefix("peak ").removesuffix(" memory")


def _contracts(runs: Sequence[Run]) -> list[Table | str]:
    """Promised against actual of the runs at work, and the last thing that each said."""
    shown: list[Table | str] = []
    for run in (run for run in runs if run.state == "running"):
        if run.contract:
            table = _plain(f"Trial {run.trial}: the promise")
            for name in ("", "promised", "actual", "kept"):
                table.add_column(name, overflow="fold")
            for row in run.contract:
                table.add_row(*_texts(row.what, row.promised_text, row.actual_text), _KEPT[row.kept])
            shown.append(table)
        if run.last_event:
            shown.append(escape(f"Trial {run.trial} said last: {run.last_event}"))
    return shown


def _share(used: int, of: int) -> str:
    share = f" ({used / of:.0%})" if of else ""
    return f"{format_bytes(used)} of {format_bytes(of)}{share}"


def _bytes(count: int | None) -> str:
    return _NONE if count is None else format_bytes(count)


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
