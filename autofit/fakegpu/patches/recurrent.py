"""Recurrent layers as a CUDA build runs them: one cuDNN call for a whole padded or packed sequence.

On fakes torch runs its own step-by-step loop; a CUDA build uses other kernels, some without a fake implementation.
Follows `_cudnn_rnn` and `_cudnn_rnn_backward` in aten/src/ATen/native/cudnn/RNN.cpp. The size of cuDNN's reserve space
(data kept for backward) is not documented. It is estimated from the mathematics: gates, cells, the hidden states
between layers and dropout masks. `gpu.notes` says that it is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.redirect import Target, untouched

aten = torch.ops.aten
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT = {"lstm": 5, "gru": 4, "rnn_tanh": 1, "rnn_relu": 1}  # kept per step, in hidden sizes: gates, cell or candidate
_RESERVE_NOTE = "what cuDNN's recurrent layers keep for backward (reserve space) is estimated from the mathematics"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The sizes of one call: `rows` is batch times steps, or the rows of a packed sequence."""

    kind: str
    rows: int
    layers: int
    directions: int
    hidden: int
    out: int
    dropout: float
    training: bool
    batch_first: bool

    @property
    def reserve_elements(self) -> int:
        if not self.training:
            return 0
        between = (self.layers - 1) * self.directions * self.out * (2 if self.dropout else 1)
        return self.rows * (self.layers * self.directions * _KEPT[self.kind] * self.hidden + between)


class _CudnnRnn(torch.autograd.Function):
    """Allocates the tensors that `_cudnn_rnn` makes and keeps, without values."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        gpu: FakeGpu,
        shape: _Shape,
        x: torch.Tensor,
        *states_and_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        states = states_and_weights[: 2 if shape.kind == "lstm" else 1]
        weights = states_and_weights[len(states) :]
        sequence = x.transpose(0, 1).contiguous() if shape.batch_first else x.contiguous()
        out = sequence.new_empty((*sequence.shape[:-1], shape.out * shape.directions))
        ends = tuple(torch.empty_like(s) for s in states)
        reserve = x.new_empty(shape.reserve_elements)
        _spend(gpu, shape, weights, times=1)
        out = out.transpose(0, 1) if shape.batch_first else out
        ctx.save_for_backward(x, out, reserve, *states, *weights)
        ctx.call = gpu, shape  # type: ignore[attr-defined]
        return out, *ends

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gpu, shape = ctx.call  # type: ignore[attr-defined]
        x, _, _, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        count = 2 if shape.kind == "lstm" else 1
        states, weights = rest[:count], rest[count:]
        sequence = x.transpose(0, 1).contiguous() if shape.batch_first else x.contiguous()
        flowing = grads[0].transpose(0, 1).contiguous() if shape.batch_first else grads[0].contiguous()
        into_x = torch.empty_like(sequence)
        into_states = [torch.empty_like(s) for s in states]
        flat = x.new_zeros(sum(w.numel() for w in weights))
        into_weights, offset = [], 0
        for weight in weights:
            into_weights.append(flat[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
        _spend(gpu, shape, weights, times=2)
        del sequence, flowing
        into_x = into_x.transpose(0, 1) if shape.batch_first else into_x
        return None, None, into_x, *into_states, *into_weights


def _spend(gpu: FakeGpu, shape: _Shape, weights: Sequence[torch.Tensor], *, times: int) -> None:
    """Charge the clock for the matrix products of one call, as one kernel."""
    flops = 2 * shape.rows * sum(w.numel() for w in weights if w.dim() == 2) * times
    nbytes = sum(w.numel() * w.element_size() for w in weights) * times
    half = weights[0].dtype in (torch.float16, torch.bfloat16)
    gpu.clock.kernel(flops=flops, nbytes=nbytes, rate=gpu.spec.half_flops_per_s if half else gpu.spec.fp32_flops_per_s)


def _layer(gpu: FakeGpu, kind: str, original: Callable[..., object]) -> Callable[..., object]:
    """`torch._VF.lstm` and the other recurrent layers, for padded and for packed sequences."""

    def run(x: torch.Tensor, *args: object) -> object:
        packed = isinstance(args[0], torch.Tensor) and isinstance(args[2], (list, tuple))
        if not isinstance(x, FakeTensor) or (x.device.type != "cuda" and not packed):
            return original(x, *args)
        hx, weights, _bias, layers, dropout, training, bidirectional, *first = args[1:] if packed else args
        states = tuple(cast("Sequence[torch.Tensor]", hx)) if kind == "lstm" else (cast("torch.Tensor", hx),)
        given = cast("Sequence[torch.Tensor]", weights)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, states = x.to(dtype), tuple(s.to(dtype) for s in states)
            given = [w.to(dtype) for w in given]
        shape = _Shape(
            kind=kind,
            rows=x.numel() // x.shape[-1],
            layers=cast("int", layers),
            directions=2 if bidirectional else 1,
            hidden=states[-1].shape[-1],
            out=states[0].shape[-1],
            dropout=cast("float", dropout),
            training=bool(training),
            batch_first=bool(first and first[0]),
        )
        gpu.note(_RESERVE_NOTE)
        return _CudnnRnn.apply(gpu, shape, x, *states, *given)  # type: ignore[no-untyped-call]

    return run


def _pack(original: Callable[..., object]) -> Callable[..., object]:
    """`_pack_padded_sequence`: rows of all steps, longest sequences first; torch's version reads tensor memory."""

    def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> object:
        if not isinstance(x, FakeTensor):
            return original(x, lengths, batch_first)
        x = x.transpose(0, 1) if batch_first else x
        steps, count = x.shape[:2]
        wanted = [int(n) for n in lengths.tolist()]
        sizes = [sum(n > step for n in wanted) for step in range(min(steps, max(wanted)))]
        rows = [step * count + i for step, size in enumerate(sizes) for i in range(size)]
        flat = x.reshape(steps * count, *x.shape[2:])
        return flat.index_select(0, torch.tensor(rows).to(x.device)), torch.tensor(sizes)

    return pack


def _pad(original: Callable[..., object]) -> Callable[..., object]:
    """`_pad_packed_sequence`: the rows as a padded batch again, and the lengths."""

    def pad(
        data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> object:
        if not isinstance(data, FakeTensor):
            return original(data, batch_sizes, batch_first, padding_value, total_length)
        sizes = [int(n) for n in batch_sizes.tolist()]
        steps, count = max(len(sizes), total_length), sizes[0]
        rows = [step * count + i for step, size in enumerate(sizes) for i in range(size)]
        blank = data.new_full((steps * count, *data.shape[1:]), padding_value)
        out = blank.index_copy(0, torch.tensor(rows).to(data.device), data).view(steps, count, *data.shape[1:])
        lengths = torch.tensor([sum(size > i for size in sizes) for i in range(count)])
        return (out.transpose(0, 1) if batch_first else out), lengths

    return pad


def recurrent_layers(gpu: FakeGpu) -> Iterable[Target]:
    """Patches of `torch._VF`, which `nn.LSTM`, `nn.GRU` and `nn.RNN` call."""
    reason = "a CUDA build runs cuDNN, which fakes do not reach"
    for kind in _GATES:
        yield torch._VF, kind, _layer(gpu, kind, untouched(getattr(torch._VF, kind))), reason
    yield torch._VF, "_pack_padded_sequence", _pack(untouched(torch._VF._pack_padded_sequence)), reason
    yield torch._VF, "_pad_packed_sequence", _pad(untouched(torch._VF._pad_packed_sequence)), reason
    if gpu.mode == "cuda":
        yield torch.backends.cudnn, "is_acceptable", lambda tensor: True, "a card has cuDNN"
    gpu.tracer.handlers[aten._thnn_fused_gru_cell.default] = _gru_cell
    gpu.tracer.handlers[aten._thnn_fused_gru_cell_backward.default] = _gru_cell_backward


def _gru_cell(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """_thnn_fused_gru_cell_cuda in RNN.cu: the new state, and a workspace of five hidden sizes."""
    hx = cast("torch.Tensor", args[2])
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def _gru_cell_backward(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    grad, workspace = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
    gates = workspace.shape[1] // 5 * 3
    into = [grad.new_empty((grad.shape[0], gates)) for _ in range(2)]
    biases = [grad.new_empty((gates,)) if args[2] else None for _ in range(2)]
    return (*into, torch.empty_like(grad), *biases)
