"""Several cards: this process is one rank of a fake process group, and the simulated memory is that rank's.

Use `torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)` before the block. FSDP2's
Python code runs unchanged. DDP's C++ reducer reads the memory of gradients, so a Python class replaces it: the same
buckets, filled and reduced at the same moments of backward (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as distributed
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.layers import LayerRecorder
from autofit.fakegpu.depth.stack import LongerPatternError
from autofit.fakegpu.known_values import INTEGER_LIMIT, Shadows
from autofit.fakegpu.patches.cuda_api import FakeStream, always
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.tracer import Tracer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from autofit.fakegpu.depth.layers import LayerRecorder


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
    """A wait for an asynchronous collective is one for all of them so far; it is mostly the last."""
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
    """Leave DTensor's shape propagation untracked: it runs operations on fakes of the full, unsharded size."""
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
    """Categorise a rank's share of FSDP2's parameters as weights, and its gradients kept between two micro-batches."""
    owner = module.FSDPParam
    init = partial(_then, gpu, untouched(owner._init_sharded_param), lambda share: share._sharded_param_data, "weights")
    yield owner, "_init_sharded_param", init, "names the weights in the timeline"
    kept = partial(_then, gpu, untouched(owner.to_accumulated_grad_if_needed), _kept_gradient, "gradients")
    yield owner, "to_accumulated_grad_if_needed", kept, "names the whole gradients in the timeline"


def _kept_gradient(share: Any) -> torch.Tensor | None:
    """The whole gradient that FSDP2 holds for a parameter while gradients stay unreduced."""
    if (kept := share.unsharded_accumulated_grad) is None:
        kept = getattr(getattr(share, "_unsharded_param", None), "grad", None)  # a share may never have been gathered
    return cast("torch.Tensor | None", kept)


def _then(
    gpu: FakeGpu, original: Callable[..., object], made: Callable[[Any], torch.Tensor | None], category: str,
    owner: object, *args: object, **kwargs: object,
) -> None:  # fmt: skip
    """`original`, whose result is then marked with this category."""
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
    """Make the expansion refuse a flat parameter of several layers; one of frozen weights needs units of two layers."""
    owner, name = module.FlatParamHandle, "_alloc_padded_unsharded_flat_param"
    if gpu.layers is not None:
        yield owner, "__init__", _refusing(gpu.layers, untouched(owner.__init__)), _WHY
        yield owner, name, partial(_owned, gpu.layers, untouched(vars(owner)[name])), _WHY


class _Hooks(NamedTuple):
    """Time of FSDP's Python around a sharded module with one weight, and with each further one.

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


# -- DDP's reducer ----------------------------------------------------------------------------------------------------


class _Reduction:
    """Gradients that are reduced together: a bucket's, or those of a layer that stands for several."""

    def __init__(self, parts: Sequence[torch.Tensor], count: int) -> None:
        self.parts = parts  # one reduction each
        self.count = self.pending = count  # of gradients, of those that have not come yet


class BucketReducer:
    """DDP's Reducer. With `gradient_as_bucket_view`, gradients are views of the buckets; else they are copied there.

    Where few layers stand for many, the buckets are those of all layers, and each layer's gradients are reduced by
    themselves, so that the reductions repeat with the layers.
    """

    layers: LayerRecorder | None = None  # of the card, as `mark`: set by a subclass
    mark: Callable[[torch.Tensor, str], None]

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], bucket_indices: Sequence[Sequence[int]],
        bucket_size_limits: Sequence[int], process_group: ProcessGroup, expect_sparse_gradients: Sequence[bool],
        bucket_bytes_cap: int, find_unused_parameters: bool, gradient_as_bucket_view: bool = False,
        names: object = None, first_bucket_bytes_cap: int = 1 << 20, *rest: object, **options: object,
    ) -> None:  # fmt: skip
        self._parameters = parameters
        self._group = process_group
        self._limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._as_view = gradient_as_bucket_view
        self._expects = False  # True if this backward reduces; False under no_sync
        self._works: list[distributed.Work] = []  # the reductions under way
        self._arrived: list[int] = []  # parameters in the order of their gradients in the first backward
        self._rebuilds = not find_unused_parameters
        if find_unused_parameters:
            self._used = torch.empty(len(parameters), dtype=torch.int32, device=parameters[0].device)
        self._flat: list[torch.Tensor] = []  # the buckets
        self._place: dict[int, tuple[_Reduction, torch.Tensor]] = {}
        if self._followed is not None:
            places = self._at_full_depth(range(len(parameters)))
            in_one = max(bucket_size_limits) > bucket_bytes_cap  # until they are made anew
            found, _ = _buckets([parameters[i] for i in places], [sys.maxsize] if in_one else self._limits)
            bucket_indices = [[places[i] for i in members] for members in reversed(found)]
        self._make(bucket_indices)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    @property
    def _followed(self) -> LayerRecorder | None:
        """The layers, where few of them stand for many."""
        return self.layers if self.layers is not None and self.layers.stacks else None

    def _at_full_depth(self, indices: Sequence[int]) -> list[int]:
        """The parameters `indices` in their order; one of a layer that stands for several is there several times."""
        if (layers := self._followed) is None:
            return list(indices)
        return [indices[place] for place in layers.at_full_depth([self._parameters[i] for i in indices])]

    def _make(self, buckets: Sequence[Sequence[int]]) -> None:
        self._place.clear()
        self._flat.clear()
        largest: dict[torch.dtype, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        for members in buckets:
            parameters = [self._parameters[i] for i in members]
            counts = [p.numel() for p in parameters]
            flat = torch.empty(sum(counts), dtype=parameters[0].dtype, device=parameters[0].device)
            self._flat.append(flat)
            self.mark(flat, "gradients")
            largest[flat.dtype] = max(flat, largest.get(flat.dtype, flat), key=torch.numel)
            views |= {i: part.view(self._parameters[i].shape)
                      for i, part in zip(members, flat.split(counts), strict=True) if i not in views}  # fmt: skip
            if self._followed is None:
                reduction = _Reduction([flat], len(members))
                self._place |= {i: (reduction, views[i]) for i in members}
        if (layers := self._followed) is not None:
            self._reduce_by_layer(layers, views, largest)

    def _reduce_by_layer(
        self, layers: LayerRecorder, views: Mapping[int, torch.Tensor], largest: Mapping[torch.dtype, torch.Tensor]
    ) -> None:
        """Reduce as many bytes as each layer's gradients have, a part of the largest bucket at a time."""
        by_layer: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            code = layers.of(parameter)
            layers.lend(views[index], code)
            by_layer.setdefault((code, parameter.dtype), []).append(index)
        for (_, dtype), members in by_layer.items():
            most, left = largest[dtype], sum(views[i].numel() for i in members)
            parts = [most] * (left // most.numel()) + ([most[:rest]] if (rest := left % most.numel()) else [])
            reduction = _Reduction(parts, len(members))
            self._place |= {i: (reduction, views[i]) for i in members}

    # ------------------------------------------------------------------ one backward
    def prepare_for_backward(self, outputs: object) -> None:
        self._expects = True
        self._arrived = []
        for reduction, _ in self._place.values():
            reduction.pending = reduction.count

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been accumulated: fill its place, and reduce the bucket, or the layer, that is now full."""
        if not self._expects:
            return
        reduction, view = self._place[index]
        gradient = cast("torch.Tensor", parameter.grad)
        if gradient is not view:
            view.copy_(gradient)
            if self._as_view:
                parameter.grad = view
        self._arrived.append(index)
        reduction.pending -= 1
        if not reduction.pending:
            for part in reduction.parts:
                self._works.append(distributed.all_reduce(part, group=self._group, async_op=True))
        if len(self._arrived) == len(self._parameters):
            self._finish()

    def _finish(self) -> None:
        self._expects = False
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._as_view:
            return
        for index, (_, view) in self._place.items():
            cast("torch.Tensor", self._parameters[index].grad).copy_(view)

    def _rebuild_buckets(self) -> bool:
        """After the first backward, buckets of 25 MiB (the first: 1 MiB) in the order in which gradients came."""
        if not self._rebuilds or len(self._arrived) != len(self._parameters):
            return False
        self._rebuilds = False
        order = self._at_full_depth(self._arrived)
        found, _ = _buckets([self._parameters[i] for i in order], self._limits, [], list(range(len(order))))
        self._make([[order[place] for place in members] for members in found])
        return True

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


def _buckets(tensors: list[torch.Tensor], limits: list[int], *more: list[int]) -> tuple[list[list[int]], list[int]]:
    """(places of the tensors of each bucket, limit in bytes of each): a bucket is full once it exceeds its limit."""
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size as assign  # not in every build of torch

    return assign(tensors, limits, *more)  # type: ignore[arg-type]


def broadcast_in_flat_buffers(
    layers: LayerRecorder | None, original: Callable[..., None], group: object, tensors: list[torch.Tensor],
    buffer_bytes: int, rank: int = 0,
) -> None:  # fmt: skip
    """DDP's first broadcast of the model, through two flat buffers at a time (torch/csrc/distributed/c10d/comm.cpp).

    Where few layers stand for many, the buffers are those of all layers.
    """
    if layers is None or not layers.stacks:
        original(group, tensors, buffer_bytes, rank)
        return
    whole, flat = [tensors[place] for place in layers.at_full_depth(tensors)], list[torch.Tensor]()
    for members in _buckets(whole, [buffer_bytes])[0]:
        first, total = whole[members[0]], sum(whole[i].numel() for i in members)
        del flat[:-1]
        if len(members) > 1:
            flat.append(torch.empty(total, dtype=first.dtype, device=first.device))


class SilentLogger:
    """Replaces DDP's C++ logger, which reads the C++ reducer; drops its calls."""

    def __init__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
