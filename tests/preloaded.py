"""Runs in a child of the fork server: what its imports left out, and whether that is there when it is used."""

import importlib.metadata
import json
import sys
from pathlib import Path


def run(path: str) -> int:
    import torch

    before = sorted({"scipy.optimize", "mlflow.tracking", "torch._inductor.compile_fx"} & set(sys.modules))
    import datasets
    from huggingface_hub import constants
    from transformers.loss.loss_rt_detr import linear_sum_assignment
    from trl.extras import profiling

    samples = Path(path).with_name("samples.jsonl")
    samples.write_text('{"text": "a"}\n')
    read = datasets.load_dataset("json", data_files=str(samples), split="train", cache_dir=str(samples.parent))
    scipy = "scipy" in sys.modules
    rows, columns = linear_sum_assignment([[4, 1], [2, 8]])
    answer = {
        "before": before,
        "samples": len(read),
        "scipy": scipy,
        "card": "autofit.fakegpu.device" in sys.modules,
        "tells_nobody": constants.HF_HUB_DISABLE_TELEMETRY,
        "assigned": [list(map(int, rows)), list(map(int, columns))],
        "mlflow": callable(profiling.mlflow.log_metrics),
        "compile": torch.compile.__module__,
        "distributions": type(importlib.metadata.packages_distributions).__name__,
    }
    Path(path).write_text(json.dumps(answer))
    return 0
