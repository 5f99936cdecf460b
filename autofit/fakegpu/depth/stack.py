"""Which layers of a transformers model repeat, read from its real modules; and configs with fewer of them.

The model of a config is built on the meta device: its modules, no weights. Layers are equal if their classes, plain
settings and shapes are. Whatever a config says or leaves unsaid about its layers, the modules show.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch

from autofit.fakegpu.specs import FakeGpuError

_own_blocks = [0]  # that are open


@contextmanager
def own_work() -> Iterator[None]:
    """Block in which Python that goes over modules is the simulation's own, and free on the simulated host."""
    _own_blocks[0] += 1
    try:
        yield
    finally:
        _own_blocks[0] -= 1


def is_own_work() -> bool:
    """True if such a block is open."""
    return bool(_own_blocks[0])


TRACED_UNITS = 2  # two middle units are enough to check that units repeat
_LEAST_UNITS = TRACED_UNITS + 1
_PLAN = "autofit_depth"  # name of the attribute on a shrunken config
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # names of a layer's own number

Fingerprint = tuple[object, ...]


class NotRepeatingError(FakeGpuError):
    """This run is impossible to expand: its layers, or the events of its layers, fail to repeat."""


class LongerPatternError(NotRepeatingError):
    """The same of this run, while one whose units have two layers or more may repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layout of a shrunken model: `first` layers, then `traced_units` units of `period` layers, then the last layers.

    A unit is one repeating layer, or one repeating pattern such as five sliding-window layers and a full one.
    """

    first: int
    period: int
    units: int
    layers: int
    traced_units: int = TRACED_UNITS

    @property
    def growth(self) -> float:
        """Ratio of full-depth middle units to traced ones."""
        return self.units / self.traced_units

    def unit(self, layer: int) -> int | None:
        """The middle unit of a traced layer; None for the first and last layers."""
        unit = (layer - self.first) // self.period
        return unit if layer >= self.first and unit < self.traced_units else None

    @property
    def kept(self) -> list[int]:
        """Indices of the full model's layers that the shrunken model keeps."""
        traced = self.first + self.period * self.traced_units
        last = self.first + self.period * self.units
        return [*range(traced), *range(last, self.layers)]


# ---------------------------------------------------------------------- what repeats
def plan_stack(config: Any, *, pattern: int = 1) -> Stack:
    """The smallest stack that represents a transformers text config. Raises NotRepeatingError with the reason.

    `pattern` is the number of layers after which a training treats them alike (`every_n_layers` of checkpointing).
    """
    prints, _ = _prints(config)
    numbers: dict[Fingerprint, int] = {}
    layers = [numbers.setdefault(layer, len(numbers)) for layer in prints]
    plans = [
        Stack(first=first, period=period, units=units, layers=len(layers))
        for period in range(pattern, len(layers) // _LEAST_UNITS + 1, pattern)
        for first in range(1, len(layers) - _LEAST_UNITS * period)
        if (units := _repeats(layers, first, period)) >= _LEAST_UNITS
    ]
    if not plans:
        alike = f" in patterns of {pattern}" if pattern > 1 else ""
        raise NotRepeatingError(f"the model's {len(layers)} layers do not repeat {_LEAST_UNITS} times{alike}")
    stack = min(plans, key=lambda stack: (len(stack.kept), stack.period))
    _fewer(config, stack)
    return stack


def _repeats(layers: Sequence[int], first: int, period: int) -> int:
    """Number of times that the `period` layers from `first` on follow one another; the last layer is left over."""
    equal = first
    while equal + period < len(layers) - 1 and layers[equal] == layers[equal + period]:
        equal += 1
    return (equal + period - first) // period if equal + period <= len(layers) - 1 else 0


def layer_prints(config: Any) -> list[Fingerprint]:
    """The fingerprint of each layer of a transformers text config's model. Raises NotRepeatingError if it lacks one.

    Equal layers have equal fingerprints, wherever they are.
    """
    return _prints(config)[0]


_PRINTS: dict[str, tuple[list[Fingerprint], Fingerprint]] = {}


def _prints(config: Any) -> tuple[list[Fingerprint], Fingerprint]:
    """(fingerprint of each layer, shapes of all that is outside the layers) of a text config's model."""
    key = f"{type(config).__qualname__}{config.to_json_string()}"
    if key not in _PRINTS:
        _PRINTS[key] = _read_prints(config)
    return _PRINTS[key]


@own_work()
def _read_prints(config: Any) -> tuple[list[Fingerprint], Fingerprint]:
    from transformers import AutoModel

    if not type(config).__module__.startswith("transformers."):
        raise NotRepeatingError("the model's code is not of transformers")
    plain = copy.deepcopy(config)
    plain._attn_implementation = "eager"  # every model has it, and it has the same modules
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(plain)
    except Exception as error:  # 200 architectures, each with its own errors
        what = " ".join(str(error).split())[:120]
        raise NotRepeatingError(f"the model cannot be built by itself: {type(error).__name__}: {what}") from error
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == plain.num_hidden_layers]
    if len(found) != 1:
        raise NotRepeatingError(f"the model has {len(found)} lists of {plain.num_hidden_layers} layers, not one")
    layers = list(found[0])
    owned = [id(p) for layer in layers for p in layer.parameters()]
    if len(set(owned)) < len(owned):
        raise NotRepeatingError("layers of the model share weights")
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = tuple(
        (name, type(module), _shapes(module)) for name, module in model.named_modules() if id(module) not in inside
    )
    return [fingerprint(layer) for layer in layers], outside


@own_work()
def fingerprint(layer: torch.nn.Module) -> Fingerprint:
    """Classes, shapes and plain settings of all modules in a layer, leaving out layer numbers."""
    found: list[object] = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool, type(None)))}
        settings = tuple(sorted((k, str(v)) for k, v in plain.items() if k not in _NUMBERS))
        found.append((name, type(module), settings, _shapes(module)))
    return tuple(found)


def _shapes(module: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


# ---------------------------------------------------------------------- fewer layers
def shrink(config: Any, *, traced_units: int = TRACED_UNITS, pattern: int = 1) -> Stack:
    """Reduce the layers of a transformers config in place and keep the original. Raises NotRepeatingError.

    Each layer of the reduced config's model is equal to the one that it stands for, and all else is the same.
    """
    text = text_config(config)
    stack = replace(plan_stack(text, pattern=pattern), traced_units=traced_units)
    full, few = copy.deepcopy(text), _fewer(text, stack)
    vars(text).update(vars(few))
    _FULL_CONFIGS[id(full)] = full
    setattr(text, _PLAN, asdict(stack) | {"full": id(full)})
    return stack


def _fewer(config: Any, stack: Stack) -> Any:
    """The config with the layers that `stack` keeps; raises unless its model consists of the same modules."""
    few = with_layers(config, stack.kept)
    layers, outside = _prints(config)
    if _prints(few) != ([layers[i] for i in stack.kept], outside):
        raise NotRepeatingError("the model has other modules if it has fewer layers")
    return few


def with_layers(config: Any, kept: Sequence[int]) -> Any:
    """A copy of a transformers text config with the layers numbered `kept`, as far as its lists describe them.

    Such a list has an entry for each layer, or the numbers of some layers (`moe_layers`).
    """
    few = copy.deepcopy(config)
    layers = range(config.num_hidden_layers)
    for name, values in vars(config).items():
        if not isinstance(values, (list, tuple)):
            continue
        if "layer" in name and values and all(i in layers for i in values) and sorted(set(values)) == list(values):
            setattr(few, name, type(values)(kept.index(i) for i in values if i in kept))
        elif len(values) == len(layers):
            setattr(few, name, type(values)(values[i] for i in kept))
    few.num_hidden_layers = len(kept)
    return few


@contextlib.contextmanager
def shallow_models(only: Stack | None = None, *, pattern: int = 1) -> Iterator[None]:
    """Inside, `AutoConfig.from_pretrained` returns configs with fewer layers, for models whose layers repeat.

    With `only`, that is for models of that stack, and with its `traced_units`; all other models keep their layers.
    A model of that stack which cannot have so many units raises NotRepeatingError.
    """
    from transformers import AutoConfig

    original = AutoConfig.from_pretrained

    def read(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        config = found[0] if isinstance(found, tuple) else found
        try:
            planned = plan_stack(text_config(config), pattern=pattern)
        except NotRepeatingError:
            return found
        if only is None or planned == replace(only, traced_units=TRACED_UNITS):
            shrink(config, traced_units=TRACED_UNITS if only is None else only.traced_units, pattern=pattern)
        return found

    with mock.patch.object(AutoConfig, "from_pretrained", read):
        yield


def text_config(config: Any) -> Any:
    """The config of the layers: a model of images and text has one for its language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


_FULL_CONFIGS: dict[int, Any] = {}


def stack_of(config: Any) -> Stack | None:
    """The stack of a text config, if it is a shrunken one."""
    plan = getattr(config, _PLAN, None)
    return None if plan is None else Stack(**{k: v for k, v in plan.items() if k != "full"})


def full_config(config: Any) -> Any:
    """The text config before shrinking."""
    plan = getattr(config, _PLAN, None)
    return config if plan is None else _FULL_CONFIGS[plan["full"]]


_LAYER = re.compile(r"^(?!.*vis).*\b(?:layers|h)\.(\d+)\.")  # not those of a vision tower, which keeps its layers


def stands_for(config: Any) -> dict[int, float]:
    """Number of the full model's layers that each layer of a shrunken config's model stands for; {} if it has all."""
    stack = stack_of(config)
    if stack is None:
        return {}
    prints = layer_prints(full_config(config))
    kept = [prints[number] for number in stack.kept]
    full, few = Counter(prints), Counter(kept)
    return {place: full[mine] / few[mine] for place, mine in enumerate(kept)}


def repeats(name: str, standing: Mapping[int, float]) -> float:
    """Number of the full model's parameters that the parameter of this name represents."""
    layer = _LAYER.search(name)
    return 1.0 if layer is None else standing.get(int(layer[1]), 1.0)
