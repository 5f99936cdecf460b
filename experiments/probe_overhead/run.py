"""The overhead of a probe, warm and cold. Run: `python experiments/probe_overhead/run.py`

Overhead is the time from the submission of the job to its answer, minus the run time of the probe's own code in its
process. Ratios and times are of one run on one machine; see results.json.
"""

import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tiny

from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest
from experiments.kept import commit


def main(repeats: int = 10) -> None:
    folder = Path(tempfile.mkdtemp())
    recipe_path = tiny.write_recipe(folder, tiny.write_model(folder / "model"))
    began = time.perf_counter()
    server = ForkServer(folder / "warm")
    try:
        os.chdir(folder)
        recipe = prepare(recipe_path, trainer="grpo", device="cpu", folder=folder, server=server)
        start_s = time.perf_counter() - began
        rows = {}
        for name, socket in (("warm", server.socket_path), ("cold", None)):
            seen: list[tuple[float, float]] = []
            for index in range(repeats):
                request = ProbeRequest(
                    folder=folder / f"{name}-{index}", trainer="grpo", values=recipe.values, device="cpu",
                    limit_bytes=None, worst_case=worst_case_path(folder), cwd=folder, server_socket=socket,
                )  # fmt: skip
                began = time.perf_counter()
                launcher = Launcher()
                launcher.poll_s = 0.005
                result = launcher.run(request)
                whole = time.perf_counter() - began
                assert result.process_s is not None, result.reason
                seen.append((whole, result.process_s))
            rows[name] = {
                "whole_s": round(median(w for w, _ in seen), 3),
                "overhead_s": round(median(w - p for w, p in seen), 3),
                "overhead_worst_s": round(max(w - p for w, p in seen), 3),
            }
            print(f"{name}: {rows[name]}")
    finally:
        server.close()
    content = {
        "date": date.today().isoformat(), "commit": commit(),
        "device": f"cpu x {os.cpu_count()} ({platform.machine()})", "repeats": repeats,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "submitit")},
        "load_average_1min": round(os.getloadavg()[0], 2),
        "server_start_and_inspection_s": round(start_s, 2), **rows,
        "warm_over_cold": round(rows["warm"]["overhead_s"] / rows["cold"]["overhead_s"], 3),
    }  # fmt: skip
    (Path(__file__).parent / "results.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
