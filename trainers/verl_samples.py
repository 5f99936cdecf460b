"""The longest samples of a verl config, packed as its engines take them, and runs of equal micro-batches of them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from autofit.fakegpu.patches.cuda_api import active_gpu

from .verl_settings import Settings


class Samples:
    """Synthetic samples of full length on a device; every function takes their number."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """What a model takes: packed, (1, tokens)."""
        each = self._settings.tokens
        ids = torch.zeros((1, rows * each), dtype=torch.long, device=self._device)
        positions = torch.arange(each, device=self._device).repeat(rows)[None]
        return {"input_ids": ids, "position_ids": positions}

    def answers(self, rows: int, *names: str) -> dict[str, torch.Tensor]:
        """What a loss reads beside the model's outputs, each (rows, tokens of a response)."""
        shape = (rows, self._settings.max_response_length)
        return {name: torch.zeros(shape, device=self._device) for name in names}

    def of_responses(self, packed: torch.Tensor, rows: int) -> torch.Tensor:
        """The part of the responses, (rows, length), of a number for each packed token."""
        start = self._settings.max_prompt_length - 1
        return packed.view(rows, self._settings.tokens)[:, start : start + self._settings.max_response_length]


def runs_of(sizes: list[int]) -> list[tuple[int, int]]:
    """(size, how often in a row) of equal neighbours."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        if found and found[-1][0] == size:
            found[-1] = (size, found[-1][1] + 1)
        else:
            found.append((size, 1))
    return found


def marked_last(sizes: list[int]) -> list[tuple[int, int, bool]]:
    """(size, how often in a row, whether it is the last) of a step's micro-batches, the first and the last alone."""
    *first, last = sizes
    runs = [(size, times, False) for size, times in runs_of(first[1:])]
    return [*[(size, 1, False) for size in first[:1]], *runs, (last, 1, True)]


@contextmanager
def stands_for(times: int) -> Iterator[None]:
    """What runs inside happens `times` times: on a simulated card it is traced once."""
    gpu = active_gpu()
    with nullcontext() if gpu is None else gpu.standing_for(times):
        yield
