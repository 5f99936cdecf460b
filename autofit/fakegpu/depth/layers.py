"""Tags that attribute events to decoder layers, so that a shallow run can be expanded to a deep one (`expand.py`).

A model with equal layers is built with a few of them (`stack.shrink`). While it runs, each allocation, free and kernel
is tagged with its layer. Inside a layer's forward or backward, hooks give the layer. Outside (construction, optimizer,
clipping, release of a cache) the tag follows the data: the result of an operation on a layer's tensor is that layer's.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch

from autofit.fakegpu.clock import in_backward
from autofit.fakegpu.depth.delay import NEVER, Delay, LayerClock, Repeat
from autofit.fakegpu.depth.stack import Stack, fingerprint, own_work, stack_of
from autofit.fakegpu.memory import HostTensors, SimulatedMemory

__all__ = ["NEVER", "Delay", "LayerClock", "LayerRecorder", "Repeat", "Tag"]


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
        self.host: HostTensors | None = None  # where the memory of the host is followed too
        self.stacks: list[Stack] = []
        self.problem = ""
        self.shares: dict[int, dict[int, int]] = {}  # allocation -> stack -> bytes from middle layers
        self._code = 0
        self._backward = False
        self._looped = 0  # the layer whose tensor the last operation outside the layers had, if any had one since
        # {module in a layer: DATA code of that layer}. Weak: another module may get the address of one that is gone.
        self._owner: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._enter_hooks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._last_hooks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._scale: float | None = None  # full depth over few layers, of the size of the operation under way
        self.is_shrunk = False  # whether a module has a config with few layers

    # ------------------------------------------------------------------ when
    @property
    def last_code(self) -> int:
        """The code that was set last, which may have ended with its backward."""
        return self._code

    def code(self) -> int:
        """The code of the current layer, 0 outside all layers."""
        if self._backward and not in_backward():
            self.set(0)
        return self._code

    def set(self, code: int, *, backward: bool = False) -> None:
        if code != self._code:
            if self.clock is not None:
                self.clock.cut()
            self._code, self._looped = code, 0
        self._backward = backward

    def module_registered(self, parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        """torch's hook on every `parent.name = child`: finds stacks of layers, and modules added to a layer later."""
        if child is None:
            return
        owner = self._owner.get(parent)
        if owner is not None:
            self._own(child, owner)
        stack = stack_of(vars(parent).get("config"))
        self.is_shrunk |= stack is not None
        if stack is None or not isinstance(child, torch.nn.ModuleList) or len(child) != len(stack.kept):
            return
        if child[0] in self._owner:
            return
        with own_work():
            known = next((code for part in child[0].modules() if (code := self._owner.get(part))), None)
        if known is None:
            self._add_stack(child, stack)
        else:  # the layers of a known stack, each now inside a module of FSDP1
            self._follow(child, Tag.decode(known).stack)

    def weight_registered(self, module: torch.nn.Module, weight: torch.Tensor) -> None:
        """A parameter or buffer is set in a module: where it is loaded into a layer, it is that layer's."""
        code = self._owner.get(module, 0)
        if code and not self.of(weight):
            self.give(weight, code)

    @own_work()
    def _add_stack(self, layers: torch.nn.ModuleList, stack: Stack) -> None:
        self.stacks.append(stack)
        self._follow(layers, len(self.stacks) - 1)
        layers[0].register_forward_pre_hook(partial(self._check_flags, stack, weakref.ref(layers)))
        prints = [fingerprint(layer) for layer in layers]
        middle = prints[stack.first : stack.first + stack.period * stack.traced_units]
        if any(a != b for a, b in zip(middle, middle[stack.period :], strict=False)):
            self.problem = "the layers that were built do not repeat"

    def _follow(self, layers: torch.nn.ModuleList, number: int) -> None:
        for i, layer in enumerate(layers):
            self._own(layer, Tag(DATA, number, i).encode())
            self._enter_hooks[layer] = layer.register_forward_pre_hook(partial(self._enters, number, i)).id
            layer.register_forward_hook(partial(self._leaves, number, i))
        self._last_hooks[layers[-1]] = layers[-1].register_forward_hook(self._leaves_last).id

    def _check_flags(
        self, stack: Stack, layers: weakref.ref[torch.nn.ModuleList], module: torch.nn.Module, args: object
    ) -> None:
        """A training may have checkpointing for some layers only, which it says after they were built."""
        flags = [getattr(layer, "gradient_checkpointing", False) for layer in layers() or ()]
        middle = flags[stack.first : stack.first + stack.period * stack.traced_units]
        if any(a != b for a, b in zip(middle, middle[stack.period :], strict=False)):
            self.problem = "checkpointing is on in some layers only, and does not repeat with them"
        elif len(set(middle)) == 1 and len(set(flags)) > 1:
            self.problem = "checkpointing is on in some layers only, outside of those that repeat"

    @own_work()
    def _own(self, module: torch.nn.Module, code: int) -> None:
        for part in module.modules():
            self._owner[part] = code
        for tensor in (*module.parameters(), *module.buffers()):
            self.give(tensor, code)

    def _enters(self, stack: int, layer: int, module: torch.nn.Module, args: object) -> None:
        backward = in_backward()
        self.set(Tag(BACKWARD if backward else FORWARD, stack, layer).encode(), backward=backward)

    def outermost(self, module: torch.nn.Module) -> None:
        """Let hooks that others have put on a layer by now (FSDP gathers its weights) run as part of the layer."""
        if module in self._enter_hooks:
            _ordered(module._forward_pre_hooks).move_to_end(self._enter_hooks[module], last=False)
        if module in self._last_hooks:
            _ordered(module._forward_hooks).move_to_end(self._last_hooks[module])

    def _leaves(self, stack: int, layer: int, module: torch.nn.Module, args: object, out: object) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled():
            code = Tag(BACKWARD, stack, layer).encode()
            hidden.register_hook(lambda grad: self.set(code, backward=True))

    def _leaves_last(self, module: torch.nn.Module, args: object, out: object) -> None:
        if not in_backward():
            self.set(0)

    # ------------------------------------------------------------------ whose
    def give(self, tensor: torch.Tensor, code: int) -> None:
        """Attribute a tensor, wherever it is, to the layer of `code`."""
        cast("Any", tensor)._autofit_layer = code
        if self.host is not None:
            self.host.give(tensor, code)
        index = self.memory.index_of(tensor)
        if index is not None:
            self.memory.allocations[index].layer = code

    def lend(self, view: torch.Tensor, code: int) -> None:
        """Attribute a view of a tensor of several layers to the layer of `code`, leaving its base as it is."""
        cast("Any", view)._autofit_layer = code

    def of(self, tensor: torch.Tensor) -> int:
        index = self.memory.index_of(tensor)
        if index is not None and self.memory.allocations[index].layer:
            return self.memory.allocations[index].layer
        given = cast("int", getattr(tensor, "_autofit_layer", 0))
        return self.host.layer_of(tensor) if not given and index is None and self.host is not None else given

    def follow(self, args: Sequence[object], out: object) -> None:
        """Attribute the outputs of an operation outside the layers to the layer of its inputs."""
        if isinstance(out, torch.Tensor):
            self._inherit(out, args)
        elif isinstance(out, (list, tuple)):
            several = args[0] if args and isinstance(args[0], (list, tuple)) else None
            for made, source in zip(out, several or (None,) * len(out), strict=False):
                if not isinstance(made, torch.Tensor):
                    continue
                if several is None:
                    self._inherit(made, args)
                elif isinstance(source, torch.Tensor) and not self.of(made) and (code := self.of(source)):
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
                if source in self.shares and argument.numel() == out.numel() and self._is_whole(argument, source):
                    scale = out.element_size() / argument.element_size()
                    self.shares[index] = {k: int(v * scale) for k, v in self.shares[source].items()}

    def _is_whole(self, tensor: torch.Tensor, index: int) -> bool:
        """True if a tensor is all of its storage; False for a part that DDP copies back out of a flat buffer."""
        return tensor.numel() * tensor.element_size() == self.memory.allocations[index].nbytes

    def _add_shares(self, index: int, parts: Sequence[object]) -> None:
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        found = [(self.of(tensor), tensor.numel() * tensor.element_size()) for tensor in tensors]
        owners = {code for code, _ in found if code}
        if len(owners) == 1:  # a layer's own weights in one tensor
            self.memory.allocations[index].layer = owners.pop()
        elif shares := self._of_middle_layers(found):
            self.shares[index] = shares

    def share_evenly(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        """Note that an allocation has the same number of bytes for each of the tensors."""
        each = self.memory.allocations[index].nbytes // len(tensors)
        if shares := self._of_middle_layers([(self.of(tensor), each) for tensor in tensors]):
            self.shares[index] = shares

    def own_states(self, states: Sequence[tuple[object, torch.Tensor]]) -> None:
        """Attribute an optimizer's tensors, made from sizes alone (scales of 8 bits), to the layer of their parameter.

        `states`: each (parameter, tensor). What several parameters share (a code table) is of no layer.
        """
        times = Counter(id(state) for _, state in states)
        for parameter, state in states:
            code = self.of(parameter) if isinstance(parameter, torch.Tensor) else 0
            if code and times[id(state)] == 1 and not self.of(state):
                self.give(state, code)

    # ------------------------------------------------------------------ several layers in one tensor
    def several(self, weights: Iterable[torch.Tensor]) -> list[int]:
        """The code of each of the `weights`, 0 outside the layers; [] if they are of one layer or of no middle one."""
        codes = [self.of(weight) for weight in weights]
        return codes if len({*codes} - {0}) > 1 and any(map(self._is_middle, codes)) else []

    @contextmanager
    def together(self, weights: Sequence[tuple[int, int]], *, in_one: bool = False) -> Iterator[None]:
        """Inside, operations are on all `weights`, (code, elements) of each; `in_one`: so are tensors made there."""
        first, elements = len(self.memory.allocations), sum(count for _, count in weights)
        parts = self._of_middle_layers(weights)
        self._scale = 1 + sum(n * (self.stacks[stack].growth - 1) for stack, n in parts.items()) / elements
        try:
            yield
        finally:
            self._scale = None
        for index in range(first, len(self.memory.allocations)) if in_one else ():
            nbytes = self.memory.allocations[index].nbytes
            self.shares[index] = {stack: nbytes * n // elements for stack, n in parts.items()}

    def _of_middle_layers(self, parts: Iterable[tuple[int, int]]) -> dict[int, int]:
        """{stack: the sum of its middle layers' counts}, from (code, count) of each part."""
        sums: dict[int, int] = {}
        for code, count in parts:
            if self._is_middle(code):
                stack = Tag.decode(code).stack
                sums[stack] = sums.get(stack, 0) + count
        return sums

    def _is_middle(self, code: int) -> bool:
        return bool(code) and self.stacks[(tag := Tag.decode(code)).stack].unit(tag.layer) is not None

    def growth(self, args: Sequence[object]) -> tuple[float, float]:
        """Factors for the launches and the kernel time of an operation outside the layers, at full depth."""
        if self._scale is not None:
            return 1.0, self._scale
        first = args[0] if args else None
        if not isinstance(first, (list, tuple)):
            codes = [code for argument in args if isinstance(argument, torch.Tensor) and (code := self.of(argument))]
            if self._looped not in codes:  # a running sum over the layers may have the code of an earlier one
                self._looped = max(codes, key=self.growth_of, default=self._looped)
            growth = self.growth_of(self._looped)
            return growth, growth
        total = grown = 0.0
        for tensor in first:
            if isinstance(tensor, torch.Tensor):
                nbytes = tensor.numel() * tensor.element_size()
                total, grown = total + nbytes, grown + nbytes * self.growth_of_tensor(tensor)
        return 1.0, grown / total if total else 1.0

    def at_full_depth(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Places of `tensors` in the order of the full model: those of the middle layers are there more than once.

        The units that were not built come beside the first of those that were. Tensors of one unit alone, as FSDP1
        sends a layer's, are those of one unit of the full model too.
        """
        units, found = [self._unit(each) for each in tensors], list[int]()
        seen = set(units)
        for (stack, unit), group in groupby(range(len(tensors)), key=units.__getitem__):
            places = list(group)
            found += places
            if unit == 0 and (stack, 1) in seen:
                found += places * (self.stacks[stack].units - self.stacks[stack].traced_units)
        return found

    def _unit(self, tensor: torch.Tensor) -> tuple[int, int | None]:
        """(stack, middle unit) of the layer of a tensor; (0, None) outside the middle layers."""
        code = self.of(tensor)
        if not self._is_middle(code):
            return 0, None
        tag = Tag.decode(code)
        return tag.stack, self.stacks[tag.stack].unit(tag.layer)

    def period_of(self, code: int) -> int:
        """Number of layers in the unit of the layer `code`; 0 outside the middle layers."""
        return self.stacks[Tag.decode(code).stack].period if self._is_middle(code) else 0

    def growth_of(self, code: int) -> float:
        """Number of tensors at full depth for one of the layer `code`."""
        return self.stacks[Tag.decode(code).stack].growth if self._is_middle(code) else 1.0

    def growth_of_module(self, module: torch.nn.Module) -> float:
        """Number of modules at full depth for this one."""
        return self.growth_of(self._owner.get(module, 0))

    def growth_of_tensor(self, tensor: torch.Tensor) -> float:
        """Number of tensors at full depth for this one."""
        return self.growth_of(self.of(tensor))


def _ordered(hooks: object) -> OrderedDict[int, object]:
    return cast("OrderedDict[int, object]", hooks)
