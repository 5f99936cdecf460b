"""What storms found so far: a line of JSON for each part of a storm, and their sums against the goals of issue 37.

`python -m experiments.storm.results` writes the table TOTALS.md beside this file.
"""

import datetime
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
FILE, TABLE = HERE / "results.jsonl", HERE / "TOTALS.md"
GOALS = {"whole commands": 50_000, "places and users": 10_944, "torn": 300, "kills": 2_000}
_HEAD = (
    "what is tried",
    "tried",
    "goal",
    "by seed",
    "mishandled",
    "on the newest commit",
    "commits",
    "inputs a second",
)

_OURS = r"site-packages/|python3[\d.]*/|autofit/|experiments/|tests/|studies/"
_PLACE = re.compile(rf"(?:/[\w.+-]+)+/(?={_OURS})")  # of whose machine it was
_TEXT = """\
# What the storms have tried so far

Made by `python -m experiments.storm.results` from results.jsonl. The goals are those of issue 37, in three seeds; all
cases of places and users are to be tried with each seed. A fault counts for ever; the column of the newest commit says
how many attacks that has seen.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a part of a storm found: `tried` things of a kind, from the `first` one of a seed on."""

    kind: str
    seed: int
    first: int
    tried: int
    refused: int = 0
    wrong: Mapping[str, int] = field(default_factory=dict)  # {what was mishandled: how often}
    smallest: Mapping[str, str] = field(default_factory=dict)  # {what was mishandled: the smallest input that did it}
    seconds: float = 0.0
    slowest_s: float = 0.0
    date: str = ""
    commit: str = ""
    is_again: bool = False  # of a part in which something was mishandled before: not counted as tried

    @property
    def goal(self) -> str | None:
        """The goal that it counts for."""
        return next((goal for goal in GOALS if self.kind.startswith(goal)), None)


@dataclass(frozen=True, slots=True)
class Results:
    """The file of all parts, to which each new one is added as soon as it has ended."""

    path: Path = FILE

    def all(self) -> list[Result]:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return [Result(**json.loads(line)) for line in lines]

    def next_of(self, kind: str, seed: int) -> int:
        """The number of the first thing of the kind that was not tried with this seed."""
        return max((one.first + one.tried for one in self.all() if (one.kind, one.seed) == (kind, seed)), default=0)

    def mishandled(self) -> list[Result]:
        """The parts in which something was mishandled, those first that wait longest to be tried again."""
        every = self.all()
        again = {(one.kind, one.seed, one.first): i for i, one in enumerate(every) if one.is_again}
        wrong = [one for one in every if one.wrong and not one.is_again]
        return sorted(wrong, key=lambda one: again.get((one.kind, one.seed, one.first), -1))

    def add(self, result: Result) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_PLACE.sub("", json.dumps(asdict(result))) + "\n")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def commit() -> str:
    """The commit of what is attacked; with a plus where a file of it differs."""
    run = [["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "--", "autofit", "trainers", "search_spaces"]]
    head, changed = (
        subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout for words in run
    )
    return head.strip() + ("+" if changed.strip() else "")


def table(results: Iterable[Result]) -> str:
    """The sums of each kind, and below them what was mishandled."""
    results = list(results)
    every = [one for one in results if not one.is_again]
    lines = [*_TEXT.splitlines(), "", f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    for goal, most in GOALS.items():
        of_goal = [one for one in every if one.goal == goal]
        lines.append(_row(f"**{goal}**, all", of_goal, f"{most:,}"))
        kinds = sorted({one.kind for one in of_goal})
        lines += [_row(kind, [one for one in of_goal if one.kind == kind], "") for kind in kinds if kind != goal]
    others = sorted({one.kind for one in every if one.goal is None})
    lines += [_row(kind, [one for one in every if one.kind == kind], "") for kind in others]
    lines += ["", "## Mishandled", ""]
    lines += [f"- {one.date}, {one.commit}, seed {one.seed}, {one.kind} {one.first} to {one.first + one.tried}: {what} "
              f"({times}x){_again(one, results)}" for one in every for what, times in sorted(one.wrong.items())
              ] or ["Nothing."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _again(part: Result, results: list[Result]) -> str:
    """What the last try of the same part found, on a later commit."""
    known = [
        one for one in results if one.is_again and (one.kind, one.seed, one.first) == (part.kind, part.seed, part.first)
    ]
    if not known:
        return ""
    last = known[-1]
    found = "; ".join(f"{what} ({times}x)" for what, times in sorted(last.wrong.items())) or "nothing mishandled"
    return f". Tried again, {last.tried:,} on {last.commit}: {found}"


def _row(name: str, results: list[Result], goal: str) -> str:
    by_seed: dict[int, int] = {}
    for one in results:
        by_seed[one.seed] = by_seed.get(one.seed, 0) + one.tried
    tried, seconds = sum(by_seed.values()), sum(one.seconds for one in results)
    newest = results[-1].commit if results else "-"
    cells = (
        name, f"{tried:,}", goal, ", ".join(f"{seed}: {count:,}" for seed, count in sorted(by_seed.items())) or "-",
        f"{sum(sum(one.wrong.values()) for one in results):,}",
        f"{newest}: {sum(one.tried for one in results if one.commit == newest):,}",
        str(len({one.commit for one in results})), f"{tried / seconds:.2f}" if seconds else "-",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    TABLE.write_text(table(Results().all()), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))
