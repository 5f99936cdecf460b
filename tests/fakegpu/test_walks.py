"""The host's time for Python that goes over a model's modules and over lists of tensors."""

from __future__ import annotations

import inspect

import pytest
import torch

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.depth.stack import own_work
from autofit.fakegpu.tracer import OF_A_TENSOR, TRAIN, VISIT


class Alone:
    """A listener of the clock that adds up what the host does alone, in launches."""

    aside = of_step = False

    def __init__(self) -> None:
        self.launches = 0.0

    def view(self) -> None: ...

    def kernel(self, *args: object, **more: object) -> None: ...

    def moment(self, lanes: object) -> int:
        return 0

    def wait(self, lanes: object, number: int) -> None: ...

    def host_work(self, launches: float, *, alone: bool) -> None:
        self.launches += launches * alone


def model() -> torch.nn.Module:
    """Nine modules with eight weights."""
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(4)))


def alone(gpu: FakeGpu) -> Alone:
    gpu.clock.log = log = Alone()  # type: ignore[assignment]
    return log


def test_each_module_counts_once_for_its_mode_and_for_its_weights() -> None:
    net = model()
    with fake_gpu("h100") as gpu:
        log, before_s = alone(gpu), gpu.clock.host_s
        net.train()
        assert log.launches == pytest.approx(9 * TRAIN)
        list(net.parameters())
        assert log.launches == pytest.approx(9 * (TRAIN + VISIT))
        net.eval().train()  # around a rollout: not of each micro-batch
        assert gpu.clock.host_s - before_s == pytest.approx(log.launches * gpu.clock.costs.launch_s)


def test_a_walk_that_ends_early_counts_what_it_saw_and_one_of_the_simulation_nothing() -> None:
    net = model()
    with fake_gpu("h100") as gpu:
        log = alone(gpu)
        next(net.parameters())  # the whole, its first part, and that part's layer
        assert log.launches == pytest.approx(3 * VISIT)
        with own_work():
            net.train()
            list(net.named_modules())
        assert log.launches == pytest.approx(3 * VISIT)


def test_clipping_and_a_fused_step_count_each_tensor() -> None:
    with fake_gpu("h100") as gpu:
        weights = [torch.nn.Parameter(torch.zeros(8, device="cuda")) for _ in range(5)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(weights, fused=True)
        log = alone(gpu)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        clipped = log.launches
        assert clipped == pytest.approx(5 * OF_A_TENSOR[torch.ops.aten._foreach_norm.Scalar])
        optimizer.step()
        assert log.launches - clipped == pytest.approx(5 * OF_A_TENSOR[torch.ops.aten._fused_adamw_.default])


def test_a_function_that_yields_does_so_in_a_block_too_as_python_warns_of_another_kind_of_code() -> None:
    with fake_gpu("a100-40gb"):
        assert inspect.isgeneratorfunction(torch.nn.Module.named_modules)
        assert [name for name, _ in torch.nn.Sequential(torch.nn.ReLU()).named_modules()] == ["", "0"]
