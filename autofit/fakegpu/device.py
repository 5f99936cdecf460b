"""`fake_gpu`: a block in which PyTorch believes there is a CUDA card, and the object that says what happened on it."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Iterator
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.fakegpu.allocator import UNLIMITED, AllocatorSettings, CachingAllocator
from autofit.fakegpu.clock import Clock, HostCosts
from autofit.fakegpu.cuda_api import current_gpu
from autofit.fakegpu.errors import FakeGpuError
from autofit.fakegpu.fast import Shortcut
from autofit.fakegpu.guard import CUDA_GUARD, GuardUnavailableError
from autofit.fakegpu.kernels import blas_workspace_bytes
from autofit.fakegpu.layers import LayerClock, LayerRecorder
from autofit.fakegpu.libraries import clear_answers_of_caches
from autofit.fakegpu.memory import SimulatedMemory
from autofit.fakegpu.patches import Registry
from autofit.fakegpu.redirect import CudaToCpu
from autofit.fakegpu.replay import least_capacity
from autofit.fakegpu.specs import GpuSpec, gpu_spec
from autofit.fakegpu.timeline import PeakReport, Timeline, build_peak_report, build_timeline
from autofit.fakegpu.tracer import Tracer, in_backward

Mode = Literal["cuda", "cpu"]
_ACTIVE: list[FakeGpu] = []


class FakeGpu:
    """One simulated card. Read it during the block or after; byte counts are torch's, on that card."""

    def __init__(
        self,
        spec: GpuSpec,
        *,
        mode: Mode,
        enforce_capacity: bool = True,
        occupied_bytes: int = 0,
        settings: AllocatorSettings | None = None,
        host_costs: HostCosts | None = None,
        record_places: bool = True,
        follow_layers: bool = False,
    ) -> None:
        self.spec = spec
        self.mode: Mode = mode
        self.settings = settings or AllocatorSettings.from_environment()
        self.notes: list[str] = []
        self.active = False
        self.only_last_decode_steps = False  # of a rollout: enough for its peak, not for the allocator's fragments
        self.attention_kernels: dict[str, int] = {}
        self.occupied_bytes = occupied_bytes
        self.allocatable_bytes = spec.allocatable_bytes - occupied_bytes if enforce_capacity else UNLIMITED
        allocator = CachingAllocator(capacity_bytes=self.allocatable_bytes, settings=self.settings)
        self.memory = SimulatedMemory(spec, allocator, device_type=mode, record_places=record_places)
        self.memory.classify = self._classify
        self.layers = LayerRecorder(self.memory) if follow_layers else None
        self.clock = Clock(spec, host_costs or HostCosts())
        if self.layers is not None:
            self.clock = self.layers.clock = LayerClock(spec, host_costs or HostCosts(), self.layers)
            self.memory.layer_at_work = self.layers.code
        self.tracer = Tracer(
            self.memory, self.clock, blas_workspace_bytes=blas_workspace_bytes(spec.compute_capability)
        )
        self.tracer.layers = self.layers
        self._peaks = (0, 0, 0)
        self._backward_starts: list[int] = []
        self._was_in_backward = False
        self._parameters: list[weakref.ref[torch.Tensor]] = []

    # ------------------------------------------------------------------ results
    @property
    def fidelity(self) -> str:
        """How the answer came about; the cpu mode is the weaker one."""
        if self.mode == "cuda":
            return "cuda: fake CUDA tensors, CUDA dispatch and kernels"
        return "cpu: fake CPU tensors; what CUDA does differently (attention kernel, fused loss, workspaces) is missing"

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes of live tensors, over the whole block (torch.cuda.max_memory_allocated, never reset)."""
        return max(self._peaks[0], self.memory.allocator.peak_allocated_bytes)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes the caching allocator held."""
        return max(self._peaks[1], self.memory.allocator.peak_reserved_bytes)

    @property
    def peak_requested_bytes(self) -> int:
        """The most bytes asked for, before rounding."""
        return max(self._peaks[2], self.memory.allocator.peak_requested_bytes)

    @property
    def device_used_bytes(self) -> int:
        """What the driver would report at the peak: the CUDA context, what others hold, and what the allocator held."""
        return self.spec.context_bytes + self.occupied_bytes + self.peak_reserved_bytes

    @property
    def least_capacity_bytes(self) -> int:
        """The smallest card (as its driver reports it) on which the same run goes through, to within 16 MiB above."""
        count = len(self.memory.log)
        if self._least is None or self._least[0] != count:
            self._least = (count, least_capacity(self.memory.log, settings=self.settings))
        least = self.spec.context_bytes + self.occupied_bytes + self._least[1]
        return min(least, self.device_used_bytes)  # what was used is enough, whatever the bisection's tolerance

    _least: tuple[int, int] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds on the simulated clock until everything launched so far is done."""
        return self.clock.now_s

    @property
    def timeline(self) -> Timeline:
        self._mark_gradients()
        return build_timeline(
            self.memory.log,
            self.memory.allocations,
            backward_starts=self._backward_starts,
            phase_marks=self.memory.phase_marks,
        )

    def why_peak(self, limit: int = 20) -> PeakReport:
        """What is alive at the peak and which code allocated it, largest first."""
        self._mark_gradients()
        return build_peak_report(
            self.memory.log, self.memory.allocations, backward_starts=self._backward_starts, limit=limit
        )

    # ------------------------------------------------------------------ during the block
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what runs inside, for the timeline."""
        before = self.memory.phase
        self.memory.enter_phase(name)
        try:
            yield
        finally:
            self.memory.enter_phase(before)

    def note(self, text: str) -> None:
        """Remember something that was not simulated as the card would have done it."""
        if text not in self.notes:
            self.notes.append(text)

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats; this object's own peaks are kept."""
        self._peaks = (self.peak_allocated_bytes, self.peak_reserved_bytes, self.peak_requested_bytes)
        self.memory.allocator.reset_peaks()

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is tracked as memory of this card (or was, before it was resized to nothing)."""
        return self.memory.knows(storage)

    # ------------------------------------------------------------------ categories
    def _classify(self, tensor: torch.Tensor) -> str:
        backward = in_backward()
        if backward and not self._was_in_backward:
            self._backward_starts.append(len(self.memory.log))
        self._was_in_backward = backward
        shape = tensor.shape
        if len(shape) >= 2 and shape[-1] in self.tracer.vocabulary_sizes and tensor.dtype.is_floating_point:
            return "logits"
        if not torch.is_grad_enabled():
            return "temporaries"
        return "recomputed" if backward else "activations"

    def parameter_registered(self, module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self.memory.mark(value, "weights")

    def before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            self._parameters += [weakref.ref(p) for p in group["params"]]
        self._mark_gradients()

    def after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self.memory.mark(value, "optimizer")

    def _mark_gradients(self) -> None:
        alive = [p for ref in self._parameters if (p := ref()) is not None]
        for parameter in alive:
            if parameter.grad is not None:
                self.memory.mark(parameter.grad, "gradients")
        self._parameters = [weakref.ref(p) for p in {id(p): p for p in alive}.values()]


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
    """Run the block as if on that GPU; nothing is allocated, and torch is as before when the block ends.

    `mode="auto"` makes fake CUDA tensors where that works on this build, and otherwise fake CPU tensors (`gpu.mode`
    says which). `occupied_bytes` are held by others on the card (a colocated vLLM's share, other processes). With
    `enforce_capacity=False` nothing raises and the peaks say how much would have been needed. With `follow_layers` the
    run of a model that `layers.shrink` made shallow can be expanded afterwards (`expand.expanded`).
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
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # its first use imports much that looks for a real CUDA
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
    """Keep the random state, autograd's threading and the environment; backward runs in this thread meanwhile."""
    _start_autograd_engine()
    random_state = torch.get_rng_state()
    multithreading = torch._C._is_multithreading_enabled()
    loading = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    torch.autograd.set_multithreading_enabled(False)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers would load weights in threads, which have no fake mode
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
    """Let the engine count its devices (once per process) before it could see the simulated one."""
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
_SELF_TEST: list[str] = []  # the outcome, once per process: "" is passed


def _choose_mode(mode: Literal["auto", "cuda", "cpu"]) -> tuple[Mode, str]:
    """The mode to run in, and why it is not the better one."""
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
    """Forward, backward and step of a tiny model, with the bytes checked; returns what went wrong, or ""."""
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
