"""Two ranks that train with DeepSpeed: `zero_rank.py KIND FOLDER STAGE...` prints the bytes of each after each part.

A KIND of "real" is ranks on the CPU (gloo), which meet in FOLDER, "simulated" is ranks of cards. Bytes are (live, peak)
of a rank's tensors. The ranks of each STAGE are forks of a process that has the imports, which take longer than the
training.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

RANKS, WIDTH, LAYERS = 2, 512, 5
LATER = ("torch._dynamo", "deepspeed.compile.backend", "deepspeed.runtime.zero.muon.muon_optimizer", "autofit.fakegpu")
Read = Callable[[], tuple[int, int]]
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


class Done:
    """The handle of a collective that has ended."""

    def wait(self) -> None:
        pass


def on_copies(collective: Callable[..., Any]) -> Callable[..., Done]:
    """The collective on untracked copies: gloo's thread lets go of its tensors some time after the collective's end."""

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Done:
        with _disable_current_modes(), torch.no_grad():
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

            def copied(tensor: torch.Tensor) -> torch.Tensor:
                pairs.append((tensor, tensor.clone()))
                return pairs[-1][1]

            args, kwargs = tree_map_only(torch.Tensor, copied, (args, kwargs))
            collective(*args, **kwargs)
            for tensor, copy in pairs:
                tensor.copy_(copy)
        return Done()

    return call


@contextmanager
def real(rank: int, meeting: Path) -> Iterator[tuple[str, Read, Callable[[], None]]]:
    from autofit.probing.memory import _StorageTracker

    torch.set_num_threads(1)
    # It compiles an all-reduce for inference, which a training never calls, for a minute of processor time.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    for name in COLLECTIVES:
        setattr(dist, name, on_copies(getattr(dist, name)))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    with _StorageTracker("cpu", None) as tracker:

        def reset() -> None:
            tracker.peak_bytes = tracker.current_bytes

        yield "cpu", lambda: (tracker.current_bytes, tracker.peak_bytes), reset
    dist.destroy_process_group()


@contextmanager
def simulated(rank: int) -> Iterator[tuple[str, Read, Callable[[], None]]]:
    from autofit.fakegpu import fake_gpu
    from autofit.fakegpu.rates.collectives import fake_ranks

    with fake_ranks(RANKS, rank), fake_gpu("a100-80gb") as gpu:
        allocator = gpu.memory.allocator  # asked for the bytes of tensors: a card's blocks may be larger

        def read() -> tuple[int, int]:
            return allocator.requested_bytes, allocator.peak_requested_bytes

        yield "cuda", read, torch.cuda.reset_peak_memory_stats


def train(stage: int, device: str, read: Read, reset: Callable[[], None]) -> list[tuple[int, int]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": WIDTH * WIDTH, "stage3_prefetch_bucket_size": WIDTH * WIDTH // 2,
            "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    model = model.to(torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config_params=config)[0]
    found = [read()]
    for _ in range(3):
        for _ in range(2):
            reset()
            loss = engine(torch.randn(2, 64, WIDTH, device=device, dtype=torch.bfloat16)).float().sum()
            found.append(read())
            reset()
            engine.backward(loss)
            del loss
            found.append(read())
            reset()
            engine.step()
            found.append(read())
    return found


def main(kind: str, folder: str, *stages: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu" if kind == "real" else "cuda"
    for name in ("deepspeed", *LATER):  # what a rank imports besides, for 5 s
        importlib.import_module(name)
    codes = []
    for stage in stages:
        pids = [os.fork() or run_rank(int(stage), rank, kind, Path(folder)) for rank in range(RANKS)]
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(any(codes))


def run_rank(stage: int, rank: int, kind: str, folder: Path) -> NoReturn:
    """In a fork: train as this rank, tell its bytes and end."""
    code = 1
    try:
        local = str(rank) if kind == "real" else "0"  # a card of its own
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": local, "WORLD_SIZE": str(RANKS)}
        with real(rank, folder / f"stage-{stage}") if kind == "real" else simulated(rank) as (device, read, reset):
            found = train(stage, device, read, reset)
        os.write(1, f"BYTES {json.dumps([stage, rank, found])}\n".encode())  # whole: the other rank writes there too
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
