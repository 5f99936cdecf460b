"""The simulated GPU works by itself, as the distribution fakegpu-torch: no autofit and no training libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autofit

ROOT = Path(__file__).parents[2]

LOOP = """
import sys
from importlib.abc import MetaPathFinder

BLOCKED = {
    "accelerate", "autofit", "bitsandbytes", "datasets", "mlflow", "optuna", "peft", "rich", "scipy", "submitit",
    "transformers", "trl",
}


class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None


sys.meta_path.insert(0, Blocker())

import fakegpu_torch

assert list(fakegpu_torch.__path__) == [sys.argv[1]], fakegpu_torch.__path__

assert "torch" not in sys.modules
import torch

from fakegpu_torch import fake_gpu

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
assert not BLOCKED & set(sys.modules), BLOCKED & set(sys.modules)
"""


@pytest.mark.slow
def test_the_folder_alone_runs_a_training_loop_in_a_fresh_process(tmp_path: Path) -> None:
    project = tmp_path / "project"
    subprocess.run([sys.executable, ROOT / "fakegpu-torch" / "lift.py", project], check=True)
    version = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert version == autofit.__version__
    environment = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(project / "fakegpu_torch")],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stdout
