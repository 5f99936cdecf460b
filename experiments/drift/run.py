"""Is there a warning before the OOM of a longer sample, and none without one? Writes results.json and table.md.

    python -m drift.run            # from experiments/, on the CPU: the card is simulated; about 20 minutes

Each dataset is trained twice by the real TRL trainer on a simulated card with little memory: without its longer sample,
and with it. The card's memory is drawn from a rough formula: some 5 to 40 % above what the training without the longer
sample needs beside CUDA's context; where that runs out of memory, 20 % more is tried. The longer sample is where the
seed's shuffle puts it, from the second step on: in the first step nothing was measured before it.
"""

import json
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from autofit.fakegpu import gpu_spec
from autofit.watching.events import RunEvent
from drift.trainings import STEPS, Case, Outcome, drawn, trained
from experiments.kept import commit

HERE = Path(__file__).parent
KINDS = ("sft", "sft", "dpo", "sft", "grpo", "sft", "sft", "sft", "sft", "sft")  # of dataset number n: n modulo 10
COUNT = 20
CONTEXT = gpu_spec("a100-40gb").context_bytes


def measured(number: int, folder: Path) -> dict[str, Any]:
    """One dataset: what was warned, and what happened."""
    kind = KINDS[number % len(KINDS)]
    without, longer = (drawn(kind, number, with_longer=w) for w in (False, True))
    need = roughly_needed(without) * float(np.random.default_rng(number).uniform(1.05, 1.4))
    calm = trained(without, folder, capacity_bytes=int(CONTEXT + need))
    while calm.oom:
        need *= 1.2
        calm = trained(without, folder, capacity_bytes=int(CONTEXT + need))
    capacity = int(CONTEXT + need)
    assert calm.least_capacity_bytes is not None
    room = (capacity - calm.least_capacity_bytes) / (calm.least_capacity_bytes - CONTEXT)
    found = trained(longer, folder, capacity_bytes=capacity)
    return {
        "number": number, "kind": kind, "capacity_bytes": capacity, "room_frac": room,
        "longest_tokens": max(without.lengths), "longer_tokens": max(longer.lengths), "longer_row": longer.longer,
        "micro_batch_size": longer.micro_batch_size, "checkpointing": longer.checkpointing,
        "attention": longer.attention, "oom": found.oom, "oom_in_step": found.steps + 1 if found.oom else None,
        "warnings": [_warning(e) for e in found.warnings], "warned": _right(found, longer),
        "without": {"oom": calm.oom, "steps": calm.steps, "warnings": [_warning(e) for e in calm.warnings]},
    }  # fmt: skip


def roughly_needed(case: Case) -> float:
    """Bytes beside CUDA's context, from a few trainings of this model; only to draw the card's memory."""
    sequences = case.micro_batch_size * (2 if case.kind == "dpo" else 1)
    longest = max(case.lengths)
    of_token = 0.105e6 if case.checkpointing else 0.16e6
    square = 160 * sequences * longest**2 if case.attention == "eager" else 0
    return 352e6 + (75e6 if case.kind == "dpo" else 0) + of_token * sequences * longest + square


def _warning(event: RunEvent) -> dict[str, object]:
    return {"step": event.step, "text": event.text, **event.data}


def _right(found: Outcome, case: Case) -> bool:
    """Whether a warning before the OOM named its step and its row."""
    return any(
        e.step <= found.steps and e.data["at_step"] == found.steps + 1 and e.data["sample"] == case.longer
        for e in found.warnings
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ooms = [r for r in rows if r["oom"]]
    ahead = [r["oom_in_step"] - r["warnings"][0]["step"] for r in ooms if r["warned"]]
    return {
        "date": datetime.now(UTC).date().isoformat(), "datasets": len(rows), "steps": STEPS, "ooms": len(ooms),
        "warned_before_with_right_step_and_row": sum(r["warned"] for r in ooms), "steps_ahead": ahead,
        "without_longer": len(rows), "false_alarms": sum(bool(r["without"]["warnings"]) for r in rows),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "datasets")},
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = [
        "| dataset | trainer | longest | longer sample | OOM in step | warned after step | right | alarms without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        first = r["warnings"][0] if r["warnings"] else None
        lines.append(
            f"| {r['number']} | {r['kind']}, {r['attention']}{', checkpointed' if r['checkpointing'] else ''} | "
            f"{r['longest_tokens']} | {r['longer_tokens']} (row {r['longer_row']}) | {r['oom_in_step'] or 'none'} | "
            f"{first['step'] if first else '-'} | {'yes' if r['warned'] else 'no'} | {len(r['without']['warnings'])} |"
        )
    s = found["summary"]
    head = (
        f"{s['date']}, simulated A100 with less memory, {s['steps']} steps, {s['versions']}: "
        f"{s['warned_before_with_right_step_and_row']} of {s['ooms']} OOMs were warned of with the right step and row; "
        f"{s['false_alarms']} of {s['without_longer']} datasets without a longer sample gave an alarm."
    )
    return head + "\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measure the datasets that results.json lacks."""
    path = HERE / "results.json"
    found = json.loads(path.read_text()) if path.exists() else {"rows": []}
    done = {row["number"] for row in found["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for number in sorted(set(range(COUNT)) - done):
            found["rows"].append(measured(number, Path(folder)))
            found["rows"].sort(key=lambda row: int(row["number"]))
            found["summary"] = summary(found["rows"]) | {"commit": commit()}
            path.write_text(json.dumps(found, indent=1) + "\n")
            (HERE / "table.md").write_text(table(found))
            print(number, found["summary"], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
