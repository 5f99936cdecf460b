"""Peaks of every real gloo rank on the CPU: a probe's tracker against each event of that rank's allocator.

    python experiments/ranks/peaks.py [sft,dpo,reward,grpo]

Trains tiny models (4 layers, 128 wide) on 2 and 4 ranks, DDP and FSDP2, full and LoRA; writes peaks.json and peaks.md.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

_TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(_TESTS))
os.environ["PYTHONPATH"] = str(_TESTS)  # of the fork server, whose children run the helper

import tiny  # noqa: E402
from rank_peaks import RealPeak, real_peaks  # noqa: E402

from autofit.probing.fork_server import ForkServer  # noqa: E402
from autofit.probing.prepare import prepare  # noqa: E402
from autofit.recipe.launch import Launch  # noqa: E402

_TRAINERS = ("sft", "dpo", "grpo")
_LONGEST_S = 1500  # of one case: four ranks train until each has a whole record, 14 s a training at a load of 14


def main(trainers: list[str]) -> None:
    """Measure all cases, then write the two files beside this one."""
    here, rows = Path(__file__).resolve().parent, list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as home:
        server = ForkServer(Path(home) / "server")
        try:
            for trainer in trainers:
                for case in _cases(trainer, Path(home), server):
                    rows += case
                    print(case[0], flush=True)
        finally:
            server.close()
    (here / "peaks.json").write_text(json.dumps(rows, indent=1) + "\n")
    (here / "peaks.md").write_text(_table(rows))


def _cases(trainer: str, home: Path, server: ForkServer) -> Iterator[list[dict[str, object]]]:
    folder = home / trainer
    folder.mkdir()
    os.chdir(folder)  # a recipe names its reward functions from here
    model = tiny.write_model(folder / "model", hidden=128, layers=4)
    if trainer == "grpo":
        path = tiny.write_recipe(folder, model)
    else:
        path = tiny.write_offline_recipe(trainer, folder, model, gradient_accumulation_steps=2)
    recipe = replace(prepare(path, trainer=trainer, device="cpu", folder=folder, server=server), folder=folder)
    for sharding in ("ddp", "fsdp2"):
        for ranks in (2, 4):
            for method in ("full", "lora"):
                launch, changes = Launch(ranks=ranks, sharding=sharding), {"use_peft": method == "lora"}
                place = folder / f"{sharding}-{ranks}-{method}"
                found = real_peaks(recipe, launch, place, server, changes, deadline_s=_LONGEST_S)
                yield [_row(trainer, sharding, ranks, method, peak) for peak in found]


def _row(trainer: str, sharding: str, ranks: int, method: str, peak: RealPeak) -> dict[str, object]:
    case = {"trainer": trainer, "sharding": sharding, "ranks": ranks, "method": method}
    return {**case, **asdict(peak), "error_percent": round(100 * peak.error_frac, 4)}


def _table(rows: list[dict[str, object]]) -> str:
    heads = ("trainer", "sharding", "ranks", "method", "rank", "allocator_bytes", "tracker_bytes", "error_percent")
    lines = [heads, ("---",) * len(heads), *(tuple(str(row[head]) for head in heads) for row in rows)]
    worst = max(abs(float(str(row["error_percent"]))) for row in rows)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\nWorst error of {len(rows)} ranks: {worst:.4f} %.\n"


if __name__ == "__main__":
    main(sys.argv[1].split(",") if len(sys.argv) > 1 else list(_TRAINERS))
