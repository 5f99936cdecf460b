"""The host's time for Python that goes over all modules of a model, or over lists of its tensors.

transformers' loop does so several times for each micro-batch (`model.train()`, the FLOPs that it counts) and for each
step (clipping, the optimizer, `zero_grad`), after it has waited for the card, which has nothing to do meanwhile: on an
H100 17 to 20 ms of each micro-batch and 10 to 20 ms of each step of Qwen3-1.7B with LoRA, 2,389 modules
(experiments/gpu, 2026-11-27). Measured on that host, in launches of it (11.0 us): `experiments/gpu/walks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload

from autofit.fakegpu.clock import Clock
from autofit.fakegpu.depth.layers import LayerRecorder
from autofit.fakegpu.kernels import tensors

aten = torch.ops.aten

# Launches a module: 1.1 to 1.4 us for its weights, 2.1 us for its mode.
VISIT, TRAIN = 0.11, 0.19
# Launches a tensor: `clip_grad_norm_` 4.8 us, `AdamW.step` 3.0 us.
OF_A_TENSOR: dict[OpOverload, float] = {
    aten._foreach_norm.Scalar: 0.43,
    **dict.fromkeys(
        (
            aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr, aten._fused_adam_.default,
            aten._fused_adam_.tensor_lr, aten._foreach_addcdiv_.ScalarList, aten._foreach_addcdiv_.Scalar,
        ),
        0.27,
    ),
}  # fmt: skip


def charge_modules(
    clock: Clock, layers: LayerRecorder | None, launches: float, modules: Sequence[torch.nn.Module]
) -> None:
    """Charge the host for going over modules, so many launches each. Inside of a layer they are that layer's alone."""
    deep = len(modules) if layers is None or layers.code() else sum(map(layers.growth_of_module, modules))
    _charge(clock, launches, len(modules), deep)


def charge_tensors(clock: Clock, layers: LayerRecorder | None, launches: float, several: object) -> None:
    """Charge the host for going over a list of tensors, so many launches each."""
    found = list(tensors(several))
    deep = len(found) if layers is None else sum(map(layers.growth_of_tensor, found))
    _charge(clock, launches, len(found), deep)


def _charge(clock: Clock, launches: float, number: int, of_full_depth: float) -> None:
    if number:
        clock.host_work(launches * number, deep=launches * of_full_depth, alone=True)
