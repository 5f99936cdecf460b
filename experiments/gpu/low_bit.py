"""Seconds of bitsandbytes' Python around its kernels: `python -m gpu.low_bit`, with a card or on the null GPU.

A layer's forward and backward and an optimizer's update of a tensor, on the host, less what the simulated card charges
for their kernels and views with this host's costs. Said in microseconds, and in launches of the H100's host of
2026-11-27 that `autofit/fakegpu/tracer.py` is in: a module's `train()` took it 0.19 launches, and both are Python.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import bitsandbytes as bnb
import torch

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.calibrate import measure_host_costs
from autofit.fakegpu.specs import HostCosts
from autofit.fakegpu.tracer import TRAIN

Part = tuple[str, int, Callable[[], object], Callable[[], object]]  # name, number of calls, what is before, the calls
_WIDTH, _ROWS, _LAYERS, _TENSORS, _REPEATS = 64, 128, 8, 32, 200
_SIZE = 4096  # of a tensor: smaller ones have states of 32 bits


def _layers() -> dict[str, Callable[[], torch.nn.Module]]:
    four: dict[str, Any] = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    return {
        "4 bits": lambda: bnb.nn.Linear4bit(_WIDTH, _WIDTH, compress_statistics=False, **four),
        "4 bits, double": lambda: bnb.nn.Linear4bit(_WIDTH, _WIDTH, **four),
        "8 bits": lambda: bnb.nn.Linear8bitLt(_WIDTH, _WIDTH, bias=False, has_fp16_weights=False, threshold=6.0),
    }


def of_layers() -> Iterator[Part]:
    for name, make in _layers().items():
        layers = torch.nn.ModuleList(make() for _ in range(_LAYERS)).cuda().requires_grad_(False)
        start = torch.zeros(_ROWS, _WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient, ends = torch.zeros_like(start), list[torch.Tensor]()

        def forward(layers: torch.nn.ModuleList = layers, start: torch.Tensor = start) -> torch.Tensor:
            x = start
            for layer in layers:
                x = layer(x)
            return x

        def plain(forward: Callable[[], object] = forward) -> None:
            with torch.no_grad():
                forward()

        def end(forward: Callable[[], torch.Tensor] = forward, ends: list[torch.Tensor] = ends) -> None:
            ends[:] = [forward()]

        yield f"{name}: forward", _LAYERS, lambda: None, plain
        yield f"{name}: forward with gradients", _LAYERS, lambda: None, forward
        yield f"{name}: backward", _LAYERS, end, lambda ends=ends, gradient=gradient: ends[0].backward(gradient)


def of_optimizers() -> Iterator[Part]:
    for name in ("AdamW8bit", "PagedAdamW8bit", "AdamW", "Lion8bit"):
        weights = [torch.nn.Parameter(torch.zeros(_SIZE, device="cuda", dtype=torch.bfloat16)) for _ in range(_TENSORS)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = getattr(bnb.optim, name)(weights, lr=1e-9)
        yield name, _TENSORS, lambda: None, optimizer.step


def parts() -> Iterator[Part]:
    yield from of_layers()
    yield from of_optimizers()


def measured() -> tuple[float, dict[str, float]]:
    """Seconds of `train()` of a module, and of each call: the fastest of many short runs, in turns."""
    model = torch.nn.ModuleList(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(9))) for _ in range(40))
    module_s, found = float("inf"), {}
    for name, calls, before, run in parts():
        found[name] = float("inf")
        for _ in range(_REPEATS):
            before()
            torch.cuda.synchronize()
            found[name] = min(found[name], _seconds(run) / calls)
            module_s = min(module_s, _seconds(model.train) / len(list(model.modules())))
    return module_s, found


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def charged(costs: HostCosts) -> dict[str, float]:
    """The host's seconds of a call on the simulated card, for kernels and views alone."""
    found = {}
    with fake_gpu("h100", host_costs=costs) as gpu, patch.object(gpu.clock, "host_work", lambda *_, **__: None):
        for name, calls, before, run in parts():
            before()
            run()
            before()
            gpu.clock.synchronize()
            began = gpu.clock.host_s
            run()
            found[name] = (gpu.clock.host_s - began) / calls
    return found


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        print(json.dumps(charged(HostCosts(**json.loads(sys.argv[1])))))
        return
    costs = measure_host_costs()
    module_s, seconds = measured()
    child = [sys.executable, "-m", "gpu.low_bit", json.dumps(asdict(costs))]
    told = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    print(f"a launch {costs.launch_s * 1e6:.1f} us, a module's train() {module_s * 1e6:.2f} us")
    for name, call_s in seconds.items():
        rest = call_s - told[name]
        words = f"{call_s * 1e6:.1f} us, {told[name] * 1e6:.1f} of them kernels and views"
        print(f"{name}: {words}, the rest {rest / module_s * TRAIN:.1f} launches")


if __name__ == "__main__":
    main()
