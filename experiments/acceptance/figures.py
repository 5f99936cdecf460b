"""The figures of each part, read from the results that its experiment has written."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.acceptance import older
from experiments.accuracy import table as accuracy_table
from experiments.accuracy.rows import SETS
from experiments.field import judge
from experiments.field import table as field_table
from experiments.field.threads import read_threads
from experiments.peers import table as peers_table
from experiments.peers.peers import PEERS
from experiments.peers.rows import Row, read_rows
from experiments.tabular import whole

EXPERIMENTS = Path(__file__).parents[1]
MEASURED_AGAIN = "litgpt_a10g"  # the set of experiments/accuracy whose program the acceptance runs
_UNDISTURBED = ("done", "weights_equal", "final_loss_equal")


@dataclass(frozen=True, slots=True)
class Figure:
    """One claim: what it is of, what was found, and whether the stated goal is kept (None: there is no goal)."""

    claim: str
    found: str
    goal: str = ""
    holds: bool | None = None


def search_figures() -> list[Figure]:
    """Wall seconds of README's search, with nothing cached and again."""
    kept = _read("acceptance/first_search.json")
    return [
        Figure("README's search, nothing cached", f"{kept['cold_s']:.0f} s", "<= 20 s", kept["cold_s"] <= 20),
        Figure("README's search, the second time", f"{kept['warm_s']:.0f} s", "<= 3 s", kept["warm_s"] <= 3),
        Figure("README's search, in another folder after that", f"{kept['elsewhere_s']:.0f} s"),
        Figure("the winner's completions a second, over the baseline's, predicted", f"{kept['speed_up']:.2f}x"),
    ]


def older_figures() -> list[Figure]:
    """Seconds of commands, beside those of the commit on which their goals were set, in one run on one machine."""
    kept = _read("acceptance/older.json")
    return [_older(command, kept["seconds"][command.name], kept["commits"]["older"]) for command in older.COMMANDS]


def _older(command: older.Command, seconds: dict[str, list[float]], commit: str) -> Figure:
    today_s, older_s = (statistics.median(seconds[which]) for which in ("today", "older"))
    share, goal = today_s / older_s, command.goal_s / command.counted_s
    found = f"{today_s:.1f} s, {commit} {older_s:.1f} s: {share:.2f} of it"
    claim = f"{command.name}; the goal was {command.goal_s:g} s where that commit took {command.counted_s:g} s"
    return Figure(claim, found, f"<= {goal:.2f}", share <= goal)


def seed_figures() -> list[Figure]:
    """What is predicted of each seed's configuration, beside what the seed says."""
    rows = _read("seeds/results.json")
    seeds = {name[:3] for name in rows}
    told = seeds - {name[:3] for name, row in rows.items() if "error" in row["predicted"]}
    all_told = _share("seeds of which every configuration is predicted", len(told), len(seeds), 1.0)
    return [all_told, *(_seed(name, row) for name, row in sorted(rows.items()))]


def _seed(name: str, row: dict[str, Any]) -> Figure:
    seed, found = row["seed"], row["predicted"]
    ranks = f"{seed['ranks']} ranks" if "ranks" in seed else "one rank"
    claim = f"{name} ({ranks}): the seed says {seed['says']}"
    if "error" in found:
        return Figure(claim, str(found["error"]))
    beside = row["beside_bytes"]
    models = f" and {beside / 1e9:.1f} GB of models beside" if beside else ""
    fits = found["least_capacity_bytes"] + beside <= found["capacity_bytes"]
    return Figure(claim, f"{found['device_used_bytes'] / 1e9:.1f} GB{models}: {'fits' if fits else 'does not fit'}")


def thread_figures() -> list[Figure]:
    """Symptoms and accepted fixes of users' threads."""
    threads = [thread for thread in read_threads() if thread.counts]
    answers = {thread.name: field_table.read(EXPERIMENTS / "field" / "results", thread) for thread in threads}
    ran = [(thread, answer) for thread in threads if (answer := answers[thread.name]) is not None]
    seen = [judge.symptom_predicted(thread, answer) is True for thread, answer in ran]
    fixed = [judge.fix_found(thread, answer) is not None for thread, answer in ran if thread.accepted]
    return [
        _share("threads whose symptom is predicted", sum(seen), len(seen), 0.9),
        _share(f"threads whose accepted fix is among the first {judge.FIRST}", sum(fixed), len(fixed), 0.85),
    ]


def measured_figures() -> list[Figure]:
    """Errors against the peaks and seconds that others measured on cards; those of two sets as they stand."""
    found = []
    for name, measured in SETS.items():
        for column in measured.compared:
            errors = [value for _, value in accuracy_table.pairs(measured, column)]
            if errors:
                sizes = [abs(value) for value in errors]
                mean, worst = f"{statistics.mean(sizes):.2%}", f"{max(sizes):.2%}"
                stands = "" if name == MEASURED_AGAIN else ", not made again here"
                found.append(Figure(f"{name}, {column}, {len(errors)} rows{stands}: mean, worst", f"{mean}, {worst}"))
    return found


def efficiency_figures() -> list[Figure]:
    """Probes that a search needs, ours and those of Optuna's own samplers."""
    kept = _read("search_efficiency/sample/summary.json")
    found = []
    for name, row in kept.items():
        middle, low, high = (
            f"{value:g}" if value <= row["probes"] else f"over {row['probes']}"
            for value in (row["probes_to_95_median"], *row["probes_to_95_median_interval"])
        )
        claim = f"{name}: probes until 95 % of the best speed, median of {row['searches']} searches (its 95 % interval)"
        ours = {"goal": "<= 2", "holds": row["probes_to_95_median"] <= 2} if name == "autofit" else {}
        found.append(Figure(claim, f"{middle} ({low} to {high})", **ours))
    return found


def peer_figures() -> list[Figure]:
    """The median error of each estimator's bytes on the rows that it can say, and autofit's on them; then by set."""
    results, rows = _read("peers/results.json"), read_rows()
    sets = dict.fromkeys(row.set for row in rows)
    by_set = [_nearest(name, [row for row in rows if row.set == name], results) for name in sets]
    return [*(figure for peer in _others() if (figure := _beside(peer, rows, results))), *filter(None, by_set)]


def _others() -> list[str]:
    return [peer.name for peer in PEERS if not peer.name.startswith("autofit")]


class _Sizes(NamedTuple):
    """Sizes of the errors of one row: an estimator's, autofit's, autofit's with the measured program."""

    theirs: float
    ours: float
    own: float | None


def _pairs(peer: str, rows: Sequence[Row], results: peers_table.Results) -> list[_Sizes]:
    """The sizes of each row that both have said."""
    return [
        _Sizes(abs(theirs), abs(ours), None if (own := peers_table.of_their_code(row)) is None else abs(own))
        for row in rows
        if (theirs := peers_table.error(row, results.get(row.name, {}).get(peer))) is not None
        and (ours := peers_table.ours(row, results)) is not None
    ]  # fmt: skip


def _beside(peer: str, rows: Sequence[Row], results: peers_table.Results) -> Figure | None:
    pairs = _pairs(peer, rows, results)
    if not pairs:
        return None
    theirs = statistics.median(one.theirs for one in pairs)
    ours = statistics.median(one.ours for one in pairs)
    claim = f"{peer}: median error of its bytes, and autofit's on the same rows"
    nearer = f"autofit nearer on {sum(one.ours < one.theirs for one in pairs)} of {len(pairs)}"
    return Figure(claim, f"{theirs:.2%}, {ours:.2%}; {nearer}", "the smaller median", ours < theirs)


def _nearest(name: str, rows: Sequence[Row], results: peers_table.Results) -> Figure | None:
    """The estimator with the smallest median on the rows of a set, and autofit on the same rows."""
    said = {peer: pairs for peer in _others() if len(pairs := _pairs(peer, rows, results)) > 1}
    if not said:
        return None
    best = min(said, key=lambda peer: statistics.median(one.theirs for one in said[peer]))
    theirs = statistics.median(one.theirs for one in said[best])
    ours = statistics.median(one.ours for one in said[best])
    own = [one.own for one in said[best] if one.own is not None]
    told = f"; {statistics.median(own):.2%} with the measured program" if own else ""
    found = f"{best} {theirs:.2%} on {len(said[best])} rows, autofit {ours:.2%}{told}"
    return Figure(f"{name}: the nearest other estimator (at least two rows)", found, "5x nearer", 5 * ours <= theirs)


def forecast_figures() -> list[Figure]:
    """Errors of forecasts beside whole simulations of the same candidates; of some recipes as they stand."""
    found, kept = [], _read("tabular/whole.json")
    for key, what, most in (("bytes", "live bytes", 0.02), ("s", "seconds of a step", 0.1)):
        sizes = sorted(map(abs, whole.errors(kept, key)))
        near = sum(size <= most for size in sizes)
        told = f"{statistics.median(sizes):.2%}, {sizes[-1]:.2%}; {near} of {len(sizes)} within {most:.0%}"
        claim = f"forecasts of {len(sizes)} candidates of {len(kept)} recipes, {what}: median, worst"
        found.append(Figure(claim, told, f">= 90% within {most:.0%}", near >= 0.9 * len(sizes)))
    return found


def neutrality_figures() -> list[Figure]:
    """The largest difference of gradients that counts as rounding, and the smallest that does not."""
    kept = _read("neutrality/results.json")
    values = [value for row in kept["rows"] for value in row["cells"].values()]
    rounding = max(value for value in values if value <= kept["bound"])
    real = min(value for value in values if value > kept["bound"])
    return [
        Figure(f"{len(values)} cells: largest difference within rounding", f"{rounding:.1e}", f"< {kept['bound']:.0e}",
               rounding < kept["bound"]),
        Figure("smallest difference of a change that is not neutral", f"{real:.1e}"),
    ]  # fmt: skip


def fault_figures() -> list[Figure]:
    """Full runs that ended as if they had not been disturbed, by fault."""
    kept = _read("faults/results.json")["kinds"]
    found = []
    for name, kind in kept.items():
        rows = kind["rows"]
        same = sum(all(row.get(key, True) is True for key in _UNDISTURBED) for row in rows)
        found.append(_share(f"{name}: full runs that end as if undisturbed", same, len(rows), 1.0))
    return found


def rank_figures() -> list[Figure]:
    """The largest error of the tracked peak of a rank against its own allocator."""
    errors = [abs(row["error_percent"]) for row in _read("ranks/peaks.json")]
    worst = max(errors)
    return [Figure(f"peak bytes of {len(errors)} real ranks: worst", f"{worst:.4f} %", "<= 0.1 %", worst <= 0.1)]


def _share(claim: str, some: int, of: int, goal: float) -> Figure:
    return Figure(claim, f"{some} of {of}", f">= {goal:.0%}", of > 0 and some / of >= goal)


def _read(path: str) -> Any:
    return json.loads((EXPERIMENTS / path).read_text(encoding="utf-8"))
