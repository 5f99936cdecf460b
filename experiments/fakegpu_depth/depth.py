"""Accuracy and speed of the expansion of a 4-layer trace to 36 (Qwen3-4B) and 32 layers (Llama-3.1-8B), TRL trainers.

Run from the repository root: python experiments/fakegpu_depth/depth.py
Found with torch 2.13 (CPU build) on 2 cores shared with much other work (so the CPU seconds are high, and the run was
stopped after five of eight rows), 2 optimizer steps x 2 accumulation, micro-batch 4 x 1024 tokens, bf16, checkpointing,
h200; bytes of difference to the full-depth trace:

    model         trainer    allocated  reserved   least card   time      CPU time
    qwen3-4b      grpo lora  0          0          0            -0.25 %   1.9 against 11.6 s
    qwen3-4b      grpo full  0          0          0            -0.04 %   2.3 against 8.2 s
    qwen3-4b      sft full   0          0          0            -0.05 %   1.6 against 6.5 s
    qwen3-4b      dpo lora   0          0          0            -0.11 %   3.0 against 14.5 s
    llama-3.1-8b  grpo lora  0          0          0            -0.15 %   2.5 against 10.5 s

The time is that of the whole run, loading and first step included.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fakegpu import tiny_trainers
from fakegpu.tiny_trainers import Case, train

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.depth.expand import Mark, TracedRun, expanded, run_of
from autofit.fakegpu.depth.layers import LayerClock
from autofit.fakegpu.depth.stack import shrink
from autofit.fakegpu.replay import least_capacity, replay
from experiments.kept import commit

SIZES = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def trace(case: Case, sizes: dict[str, int], *, shallow: bool) -> tuple[TracedRun, float]:
    """One whole training run at full depth, and the CPU seconds it took to simulate."""
    start = time.process_time()
    original = tiny_trainers.config

    def config(**changes: object) -> object:
        shape = original(**(sizes | HEADS | changes))
        if shallow:
            shrink(shape)
        return shape

    tiny_trainers.config = config
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            fake_gpu("h200", enforce_capacity=False, record_places=False, follow_layers=True) as gpu,
        ):
            kept = train(case, Path(folder), length=1024)
            assert isinstance(gpu.clock, LayerClock)
            marks = [Mark(name="end", event=len(gpu.memory.log), stretch=gpu.clock.cut())]
            run = expanded(gpu, marks) if shallow else run_of(gpu, marks)
            del kept
    finally:
        tiny_trainers.config = original
    return run, time.process_time() - start


def main() -> None:
    results: list[dict[str, object]] = []
    for model, sizes in SIZES.items():
        for kind, rank in (("grpo", 16), ("grpo", None), ("sft", None), ("dpo", 16)):
            case = Case(
                kind=kind, lora_rank=rank, checkpointing=True, bf16=True, dtype=torch.bfloat16, use_cpu=False,
                micro_batch_size=4, beta=0.0 if rank else 0.04,
            )  # fmt: skip
            if not results:
                trace(case, sizes, shallow=True)
            (short, short_s), (long, long_s) = (trace(case, sizes, shallow=s) for s in (True, False))
            mine, true = replay(short.log), replay(long.log)
            results.append({
                "model": model, "trainer": kind, "lora_rank": rank, "events": len(short.ids),
                "peak_allocated_bytes": true.peak_allocated_bytes,
                "allocated_error_bytes": mine.peak_allocated_bytes - true.peak_allocated_bytes,
                "reserved_error_bytes": mine.peak_reserved_bytes - true.peak_reserved_bytes,
                "least_capacity_error_bytes": least_capacity(short.log) - least_capacity(long.log),
                "seconds_error_frac": short.seconds()[0] / long.seconds()[0] - 1,
                "cpu_s": short_s, "full_depth_cpu_s": long_s, "commit": commit(),
            })  # fmt: skip
            print(json.dumps(results[-1]), flush=True)
            (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
