"""What public logs of verl measured, beside what `autofit estimate` says of the same settings.

Run: python experiments/verl_logs/run.py [NUMBER ...], the rows of rows.yaml by number from 1, all by default. It keeps
the rows that it does not run again. Writes results.json and table.md.

Allocated bytes are those of the actor's process, without vLLM's, as verl logs them: the most since the process began.
Of a run of `one_step` the update does not count, which is predicted with the optimizer's states that the first has not.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import autofit
from autofit.errors import ConfigError

HERE = Path(__file__).parent
KEPT = HERE / "results.json"
GIB = 1 << 30


def predicted(row: Mapping[str, Any], common: Mapping[str, object]) -> dict[str, object]:
    """The phases of a row as a simulated card has them, in GiB and seconds."""
    values = {**common, **row["values"], **row.get("assumed", {})}
    words = " ".join(f"{key}={value}" for key, value in values.items())
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.sh"
        script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
        try:
            found = autofit.estimate(script, gpu=row["gpu"], advice=False).to_dict()
        except ConfigError as error:
            return {"refused": str(error)}
    phases = {
        phase["name"]: round((phase["peak_allocated_bytes"] - phase["categories"].get("vLLM", 0)) / GIB, 3)
        for phase in found["phases"] if phase["categories"]
    }  # fmt: skip
    counted = [size for name, size in phases.items() if name != "update" or not row.get("one_step")]
    return {
        "allocated_gib": max(counted), "phases_gib": phases, "rollout_s": found["rollout_s"],
        "update_s": found["update_s"], "computed_in_s": round(time.monotonic() - began),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], kept: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| run | verl | card | measured, GiB | predicted, GiB | off | what is known of the difference |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        found = kept.get(row["name"], {})
        size, off = found.get("allocated_gib"), found.get("off")
        shown = ("not run", "") if size is None else (f"{size:.2f}", f"{off:+.1%}")
        cells = (row["name"], row["verl"], row["card"], row["allocated_gib"], *shown, row.get("why", ""))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = yaml.safe_load((HERE / "rows.yaml").read_text("utf-8"))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    wanted = [int(word) for word in sys.argv[1:]] or range(1, len(given["rows"]) + 1)
    for number in wanted:
        row = given["rows"][number - 1]
        found = predicted(row, given["common"])
        told = {"measured_gib": row["allocated_gib"], **found}
        if "allocated_gib" in found:
            told["off"] = round(found["allocated_gib"] / row["allocated_gib"] - 1, 4)
        kept[row["name"]] = told
        print(row["name"], told, flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    (HERE / "table.md").write_text(table(given["rows"], kept))


if __name__ == "__main__":
    main()
