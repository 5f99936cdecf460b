"""Patches with which torch and other packages treat the simulated card as a real one. `registry.py` installs them."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.depth.stack import is_own_work
from autofit.fakegpu.fusion import Fusion, run_compiled
from autofit.fakegpu.linear_loss import LIGER, fuse
from autofit.fakegpu.memory import SimulatedMemory, is_pinned
from autofit.fakegpu.patches.cuda_api import active_gpu
from autofit.fakegpu.patches.redirect import Target, untouched
from autofit.fakegpu.tracer import TRAIN, VISIT, charge_modules


def load_in_process(loader: DataLoader[object]) -> _BaseDataLoaderIter:
    """Iterate a DataLoader in this process and thread for any num_workers: fakes are bound to a process."""
    workers, timeout = loader.num_workers, loader.timeout
    try:
        loader.num_workers, loader.timeout = 0, 0
        return _SingleProcessDataLoaderIter(loader)
    finally:
        loader.num_workers, loader.timeout = workers, timeout


_Generator = torch.Generator


def cpu_generator(device: object = None) -> torch.Generator:
    """`torch.Generator(device="cuda")` as a CPU generator, whose numbers the simulated card ignores."""
    return _Generator()


_FUSED_NOTE = (
    "functions under torch.compile were run with elementwise chains fused and recomputed in backward; which kernels "
    "inductor makes of them is an approximation"
)


_Pair = tuple[str, torch.nn.Module]


def walks(gpu: FakeGpu) -> Iterable[Target]:
    """The patches of torch.nn.Module."""
    why = "the host's time for going over a model's modules"
    named = untouched(cast("Callable[..., Iterator[_Pair]]", torch.nn.Module.named_modules))
    trained = untouched(cast("Callable[..., torch.nn.Module]", torch.nn.Module.train))
    inside, before = [False], weakref.WeakSet[torch.nn.Module]()  # that have been trained

    def named_modules(
        self: torch.nn.Module, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[_Pair]:
        found = named(self, memo, prefix, remove_duplicate)
        return found if memo is not None or _is_free(gpu) else _counted(gpu, found)

    def train(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
        if inside[0]:
            return trained(self, mode)
        # A mode that changes later does so around a rollout or an evaluation, and takes a thousandth of it.
        free = _is_free(gpu) or (self.training != mode and (not mode or self in before))
        if mode:
            before.add(self)
        inside[0] = True
        try:
            return trained(self, mode)
        finally:
            inside[0] = False
            if not free:
                charge_modules(gpu.clock, gpu.layers, TRAIN, [module for _, module in named(self, set())])

    clips = untouched(cast("Callable[..., object]", torch.nn.utils.clip_grad_norm_))

    def clip(*args: object, **kwargs: object) -> object:
        log = gpu.clock.log
        if log is None:
            return clips(*args, **kwargs)
        log.of_step = True
        try:
            return clips(*args, **kwargs)
        finally:
            log.of_step = False

    return [
        (torch.nn.Module, "named_modules", named_modules, why), (torch.nn.Module, "train", train, why),
        (torch.nn.utils, "clip_grad_norm_", clip, "what it takes the host is a step's, not a micro-batch's"),
    ]  # fmt: skip


def _is_free(gpu: FakeGpu) -> bool:
    return is_own_work() or gpu.clock.asleep


def _counted(gpu: FakeGpu, found: Iterator[_Pair]) -> Iterator[_Pair]:
    modules = []
    try:
        for pair in found:
            modules.append(pair[1])
            yield pair
    finally:  # a walk may end early
        charge_modules(gpu.clock, gpu.layers, VISIT, modules)


def unmarked() -> Iterable[Target]:
    """Make `record_function` a no-op unless a profiler is on."""
    names, reason = ("__enter__", "__exit__"), "FSDP marks each of its hooks, through all of dispatch"
    begin, end = (untouched(cast("Callable[..., object]", vars(record_function)[name])) for name in names)

    def enters(mark: record_function) -> object:
        return begin(mark) if torch._C._autograd._profiler_enabled() else mark

    def leaves(mark: record_function, *error: object) -> None:
        if mark.record is not None:
            end(mark, *error)

    return [(record_function, name, made, reason) for name, made in zip(names, (enters, leaves), strict=True)]


def not_compiled(gpu: FakeGpu) -> Callable[..., object]:
    """`torch.compile` that leaves a model as it is and fuses elementwise chains of a function; notes say so.

    A function is compiled at its first call after the block, as it may belong to a module that outlives the block.
    """
    original = untouched(cast("Callable[..., object]", torch.compile))

    def compile_(model: object = None, *args: object, **kwargs: object) -> object:
        if model is None:
            return lambda function: compile_(function, *args, **kwargs)
        if isinstance(model, torch.nn.Module) or not callable(model):
            gpu.note("torch.compile was asked for and not simulated: the model ran eagerly, mostly an upper bound")
            return model
        function, compiled = model, cast("list[Callable[..., object]]", [])

        @functools.wraps(function)
        def run(*inputs: object, **options: object) -> object:
            card = active_gpu()  # not the one of this block: the function may outlive it
            if card is not None:
                tracer = card.tracer
                if tracer.fusion is None:
                    tracer.fusion = Fusion(tracer.memory, tracer.clock)
                    card.note(_FUSED_NOTE)
                return run_compiled(tracer.fusion, function, inputs, options)
            if not compiled:
                compiled.append(cast("Callable[..., object]", original(function, *args, **kwargs)))
            return compiled[0](*inputs, **options)

        return run

    return compile_


def safetensors_save(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    original = untouched(module.save_file)

    def save_file(
        held: dict[str, torch.Tensor], filename: str | os.PathLike[str], *args: object, **kwargs: object
    ) -> None:
        if _holds_fake(held):
            with open(filename, "wb"):
                pass
        else:
            original(held, filename, *args, **kwargs)

    yield module, "save_file", save_file, "fakes have no bytes to save"


def save_pretrained(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let a model of fakes save an empty weights file; saving is free of the card's memory."""
    for name in ("PreTrainedModel", "PeftModel"):
        owner = getattr(module, name, None)
        if owner is not None and owner.__module__ == module.__name__:
            save = partial(_save_model, untouched(owner.save_pretrained))
            yield owner, "save_pretrained", save, "fakes have no bytes to save"


def _save_model(
    original: Callable[..., object], model: torch.nn.Module, save_directory: str | os.PathLike[str], *args: object,
    **kwargs: object,
) -> None:  # fmt: skip
    if not any(isinstance(p, FakeTensor) for p in model.parameters()):
        original(model, save_directory, *args, **kwargs)
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").touch()


def adamss_clusters(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """AdaMSS with clusters of rows that are as large as one another: k-means of unknown values finds a single one."""
    original = untouched(module.clustering_Z)

    def clustering(rows: torch.Tensor, num_subspaces: int, *args: object) -> object:
        if not isinstance(rows, FakeTensor):
            return original(rows, num_subspaces, *args)
        gpu.note("AdaMSS's clusters of a weight's rows are taken to be of one size; k-means was not run")
        count = min(num_subspaces, rows.shape[0])
        return torch.tensor([row % count for row in range(rows.shape[0])]), count

    yield module, "clustering_Z", clustering, "a fake has no values that could be clustered"


_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def transformers_loading(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let `from_pretrained` read only the shapes in a safetensors file, leaving out the values."""

    def materialize(
        source: object, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if isinstance(source, torch.Tensor):
            tensor = source[...]
            return tensor.to(device=device, dtype=dtype) if device is not None or dtype is not None else tensor
        shape, kind = source.get_shape(), source.get_dtype()  # type: ignore[attr-defined]
        place = "cpu" if device is None else device  # a mapped file takes no memory of the host
        return torch.empty(shape, dtype=dtype or _SAFETENSORS_DTYPES[kind], device=place)

    yield module, "_materialize_copy", materialize, "values would be read into real memory"


def transformers_tracing(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    if hasattr(module, "is_fake_tensor") or not sys.modules["transformers"].__version__.startswith("4."):
        yield module, "is_fake_tensor", lambda x: False, "it takes fakes for tracing and then always builds masks"


def transformers_cache(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Categorise allocations in the `update` of a cache layer as KV cache."""
    for layer in vars(module).values():
        if isinstance(layer, type) and "update" in vars(layer) and layer.__name__.endswith("Layer"):
            labelled = partial(_as_cache, gpu.memory, untouched(vars(layer)["update"]))
            yield layer, "update", labelled, "names the KV cache in the timeline"


def _as_cache(memory: SimulatedMemory, update: Callable[..., object], *args: object, **kwargs: object) -> object:
    before, memory.category = memory.category, "KV cache"
    try:
        return update(*args, **kwargs)
    finally:
        memory.category = before


def triton_launches(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Triton kernels on fakes: a launch is free of allocations, and its outputs are allocated by its caller."""

    def instead(original: Callable[..., object]) -> Callable[..., object]:
        def run(kernel: object, *args: object, **kwargs: object) -> object:
            if not _holds_fake([*args, *kwargs.values()]):
                return original(kernel, *args, **kwargs)
            while not isinstance(kernel, FunctionType):
                kernel = kernel.fn  # type: ignore[attr-defined]
            package = kernel.__module__.partition(".")[0]
            if package != "trl":  # its kernels read the logits once, which hardly counts beside the matrix products
                gpu.note(f"Triton kernels of {package} were not run: their buffers are counted, their seconds are not")
            return None

        return run

    for name in ("JITFunction", "Autotuner", "Heuristics"):
        owner = getattr(module, name, None)
        if owner is not None and owner.__module__ == module.__name__:
            yield owner, "run", instead(untouched(owner.run)), "a fake has no memory that a kernel could work on"


class _Launch:
    """Stand-in of a Triton kernel if Triton is missing: launching it only passes."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: object, **kwargs: object) -> None: ...

        return launch


def trl_triton(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Let TRL's chunked LM head take its CUDA path (Triton kernels, in place) even if Triton is missing."""
    reason = "the CUDA path writes in place where the CPU path allocates"
    if gpu.mode != "cuda" or find_spec("triton") is not None:
        return
    if hasattr(module, "_TRITON_AVAILABLE"):
        yield module, "_TRITON_AVAILABLE", True, reason
    for name in _KERNELS[module.__name__]:
        yield module, name, _Launch(), reason
    yield module, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), reason


def trl_loss_kernels(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Note a TRL before 1.16 if Triton is missing: it imports its kernels unconditionally, so they stay unimitated."""
    has_kernels = hasattr(module, "_supports_trl_loss_kernel")  # of TRL 1.14 on
    if find_spec("triton") is None and has_kernels and not hasattr(module, "_use_triton"):
        gpu.note(
            "Triton is not installed, and this TRL computes log-probabilities with Triton on a card: the temporary "
            "tensors of the losses of DPO and GRPO are counted without it, which is too many"
        )
    return ()


_KERNELS = {
    "trl.kernels.chunked_logprob": ("_forward_kernel", "_backward_kernel"),
    "trl.kernels.chunked_divergence": ("_stats_kernel", "_jsd_kernel", "_backward_kernel"),
}


def accelerate_state(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Give accelerate fresh shared dictionaries inside the block, since it stores the device in them."""
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        owner = getattr(module, name)
        yield owner, "_shared_state", {}, "the device chosen inside must not outlive the block"


def transformers_tf32(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """transformers' question whether the card computes in TF32, which it answers by the build of torch too."""
    yield module, "is_torch_tf32_available", lambda: torch.cuda.is_tf32_supported(), "a CPU build has no CUDA version"


def clear_answers_of_caches() -> None:
    """Clear cached answers about CUDA availability (functools caches in the import helpers of packages)."""
    for name in _CACHING_MODULES:
        module = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else ():
            clear = getattr(value, "cache_clear", None)
            if callable(clear) and not isinstance(value, FakeTensor):
                clear()


_CACHING_MODULES = (
    "transformers.utils.import_utils", "transformers.utils.generic", "accelerate.utils.imports", "peft.import_utils",
    "trl.import_utils", "transformers.modeling_flash_attention_utils", "accelerate.utils.other",
)  # fmt: skip


def _holds_fake(value: object, depth: int = 4) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(_holds_fake(v, depth - 1) for v in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_fake(v, depth - 1) for v in value)


# Kernels of other packages for whole layers, Liger's and the Hub's (`use_kernels`): the layers run without them.
# Liger's loss is simulated, the source of most of its savings: no logits of all tokens.

_NOTE = (
    "{} were asked for and not simulated: the layers ran without them, which needs at least as many bytes and seconds"
)


def whole_models(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Take the memory of all layers' weights when transformers allocates for all weights before loading few layers."""
    layers = gpu.layers
    if layers is None or not hasattr(module, "get_total_byte_count"):
        return
    original = cast("Callable[..., dict[object, int]]", untouched(module.get_total_byte_count))

    def total(model: Any, devices: Mapping[str, object], *args: object) -> Mapping[object, int]:
        found = original(model, devices, *args)
        deep: dict[float, dict[str, object]] = {}
        for name, device in devices.items():
            growth = layers.growth_of_tensor(model.get_parameter_or_buffer(name))
            deep.setdefault(growth - 1, {})[name] = device
        for more, names in deep.items():
            for device, nbytes in original(model, names, *args).items() if more else ():
                found[device] += round(nbytes * more)
        return found

    yield module, "get_total_byte_count", total, "the model that is traced has few layers"


def liger(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """transformers' `apply_liger_kernel`, whether or not the package is installed."""

    def apply(model: object, kernel_config: Mapping[str, object] | None) -> None:
        fused = (kernel_config or {}).get("fused_linear_cross_entropy", True) and fuse(model, LIGER)
        gpu.note(_NOTE.format("Liger's kernels" + (" other than its fused linear loss" if fused else "")))

    yield module, "apply_liger_kernel", apply, "its kernels cannot run on fakes, and the package may lack"


def of_the_hub(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """`use_kernels=True` of a model, which would load compiled kernels from the Hub."""

    def use(model: object, use_kernels: bool, *args: object, **options: object) -> None:
        if use_kernels:
            gpu.note(_NOTE.format("the Hub's kernels (use_kernels)"))
        model._use_kernels = bool(use_kernels)  # type: ignore[attr-defined]

    owner = getattr(module, "PreTrainedModel", None)
    if owner is not None and hasattr(owner, "set_use_kernels"):
        yield owner, "set_use_kernels", use, "its kernels cannot run on fakes, and the package may lack"


# -- DeepSpeed: its own Python engine runs unchanged, with its buffers, streams and collectives -----------------------
# Replaced are three things that cannot run on fakes: what it asks the driver, the C++ of its Adam on the host, and
# the check of gradients for infinity, whose result would be unknown (a step that is skipped is not the worst case).

_FINITE = "values are not known, and a step skipped for infinite gradients needs less memory"
HOST_ADAM_NOTE = (
    "the seconds of DeepSpeed's Adam on the host are not counted: they depend on the processors and memory of the host"
)


def accelerator(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Set DeepSpeed's accelerator anew: it is chosen once a process, at import, which may have been before the card."""
    made = import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator()
    yield module, "ds_accelerator", made, "DeepSpeed must see the simulated card"


def process_groups(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Make `module` (deepspeed.utils.groups, deepspeed.comm.comm) forget, inside the block, the groups from before."""
    for name in ("cdb", "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device", "_ALL_TO_ALL_GROUP"):
        if name in vars(module):
            empty: object = {} if name == "_ALL_TO_ALL_GROUP" else None
            yield module, name, empty, "the groups of another block have ended"


def cuda_accelerator(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    owner = module.CUDA_Accelerator
    reason = "DeepSpeed asks the driver, and fakes have no host memory"

    def available_memory(self: object, device_index: object = None) -> int:
        return gpu.spec.capacity_bytes - gpu.memory.allocator.allocated_bytes

    yield owner, "_init_pynvml", lambda self: None, reason
    yield owner, "available_memory", available_memory, reason
    yield owner, "pin_memory", lambda self, tensor, align_bytes=1: tensor.pin_memory(), reason
    yield owner, "is_pinned", lambda self, tensor: is_pinned(tensor), reason


def finite_gradients(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    """Run the check of the ZeRO optimizers of `module` for infinite gradients, with the result that all are finite."""
    for name in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        owner = getattr(module, name, None)
        if owner is not None:
            yield owner, "has_overflow", partial(_finds_none, untouched(owner.has_overflow)), _FINITE


def same_on_all_ranks(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        yield module, name, lambda *args: None, "the other ranks do not exist"


def finite_norms(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    yield module, "is_invalid_grad_norm", lambda norm: False, _FINITE
    owner = module.CheckOverflow  # of the optimizers without ZeRO
    yield owner, "has_overflow", partial(_finds_none, untouched(owner.has_overflow)), _FINITE


def _finds_none(original: Callable[..., object], *args: object, **kwargs: object) -> bool:
    original(*args, **kwargs)
    return False


class HostAdam:
    """Stands in for DeepSpeed's compiled Adam on the host, which updates in place."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def load(self, *args: object, **kwargs: object) -> HostAdam:
        return self

    def create_adam(self, *args: object) -> None: ...

    def destroy_adam(self, *args: object) -> None: ...

    def adam_update(self, *args: object) -> None:
        self._gpu.note(HOST_ADAM_NOTE)


def host_adam(gpu: FakeGpu, module: ModuleType) -> Iterable[Target]:
    yield module, "CPUAdamBuilder", lambda *args: HostAdam(gpu), "it would compile C++, which cannot read fakes"
