"""All patches of torch and other packages while a block runs; all are undone when it ends.

Tested with torch 2.11 to 2.15, transformers 5.17 to 5.23, trl 1.14 to 1.16, peft 0.21, accelerate 1.15, bitsandbytes
0.50 (`nox -s compat`). A patch that finds no target is skipped, and a note in `gpu.notes` says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from autofit.fakegpu.card import FakeGpu
from autofit.fakegpu.memory import is_pinned
from autofit.fakegpu.patches import (
    attention,
    cuda_api,
    distributed,
    libraries,
    low_bit,
    operators,
    rollout,
    same_calls,
    tensors,
    vllm,
    windows,
)
from autofit.fakegpu.patches.cuda_api import always, nothing
from autofit.fakegpu.patches.libraries import (
    accelerator,
    cuda_accelerator,
    finite_gradients,
    finite_norms,
    host_adam,
    process_groups,
    same_on_all_ranks,
)
from autofit.fakegpu.patches.operators import in_larger_storage, in_parts, kernels_of_cuda, own_kernels
from autofit.fakegpu.patches.redirect import Target, Undo, redirect, replace, untouched

_Patches = Callable[[FakeGpu, ModuleType], Iterable[Target]]


@dataclass(frozen=True, slots=True)
class Patch:
    """Replace `owner.name` by `value`."""

    owner: object
    name: str
    value: object
    reason: str


class Registry:
    """Applies patches, until the undo. Packages imported later in the block are patched when they load."""

    def __init__(self, gpu: FakeGpu, undo: Undo) -> None:
        self.gpu = gpu
        self.undo = undo
        self._finder = _LateImports(self)

    def apply(self) -> None:
        for patch in _torch_core(self.gpu):
            self.put(patch)
        if self.gpu.mode == "cuda":
            attention.attention_of_a_card(self.gpu, self.undo)
            kernels_of_cuda(self.undo)
            self.gpu.tracer.whole = own_kernels()
        self.gpu.tracer.in_parts.update(in_parts())
        if self.gpu.mode == "cuda":
            self.gpu.tracer.in_parts.update(in_larger_storage(self.gpu.tracer))
        self._allow_foreach()
        self.undo.add(self.note_renamed_modules)
        for name in _LIBRARIES:
            module = sys.modules.get(name)
            if module is not None:
                self.patch_library(module)
        self.undo.add(sys.meta_path.remove, self._finder)
        sys.meta_path.insert(0, self._finder)

    def put(self, patch: Patch) -> None:
        if not (patch.name in _CREATED or hasattr(patch.owner, patch.name)):
            owner = getattr(patch.owner, "__qualname__", getattr(patch.owner, "__name__", str(patch.owner)))
            self._note_missing(f"{owner}.{patch.name} is gone (patched because {patch.reason})", of=patch.owner)
            return
        replace(patch.owner, patch.name, patch.value, self.undo)

    def patch_library(self, module: ModuleType) -> None:
        name = module.__name__
        try:
            for owner, attribute, value, reason in _LIBRARIES[name](self.gpu, module):
                self.put(Patch(owner, attribute, value, reason))
        except AttributeError as error:
            self._note_missing(f"{name} has changed: {error}", of=module)

    def note_renamed_modules(self) -> None:
        """Note each module to patch that its package, imported by now, lacks under this name."""
        for name in _LIBRARIES:
            package = sys.modules.get(name.partition(".")[0])
            if package is None or name in sys.modules or _version(package) < _SINCE.get(name, (0,)):
                continue
            if not _has(package, name):
                self._note_missing(f"there is no module {name}", of=package)

    def _note_missing(self, text: str, *, of: object) -> None:
        """Note a patch that lacks its target: that part then runs as this version does it on a CPU."""
        package = str(getattr(of, "__module__", None) or getattr(of, "__name__", "torch")).partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "of unknown version")
        self.gpu.note(f"{package} {version} is not simulated in full, so bytes and seconds may be wrong: {text}")

    def _allow_foreach(self) -> None:
        """Add FakeTensor to the exact tensor types for which optimizers choose foreach and fused kernels."""
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            types = cast("list[type]", import_module(name)._foreach_supported_types)
            if FakeTensor not in types:
                self.undo.add(types.remove, FakeTensor)
                types.append(FakeTensor)


def _has(package: ModuleType, name: str) -> bool:
    """True if the file of the module `name` is in its package, found before any import."""
    path = Path(next(iter(package.__path__)), *name.split(".")[1:])
    return path.is_dir() or any(path.parent.glob(f"{path.name}.*"))


def _version(package: ModuleType) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", getattr(package, "__version__", ""))[:2])


def _torch_core(gpu: FakeGpu) -> Iterable[Patch]:
    import torch._subclasses.fake_tensor as fake_tensor_module
    import torch.utils.data.dataloader as dataloader

    yield from (Patch(*target) for target in cuda_api.answers(gpu))
    memory, shadows = gpu.memory, gpu.tracer.shadows
    tensor, parameter_list = torch.Tensor, "fakes have no numbers of their own"
    yield Patch(fake_tensor_module, "init_gpu_context", nothing, "it would allocate on a card that is not there")
    lifts = property(lambda mode: True)
    yield Patch(FakeTensorMode, "avoid_device_init", lifts, "torch.tensor(..., device='cuda') lifts from the CPU")
    applied = tensors.apply_to_module(memory, shadows)
    yield Patch(torch.nn.Module, "_apply", applied, "torch swaps fake parameters, which weakrefs forbid")
    data = cast("property", torch._C.TensorBase.data)
    yield Patch(tensor, "data", tensors.set_data(shadows, data), "assigning .data must move a fake's device")
    to_list = partial(tensors.to_list, gpu.tracer, untouched(tensor.tolist))
    yield Patch(tensor, "tolist", to_list, parameter_list)
    yield Patch(FakeTensor, "tolist", to_list, "a fake's own asks for its elements one by one")
    made = partial(tensors.parameter_of_its_type, untouched(FakeTensor.__new__))
    yield Patch(FakeTensor, "__new__", staticmethod(made), "the type of a fake parameter is not Parameter")
    yield Patch(tensor, "numpy", partial(tensors.to_numpy, gpu.tracer, untouched(tensor.numpy)), parameter_list)
    yield Patch(tensor, "__array__", partial(tensors.to_array, untouched(tensor.__array__)), parameter_list)
    yield Patch(tensor, "__format__", partial(tensors.formatted, untouched(tensor.__format__)), parameter_list)
    copied = partial(tensors.deep_copied, memory, untouched(tensor.__deepcopy__))
    yield Patch(tensor, "__deepcopy__", copied, "a fake's storage cannot be copied")
    yield Patch(tensor, "pin_memory", partial(tensors.pinned_copy, gpu.tracer), "pinned memory is the driver's")
    yield Patch(
        tensor, "share_memory_", partial(tensors.shared, untouched(tensor.share_memory_)), "a fake has no memory"
    )
    yield Patch(tensor, "is_pinned", lambda tensor, device=None: is_pinned(tensor), "pinned memory is the driver's")
    yield Patch(tensor, "record_stream", nothing, "streams are simulated")
    one_hot = partial(tensors.one_hot, shadows, untouched(torch.nn.functional.one_hot))
    yield Patch(torch.nn.functional, "one_hot", one_hot, "a fake takes another way, and is too large to know")
    truncated = tensors.truncated_normal(untouched(torch.nn.init._no_grad_trunc_normal_))
    yield Patch(torch.nn.init, "_no_grad_trunc_normal_", truncated, "it draws until a fake's values are right")
    resized = partial(tensors.resize_storage, memory, untouched(torch.UntypedStorage.resize_))
    yield Patch(torch.UntypedStorage, "resize_", resized, "FSDP frees so")
    address = partial(tensors.storage_address, memory, untouched(torch.UntypedStorage.data_ptr))
    yield Patch(torch.UntypedStorage, "data_ptr", address, "a fake has none, and TRL tells storages apart by it")
    yield Patch(
        dataloader.DataLoader, "_get_iterator", libraries.load_in_process, "fakes cannot cross processes or threads"
    )
    yield Patch(torch, "Generator", libraries.cpu_generator, "a CPU build has no CUDA generator")
    yield Patch(torch, "compile", libraries.not_compiled(gpu), "compiling is not simulated; code runs eagerly")
    for owner, name, value, reason in (
        *tensors.torch_checkpoints(shadows), *operators.recurrent_layers(gpu), *cuda_api.one_card(gpu),
        *operators.other_kernels(gpu), *operators.other_ways(gpu.note), *operators.factories(),
        *distributed.collectives(gpu), *distributed.waits_for_collectives(gpu), *libraries.unmarked(),
        *libraries.walks(gpu),
    ):  # fmt: skip
        yield Patch(owner, name, value, reason)


def _both(*patches: _Patches) -> _Patches:
    return lambda gpu, module: (target for each in patches for target in each(gpu, module))


# Third-party packages: module -> function that yields (owner, name, value, reason); applied when the module is loaded.
_LIBRARIES: dict[str, _Patches] = {
    "transformers.utils.import_utils": libraries.transformers_tracing,
    "transformers.modeling_utils": _both(
        libraries.save_pretrained, attention.transformers_models, libraries.of_the_hub, libraries.whole_models
    ),
    "transformers.integrations.liger": libraries.liger,
    "transformers.training_args": libraries.transformers_tf32,
    "transformers.trainer": same_calls.transformers_training,
    "transformers.trainer_optimizer": low_bit.transformers_optimizers,
    "transformers.integrations.flex_attention": attention.transformers_flex,
    "transformers.modeling_flash_attention_utils": attention.transformers_kernels,
    "transformers.models.exaone4_5.modeling_exaone4_5": windows.vision_towers,
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni": windows.vision_towers,
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl": windows.vision_towers,
    "peft.peft_model": libraries.save_pretrained,
    "peft.tuners.adamss.layer": libraries.adamss_clusters,
    "transformers.core_model_loading": libraries.transformers_loading,
    "transformers.generation.continuous_batching.continuous_api": rollout.transformers_batching,
    "transformers.generation.utils": rollout.transformers_generation,
    "transformers.cache_utils": libraries.transformers_cache,
    "trl.kernels.chunked_logprob": libraries.trl_triton,
    "trl.kernels.chunked_divergence": libraries.trl_triton,
    "trl.trainer.utils": _both(libraries.trl_loss_kernels, same_calls.trl_order),
    "trl.trainer.grpo_trainer": same_calls.trl_scoring,
    "trl.trainer.rloo_trainer": same_calls.trl_scoring,
    "trl.generation.vllm_generation": vllm.trl_vllm,
    "triton.runtime.jit": libraries.triton_launches,
    "triton.runtime.autotuner": libraries.triton_launches,
    "safetensors.torch": libraries.safetensors_save,
    "accelerate.state": libraries.accelerate_state,
    "deepspeed.accelerator.cuda_accelerator": cuda_accelerator,
    "deepspeed.accelerator.real_accelerator": accelerator,
    "deepspeed.comm.comm": process_groups,
    "deepspeed.utils.groups": process_groups,
    "deepspeed.ops.adam.cpu_adam": host_adam,
    "deepspeed.runtime.utils": finite_norms,
    "deepspeed.runtime.zero.utils": same_on_all_ranks,
    "deepspeed.runtime.zero.stage_1_and_2": finite_gradients,
    "deepspeed.runtime.zero.stage3": finite_gradients,
    "torch.nn.parallel.distributed": distributed.data_parallel,
    "torch.distributed.fsdp._fully_shard._fsdp_param": distributed.parameter_shards,
    "torch.distributed.fsdp._fully_shard._fsdp_state": distributed.sharded_layers,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": _both(distributed.fsdp2_groups, distributed.fsdp2_hooks),
    "torch.distributed.fsdp.fully_sharded_data_parallel": distributed.fsdp1_forward_hooks,
    "torch.distributed.fsdp._runtime_utils": distributed.fsdp1_backward_hooks,
    "torch.distributed.fsdp._flat_param": _both(
        distributed.flat_shards, distributed.flat_gradients, distributed.fsdp1_groups
    ),
    "torch.distributed.tensor._sharding_prop": distributed.sharding_propagation,
    "transformers.integrations.bitsandbytes": low_bit.transformers_quantising,
    "bitsandbytes.nn.modules": low_bit.bitsandbytes_modules,
    "bitsandbytes.functional": low_bit.bitsandbytes_functional,
    "bitsandbytes.optim.optimizer": _both(low_bit.paged_states, low_bit.updates),
    "bitsandbytes.autograd._functions": low_bit.gradients,
    "bitsandbytes": low_bit.products,
}


# Names to patch that need not exist: only CUDA builds, or other packages when they are installed, provide them.
_CREATED = {
    "_cuda_clearCublasWorkspaces", "_host_emptyCache", "_scatter", "memory_usage",
    "LLM", "SamplingParams", "StructuredOutputsParams", "triton",
}  # fmt: skip

# Modules that older versions of their package do not have.
_SINCE = {
    "transformers.models.exaone4_5.modeling_exaone4_5": (5, 8), "trl.generation.vllm_generation": (0, 28),
    "trl.kernels.chunked_logprob": (1, 15), "trl.kernels.chunked_divergence": (1, 15),
    "peft.tuners.adamss.layer": (0, 21),
}  # fmt: skip

# These load CUDA libraries at import, so the simulated card is hidden from them while they are imported.
_LOADED_WITHOUT_CUDA = ("bitsandbytes",)


class _LateImports(MetaPathFinder):
    """Patches a listed package right after it is imported inside the block."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._busy = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if self._busy or name not in (*_LIBRARIES, *_LOADED_WITHOUT_CUDA):
            return None
        self._busy = True
        try:
            spec = find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._registry)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, registry: Registry) -> None:
        self._loader = loader
        self._registry = registry

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # what reads a module's source or data later asks these
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if module.__name__ in _LOADED_WITHOUT_CUDA:
            hidden = Undo()
            redirect(cast("FunctionType", torch.cuda.is_available), always(False), hidden)
            try:
                with unset_fake_temporarily():
                    self._loader.exec_module(module)
            finally:
                hidden.run()
        else:
            self._loader.exec_module(module)
        if module.__name__ in _LIBRARIES:
            self._registry.patch_library(module)
