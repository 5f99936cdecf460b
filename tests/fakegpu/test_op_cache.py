"""What the kernels for meta tensors tell of an operation is what FakeTensorMode tells."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from autofit.fakegpu import device, fake_gpu
from autofit.fakegpu import op_cache as cache
from autofit.fakegpu.clock import Clock, KnownCosts
from autofit.fakegpu.op_cache import Shortcut
from autofit.fakegpu.patches import low_bit


def size_one(spec: object) -> object:
    """A description without the strides of dimensions of one element, which no kernel uses."""
    if not isinstance(spec, cache._Spec):
        return spec
    strides = tuple(stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1)
    return spec.shape, strides, spec.offset, spec.dtype, spec.device, spec.viewed


def test_every_operation_of_a_training_and_a_rollout_is_described_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    told, compared = Shortcut._by_meta, Counter[str]()

    def both(self: Shortcut, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        entry = told(self, func, args, kwargs)
        if entry is not None and not func._schema.is_mutable:
            by_mode = cache._remember(func, args, kwargs, func(*args, **kwargs))
            assert by_mode is not None
            assert entry[0] == by_mode[0], func
            assert [size_one(o) for o in entry[1]] == [size_one(o) for o in by_mode[1]], func
            compared[func._schema.name] += 1
        return entry

    monkeypatch.setattr(Shortcut, "_by_meta", both)
    monkeypatch.setattr(device, "Shortcut", Shortcut)  # which knows nothing of earlier cards
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with fake_gpu("a100-80gb"):
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.randint(0, 999, (3, 40), device="cuda")
        mask = (torch.arange(40, device="cuda") > 3).expand(3, 40).long()
        for _ in range(2):
            model(rows, attention_mask=mask, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.generate(rows, attention_mask=mask, max_new_tokens=4, pad_token_id=0)
        wide = torch.randn(5, 1, 7, 3, device="cuda").transpose(1, 3)
        (wide.softmax(-1) * wide.mean(2, keepdim=True)).sum((0, 2))
        torch.cat([wide, wide[:, :1]], 1).clone().split(2, 1)
    assert len(compared) >= 30  # kinds of operations
    assert {"aten::mm", "aten::view", "aten::add", "aten::cat", "aten::silu", "aten::_to_copy"} <= set(compared)


def test_an_argument_given_twice_is_not_read_twice() -> None:
    """Two tensors of one shape, and one tensor twice, are different operations: the second reads half the bytes."""
    with fake_gpu("a100-80gb") as gpu:
        a, b = torch.empty(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
        before = gpu.clock.bytes_moved
        for _ in range(2):
            a * b
        two = gpu.clock.bytes_moved - before
        for _ in range(2):
            a * a
        assert gpu.clock.bytes_moved - before - two == 2 * two // 3


def test_rows_of_one_tensor_are_one_kind_of_input() -> None:
    with fake_gpu("a100-80gb") as gpu:
        shortcut = gpu.tracer.shortcut
        assert shortcut is not None
        shortcut.known = {}
        rows = torch.empty(8, 32, device="cuda").unbind(0)
        cut = [(row + 1, row[2:], row.as_strided((2,), (1,)), row.as_strided((2,), (1,), 5)) for row in rows]
        kinds = Counter(key[0] for key in shortcut.known if isinstance(key, tuple))
    assert kinds[torch.ops.aten.add.Tensor] == kinds[torch.ops.aten.slice.Tensor] == 1
    for number, (added, *views) in enumerate(cut):
        assert added.storage_offset() == 0
        assert [view.storage_offset() for view in views] == [32 * number + 2, 32 * number, 5]


def test_a_linear_layer_after_attention_on_one_token_is_one_product_as_in_torch() -> None:
    """A view's stride of a dimension of one element decides whether `linear` folds its input or makes a batch of it."""

    def products(device: str) -> Counter[str]:
        attended = torch.empty_strided((3, 1, 4, 16), (64, 16, 16, 1), device=device)  # heads and tokens transposed
        weight = torch.empty(32, 64, device=device)
        with torch.no_grad(), Products() as seen:
            torch.nn.functional.linear(attended.view(3, 1, -1), weight)
        return Counter({name: seen.names[name] for name in ("mm", "bmm") if seen.names[name]})

    with fake_gpu("a100-80gb"):
        simulated = products("cuda")
    assert simulated == products("cpu") == {"mm": 1}


class Products(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        self.names[func._schema.name[6:]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [
    lambda: torch.tensor([[1, 2], [3, 4]]), lambda: torch.tensor(0.5, dtype=torch.float64), lambda: torch.tensor([]),
    lambda: torch.tensor([1 + 2j])])  # fmt: skip
def test_a_tensor_of_python_values_is_as_torch_makes_it(make: Callable[[], torch.Tensor]) -> None:
    with fake_gpu("l40s"):
        found = make()
        told = found.shape, found.dtype, found.device
    real = make()
    assert told == (real.shape, real.dtype, real.device)


def test_cards_that_share_costs_compute_each_once_and_take_the_same_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast traces one recipe on eight cards, one after another."""
    computed: list[OpOverload] = []
    of_one = Clock._cost

    def counting(self: Clock, func: OpOverload, *rest: Any) -> Any:
        computed.append(func)
        return of_one(self, func, *rest)

    def trained(known: KnownCosts) -> tuple[float, float, int]:
        with fake_gpu("a100-80gb") as gpu:
            gpu.clock.known = known
            layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(3):
                layer(torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16)).softmax(-1).sum().backward()
            return gpu.clock.host_s, gpu.clock.gpu_s, gpu.clock.kernel_count

    monkeypatch.setattr(Clock, "_cost", counting)
    known: KnownCosts = {}
    alone = trained(known)
    assert len(computed) >= 5
    computed.clear()
    assert trained(known) == alone
    assert computed == []


def test_the_function_that_chooses_bitsandbytes_kernels_is_read_once() -> None:
    with fake_gpu("a100-80gb"):
        pass
    before = low_bit._read.cache_info()
    for card in ("a100-80gb", "h100"):
        with fake_gpu(card):
            pass
    assert low_bit._read.cache_info().misses == before.misses
    assert low_bit._read.cache_info().hits == before.hits + (2 if "bitsandbytes" in sys.modules else 0)


def test_an_operation_with_a_replacement_is_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costed: list[str] = []
    cost = Clock._cost

    def counted(clock: Clock, func: OpOverload, *rest: Any) -> Any:
        costed.append(func.name())
        return cost(clock, func, *rest)

    monkeypatch.setattr(Clock, "_cost", counted)
    with fake_gpu("l4"):
        a, b = torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda")
        costed.clear()  # of the card's own first operations
        for _ in range(3):
            a + b
    assert costed.count("aten::add.Tensor") == 1
