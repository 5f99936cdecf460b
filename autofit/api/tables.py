"""Results as people read them: tables and sentences, as text and as HTML."""

import html
import io
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autofit.api.arguments import as_argument
from autofit.api.events import TrialResult
from autofit.errors import told
from autofit.folding import Folding
from autofit.lines import on_terminal
from autofit.probing.result import ProbeStatus
from autofit.recipe.recipe import own_value
from autofit.space.narrow import missing_packages
from autofit.space.traits import describe_changes, samples_word
from autofit.tuning.frontier import Foreseen, Trial
from autofit.tuning.sensitivity import Margin, Neighbour
from autofit.units import format_bytes, format_seconds

WIDTH = 150  # of a table, in columns, where there is no terminal
_SAME = "no change"
_LEAST_FRONT = 120  # columns from which on the front is a table


class Shown:
    """A result that is a list of tables and sentences: as text by `str` and at a prompt, as HTML in a notebook.

    There options are named as Python's arguments.
    """

    __slots__ = ()

    def parts(self) -> list[Table | str]:
        """The shown parts, from the top down; a sentence is a line, with its options marked (autofit.errors.option)."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """The result as plain values: the output of a command with --json."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(_text_of, self.parts()))

    def __repr__(self) -> str:
        """Text at a Python prompt: on a terminal at most as wide as it."""
        if not sys.stdout.isatty():
            return str(self)
        width = min(shutil.get_terminal_size().columns, WIDTH)
        return "\n".join(on_terminal(_text_of(part, width), is_terminal=True) for part in self.parts())

    def _repr_html_(self) -> str:
        return "\n".join(html_of(part) for part in self.parts())


def _text_of(part: Table | str, width: int = WIDTH) -> str:
    if isinstance(part, str):
        return told(part, as_argument)
    # in a notebook rich would show the table there and then, and its FORCE_COLOR put escapes into the text
    Console(file=(text := io.StringIO()), width=width, force_jupyter=False, color_system=None).print(part)
    return text.getvalue().rstrip("\n")


def html_of(part: Table | str) -> str:
    """A table or a sentence as HTML."""
    if isinstance(part, str):
        return f"<div>{html.escape(told(part, as_argument))}</div>"
    styles = [  # a notebook's own aligns all to the right and breaks "0.87 s"
        f"text-align:{'right' if c.justify == 'right' else 'left'}{';white-space:nowrap' if c.no_wrap else ''}"
        for c in part.columns
    ]
    head = _cells("th", styles, [_plain(c.header) for c in part.columns])
    rows = zip(*([_plain(cell) for cell in c.cells] for c in part.columns), strict=True)
    body = "".join(f"<tr>{_cells('td', styles, row)}</tr>\n" for row in rows)
    caption = f"<caption>{_plain(part.title)}</caption>" if part.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _cells(kind: str, styles: Sequence[str], texts: Sequence[str]) -> str:
    return "".join(f'<{kind} style="{how}">{text}</{kind}>' for how, text in zip(styles, texts, strict=True))


def _plain(cell: object) -> str:
    """A cell of a rich table as HTML text: its markup taken out, its special characters escaped."""
    return html.escape(cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain)


def front_table(
    rows: Sequence[TrialResult], *, original: Mapping[str, object], winner: int | None, target_bytes: int | None,
    fidelity: str, device_name: str, foreseen: Sequence[Foreseen] = (), beside: TrialResult | None = None,
    names: Mapping[str, str] | None = None,
) -> Table:  # fmt: skip
    """The Pareto front and the baseline: tier, changes, device-used against the target, time, throughput, speed-up.

    A row of `foreseen` has a name of its own and is marked as predicted; `beside` is the baseline where it is not on
    the front.
    """
    where = f" on {device_name}" if device_name else ""
    table = Folding(title=f"Pareto front (step time, device-used), {fidelity}{where}", from_width=_LEAST_FRONT)
    for name in ("trial", "tier", "changes"):
        table.add_column(name, overflow="fold")
    for name in ("device-used", "of target", "free", "step", f"{samples_word(original)}/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [*rows, *([] if beside is None else [beside])]
    base = next((row.step_s for row in rows if not row.changes), None)
    words = {row.number: describe_changes(row.changes, original, names) + _needs(row.needs) for row in rows}
    if beside is not None:
        words[beside.number] += ", not on the front"
    shown = [(row.step_s, row.device_used_bytes, _probed(row, words[row.number], winner, target_bytes)) for row in rows]
    for one in foreseen:
        said = describe_changes(one.changes, original, names)
        shown.append((one.step_s, one.device_used_bytes, _predicted(one, said, target_bytes, base)))
    for *_, cells in sorted(shown, key=lambda one: (one[0] or math.inf, one[1] or 0)):
        table.add_row(*cells)
    return table


def _probed(row: TrialResult, changes: str, winner: int | None, target_bytes: int | None) -> tuple[str, ...]:
    return (
        f"{row.number} *" if row.number == winner else f"{row.number}",
        row.tier,
        escape(changes),
        _or_dash(row.device_used_bytes, format_bytes, at_least=row.at_least),
        _share(row.device_used_bytes, target_bytes),
        _or_dash(row.margin_bytes, format_bytes),
        _or_dash(row.step_s, format_seconds),
        _or_dash(row.completions_per_s, lambda v: f"{v:.2f}"),
        _or_dash(row.speedup, lambda v: f"{v:.2f}x"),
    )


def _predicted(one: Foreseen, changes: str, target_bytes: int | None, base_s: float | None) -> tuple[str, ...]:
    return (
        one.name or "-",
        one.tier,
        escape(f"{changes}: predicted, not probed"),
        format_bytes(one.device_used_bytes),
        _share(one.device_used_bytes, target_bytes),
        "-",
        format_seconds(one.step_s),
        "-",
        "-" if base_s is None else f"{base_s / one.step_s:.2f}x",
    )


def trial_line(
    trial: Trial, original: Mapping[str, object], base: Trial | None = None, *, limit_bytes: int | None = None,
    names: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """One line for a finished trial: its tier, changes and figures, its margin and its speed-up over `base`."""
    result = trial.result
    assert result is not None
    head = (
        f"trial {trial.number} [{trial.tier}] {describe_changes(trial.changes, original, names)}{_needs(trial.needs)}: "
    )
    used = _or_dash(result.device_used_bytes, format_bytes)
    if result.status is ProbeStatus.FIT:
        assert result.median_step_s is not None
        step = format_seconds(result.median_step_s)
        row = TrialResult.of(trial, base, limit_bytes=limit_bytes)
        least = result.least_capacity_bytes  # of a simulated probe whose cache fills the card
        needed = "" if least is None else f"; {format_bytes(least)} needed"
        free = "" if row.margin_bytes is None else f" ({format_bytes(row.margin_bytes)} free{needed})"
        faster = "" if row.speedup is None or not trial.changes else f", {row.speedup:.2f}x"
        return (
            f"{head}fit, {used}{free}, {step} a step, {result.completions_per_s:.2f} {samples_word(original)}/s{faster}"
        )
    if result.status is ProbeStatus.OOM:
        needs = "needs" if result.uncapped_bytes is None else "held without the cap"
        needs = "at least" if trial.stopped_at_oom else needs
        return f"{head}oom (pruned) during {result.oom_phase}, {needs} {used}"
    return f"{head}{result.status}: {result.reason}"


def _needs(packages: Sequence[str]) -> str:
    missing = missing_packages(packages)
    return f" ({missing})" if missing else ""


def sensitivity_table(
    number: int, neighbours: Sequence[Neighbour], names: Mapping[str, str] | None = None
) -> Table | None:
    """Rows of trial `number` with one knob changed by one step, for each that makes a difference; None if none does."""
    known = [row for row in neighbours if _differs(row)]
    if not known:
        return None
    table = Folding(title=f"One knob of trial {number} changed by one step")
    for name in ("knob", "change", "tier"):
        table.add_column(name, overflow="fold")
    for name in ("device-used", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    for row in known:
        assert row.device_used_delta_bytes is not None
        used = _signed(row.device_used_delta_bytes, format_bytes) + ("" if row.fits else ", does not fit")
        used = f"at least {used}" if row.at_least else used
        step = "-" if row.step_delta_s is None else _signed(row.step_delta_s, format_seconds)
        source = f"{row.fidelity}" if row.trial is None else f"trial {row.trial}, {row.fidelity}"
        before, after = (own_value(names, row.knob, value) for value in (row.before, row.after))
        table.add_row((names or {}).get(row.knob, row.knob), f"{before} -> {after}", row.tier, used, step, source)
    return table


def _differs(row: Neighbour) -> bool:
    """True if the change shows in the bytes or in the seconds, or decides the fit."""
    if row.device_used_delta_bytes is None:
        return False
    used, step = _signed(row.device_used_delta_bytes, format_bytes), _signed(row.step_delta_s or 0.0, format_seconds)
    return (used, step) != (_SAME, _SAME) or not row.fits


def _signed(value: float, text: Callable[[int], str]) -> str:
    shown = text(abs(value))  # type: ignore[arg-type]
    return _SAME if not value or shown == text(0) else f"{'+' if value > 0 else '-'}{shown}"


def margin_sentence(margin: Margin, *, predicted: bool = False) -> str:
    """Bytes that the winner leaves under the limit (target - headroom), in one sentence; "" if there is no target.

    `predicted`: another sentence says that all figures are.
    """
    if margin.bytes_left is None:
        return ""
    head = f"It leaves {format_bytes(margin.bytes_left)} under the limit"
    if margin.key is None or margin.tokens is None or (margin.at_least and not margin.tokens):
        return head  # how far it can grow is not known
    more = "at least" if margin.at_least else "about"
    source = "" if predicted else f" ({margin.fidelity})"
    return f"{head}; {margin.key} can grow by {more} {margin.tokens} tokens{source}"


def _share(used: int | None, target_bytes: int | None) -> str:
    return "-" if used is None or not target_bytes else f"{used / target_bytes:.0%}"


def _or_dash(value: object, text: object, *, at_least: bool = False) -> str:
    assert callable(text)
    return "-" if value is None else ("> " if at_least else "") + str(text(value))


def sentence(text: str) -> str:
    """`text` with a capital, and a full stop if it lacks an end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', ':')) else '.'}"
