"""Tags that attribute events to decoder layers, so that a shallow run can be expanded to a deep one (`expand.py`).

A model with equal layers is built with a few of them (`stack.shrink`). While it runs, each allocation, free and kernel
is tagged with its layer. Inside a layer's forward or backward, hooks give the layer. Outside (construction, optimizer,
clipping, release of a cache) the tag follows the data: the result of an operation on a layer's tensor is that layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload

from autofit.fakegpu.autograd import in_backward
from autofit.fakegpu.clock import Clock
from autofit.fakegpu.depth.stack import Stack, fingerprint, stack_of
from autofit.fakegpu.memory import SimulatedMemory
from autofit.fakegpu.specs import GpuSpec, HostCosts

NEVER = float("-inf")


# ---------------------------------------------------------------------- tags
FORWARD, BACKWARD, DATA = range(3)


class Tag(NamedTuple):
    """A layer: how it was attributed (forward, backward, or by data), its stack, and its number."""

    kind: int
    stack: int
    layer: int

    def encode(self) -> int:
        return 1 + self.layer + (self.stack << 12) + (self.kind << 20)

    @classmethod
    def decode(cls, code: int) -> Tag:
        return cls((code - 1) >> 20, (code - 1) >> 12 & 0xFF, (code - 1) & 0xFFF)


class LayerRecorder:
    """Tracks the current layer during a run, and the layer of each storage. Codes are `Tag.encode()`."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self.memory = memory
        self.clock: LayerClock | None = None
        self.stacks: list[Stack] = []
        self.problem = ""
        self.shares: dict[int, dict[int, int]] = {}  # allocation -> stack -> bytes from middle layers
        self._code = 0
        self._backward = False
        self._owner: dict[int, int] = {}  # id of a module in a layer -> DATA code of that layer

    # ------------------------------------------------------------------ when
    def code(self) -> int:
        """The code of the current layer, 0 outside all layers."""
        if self._backward and not in_backward():
            self.set(0)
        return self._code

    def set(self, code: int, *, backward: bool = False) -> None:
        if code != self._code:
            if self.clock is not None:
                self.clock.cut()
            self._code = code
        self._backward = backward

    def module_registered(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """torch's hook on every `parent.name = child`: finds stacks of layers, and modules added to a layer later."""
        if child is None:
            return
        owner = self._owner.get(id(parent))
        if owner is not None:
            self._own(child, owner)
        stack = stack_of(vars(parent).get("config"))
        if stack is None or not isinstance(child, torch.nn.ModuleList) or len(child) != len(stack.kept):
            return
        if id(child[0]) not in self._owner:
            self._add_stack(child, stack)

    def _add_stack(self, layers: torch.nn.ModuleList, stack: Stack) -> None:
        number = len(self.stacks)
        self.stacks.append(stack)
        for i, layer in enumerate(layers):
            self._own(layer, Tag(DATA, number, i).encode())
            layer.register_forward_pre_hook(partial(self._enters, number, i))
            layer.register_forward_hook(partial(self._leaves, number, i, i == len(layers) - 1))
        prints = [fingerprint(layer) for layer in layers]
        middle = prints[stack.first : stack.first + stack.period * stack.traced_units]
        if any(a != b for a, b in zip(middle, middle[stack.period :], strict=False)):
            self.problem = "the layers that were built do not repeat"

    def _own(self, module: torch.nn.Module, code: int) -> None:
        for part in module.modules():
            self._owner[id(part)] = code
        for tensor in (*module.parameters(), *module.buffers()):
            self.give(tensor, code)

    def _enters(self, stack: int, layer: int, module: torch.nn.Module, args: object) -> None:
        backward = in_backward()
        self.set(Tag(BACKWARD if backward else FORWARD, stack, layer).encode(), backward=backward)

    def _leaves(
        self, stack: int, layer: int, is_last: bool, module: torch.nn.Module, args: object, out: object
    ) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled():
            code = Tag(BACKWARD, stack, layer).encode()
            hidden.register_hook(lambda grad: self.set(code, backward=True))
        if is_last and not in_backward():
            self.set(0)

    # ------------------------------------------------------------------ whose
    def give(self, tensor: torch.Tensor, code: int) -> None:
        """Attribute a tensor, on the card or not, to the layer of `code`."""
        cast("Any", tensor)._autofit_layer = code
        index = self.memory.index_of(tensor)
        if index is not None:
            self.memory.allocations[index].layer = code

    def of(self, tensor: torch.Tensor) -> int:
        index = self.memory.index_of(tensor)
        if index is not None and self.memory.allocations[index].layer:
            return self.memory.allocations[index].layer
        return cast("int", getattr(tensor, "_autofit_layer", 0))

    def follow(self, args: Sequence[object], out: object) -> None:
        """Attribute the outputs of an operation outside the layers to the layer of its inputs."""
        if isinstance(out, torch.Tensor):
            self._inherit(out, args)
        elif isinstance(out, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
            for made, source in zip(out, args[0], strict=False):
                if isinstance(made, torch.Tensor) and isinstance(source, torch.Tensor) and not self.of(made):
                    code = self.of(source)
                    if code:
                        self.give(made, code)

    def _inherit(self, out: torch.Tensor, args: Sequence[object]) -> None:
        if self.of(out):
            return
        owners = {code for a in args if isinstance(a, torch.Tensor) and (code := self.of(a))}
        if len(owners) == 1:
            self.give(out, owners.pop())
        index = self.memory.index_of(out)
        if index is None or index in self.shares:
            return
        for argument in args:
            if isinstance(argument, (list, tuple)):  # cat, stack
                self._add_shares(index, argument)
            elif isinstance(argument, torch.Tensor):
                source = self.memory.index_of(argument)
                if source in self.shares and argument.numel() == out.numel():
                    scale = out.element_size() / argument.element_size()
                    self.shares[index] = {k: int(v * scale) for k, v in self.shares[source].items()}

    def _add_shares(self, index: int, parts: Sequence[object]) -> None:
        shares: dict[int, int] = {}
        for part in parts:
            if isinstance(part, torch.Tensor) and (code := self.of(part)):
                tag = Tag.decode(code)
                if self.stacks[tag.stack].unit(tag.layer) is not None:
                    shares[tag.stack] = shares.get(tag.stack, 0) + part.numel() * part.element_size()
        if shares:
            self.shares[index] = shares

    def growth(self, args: Sequence[object]) -> tuple[float, float]:
        """Factors for the launches and the kernel time of an operation outside the layers, at full depth."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            growth = self._growth(first)
            return growth, growth
        if isinstance(first, (list, tuple)):
            total = grown = 0.0
            for tensor in first:
                if isinstance(tensor, torch.Tensor):
                    nbytes = tensor.numel() * tensor.element_size()
                    total, grown = total + nbytes, grown + nbytes * self._growth(tensor)
            return 1.0, grown / total if total else 1.0
        return 1.0, 1.0

    def _growth(self, tensor: torch.Tensor) -> float:
        code = self.of(tensor)
        if not code:
            return 1.0
        tag = Tag.decode(code)
        stack = self.stacks[tag.stack]
        return 1.0 if stack.unit(tag.layer) is None else stack.growth


# ---------------------------------------------------------------------- time
class Delay(NamedTuple):
    """The effect of a time segment on (host, gpu) time, as a 2x2 matrix of the (max, +) algebra.

    Each entry is the longest path from one time to the other. Launches, kernels and waits only add and take maxima, so
    every segment is such a matrix, and consecutive segments are joined by the matrix product.
    """

    host_host: float = 0.0
    gpu_host: float = NEVER  # from GPU time to host time: a wait
    host_gpu: float = NEVER
    gpu_gpu: float = 0.0

    def then(self, later: Delay) -> Delay:
        return Delay(
            max(self.host_host + later.host_host, self.host_gpu + later.gpu_host),
            max(self.gpu_host + later.host_host, self.gpu_gpu + later.gpu_host),
            max(self.host_host + later.host_gpu, self.host_gpu + later.gpu_gpu),
            max(self.gpu_host + later.host_gpu, self.gpu_gpu + later.gpu_gpu),
        )

    def after(self, host_s: float, gpu_s: float) -> tuple[float, float]:
        return (
            max(host_s + self.host_host, gpu_s + self.gpu_host),
            max(host_s + self.host_gpu, gpu_s + self.gpu_gpu),
        )

    def repeated(self, times: int) -> Delay:
        """The segment `times` times in a row."""
        whole, power = Delay(), self
        while times:
            if times & 1:
                whole = whole.then(power)
            power, times = power.then(power), times >> 1
        return whole

    def grown(self, before: Delay, times: float) -> Delay:
        """The segment `times` steps later, by linear extrapolation from `before` (one step earlier)."""
        return Delay(
            *(b if b == NEVER or a == NEVER else b + (b - a) * times for a, b in zip(before, self, strict=True))
        )


class Repeat(NamedTuple):
    """Segments `start` to `end`, which happen `times` times in a row."""

    start: int
    end: int
    times: int


class LayerClock(Clock):
    """Clock that also records a (max, +) delay matrix per layer segment."""

    def __init__(self, spec: GpuSpec, costs: HostCosts, recorder: LayerRecorder) -> None:
        super().__init__(spec, costs)
        self.stretches: list[tuple[int, Delay]] = []
        self.repeats: list[Repeat] = []
        self._recorder = recorder
        self._delay = [0.0, NEVER, NEVER, 0.0]

    def cut(self) -> int:
        """End the current segment; returns the number of segments so far."""
        delay = Delay(*self._delay)
        if delay != Delay():
            self.stretches.append((self._recorder._code, delay))
            self._delay = [0.0, NEVER, NEVER, 0.0]
        return len(self.stretches)

    def operation(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> None:
        host_s, gpu_s = self.host_s, self.gpu_s
        super().operation(func, args, kwargs, out)
        launch_s = self.host_s - host_s
        launches, size = (1.0, 1.0) if self._recorder.code() else self._recorder.growth(args)
        hh, gh, hg, gg = self._delay
        hh, gh = hh + launch_s * launches, gh + launch_s * launches
        if self.gpu_s != gpu_s:
            kernel_s = (self.gpu_s - max(gpu_s, self.host_s)) * size
            hg, gg = max(hg, hh) + kernel_s, max(gg, gh) + kernel_s
        self._delay = [hh, gh, hg, gg]

    def synchronize(self) -> None:
        super().synchronize()
        hh, gh, hg, gg = self._delay
        self._delay = [max(hh, hg), max(gh, gg), hg, gg]

    def copy_to_host(self, nbytes: int) -> None:
        before = self.now_s
        super().copy_to_host(nbytes)
        hh, gh, hg, gg = self._delay
        to_host, to_gpu = max(hh, hg) + self.gpu_s - before, max(gh, gg) + self.gpu_s - before
        self._delay = [to_host, to_gpu, to_host, to_gpu]

    def play(self, stretches: Sequence[tuple[int, Delay]], *, times: int = 1) -> None:
        """Append segments of time without a traced kernel, which happen `times` times in a row."""
        start = self.cut()
        self.stretches += stretches
        if times > 1:
            self.repeats.append(Repeat(start, len(self.stretches), times))
