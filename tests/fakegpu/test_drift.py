"""A torch, transformers or TRL that differs from those tested, and libraries that swap kernels: simulated, or noted."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from autofit.fakegpu import FakeGpu, device, fake_gpu
from autofit.fakegpu.patches import registry
from autofit.fakegpu.patches.attention import Attention

MIB = 1 << 20
_C_ATTENTION = torch._C._nn.scaled_dot_product_attention


def _import_all() -> None:
    for name in registry._LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):  # not installed, or TRL 1.14 without Triton
            importlib.import_module(name)


def _notes(gpu: FakeGpu) -> list[str]:
    """The notes, without the one that TRL 1.14 and 1.15 need where Triton is not installed."""
    return [note for note in gpu.notes if not note.startswith("Triton is not installed")]


def test_every_patch_finds_its_target_in_the_versions_at_hand() -> None:
    _import_all()
    with fake_gpu("a100-40gb") as gpu:
        torch.ones(2, device="cuda")
    assert _notes(gpu) == []
    assert device._DRIFT == []


def test_adamss_which_clusters_a_weights_values_has_clusters_of_one_size() -> None:
    layer = pytest.importorskip("peft.tuners.adamss.layer")
    with fake_gpu("a100-40gb") as gpu:
        clusters, count = layer.clustering_Z(torch.ones(10, 8, device="cuda"), 3, 10)
        sizes = [len(rows) for rows in layer.seg_locations(clusters).values()]
    assert (sizes, count) == ([4, 3, 3], 3)
    assert "k-means was not run" in gpu.notes[-1]


def test_a_patch_without_target_is_noted_with_its_reason_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.cache_utils
    import transformers.core_model_loading as loading

    monkeypatch.delattr(loading, "_materialize_copy")
    monkeypatch.delattr(torch.cuda, "utilization")
    monkeypatch.setitem(registry._LIBRARIES, "transformers.moved_away", registry._LIBRARIES[loading.__name__])
    monkeypatch.setitem(registry._LIBRARIES, "transformers.cache_utils", lambda gpu, module: module.gone)
    with fake_gpu("a100-40gb") as gpu:
        pass
    assert len(_notes(gpu)) == 4
    version = f"transformers {transformers.__version__} is not simulated in full"
    assert sum(note.startswith(version) for note in _notes(gpu)) == 3
    for words in (
        "values would be read into real memory",
        "torch.cuda.utilization",
        "moved_away",
        "no attribute 'gone'",
    ):
        assert any(words in note for note in _notes(gpu))


def test_a_module_that_an_older_version_does_not_have_yet_is_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    import trl

    of_older = {"trl.generation.vllm_generation": ("0.24.0", trl), "transformers.models.new": ("5.6.0", transformers)}
    monkeypatch.setitem(registry._LIBRARIES, "transformers.models.new", lambda gpu, module: [])
    monkeypatch.setitem(registry._SINCE, "transformers.models.new", (5, 8))
    has = registry._has
    monkeypatch.setattr(registry, "_has", lambda package, name: name not in of_older and has(package, name))
    for name, (version, package) in of_older.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(package, "__version__", version)
    with fake_gpu("a100-40gb") as gpu:
        pass
    assert not any("there is no module" in note for note in gpu.notes)


def _attend(attention: Callable[..., torch.Tensor]) -> None:
    q = [torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attention(*q, is_causal=True).sum().backward()


def _peak(attention: Callable[..., torch.Tensor] | None = None) -> tuple[int, dict[str, int]]:
    with fake_gpu("a100-40gb") as gpu:
        _attend(attention or torch.nn.functional.scaled_dot_product_attention)
    return gpu.peak_allocated_bytes, gpu.attention_kernels


def test_attention_wrapped_by_a_library_is_the_cards_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _peak()
    assert plain[0] < 32 * MIB  # one matrix of scores alone takes 32 MiB
    assert plain[1] == {"flash": 1}
    assert _peak(torch.ops.aten.scaled_dot_product_attention) == plain
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: _C_ATTENTION(*a, **k))
    assert _peak() == plain
    monkeypatch.undo()
    with fake_gpu("a100-40gb") as gpu:
        _attend(torch.nn.functional.scaled_dot_product_attention)
        with monkeypatch.context() as inside:
            inside.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: _C_ATTENTION(*a, **k))
            _attend(torch.nn.functional.scaled_dot_product_attention)
    assert (gpu.peak_allocated_bytes, gpu.attention_kernels) == (plain[0], {"flash": 2})


def test_attention_in_inference_mode_and_under_autocast_is_the_cards_too() -> None:
    with fake_gpu("a100-40gb") as gpu, torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        q = torch.randn(2, 8, 1024, 64, device="cuda")
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype is torch.bfloat16
    assert gpu.attention_kernels == {"flash": 1}
    assert gpu.peak_allocated_bytes < 32 * MIB


def test_the_self_test_notices_attention_that_is_counted_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SELF_TEST", [])
    monkeypatch.setattr(device, "_DRIFT", [])
    monkeypatch.setattr(Attention, "select", lambda *args, **options: "math")
    with fake_gpu("a100-40gb") as gpu:
        pass
    assert any("scaled_dot_product_attention keeps" in note for note in _notes(gpu))


def test_the_self_test_notices_checkpointing_that_keeps_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SELF_TEST", [])
    monkeypatch.setattr(device, "_DRIFT", [])
    monkeypatch.setattr(device, "checkpoint", lambda function, x, **options: function(x))
    with fake_gpu("a100-40gb") as gpu:
        pass
    assert len(_notes(gpu)) == 1
    assert "a checkpointed layer keeps" in _notes(gpu)[0]


def test_a_kernel_of_another_library_is_counted_by_its_shapes_and_noted() -> None:
    @torch.library.custom_op("kernels_of_a_test::norm", mutates_args=())
    def norm(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there is no card to run it on")

    @norm.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with fake_gpu("a100-40gb") as gpu:
        x = torch.ones(MIB, device="cuda")
        assert norm(x).shape == x.shape
    assert gpu.peak_allocated_bytes == 8 * MIB
    assert [note.split()[2] for note in _notes(gpu)] == ["kernels_of_a_test"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with CUDA builds of torch; see nox -s compat")
def test_a_triton_kernel_of_another_library_is_not_launched_and_noted() -> None:
    import triton  # type: ignore[import-not-found,unused-ignore]

    def rope(x, out):  # type: ignore[no-untyped-def]
        raise AssertionError("there is no card to run it on")

    rope.__module__ = "liger_kernel.ops.rope"

    def launch(gpu: FakeGpu) -> None:
        x = torch.ones(MIB, device="cuda")
        triton.JITFunction(rope)[(1,)](x, torch.empty_like(x))
        assert gpu.memory.allocator.allocated_bytes == 4 * MIB

    with fake_gpu("a100-40gb") as gpu:
        launch(gpu)
    assert gpu.peak_allocated_bytes == 8 * MIB
    assert any("Triton kernels of liger_kernel were not run" in note for note in _notes(gpu))
    assert "triton" in sys.modules
