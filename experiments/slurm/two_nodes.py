"""A full run on two nodes of a real Slurm, requeued three times, against the same run undisturbed.

`python experiments/slurm/two_nodes.py [STEPS]` as root; Debian's slurmctld, slurmd, slurm-client and munge. The nodes
are this machine, the ranks meet over gloo, the model is a Llama of a few thousand parameters. Writes two_nodes.json.
"""

import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tiny
from slurm_cluster import cluster
from test_slurm_promote import SAME, ended, folder_of_run, lines, logs, resumed, start, steps, wait

from autofit.files import read_json
from autofit.recipe.launch import Launch
from experiments.kept import commit


def main(most: int) -> None:
    with tempfile.TemporaryDirectory() as home, cluster() as slurm:
        os.environ["SLURM_CONF"] = str(slurm.conf)
        launch = Launch(ranks=2, machines=2)
        model = tiny.write_model(Path(home) / "model")
        whole = folder_of_run(Path(home) / "whole", model, launch, max_steps=most, save_steps=most // 5)
        began = time.monotonic()
        start(whole, 2)
        expected = ended(whole)
        assert expected is not None, logs(whole)
        undisturbed_s = time.monotonic() - began
        folder = folder_of_run(Path(home) / "requeued", model, launch, max_steps=most, save_steps=most // 5)
        began = time.monotonic()
        job = start(folder, 2)
        for number, how in enumerate(("USR2", "requeue", "USR2"), start=1):
            wait(
                folder, lambda number=number: steps(folder) > most * number // 5 and len(resumed(folder)) >= number - 1
            )
            slurm.run(*(["scontrol", "requeue", job] if how == "requeue" else ["scancel", "--signal=USR2", job]))
            wait(folder, lambda number=number: len(resumed(folder)) >= number)
        final, same = ended(folder), zip(lines(folder), lines(whole), strict=True)
        assert final is not None, logs(folder)
        found = {
            "steps": final["steps"], "steps_undisturbed": expected["steps"], "final_loss": final["final_loss"],
            "final_loss_undisturbed": expected["final_loss"], "resumed_after_steps": resumed(folder),
            "lines": len(lines(folder)), "equal_lines": sum(one == other for one, other in same),
            "compared": SAME, "undisturbed_s": round(undisturbed_s), "requeued_s": round(time.monotonic() - began),
            "attempt": (read_json(folder / "attempt.json") or {})["attempt"], "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "submitit")},
            "slurm": slurm.run("sinfo", "--version").split()[1], "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"), "commit": commit(),
        }  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
