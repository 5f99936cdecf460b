"""Kinds of kernels and of allocations, by which a formula finds the same one at other sizes."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from autofit.fakegpu.device import fake_gpu
from autofit.fakegpu.formula.kernel_log import KernelKinds, KernelLog
from autofit.fakegpu.formula.polynomials import Basis, Symbols
from autofit.fakegpu.specs import gpu_spec


def kinds_of(program: Callable[[], None]) -> tuple[KernelKinds, list[str]]:
    """The kernels of the program on a simulated card, and the operations of its allocations."""
    log = KernelLog()
    with fake_gpu(gpu_spec("l4")) as gpu:
        gpu.clock.log, log.on, log.phase = log, True, "update"
        program()
        return log.kinds({"update": 1}), [allocation.op for allocation in gpu.memory.allocations]


def trains(layer: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> None:
    out = layer(torch.randn(*shape, device="cuda", requires_grad=True))
    out.backward(torch.empty_like(out))


def test_a_weights_gradient_is_no_kind_of_its_inputs_where_rows_are_as_many_as_its_width() -> None:
    """Both were one kind at 2,048 tokens and two at 3,072: no product was found again, none grew with the tokens."""
    kinds, operations = kinds_of(lambda: trains(torch.nn.Linear(64, 64, bias=False, device="cuda"), 64, 64))
    products = {kind.origin[1]: count for kind, count in kinds.counts.items() if kind.shapes[0] == (64, 64)}  # type: ignore[index]
    assert products["mm"] == 2  # forward, and the gradient of the input
    assert products["mm over rows"] == 1
    assert operations.count("mm over rows") == 1


def test_the_flops_of_a_convolutions_backward_grow_with_the_samples() -> None:
    """They were taken to grow with its last output, the gradient of a weight."""
    weight = (8, 1, 4)

    def program(samples: int) -> KernelKinds:
        def convolve(inputs: torch.Tensor) -> torch.Tensor:
            return functional.conv1d(inputs, torch.randn(*weight, device="cuda", requires_grad=True), groups=8)

        return kinds_of(lambda: trains(convolve, samples, 8, 100))[0]

    base, more = program(2), program(3)
    symbols = Symbols(("B",), (2.0,), rounds=False)
    symbols.start(base.per_segment)
    symbols.vary("B", 3.0, base.per_segment, more.per_segment)
    (kind,) = [kind for kind, info in base.infos.items() if info.name == "convolution_backward"]
    seconds = base.infos[kind].flop_seconds(kind, symbols, 1.0)
    basis = Basis.of([seconds])
    two, eight = basis.at(torch.tensor([[2.0], [8.0]]).numpy()) @ basis.rows([seconds])[0]
    assert eight == pytest.approx(4 * two)
    assert two > 0
