"""A training whose ranks share their samples: as one rank of a fake process group, or on real gloo ranks of the CPU.

The real ranks are forks of a call of the fork server, which has the imports.
"""

import gc
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from fakegpu.tiny_trainers import config, profiler_peak_bytes
from transformers import AutoModelForCausalLM

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.probing.fork_server import ForkServer
from autofit.probing.supervise import free_port
from autofit.trainers.hf_tasks import InChunks
from autofit.trainers.sequence import SharedSequence

ROWS, LENGTH = 2, 96


def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(num_hidden_layers=2), dtype=torch.float32)


def ids() -> torch.Tensor:
    return torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 97


def train(trained: Any, ranks: int) -> Any:
    """Forward and backward of a batch of which this rank computes its part; the gradient of each rank is summed."""
    shared = SharedSequence(ranks, trained.config, heads=True)
    trained.gradient_checkpointing_enable({"use_reentrant": True})
    labels = shared.part(torch.roll(ids(), shifts=-1, dims=1))
    positions = shared.part(torch.arange(LENGTH).expand(ROWS, -1))
    with shared.attending():
        own = shared.part(ids())
        found = trained(input_ids=own, position_ids=positions, attention_mask=torch.ones_like(own), use_cache=False)
        each = InChunks.apply(found.logits.view(-1, found.logits.shape[-1]), labels.flatten(), 32)
        loss = shared.whole(each.reshape(labels.shape)).mean()
        loss.backward()
    return loss


def simulated_peak_bytes(ranks: int, rank: int) -> int:
    with fake_ranks(ranks, rank), fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        train(model(), ranks)
    gc.collect()
    return gpu.peak_requested_bytes


def real(ranks: int, server: ForkServer, folder: Path) -> list[dict[str, Any]]:
    """Of each real rank: its peak in bytes, the loss, and the norm of its gradient's share, times the ranks."""
    answer, log = folder / "ranks.json", folder / "ranks.log"
    ending = server.call(
        {"entry": "sequence_ranks:real_ranks", "argument": json.dumps([ranks, str(answer)]), "cwd": str(folder),
         "log": str(log), "deadline_s": 300, "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}}
    )  # fmt: skip
    assert ending.exit_code == 0, log.read_text()
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return found


def _outside(received: list[torch.Tensor], sent: list[torch.Tensor], group: Any = None) -> None:
    """All-to-all in memory of numpy, for gloo's threads free theirs where the profiler does not see it."""
    source, target = (_of_numpy(torch.Size((len(sent), *sent[0].shape)), sent[0].dtype) for _ in range(2))
    for into, part in zip(source, sent, strict=True):
        into.copy_(part)
    dist.all_to_all_single(target, source, group=group)
    for into, part in zip(received, target, strict=True):
        into.copy_(part)


def _gathered(whole: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
    source, target = _of_numpy(own.shape, own.dtype), _of_numpy(whole.shape, whole.dtype)
    source.copy_(own)
    _ALL_GATHER(target, source, group=group)
    whole.copy_(target)


def _of_numpy(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return torch.from_numpy(numpy.empty(shape.numel() * size, numpy.uint8)).view(dtype).view(shape)


_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_ALL_GATHER = getattr(dist, _NAME)


def _real_rank(ranks: int, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    dist.all_to_all = _outside  # type: ignore[assignment]
    setattr(dist, _NAME, _gathered)
    peak = profiler_peak_bytes(lambda: train(model(), ranks))
    trained = model()
    loss = train(trained, ranks)
    gradient = trained.model.layers[0].self_attn.q_proj.weight.grad.clone()
    dist.all_reduce(gradient)  # as DDP, whose mean over the ranks this is times their number
    dist.destroy_process_group()
    return {"peak_bytes": peak, "loss": loss.item(), "gradient": (gradient / ranks).norm().item()}


def real_ranks(argument: str) -> int:
    """In the server's child: what `real` returns, in a file."""
    ranks, answer = json.loads(argument)
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(partial(_real_rank, ranks), range(ranks)))
    Path(answer).write_text(json.dumps(found))
    return 0
