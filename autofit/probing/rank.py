"""One rank of several on the simulated card: its environment and a fake process group. Imports torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from autofit.fakegpu.ranks import fake_ranks
from autofit.plugin.ranks import rank_environment
from autofit.recipe.launch import Launch

_NO_PORT = 1  # of the rank's environment: a fake process group connects to nobody


@contextmanager
def simulated_rank(launch: Launch, rank: int = 0, *, device: str = "sim:a100-80gb") -> Iterator[None]:
    """Be rank `rank` of the launch inside: a trainer built there finds accelerate's settings and a process group.

    Nothing for a plain launch. Enter it before `fake_gpu`, and build and train inside of both.
    """
    if launch.is_plain:
        yield
        return
    environment = rank_environment(launch, rank=rank, port=_NO_PORT, device=device)
    with mock.patch.dict(os.environ, environment), fake_ranks(launch.ranks, rank, servers=launch.server_ranks):
        yield


def share_differs(model: torch.nn.Module, launch: Launch) -> bool:
    """Whether the last rank holds less of a trained model than rank 0: a first dimension that the ranks do not divide.

    FSDP1 and ZeRO pad, so that the shares of all ranks are equal; so are copies of the whole.
    """
    if launch.sharding != "fsdp2":
        return False
    return any(parameter.dim() and parameter.shape[0] % launch.ranks for parameter in model.parameters())
