"""The same training as one rank of several: real gloo ranks on the CPU, or a simulated rank.

The real ranks are forks of a call of the fork server, which has the imports.
"""

import contextlib
import gc
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from autofit.fakegpu import fake_gpu
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.probing.fork_server import ForkServer
from autofit.probing.supervise import free_port

from .tiny_trainers import config, profiler_peak_bytes

_PATIENCE_S = 300
_OLD_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One training on several ranks: how they share the model, and what of it is trained."""

    count: int
    sharding: str
    lora_rank: int | None = None
    reshard: bool = True
    mixed: bool = False
    bucket_view: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        marks = [name for name in ("mixed", "bucket_view", "checkpointing") if getattr(self, name)]
        kept = [] if self.reshard else ["kept"]
        return "-".join(
            [self.sharding, str(self.count), f"lora{self.lora_rank}" if self.lora_rank else "full", *kept, *marks]
        )


def train(case: Ranks, *, real: bool = False) -> None:
    """Two optimizer steps of two micro-batches on this rank, gradients reduced at the second one."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(num_hidden_layers=4), dtype=torch.float32)
    if case.lora_rank:
        model = get_peft_model(model, LoraConfig(r=case.lora_rank, target_modules="all-linear"))
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    model = _sharded(model, case, real=real)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        for last in (False, True):
            ids = torch.full((2, 96), 5)
            with _without_sync(model, last):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _sharded(model: Any, case: Ranks, *, real: bool) -> Any:
    if case.sharding == "ddp":
        # The ranks have one seed. A real rank sends no parameters at the start: gloo's threads would free their copy.
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=case.bucket_view, init_sync=not real)
        if real:
            model.register_comm_hook(None, _reduced_outside_of_the_record)
        return model
    mesh = init_device_mesh("cpu", (case.count,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.mixed else MixedPrecisionPolicy()
    inner = model.base_model.model if case.lora_rank else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)


def _without_sync(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if last else model.no_sync()


def simulated_peak_bytes(case: Ranks, rank: int) -> int:
    """The most bytes that the simulated CPU held on `rank`."""
    with fake_ranks(case.count, rank), fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        train(case)
    gc.collect()
    return gpu.peak_requested_bytes


def real_peaks_bytes(case: Ranks, server: ForkServer, folder: Path) -> list[int]:
    """The most bytes that the CPU allocator held on each real rank."""
    answer, log = folder / "peaks.json", folder / "ranks.log"
    ending = server.call(
        {"entry": "fakegpu.rank_training:real_ranks", "argument": json.dumps([asdict(case), str(answer)]),
         "cwd": str(folder), "log": str(log), "deadline_s": _PATIENCE_S,
         "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}}
    )  # fmt: skip
    assert ending.exit_code == 0, log.read_text()
    peaks: list[int] = json.loads(answer.read_text())
    return peaks


def collect_outside_of_the_record() -> None:
    """Let collectives of FSDP2 and of accelerate's evaluation work on copies that no profiler sees."""
    new = hasattr(dist, "all_gather_single")  # the names of torch 2.13
    for name in ("all_gather_single", "reduce_scatter_single") if new else _OLD_NAMES:
        call = getattr(dist, name) if name.startswith("all_gather") else _reduce_scatter
        setattr(dist, name, _outside_of_the_record(call))
    dist.all_gather = _gathered_outside_of_the_record(dist.all_gather)


def _gathered_outside_of_the_record(all_gather: Callable[..., object]) -> Callable[..., None]:
    def run(outputs: list[torch.Tensor], source: torch.Tensor, **options: object) -> None:
        sent, received = _of_numpy(source).view(source.shape), [_of_numpy(one).view(one.shape) for one in outputs]
        sent.copy_(source)
        all_gather(received, sent, **options)
        for output, found in zip(outputs, received, strict=True):
            output.copy_(found)

    return run


def _outside_of_the_record(collective: Callable[..., object]) -> Callable[..., object]:
    """A collective on copies in memory of numpy.

    gloo's threads drop their references after the call has returned, and the profiler does not see what they free.
    """

    def run(*tensors: torch.Tensor, async_op: bool = False, **options: object) -> _Done | None:
        named = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        output, source = (*tensors, *named.values())
        rest = {name: value for name, value in options.items() if name not in named}
        sent, received = _of_numpy(source), _of_numpy(output)
        sent.copy_(source)
        collective(received, sent, **rest)
        output.copy_(received)
        return _Done() if async_op else None

    return run


def _reduced_outside_of_the_record(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's mean of a bucket over the ranks: the reducer divides only if it has no hook."""
    buffer = bucket.buffer()
    sent = _of_numpy(buffer).view(buffer.shape)
    sent.copy_(buffer)
    dist.all_reduce(sent)
    buffer.copy_(sent.div_(dist.get_world_size()))
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(buffer)
    return done


def _reduce_scatter(output: torch.Tensor, source: torch.Tensor, **options: Any) -> None:
    """As gloo does it, but without its copy of the input, which a thread of gloo frees."""
    dist.all_reduce(source, **options)
    output.copy_(source.chunk(dist.get_world_size())[dist.get_rank()])


def _of_numpy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(numpy.empty(tensor.numel() * tensor.element_size(), numpy.uint8)).view(tensor.dtype)


class _Done:
    def wait(self) -> None: ...


def real_ranks(argument: str) -> int:
    """In the server's child: the peaks of the ranks of a case, in a file."""
    fields, answer = json.loads(argument)
    case = Ranks(**fields)
    with ProcessPoolExecutor(case.count, multiprocessing.get_context("fork")) as ranks:
        peaks = list(ranks.map(partial(_real_rank, case), range(case.count)))
    Path(answer).write_text(json.dumps(peaks))
    return 0


def _real_rank(case: Ranks, rank: int) -> int:
    """The most bytes that the CPU allocator held on this rank."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    dist.init_process_group("gloo", rank=rank, world_size=case.count, timeout=patience)
    collect_outside_of_the_record()
    peak_bytes = profiler_peak_bytes(lambda: train(case, real=True))
    dist.destroy_process_group()
    return peak_bytes
