"""A process as one rank of a launch: its environment, as `accelerate launch` sets it, and its process group.

The launcher's own code makes the environment. Imports torch.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh

from autofit.errors import ConfigError
from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.fakegpu.specs import NETWORK_GBIT
from autofit.files import ScratchFolder
from autofit.hardware.hardware import threads_of_each
from autofit.recipe.launch import Launch, check_on_cpu


@contextmanager
def fsdp2_on_cpu() -> Iterator[None]:
    """Context in which accelerate shards over gloo ranks when a rank's environment asks for FSDP2.

    accelerate 1.15 reads FSDP's variables only where each rank has a card: on the CPU it trains with DDP without a
    word. `fully_shard` itself runs on a gloo mesh, so two things are told otherwise: the ranks count as cards when
    accelerate decides about FSDP, and the mesh is the CPU's.

    Gloo stages an all-gather and a reduce-scatter in buffers of its own, which NCCL does not, and a thread of its own
    frees them at any time. Here broadcasts and reduces in place do the same, so that a rank holds the bytes of one on a
    card.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed import fsdp

    begin = PartialState.__init__

    def begun(state: Any, *args: Any, **kwargs: Any) -> None:
        begin(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU  # what AcceleratorState turns into FSDP

    with (
        mock.patch.object(PartialState, "__init__", begun),
        mock.patch.object(fsdp, "fully_shard", partial(_on_cpu_mesh, fsdp.fully_shard)),
    ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def _on_cpu_mesh(shard: Callable[..., Any], module: Any, *, mesh: Any = None, **options: Any) -> Any:
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded = shard(module, mesh=mesh, **options)
    first = sharded[0] if isinstance(sharded, list) else sharded
    first.set_custom_all_gather(_InPlaceAllGather())
    first.set_custom_reduce_scatter(_InPlaceReduceScatter())
    return sharded


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _InPlaceAllGather(_Buffers):
    """`torch.distributed.fsdp`'s AllGather: each rank broadcasts its part of the output."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        parts = output_tensor.view(-1).chunk(group.size())
        parts[group.rank()].copy_(input_tensor.view(-1))
        for rank, part in enumerate(parts):
            torch.distributed.broadcast(part, group_src=rank, group=group)


class _InPlaceReduceScatter(_Buffers):
    """`torch.distributed.fsdp`'s ReduceScatter: each rank's part of the input is reduced there, in place."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(-1).chunk(group.size())
        for rank, part in enumerate(parts):
            torch.distributed.reduce(part, group_dst=rank, op=op, group=group)
        output_tensor.view(-1).copy_(parts[group.rank()])


LOOPBACK = "127.0.0.1"
_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME")  # what accelerate's imports may need
_NOT_OURS = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")  # the starter of the ranks chooses their cards
_SCRIPT = "script"  # the launcher wants the name of one; nothing runs it


def rank_environment(launch: Launch, *, rank: int, port: int, device: str, address: str = LOOPBACK) -> dict[str, str]:
    """The variables that `accelerate launch` adds to the environment of `rank` (from 0, over all machines).

    Ranks meet at `port` of `address`, which is the first machine's. On `cpu` the ranks of a machine share its cores,
    and accelerate is told not to look for cards.
    Raises ConfigError for a launch that accelerate would refuse.
    """
    if not 0 <= rank < launch.ranks:
        raise ConfigError(f"rank must be from 0 to {launch.ranks - 1}; got {rank}")
    local = rank % (launch.ranks // launch.machines)
    own = {
        "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(launch.ranks),
        "LOCAL_WORLD_SIZE": str(launch.ranks // launch.machines), "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    on_cpu = device == "cpu"
    cpu = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(threads_per_rank(launch))} if on_cpu else {}
    if on_cpu and address == LOOPBACK:
        cpu["GLOO_SOCKET_IFNAME"] = "lo"
    if launch.sharding == "fsdp1":  # torch makes hybrid groups by the visible cards, which are others in a probe
        own["FSDP_SHARDING_STRATEGY"] = launch.sharding_strategy
    return {**_of_accelerate(launch, port), **own, **cpu}


@contextmanager
def as_rank(launch: Launch, *, rank: int, port: int, device: str, address: str = LOOPBACK) -> Iterator[None]:
    """Context in which this process trains as `rank` of `launch`; a no-op for a launch of one plain rank.

    `device` is `cpu` (gloo) or `cuda` (NCCL, the card number LOCAL_RANK of the visible ones). The process group ends
    with the context, unless an error leaves it: then the other ranks may never reach the end.
    """
    if launch.is_plain:
        yield
        return
    with ExitStack() as kept:
        found = rank_environment(launch, rank=rank, port=port, device=device, address=address)
        kept.enter_context(mock.patch.dict(os.environ, found))
        if device == "cuda":  # as accelerate will, but before anyone asks for the memory of the card
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if device == "cpu":
            check_on_cpu(launch)
            torch.set_num_threads(threads_per_rank(launch))
            if launch.sharding == "fsdp2":
                kept.enter_context(fsdp2_on_cpu())
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def threads_per_rank(launch: Launch) -> int:
    """Threads of each rank on the CPU."""
    return threads_of_each(launch.ranks // launch.machines)


def _of_accelerate(launch: Launch, port: int) -> dict[str, str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    with ScratchFolder() as folder, _clean_environment() as before:
        path = os.path.join(folder, "launch.yaml")
        with open(path, "w", encoding="utf-8") as file:  # what differs between machines is set above
            yaml.safe_dump({**launch.to_accelerate(), "num_machines": 1, "machine_rank": 0}, file)
        try:
            given = launch_command_parser().parse_args(
                ["--config_file", path, "--main_process_port", str(port), _SCRIPT]
            )
            args, defaults, precision_is_from_file = _validate_launch_command(given)
            with warnings.catch_warnings(action="ignore"):  # the port is in use by the ranks that started first
                if not args.use_deepspeed:
                    made = prepare_multi_gpu_env(args)
                else:
                    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_is_from_file else [])]
                    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
                    made = prepare_deepspeed_cmd_env(args)[1]
        except (ValueError, ConnectionError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"accelerate does not take this launch: {text}") from error
    return {key: value for key, value in made.items() if before.get(key) != value and key not in _NOT_OURS}


@contextmanager
def _clean_environment() -> Iterator[dict[str, str]]:
    """Context that hides the variables of an earlier launch; yields the environment in it."""
    kept = {key: value for key, value in os.environ.items() if key in _KEPT}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield dict(kept)


# ----------------------------------------------------------------------------------------------- on the simulated card

_NO_PORT = 1  # of the rank's environment: a fake process group makes no connection


@contextmanager
def simulated_rank(launch: Launch, rank: int = 0, *, device: str = "sim:a100-80gb") -> Iterator[None]:
    """Be rank `rank` of the launch inside: a trainer built there finds accelerate's settings and a process group.

    Nothing for a plain launch. Enter it before `fake_gpu`, and build and train inside of both.
    """
    if launch.is_plain:
        yield
        return
    environment = rank_environment(launch, rank=rank, port=_NO_PORT, device=device)
    if launch.network_gbit is not None:
        environment[NETWORK_GBIT] = str(launch.network_gbit)
    with mock.patch.dict(os.environ, environment), fake_ranks(launch.ranks, rank, servers=launch.server_ranks):
        yield


def share_differs(model: torch.nn.Module, launch: Launch) -> bool:
    """True if the last rank holds less of a trained model than rank 0: a dimension that the ranks leave undivided.

    FSDP1 and ZeRO pad, so that the shares of all ranks are equal; so are copies of the whole.
    """
    if launch.sharding != "fsdp2":
        return False
    return any(parameter.dim() and parameter.shape[0] % launch.ranks for parameter in model.parameters())
