"""How a process of a gradient proof becomes a rank on the CPU: accelerate's environment and a gloo group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from autofit.plugin.cpu_ranks import fsdp2_on_cpu
from autofit.plugin.ranks import rank_environment
from autofit.recipe.launch import Launch

_PATIENCE = timedelta(seconds=300)  # of one rank for the others, which train the same small model
_NO_PORT = 1  # the ranks meet in a file


@contextmanager
def joined(launch: Launch, *, rank: int, meeting: Path) -> Iterator[None]:
    """Context in which this process is `rank` of `launch`; the ranks find each other by the file `meeting`."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # the forking process was one rank of its own
    GradientState._reset_state()
    torch.set_num_threads(1)
    if launch.is_plain:
        yield
        return
    os.environ.update(rank_environment(launch, rank=rank, port=_NO_PORT, device="cpu"))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    store = torch.distributed.FileStore(str(meeting), launch.ranks)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=launch.ranks, timeout=_PATIENCE)
    if launch.sharding == "fsdp2":
        with fsdp2_on_cpu():
            yield
    else:
        yield
