"""Predict what tools' own authors measured, and write the table: `python -m experiments.frontends.peaks`."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autofit.files import write_json
from experiments.frontends.peaks import table
from experiments.frontends.peaks.rows import HERE, Row, read_rows

REPOSITORY = HERE.parents[2]
RESULTS = HERE / "results"
PACKAGES = ("torch", "transformers", "trl", "peft")
CHECKOUTS = {"ms-swift": "ms_swift", "Axolotl": "axolotl"}
SMOKE = "qwen/LoRA 1.8B, 256 tokens"  # needs no checkout


def main() -> None:
    """Predict the rows of a half that have no answer yet, one at a time, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.frontends.peaks", description=__doc__)
    parser.add_argument("--ms-swift", type=Path, help="a checkout of modelscope/ms-swift at 3602360a")
    parser.add_argument("--axolotl", type=Path, help="a checkout of axolotl-ai-cloud/axolotl at 067b021c")
    parser.add_argument(
        "--half", choices=("even", "odd"), default="even", help="odd rows are predicted once, at the end"
    )
    parser.add_argument("--only", action="append", help="rows whose name begins so, may be given again; again if known")
    parser.add_argument("--again", action="store_true", help="predict rows again that have an answer")
    parser.add_argument("--limit-s", type=float, default=400, help="seconds after which a row is given up")
    parser.add_argument("--smoke", action="store_true", help=f"only {SMOKE!r}, written nowhere")
    parser.add_argument("--table", action="store_true", help="write the table of what is there, and predict nothing")
    options = parser.parse_args()
    rows = read_rows()
    if options.smoke:
        row = next(row for row in rows if row.name == SMOKE)
        print(table.line(row, predict(row, Path(), options.limit_s)))
        return
    for row in () if options.table else rows:
        if row.kept_out is not (options.half == "odd") or not row.drawn:
            continue
        named = any(row.name.startswith(name) for name in options.only or ())
        if (options.only and not named) or (not named and not options.again and table.read(RESULTS, row)):
            continue
        checkout = getattr(options, CHECKOUTS.get(row.tool, ""), None)
        if row.file is not None and checkout is None:
            continue
        found = predict(row, checkout or Path(), options.limit_s)
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"{table.slug(row)}.json", found)
        print(table.line(row, found), flush=True)
    text = table.table(rows, {row.name: table.read(RESULTS, row) for row in rows})
    (HERE / "table.md").write_text(text, "utf-8")


def predict(row: Row, checkout: Path, limit_s: float) -> dict[str, object]:
    """The row's figures or the last line of its error, with seconds, versions and autofit's commit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "experiments.frontends.peaks.predicting", row.name, str(out), str(checkout)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
        found: dict[str, object]
        try:
            _, errors = child.communicate(timeout=limit_s)
            lines = [line for line in errors.splitlines() if line.strip()] or ["nothing was written"]
            error = re.sub(r"/[^ ]*/then/", "", lines[-1].replace(f"{checkout}/", ""))[:500]
            found = dict(json.loads(out.read_text("utf-8"))) if out.exists() else {"error": error}
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            child.communicate()
            found = {"error": f"not done after {limit_s:g} s"}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return {
        **found, "wall_s": round(time.monotonic() - began, 1), "date": datetime.date.today().isoformat(),
        "autofit": commit.stdout.strip(), "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }  # fmt: skip


if __name__ == "__main__":
    main()
