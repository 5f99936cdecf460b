"""`fake_gpu`: a block in which PyTorch finds a CUDA card, and the object with the results of the run."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.fakegpu.allocator import AllocatorSettings
from autofit.fakegpu.card import FakeGpu, Mode
from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.kernels import blas_workspace_bytes
from autofit.fakegpu.op_cache import Shortcut
from autofit.fakegpu.patches.cuda_api import current_gpu
from autofit.fakegpu.patches.cuda_to_cpu import CudaToCpu
from autofit.fakegpu.patches.guard import CUDA_GUARD, GuardUnavailableError
from autofit.fakegpu.patches.libraries import clear_answers_of_caches
from autofit.fakegpu.patches.registry import Registry
from autofit.fakegpu.specs import GpuSpec, HostCosts, gpu_spec

_ACTIVE: list[FakeGpu] = []


@contextlib.contextmanager
def fake_gpu(
    spec: str | GpuSpec,
    *,
    mode: Literal["auto", "cuda", "cpu"] = "auto",
    enforce_capacity: bool = True,
    occupied_bytes: int = 0,
    settings: AllocatorSettings | None = None,
    host_costs: HostCosts | None = None,
    record_places: bool = True,
    follow_layers: bool = False,
) -> Iterator[FakeGpu]:
    """Run the block as if on that GPU. No tensor memory is allocated, and torch is restored when the block ends.

    `mode="auto"` makes fake CUDA tensors if this torch build supports them, else fake CPU tensors; see `gpu.mode`.
    `occupied_bytes` is memory held by others on the card (a colocated vLLM's share, other processes). With
    `enforce_capacity=False` no allocation fails, and the peaks show the memory that the run needs. With `follow_layers`
    the run of a model made shallow by `stack.shrink` can be expanded afterwards (`expand.expanded`).
    """
    card = gpu_spec(spec) if isinstance(spec, str) else spec
    if _ACTIVE:
        raise FakeGpuError("a simulated GPU is already active; blocks do not nest")
    if not 0 <= occupied_bytes < card.allocatable_bytes:
        raise FakeGpuError(
            f"occupied_bytes must be from 0 to below {card.allocatable_bytes}, what the {card.name} has beside its "
            f"CUDA context; got {occupied_bytes}"
        )
    chosen, reason = _choose_mode(mode)
    gpu = FakeGpu(
        card,
        mode=chosen,
        enforce_capacity=enforce_capacity,
        occupied_bytes=occupied_bytes,
        settings=settings,
        host_costs=host_costs,
        record_places=record_places,
        follow_layers=follow_layers,
    )
    if reason:
        gpu.note(reason)
    with _running(gpu):
        yield gpu


@contextlib.contextmanager
def _running(gpu: FakeGpu) -> Iterator[None]:
    registry = Registry(gpu)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # its first use imports modules that look for a real CUDA
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch_state_kept())
        _ACTIVE.append(gpu)
        stack.callback(_ACTIVE.remove, gpu)
        gpu.active = True
        stack.callback(setattr, gpu, "active", False)
        if gpu.mode == "cuda":
            CUDA_GUARD.install()
            stack.callback(CUDA_GUARD.remove)
        clear_answers_of_caches()
        stack.callback(clear_answers_of_caches)
        stack.callback(registry.undo)
        stack.enter_context(current_gpu(gpu))
        registry.apply()
        _register_hooks(gpu, stack)
        gpu.tracer.shortcut = Shortcut(fake_mode)
        stack.enter_context(fake_mode)
        stack.enter_context(gpu.tracer)
        if gpu.mode == "cpu":
            stack.enter_context(CudaToCpu())
        yield


@contextlib.contextmanager
def _torch_state_kept() -> Iterator[None]:
    """Restore random state, autograd threading and environment afterwards; inside, backward runs in this thread."""
    _start_autograd_engine()
    random_state = torch.get_rng_state()
    multithreading = torch._C._is_multithreading_enabled()
    loading = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    torch.autograd.set_multithreading_enabled(False)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers loads weights in threads, where no fake mode is active
    try:
        yield
    finally:
        if loading is None:
            os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD", None)
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = loading
        torch.autograd.set_multithreading_enabled(multithreading)
        torch.set_rng_state(random_state)


def _start_autograd_engine() -> None:
    """Start autograd's engine, which counts devices once per process, before the simulated device is visible."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()


def _register_hooks(gpu: FakeGpu, stack: contextlib.ExitStack) -> None:
    from torch.nn.modules.module import (
        register_module_buffer_registration_hook,
        register_module_module_registration_hook,
        register_module_parameter_registration_hook,
    )
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    for handle in (
        register_module_parameter_registration_hook(gpu.parameter_registered),
        register_module_buffer_registration_hook(gpu.parameter_registered),
        register_optimizer_step_pre_hook(gpu.before_step),
        register_optimizer_step_post_hook(gpu.after_step),
    ):
        stack.callback(handle.remove)
    if gpu.layers is not None:
        stack.callback(register_module_module_registration_hook(gpu.layers.module_registered).remove)


# ---------------------------------------------------------------------- which mode works here
_SELF_TEST: list[str] = []  # the result, once per process; "" means passed


def _choose_mode(mode: Literal["auto", "cuda", "cpu"]) -> tuple[Mode, str]:
    """The mode to run in, and the reason if it is the cpu fallback."""
    if mode == "cpu":
        return "cpu", ""
    if not _SELF_TEST:
        _SELF_TEST.append(_self_test())
    failure = _SELF_TEST[0]
    if not failure:
        return "cuda", ""
    if mode == "cuda":
        raise FakeGpuError(f"fake CUDA tensors do not work here: {failure}")
    warnings.warn(f"the simulated GPU falls back to fake CPU tensors: {failure}", stacklevel=4)
    return "cpu", f"fell back to fake CPU tensors: {failure}"


def _self_test() -> str:
    """Forward, backward and step of a tiny model, with the bytes checked; returns the failure, or ""."""
    gpu = FakeGpu(gpu_spec("a100-40gb"), mode="cuda", settings=AllocatorSettings())
    try:
        with _running(gpu):
            model = torch.nn.Linear(256, 256, bias=False).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            out = model(torch.zeros(4, 256, device="cuda"))
            out.sum().backward()
            optimizer.step()
            kept = gpu.memory.allocator.allocated_bytes
            del out
            optimizer.zero_grad()
    except (GuardUnavailableError, RuntimeError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    workspaces = 2 * blas_workspace_bytes((8, 0))
    expected = workspaces + 4 * 256 * 256 * 4  # weight, gradient, two moments
    if not expected <= kept <= expected + 32 * 512:
        return f"self-test counted {kept} bytes, not about {expected}"
    return ""
