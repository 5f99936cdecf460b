"""How well, and how fast, 2- and 3-layer traces predict a 36-layer model (sizes of Qwen3-4B) through TRL's trainers.

Run from the repository root: python experiments/fakegpu_depth/depth.py
Found with torch 2.13 (CPU build) on 2 shared cores, 2 optimizer steps x 2 accumulation, micro-batch 4 x 1024 tokens,
bf16, checkpointing, a100-80gb:

    trainer    live peak   allocated   reserved   wall 2 + 3 layers   wall 36 layers   peak allocated
    grpo lora  +0.0000 %   -0.35 %     +3.3 %     0.97 + 1.14 s       6.6 s            9.742 GiB
    sft full   +0.0000 %   -0.34 %     +13.3 %    0.76 + 0.90 s       3.8 s            33.393 GiB
    dpo lora   +0.0000 %   -0.31 %     +4.0 %     1.08 + 1.24 s       7.6 s            11.426 GiB
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fakegpu.tiny_trainers import Case, build_model, train

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth import predict_depth

LAYERS = 36


def trace(case: Case, layers: int) -> tuple[FakeGpu, float]:
    """One whole training run, and the wall-clock seconds it took to simulate."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, fake_gpu("a100-80gb", enforce_capacity=False) as gpu:
        model = build_model(
            case, hidden_size=2560, intermediate_size=9728, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936,
        )  # fmt: skip
        train(case, Path(folder), length=1024, model=lambda: model)
    return gpu, time.perf_counter() - start


def main() -> None:
    for kind, rank in (("grpo", 16), ("sft", None), ("dpo", 16)):
        case = Case(
            kind=kind, lora_rank=rank, checkpointing=True, bf16=True, dtype=torch.bfloat16, use_cpu=False,
            micro_batch_size=4,
        )  # fmt: skip
        trace(case, 2)
        (two, two_s), (three, three_s) = trace(case, 2), trace(case, 3)
        predicted, (deep, deep_s) = predict_depth({2: two, 3: three}, LAYERS), trace(case, LAYERS)
        live = max(phase.peak_allocated_bytes for phase in predicted.phases) / int(deep.timeline.total_bytes.max())
        print(
            f"{kind} rank {rank}: live {live - 1:+.4%}, "
            f"allocated {predicted.peak_allocated_bytes / deep.peak_allocated_bytes - 1:+.2%}, "
            f"reserved {predicted.peak_reserved_bytes / deep.peak_reserved_bytes - 1:+.2%}; "
            f"{two_s:.2f} + {three_s:.2f} s against {deep_s:.2f} s; {deep.peak_allocated_bytes / 2**30:.3f} GiB"
        )


if __name__ == "__main__":
    main()
