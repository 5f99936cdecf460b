"""Bytes and shape of each micro-batch of a `transformers.Trainer` while it trains. Loads torch and transformers."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import TrainerCallback


class Gauge(Protocol):
    """Reads the bytes of the device that trains (`autofit.watching.peaks.CudaGauge`)."""

    @property
    def capacity_bytes(self) -> int: ...
    def allocated_bytes(self) -> int: ...
    def window_bytes(self) -> int: ...
    def outside_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch that was trained."""

    number: int  # among those of this start, from 0
    sequences: int  # of its longest forward with gradients; 0: not seen
    width: int  # their padded tokens
    before_bytes: int  # held when it began, above those when its optimizer step began: gradients of others
    working_bytes: int  # its peak above the bytes held when it began


class MicroBatches(TrainerCallback):  # type: ignore[misc]
    """Notes the micro-batches of a training in `taken`, from the first one, until `stop`.

    A look at an embedding's input tells their shape; under torch.compile there is no look, as it would split the graph.
    """

    def __init__(self, trainer: Any, gauge: Gauge) -> None:
        self._gauge = gauge
        self._count = self._step_bytes = self._own_bytes = 0
        self._shape = (0, 0)
        self._taken: list[MicroBatch] = []
        self._stopped = False
        self._handle = None if _is_compiled(trainer) else _embeddings(trainer.model, self._look)
        trainer.add_callback(self)

    def taken(self) -> list[MicroBatch]:
        """Those since the last call."""
        found, self._taken = self._taken, []
        return found

    def stop(self) -> None:
        """Look no longer."""
        self._stopped = True
        if self._handle is not None:
            self._handle.remove()

    def on_step_begin(self, *_: object, **__: object) -> None:
        if not self._stopped:
            self._step_bytes = self._own_bytes = self._gauge.allocated_bytes()
            self._gauge.window_bytes()

    def on_substep_end(self, *_: object, **__: object) -> None:
        self._note()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self._note()

    def _note(self) -> None:
        if self._stopped:
            return
        before, working = self._own_bytes - self._step_bytes, self._gauge.window_bytes() - self._own_bytes
        self._taken.append(MicroBatch(self._count, *self._shape, before, working))
        self._count, self._shape, self._own_bytes = self._count + 1, (0, 0), self._gauge.allocated_bytes()

    def _look(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and arguments and arguments[0].dim() == 2:
            shape = tuple(arguments[0].shape)
            if shape[0] * shape[1] > self._shape[0] * self._shape[1]:
                self._shape = shape


def _is_compiled(trainer: Any) -> bool:
    return bool(getattr(trainer.args, "torch_compile", False))


def _embeddings(model: Any, look: Any) -> Any:
    """The handle of a look at the tokens that the model is given; None for a model without an embedding of tokens."""
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found.register_forward_pre_hook(look) if isinstance(found, torch.nn.Module) else None
