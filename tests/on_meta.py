"""Models whose parameters are counted and need no values."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which models are made on the meta device, where drawing values for nothing takes half the time."""
    with ExitStack() as kept:
        for name in ("kaiming_uniform_", "uniform_", "normal_"):
            kept.enter_context(mock.patch.object(torch.nn.init, name, lambda tensor, *_, **__: tensor))
        kept.enter_context(torch.device("meta"))
        yield
