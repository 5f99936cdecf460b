"""Operators that fakes run otherwise than a card does: other parts, other owners of memory, or skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import launch
from autofit.fakegpu.patches.redirect import Target, Undo, untouched
from autofit.fakegpu.specs import LaunchOrigin
from autofit.fakegpu.tracer import Tracer

aten = torch.ops.aten


# Operations that fake tensors cannot run, and operations with a cost that is noted in `gpu.notes`, not simulated.

_CONVOLUTION_NOTE = (
    "cuDNN's workspace for convolutions is not counted: which algorithm it picks, and so how much it takes for the "
    "moment of each call (from nothing to hundreds of MiB), depends on its version and on cudnn.benchmark"
)


def other_kernels(gpu: FakeGpu) -> Iterable[tuple[object, str, object, str]]:
    """Register handlers for operations that fail on fakes or that need a note."""
    handlers = gpu.tracer.handlers
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            if "out" not in overload:
                handlers[getattr(packet, overload)] = lambda args, kwargs: None  # in place, without scratch
    accumulation_in_place(gpu.tracer)
    if gpu.mode == "cuda":
        handlers[_UNSCALE] = partial(_unscaled, gpu)
        for function in (aten.convolution.default, aten.convolution_backward.default):
            handlers[function] = partial(_noted, gpu, function, _CONVOLUTION_NOTE)
        yield torch._C, "_select_conv_backend", _convolution_backend, "the CUDA build asks a driver that may be missing"


def _convolution_backend(
    input: torch.Tensor, weight: torch.Tensor, *_: object, transposed: bool = False, groups: int = 1, **__: object
) -> object:
    """The backend of a convolution on a card: torch's own kernel for one filter a channel, else cuDNN."""
    backend = torch._C._ConvBackend  # type: ignore[attr-defined]
    if transposed:
        return backend.CudnnTranspose
    depthwise = input.dim() in (3, 4) and groups == input.shape[1] > 1 and weight.shape[0] % input.shape[1] == 0
    return backend.CudaDepthwise2d if depthwise else backend.Cudnn


_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def _unscaled(gpu: FakeGpu, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """The loss scaling of float16 refuses gradients in bfloat16, as its kernel does (AmpKernels.cu)."""
    if any(gradient.dtype is torch.bfloat16 for gradient in cast("Sequence[torch.Tensor]", args[0])):
        raise NotImplementedError("\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'")
    shortcut = gpu.tracer.shortcut
    return shortcut.run(_UNSCALE, args, kwargs) if shortcut else _UNSCALE(*args, **kwargs)


def _noted(
    gpu: FakeGpu, function: OpOverload, text: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    gpu.note(text)
    shortcut = gpu.tracer.shortcut
    return shortcut.run(function, args, kwargs) if shortcut else function(*args, **kwargs)


def other_ways(note: Callable[[str], None]) -> Iterable[tuple[object, str, object, str]]:
    """Disable the inference fast path of `nn.TransformerEncoder`, since it needs nested tensors."""
    enabled = untouched(torch.backends.mha.get_fastpath_enabled)

    def fast_path() -> bool:
        if enabled() and not torch.is_grad_enabled():
            note("the fast path of nn.TransformerEncoder and nn.MultiheadAttention was not simulated")
        return False

    yield torch.backends.mha, "get_fastpath_enabled", fast_path, "it makes nested tensors of fakes"


# What autograd does in place for real tensors, not for fakes: adding gradients that meet, scattering into zeros.
#
# `InputBuffer::accumulate` in torch/csrc/autograd/input_buffer.cpp adds into the first gradient if it is dense and has
# no other owner, but never into a tensor subclass such as a fake. So when the engine adds two fakes and is the only
# owner of the first, the sum takes over the memory of the first. Likewise the backwards of gather, indexing, max, topk
# and masked_select (torch/csrc/autograd/FunctionsManual.cpp) write into new zeros, for a subclass into a copy of them.

# Reference counts of a tensor and of its storage when the engine is the only owner and calls this code (torch 2.13; a
# test compares the result with the CPU allocator). With any other count the sum gets its own memory.
_TENSOR_REFERENCES, _STORAGE_REFERENCES = 4, 2


def accumulation_in_place(tracer: Tracer) -> None:
    """Let the sum of two gradients reuse the memory of the first whenever autograd would add in place."""

    def add(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        shortcut = tracer.shortcut
        first = args[0]
        taken = isinstance(first, FakeTensor) and _by_engine() and _held_by_engine(first)
        out = shortcut.run(aten.add.Tensor, args, kwargs) if shortcut else aten.add.Tensor(*args, **kwargs)
        if taken:
            sum_, held = cast("torch.Tensor", out), cast("torch.Tensor", first)
            if (sum_.shape, sum_.dtype) == (held.shape, held.dtype):
                tracer.memory.take_over(sum_, held)
        return out

    if hasattr(torch.Tensor, "_use_count"):
        tracer.handlers[aten.add.Tensor] = add
    for function in _INTO_ZEROS:
        tracer.handlers[function] = partial(_into_zeros, tracer, function)


_INTO_ZEROS = (
    aten.scatter_add.default, aten.index_put.default, aten.scatter.src, aten.index_add.default,
    aten.masked_scatter.default, aten.put.default,
)  # fmt: skip


def _into_zeros(tracer: Tracer, function: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """A backward's `zeros.scatter_add(...)`, whose result takes over the memory of the zeros."""
    shortcut = tracer.shortcut
    taken = isinstance(args[0], FakeTensor) and _by_engine() and _only_tensor_of_its_storage(args[0])
    out = shortcut.run(function, args, kwargs) if shortcut else function(*args, **kwargs)
    if taken:
        tracer.memory.take_over(cast("torch.Tensor", out), cast("torch.Tensor", args[0]))
    return out


def _by_engine() -> bool:
    """True if the caller is the C++ engine itself; a backward written in Python has its own frame."""
    if launch() is not LaunchOrigin.AUTOGRAD:
        return False
    return sys._getframe(4).f_code.co_name == "_engine_run_backward"  # here, the handler, _run, __torch_dispatch__


def _held_by_engine(tensor: torch.Tensor) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    counted = tensor._use_count() == _TENSOR_REFERENCES  # type: ignore[attr-defined]
    return counted and _only_tensor_of_its_storage(tensor) and dense


def _only_tensor_of_its_storage(tensor: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == _STORAGE_REFERENCES


# `torch.tensor` of a list with tensors of the simulated card: torch reads each of them from within C++.


def factories() -> Iterable[tuple[object, str, object, str]]:
    """Patches of torch's constructors from Python values."""
    yield torch, "tensor", partial(_tensor, untouched(torch.tensor)), "the values of fakes are read in Python"


def _tensor(original: Callable[..., torch.Tensor], data: object, *args: object, **kwargs: object) -> torch.Tensor:
    if isinstance(data, (list, tuple)) and any(isinstance(value, FakeTensor) for value in data):
        data = [value.item() if isinstance(value, FakeTensor) and not value.dim() else value for value in data]
    return original(data, *args, **kwargs)


# Operators that a CUDA build runs in other parts than this build does on fake tensors, made to run as on CUDA.
#
# torch's dispatch tables say which: this build has no CUDA kernels, so an operator with a CUDA kernel and a composite
# for other devices is taken apart before its call arrives here; and an operator without a CUDA kernel arrives here
# whole, while a card runs its composite. `native_functions.yaml`, which torch ships in `torchgen`, says what a CUDA
# build has: tests/fakegpu/test_composites.py compares both for all operators.

# CompositeImplicitAutograd here, with the temporaries of the composite; one kernel on CUDA.
OWN_KERNELS = ("silu_backward", "mish_backward", "_fused_rms_norm")
# CompositeExplicitAutograd on CUDA, with temporaries as large as an input; the others have none. Left whole, though
# they have some: _trilinear, soft_margin_loss and linear algebra, whose code reads or resizes what fakes do not have.
IN_PARTS = (
    "_safe_softmax", "logsumexp", "binary_cross_entropy_with_logits", "dist", "_euclidean_dist", "isinf", "ldexp",
    "mvlgamma", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate",
)  # fmt: skip


def kernels_of_cuda(undo: Undo) -> None:
    """Register a kernel for CUDA under each name of `OWN_KERNELS`, so that the dispatcher takes its derivatives.

    The kernel itself never runs: the call ends at the fake tensors, which follow its shapes.
    """
    library = torch.library.Library("aten", "IMPL")
    undo.add(library._destroy)
    for name in OWN_KERNELS:
        if hasattr(aten, name):
            library.impl(name, _never_runs, "CUDA")


def own_kernels() -> set[OpOverload]:
    """The operators of `OWN_KERNELS` in this torch."""
    return {getattr(aten, name).default for name in OWN_KERNELS if hasattr(aten, name)}


def in_parts() -> dict[OpOverload, Callable[..., object]]:
    """{operator of `IN_PARTS` in this torch: its composite}."""
    found: dict[OpOverload, Callable[..., object]] = {}
    for name in IN_PARTS:
        packet = getattr(aten, name, None)
        for overload in {"default", "Tensor"}.intersection(packet.overloads() if packet is not None else ()):
            function = getattr(packet, overload)
            found[function] = partial(function._op_dk, DispatchKey.CompositeExplicitAutograd)
    found[aten.logsumexp.default] = _logsumexp
    return found


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """logsumexp_out_impl in ReduceOps.cpp: torch's own resizes its result, which fails on fakes."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    largest = torch.amax(x, tuple(dim), keepdim=True)
    added = largest if keepdim else torch.squeeze(largest, tuple(dim) or tuple(range(x.dim())))
    added.masked_fill_(added.abs() == float("inf"), 0)
    return torch.sum((x - largest).exp_(), tuple(dim), keepdim=keepdim).log_().add_(added)


# Losses and patches of images keep a tensor of another size than they return: the elements' losses before their mean,
# or the image (`resize_` gives nothing back).


def in_larger_storage(tracer: Tracer) -> dict[OpOverload, Callable[..., object]]:
    """{operator: the function that stands for it}."""
    losses = {aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
              aten.binary_cross_entropy.default: 3}  # fmt: skip
    found = {func: partial(_loss, tracer, func, at) for func, at in losses.items()}
    return {**found, aten.im2col.default: _patches}


def _loss(
    tracer: Tracer, func: OpOverload, reduction_at: int, input: torch.Tensor, target: torch.Tensor, *more: object,
    **named: object,
) -> torch.Tensor:  # fmt: skip
    """A loss: of each element, or their mean or sum in what first held all of them (Loss.cu, BinaryOps.cpp)."""
    reduction = more[reduction_at - 2] if len(more) > reduction_at - 2 else named.get("reduction", 1)
    whole = input.new_empty(torch.broadcast_shapes(input.shape, target.shape))
    tracer.clock.operation(func, (input, target), {}, whole)
    if not reduction:
        return whole
    if func is aten.huber_loss.default:
        return whole.mean()
    answer = whole.flatten()[:1].view(())
    if func is aten.binary_cross_entropy.default:
        return answer.copy_(whole.mean())
    return torch.mean(torch.empty_like(whole), dim=(), out=answer)


def _patches(input: torch.Tensor, *how: Sequence[int]) -> torch.Tensor:
    """im2col_out_cuda_template in Im2Col.cu: the result begins as a tensor of the input's size."""
    sizes = [
        (length + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for length, kernel, dilation, pad, stride in zip(input.shape[-2:], *how, strict=True)
    ]
    shape = (*input.shape[:-3], input.shape[-3] * prod(how[0]), prod(sizes))
    return input.new_empty(max(input.numel(), prod(shape)))[: prod(shape)].view(shape)


def _never_runs(*args: object, **kwargs: object) -> object:
    raise RuntimeError("a simulated card has no kernels; this operator was called without fake tensors")


# -- recurrent layers as a CUDA build runs them: one cuDNN call for a whole padded or packed sequence ------------------
# On fakes torch runs its own step-by-step loop; a CUDA build uses other kernels, some without a fake implementation.
# Follows `_cudnn_rnn` and `_cudnn_rnn_backward` in aten/src/ATen/native/cudnn/RNN.cpp. The size of its reserve space
# (data kept for backward) is not documented. It is estimated from the mathematics: gates, cells, the hidden states
# between layers and dropout masks. `gpu.notes` says that it is an estimate.

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
    """Allocates the tensors that `_cudnn_rnn` makes and keeps, leaving their values open."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, gpu: FakeGpu, shape: _Shape, x: torch.Tensor,
        *states_and_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
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


def _layer(gpu: FakeGpu, kind: str, original: Callable[..., object], x: torch.Tensor, *args: object) -> object:
    """`torch._VF.lstm` and the other recurrent layers, for padded and for packed sequences."""
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
        kind=kind, rows=x.numel() // x.shape[-1], layers=cast("int", layers), directions=2 if bidirectional else 1,
        hidden=states[-1].shape[-1], out=states[0].shape[-1], dropout=cast("float", dropout), training=bool(training),
        batch_first=bool(first and first[0]),
    )  # fmt: skip
    gpu.note(_RESERVE_NOTE)
    return _CudnnRnn.apply(gpu, shape, x, *states, *given)  # type: ignore[no-untyped-call]


def _pack(original: Callable[..., object], x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> object:
    """`_pack_padded_sequence`: rows of all steps, longest sequences first; torch's version reads tensor memory."""
    if not isinstance(x, FakeTensor):
        return original(x, lengths, batch_first)
    x = x.transpose(0, 1) if batch_first else x
    steps, count = x.shape[:2]
    wanted = [int(n) for n in lengths.tolist()]
    sizes = [sum(n > step for n in wanted) for step in range(min(steps, max(wanted)))]
    rows = [step * count + i for step, size in enumerate(sizes) for i in range(size)]
    flat = x.reshape(steps * count, *x.shape[2:])
    return flat.index_select(0, torch.tensor(rows).to(x.device)), torch.tensor(sizes)


def _pad(
    original: Callable[..., object], data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool,
    padding_value: float, total_length: int,
) -> object:  # fmt: skip
    """`_pad_packed_sequence`: the rows as a padded batch again, and the lengths."""
    if not isinstance(data, FakeTensor):
        return original(data, batch_sizes, batch_first, padding_value, total_length)
    sizes = [int(n) for n in batch_sizes.tolist()]
    steps, count = max(len(sizes), total_length), sizes[0]
    rows = [step * count + i for step, size in enumerate(sizes) for i in range(size)]
    blank = data.new_full((steps * count, *data.shape[1:]), padding_value)
    out = blank.index_copy(0, torch.tensor(rows).to(data.device), data).view(steps, count, *data.shape[1:])
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(count)])
    return (out.transpose(0, 1) if batch_first else out), lengths


def recurrent_layers(gpu: FakeGpu) -> Iterable[Target]:
    """Patches of `torch._VF`, which `nn.LSTM`, `nn.GRU` and `nn.RNN` call."""
    reason = "a CUDA build runs cuDNN, which fakes do not reach"
    for kind in _GATES:
        yield torch._VF, kind, partial(_layer, gpu, kind, untouched(getattr(torch._VF, kind))), reason
    yield torch._VF, "_pack_padded_sequence", partial(_pack, untouched(torch._VF._pack_padded_sequence)), reason
    yield torch._VF, "_pad_packed_sequence", partial(_pad, untouched(torch._VF._pad_packed_sequence)), reason
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
