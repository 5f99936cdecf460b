"""`autofit.monitor`: the cards, the probes at work and the promoted runs of a folder, at one moment; and its tables."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autofit.api.arguments import FOLDER, named_as_arguments, studies_folder
from autofit.api.promoted import PromotedRun, Runs
from autofit.api.tables import Shown
from autofit.errors import AutofitError, ConfigError, option
from autofit.folding import Folding
from autofit.hardware.health import CardUse, HostUse, ProcessUse, card_uses, command_of, host_use, tree_use
from autofit.probing.launch import AtWork, pid_of_job, probes_at_work
from autofit.recipe.recipe import own_names
from autofit.space.traits import describe_changes
from autofit.units import format_bytes, format_seconds
from autofit.watching.contract import Row
from autofit.watching.progress import RunProgress


class Originals:
    """The recipes of the studies in `folder`, each read once; Optuna is loaded with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Mapping[str, object], Mapping[str, object], Mapping[str, str]] | None] = {}

    def changes(self, study: str, values: Mapping[str, object]) -> str:
        """Differences of `values` from the recipe of `study`, in words; "" if the study is unreadable."""
        if study not in self._known:
            self._known[study] = self._recipe(study)
        known = self._known[study]
        if known is None:
            return ""
        given, resolved, names = known
        keys = [key for key in {**given, **values} if given.get(key) != values.get(key)]
        return describe_changes({key: values.get(key) for key in keys}, resolved, names)

    def _recipe(self, study: str) -> tuple[Mapping[str, object], Mapping[str, object], Mapping[str, str]] | None:
        from autofit.tuning.record import record_of
        from autofit.tuning.study import load_study

        try:
            record = record_of(load_study(self._folder, study))
        except AutofitError:
            return None
        return record.values, record.resolved, own_names(record.foreign)


_SAMPLE_S = 0.25  # between the two looks of a single snapshot, as processor use is over a time
_OURS = ("fork_server.log", "studies.db", "probes", "promoted")  # a search makes the first before all else


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process on a card. Bytes are None if the driver hides them."""

    pid: int
    used_bytes: int | None
    what: str  # the probe or run of autofit that it belongs to, or the beginning of its command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card at this moment. None is "unknown".

    What the allocator holds is known only to the runs themselves: the sum of their last logged peaks, of those on this
    card.
    """

    name: str
    index: int
    uuid: str
    capacity_bytes: int
    device_used_bytes: int
    utilisation_frac: float | None
    processes: tuple[CardProcess, ...] | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    alloc_retries: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine apart from its cards: the device `cpu`."""

    cores: int
    capacity_bytes: int
    used_bytes: int
    utilisation_frac: float | None  # of all cores
    ours_rss_bytes: int  # of the probes and runs below


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A running probe. None is "unknown", or "not yet"."""

    study: str
    trial: int
    name: str  # trial 3, or confirmation of trial 3
    changes: str
    device: str
    phase: str | None  # None while it waits for its turn on the device, or starts
    elapsed_s: float
    limit_bytes: int | None
    rss_bytes: int | None
    cpu_frac: float | None  # of one core: 2.0 is two cores
    device_used_bytes: int | None  # of its processes on a card, where the driver tells


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A promoted run: running, or one of the last that ended. None is "unknown"."""

    study: str
    trial: int
    device: str
    state: str
    progress: RunProgress | None
    contract: tuple[Row, ...]  # promised against actual
    kept: bool | None
    verdict: str
    last_event: str
    rss_bytes: int | None
    cpu_frac: float | None
    device_used_bytes: int | None  # of its processes on a card, where the driver tells
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    alloc_retries: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Snapshot(Shown):
    """Everything at one moment."""

    time: float  # seconds since 1970
    folder: Path
    cards: tuple[Card, ...]
    host: Host
    probes: tuple[Probe, ...]
    runs: tuple[WatchedRun, ...]

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit monitor --json` prints: plain values only."""
        return {**asdict(self), "folder": str(self.folder)}

    def parts(self) -> list[Table | str]:
        """The tables from the top down; a sentence stands for an empty one."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        probes = _probes(self.probes) if self.probes else "No probe is running."
        runs = _runs(self.runs) if self.runs else "No trial was promoted."
        if not self.probes and not self.runs and _is_new(self.folder):
            devices = _devices(self.cards, self.host, f"Devices at {clock}")
            return [devices, *_processes(self.cards), f"There are no studies in {self.folder} yet."]
        devices = _devices(self.cards, self.host, f"Devices at {clock}, studies in {self.folder}")
        return [devices, *_processes(self.cards), probes, runs, *_contracts(self.runs)]


def monitor(folder: str | Path = FOLDER, *, storage: str | None = None) -> Snapshot:
    """Cards, host, running probes and promoted runs of `folder` now; takes about 0.3 s.

    Raises ConfigError where the folder has other files. Nothing is written, and no CUDA is started.
    """
    from autofit.tuning.storage import use_storage

    with named_as_arguments():
        folder = studies_folder(folder)
        use_storage(folder, storage)
        watch = Watch(folder)
        watch.snapshot()
        time.sleep(_SAMPLE_S)
        return watch.snapshot()


class Watch:
    """Takes snapshots; use of processors is over the time since the last one. Raises ConfigError for another folder."""

    def __init__(self, folder: Path) -> None:
        if not _is_new(folder) and not any((folder / name).exists() for name in _OURS):
            raise ConfigError(
                f"there are no studies in {folder}; run `autofit search` first, or point {option('dir')} at its folder"
            )
        self._folder = folder
        self._originals, self._runs = Originals(folder), Runs(folder)
        self._host: HostUse | None = None
        self._before: dict[Path, tuple[float, ProcessUse]] = {}  # folder of a probe or run -> (monotonic time, use)

    def snapshot(self) -> Snapshot:
        """The state now."""
        probes, runs, uses = probes_at_work(self._folder), self._runs.now(), card_uses()
        used = {probe.folder: probe.use() for probe in probes}
        used |= {run.folder: _run_use(run) for run in runs}
        owners = {pid: probe.name for probe in probes for pid in _pids(used[probe.folder])}
        owners |= {pid: f"full run of trial {run.trial}" for run in runs for pid in _pids(used[run.folder])}
        shares = {folder: self._cpu_frac(folder, use) for folder, use in used.items()}
        told = tuple(self._run(run, used[run.folder], shares[run.folder], uses) for run in runs)
        ours = [(_pids(used[run.folder]), one) for run, one in zip(runs, told, strict=True) if run.state == "running"]
        host, before = host_use(), self._host
        self._host = host
        return Snapshot(
            time=time.time(), folder=self._folder, cards=tuple(_card(use, owners, ours, len(uses)) for use in uses),
            host=Host(
                cores=host.cores, capacity_bytes=host.capacity_bytes, used_bytes=host.used_bytes,
                utilisation_frac=host.utilisation_since(before),
                ours_rss_bytes=sum(use.rss_bytes for use in used.values() if use is not None),
            ),
            probes=tuple(self._probe(p, used[p.folder], shares[p.folder], uses) for p in probes), runs=told,
        )  # fmt: skip

    def _cpu_frac(self, folder: Path, use: ProcessUse | None) -> float | None:
        """Cores in use since the last snapshot, if there was one."""
        if use is None:
            return None
        now, before = time.monotonic(), self._before.get(folder)
        self._before[folder] = now, use
        if before is None or now <= before[0]:
            return None
        return use.cpu_s_since(before[1]) / (now - before[0])

    def _probe(self, probe: AtWork, use: ProcessUse | None, cpu_frac: float | None, cards: Sequence[CardUse]) -> Probe:
        return Probe(
            study=probe.study, trial=probe.trial, name=probe.name, device=probe.request.device, phase=probe.phase,
            changes=self._originals.changes(probe.study, probe.request.values),
            elapsed_s=max(0.0, time.time() - probe.began_s), limit_bytes=probe.request.limit_bytes,
            rss_bytes=None if use is None else use.rss_bytes, cpu_frac=cpu_frac,
            device_used_bytes=_on_cards(_pids(use), cards),
        )  # fmt: skip

    def _run(
        self, run: PromotedRun, use: ProcessUse | None, cpu_frac: float | None, cards: Sequence[CardUse]
    ) -> WatchedRun:
        last = self._runs.last_line(run)
        told = [event.text.partition("\n")[0] for event in run.events if event.text != run.verdict]
        return WatchedRun(
            study=run.study, trial=run.trial, device=run.device, state=run.state, progress=self._runs.progress(run),
            contract=run.rows, kept=run.kept, verdict=run.verdict, last_event=told[-1] if told else "",
            rss_bytes=None if use is None else use.rss_bytes, cpu_frac=cpu_frac,
            device_used_bytes=_on_cards(_pids(use), cards), peak_allocated_bytes=_count(last, "peak_allocated_bytes"),
            peak_reserved_bytes=_count(last, "peak_reserved_bytes"), alloc_retries=_count(last, "alloc_retries"),
        )  # fmt: skip


def _is_new(folder: Path) -> bool:
    """True if the first search may make its studies there: only the cards are shown until then."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _run_use(run: PromotedRun) -> ProcessUse | None:
    pid = pid_of_job(run.folder) if run.state == "running" else None
    return None if pid is None else tree_use(pid)


def _pids(use: ProcessUse | None) -> frozenset[int]:
    return frozenset() if use is None else use.pids


def _on_cards(pids: frozenset[int], cards: Iterable[CardUse]) -> int | None:
    """Bytes that these processes hold on all cards, if a driver reports them."""
    return _total(used for card in cards for pid, used in card.processes or () if pid in pids)


def _card(use: CardUse, owners: dict[int, str], ours: Sequence[tuple[frozenset[int], WatchedRun]], cards: int) -> Card:
    pids = {pid for pid, _ in use.processes or ()}
    here = [run for run_pids, run in ours if run_pids & pids or (cards == 1 and run.device == "cuda")]
    processes = None if use.processes is None else tuple(
        CardProcess(pid=pid, used_bytes=used, what=owners.get(pid) or command_of(pid)) for pid, used in use.processes
    )  # fmt: skip
    return Card(
        name=use.gpu.name, index=use.gpu.index, uuid=use.gpu.uuid, capacity_bytes=use.gpu.capacity_bytes,
        device_used_bytes=use.device_used_bytes, utilisation_frac=use.utilisation_frac, processes=processes,
        peak_allocated_bytes=_total(run.peak_allocated_bytes for run in here),
        peak_reserved_bytes=_total(run.peak_reserved_bytes for run in here),
        alloc_retries=_total(run.alloc_retries for run in here),
    )  # fmt: skip


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _count(line: dict[str, object], key: str) -> int | None:
    value = line.get(key)
    return int(value) if isinstance(value, int | float) else None


# -- a snapshot as tables ---------------------------------------------------------------------------------------------

_NONE = "-"
_STATES = {"running": "green", "done": "cyan", "failed": "red", "interrupted": "yellow"}
_KEPT = {True: Text("yes"), False: Text("NO", style="bold red"), None: Text(_NONE)}


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


def _runs(runs: Sequence[WatchedRun]) -> Table:
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


def _progress(run: WatchedRun) -> tuple[str, ...]:
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


def _contracts(runs: Sequence[WatchedRun]) -> list[Table | str]:
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
