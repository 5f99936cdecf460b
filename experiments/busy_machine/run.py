"""On a busy machine, how often is a search's winner slower than the baseline, and how often is a faster trial found?

Run: `python experiments/busy_machine/run.py`. Candidates are confirmed by the code of `autofit search`; their seconds
are those of a machine that is busy half of the time (tests/busy.py), in stretches of 0.5 to 100 s where a probe takes 5
to 8 s. `searched` is the winner by the search's own probes, without its confirmation. Writes results.json next to this
file.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import busy

from autofit.tuning.frontier import winner
from experiments.kept import commit

BASELINE_S = 0.7
SLOWER_FRAC = 0.02  # a winner is called slower than the baseline if its idle step is longer by more than this share
# Seconds of a candidate's step, as multiples of the baseline's.
CASES = {
    "all 3 to 30 % slower": (1.03, 1.08, 1.15, 1.3, 1.2),
    "all 5 % slower": (1.05, 1.05, 1.05, 1.06, 1.05),
    "one 1.4x as fast": (1.03, 1 / 1.4, 1.15, 1.3, 1.2),
    "one 1.1x as fast": (1.03, 1 / 1.1, 1.15, 1.3, 1.2),
}
MACHINES: dict[str, dict[str, float | bool]] = {
    "idle": {"stretch_s": 10, "slowdown": 1.0},
    **{f"2x, {s} s": {"stretch_s": s} for s in (0.5, 2, 5, 10, 30, 100)},
    **{f"1x to 3x, {s} s": {"stretch_s": s, "varies": True} for s in (2, 10, 30)},
}


def once(seed: int, case: tuple[float, ...], machine: dict[str, float | bool]) -> dict[str, float]:
    """The true speed of the winner over the baseline's, with and without the confirmation, and the probes of that."""
    steps_s = [BASELINE_S, *(BASELINE_S * factor for factor in case)]
    with tempfile.TemporaryDirectory() as folder:
        trials, probes = busy.search_on(busy.Machine(seed, **machine), Path(folder), steps_s)  # type: ignore[arg-type]
    best, searched = winner(trials), winner([t.before_confirmation for t in trials])
    assert best is not None
    assert searched is not None
    return {
        "confirmed": BASELINE_S / steps_s[best.number], "searched": BASELINE_S / steps_s[searched.number],
        "probes": probes, "told": best.speedup(trials[0]) or 0.0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=200)
    seeds = parser.parse_args().seeds
    rows = []
    for case, factors in CASES.items():
        for name, machine in MACHINES.items():
            found = [once(seed, factors, machine) for seed in range(seeds)]
            row = {"case": case, "machine": name, "searches": seeds, "probes": mean(f["probes"] for f in found)}
            for rule in ("searched", "confirmed"):
                row[f"slower_{rule}"] = mean(f[rule] < 1 / (1 + SLOWER_FRAC) for f in found)
                row[f"faster_{rule}"] = mean(f[rule] > 1.05 for f in found)
            row["least_told"] = min(f["told"] for f in found)
            row["commit"] = commit()
            rows.append(row)
            print(json.dumps(row), flush=True)
    (Path(__file__).parent / "results.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
