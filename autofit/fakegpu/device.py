"""`fake_gpu`: a block in which PyTorch finds a CUDA card, and the object with the results of the run."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint

from autofit.fakegpu.allocator import AllocatorSettings
from autofit.fakegpu.card import FakeGpu, Mode
from autofit.fakegpu.kernels import blas_workspace_bytes
from autofit.fakegpu.op_cache import Shortcut
from autofit.fakegpu.patches.cuda_api import current_gpu
from autofit.fakegpu.patches.guard import CUDA_GUARD, CudaToCpu, GuardUnavailableError
from autofit.fakegpu.patches.libraries import clear_answers_of_caches
from autofit.fakegpu.patches.redirect import Undo
from autofit.fakegpu.patches.registry import Registry
from autofit.fakegpu.specs import FakeGpuError, GpuSpec, HostCosts, gpu_spec, with_every_kernel_loaded

_ENTERED = threading.Lock()  # held by the running block, in any thread


@contextlib.contextmanager
def fake_gpu(
    spec: str | GpuSpec, *, mode: Literal["auto", "cuda", "cpu"] = "auto", enforce_capacity: bool = True,
    occupied_bytes: int = 0, settings: AllocatorSettings | None = None, host_costs: HostCosts | None = None,
    record_places: bool = True, follow_layers: bool = False, kernel_loading: Literal["auto", "lazy", "eager"] = "auto",
    expert_imbalance: float = 1.0,
) -> Iterator[FakeGpu]:  # fmt: skip
    """Run the block as if on that GPU. Tensors take no real memory, and torch is restored when the block ends.

    `mode="auto"` makes fake CUDA tensors if this torch build supports them, else fake CPU tensors; see `gpu.mode`.
    `occupied_bytes` is memory held by others on the card (a colocated vLLM's share, other processes). With
    `enforce_capacity=False` no allocation fails, and the peaks show the memory that the run needs. With `follow_layers`
    the run of a model made shallow by `stack.shrink` can be expanded afterwards (`expand.expanded`).
    `kernel_loading` is what the context holds: the kernels that were used ("lazy", the default of CUDA since 12.2), or
    all of torch's ("eager"); "auto" follows CUDA_MODULE_LOADING, else it is eager, and noted, beside a transformers
    of the time before CUDA 12.2. Mixtures of experts are balanced (a router's choice is not known); one expert gets
    `expert_imbalance` times its even share of the tokens.
    """
    card = gpu_spec(spec) if isinstance(spec, str) else spec
    kernels_note = ""
    if kernel_loading == "auto":
        kernel_loading, kernels_note = _kernel_loading()
    if kernel_loading == "eager":
        card = with_every_kernel_loaded(card)
    if not 0 <= occupied_bytes < card.allocatable_bytes:
        raise FakeGpuError(
            f"occupied_bytes must be from 0 to below {card.allocatable_bytes}, what the {card.name} has beside its "
            f"CUDA context; got {occupied_bytes}"
        )
    if not 1.0 <= expert_imbalance < float("inf"):
        raise FakeGpuError(f"expert_imbalance is a share over an even one, so at least 1; got {expert_imbalance}")
    if not _ENTERED.acquire(blocking=False):
        raise FakeGpuError(
            "a simulated GPU is already active; blocks do not nest, and only one thread at a time has one"
        )
    try:
        chosen, reason = _choose_mode(mode)
        gpu = FakeGpu(
            card, mode=chosen, enforce_capacity=enforce_capacity, occupied_bytes=occupied_bytes, settings=settings,
            host_costs=host_costs, record_places=record_places, follow_layers=follow_layers,
            expert_imbalance=expert_imbalance,
        )  # fmt: skip
        for note in (reason, kernels_note, *_DRIFT) if chosen == "cuda" else (reason, kernels_note):
            if note:
                gpu.note(note)
        with _running(gpu):
            yield gpu
    finally:
        _ENTERED.release()


@contextlib.contextmanager
def _running(gpu: FakeGpu) -> Iterator[None]:
    undo = Undo()
    try:
        _start(gpu, undo)
        yield
    except BaseException as error:
        for failed in undo.run():
            error.add_note(f"torch was not restored in full: {type(failed).__name__}: {failed}")
        raise
    if errors := undo.run():
        raise BaseExceptionGroup("torch was not restored in full", errors)


def _start(gpu: FakeGpu, undo: Undo) -> None:
    """Make the card visible; after a failure the undo reverts the steps done so far."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # its first use imports modules that look for a real CUDA
    undo.enter(_torch_state_kept())
    if gpu.mode == "cuda":
        CUDA_GUARD.install()
        undo.add(CUDA_GUARD.remove)
    undo.add(clear_answers_of_caches)
    clear_answers_of_caches()
    undo.enter(current_gpu(gpu))
    if "torch._dynamo" in sys.modules:  # functions compiled before the block would try to compile for the card
        undo.enter(torch.compiler.set_stance("force_eager"))
    _device_constructors()  # what `with torch.device(...)` redirects; torch caches it, here before any is replaced
    registry = Registry(gpu, undo)
    registry.apply()
    _register_hooks(gpu, undo)
    gpu.tracer.shortcut = Shortcut(fake_mode)
    undo.add(_note_kernels_of_others, gpu, gpu.tracer.shortcut)
    undo.enter(fake_mode)
    undo.enter(gpu.tracer)
    if gpu.mode == "cpu":
        undo.enter(CudaToCpu())


def _kernel_loading() -> tuple[Literal["lazy", "eager"], str]:
    """Way in which CUDA loads kernels, and a note if it is assumed.

    transformers 4.46 came out with torch 2.5, whose wheels have CUDA 12.4. Programs beside an older one were mostly run
    with CUDA 12.1, which loads eagerly if a program asks for cards before torch starts CUDA: the worst case counts.
    """
    told = os.environ.get("CUDA_MODULE_LOADING", "").upper()
    if told in ("EAGER", "LAZY"):
        return ("eager" if told == "EAGER" else "lazy"), ""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "lazy", ""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= (4, 46):
        return "lazy", ""
    return "eager", (
        f"transformers {version} is of the time of CUDA 12.1, which may load every kernel: they count in the context; "
        f'kernel_loading="lazy" leaves them out'
    )


_KNOWN_NAMESPACES = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "bitsandbytes", "fsdp",
                     "flex"}  # fmt: skip


def _note_kernels_of_others(gpu: FakeGpu, shortcut: Shortcut) -> None:
    for name in sorted({function.namespace for function in shortcut.functions} - _KNOWN_NAMESPACES):
        gpu.note(
            f"kernels of {name} are counted by the shapes that their library declares; their scratch memory is not, "
            "and their seconds are those of reading and writing these tensors"
        )


@contextlib.contextmanager
def _torch_state_kept() -> Iterator[None]:
    """Restore random state, autograd threading and environment afterwards; inside, backward runs in this thread."""
    with torch.enable_grad():  # autograd's engine counts devices at its start: before the simulated one is visible
        torch.ones(1, requires_grad=True).sum().backward()
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


def _register_hooks(gpu: FakeGpu, undo: Undo) -> None:
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
        undo.add(handle.remove)
    if gpu.layers is not None:
        undo.add(register_module_module_registration_hook(gpu.layers.module_registered).remove)


# ---------------------------------------------------------------------- which mode works here
_SELF_TEST: list[str] = []  # the result, once per process; "" means passed
_DRIFT: list[str] = []  # notes of the self-test: what this torch counts otherwise than the card


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
    """Forward, backward and step of a tiny model, with the bytes checked; returns the failure, or "".

    What this torch counts otherwise than a card, although it runs, is put into `_DRIFT`.
    """
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
            _DRIFT.extend(_attention_drift(gpu))
    except (GuardUnavailableError, RuntimeError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    workspaces = 2 * blas_workspace_bytes((8, 0))
    expected = workspaces + 4 * 256 * 256 * 4  # weight, gradient, two moments
    if not expected <= kept <= expected + 32 * 512:
        return f"self-test counted {kept} bytes, not about {expected}"
    return ""


def _attention_drift(gpu: FakeGpu) -> Iterator[str]:
    """A note for each case in which attention, plain or checkpointed, keeps other bytes here than the known ones."""
    batch, heads, length, dim = 2, 4, 512, 64

    def layer(x: torch.Tensor) -> torch.Tensor:
        q = x.view(batch, length, heads, dim).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x + out.transpose(1, 2).reshape(x.shape)

    allocator = gpu.memory.allocator
    x = torch.zeros(batch, length, heads * dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before, one = allocator.allocated_bytes, x.numel() * x.element_size()
    sums = 4 * batch * heads * length
    for name, run, expected in (
        ("scaled_dot_product_attention", layer, 2 * one + sums),  # its output, the layer's, the log of the sums
        ("a checkpointed layer", partial(checkpoint, layer, use_reentrant=False), one),
    ):
        out = run(x)
        kept = allocator.allocated_bytes - before
        if not expected <= kept <= expected + 4 * 512:  # and the state of the dropout's random numbers
            yield (
                f"torch {torch.__version__}: in the self-test {name} keeps {kept} bytes for backward, on a card "
                f"{expected}; the bytes of models with attention are not those of a card"
            )
        out.sum().backward()
        x.grad = None
        del out
