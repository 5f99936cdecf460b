"""Is the peak that the search promises the peak of the full run? Ten recipes on the cpu device; writes peak.json, .md.

    python experiments/full_run/peak.py [--only NAME]      # minutes; a small Llama, on the CPU

Promised: the device-used bytes of the probe, as a search on the cpu device makes it: random weights, the longest sample
alone. Actual: the full training of the same recipe, with its weights, its data and its shuffle, over every sample, a
checkpoint in the middle and a resume from it. Both count every storage from the operator that made it to its release.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(HERE), str(ROOT)]
STEPS, SAVE_AT = 6, 3
OFFLINE = {"max_steps": STEPS, "gradient_accumulation_steps": 2}

RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "sft, full": ("sft", {"use_peft": False, "gradient_checkpointing": False}),
    "sft, LoRA": ("sft", {"per_device_train_batch_size": 4, "gradient_checkpointing": False}),
    "sft, full, checkpointing": ("sft", {"use_peft": False, "gradient_checkpointing": True}),
    "sft, LoRA, bf16": ("sft", {"bf16": True, "gradient_checkpointing": False}),
    "sft, full, bfloat16 weights": ("sft", {"use_peft": False, "dtype": "bfloat16", "gradient_checkpointing": True}),
    "grpo, LoRA": ("grpo", {"gradient_checkpointing": False}),
    "grpo, full, checkpointing": ("grpo", {"use_peft": False, "gradient_checkpointing": True}),
    "dpo, full": ("dpo", {"use_peft": False, "gradient_checkpointing": False}),
    "dpo, LoRA, checkpointing": ("dpo", {"per_device_train_batch_size": 4, "gradient_checkpointing": True}),
    "reward, full": ("reward", {"use_peft": False, "gradient_checkpointing": False}),
}  # fmt: skip


def main() -> None:
    from experiments.kept import commit

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    only = parser.parse_args().only
    path = HERE / "peak.json"
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as server:
        model = _model(Path(folder))
        for name, (trainer, changes) in RECIPES.items():
            if only in name:
                rows[name] = measured(name, trainer, changes, Path(folder), model, server)
                print(name, rows[name], file=sys.stderr, flush=True)
                now = {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
                found = {**now, "versions": _versions(), "rows": rows}
                path.write_text(json.dumps(found, indent=1) + "\n")
                (HERE / "peak.md").write_text(table(found))


def measured(
    name: str, trainer: str, changes: Mapping[str, object], home: Path, model: Path, server: Any
) -> dict[str, Any]:
    """Promised and actual bytes of one recipe, each with its peaks by phase."""
    from autofit.files import read_json, write_json
    from autofit.probing.prepare import prepare, worst_case_path
    from autofit.probing.result import ProbeRequest, ProbeResult

    folder = home / str(abs(hash(name)))
    folder.mkdir()
    path = _recipe(trainer, folder, model, changes)
    with chdir(folder):  # where the recipe's rewards are
        recipe = prepare(path, trainer=trainer, device="cpu", folder=folder, server=server)
    request = ProbeRequest(
        folder=folder, trainer=trainer, values=recipe.values, device="cpu", limit_bytes=None,
        worst_case=worst_case_path(folder), cwd=folder,
    )  # fmt: skip
    write_json(request.request_path, request.to_json())
    _call(server, "autofit.probing.worker:run", request.request_path, folder, "probe.log")
    answer = ProbeResult.read(request.answer_path)
    assert answer is not None
    assert answer.device_used_bytes, answer
    full = folder / "full.json"
    asked = {"trainer": trainer, "values": recipe.values, "output": str(folder / "full"), "answer": str(full)}
    write_json(folder / "full-request.json", asked)
    _call(server, "peak:train_in_full", folder / "full-request.json", folder, "full.log")
    actual: Any = read_json(full)
    assert actual is not None, (folder / "full.log").read_text()[-2000:]
    promised = {p.name: p.peak_allocated_bytes for p in answer.phases}
    return {
        "promised_bytes": answer.device_used_bytes, "actual_bytes": actual["peak_bytes"],
        "error_frac": answer.device_used_bytes / actual["peak_bytes"] - 1,
        "promised_phases": promised, "actual_phases": actual["phases"],
    }  # fmt: skip


def train_in_full(request_path: str) -> int:
    """The full training, in a child of its own: to the middle, then from its checkpoint to the end."""
    from autofit.files import read_json, write_json
    from autofit.plugin.protocol import LOAD, Task, own_checkpoints
    from autofit.plugin.registry import load
    from autofit.probing.memory import CpuMemory, merged
    from autofit.probing.worker import PhaseRecorder

    asked: Any = read_json(Path(request_path))
    output, memory = Path(asked["output"]), CpuMemory(None)
    recorder = PhaseRecorder(memory, Path(request_path).with_name("phase-full"))
    memory.start()
    task = Task(device="cpu", output=output)
    recorder.enter(LOAD)
    run: Any = load(asked["trainer"]).build(asked["values"], task)
    run.train(_until(recorder, SAVE_AT))
    run = None
    gc.collect()
    recorder.enter("resume")
    run = load(asked["trainer"]).build(asked["values"], task)
    run.train(_until(recorder, STEPS), resume_from=own_checkpoints(output) / f"checkpoint-{SAVE_AT}")
    recorder.enter("end")
    memory.stop()
    peaks = {p.name: p.peak_allocated_bytes for p in merged(recorder.peaks)}
    write_json(Path(asked["answer"]), {"peak_bytes": max(peaks.values()), "phases": peaks})
    return 0


def _until(recorder: Any, last: int) -> Any:
    from autofit.plugin.protocol import Control
    from autofit.probing.worker import Followed

    class Until(Followed):
        """Saves and stops after step number `last`."""

        def step_ends(self, step: int) -> Control:
            return Control(save=step == last, stop=step == last)

    return Until(recorder)


# ---------------------------------------------------------------------- what is trained
def _model(folder: Path) -> Path:
    import tiny

    return Path(tiny.write_model(folder / "model", hidden=128, layers=4))


def _recipe(trainer: str, folder: Path, model: Path, changes: Mapping[str, object]) -> Path:
    import tiny

    if trainer == "grpo":
        return Path(tiny.write_recipe(folder, model, max_steps=STEPS, max_completion_length=32, **changes))
    return Path(tiny.write_offline_recipe(trainer, folder, model, **{**OFFLINE, **changes}))


@contextmanager
def _server(folder: Path) -> Iterator[Any]:
    from autofit.probing.fork_server import ForkServer

    os.environ["PYTHONPATH"] = str(HERE)  # of the fork server, whose children run this module's functions
    server = ForkServer(folder / "warm")
    try:
        yield server
    finally:
        server.close()


def _call(server: Any, entry: str, path: Path, folder: Path, log: str) -> None:
    server.call({
        "entry": entry, "argument": str(path), "cwd": str(folder), "log": str(folder / log), "deadline_s": 900.0,
        "env": {},
    })  # fmt: skip


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "trl", "peft")}


def table(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    worst = max(abs(r["error_frac"]) for r in rows.values())
    lines = [
        f"{found['date']}, cpu device, {found['versions']}; {len(rows)} recipes, the largest difference "
        f"{100 * worst:.2f} %.", "",
        "| recipe | promised, bytes | full run, bytes | difference | phase of the promise's peak | of the run's |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        tops = (max(row[key], key=row[key].get) for key in ("promised_phases", "actual_phases"))
        lines.append(
            f"| {name} | {row['promised_bytes']:,} | {row['actual_bytes']:,} | {100 * row['error_frac']:+.2f} % | "
            f"{' | '.join(tops)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
