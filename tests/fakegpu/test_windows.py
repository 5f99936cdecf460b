"""Attention over the windows of an image, played: the events and seconds of a loop that calls each."""

from unittest.mock import Mock

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.patches import windows

GRID = [[1, 18, 20], [1, 8, 10]]  # patches of two images, whose windows have four lengths
WINDOWS = 3 * 3 + 2


def _events(card: str, dtype: torch.dtype, training: str) -> tuple[list[tuple[int, int]], float, int]:
    """(storage, bytes) of each allocation (+) and free (-), those of a row of frees sorted; seconds; peak bytes."""
    with fake_gpu(card, enforce_capacity=False) as gpu:
        config = Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=320, num_heads=4, intermediate_size=320, out_hidden_size=64, fullatt_block_indexes=[1]
        )
        config._attn_implementation = "sdpa"
        tower = Qwen2_5_VisionTransformerPretrainedModel(config).to("cuda", dtype).train()
        if training in ("checkpoint", "reentrant"):
            tower.gradient_checkpointing_enable({"use_reentrant": training == "reentrant"})
        grid = torch.tensor(GRID)
        patches = torch.zeros(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, dtype=dtype, device="cuda")
        patches.requires_grad_(training == "reentrant")
        for _ in range(2):
            if training == "no_grad":
                with torch.no_grad():
                    tower(patches, grid.to("cuda"))
            else:
                tower(patches, grid.to("cuda")).pooler_output.float().sum().backward()
        torch.cuda.synchronize()
        events, frees, log = list[tuple[int, int]](), list[tuple[int, int]](), gpu.memory.log
        names: dict[int, int] = {}
        for storage, nbytes in zip(log.ids, log.nbytes, strict=True):
            event = names.setdefault(storage, len(names)), nbytes
            if nbytes < 0:
                frees.append(event)
            else:
                events += [*sorted(frees), event]
                frees = []
        return events + sorted(frees), gpu.elapsed_s, gpu.memory.allocator.peak_reserved_bytes


CASES = [
    pytest.param("a100-40gb", torch.bfloat16, "checkpoint", id="flash, checkpointing"),
    *(
        pytest.param("a100-40gb", torch.bfloat16, each, id=f"flash, {each}", marks=pytest.mark.slow)
        for each in ("plain", "reentrant", "no_grad")
    ),
    pytest.param("h100", torch.bfloat16, "checkpoint", id="cuDNN", marks=pytest.mark.slow),
    pytest.param("t4", torch.float16, "checkpoint", id="memory-efficient", marks=pytest.mark.slow),
    pytest.param("t4", torch.float16, "plain", id="memory-efficient, plain", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("card", "dtype", "training"), CASES)
def test_windows_take_and_give_back_what_a_loop_over_them_does(
    card: str, dtype: torch.dtype, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Mock(side_effect=windows._Recording.again)
    monkeypatch.setattr(windows._Recording, "again", lambda self, gpu: again(self, gpu))
    events, seconds, peak = _events(card, dtype, training)
    assert again.call_count >= 2 * (WINDOWS - 4)
    monkeypatch.setattr(windows, "_LEAST_PLAYED", 10**9)
    looped, looped_s, looped_peak = _events(card, dtype, training)
    assert events == looped
    assert peak == looped_peak
    assert seconds == pytest.approx(looped_s, rel=1e-12)


def test_a_fault_within_an_attention_leaves_no_loop_behind() -> None:
    with fake_gpu("a100-40gb"):
        config = Qwen2_5_VLVisionConfig(depth=1, hidden_size=320, num_heads=4, fullatt_block_indexes=[])
        config._attn_implementation = "sdpa"
        tower = Qwen2_5_VisionTransformerPretrainedModel(config).to("cuda", torch.bfloat16)
        with pytest.raises(RuntimeError):
            tower.blocks[0].attn(torch.zeros(8, 320, device="cuda"), torch.tensor([0, 64]))
        pieces = torch.split(torch.zeros(1, 4, 640, 80, device="cuda"), [64] * 10, dim=2)
        assert [piece.shape[2] for piece in pieces] == [64] * 10
