"""Several cards: this process is one rank of a fake process group, and the simulated memory is that rank's.

Use `torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)` before the block. FSDP2's
Python code runs unchanged. DDP's C++ reducer reads the memory of gradients, so a Python class with the same buckets
replaces it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import LayerRecorder
from autofit.fakegpu.depth.stack import LongerPatternError
from autofit.fakegpu.known_values import INTEGER_LIMIT, Shadows
from autofit.fakegpu.patches.cuda_api import FakeStream, always
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.patches.reducer import BucketReducer, SilentLogger, broadcast_in_flat_buffers
from autofit.fakegpu.tracer import Tracer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def data_parallel(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    import torch.distributed as distributed

    reason = "it reads tensors' memory from C++"
    reducer = type("Reducer", (BucketReducer,), {"layers": gpu.layers, "mark": staticmethod(gpu.memory.mark)})
    yield distributed, "Reducer", reducer, reason
    yield distributed, "Logger", SilentLogger, reason
    broadcast = partial(broadcast_in_flat_buffers, gpu.layers, untouched(vars(distributed)["_broadcast_coalesced"]))
    yield distributed, "_broadcast_coalesced", broadcast, "few layers stand for many"
    yield module, "_get_device_index", always(0), "a rank sees one card, whatever its number"
    yield module, "_verify_param_shape_across_processes", lambda *args, **kwargs: None, reason


# ---------------------------------------------------------------------- what collectives return
def collectives(gpu: FakeGpu) -> Iterable[Target]:
    """Give the results of collectives the values that they have where every rank holds those of this one."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ops, values = torch.ops.c10d, _RankValues(gpu.tracer.shadows)
    gpu.tracer.shadows.followers.update({
        ops.allreduce_.default: values.reduced, ops.reduce_.default: values.reduced,
        ops.broadcast_.default: values.kept, ops.barrier.default: values.kept,
        ops.allgather_.default: values.gathered_lists, ops.gather_.default: values.gathered_lists,
        ops._allgather_base_.default: values.gathered,
    })  # fmt: skip
    from torch.distributed import distributed_c10d as module

    given: list[object] = []
    to_tensor = cast("Callable[..., object]", untouched(module._object_to_tensor))

    def object_to_tensor(value: object, *args: object) -> object:
        given[:] = [value]
        return to_tensor(value, *args)

    def tensor_to_object(*args: object) -> object:
        return copy.deepcopy(given[0]) if given else None

    address = partial(_address, untouched(torch.Tensor.data_ptr))
    yield torch.Tensor, "data_ptr", address, "accelerate knows parameters by it"
    reason = "an object of another rank is a copy of this rank's"
    yield module, "_object_to_tensor", object_to_tensor, reason
    yield module, "_tensor_to_object", tensor_to_object, reason


def _address(original: Callable[[torch.Tensor], int], tensor: torch.Tensor) -> int:
    if not isinstance(tensor, FakeTensor):
        return original(tensor)
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset()) * tensor.element_size()


class _RankValues:
    """Known values of the results of collectives."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def kept(self, args: Sequence[object]) -> None:
        """A broadcast leaves what this rank has."""

    def reduced(self, args: Sequence[object]) -> None:
        """A sum is that of equal values; any other reduction of equal values is one of them."""
        group, operation = cast("ProcessGroup", args[1]), str(getattr(args[2], "op", lambda: "")())
        for tensor in cast("Sequence[torch.Tensor]", args[0]):
            known = self._shadows.of(tensor)
            if known is not None and operation.endswith("SUM"):
                with unset_fake_temporarily():
                    known.mul_(group.size())

    def gathered_lists(self, args: Sequence[object]) -> None:
        for tensors, mine in zip(
            cast("Sequence[Sequence[torch.Tensor]]", args[0]), cast("Sequence[torch.Tensor]", args[1]), strict=False
        ):
            for tensor in tensors:
                self._give(tensor, mine, 1)

    def gathered(self, args: Sequence[object]) -> None:
        whole, mine = cast("torch.Tensor", args[0]), cast("torch.Tensor", args[1])
        self._give(whole, mine, whole.numel() // max(mine.numel(), 1))

    def _give(self, whole: torch.Tensor, mine: torch.Tensor, times: int) -> None:
        known = self._shadows.of(mine)
        if known is None or whole.numel() > INTEGER_LIMIT:
            self._shadows.give(whole, None)
            return
        with unset_fake_temporarily():
            self._shadows.give(whole, known.reshape(-1).repeat(times).view(tuple(whole.shape)), fresh=True)


def waits_for_collectives(gpu: FakeGpu) -> Iterable[Target]:
    """A wait for an asynchronous collective is one for all of them so far, of which it is mostly the last."""
    if not torch.distributed.is_available():
        return
    from torch._C._distributed_c10d import FakeWork, Work

    for owner in (Work, FakeWork):
        if "wait" in vars(owner):
            waiting = partial(_waiting, gpu, untouched(owner.wait))
            yield owner, "wait", waiting, "a stream must wait on the simulated clock"


def _waiting(gpu: FakeGpu, original: Callable[..., bool], work: object, *args: object, **kwargs: object) -> bool:
    gpu.clock.wait(gpu.memory.stream, gpu.clock.communicated())
    return original(work, *args, **kwargs)


def sharding_propagation(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Do not track DTensor's shape propagation, which runs operations on fakes of the full, unsharded size."""
    owner = module.ShardingPropagator
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if name in vars(owner):
            untracked = partial(_untracked, gpu.tracer, untouched(vars(owner)[name]))
            yield owner, name, untracked, "its fakes are no memory of the card"


def sharded_layers(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Count FSDP's gathering of a layer's weights, which hooks do, as part of the layer."""
    original = untouched(module.FSDPState.init)

    def init(state: object, modules: Sequence[torch.nn.Module], *args: object) -> None:
        original(state, modules, *args)
        if gpu.layers is not None:
            for each in modules:
                gpu.layers.outermost(each)

    yield module.FSDPState, "init", init, "its hooks run around the layer's"


def flat_shards(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Categorise a rank's share of FSDP1's flat parameters as weights."""
    owner = module.FlatParamHandle
    shard = partial(_then, gpu, untouched(owner.shard), lambda handle: handle.flat_param, "weights")
    yield owner, "shard", shard, "names the weights in the timeline"


def parameter_shards(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Categorise a rank's share of FSDP2's parameters as weights, and what it keeps between two micro-batches."""
    owner = module.FSDPParam
    init = partial(_then, gpu, untouched(owner._init_sharded_param), lambda share: share._sharded_param_data, "weights")
    yield owner, "_init_sharded_param", init, "names the weights in the timeline"
    kept = partial(_then, gpu, untouched(owner.to_accumulated_grad_if_needed), _kept_gradient, "gradients")
    yield owner, "to_accumulated_grad_if_needed", kept, "names the whole gradients in the timeline"


def _kept_gradient(share: Any) -> torch.Tensor | None:
    """The whole gradient that FSDP2 holds for a parameter while gradients are not reduced."""
    if (kept := share.unsharded_accumulated_grad) is None:
        kept = getattr(getattr(share, "_unsharded_param", None), "grad", None)  # a share may never have been gathered
    return cast("torch.Tensor | None", kept)


def _then(
    gpu: FakeGpu, original: Callable[..., object], made: Callable[[Any], torch.Tensor | None], category: str,
    owner: object, *args: object, **kwargs: object,
) -> None:  # fmt: skip
    """`original`, after which what it has made is of this category."""
    original(owner, *args, **kwargs)
    if (tensor := made(owner)) is not None:
        gpu.memory.mark(tensor, category)


def _untracked(tracer: Tracer, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    before, tracer.paused = tracer.paused, True
    try:
        return original(*args, **kwargs)
    finally:
        tracer.paused = before


# Models that FSDP shards whole, with several layers in one group, as TRL does with a reference model under FSDP2.
#
# All layers are gathered at once there: a run with few of them must count all in the flat buffer.

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


def flat_gradients(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let the gradient of a flat parameter lie in the pool of the stream in which its weights were gathered.

    Autograd computes each node in the stream of its forward, and the views of gathered weights are made in that stream.
    """
    owner = module.FlatParamHandle
    views = untouched(vars(owner)["_use_unsharded_views"])
    gradients = untouched(vars(owner)["_use_unsharded_grad_views"])

    def use_views(handle: Any, as_params: bool) -> None:
        views(handle, as_params)
        if gpu.memory.stream and not as_params:
            stream = FakeStream(stream_id=gpu.memory.stream)
            setattr(handle, _STREAM, stream)
            made = (vars(each).get(called) for called, each, _ in handle.flat_param._param_infos)
            _computed_in(stream, [view.grad_fn for view in made if view is not None])

    def use_gradients(handle: Any) -> None:
        with getattr(handle, _STREAM, nullcontext()):
            gradients(handle)

    yield owner, "_use_unsharded_views", use_views, "a simulated backward knows no streams"
    yield owner, "_use_unsharded_grad_views", use_gradients, "a simulated backward knows no streams"


_STREAM = "autofit_stream"  # of a flat parameter, and in a node's metadata: a backward uses its forward's views again


def _computed_in(stream: FakeStream, nodes: list[Any]) -> None:
    """Let autograd's `nodes`, and those behind them but the leaves', allocate in the pool of `stream`."""

    def begins(_: object) -> None:
        stream.__enter__()

    def ends(*_: object) -> None:
        stream.__exit__()

    while nodes:
        node = nodes.pop()
        if node is None or not node.next_functions or _STREAM in node.metadata:
            continue
        node.metadata[_STREAM] = stream
        node.register_prehook(begins)
        node.register_hook(ends)
        nodes += [behind for behind, _ in node.next_functions]


def fsdp1_groups(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """A flat parameter of several layers is not expanded, and one of frozen weights in units of two layers."""
    owner, name = module.FlatParamHandle, "_alloc_padded_unsharded_flat_param"
    if gpu.layers is not None:
        yield owner, "__init__", _refusing(gpu.layers, untouched(owner.__init__)), _WHY
        yield owner, name, partial(_owned, gpu.layers, untouched(vars(owner)[name])), _WHY


class _Hooks(NamedTuple):
    """What FSDP's Python takes around a sharded module with one weight, and with each further one.

    In launches on the same host, beside those of its operations (experiments/rates/fsdp_hooks.py, 2026-11-26, medians
    of four runs).
    """

    unrecorded: tuple[float, float]  # a forward without gradients
    recorded: tuple[float, float]
    before_backward: tuple[float, float]
    after_backward: tuple[float, float]

    @property
    def forward(self) -> tuple[float, float]:
        return self.recorded if torch.is_grad_enabled() else self.unrecorded


_FLAT_HOOKS = _Hooks((26, 1.9), (34, 2.1), (20, 0.3), (15, 0.5))
_FULLY_HOOKS = _Hooks((24, 2.8), (41, 3.5), (22, 3.1), (16, 2.0))
_HOOKS_WHY = "its Python takes the host's time and launches nothing"


def fsdp1_forward_hooks(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The host's time for the hooks of FSDP1 around a forward."""
    gathers = untouched(module._pre_forward_unshard)

    def gather(state: object, handle: Any) -> None:
        _work(gpu, _FLAT_HOOKS.forward, _flat_weights(handle))
        gathers(state, handle)

    yield module, "_pre_forward_unshard", gather, _HOOKS_WHY


def fsdp1_backward_hooks(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The host's time for the hooks of FSDP1 before and after a backward."""
    begins, ends = untouched(module._pre_backward_hook), untouched(module._post_backward_hook)

    def begin(state: object, owner: object, handle: Any, *args: object) -> object:
        if not getattr(handle, "_ran_pre_backward_hook", False):
            _work(gpu, _FLAT_HOOKS.before_backward, _flat_weights(handle))
        return begins(state, owner, handle, *args)

    def end(state: object, handle: Any, *args: object) -> object:
        _work(gpu, _FLAT_HOOKS.after_backward, _flat_weights(handle))
        return ends(state, handle, *args)

    yield module, "_pre_backward_hook", begin, _HOOKS_WHY
    yield module, "_post_backward_hook", end, _HOOKS_WHY


def fsdp2_hooks(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """The host's time for the hooks of FSDP2."""
    owner, hooks = module.FSDPParamGroup, _FULLY_HOOKS
    for name, cost in (
        ("pre_forward", lambda: hooks.forward), ("pre_backward", lambda: hooks.before_backward),
        ("post_backward", lambda: hooks.after_backward),
    ):  # fmt: skip
        yield owner, name, partial(_working, gpu, untouched(vars(owner)[name]), cost), _HOOKS_WHY


def _working(
    gpu: FakeGpu, original: Callable[..., object], cost: Callable[[], tuple[float, float]], group: Any, *args: object,
    **kwargs: object,
) -> object:  # fmt: skip
    before = group._training_state
    found = original(group, *args, **kwargs)
    if group._training_state is not before:  # else it was here already, for another of the module's outputs
        _work(gpu, cost(), len(group.fsdp_params), deep=_at_full_depth(gpu, group))
    return found


def _flat_weights(handle: Any) -> int:
    return int(handle.flat_param._num_params) if handle else 0


def _at_full_depth(gpu: FakeGpu, group: Any) -> float:
    """The weights of a group of FSDP2 in a run with all layers; one around several layers has more then."""
    weights = group.fsdp_params
    if gpu.layers is None or not _is_whole(weights):
        return len(weights)
    return sum(gpu.layers.growth_of(weight._autofit_layer) for weight in weights)


def _work(gpu: FakeGpu, cost: tuple[float, float], weights: int, *, deep: float | None = None) -> None:
    first, further = cost
    if weights:
        few, all_ = (round(first + further * (count - 1)) for count in (weights, deep or weights))
        gpu.clock.host_work(few, deep=all_)


def _owned(layers: LayerRecorder, original: Callable[..., torch.Tensor], handle: Any) -> torch.Tensor:
    whole = original(handle)
    if not layers.code() and (code := layers.of(handle.flat_param)):  # all layers are gathered, one by one
        layers.give(whole, code)
    return whole


def _refusing(layers: LayerRecorder, original: Callable[..., None]) -> Callable[..., None]:
    trained = set[int]()  # layers in which a module of its own has trained weights

    def init(handle: object, weights: Sequence[torch.Tensor], *args: object, **kwargs: object) -> None:
        if layers.several(weights):
            layers.problem = "the weights of several layers are in one flat parameter"
        elif any(weight.requires_grad for weight in weights):
            trained.update(layers.of(weight) for weight in weights)
        elif any(layers.of(weight) in trained and layers.period_of(layers.of(weight)) == 1 for weight in weights):
            # Gathered in the backward of the layer after it, given back in that of the layer before it.
            raise LongerPatternError("FSDP1 keeps what it gathered of frozen weights for a layer more in the backward")
        original(handle, weights, *args, **kwargs)

    return init
