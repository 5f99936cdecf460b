"""`autofit.fit_check`: ordinary training loops, judged on cards that are not there."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fakegpu.ordinary_loops import language_model, tokens
from fakegpu.tiny_trainers import profiler_peak_bytes
from torch import nn

import autofit
from autofit.errors import ConfigError
from autofit.fakegpu import device, fake_gpu
from autofit.fakegpu.specs import gpu_spec

MIB = 1 << 20
State = tuple[nn.Module, torch.optim.Optimizer]


def build(width: int = 1024, device: str = "cuda") -> State:
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
    model = model.to(device)
    return model, torch.optim.Adam(model.parameters(), foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    model(torch.randn(8, weight.shape[1], device=weight.device)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_with_adam_needs_weights_gradients_and_moments() -> None:
    found = autofit.fit_check(build, step, gpu="a100-40gb", target_vram="20GB")
    spec = gpu_spec("a100-40gb")
    weights, workspaces = 2 * 4 * MIB, 2 * 8320 * 1024
    assert (
        0 <= found.peak_allocated_bytes - workspaces - 4 * weights < 13 * MIB
    )  # three temporaries of Adam, 4 MiB each
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert found.device_used_bytes == found.peak_reserved_bytes + spec.context_bytes
    assert found.least_capacity_bytes is not None
    assert found.least_capacity_bytes <= found.device_used_bytes
    assert (found.gpu, found.capacity_bytes, found.target_bytes) == ("a100-40gb", spec.capacity_bytes, 20 * 10**9)
    assert found.fits
    assert found.margin_bytes == 20 * 10**9 - found.least_capacity_bytes
    assert found.step_s is not None
    assert found.step_s > 0
    assert found.peak_phase in ("step 1", "step 2")
    alive = {row.category: row.allocated_bytes for row in found.alive_at_peak}
    assert alive["weights"] == weights
    assert alive["optimizer"] >= 2 * weights
    assert all("test_fitcheck.py" in row.place for row in found.alive_at_peak if row.category == "weights")


def test_the_peak_is_that_of_the_same_loop_in_a_block_and_of_the_cpu_allocator() -> None:
    def loop(device: str) -> None:
        state = build(device=device)
        for _ in range(2):
            step(*state)

    torch.set_num_threads(1)
    found = autofit.fit_check(build, step, gpu="a100-40gb")
    with fake_gpu("a100-40gb") as card:
        loop("cuda")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (
        card.peak_allocated_bytes,
        card.peak_reserved_bytes,
    )
    gc.collect()
    real = profiler_peak_bytes(lambda: loop("cpu"))
    workspaces = 2 * 8320 * 1024  # cuBLAS has them, a CPU has not
    assert found.peak_allocated_bytes - workspaces == pytest.approx(real, rel=1e-3)


def test_optimizer_state_shows_in_the_second_step_and_one_step_says_so() -> None:
    def with_a_large_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(16384, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one = autofit.fit_check(build, with_a_large_batch, gpu="l4", steps=1)
    two = autofit.fit_check(build, with_a_large_batch, gpu="l4", steps=2)
    assert (one.peak_phase, two.peak_phase) == ("step 1", "step 2")
    moments, workspace = 2 * 2 * 4 * MIB, 8320 * 1024  # cuBLAS's for the backward pass
    assert two.peak_allocated_bytes - one.peak_allocated_bytes == moments + workspace
    assert any("one step only" in note for note in one.notes)
    assert not any("one step only" in note for note in two.notes)


def test_a_loop_that_does_not_fit_is_a_result_with_the_missing_bytes() -> None:
    found = autofit.fit_check(lambda: build(32768), step, gpu="t4")
    assert not found.fits
    assert found.peak_allocated_bytes > 4 * 2 * 4 * 32768**2
    assert found.margin_bytes is not None
    assert found.margin_bytes < -10 * 10**9
    assert found.verdict.startswith("does not fit in 15.64 GB on t4: it needs ")
    assert autofit.fit_check(lambda: build(32768), step, gpu="h100").fits


def test_a_target_below_the_need_does_not_fit_though_the_card_is_large() -> None:
    enough = autofit.fit_check(build, step, gpu="h100")
    assert enough.least_capacity_bytes is not None
    assert autofit.fit_check(build, step, gpu="h100", target_vram=enough.least_capacity_bytes).fits
    assert not autofit.fit_check(build, step, gpu="h100", target_vram=enough.least_capacity_bytes - 1).fits


def test_a_card_of_the_least_capacity_runs_the_loop_and_one_of_the_peak_does_not() -> None:
    found = autofit.fit_check(build, step, gpu="h100")
    assert found.least_capacity_bytes is not None

    def run_on(capacity_bytes: int) -> None:
        with fake_gpu(replace(gpu_spec("h100"), capacity_bytes=capacity_bytes)):
            state = build()
            for _ in range(2):
                step(*state)

    run_on(found.least_capacity_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        run_on(gpu_spec("h100").context_bytes + found.peak_allocated_bytes - 1)


def test_the_size_on_the_box_is_the_whole_card() -> None:
    found = autofit.fit_check(build, step, gpu="t4", target_vram="16GB")
    assert found.target_bytes == found.capacity_bytes == gpu_spec("t4").capacity_bytes


def test_running_out_under_a_limit_set_by_the_code_is_a_result_too() -> None:
    def capped() -> State:
        torch.cuda.set_per_process_memory_fraction(0.001)
        return build()

    found = autofit.fit_check(capped, step, gpu="a100-40gb")
    assert not found.fits
    assert found.least_capacity_bytes is found.margin_bytes is None
    assert "CUDA out of memory" in str(found)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_model_built_beforehand_is_copied_to_the_card_and_left_as_it_was(where: str) -> None:
    with torch.device(where):
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("table", torch.zeros(1000))
    before = dict(model.named_parameters())
    seen: list[nn.Module] = []

    def train(copied: nn.Module) -> None:
        if not seen:
            seen.append(copied)
            assert len(list(copied.parameters())) == 1
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        copied(torch.tensor([1, 2], device="cuda")).sum().backward()
        optimizer.step()

    found = autofit.fit_check(model, train, gpu="a10")
    weights = sum(row.allocated_bytes for row in found.alive_at_peak if row.category == "weights")
    assert weights == 100 * 64 * 4 + 4000
    assert seen[0] is not model
    assert all(p is before[name] and p.device.type == where for name, p in model.named_parameters())
    assert type(model[0].weight) is nn.Parameter


def test_a_language_model_needs_the_same_built_beforehand_or_by_a_function() -> None:
    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        ids = tokens("cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    given = autofit.fit_check(language_model(), train, gpu="l4")
    built = autofit.fit_check(lambda: language_model().cuda(), train, gpu="l4")
    assert given.peak_allocated_bytes == built.peak_allocated_bytes
    assert {"weights", "gradients", "optimizer"} <= {row.category for row in given.alive_at_peak}


def test_where_fake_cuda_tensors_do_not_work_the_answer_comes_from_fake_cpu_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(copied: nn.Module) -> None:
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        copied(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()

    monkeypatch.setattr(device, "_SELF_TEST", ["an unknown torch"])
    with pytest.warns(UserWarning, match="falls back"):
        found = autofit.fit_check(nn.Linear(64, 64, bias=False), train, gpu="a10")
    assert sum(row.allocated_bytes for row in found.alive_at_peak if row.category == "weights") == 4 * 64 * 64
    assert any("an unknown torch" in note for note in found.notes)


def test_anything_but_a_tuple_reaches_the_step_as_it_is() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = build(64)

    assert autofit.fit_check(Trainer, lambda t: step(t.model, t.optimizer), gpu="l4").fits


def test_a_step_without_an_optimizer_says_that_no_state_was_counted() -> None:
    def forward(model: nn.Module) -> None:
        model(torch.randn(4, 64, device="cuda"))

    found = autofit.fit_check(lambda: nn.Linear(64, 64).cuda(), forward, gpu="l4")
    assert any("no step of a torch.optim optimizer" in note for note in found.notes)


def test_an_error_of_the_loop_is_raised_and_torch_is_as_before() -> None:
    def fails(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        autofit.fit_check(build, fails, gpu="l4")
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(("change", "words"), [
    ({"gpu": "a1000"}, r"gpu must be the name of a known card: unknown GPU 'a1000'; did you mean"),
    ({"gpu": None}, r"gpu must be the name of a card, such as"),
    ({"step": 3}, r"step must be a function .* got 3"),
    ({"step": lambda model: None}, r"step must take what model\(\) returned, \(Sequential, Adam\); got"),
    ({"steps": 0}, r"steps must be a whole number of at least 1 .*; got 0"),
    ({"steps": True}, r"steps must be .*; got True"),
    ({"steps": 1.5}, r"steps must be .*; got 1.5"),
    ({"model": "gpt2"}, r"model must be a function .* got 'gpt2'; pass a function without arguments"),
    ({"model": nn.Linear}, r"model must take no arguments; .* 'in_features'.*; pass a function"),
    ({"model": lambda: build(device="cpu")}, r"the model must be on the card, and nothing was allocated there"),
    ({"target_vram": "20"}, r"target_vram: an amount of memory must look like 40GB"),
    ({"target_vram": -5}, r"target_vram must be a size such as .*; got -5"),
    ({"target_vram": 2.5}, r"target_vram must be a size such as .*; got 2.5"),
    ({"target_vram": "90GB"}, r"target_vram must be at most the capacity of l4, 23.66 GB; got 90.00 GB; lower it"),
    ({"gpu": "x", "steps": 0, "step": None}, r"step must .*; steps must .*; gpu must "),
])  # fmt: skip
def test_bad_input_is_refused_with_the_field_and_the_remedy(change: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"model": build, "step": step, "gpu": "l4"} | change
    check: Callable[..., object] = autofit.fit_check
    with pytest.raises(ConfigError, match=words):
        check(**given)


def test_an_optimizer_of_another_model_is_refused_for_its_state_would_be_missed() -> None:
    model, optimizer = build(64, "cpu")

    def train(copied: nn.Module) -> None:
        copied(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"an optimizer must hold the parameters of the model on the card; the Adam"):
        autofit.fit_check(model, train, gpu="l4")


def test_the_text_and_the_dictionary_tell_the_same() -> None:
    found = autofit.fit_check(build, step, gpu="l4")
    text, held = str(found), json.loads(json.dumps(found.to_dict()))
    assert text.startswith("fits in 23.66 GB on l4, with ")
    for words in ("peak allocated", "least capacity", "weights", "optimizer", "test_fitcheck.py", "alive at the peak"):
        assert words in text
    assert held["fits"] is True
    assert held["margin_bytes"] == found.margin_bytes
    assert held["alive_at_peak"][0]["allocated_bytes"] == found.alive_at_peak[0].allocated_bytes
    assert sum(row["allocated_bytes"] for row in held["alive_at_peak"]) == pytest.approx(
        found.peak_allocated_bytes, 1e-2
    )


def test_html_is_escaped_for_a_note_may_hold_anything() -> None:
    found = autofit.FitCheck(
        gpu="<l4>", capacity_bytes=1, target_bytes=1, peak_allocated_bytes=1, peak_reserved_bytes=1,
        device_used_bytes=1, least_capacity_bytes=1, step_s=None, peak_phase="<i>", alive_at_peak=(),
        notes=("<script>alert(1)</script>",),
    )  # fmt: skip
    html = found._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;l4&gt;" in html


def test_a_script_that_fits_by_giving_up_its_cache_says_that_more_is_used_on_a_card_without_a_limit() -> None:
    found = autofit.FitCheck(
        gpu="l4", capacity_bytes=9, target_bytes=9, peak_allocated_bytes=7, peak_reserved_bytes=11,
        device_used_bytes=12, least_capacity_bytes=8, step_s=None, peak_phase="step 2", alive_at_peak=(), notes=(),
    )  # fmt: skip
    assert "with the CUDA context, on a card without a limit" in str(found)
    assert "without a limit" not in str(replace(found, target_bytes=12))


def test_places_in_html_are_escaped_too() -> None:
    found = autofit.fit_check(lambda: build(64), step, gpu="l4")
    assert any("<lambda>" in row.place or "build" in row.place for row in found.alive_at_peak)
    assert "<lambda>" not in found._repr_html_()


def test_the_function_stays_a_function_whatever_was_imported_before_and_loads_no_torch() -> None:
    code = """
import sys
import autofit
from autofit.fitcheck import FitCheck
from autofit import fit_check
assert callable(autofit.fit_check) and autofit.fit_check is fit_check and autofit.FitCheck is FitCheck
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("step_s", "shown"), [(0.0054, "5.4 ms"), (47.81, "47.8 s"), (None, "-")])
def test_a_long_step_is_told_in_seconds(step_s: float | None, shown: str) -> None:
    found = autofit.fit_check(build, step, gpu="a100-40gb")
    assert f"  {'step':<16}{shown:>12}  predicted" in str(replace(found, step_s=step_s))
