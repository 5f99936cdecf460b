"""Real ranks for a gradient proof: processes that are forked after the imports, meet over gloo and train one recipe.

The process that forks must not have computed with more than one thread: OpenMP's threads do not live in a fork.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.ranks import fsdp2_on_cpu, rank_environment
from autofit.probing.supervise import die_with_parent, keep_ranks
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


Saved = list[dict[str, torch.Tensor]]


def prepare_to_fork() -> None:
    """Compute with one thread from now on, in this process and its ranks, and start no thread that shows progress."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0


def train_ranks(train: Callable[[], Saved], launch: Launch, folder: Path) -> Saved:
    """What `train` returns on rank 0 of `launch`, each rank a forked process; the first failure ends all ranks.

    Raises ConfigError where a rank raised one, and EnvironmentFault for any other end.
    """
    folder.mkdir(parents=True)
    gc.freeze()  # TRL collects garbage in every training; what is imported is left out
    ended = keep_ranks(lambda rank: _forked(train, launch, rank, folder), launch.ranks, grace_s=0.0)
    if ended.first is not None:
        _fail(ended.first, ended.worst.exit_code, folder)
    saved: Saved = torch.load(folder / "gradients.pt", weights_only=True)
    return saved


def _forked(train: Callable[[], Saved], launch: Launch, rank: int, folder: Path) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_rank(train, launch, rank, folder, parent)
    return pid


def _be_rank(train: Callable[[], Saved], launch: Launch, rank: int, folder: Path, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        with joined(launch, rank=rank, meeting=folder / "meeting"):
            found = train()
        if rank == 0:
            torch.save(found, folder / "gradients.pt")
        code = 0
    except ConfigError as error:
        write_json(folder / f"error-{rank}.json", {"error": str(error), "config": True})
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        write_json(folder / f"error-{rank}.json", {"error": text, "config": False})
    finally:
        os._exit(code)  # no clean-up of the parent's own: its temporary folders are its matter


def _fail(rank: int, code: int, folder: Path) -> NoReturn:
    """Raise the first error of a rank: others lose their connection after it. `rank` ended with `code`."""
    said = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    first = read_json(said[0]) if said else None
    if first is None:
        raise EnvironmentFault(f"rank {rank} ended with exit code {code}")
    if first["config"]:
        raise ConfigError(str(first["error"]))
    raise EnvironmentFault(f"rank {said[0].stem.removeprefix('error-')}: {first['error']}")
