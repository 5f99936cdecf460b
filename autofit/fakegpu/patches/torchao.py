"""`optim: adamw_torch_8bit` and `adamw_torch_4bit`: torchao's optimizers, by the bytes of their states.

Follows torchao 0.18 (`optim/adam.py`, `subclass_8bit.py`, `subclass_4bit.py`), and stands in for it whether it is
installed or not: torchao compiles its step for each parameter, which on fakes would run eagerly, with every float32
intermediate. Here a step is one kernel that reads its tensors and has no scratch, as the fused one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.cuda_api import active_gpu

Target = tuple[object, str, object, str]
_SMALLEST = 4096  # a parameter with fewer elements, or no whole number of blocks, keeps its moments whole
_CODES = {8: 256, 4: 16}  # entries of the table of codes
_NOTE = (
    "torchao's optimizer was simulated by its states: its compiled step is taken as one kernel for each parameter, "
    "without scratch"
)


class _LowBitAdamW(torch.optim.Optimizer):
    """AdamW whose moments are codes of `bits` bits, with a float32 scale for each block."""

    bits: int

    def __init__(self, params: Any, lr: float = 1e-3, *, block_size: int, **options: object) -> None:
        self.block_size = block_size
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, *map(_own, (parameter, parameter.grad)))
        return loss

    def _update(self, parameter: torch.Tensor, own: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state |= {f"{name}.{part}": made for part, made in self._moment(own).items()}
        gpu = active_gpu()
        assert gpu is not None
        clock = gpu.tracer.clock
        clock.operation(torch.ops.aten.addcdiv_.default, (own, grad, *state.values()), {}, own)

    def _moment(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of a sharded parameter each rank has the moments of its own shard, and its size decides."""
        count = parameter.numel()
        if count < _SMALLEST or count % self.block_size:
            return {"whole": torch.zeros_like(parameter)}
        shape = parameter.shape if self.bits == 8 else (count * self.bits // 8,)
        return {
            "codes": parameter.new_zeros(shape, dtype=torch.uint8),
            "scale": parameter.new_zeros(count // self.block_size, dtype=torch.float32),
            "qmap": parameter.new_zeros(_CODES[self.bits], dtype=torch.float32),
        }


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensor`: what a DTensor, whose import takes half a second, has beside other tensors."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast("torch.Tensor", to_local())


class AdamW8bit(_LowBitAdamW):
    bits = 8


class AdamW4bit(_LowBitAdamW):
    bits = 4


def transformers_optimizers(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let transformers' trainer take these in place of torchao's."""
    name = "_get_torchao_optimizer"
    if not hasattr(module, name):  # transformers before 5.20 has them in its trainer, and asks for the package
        return

    def choose(context: Any) -> tuple[type[torch.optim.Optimizer], dict[str, object]]:
        gpu.note(_NOTE)
        if find_spec("torchao") is None:
            gpu.note("torchao is not installed: a card without the package cannot run this optim")
        kind = AdamW4bit if "4bit" in str(context.args.optim).lower() else AdamW8bit
        chosen = {"block_size": int(context.optim_args.get("block_size", 256)), **context.adam_kwargs}
        context.optimizer_kwargs.update(chosen)
        return kind, cast("dict[str, object]", context.optimizer_kwargs)

    yield module, name, choose, "its compiled step is not simulated, and the package may lack"
