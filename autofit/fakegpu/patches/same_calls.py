"""Play a rollout, a gradient-free pass or a micro-batch like an earlier one from that one's events.

A call is recorded: its allocations and frees, its time segments and its kernels. A later call with the same inputs and
a model in the same state has the same ones, if the recorded call left nothing behind but its outputs, the gradients
that a micro-batch makes first, and cuBLAS' workspace, which is there from then on, and gave back nothing of others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.clock import Clock
from autofit.fakegpu.depth.layers import LayerClock
from autofit.fakegpu.depth.stack import own_work
from autofit.fakegpu.known_values import Shadows
from autofit.fakegpu.memory import Allocation
from autofit.fakegpu.patches.redirect import untouched
from autofit.fakegpu.rates.kernels import Family

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class _Unlike(Exception):
    """The inputs of a call hold values that are incomparable with those of another."""


def if_alike_played(gpu: FakeGpu, original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of a method, of a model or its trainer, whose gradient-free calls are played."""
    known: weakref.WeakKeyDictionary[Any, dict[object, _Recorded]] = weakref.WeakKeyDictionary()

    def method(owner: Any, *args: object, **kwargs: object) -> Any:
        if gpu.skips_rollouts or not _is_alone(gpu):
            return original(owner, *args, **kwargs)
        shadows = gpu.tracer.shadows
        try:
            of_owner = _state(owner, shadows) if isinstance(owner, torch.nn.Module) else None
            key = (_surroundings(gpu), of_owner, _described((args, kwargs), shadows))
        except _Unlike:
            return original(owner, *args, **kwargs)
        calls = known.setdefault(owner, {})
        if key in calls and gpu.tracer.workspaces:
            return calls[key].again(gpu)
        begin = _Moment.of(gpu)
        out = original(owner, *args, **kwargs)
        recorded = _Recorded.of(gpu, begin, out)
        if recorded is not None:
            calls[key] = recorded
        return out

    return method


def trl_scoring(gpu: FakeGpu, module: ModuleType) -> Iterable[tuple[object, str, object, str]]:
    """Patches of the trainers of `module`: gradient-free log-probabilities of a rollout."""
    for trainer in (value for value in vars(module).values() if isinstance(value, type)):
        original = vars(trainer).get("_get_per_token_logps_and_entropies")
        if original is None:
            continue
        original = untouched(original)
        once = if_alike_played(gpu, original)

        def scored(*args: object, original: Any = original, once: Any = once, **kwargs: object) -> Any:
            return (original if torch.is_grad_enabled() else once)(*args, **kwargs)

        yield trainer, "_get_per_token_logps_and_entropies", scored, "a pass like one before is played"


def trl_order(gpu: FakeGpu, module: ModuleType) -> Iterable[tuple[object, str, object, str]]:
    """Patch of TRL's shuffle of a rollout's samples: in a probe the first one, the longest, comes second.

    The order is drawn, so any is as likely; micro-batches of one order are alike. Where a micro-batch is one sample,
    the longest, which has no padding, is then trained beside the gradients of another: that holds more.
    """
    if not hasattr(module, "shuffle_sequence_dict"):  # 0.14 and 0.19 have none
        return
    original = untouched(module.shuffle_sequence_dict)

    def shuffle_sequence_dict(samples: object) -> object:
        if not gpu.plays_micro_batches:
            return original(samples)
        with mock.patch.object(torch, "randperm", lambda n: torch.tensor([*range(n)[:2][::-1], *range(2, n)])):
            return original(samples)

    yield module, "shuffle_sequence_dict", shuffle_sequence_dict, "micro-batches of samples in one order are alike"


_LIBRARIES = ("trl.", "transformers.")  # whose trainers are known


class _Known(Exception):
    """The micro-batch whose inputs are there is like one before."""


def transformers_training(gpu: FakeGpu, module: ModuleType) -> Iterable[tuple[object, str, object, str]]:
    """Patch of transformers' trainer: forward and backward of a micro-batch, once its inputs are there.

    The trainer's own metrics are those of the micro-batches that are traced.
    """
    original = untouched(module.Trainer.training_step)
    known: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()

    def training_step(trainer: Any, model: torch.nn.Module, inputs: object, *args: object, **kwargs: object) -> Any:
        if not _may_play(gpu, trainer):
            return original(trainer, model, inputs, *args, **kwargs)
        batch = _MicroBatch(gpu, trainer, model, (args, kwargs), known.setdefault(trainer, {}))
        with contextlib.suppress(_Known), batch.told_of_inputs():
            return batch.recorded(original(trainer, model, inputs, *args, **kwargs))
        return batch.again()

    yield module.Trainer, "training_step", training_step, "a micro-batch like one before is played"


def _may_play(gpu: FakeGpu, trainer: Any) -> bool:
    """True if micro-batches of `trainer` may be played: one of a library, which computes the same in each step.

    One that someone derived from it may do otherwise, unless its own class says `steps_alike`.
    """
    kind = type(trainer)
    same_steps = kind.__module__.startswith(_LIBRARIES) or vars(kind).get("steps_alike", False)
    return same_steps and gpu.plays_micro_batches and _is_alone(gpu) and not trainer.args.torch_empty_cache_steps


_Place = tuple[torch.nn.Module, str]  # an attribute of a module
_Calls = dict[object, "tuple[_Recorded, list[_Place]]"]  # by what decides it: a call, and the attributes that it renews


class _MicroBatch:
    """A micro-batch of a trainer: played, if one before is like it, else recorded among the `calls`."""

    def __init__(self, gpu: FakeGpu, trainer: Any, model: torch.nn.Module, more: object, calls: _Calls) -> None:
        self._gpu, self._trainer, self._more, self._calls = gpu, trainer, more, calls
        parts = (model, *vars(trainer).values())
        self._models = list({id(part): part for part in parts if isinstance(part, torch.nn.Module)}.values())
        with own_work():
            self._weights = list(model.parameters())
        self._without: list[torch.nn.Parameter] = []  # weights without a gradient at the begin
        self._inputs: list[int] = []  # allocations
        self._held: dict[_Place, int] = {}  # those of tensors that modules keep, by their names
        self._states: object = None
        self._key: object = None
        self._began: _Moment | None = None

    @contextlib.contextmanager
    def told_of_inputs(self) -> Iterator[None]:
        """Context in which the trainer reports its prepared inputs, and is stopped by _Known if they are known."""
        prepare, own = self._trainer._prepare_inputs, vars(self._trainer).get("_prepare_inputs")

        def prepared(*args: object, **kwargs: object) -> object:
            inputs = prepare(*args, **kwargs)
            self._begin(inputs)
            return inputs

        self._trainer._prepare_inputs = prepared
        try:
            yield
        finally:
            del self._trainer._prepare_inputs
            if own is not None:
                self._trainer._prepare_inputs = own

    def _begin(self, inputs: object) -> None:
        if any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in self._weights):
            return  # such as an optimizer at work within the backward
        self._without = [weight for weight in self._weights if weight.grad is None]
        has_gradient = tuple(weight.grad is not None for weight in self._weights)
        self._states = self._states_now()
        try:
            told = _described((self._more, inputs), self._gpu.tracer.shadows)
        except _Unlike:
            return
        self._key = _surroundings(self._gpu), self._states, has_gradient, told
        known = self._calls.get(self._key) if self._gpu.tracer.workspaces else None
        memory, tensors = self._gpu.memory, list(_tensors(inputs))
        if known is not None:
            tensors += [getattr(module, name) for module, name in known[1]]
        on_card = [(tensor, index) for tensor in tensors if (index := memory.index_of(tensor)) is not None]
        self._inputs = [index for _, index in on_card]
        if known is not None:
            given_back = known[0].given_back
            for (tensor, _), number in zip(on_card, known[0].inputs, strict=True):
                if number in given_back:
                    memory.disown(tensor)
            raise _Known
        self._held = self._held_now()
        self._began = _Moment.of(self._gpu)

    def _held_now(self) -> dict[_Place, int]:
        """Allocations of tensors that are plain attributes of modules, such as positions from the last forward."""
        with own_work():
            found = [
                ((part, name), self._gpu.memory.index_of(value))
                for model in self._models for part in model.modules() for name, value in vars(part).items()
                if isinstance(value, torch.Tensor)
            ]  # fmt: skip
        return {place: index for place, index in found if index is not None}

    def _states_now(self) -> object:
        return tuple((id(model), _state(model, self._gpu.tracer.shadows)) for model in self._models)

    def recorded(self, loss: Any) -> Any:
        """`loss`, which the micro-batch has returned."""
        if self._began is not None:
            held = self._held_now()
            renewed = [place for place, index in held.items() if self._held.get(place, index) != index]
            made = (loss, *(weight.grad for weight in self._without), *(getattr(*place) for place in renewed))
            given = [*self._inputs, *(self._held[place] for place in renewed)]
            recorded = _Recorded.of(self._gpu, self._began, made, given)
            if recorded is not None and self._states_now() == self._states:
                self._calls[self._key] = recorded, renewed
        return loss

    def again(self) -> Any:
        """The loss of the micro-batch, after it was played."""
        call, renewed = self._calls[self._key]
        loss, *made = call.again(self._gpu, self._inputs)
        for weight, gradient in zip(self._without, made, strict=False):
            weight.grad = gradient
        for (module, name), tensor in zip(renewed, made[len(self._without) :], strict=True):
            setattr(module, name, tensor)
        return loss


def _tensors(inputs: object) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, (list, tuple, Mapping)):
        for each in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(each)


def _is_alone(gpu: FakeGpu) -> bool:
    """True if the card computes by itself, on one stream, with all operations uncompiled."""
    tracer = gpu.tracer
    return not (tracer.paused or tracer.groups or tracer.host or tracer.fusion or gpu.memory.stream)


def _surroundings(gpu: FakeGpu) -> object:
    log = gpu.clock.log
    return (
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_inference_mode_enabled(),
        torch.get_default_dtype(), torch.backends.cuda.matmul.fp32_precision, gpu.clock.asleep, gpu.memory.category,
        log.place() if log is not None else None,
    )  # fmt: skip


@own_work()
def _state(model: torch.nn.Module, shadows: Shadows) -> object:
    """State that decides the code of a model: its modules' plain values, hooks and replaced forwards, its weights."""
    config = getattr(model, "config", None)
    parts = [
        (type(part), _plain_values(vars(part)), _code(vars(part).get("forward")), _hooks(part._forward_pre_hooks),
         _hooks(part._forward_hooks), _hooks(part._backward_pre_hooks), _hooks(part._backward_hooks))
        for part in model.modules()
    ]  # fmt: skip
    tensors = [(t.shape, t.dtype, t.device, t.requires_grad) for t in (*model.parameters(), *model.buffers())]
    known = tuple(_known(buffer, shadows) for buffer in model.buffers())
    return tuple(parts), tuple(tensors), known, _plain_values(vars(config)) if config is not None else ()


_COMPUTES_NOTHING = "make_inputs_require_grads"  # TRL puts one more on after each rollout


def _hooks(hooks: Mapping[int, object]) -> object:
    """Hooks of a kind, in any order, and how many of each."""
    if not hooks:
        return None
    counts = Counter(map(_code, hooks.values()))
    inert = {_code(hook) for hook in hooks.values() if getattr(hook, "__name__", "") == _COMPUTES_NOTHING}
    return frozenset((code, code in inert or count) for code, count in counts.items())


def _code(function: object) -> object:
    """Code of a hook or a replaced forward, and the values it was made with."""
    if isinstance(function, partial):
        return _code(function.func), tuple(map(_told, function.args)), tuple(map(_told, function.keywords.values()))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return _told(function)
    cells = getattr(function, "__closure__", None) or ()
    return code, _told(getattr(function, "__self__", None)), tuple(_told(_content(cell)) for cell in cells)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet given a value
        return None


def _told(value: object) -> object:
    """A value that a function was made with as a key: plain ones are equal, others the same."""
    return (type(value), _hashable(value)) if _is_plain(value) else id(value)


def _plain_values(values: Mapping[str, object]) -> tuple[object, ...]:
    return tuple((name, _hashable(value)) for name, value in values.items() if _is_plain(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple, set)) else value


def _described(value: object, shadows: Shadows) -> object:
    """Inputs as a key: shapes and known values of tensors, and settings. Raises _Unlike."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, shadows)
    if isinstance(value, (list, tuple)):
        return tuple(_described(each, shadows) for each in value)
    if isinstance(value, Mapping):
        return tuple((name, _described(each, shadows)) for name, each in value.items())
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return id(value), _state(value, shadows)
    if type(value).__name__ == "GenerationConfig":
        return _described(value.to_dict(), shadows)  # type: ignore[attr-defined]
    raise _Unlike


def _known(tensor: torch.Tensor, shadows: Shadows) -> bytes | None:
    """The known values of a tensor."""
    shadow = shadows.of(tensor)
    if shadow is None:
        return None
    with _disable_current_modes():
        return bytes(shadow.contiguous().view(-1).view(torch.uint8).numpy().data)


def _tensor(tensor: torch.Tensor, shadows: Shadows) -> object:
    rest = tuple(getattr(tensor, f"_autofit_{name}", None) for name in ("truth", "most"))
    if hasattr(tensor, "_autofit_one_hot"):
        raise _Unlike
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, _known(tensor, shadows), rest


_COUNTERS = ("flops", "bytes_moved", "kernel_count", "exposed_s", "skipped_s")


@dataclass(frozen=True, slots=True)
class _Moment:
    """A card before or after a call."""

    event: int
    allocation: int
    backward: int  # number of backward passes so far
    stretch: int
    others: tuple[float, ...]  # state that a call must keep: memory given back, tensors of several layers, lanes
    now_s: float
    counters: tuple[float, ...]
    busy_s: Mapping[Family, float]
    counted: Any  # by a listener of the clock

    @classmethod
    def of(cls, gpu: FakeGpu) -> _Moment:
        clock, memory = gpu.clock, gpu.memory
        return cls(
            event=len(memory.log), allocation=len(memory.allocations), backward=len(gpu.backward_starts),
            stretch=clock.cut() if isinstance(clock, LayerClock) else 0,
            others=(
                len(memory.log.emptied), len(memory.phase_marks),
                len(gpu.layers.shares) if gpu.layers is not None else 0,
                clock.copies_s, clock.gathers_s, clock.reductions_s,
            ),
            now_s=clock.now_s, counters=tuple(getattr(clock, name) for name in _COUNTERS), busy_s=dict(clock.busy_s),
            counted=clock.log.counted() if clock.log is not None else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a call returned: its place in one of the call's allocations, and its known values."""

    allocation: int
    elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    values: torch.Tensor | None

    @classmethod
    def of(cls, gpu: FakeGpu, tensor: torch.Tensor) -> _Output | None:
        """The output for `tensor`, if it is on the card."""
        index, nbytes = gpu.memory.index_of(tensor), tensor.untyped_storage().nbytes()
        if type(tensor) is not FakeTensor or index is None or nbytes % tensor.element_size():
            return None
        return cls(
            index, nbytes // tensor.element_size(), tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()),
            tensor.dtype, tensor.device, _copied(gpu.tracer.shadows.of(tensor)),
        )  # fmt: skip

    def again(self, gpu: FakeGpu, allocation: int) -> torch.Tensor:
        gpu.tracer.paused = True
        try:
            base = torch.empty(self.elements, dtype=self.dtype, device=self.device)
            out = base.as_strided(self.shape, self.stride, self.offset)
        finally:
            gpu.tracer.paused = False
        gpu.memory.adopt(out, allocation)
        gpu.tracer.shadows.give(out, _copied(self.values), fresh=True)
        return out


Event = tuple[int, int, Allocation | None]  # allocation, layer at work, and the new allocation; None: it was freed


def events_since(gpu: FakeGpu, begin: int) -> list[Event]:
    """Allocations and frees from event number `begin` on."""
    memory, log = gpu.memory, gpu.memory.log
    return [
        (number, tag, memory.allocations[number] if nbytes > 0 else None)
        for number, nbytes, tag in zip(log.ids[begin:], log.nbytes[begin:], log.tags[begin:], strict=True)
    ]


def play(gpu: FakeGpu, events: Sequence[Event], given: Mapping[int, int]) -> dict[int, int]:
    """Take and give back the same again; {allocation of then: that of now} of those that stay.

    `given` is that of allocations from before the events, which they may give back.
    """
    memory, layers, numbers = gpu.memory, gpu.layers, dict(given)
    try:
        for number, tag, template in events:
            if layers is not None:
                layers.set(tag)
            if template is None:
                memory.release(numbers.pop(number))
            else:
                numbers[number] = memory.allocate_again(template)
    except torch.OutOfMemoryError:
        for number in set(numbers.values()) - set(given.values()):
            memory.release(number)
        raise
    return numbers


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A call: its allocations and frees in order, its time, and its outputs."""

    begin: _Moment
    end: _Moment
    lanes_s: tuple[float, float]  # of host and card at the end
    events: Sequence[Event]
    backwards: Sequence[int]  # where in the events backward passes begin
    outputs: Sequence[_Output | None]  # None: the call returned None
    alone: bool  # True if it returned a single tensor
    inputs: Sequence[int] = ()  # allocations from before the call that it may give back

    @classmethod
    def of(cls, gpu: FakeGpu, begin: _Moment, out: object, inputs: Sequence[int] = ()) -> _Recorded | None:
        """The call that began at `begin` and ended with `out`; None if another one may differ from it.

        `inputs` are allocations that it may give back.
        """
        memory, end = gpu.memory, _Moment.of(gpu)
        parts = out if type(out) is tuple else (out,)
        outputs = [_Output.of(gpu, part) if isinstance(part, torch.Tensor) else None for part in parts]
        kept = {each.allocation for each in outputs if each is not None}
        taken = range(begin.allocation, end.allocation)
        stay = {number for number in taken if memory.allocations[number].died is None}
        workspaces = stay & set(gpu.tracer.workspaces.values())
        events = events_since(gpu, begin.event)
        ids = [id_ for id_, _, _ in events]
        if (
            stay - workspaces != kept
            or len(kept) != sum(part is not None for part in parts)
            or not all(id_ in taken or id_ in inputs for id_ in ids)
            or end.others != begin.others
            or not _is_alone(gpu)
        ):
            return None
        events = [event for event in events if event[0] not in workspaces]
        starts = [at - begin.event for at in gpu.backward_starts[begin.backward :]]
        backwards = [place - sum(id_ in workspaces for id_ in ids[:place]) for place in starts]
        lanes_s = gpu.clock.host_s, gpu.clock.gpu_s
        return cls(begin, end, lanes_s, events, backwards, outputs, type(out) is not tuple, list(inputs))

    @property
    def given_back(self) -> set[int]:
        """The inputs that the call gave back."""
        return {number for number, _, taken in self.events if taken is None} & set(self.inputs)

    def again(self, gpu: FakeGpu, inputs: Sequence[int] = ()) -> Any:
        """The outputs of the call, made once more with other inputs; allocations that it gives back stay unowned."""
        gpu.backward_starts += (len(gpu.memory.log) + place for place in self.backwards)
        try:
            numbers = play(gpu, self.events, dict(zip(self.inputs, inputs, strict=True)))
        finally:
            if gpu.layers is not None:
                gpu.layers.set(0)
        self._pass(gpu.clock)
        made = [each and each.again(gpu, numbers[each.allocation]) for each in self.outputs]
        return made[0] if self.alone else tuple(made)

    def _pass(self, clock: Clock) -> None:
        """Let the time of the call pass."""
        begin, end, now_s = self.begin, self.end, clock.now_s
        clock.host_s, clock.gpu_s = (now_s + seconds - begin.now_s for seconds in self.lanes_s)
        for name, before, after in zip(_COUNTERS, begin.counters, end.counters, strict=True):
            setattr(clock, name, getattr(clock, name) + after - before)
        for family in clock.busy_s:
            clock.busy_s[family] += end.busy_s[family] - begin.busy_s[family]
        if isinstance(clock, LayerClock):
            clock.repeat(begin.stretch, end.stretch, 1)
        if clock.log is not None:
            clock.log.again(begin.counted, end.counted)


def _copied(values: torch.Tensor | None) -> torch.Tensor | None:
    if values is None:
        return None
    with _disable_current_modes():
        return values.clone()
