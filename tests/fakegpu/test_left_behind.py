"""A block leaves torch as it was, also for modules first imported inside it, and whatever fails."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.library
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.cuda import device_count, is_available  # names taken before any block
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._device import _device_constructors

from autofit.fakegpu import FakeGpuError, fake_gpu
from autofit.fakegpu.patches import redirect
from autofit.fakegpu.patches.redirect import Undo

OWNERS = (
    torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs, torch.cuda.nvtx,
    torch.accelerator, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.UntypedStorage, torch.Generator,
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch._C, torch._C._nn, torch._VF,
    torch.backends.cudnn, torch.backends.mha, torch.utils.data.DataLoader, torch._subclasses.fake_tensor,
)  # fmt: skip


def _attributes() -> dict[tuple[str, str], tuple[object, ...]]:
    """Every attribute of torch that could be patched, by identity; of a function its code and defaults, too."""
    found: dict[tuple[str, str], tuple[object, ...]] = {}
    for owner in OWNERS:
        for name, value in vars(owner).items():
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            code = (inner.__code__, inner.__kwdefaults__) if isinstance(inner, types.FunctionType) else ()
            found[str(owner), name] = (value, *code)
    return found


def _dispatcher() -> str:
    return torch._C._dispatch_dump("aten::scaled_dot_product_attention") + str(sorted(torch.library._impls))


@pytest.fixture
def late() -> Iterator[ModuleType]:
    """`late.py`, imported inside a block on a T4 that has ended."""
    sys.modules.pop("fakegpu.late", None)
    with fake_gpu("t4"):
        module = importlib.import_module("fakegpu.late")
        assert module.get_device_name() == "Tesla T4"
        assert module.doubled(torch.ones(2, device="cuda")).device.type == "cuda"
    yield module
    sys.modules.pop("fakegpu.late", None)


def _attend(attention: object = scaled_dot_product_attention) -> None:
    q = torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.float16)
    attention(q, q, q)  # type: ignore[operator]


def test_every_attribute_of_torch_is_the_same_object_after_a_block() -> None:
    with fake_gpu("t4"):
        pass
    before, kernels, stand_ins = _attributes(), _dispatcher(), len(redirect._STAND_INS)
    for name in ("t4", "h100"):
        with fake_gpu(name):
            torch.nn.Linear(4, 4).cuda()(torch.ones(2, 4, device="cuda")).sum().backward()
            assert _dispatcher() != kernels
    after = _attributes()
    assert before.keys() == after.keys()
    changed = [name for name in before if any(a is not b for a, b in zip(before[name], after[name], strict=True))]
    assert changed == []
    assert _dispatcher() == kernels
    assert len(redirect._STAND_INS) == stand_ins


def test_names_taken_inside_are_the_originals_outside(late: ModuleType) -> None:
    assert late.is_available is torch.cuda.is_available
    assert not late.is_available()
    assert late.scaled_dot_product_attention is scaled_dot_product_attention
    assert (late.Event, late.Stream, late.save, late.load) == (
        torch.cuda.Event,
        torch.cuda.Stream,
        torch.save,
        torch.load,
    )
    assert late.to_list(torch.ones(2)) == late.to_numpy(torch.ones(2)).tolist() == [1.0, 1.0]
    assert late.doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    for name in ("Stream", "current_device", "synchronize"):
        with pytest.raises((RuntimeError, AssertionError)):  # what a build or machine without CUDA says
            getattr(late, name)()
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="its block has ended"):
            late.clear_workspaces()


def test_the_late_generator_is_a_class_like_torchs(late: ModuleType) -> None:
    made = late.Generator().manual_seed(3)
    assert isinstance(made, torch.Generator)
    assert isinstance(torch.Generator(), late.Generator)
    assert issubclass(torch.Generator, late.Generator)
    assert not isinstance(3, late.Generator)
    assert isinstance(late.Seeded(), late.Seeded)
    assert not isinstance(made, late.Seeded)
    assert torch.equal(torch.randn(4, generator=made), torch.randn(4, generator=torch.Generator().manual_seed(3)))
    assert late.Generator | None == (late.Generator | None)


def test_names_taken_in_one_block_are_the_card_of_the_next(late: ModuleType) -> None:
    with fake_gpu("h100") as gpu:
        _attend(late.scaled_dot_product_attention)
        held = torch.ones(1 << 20, device="cuda")
        assert late.is_available()
        assert "H100" in late.get_device_name()
        assert late.memory_allocated() == torch.cuda.memory_allocated() >= held.numel() * 4
        start, end = late.Event(enable_timing=True), late.Event(enable_timing=True)
        assert isinstance(start, late.Event)
        start.record()
        held @ held
        end.record()
        assert start.elapsed_time(end) > 0
        with torch.cuda.stream(late.Stream()), torch.cuda.device(0):
            assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
        assert isinstance(late.Generator(device="cuda"), torch.Generator)
        late.clear_workspaces()
    assert gpu.attention_kernels == {"cudnn": 1}


def test_names_taken_before_any_block_see_its_card() -> None:
    with fake_gpu("t4") as gpu:
        assert is_available()
        assert device_count() == 1
        _attend(scaled_dot_product_attention)
    assert gpu.attention_kernels == {"efficient": 1}
    assert not is_available()


def test_nothing_keeps_the_card_alive_after_its_block() -> None:
    for name in ("fakegpu.late", "transformers.models.gpt2.modeling_gpt2", "safetensors.torch"):
        sys.modules.pop(name, None)
    with fake_gpu("t4") as gpu:
        late = importlib.import_module("fakegpu.late")
        saving = importlib.import_module("safetensors.torch")
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    assert type(saving.__loader__).__module__ == "_frozen_importlib_external"
    card = weakref.ref(gpu)
    del gpu
    gc.collect()
    assert card() is None
    assert not late.is_available()


def _trained() -> list[torch.Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.randint(64, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_training_after_a_block_equals_one_before_it_to_the_bit() -> None:
    before = _trained()
    with fake_gpu("h100"):
        importlib.import_module("transformers.models.qwen3.modeling_qwen3")
        _trained()
    after = _trained()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_first_device_context_may_be_inside_a_block() -> None:
    """torch caches which constructors such a context redirects: those of the block must not be among them."""
    _device_constructors.cache_clear()
    with fake_gpu("l4"), torch.device("meta"):
        assert torch.ones(1).is_meta
        assert torch.tensor([1.0]).is_meta
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


def test_a_librarys_own_patch_made_inside_stays_and_works_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", torch.cuda.empty_cache)
    monkeypatch.setattr(torch.Tensor, "numpy", torch.Tensor.numpy)
    calls: list[str] = []

    def noisy(name: str, original: object) -> object:
        def run(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return original(*args, **kwargs)  # type: ignore[operator]

        return run

    with fake_gpu("t4"):
        torch.cuda.empty_cache = noisy("empty_cache", torch.cuda.empty_cache)  # type: ignore[assignment]
        torch.Tensor.numpy = noisy("numpy", torch.Tensor.numpy)  # type: ignore[assignment, method-assign]
    torch.cuda.empty_cache()
    assert torch.ones(2).numpy().tolist() == [1.0, 1.0]
    with fake_gpu("t4"):
        torch.cuda.empty_cache()
        assert torch.tensor([2]).numpy().tolist() == [2]
        with unset_fake_temporarily():
            assert torch.tensor([3]).numpy().tolist() == [3]  # a real tensor: through the library's wrapper
    assert set(calls) == {"empty_cache", "numpy"}


def test_a_subclass_of_a_cuda_class_is_refused_not_mistaken() -> None:
    class Timed(torch.cuda.Event):
        pass

    with fake_gpu("t4"), pytest.raises(FakeGpuError, match="subclass of Event"):
        Timed()  # type: ignore[no-untyped-call]


def test_every_undo_runs_and_all_failures_are_told_together() -> None:
    done: list[str] = []

    def fails(text: str) -> None:
        raise RuntimeError(text)

    undo = Undo()
    undo.add(done.append, "first")
    undo.add(fails, "one")
    undo.add(done.append, "second")
    undo.add(fails, "two")
    assert [str(error) for error in undo.run()] == ["two", "one"]
    assert done == ["second", "first"]
    assert undo.run() == []


def test_a_failing_undo_restores_the_rest_and_keeps_the_blocks_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from autofit.fakegpu.patches.registry import Registry

    def fails(registry: Registry) -> None:
        raise LookupError("cannot be restored")

    monkeypatch.setattr(Registry, "note_renamed_modules", fails)
    before = _attributes()
    with pytest.raises(ExceptionGroup, match="not restored in full") as group, fake_gpu("t4"):
        pass
    assert [type(error) for error in group.value.exceptions] == [LookupError]
    with pytest.raises(ZeroDivisionError) as own, fake_gpu("t4"):
        print(1 / 0)
    assert any("cannot be restored" in note for note in own.value.__notes__)
    after = _attributes()
    assert all(a is b for name in before for a, b in zip(before[name], after[name], strict=True))
    with pytest.raises(ExceptionGroup), fake_gpu("t4"):  # the next block is not refused as nested
        pass
