"""Ordinary code on the simulated card: what it sees, when it runs out, and that nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device

from autofit.fakegpu import FakeGpuError, device, fake_gpu
from autofit.fakegpu.patches.guard import CUDA_GUARD, GuardUnavailableError

MIB = 1 << 20
GIB = 1 << 30


def _cpu_training_works() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.detach().clone()
    model(torch.randn(4, 8)).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, autofit, autofit.fakegpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_training_on_the_card_counts_weights_gradients_and_moments() -> None:
    with fake_gpu("a100-80gb") as gpu:
        assert gpu.mode == "cuda"
        model = torch.nn.Linear(1024, 1024, bias=False).cuda()
        assert model.weight.device == torch.device("cuda", 0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.randn(16, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        workspaces = 2 * 8320 * 1024
        tensors = 4 * 4 * MIB
        assert 0 <= gpu.peak_allocated_bytes - workspaces - tensors < 0.3 * MIB
        assert torch.cuda.max_memory_allocated() == gpu.peak_allocated_bytes
        assert gpu.peak_reserved_bytes >= gpu.peak_allocated_bytes
    at_peak = gpu.timeline.at_peak
    assert (at_peak["weights"], at_peak["gradients"], at_peak["optimizer"]) == (4 * MIB, 4 * MIB, 8 * MIB + 512)
    assert gpu.device_used_bytes == gpu.spec.context_bytes + gpu.peak_reserved_bytes
    assert gpu.elapsed_s > 0


def test_everything_is_undone_on_leaving_also_after_an_error() -> None:
    def looks() -> list[object]:
        modules = (torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.Tensor)
        held = [dict(vars(module)) for module in (*modules, torch.nn.Module, torch.nn.functional, torch.UntypedStorage)]
        return [*held, sys.meta_path[:], torch._C._is_multithreading_enabled(), torch.get_rng_state().tolist()]

    _cpu_training_works()
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    with fake_gpu("t4"):
        pass
    before = looks()
    with pytest.raises(ZeroDivisionError), fake_gpu("t4"):
        print(torch.randn(4, device="cuda").sum().item() / 0)
    after = looks()
    for one, two in zip(before, after, strict=True):
        assert one == two
    assert not torch.cuda.is_available()
    _cpu_training_works()


def test_running_out_raises_torchs_own_error_and_freeing_makes_room() -> None:
    with fake_gpu("t4") as gpu:
        held = [torch.empty(GIB // 4, device="cuda") for _ in range(14)]
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 1.00 GiB"):
            torch.empty(GIB // 4, device="cuda")
        free, total = torch.cuda.mem_get_info()
        assert free < GIB
        assert total == gpu.spec.capacity_bytes
        del held[:2]
        torch.empty(GIB // 2, device="cuda")  # 2 GiB: only after both cached segments were given back
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 2
        assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_peaks_can_be_reset_as_torch_does_and_the_object_keeps_the_highest() -> None:
    with fake_gpu("h100") as gpu:
        big = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        del big
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.memory_reserved() == 100 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
    assert gpu.peak_allocated_bytes == 100 * MIB


def test_the_card_describes_itself() -> None:
    with fake_gpu("rtx4090"):
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_name() == "NVIDIA GeForce RTX 4090"
        assert torch.cuda.is_bf16_supported()
        assert "CUDA OOMs" in torch.cuda.memory_summary()


def test_autocast_and_grad_scaler_work_and_the_scaler_steps() -> None:
    with fake_gpu("v100"):
        model = torch.nn.Linear(64, 64).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.randn(4, 64, device="cuda"))
        assert out.dtype is torch.float16
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (64, 64)


def test_marks_for_a_profiler_are_made_where_there_is_one_and_are_no_operations_else() -> None:
    mark, on_the_cpu = torch.profiler.record_function, [torch.profiler.ProfilerActivity.CPU]
    entered = mock.patch.object(torch.ops.profiler, "_record_function_enter_new")
    with fake_gpu("t4"), entered as enter, mark("alone"):
        enter.assert_not_called()
    with fake_gpu("t4"), torch.profiler.profile(activities=on_the_cpu) as profile, mark("watched"):
        pass
    assert "watched" in {event.key for event in profile.key_averages()}
    with mark("after") as after:
        assert after.record is not None


def test_events_and_streams_follow_the_simulated_clock() -> None:
    with fake_gpu("a100-40gb") as gpu:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        start.record()
        for _ in range(10):
            a @ a
        end.record()
        torch.cuda.synchronize()
        tflops = 10 * 2 * 8192**3 / (start.elapsed_time(end) * 1e-3) / 1e12
        assert 150 < tflops < 312
        with torch.cuda.stream(torch.cuda.Stream()):
            b = torch.empty(MIB, device="cuda")
        b.record_stream(torch.cuda.current_stream())
    assert gpu.elapsed_s >= start.elapsed_time(end) * 1e-3


def test_values_computed_from_known_data_are_known() -> None:
    with fake_gpu("l4"):
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).cuda()
        assert mask.sum().item() == 3
        assert (mask.argmin(1)).tolist() == [2, 1]
        assert torch.randn(2, 3, device="cuda")[mask.bool()].shape == (3,)
        assert mask.nonzero().shape == (3, 2)
        weights = torch.randn(2, 3, device="cuda").abs() @ torch.randn(3, 3000, device="cuda")
        assert weights[weights > 0].shape == (6000,)  # unknown: the worst case
        mask.copy_(weights[:, :3])
        assert mask.sum().item() == 1  # overwritten with unknown data: no longer known


def test_a_tensor_without_a_dtype_has_the_default_one_also_where_the_same_was_made_before() -> None:
    before = torch.get_default_dtype()
    with fake_gpu("t4"):
        try:
            for dtype in (torch.float32, torch.bfloat16, torch.float32):
                torch.set_default_dtype(dtype)
                assert torch.empty(8, device="cuda").dtype is torch.ones(8, device="meta").dtype is dtype
        finally:
            torch.set_default_dtype(before)


def test_an_unknown_mask_counts_as_present_and_as_full_and_the_notes_say_so() -> None:
    with fake_gpu("l40s") as gpu:
        values = torch.randn(4, 3000, device="cuda")
        mask = values > 0
        assert not gpu.notes
        all_on = mask.sum() == mask.numel()  # as transformers asks whether a mask is needed
        assert [bool(x) for x in (mask.all(), all_on, mask.any())] == [False, False, True]
        assert mask.sum(-1).max().item() == 3000
        assert mask.sum(1).tolist() == [3000] * 4
        assert torch.isfinite(values).all()
        assert not torch.isnan(values).any()
    assert [note.split(" was read")[0] for note in gpu.notes] == [
        "a condition on values that are not known here",
        "an integer that is not known here",
    ]


def test_a_float_mask_of_a_batch_is_known_as_prompt_learning_makes_it() -> None:
    with fake_gpu("l40s") as gpu:
        tokens = torch.tensor([[1] * 2000, [0] * 7 + [1] * 1993]).cuda()
        mask = torch.cat([torch.ones(2, 20, device="cuda"), tokens], 1)
        assert mask.dtype is torch.float32
        assert mask.sum().item() == 2 * 2020 - 7
        assert not mask.bool().all()
        assert mask[:1].bool().all()
    assert not gpu.notes


def test_a_real_model_from_outside_keeps_its_ties_when_moved_in() -> None:
    outer = torch.nn.Embedding(100, 64)
    head = torch.nn.Linear(64, 100, bias=False)
    head.weight = outer.weight
    model = torch.nn.Sequential(outer, head)
    with fake_gpu("a10") as gpu:
        model.cuda()
        assert model[0].weight is model[1].weight
        assert gpu.peak_allocated_bytes == 100 * 64 * 4 + 0
        model(torch.tensor([1, 2, 3], device="cuda")).sum().backward()


def test_a_model_that_accelerate_makes_without_weights_is_filled_on_the_card() -> None:
    with fake_gpu("t4"):
        with init_empty_weights():
            layer = torch.nn.Linear(512, 512, bias=False)
        assert layer.weight.is_meta
        set_module_tensor_to_device(layer, "weight", "cuda", torch.zeros(512, 512))
        assert isinstance(layer.weight, torch.nn.Parameter)
        assert torch.cuda.memory_allocated() == 4 * 512 * 512


def test_an_optimizer_made_before_the_move_follows_the_parameters() -> None:
    with fake_gpu("a10"):
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        model.cuda().half()
        model(torch.randn(2, 8, device="cuda", dtype=torch.float16)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].device.type == "cuda"


def test_a_loader_with_workers_and_pinned_memory_runs_in_process() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    with fake_gpu("a10"):
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
        assert [batch.cuda(non_blocking=True).sum().item() for (batch,) in loader] == [6, 22]


def test_phases_and_the_peak_report_name_what_was_alive() -> None:
    with fake_gpu("h100") as gpu:
        with gpu.phase("small"):
            torch.empty(MIB, device="cuda")
        with gpu.phase("large"):
            kept = torch.empty(64 * MIB, device="cuda")
    peaks = {phase.name: phase.peak_allocated_bytes for phase in gpu.timeline.phases}
    assert peaks["small"] == 4 * MIB
    assert peaks["large"] == 256 * MIB
    report = gpu.why_peak()
    assert report.items[0].nbytes == kept.numel() * 4
    assert "test_device.py" in report.items[0].place
    assert report.phase == "large"


def test_without_a_capacity_the_same_run_says_how_much_it_needed() -> None:
    with fake_gpu("t4", enforce_capacity=False) as gpu:
        held = [torch.empty(GIB, device="cuda") for _ in range(10)]
    assert gpu.peak_allocated_bytes == len(held) * 4 * GIB
    assert gpu.least_capacity_bytes >= 40 * GIB + gpu.spec.context_bytes


def test_what_others_hold_on_the_card_is_not_ours() -> None:
    with fake_gpu("t4", occupied_bytes=8 * GIB) as gpu:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(7 * GIB, dtype=torch.uint8, device="cuda")
        torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
    assert gpu.device_used_bytes == gpu.spec.context_bytes + 14 * GIB


def test_blocks_do_not_nest() -> None:
    with fake_gpu("t4"), pytest.raises(FakeGpuError, match="nest"), fake_gpu("t4"):
        pass


def test_the_fallback_counts_the_same_tensors_on_fake_cpu() -> None:
    with fake_gpu("a100-40gb", mode="cpu") as gpu:
        model = torch.nn.Linear(512, 512).cuda()
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        assert torch.cuda.max_memory_allocated() >= 2 * 512 * 512 * 4
    assert gpu.mode == "cpu"
    assert "missing" in gpu.fidelity


def test_a_torch_the_guard_does_not_know_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown_layout() -> list[tuple[int, int]]:
        raise GuardUnavailableError("virtual function 'type' answered 7, not 14")

    monkeypatch.setattr(device, "_SELF_TEST", [])
    monkeypatch.setattr(CUDA_GUARD, "_prepared", None)
    monkeypatch.setattr(CUDA_GUARD, "_prepare", unknown_layout)
    with pytest.warns(UserWarning, match="falls back to fake CPU tensors"), fake_gpu("l4") as gpu:
        torch.nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda")).sum().backward()
    assert gpu.mode == "cpu"
    assert any("answered 7" in note for note in gpu.notes)
    with pytest.raises(FakeGpuError, match="do not work here"), fake_gpu("l4", mode="cuda"):
        pass
    _cpu_training_works()


def test_a_tensor_may_be_shared_with_other_processes() -> None:
    """As datasets shares the epoch of its streams: a fake has no memory, and stays where it is."""
    with fake_gpu("l4"):
        for device in ("cpu", "cuda"):
            epoch = torch.zeros(1, dtype=torch.int64, device=device)
            assert epoch.share_memory_() is epoch
    assert torch.zeros(1).share_memory_().is_shared()


@pytest.mark.parametrize(("dtype", "refused"), [(torch.bfloat16, True), (torch.float32, False)])
def test_loss_scaling_refuses_gradients_in_bfloat16(dtype: torch.dtype, *, refused: bool) -> None:
    with fake_gpu("l4"):
        weight = torch.nn.Parameter(torch.zeros(4, device="cuda", dtype=dtype))
        optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cuda")
        scaler.scale(weight.sum()).backward()
        expected = (
            pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'") if refused else nullcontext()
        )
        with expected:
            scaler.step(optimizer)
