"""Runs one real-model case of torch-preflight's measure_cuda.py inside `fake_gpu`, and writes its figures.

Usage: python -m experiments.accuracy.workers.preflight_t4 MODEL/BATCH/LENGTH CHECKOUT FOLDER OUT
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autofit.fakegpu import fake_gpu
from experiments.accuracy.workers.figures import write_figures

KINDS = {"gpt2": "causal-lm", "resnet50": "vision"}


def from_pretrained(kind: Any) -> Any:
    """`from_pretrained` with random weights; the default configs of transformers are those of these models."""
    import transformers

    configs = {
        "gpt2": transformers.GPT2Config,
        "distilbert-base-uncased": transformers.DistilBertConfig,
        "bert-base-uncased": transformers.BertConfig,
    }
    return SimpleNamespace(from_pretrained=lambda name: kind.from_config(configs[name]()))


def main(case: str, checkout: Path, folder: Path, out: Path) -> None:
    sys.path.insert(0, str(checkout / "tests" / "calibration"))
    import torch
    import transformers

    if torch.version.cuda is None:  # torchvision's operators are built for CUDA; its import asks for these
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    name, batch, length = case.split("/")
    started = time.perf_counter()
    with fake_gpu("t4", record_places=False) as gpu:
        measure = import_module("measure_cuda")
        transformers.AutoModel = from_pretrained(transformers.AutoModel)
        transformers.AutoModelForCausalLM = from_pretrained(transformers.AutoModelForCausalLM)
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16  # as in their main
        measure.measure_cuda_context()  # they run it first, and its workspaces stay
        peaks = measure.real_model_case(name, KINDS.get(name, "encoder"), int(batch), int(length), dtype)
    figures = {
        "peak_allocated_bytes": peaks["max_allocated"],
        "reserved_max_bytes": peaks["max_reserved"],
        "dtype": str(dtype),
    }
    write_figures(out, figures, gpu, started)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
