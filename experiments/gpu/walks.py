"""Seconds of the host's Python that launches nothing: `python -m gpu.walks`, with a card or on the CPU.

In microseconds, and in launches of this host (`autofit doctor --calibrate`): for each module of Qwen3-1.7B with LoRA,
for each tensor of a list, and for each tensor that a forward saves under torch.utils.checkpoint. The constants of
`autofit/fakegpu/tracer.py` are what it printed on the host of an H100.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from autofit.fakegpu.calibrate import measure_host_costs
from gpu.configs import LORA

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_TENSORS, _WIDTH, _REPEATS = 400, 4, 40


def fastest_s(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(_REPEATS):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def of_modules(config: Path) -> dict[str, float]:
    """Seconds a module."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    lora = {"r": LORA["lora_r"], "lora_alpha": LORA["lora_alpha"], "target_modules": LORA["lora_target_modules"]}
    model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    count = len(list(model.modules()))
    counted = model.base_model.model.num_parameters
    runs = {
        "parameters()": lambda: list(model.parameters()), "train()": model.train,
        "num_parameters(exclude_embeddings=True)": lambda: counted(exclude_embeddings=True),
    }  # fmt: skip
    return {name: fastest_s(run) / count for name, run in runs.items()}


def of_tensors() -> dict[str, float]:
    """Seconds a tensor of a list."""
    weights = [torch.nn.Parameter(torch.zeros(64, device=DEVICE)) for _ in range(_TENSORS)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-9, fused=True)
    optimizer.step()
    runs: dict[str, Callable[[], object]] = {
        "AdamW.step": optimizer.step, "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0),
    }  # fmt: skip
    return {name: fastest_s(run) / _TENSORS for name, run in runs.items()}


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = F.silu(linear(x)) * x + x
        return x


def of_checkpoints() -> dict[str, float]:
    """Seconds of a checkpoint, and of each tensor that is saved in it."""
    blocks = torch.nn.ModuleList(_Block() for _ in range(12)).to(DEVICE)
    start = torch.randn(1, 2, _WIDTH, device=DEVICE, requires_grad=True)
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 1
        return tensor

    def forward(size: int) -> torch.Tensor:
        """`size` blocks a checkpoint; 0: without."""
        x = start
        for first in range(0, len(blocks), size or len(blocks)):
            part = torch.nn.Sequential(*blocks[first : first + (size or len(blocks))])
            x = checkpoint(part, x, use_reentrant=False) if size else part(x)
        return x.sum()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(0)
    plain_s, step_s = fastest_s(lambda: forward(0)), fastest_s(lambda: forward(0).backward())
    extra = {}
    for size in (1, 4):
        forward_s, whole_s = fastest_s(lambda n=size: forward(n)), fastest_s(lambda n=size: forward(n).backward())
        extra[size] = forward_s - plain_s, (whole_s - forward_s) - (step_s - plain_s) - plain_s
    told = {}
    for place, name in enumerate(("forward", "backward")):
        many, few = extra[1][place], extra[4][place]  # 12 checkpoints, and 3 of the same tensors
        told[f"a checkpoint, {name}"] = each_s = (many - few) / 9
        told[f"a saved tensor, {name}"] = (few - 3 * each_s) / saved
    return told


def main() -> None:
    torch.set_num_threads(1)
    launch_s = measure_host_costs().launch_s
    print(f"a launch {launch_s * 1e6:.1f} us")
    config = Path(".gpu/models/Qwen--Qwen3-1.7B/stand_in_model")
    for of in (lambda: of_modules(config), of_tensors, of_checkpoints):
        for name, seconds in of().items():
            print(f"{name}: {seconds * 1e6:.2f} us, {seconds / launch_s:.2f} launches", flush=True)


if __name__ == "__main__":
    main()
