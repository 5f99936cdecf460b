"""Put the tables of committed files into the pages: what stands between two markers is the file's own.

    python docs/tables.py [--check]

`<!-- table: experiments/accuracy/table.md 2 -->` begins the second table of that file, and `<!-- /table -->` ends it;
`<!-- table: docs/levers.json grpo -->` begins the levers of that base.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\|$\n?)+", re.MULTILINE)


def of_markdown(text: str, number: int) -> str:
    """The table of that number, from 1."""
    return str(TABLE.findall(text)[number - 1]).rstrip("\n") + "\n"


def of_levers(kept: Mapping[str, Any], base: str) -> str:
    """What each lever of a base does, against the base."""
    rows = kept["bases"][base]["rows"]
    first = rows[0]
    lines = ["| lever | tier | device-used | difference | a step | ratio |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            raise ValueError(f"{row['lever']}: {row['error']}")
        used, step = row["device_used_bytes"], row["step_s"]
        more = f"{(used - first['device_used_bytes']) / 1e9:+.2f} GB" if row is not first else ""
        ratio = f"x {step / first['step_s']:.2f}" if step and row is not first else ""
        fit = "" if row["fits"] else ", does not fit"
        lines.append(
            f"| {row['lever']} | {row['tier']} | {used / 1e9:.2f} GB{fit} | {more} | {seconds(step)} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def seconds(value: float | None) -> str:
    """Seconds with three figures; a dash where there are none."""
    return "-" if value is None else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def with_tables(page: str) -> str:
    """The page with each table as its file has it today."""

    def again(found: re.Match[str]) -> str:
        text = (ROOT / found[2]).read_text(encoding="utf-8")
        table = (
            of_levers(json.loads(text), found[3]) if found[2].endswith(".json") else of_markdown(text, int(found[3]))
        )
        return f"{found[1]}\n{table}\n{found[5]}"

    return MARKED.sub(again, page)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the tables of the pages; the exit code."""
    options = argparse.ArgumentParser(description="Put the tables of committed files into the pages.")
    options.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a table differs")
    check, differs = options.parse_args(argv).check, False
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = with_tables(before)
        if before != after:
            differs = True
            print(page.relative_to(ROOT), "differs" if check else "written")
            if not check:
                page.write_text(after, encoding="utf-8")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
