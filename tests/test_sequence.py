"""Ranks that share their samples: bytes and values against real gloo ranks, and the rules."""

from pathlib import Path

import pytest
import sequence_ranks
import torch
from torch.nn.functional import cross_entropy

from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.plugin.protocol import Task
from autofit.probing.fork_server import ForkServer
from autofit.trainers.hf import TRAINER
from autofit.trainers.hf_tasks import InChunks
from autofit.trainers.sequence import HeadByHead, Ring, SharedSequence


@pytest.mark.slow
def test_ulysses_peaks_at_real_ranks_bytes_and_has_the_loss_and_gradient_of_one_rank(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    found = sequence_ranks.real(2, fork_server, tmp_path)
    alone = sequence_ranks.model()
    ids = sequence_ranks.ids()
    logits = alone(input_ids=ids, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), torch.roll(ids, shifts=-1, dims=1).flatten())
    loss.backward()
    gradient = alone.model.layers[0].self_attn.q_proj.weight.grad
    for rank in found:
        assert rank["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert rank["gradient"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    for number, rank in enumerate(found):
        error = sequence_ranks.simulated_peak_bytes(2, number) / rank["peak_bytes"] - 1
        print(f"rank {number}: real {rank['peak_bytes'] / 2**20:.3f} MiB, error {error:+.4%}")
        assert abs(error) <= 5e-3


def test_a_loss_in_chunks_is_that_of_all_rows_and_its_gradient_too() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(10, 7, requires_grad=True), torch.randint(7, (10,))
    whole = cross_entropy(logits, labels, reduction="none")
    (wanted,) = torch.autograd.grad(whole.sum(), logits)
    copy = logits.detach().clone().requires_grad_(True)
    each = InChunks.apply(copy * 1, labels, 4)
    each.sum().backward()
    assert torch.allclose(each, whole)
    assert torch.allclose(copy.grad, wanted)  # type: ignore[arg-type]


def test_a_group_deals_as_many_heads_as_its_ranks_and_the_model_have_in_common_and_a_ring_takes_the_rest() -> None:
    config = sequence_ranks.model().config  # two heads of keys
    with fake_ranks(8, 5):
        shared = SharedSequence(8, config, heads=True)
        assert (shared.dealt, shared.joins, shared.rank) == (2, True, 5)
        assert shared.part(torch.zeros(2, 60)).shape == (1, 16)  # 120 tokens of both rows, filled up to 8 times 2
        assert SharedSequence(2, config, heads=True).part(torch.zeros(2, 60)).shape == (2, 30)
        assert SharedSequence(4, config, heads=False).dealt == 1


RINGS = {  # bytes of forward and backward beside inputs, of the tools' own code (experiments/frontends/README.md)
    "ring": (46_792_720, 140_378_128), "gathered": (19_136_512, 28_966_912),
}  # fmt: skip


@pytest.mark.parametrize("kind", RINGS)
def test_attention_in_a_ring_peaks_at_the_bytes_of_the_tools_own_code(kind: str) -> None:
    tokens, heads, keys, width, ranks = 4096, 8, 4, 64, 4
    with fake_ranks(ranks, 3), fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        states = [torch.zeros((1, tokens, count, width), dtype=torch.bfloat16, requires_grad=True)
                  for count in (heads, keys, keys)]  # fmt: skip
        inputs = sum(one.nbytes for one in states)
        if kind == "ring":
            out = Ring.apply(*states, ranks, 1)
        else:
            out = HeadByHead.apply(*states, torch.distributed.group.WORLD)
        forward = gpu.peak_requested_bytes - inputs
        out.backward(torch.ones_like(out))
    backward = gpu.peak_requested_bytes - inputs - out.nbytes
    assert (forward, backward) == pytest.approx(RINGS[kind], rel=1e-2)


def test_what_only_a_simulation_can_share_is_not_trained(tmp_path: Path) -> None:
    values = {"model_name_or_path": "m", "output_dir": str(tmp_path), "use_cpu": True, "sequence_parallel_size": 2}
    with pytest.raises(ConfigError, match="sequence_parallel_size is simulated and not run"):
        TRAINER.build(values, Task(device="cpu", output=tmp_path))
    with pytest.raises(ConfigError, match="sequence_parallel_size is of objective: sft or embed; got objective: dpo"):
        TRAINER.parse({**values, "objective": "dpo"}, overrides={})
