"""What public logs of verl measured, beside what `autofit estimate` says of the same settings.

Run: python experiments/verl_logs/run.py [NUMBER ...], the rows of rows.yaml by number from 1, all by default. It keeps
the rows that it does not run again. Writes results.json.

Allocated bytes are those of the actor's process, without vLLM's, as verl logs them: the most since the process began.
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
    return {
        "allocated_gib": max(phases.values()), "phases_gib": phases, "rollout_s": found["rollout_s"],
        "update_s": found["update_s"], "computed_in_s": round(time.monotonic() - began),
    }  # fmt: skip


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


if __name__ == "__main__":
    main()
