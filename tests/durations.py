"""Which tests take a second or more: `python tests/durations.py JUNIT.xml ...` prints them beside tests/durations.tsv.

The table decides what the default tests are: a test in it runs with the slow ones (conftest.py), unless its row says
"default", as a whole case of its capability. Seconds are those of two idle cores; they never fail a run. With `--write`
the table is made again from the files given: new tests of a second or more join it, faster ones leave it.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

TABLE = Path(__file__).with_suffix(".tsv")
LONG_S = 1.0
SHOWN = 25
collected: set[str] = set()  # the tests that pytest found in this process, before any was left out by its marks


@dataclass(frozen=True)
class Long:
    """A test of a second or more."""

    seconds: float
    is_default: bool


def read() -> dict[str, Long]:
    """The table: test (file::name, a method's class left out) to its row."""
    rows = (line.split("\t") for line in TABLE.read_text("utf-8").splitlines()[1:])
    return {test: Long(float(seconds), runs == "default") for seconds, runs, test in rows}


@functools.cache
def files() -> frozenset[str]:
    """The files with a test in the table."""
    return frozenset(test.split("::")[0] for test in read())


def measured(reports: list[str]) -> dict[str, float]:
    """Seconds of each test in junit files of pytest, its fixtures' with them."""
    found: dict[str, float] = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            *folders, module = [part for part in case.get("classname", "").split(".") if not part.startswith("Test")]
            test = f"{'/'.join((*folders, module))}.py::{case.get('name')}"
            found[test] = found.get(test, 0.0) + float(case.get("time", 0))
    return found


def main() -> None:
    write, reports = "--write" in sys.argv, [word for word in sys.argv[1:] if word != "--write"]
    if not reports:
        sys.exit("give junit files of pytest: --junit-xml=FILE writes one")
    table, seconds = read(), measured(reports)
    for test in sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN]:
        print(f"{seconds[test]:7.1f} s, {table[test].seconds if test in table else 0:6.1f} before: {test}")
    new = sorted(test for test in seconds.keys() - table.keys() if seconds[test] >= LONG_S)
    print(f"{len(new)} tests of a second or more are not in {TABLE.name}, which --write adds", *new[:SHOWN], sep="\n  ")
    if write:
        kept = {test: row for test, row in table.items() if test not in seconds}
        for test, now in seconds.items():
            if now >= LONG_S:
                kept[test] = Long(now, test in table and table[test].is_default)
        lines = (
            f"{row.seconds:.1f}\t{'default' if row.is_default else 'slow'}\t{test}"
            for test, row in sorted(kept.items())
        )
        TABLE.write_text("\n".join(["seconds\truns with\ttest", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
