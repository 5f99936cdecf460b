"""Changes of a script's TrainingArguments: those that are given, and those that make it fit at the same batch.

A change is tried by running the script once more, in a process of its own. Where all samples are made up, and so alike,
a step of transformers' Trainer has fewer micro-batches, whose seconds count.
"""

import functools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from autofit.errors import ConfigError, nearest
from autofit.space.traits import set_options
from autofit.units import format_bytes, format_seconds

MICRO, ACCUMULATION, CHECKPOINTING = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
)  # fmt: skip
KEYS = (MICRO, ACCUMULATION, CHECKPOINTING)
_QUIET: dict[str, object] = {"report_to": "none", "push_to_hub": False}
_STAYS = ("weights", "optimizer", "gradients")  # categories whose bytes are the same with a smaller micro-batch


@contextmanager
def laid_over(changes: Mapping[str, object], seen: dict[str, Any]) -> Iterator[None]:
    """Context in which every TrainingArguments, of whichever trainer, has `changes` over what the script gives.

    It reports and pushes to nobody. The values of `KEYS` that the last one ends up with are written into `seen`.
    """
    import torch
    from transformers import TrainingArguments, training_args

    original = TrainingArguments.__post_init__

    def changed(arguments: Any) -> None:
        unknown = [key for key in changes if not hasattr(arguments, key)]
        if unknown:
            near = nearest(unknown[0], vars(arguments))
            raise ConfigError(f"--set {unknown[0]}: {type(arguments).__name__} has no such field{near}")
        for key, value in {**_QUIET, **changes}.items():
            setattr(arguments, key, value)
        original(arguments)
        seen.update({key: getattr(arguments, key) for key in KEYS})

    def has_tf32() -> bool:  # which transformers asks of the CUDA build, too
        return bool(torch.cuda.get_device_capability()[0] >= 8)

    with (
        mock.patch.object(TrainingArguments, "__post_init__", changed),
        mock.patch.object(training_args, "is_torch_tf32_available", has_tf32, create=True),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptChange:
    """Changes with which the script fits at the same effective batch, and its figures with them."""

    changes: Mapping[str, object]
    before: Mapping[str, object]
    least_capacity_bytes: int
    most_step_s: float | None  # seconds a step, at most: the optimizer counts once for each two micro-batches

    def __str__(self) -> str:
        words = ", ".join(f"{key} {self.before[key]} -> {value}" for key, value in self.changes.items())
        step = "" if self.most_step_s is None else f", at most {format_seconds(self.most_step_s)} a step"
        needed = format_bytes(self.least_capacity_bytes)
        return f"  {words} (needs {needed}{step})   {set_options(self.changes)}"

    def to_dict(self) -> dict[str, object]:
        """The changes and the figures with them."""
        figures = {"least_capacity_bytes": self.least_capacity_bytes, "most_step_s": self.most_step_s}
        return {"changes": dict(self.changes), **figures}


Figures = Mapping[str, Any]  # what `fit-check --json` tells
Ask = Callable[[Mapping[str, object]], Figures | None]  # the figures with changes; None: none, or no time is left


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAdvice:
    """Smaller micro-batches and checkpoints of activations for a script whose arguments are `seen`."""

    seen: Mapping[str, Any]
    ask: Ask

    def offers(self, found: Figures) -> Iterator[ScriptChange]:
        """The settings with which a script fits whose figures `found` exceed the card, as they are found.

        The largest micro-batch by halves that fits, as the script is, and then with checkpoints.
        """
        yield from self._of(found, {})
        if not self.seen[CHECKPOINTING]:
            more: dict[str, object] = {CHECKPOINTING: True}
            size = int(self.seen[MICRO])
            first = self._asked(size, more)
            if first is not None and first["fits"]:
                yield self._offer(size, more, first)
            elif first is not None:
                yield from self._of(first, more)

    def _of(self, figures: Figures, more: Mapping[str, object]) -> Iterator[ScriptChange]:
        """The largest micro-batch that fits below the script's own, whose `figures` with the changes `more` are given.

        Only what may fit is asked for: activations and temporaries shrink with the micro-batch, the rest stays.
        """
        now: Figures | None = figures
        size = int(self.seen[MICRO])
        while now is not None and not now["fits"]:
            stays = sum(row["allocated_bytes"] for row in now["alive_at_peak"] if row["category"] in _STAYS)
            shrinks = now["peak_allocated_bytes"] - stays
            rest = [s for s in self._sizes if s < size and stays + shrinks * s / size <= now["target_bytes"]]
            if not rest:
                return
            size = rest[0]
            now = self._asked(size, more)
        if now is not None:
            yield self._offer(size, more, now)

    @property
    def _samples(self) -> int:
        return int(self.seen[MICRO]) * int(self.seen[ACCUMULATION])

    @property
    def _sizes(self) -> list[int]:
        """Micro-batches of the same effective batch, each half of one before it or less."""
        micro = int(self.seen[MICRO])
        halves = [micro >> n for n in range(micro.bit_length())]
        return [size for size in halves if self._samples % size == 0]

    def _asked(self, size: int, more: Mapping[str, object]) -> Figures | None:
        """The figures of a run with two micro-batches a step at most: later ones take what the second one takes."""
        return self.ask({MICRO: size, ACCUMULATION: min(2, self._samples // size), **more})

    def _offer(self, size: int, more: Mapping[str, object], figures: Figures) -> ScriptChange:
        times = self._samples // size
        batch = {} if size == int(self.seen[MICRO]) else {MICRO: size, ACCUMULATION: times}
        step_s = figures["step_s"]
        return ScriptChange(
            changes=batch | dict(more), before=self.seen, least_capacity_bytes=int(figures["least_capacity_bytes"]),
            most_step_s=None if step_s is None else step_s * times / min(2, times),
        )  # fmt: skip


def asked_again(options: Sequence[str], script: Sequence[str], until: float) -> Ask:
    """A function that runs `fit-check` of `script` with `options` and changes, while there is time `until` then."""
    first = (sys.executable, "-P", "-m", "autofit", "fit-check", "--json", "--advice-time=0")

    def ask(changes: Mapping[str, object]) -> Figures | None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return None
        words = [*first, *options, *shlex.split(set_options(changes)), *script]
        try:
            run = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, check=False)
            return dict(json.loads(run.stdout.splitlines()[-1])) if run.returncode in (0, 1) else None
        except (subprocess.TimeoutExpired, ValueError, IndexError):
            return None

    return ask


# -- fewer micro-batches a step ---------------------------------------------------------------------------------------
# A step has three: the first makes the gradients, the second adds to them, and the third is the second one again. A
# trainer with rollouts keeps all, as their size depends on the accumulation.

FEW = 3


class Fewer:
    """Leaves out micro-batches while `alike` is true; `now_s` is the clock, and `note` is called with a message."""

    def __init__(self, alike: Callable[[], bool], now_s: Callable[[], float], note: Callable[[str], None]) -> None:
        self._alike, self._now_s, self._note = alike, now_s, note
        self._left_out = 0
        self._begun_s: list[float] = []

    def end_step(self) -> float:
        """Seconds of what was left out of the step that ends, each as long as the second micro-batch."""
        begun_s, self._begun_s = self._begun_s, []
        return self._left_out * (begun_s[2] - begun_s[1]) if len(begun_s) == FEW else 0.0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which a Trainer is made with fewer micro-batches a step."""
        from torch.utils.data import SequentialSampler
        from transformers import Trainer

        made, step = Trainer.__init__, Trainer.training_step

        @functools.wraps(made)
        def __init__(trainer: Any, model: Any = None, args: Any = None, *rest: Any, **named: Any) -> None:
            if args is not None and self._alike():
                _keep_order(args, trainer)  # one with rollouts has taken it from its arguments by now
                if not hasattr(args, "num_generations"):
                    asked = int(args.gradient_accumulation_steps)
                    if asked > FEW:
                        args.gradient_accumulation_steps = FEW
                        self._left_out = asked - FEW
                        self._note(f"of {asked} micro-batches a step {FEW} were run, as made-up samples are alike; the "
                                   "others take the bytes and seconds of the second")  # fmt: skip
                    if not hasattr(args, "train_sampling_strategy"):  # of older transformers
                        trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
            made(trainer, model, args, *rest, **named)

        @functools.wraps(step)
        def training_step(trainer: Any, *given: Any, **named: Any) -> Any:
            self._begun_s.append(self._now_s())
            return step(trainer, *given, **named)

        with (
            mock.patch.object(Trainer, "__init__", __init__),
            mock.patch.object(Trainer, "training_step", training_step),
        ):
            yield


def _keep_order(*of: Any) -> None:
    """Take samples in their order, long and short in turns: a batch of one length alone has no mask, and is faster."""
    for each in of:
        for key, value in (("train_sampling_strategy", "sequential"), ("shuffle_dataset", False)):
            if hasattr(each, key):
                setattr(each, key, value)
