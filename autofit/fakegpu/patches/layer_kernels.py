"""Kernels of other packages for whole layers, Liger's and the Hub's (`use_kernels`): the layers run without them.

Liger's loss is simulated, which decides most of what it saves: no logits of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.linear_loss import LIGER, fuse

Target = tuple[object, str, object, str]
_NOTE = (
    "{} were asked for and not simulated: the layers ran without them, which needs at least as many bytes and seconds"
)


def liger(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """transformers' `apply_liger_kernel`, with or without the package."""

    def apply(model: object, kernel_config: Mapping[str, object] | None) -> None:
        fused = (kernel_config or {}).get("fused_linear_cross_entropy", True) and fuse(model, LIGER)
        gpu.note(_NOTE.format("Liger's kernels" + (" other than its fused linear loss" if fused else "")))

    yield module, "apply_liger_kernel", apply, "its kernels cannot run on fakes, and the package may lack"


def of_the_hub(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """`use_kernels=True` of a model, which would load compiled kernels from the Hub."""

    def use(model: object, use_kernels: bool, *args: object, **options: object) -> None:
        if use_kernels:
            gpu.note(_NOTE.format("the Hub's kernels (use_kernels)"))
        model._use_kernels = bool(use_kernels)  # type: ignore[attr-defined]

    owner = getattr(module, "PreTrainedModel", None)
    if owner is not None and hasattr(owner, "set_use_kernels"):
        yield owner, "set_use_kernels", use, "its kernels cannot run on fakes, and the package may lack"
