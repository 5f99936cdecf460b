"""Models that FSDP shards whole, with several layers in one group, as TRL does with a reference model under FSDP2.

All layers are gathered at once there: a run with few of them must count all in the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import LayerRecorder
from autofit.fakegpu.patches.redirect import untouched

Target = tuple[object, str, object, str]
_NOTE = "a model is sharded whole, as TRL does with a reference model: all its weights are gathered at once"
_WHY = "a group may hold several layers, of which few stand for many"


def fsdp2_groups(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The gathering of a group's weights, as large as it is with all layers."""
    if (layers := gpu.layers) is None:
        return
    owner = module.FSDPParamGroup
    begin = untouched(owner.__init__)
    gather, copy_out, reduce = (untouched(vars(module)[name]) for name in _COLLECTIVES)

    def init(group: Any, weights: Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
        codes = layers.several(weights)
        begin(group, weights, *args, **kwargs)
        for parameter, code in zip(group.fsdp_params, codes, strict=False):
            parameter._autofit_layer = code

    def gathers(parameters: Sequence[Any], *args: object, **kwargs: object) -> object:
        whole = _is_whole(parameters)
        if whole:
            gpu.note(_NOTE)
        with layers.together(_weights(parameters), in_one=True) if whole else nullcontext():
            return gather(parameters, *args, **kwargs)

    def copies_out(result: object, parameters: Sequence[Any], *args: object, **kwargs: object) -> None:
        whole = _is_whole(parameters)
        with layers.together(_weights(parameters)) if whole else nullcontext():
            copy_out(result, parameters, *args, **kwargs)
        for parameter in parameters if whole else ():
            for tensor in parameter.all_gather_outputs if parameter._autofit_layer else ():
                layers.give(tensor, parameter._autofit_layer)

    def reduces(parameters: Sequence[Any], *args: object, **kwargs: object) -> object:
        if _is_whole(parameters):
            layers.problem = "the gradients of several layers are reduced at once"
        return reduce(parameters, *args, **kwargs)

    yield owner, "__init__", init, _WHY
    for name, made in zip(_COLLECTIVES, (gathers, copies_out, reduces), strict=True):
        yield module, name, made, _WHY


_COLLECTIVES = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def _is_whole(parameters: Sequence[Any]) -> bool:
    return any(getattr(parameter, "_autofit_layer", 0) for parameter in parameters)


def _weights(parameters: Sequence[Any]) -> list[tuple[int, int]]:
    """(code of its layer, elements of its padded shard) of each parameter."""
    return [(parameter._autofit_layer, parameter._sharded_param_data.numel()) for parameter in parameters]


def fsdp1_groups(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """A flat parameter of several layers is not expanded."""
    owner = module.FlatParamHandle
    if gpu.layers is not None:
        yield owner, "__init__", _refusing(gpu.layers, untouched(owner.__init__)), _WHY


def _refusing(layers: LayerRecorder, original: Callable[..., None]) -> Callable[..., None]:
    def init(handle: object, weights: Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
        if layers.several(weights):
            layers.problem = "the weights of several layers are in one flat parameter"
        original(handle, weights, *args, **kwargs)

    return init
