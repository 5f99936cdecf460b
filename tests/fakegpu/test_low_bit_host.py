"""The host's time for bitsandbytes' Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.patches.low_bit import EIGHT_BITS, FOUR_BITS, FOUR_BITS_NESTED, UPDATE, Product


class Worked:
    """A listener of the clock that adds up what the host does beside kernels and views, in launches."""

    aside = of_step = False

    def __init__(self, gpu: FakeGpu) -> None:
        self.launches = 0.0
        gpu.clock.log = self  # type: ignore[assignment]

    def view(self) -> None: ...

    def kernel(self, *args: object, **more: object) -> None: ...

    def moment(self, lanes: object) -> int:
        return 0

    def wait(self, lanes: object, number: int) -> None: ...

    def host_work(self, launches: float, *, alone: bool) -> None:
        self.launches += launches

    def during(self, run: Callable[[], object]) -> float:
        before = self.launches
        run()
        return self.launches - before


layers: Any = bnb.nn
optimizers: Any = bnb.optim


def four(*, nested: bool) -> Any:
    return layers.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=nested)


def eight() -> Any:
    return layers.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)


@pytest.mark.parametrize(
    ("make", "cost"),
    [
        (lambda: four(nested=False), FOUR_BITS), (lambda: four(nested=True), FOUR_BITS_NESTED), (eight, EIGHT_BITS),
    ],
    ids=["4 bits", "4 bits, double", "8 bits"],
)  # fmt: skip
def test_a_product_takes_the_host_what_was_measured(make: Callable[[], Any], cost: Product) -> None:
    with fake_gpu("h100") as gpu:
        layer = make().to("cuda").requires_grad_(False)
        x = torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x)  # the first call of one of 8 bits arranges its weight
        worked, out = Worked(gpu), list[torch.Tensor]()
        with torch.no_grad():
            assert worked.during(lambda: layer(x)) == pytest.approx(cost.forward)
        assert worked.during(lambda: out.append(layer(x))) == pytest.approx(cost.recorded)
        assert worked.during(lambda: out[0].sum().backward()) == pytest.approx(cost.backward)


@pytest.mark.parametrize(("size", "is_low"), [(4096, True), (64, False)])
def test_an_update_takes_it_for_each_tensor_by_the_bits_of_its_states(size: int, is_low: bool) -> None:
    with fake_gpu("h100") as gpu:
        weights = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for _ in range(5)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = optimizers.AdamW8bit(weights)
        optimizer.step()
        assert Worked(gpu).during(optimizer.step) == pytest.approx(5 * UPDATE[is_low])
