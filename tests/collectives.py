"""Ranks on the null GPU's NCCL: `python tests/collectives.py NAME FOLDER RANKS STARTED`. A failure is its exit code.

The STARTED first ranks are forks of a process that has imported torch, which takes longer than all that they do.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

LONG = 300_000  # elements: in float32 they are shown in more than one piece
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.sum,
    "PRODUCT": torch.prod,
    "MIN": torch.amin,
    "MAX": torch.amax,
}


def moves(folder: Path) -> None:
    """Every operation of torch's that NCCL has brings the numbers of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (*REAL, *WHOLE):
        given = [(torch.arange(LONG) % 5 + other + 1).to(dtype) for other in range(ranks)]
        own, all_of_them = given[rank].cuda(), torch.stack(given)
        for name, reduce in REDUCED.items():
            found = own.clone()
            dist.all_reduce(found, getattr(dist.ReduceOp, name))
            assert torch.equal(found.cpu(), reduce(all_of_them.double(), 0).to(dtype)), (dtype, name)
        whole = torch.empty(ranks * LONG, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(whole, own)
        assert torch.equal(whole.cpu(), torch.cat(given)), dtype
        part = torch.empty(LONG // ranks, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, own)
        assert torch.equal(part.cpu(), all_of_them.sum(0).to(dtype).chunk(ranks)[rank]), dtype
        mixed = torch.empty_like(own)
        dist.all_to_all_single(mixed, own)
        assert torch.equal(mixed.cpu(), torch.cat([each.chunk(ranks)[rank] for each in given])), dtype
    for dtype in REAL:
        mean = torch.full((7,), 2.0 * rank, dtype=dtype, device="cuda")
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [ranks - 1.0] * 7
        if dtype is not torch.bfloat16:  # torch tells NCCL the factor as the first half of a float
            scaled = torch.full((7,), 4.0, dtype=dtype, device="cuda")
            dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.25))  # type: ignore[attr-defined]
            assert scaled.tolist() == [float(ranks)] * 7
    last = torch.full((LONG,), float(rank), device="cuda")
    dist.broadcast(last, src=ranks - 1)
    assert last.unique().tolist() == [ranks - 1]
    total = torch.ones(3, device="cuda") * (rank + 1)
    dist.reduce(total, dst=1)
    assert total.tolist() == [ranks * (ranks + 1) / 2 if rank == 1 else rank + 1] * 3
    ring = torch.full((LONG,), rank, device="cuda")
    came = torch.empty_like(ring)
    calls = [dist.P2POp(dist.isend, ring, (rank + 1) % ranks), dist.P2POp(dist.irecv, came, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert came.unique().tolist() == [(rank - 1) % ranks]
    told: list[object] = [None] * ranks
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": other} for other in range(ranks)]
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        both = torch.ones(1, device="cuda")
        dist.all_reduce(both, group=pair)
        assert both.item() == 2
    dist.barrier()
    dist.destroy_process_group()


def waits(folder: Path) -> None:
    """A rank waits for the others in an operation and before it ends; memory that nobody wrote is not touched.

    For a null GPU without values.
    """
    large = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    before = psutil.Process().memory_info().rss
    if dist.get_rank() == 1:
        time.sleep(1)
        (folder / "came").touch()
    dist.all_reduce(large)
    assert (folder / "came").exists()
    assert psutil.Process().memory_info().rss - before < 100 << 20
    if dist.get_rank() == 0:
        time.sleep(1)
        (folder / "ended").touch()
    dist.destroy_process_group()
    assert (folder / "ended").exists()


def is_alone(folder: Path) -> None:
    """An operation to which no other rank comes ends."""
    said = ""
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
    except dist.DistBackendError as error:
        said = str(error)
    assert "a rank of the null NCCL did not come" in said


def main(name: str, folder: str, ranks: str, started: str) -> None:
    pids = [os.fork() or run_rank(name, Path(folder), rank, int(ranks)) for rank in range(int(started))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(any(codes))


def run_rank(name: str, folder: Path, rank: int, ranks: int) -> NoReturn:
    """In a fork: this rank, to its end."""
    code = 1
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        {"moves": moves, "waits": waits, "is_alone": is_alone}[name](folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
