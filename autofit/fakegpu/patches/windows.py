"""Attention over the windows of an image, one call a window: traced once a size, and played for the others.

Without flash-attn, transformers' vision towers cut queries, keys and values by lengths and call the attention for each
piece: 80 times a layer for an image of 1,280 tokens in Qwen2.5-VL. The towers' own loop runs over one piece here, which
is all of them; inside, each window takes and gives back what a loop over all takes, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.patches.attention import Attention
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.patches.same_calls import Event, events_since, play

aten = torch.ops.aten
_LEAST_PLAYED = 4  # windows beyond one of each size
_CHECKPOINT, _RECOMPUTATION = "_checkpoint_hook", "_recomputation_hook"  # torch's hooks on what autograd saves
# Views and detached tensors of a window, by these hooks: those of the output, and of saved tensors.
_VIEWS_FORWARD = {"": 3, _CHECKPOINT: 2, _RECOMPUTATION: 6}
_VIEWS_BACKWARD = {"": 3, _CHECKPOINT: 6, _RECOMPUTATION: 3}
_WINDOWS_DIM = 2  # of queries, keys and values: (1, heads, tokens, dim)
_LOOPS = {"lengths", "splits", "attn_outputs"}  # names in a forward that has such a loop


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Operators of an attention kernel, and which outputs of its forward the backward needs, the first one first.

    `freed`: their places in the order in which autograd gives them back, which is that of their names.
    """

    forward: OpOverload
    backward: OpOverload
    saved: tuple[int, ...]
    freed: tuple[int, ...] = (1, 0, 3, 2)


_KERNELS = {
    "flash": _Kernel(
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default,
        (0, 1, 6, 7), freed=(1, 0, 2, 3),
    ),
    "efficient": _Kernel(
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default, (0, 1, 2, 3),
    ),
    "cudnn": _Kernel(
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default,
        (0, 1, 6, 7),
    ),
}  # fmt: skip


def vision_towers(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Patches of the attention of `module`'s vision towers, and of `torch.split` while one of them runs."""
    split = untouched(torch.split)
    running: list[_Loop] = []
    stand_ins: dict[object, list[torch.Tensor]] = {}

    def cut(tensor: torch.Tensor, sizes: int | list[int], dim: int = 0) -> Sequence[torch.Tensor]:
        if not (running and isinstance(sizes, list) and running[-1].takes(tensor, sizes, dim)):
            return cast("Sequence[torch.Tensor]", split(tensor, sizes, dim))
        whole = cast("torch.Tensor", _Whole.apply(tensor, running[-1]))  # type: ignore[no-untyped-call]
        running[-1].pieces.append(whole)
        return (whole,)

    reason = "windows like one before are played"
    yield torch, "split", cut, reason
    for owner in (value for value in vars(module).values() if isinstance(value, type)):
        original = vars(owner).get("forward")
        code = getattr(original, "__code__", None)
        if code is None or not {*code.co_varnames, *code.co_cellvars} >= _LOOPS:
            continue
        original = untouched(cast("Callable[..., object]", original))

        def forward(tower: Any, *args: object, original: Callable[..., object] = original, **kwargs: object) -> object:
            if tower.config._attn_implementation != "sdpa" or getattr(tower, "num_key_value_groups", 1) != 1:
                return original(tower, *args, **kwargs)
            attention = gpu.tracer.composites[aten.scaled_dot_product_attention.default]
            assert isinstance(attention, Attention)
            running.append(_Loop(gpu, attention, stand_ins))
            before, attention.instead = attention.instead, running[-1].attend
            try:
                return original(tower, *args, **kwargs)
            finally:
                attention.instead = before
                running.pop()

        yield owner, "forward", forward, reason


@dataclass(slots=True)
class _Recording:
    """An operator on one window: its allocations and frees in order, its cost, and its outputs that stay.

    An output is a tensor of the same size, and its allocation; None if it is off the card.
    """

    events: Sequence[Event]
    charged: list[tuple[OpOverload, Any, Any, Any, Any]]  # arguments of the clock
    outputs: Sequence[tuple[torch.Tensor, int | None]]

    def again(self, gpu: FakeGpu) -> list[int | None]:
        """Play it once more; the allocation of each output."""
        numbers, clock = play(gpu, self.events, {}), gpu.clock
        for func, args, kwargs, out, key in self.charged:
            if key in clock.known and clock.log is None:  # nothing is read but the cost
                clock.operation(func, (), {}, None, key)
            else:
                clock.operation(func, args, kwargs, out, key)
        return [None if index is None else numbers[index] for _, index in self.outputs]


class _Loop:
    """Attention over the pieces of one tensor each of queries, keys and values."""

    def __init__(self, gpu: FakeGpu, attention: Attention, stand_ins: dict[object, list[torch.Tensor]]) -> None:
        self._gpu, self._attention, self._stand_ins = gpu, attention, stand_ins
        self.lengths: list[int] = []
        self._kernel = ""
        self.pieces: list[torch.Tensor] = []  # each stands for all that one was cut into
        self._options: tuple[float, float] = 0.0, 1.0  # dropout and scale
        self.grad_mode = torch.is_grad_enabled()
        self._needs_sums = False
        self._gradients: dict[int, _Recording] = {}  # of the backward of a window, by its length
        self._hooks = ""  # on what autograd saves
        self._keeps = False  # True if the inputs of the backward stay after the forward

    # ------------------------------------------------------------------ when
    def takes(self, tensor: torch.Tensor, lengths: list[int], dim: int) -> bool:
        """True if the pieces of `lengths` are attended together; the same for queries, keys and values."""
        if self.lengths:
            return lengths == self.lengths and bool(self._kernel)
        self.lengths = lengths
        tracer = self._gpu.tracer
        plain = type(tensor) is FakeTensor and tensor.dim() == 4 and tensor.shape[0] == 1 and dim == _WINDOWS_DIM
        alone = not (tracer.paused or tracer.host or tracer.fusion or self._gpu.memory.stream)
        several = len(lengths) - len(set(lengths)) >= _LEAST_PLAYED
        if not (plain and alone and several) or torch.is_inference_mode_enabled():
            return False
        self._hooks = _saved_tensor_hooks()
        if self._hooks not in _VIEWS_BACKWARD:  # such as an offload of saved tensors
            return False
        with self._aside():
            pieces = [tensor.narrow(dim, 0, length) for length in set(lengths)]
        kernels = {
            self._attention.select(piece, piece, piece, None, dropout_p=0.0, is_causal=False, gqa=False)
            for piece in pieces
        }
        self._kernel = kernels.pop() if len(kernels) == 1 and tensor.shape[-1] % 8 == 0 else ""
        self._needs_sums = self.grad_mode and tensor.requires_grad
        self._keeps = self._needs_sums and self._hooks != _CHECKPOINT
        if self._kernel not in _KERNELS:
            self._kernel = ""
        return bool(self._kernel)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: object) -> Any:
        """The attention of all windows; NotImplemented for other tensors. `more`: dropout and scale."""
        if not any(query is piece for piece in self.pieces):
            return NotImplemented
        self.pieces.clear()
        self._attention.chosen[self._kernel] = self._attention.chosen.get(self._kernel, 0) + len(self.lengths)
        dropout, scale = cast("tuple[float, float]", more)
        self._options = dropout, query.shape[-1] ** -0.5 if scale is None else scale
        return _Windows.apply(query, key, value, self)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ forward and backward
    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The output (1, heads, tokens, dim), and what the backward needs besides it, each of all windows."""
        kernel, sizes = _KERNELS[self._kernel], dict[int, _Recording]()
        places: list[list[int | None]] = []
        views = _VIEWS_FORWARD[self._hooks if self._needs_sums else _CHECKPOINT]
        for start, length in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False):
            self._view(views if places else 0)  # those of one are the loop's own
            if length in sizes:
                places.append(sizes[length].again(self._gpu))
                continue
            with self._aside():
                pieces = [each.detach().narrow(_WINDOWS_DIM, start, length) for each in inputs]
            with self._recorded() as recording:
                made = kernel.forward(*pieces, *self._forward_options(), scale=self._options[1])
                outputs = [made[number] for number in kernel.saved]
                del made
                if not self._keeps:
                    with self._aside():
                        outputs[1:] = [_twin(each) for each in outputs[1:]]
            places.append(self._settle(recording, outputs))
            sizes[length] = recording
        out, *others = (tensor for tensor, _ in next(iter(sizes.values())).outputs)
        with self._aside():
            shape = (1, sum(self.lengths), out.shape[1], out.shape[3])
            wholes = [torch.empty(shape, dtype=out.dtype, device=out.device).transpose(1, 2)]
            wholes += [each.new_empty(len(self.lengths) * max(1, each.numel())) for each in others]
        for number, whole in enumerate(wholes):
            self._adopt(whole, number, places[::-1])  # a list gives back its last tensor first
        return wholes

    def cut_gradient(self) -> None:
        """Cut the gradient of the joined outputs, before what checkpointing computes again."""
        self._view(len(self.lengths) - 1)

    def backward(self, grad: torch.Tensor, *kept: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of queries, keys and values, each in the pieces that the kernel makes."""
        inputs, saved = kept[:3], kept[3:]
        memory = self._gpu.memory
        held = [memory.disown(each) for each in saved]
        kernel, sizes, places = _KERNELS[self._kernel], self._gradients, list[list[int | None]]()
        starts = list(accumulate(self.lengths, initial=0))[:-1]
        freed = kernel.freed[::-1] if self._hooks == _CHECKPOINT else kernel.freed
        for number in reversed(range(len(self.lengths))):
            length = self.lengths[number]
            self._view(_VIEWS_BACKWARD[self._hooks] if places else 0)
            if length in sizes:
                places.append(sizes[length].again(self._gpu))
            else:
                with self._aside():
                    piece, *pieces = (each.narrow(_WINDOWS_DIM, starts[number], length) for each in (grad, *inputs))
                    outputs = list(kernel.forward(*pieces, *self._forward_options(), scale=self._options[1]))
                with self._recorded() as recording:
                    made = kernel.backward(piece, *self._backward_arguments(pieces, outputs), scale=self._options[1])
                    gradients = list(made[:3])
                    del made
                places.append(self._settle(recording, gradients))
                sizes[length] = recording
            for indices in (held[place] for place in freed):
                if indices:
                    memory.release(indices[-1 - number])
        with self._aside():
            wholes = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in inputs]
        for number, whole in enumerate(wholes):
            self._adopt(whole, number, places[::-1])
        return wholes

    def _adopt(self, whole: torch.Tensor, output: int, places: Sequence[Sequence[int | None]]) -> None:
        """Let the allocations of an output, of all windows, be those of one tensor, to be given back in this order."""
        indices = (row[output] for row in places)
        self._gpu.memory.adopt_all(whole, [index for index in indices if index is not None])

    def joined(self, number: int) -> torch.Tensor:
        """The gradient of queries, keys or values before they were cut, from those of the pieces."""
        used: Counter[int] = Counter()
        parts = []
        for length in self.lengths:
            parts.append(self._stand_in(self._gradients[length].outputs[number][0], used[length]))
            used[length] += 1
        return torch.cat(parts, _WINDOWS_DIM)

    def _stand_in(self, like: torch.Tensor, number: int) -> torch.Tensor:
        """Tensor `number` of those that are like one: what reads several counts the bytes of each once."""
        made = self._stand_ins.setdefault((tuple(like.shape), like.stride(), like.dtype), [])
        with self._aside():
            while len(made) <= number:
                made.append(cast("torch.Tensor", _twin(like)))
        return made[number]

    # ------------------------------------------------------------------ one window
    def _forward_options(self) -> tuple[object, ...]:
        dropout = self._options[0]
        if self._kernel == "flash":
            return dropout, False, False
        return (None, self._needs_sums, dropout, False, *((False,) if self._kernel == "cudnn" else ()))

    def _backward_arguments(self, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> tuple[object, ...]:
        """The arguments of a backward kernel after the gradient, in the order of its schema."""
        dropout = self._options[0]
        if self._kernel == "efficient":
            out, sums, seed, offset = outputs
            return (*inputs, None, out, sums, seed, offset, dropout, [True, True, True, False], False)
        out, sums, first, second, most, least, seed, offset, *_ = outputs
        if self._kernel == "flash":
            return (*inputs, out, sums, first, second, most, least, dropout, False, seed, offset)
        return (*inputs, out, sums, seed, offset, None, first, second, most, least, dropout, False)

    def _view(self, times: int) -> None:
        for _ in range(times):
            self._gpu.clock.view()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context whose operations are off the card."""
        before, self._gpu.tracer.paused = self._gpu.tracer.paused, True
        try:
            yield
        finally:
            self._gpu.tracer.paused = before

    @contextmanager
    def _recorded(self) -> Iterator[_Recording]:
        """Context whose operations are in the recording, once it has ended."""
        tracer, recording, begin = self._gpu.tracer, _Recording((), [], ()), len(self._gpu.memory.log)

        def note(func: OpOverload, *told: Any) -> None:
            args, kwargs, out, key = told
            with self._aside():
                recording.charged.append((func, _twin(args), _twin(kwargs), _twin(out), key))

        before, tracer.after = tracer.after, note
        try:
            yield recording
        finally:
            tracer.after = before
        recording.events = events_since(self._gpu, begin)

    def _settle(self, recording: _Recording, outputs: Sequence[torch.Tensor]) -> list[int | None]:
        """Note the outputs of a recording, whose allocations stay when the tensors die; these allocations."""
        found = [self._gpu.memory.disown(each) for each in outputs]
        places = [indices[0] if indices else None for indices in found]
        recording.outputs = list(zip(outputs, places, strict=True))
        return places


def _twin(value: object) -> object:
    """Arguments or outputs of an operation with other tensors of the same shapes, so that the given ones can go."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_twin, value))
    return {name: _twin(each) for name, each in value.items()} if isinstance(value, dict) else value


def _saved_tensor_hooks() -> str:
    """The class of the innermost hooks on tensors that autograd saves; "" if there are none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else str(hooks[0].__qualname__).split(".", maxsplit=1)[0]


class _Whole(torch.autograd.Function):
    """All pieces of a tensor, as one; its backward joins the gradients of the pieces."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loop: _Loop) -> torch.Tensor:
        ctx.loop, ctx.number = loop, len(loop.pieces)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.loop.joined(ctx.number), None


class _Windows(torch.autograd.Function):
    """Attention (1, heads, tokens, dim) within each window, of shapes alone."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, loop: _Loop) -> torch.Tensor:
        ctx.loop = loop
        ctx.set_materialize_grads(False)
        with torch.set_grad_enabled(loop.grad_mode):  # kernels of a graph under construction are launched otherwise
            out, *others = loop.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, *others)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.loop.cut_gradient()
        return *ctx.loop.backward(grads[0], *ctx.saved_tensors), None
