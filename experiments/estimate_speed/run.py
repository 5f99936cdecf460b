"""How long an estimate, a search and the evaluation of many configurations take.

Run: `python experiments/estimate_speed/run.py`

CPU seconds are given beside wall seconds, because other work on the machine lengthens only the latter. The parts of an
estimate are timed in a separate process; a command is timed from its start to its end, and the CPU seconds of all its
processes are sampled ten times a second. Figures of one run on one machine; see results.json.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
HERE = Path(__file__).parent
CARD = "a100-80gb"
LLAMA = """\
model_name_or_path: meta-llama/Llama-3.1-8B
dtype: bfloat16
bf16: true
use_peft: true
lora_r: 16
lora_alpha: 32
lora_target_modules: all-linear
gradient_checkpointing: true
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 512
dataset_name: made-up
reward_funcs: [accuracy_reward]
"""
PROMPT_TOKENS = {"baseline": 1024, "llama-8b": 512}
CONFIGURATIONS = 100_000


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipes = {
            "baseline": HERE.parents[1] / "autofit" / "recipe" / "baseline.yaml",
            "llama-8b": folder / "llama-8b.yaml",
        }
        recipes["llama-8b"].write_text(LLAMA)
        content: dict[str, object] = {
            "date": date.today().isoformat(),
            "device": f"cpu x {os.cpu_count()} ({platform.machine()}), shared",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "trl", "numpy")},
        }
        for name, recipe in recipes.items():
            row = split_estimate(recipe, folder / name, PROMPT_TOKENS[name])
            report(content, f"estimate, {name}", row)
            arguments = ["estimate", str(recipe), "--gpu", CARD, "--json", "--no-advice", "--prompt-tokens",
                         str(PROMPT_TOKENS[name])]  # fmt: skip
            report(content, f"autofit estimate, {name}", command(arguments, folder))
        os.environ["AUTOFIT_CACHE"] = str(folder / "cache")
        for state in ("cold", "warm"):
            arguments = ["search", "--target-vram", "40GB", "--no-mlflow", "--dir", str(folder / state)]
            report(content, f"autofit search, {state}", command(arguments, folder))
        report(content, "mass evaluation", mass(folder / "cache" / "forecasts"))


def report(content: dict[str, object], name: str, row: dict[str, object]) -> None:
    """Print a row and save it with the earlier ones at once: on a busy machine the whole run takes long."""
    content[name] = row | {"load_average_1min": round(os.getloadavg()[0], 1)}
    print(f"{name}: {json.dumps(content[name])}", flush=True)
    (HERE / "results.json").write_text(json.dumps(content, indent=1) + "\n")


def command(arguments: list[str], folder: Path) -> dict[str, object]:
    """Wall and CPU seconds of `autofit ARGUMENTS` and of all the processes that it starts."""
    began = time.perf_counter()
    with (folder / "command.log").open("wb") as log:
        process = psutil.Popen([sys.executable, "-m", "autofit", *arguments], cwd=folder, stdout=log, stderr=log)
    seconds: dict[tuple[int, float], float] = {}
    while process.poll() is None:
        for one in seen(process):
            try:
                times = one.cpu_times()
                seconds[one.pid, one.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        time.sleep(0.1)
    assert process.returncode in (0, 1), (folder / "command.log").read_text()[-2000:]
    return {"wall_s": round(time.perf_counter() - began, 1), "cpu_s": round(sum(seconds.values()), 1)}


def seen(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def split_estimate(recipe: Path, folder: Path, prompt_tokens: int) -> dict[str, object]:
    """[wall, CPU] seconds of each part of a cold estimate, in a fresh process."""
    output = folder.parent / "parts.json"
    subprocess.run(
        [sys.executable, __file__, str(recipe), str(folder), str(prompt_tokens), str(output)],
        check=True, capture_output=True,
    )  # fmt: skip
    return dict(json.loads(output.read_text()))


def parts(recipe: Path, folder: Path, prompt_tokens: int, output: Path) -> None:
    """In the fresh process: import, read the recipe, trace it, expand and replay it; as the fork server's forks do."""
    spent: dict[str, object] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        result = work()
        spent[name] = [round(time.perf_counter() - wall_s, 2), round(time.process_time() - cpu_s, 2)]
        return result

    def measured(owner: object, method: str, name: str) -> None:
        original = getattr(owner, method)
        setattr(owner, method, lambda *args, **kwargs: timed(name, lambda: original(*args, **kwargs)))

    timed("import_s", import_all)
    from autofit.files import read_json, write_json
    from autofit.probing import worker
    from autofit.probing.prepare import inspect, worst_case_path
    from autofit.probing.result import ProbeRequest
    from autofit.probing.simulated import SimMemory
    from autofit.recipe.yaml_file import read_yaml_mapping

    values = read_yaml_mapping(recipe, what="recipe")
    worst_case, answer, device = worst_case_path(folder), folder / "inspection.json", f"sim:{CARD}"
    asked = {"trainer": "grpo", "values": values, "device": device, "prompt_tokens": prompt_tokens}
    write_json(folder / "inspect.json", asked | {"worst_case": str(worst_case), "answer": str(answer)})
    timed("inspection_s", lambda: inspect(str(folder / "inspect.json")))
    found = read_json(answer)
    assert found is not None
    assert "error" not in found, found
    request = ProbeRequest(
        folder=folder, trainer="grpo", values=dict(found["values"]), device=device, limit_bytes=None,  # type: ignore[call-overload]
        worst_case=worst_case,
    )  # fmt: skip
    write_json(request.request_path, request.to_json())
    measured(worker, "_train_on_card", "trace_s")
    measured(SimMemory, "simulation", "expansion_and_phases_s")
    measured(SimMemory, "account", "least_capacity_s")
    timed("probe_s", lambda: worker.run(str(request.request_path)))
    result = read_json(request.answer_path)
    assert result is not None
    names = ("status", "peak_allocated_bytes", "peak_reserved_bytes", "least_capacity_bytes")
    write_json(output, {"[wall, cpu]": spent} | {name: result[name] for name in names})


def import_all() -> None:
    import gc
    import importlib

    from autofit.probing import fork_server

    gc.disable()
    for name in fork_server._PRELOAD:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()


def mass(kept: Path) -> dict[str, object]:
    """Configurations a second from the models that the cold search kept, and how far each missed its hold-out trace."""
    import numpy as np

    from autofit.fakegpu.formula.formula import MassModel
    from autofit.files import read_json

    generator = np.random.default_rng(0)
    rows = []
    for folder in sorted(kept.iterdir()):
        answer = read_json(folder / "model.json") or {}
        if not (folder / "model.npz").exists():
            rows.append({"error": str(answer.get("error"))})
            continue
        model, layers = MassModel.load(folder / "model.npz"), int(str(answer["layers"]))
        ranges = {"B": 16, "G": 64, "C": 128, "r": 32}
        values = {name: generator.integers(1, top + 1, CONFIGURATIONS).astype(float) for name, top in ranges.items()}
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        model.peaks(values, layers)
        model.seconds(values, layers, values["C"])
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        rows.append({
            "configs_per_s": round(CONFIGURATIONS / wall_s), "configs_per_cpu_s": round(CONFIGURATIONS / cpu_s),
            "moments": len(model.rows), "hold_out_mismatch_frac": float(str(answer["mismatch"])),
        })  # fmt: skip
    return {"models": rows}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        parts(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
