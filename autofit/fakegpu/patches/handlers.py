"""Operations that fake tensors cannot run, and operations with a cost that is noted in `gpu.notes`, not simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch._ops import OpOverload

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.gradient_sums import accumulation_in_place
from autofit.fakegpu.patches.redirect import untouched

aten = torch.ops.aten


_CONVOLUTION_NOTE = (
    "cuDNN's workspace for convolutions is not counted: which algorithm it picks, and so how much it takes for the "
    "moment of each call (from nothing to hundreds of MiB), depends on its version and on cudnn.benchmark"
)


def other_kernels(gpu: FakeGpu) -> Iterable[tuple[object, str, object, str]]:
    """Register handlers for operations that fakes cannot run or that need a note; yields no patches."""
    handlers = gpu.tracer.handlers
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if "out" not in overload:
                handlers[getattr(packet, overload)] = lambda args, kwargs: None  # in place, without scratch
    accumulation_in_place(gpu.tracer)
    if gpu.mode == "cuda":
        for function in (aten.convolution.default, aten.convolution_backward.default):
            handlers[function] = _noted(gpu, function, _CONVOLUTION_NOTE)
    return ()


def _noted(gpu: FakeGpu, function: OpOverload, text: str) -> Callable[[Sequence[object], Mapping[str, object]], object]:
    def run(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        gpu.note(text)
        shortcut = gpu.tracer.shortcut
        return shortcut.run(function, args, kwargs) if shortcut else function(*args, **kwargs)

    return run


def other_ways(note: Callable[[str], None]) -> Iterable[tuple[object, str, object, str]]:
    """Disable the inference fast path of `nn.TransformerEncoder`, since it needs nested tensors."""
    enabled = untouched(torch.backends.mha.get_fastpath_enabled)

    def fast_path() -> bool:
        if enabled() and not torch.is_grad_enabled():
            note("the fast path of nn.TransformerEncoder and nn.MultiheadAttention was not simulated")
        return False

    yield torch.backends.mha, "get_fastpath_enabled", fast_path, "it makes nested tensors of fakes"
