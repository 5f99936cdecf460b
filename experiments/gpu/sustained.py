"""Trainings that keep one card busy for a while: `python -m gpu.sustained OUT [sim:CARD]`.

The models and micro-batches are those of `ranks/foundry.py` on one card, without collectives: bfloat16 weights as FSDP
gathers them, AdamW, gradients clipped. A line each in OUT: the seconds of every step, and the card's clock, power and
temperature each second, so that a clock that falls under load is seen. On the simulated card: the seconds of a step.
"""

import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from ranks.foundry import SHAPES, Block, Model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from autofit.hardware.nvml import card_state
from gpu.folder import append
from gpu.kernels import Kernels

# (model, tokens of a sample, micro-batch, checkpoints): published rows, with the samples that one card has room for
CASES = (("1b", 2048, 14, False), ("1b", 1024, 18, False), ("3b", 2048, 6, False), ("3b", 512, 24, False),
         ("7b", 1024, 8, True))  # fmt: skip
_LASTS_S = 20.0
# (rows, depth, columns) of products in bfloat16: of the 1b model's layers and head, and square ones
PRODUCTS = ((28672, 2048, 6144), (28672, 2048, 8192), (28672, 8192, 2048), (28672, 2048, 50368), (8192, 8192, 8192),
            (4096, 4096, 4096), (8192, 2048, 2048))  # fmt: skip
_IDLE_S, _SHORT, _LONG_S = 2.0, 10, 3.0


def _model(name: str, length: int, *, checkpoints: bool) -> Model:
    with torch.device("meta"):
        model = Model(*SHAPES[name], length)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


class _Watch(threading.Thread):
    """Asks the driver for the card's state each second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.states: list[list[Any]] = []  # when, and a CardState
        self.ended = threading.Event()

    def run(self) -> None:
        import pynvml as nvml

        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByIndex(0)
        while not self.ended.wait(1):
            self.states.append([time.monotonic(), *astuple(card_state(nvml, card))])


def trained(
    name: str, length: int, micro: int, *, checkpoints: bool, now_s: Any, lasts_s: float, kernels: Kernels | None
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each step, from the third on, and the kernels of one more."""
    model = _model(name, length, checkpoints=checkpoints)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, 50_000, (micro, length), device="cuda")
    steps: list[float] = []
    began = now_s()

    def step() -> None:
        torch.cuda.synchronize()
        at = now_s()
        model(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        steps.append(now_s() - at)

    while len(steps) < 4 or now_s() - began < lasts_s:
        step()
    if kernels is None:
        return steps[2:], {}
    measured = steps[2:]
    kernels.begin()
    step()
    return measured, kernels.end()


def products() -> list[dict[str, Any]]:
    """Seconds of single products: of the first ones after a pause, and of those after seconds without one."""
    rows = []
    for rows_, depth, columns in PRODUCTS:
        a = torch.randn(rows_, depth, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(depth, columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            a @ b
        torch.cuda.synchronize()
        time.sleep(_IDLE_S)
        short_s = _repeated(a, b, _SHORT)
        began, long_s = time.monotonic(), 0.0
        while time.monotonic() - began < _LONG_S:
            long_s = _repeated(a, b, max(1, int(0.2 / short_s)))
        flops = 2 * rows_ * depth * columns
        rows.append({"shape": [rows_, depth, columns], "short_s": short_s, "long_s": long_s})
        print(
            rows_, depth, columns, f"{flops / short_s / 1e12:.0f} then {flops / long_s / 1e12:.0f} TFLOP/s", flush=True
        )
    return rows


def _repeated(a: torch.Tensor, b: torch.Tensor, times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / times


def main() -> None:
    out, card = Path(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else "cuda")
    if card == "cuda":
        append(out, {"products": products(), "torch": torch.__version__})
    for name, length, micro, checkpoints in CASES:
        watch, seconds = _Watch(), _LASTS_S
        row: dict[str, Any] = {}
        context: AbstractContextManager[Any] = nullcontext()
        if card != "cuda":
            from autofit.fakegpu import fake_gpu
            from autofit.fakegpu.specs import gpu_spec

            context, seconds = fake_gpu(gpu_spec(card.removeprefix("sim:")), enforce_capacity=False), 0.0
        else:
            watch.start()
        with context as gpu:
            now_s = time.monotonic if gpu is None else lambda gpu=gpu: gpu.elapsed_s
            try:
                steps, of_kernels = trained(name, length, micro, checkpoints=checkpoints, now_s=now_s, lasts_s=seconds,
                                            kernels=Kernels(now_s) if gpu is None else None)  # fmt: skip
                row["kernels"] = of_kernels
            except torch.cuda.OutOfMemoryError as error:
                steps, row = [], {"reason": str(error)[:300]}
        watch.ended.set()
        torch.cuda.empty_cache() if card == "cuda" else None
        row |= {"model": name, "length": length, "micro_batch": micro, "checkpoints": checkpoints, "card": card,
                "torch": torch.__version__, "step_s": steps, "states": watch.states}  # fmt: skip
        append(out, row)
        half = sorted(steps)[len(steps) // 2] if steps else 0.0
        print(name, length, micro, f"{half:.4f} s", f"{micro * length / half:,.0f} tokens/s" if half else row,
              steps[:2], steps[-2:], watch.states[-1:], flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
