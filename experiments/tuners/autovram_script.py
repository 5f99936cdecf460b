"""The task as a script for autovram, which sets the batch size, the accumulation and the precision by variables."""

from __future__ import annotations

import torch
from autovram.runtime import get_runtime_config, print_metric  # type: ignore[import-not-found]

from autofit.fakegpu import fake_gpu
from experiments.tuners.task import CARD, trainer

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    told = get_runtime_config()
    with fake_gpu(CARD, record_places=False) as gpu:
        made, seen = trainer(gpu, told.micro_batch, told.grad_accum, dtype=PRECISIONS[told.precision])
        made.train()
    print_metric(samples_per_s=told.micro_batch * told.grad_accum / seen.step_s)


if __name__ == "__main__":
    main()
