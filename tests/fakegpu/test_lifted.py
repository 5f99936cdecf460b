"""The simulated GPU works by itself: its folder alone, without the rest of autofit and without training libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import autofit.fakegpu

LOOP = """
import sys
from importlib.abc import MetaPathFinder

BLOCKED = {
    "accelerate", "bitsandbytes", "datasets", "mlflow", "optuna", "peft", "rich", "scipy", "submitit", "transformers",
    "trl",
}


class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None


sys.meta_path.insert(0, Blocker())

import autofit

assert list(autofit.__path__) == [sys.argv[1]], autofit.__path__

import autofit.fakegpu

assert "torch" not in sys.modules
import torch

from autofit.fakegpu import fake_gpu

with fake_gpu("a100-40gb") as gpu:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        out = model(torch.randn(32, 256, device="cuda"))
        torch.nn.functional.cross_entropy(out, torch.zeros(32, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
at_peak = gpu.timeline.at_peak
weights = 4 * sum(p.numel() for p in model.parameters())
assert at_peak["weights"] >= weights, at_peak
assert at_peak["optimizer"] >= 2 * weights, at_peak
assert gpu.peak_reserved_bytes >= gpu.peak_allocated_bytes >= 4 * weights
assert gpu.device_used_bytes >= gpu.least_capacity_bytes > 0
assert gpu.elapsed_s > 0
print(gpu.why_peak())
foreign = sorted(n for n in sys.modules if n.startswith("autofit.") and not n.startswith("autofit.fakegpu"))
assert not foreign, foreign
assert not BLOCKED & set(sys.modules), BLOCKED & set(sys.modules)
"""


def test_the_folder_alone_runs_a_training_loop_in_a_fresh_process(tmp_path: Path) -> None:
    lifted = tmp_path / "autofit"
    source = Path(autofit.fakegpu.__file__).parent
    shutil.copytree(source, lifted / "fakegpu", ignore=shutil.ignore_patterns("__pycache__"))
    (lifted / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(lifted)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stdout
