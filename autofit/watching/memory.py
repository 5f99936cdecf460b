"""The watcher of memory: a longer sample to come, or a leak, that will cross the limit, and the step at which it does.

On a CPU nothing is watched: no limit ends a run there.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from autofit.hardware.nvml import used_bytes
from autofit.probing.memory import own_handle
from autofit.units import format_bytes
from autofit.watching.contract import StepFacts, Watched, Watcher
from autofit.watching.events import EventKind, RunEvent
from autofit.watching.progress import Growth
from autofit.watching.projection import Coming, Crossing, Rhythm

if TYPE_CHECKING:
    from autofit.watching.micro_batches import Gauge, MicroBatches

_EVERY_STEP = 32  # steps looked at one by one, then every eighth: later ones teach little
_SELDOM = 8


class MemoryWatcher(Watcher):
    """Warns before the limit is crossed, its only event. The limit: the promise's, else the whole card."""

    def __init__(self, gauge: "Gauge | None" = None) -> None:
        self._gauge = gauge
        self._coming: Coming | None = None
        self._micro_batches: MicroBatches | None = None
        self._trend, self._completions = Growth(), Growth()
        self._run: Watched | None = None
        self._steps = self._limit_bytes = self._outside_bytes = self._working_bytes = 0
        self._told_visit = self._told_step = -1  # a longer one after it is reported once this has passed
        self._told_leak = self._told_completions = False

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """Look up the samples of each step; emits no event."""
        self.stop()
        if run.device != "cuda":
            return ()
        if self._gauge is None:
            self._gauge = CudaGauge()
        self._run, self._steps = run, 0
        promised = None if run.promise is None else run.promise.limit_bytes
        self._limit_bytes = min(promised or self._gauge.capacity_bytes, self._gauge.capacity_bytes)
        if run.hf_trainer is not None:
            # What a trainer holds is its author's: a training does not end because a look at it failed.
            with suppress(AttributeError, LookupError, NotImplementedError, TypeError, ValueError):
                self._look_ahead(run, self._gauge)
        return ()

    def _look_ahead(self, run: Watched, gauge: "Gauge") -> None:
        from autofit.watching.micro_batches import MicroBatches, visits_of

        epoch, rhythm = rhythm_of(run)
        most = (run.last_step - run.first_step) * rhythm.accumulation + rhythm.first_micro_batch
        visits = visits_of(run.hf_trainer, epoch=epoch, most=most)
        if visits is not None and len(visits.longest) > rhythm.first_micro_batch:
            self._coming = Coming(visits, rhythm)
            self._micro_batches = MicroBatches(run.hf_trainer, gauge)

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        """A warning for a sample to come, or for a leak, each once."""
        if self._gauge is None or self._run is None:
            return
        self._steps += 1
        held = self._gauge.allocated_bytes()
        peak = self._gauge.window_bytes()
        self._learn(peak - held)
        if self._steps == 1 or self._steps % _SELDOM == 0:
            self._outside_bytes = self._gauge.outside_bytes()
        held += self._outside_bytes
        yield from self._longer_sample(step.number, held)
        if self._steps > 1:  # the optimizer's state is made in the first
            self._trend.add(step.number, held)
            yield from self._leak(step.number, held)
            yield from self._longer_completions(step.number, held)

    def _learn(self, rest_bytes: int) -> None:
        """Note what the finished micro-batches, and the rest of the step, worked with."""
        self._working_bytes = max(self._working_bytes, rest_bytes)
        for done in [] if self._micro_batches is None else self._micro_batches.taken():
            self._working_bytes = max(self._working_bytes, done.before_bytes + done.working_bytes)
            if self._coming is not None:
                self._coming.learn(done)

    def _longer_sample(self, step: int, held_bytes: int) -> Iterable[RunEvent]:
        assert self._run is not None
        if self._coming is None:
            return
        if self._steps > _EVERY_STEP and self._steps % _SELDOM and not self._coming.is_due(step):
            return
        promised = self._run.promise is not None and self._run.promise.fidelity == "measured"
        room = self._limit_bytes - held_bytes
        found = self._coming.crossing(room, finished_steps=step, guess=not promised)
        if found is not None and found.visit > self._told_visit and step >= self._told_step:
            self._told_visit, self._told_step = found.visit, found.step
            yield sample_event(step, found, held_bytes, self._limit_bytes, self._run.hf_trainer)

    def _leak(self, step: int, held_bytes: int) -> Iterable[RunEvent]:
        assert self._run is not None
        if self._told_leak or not self._trend.is_due:
            return
        growth = self._trend.growth()
        if growth is None:
            return
        room = self._limit_bytes - held_bytes - self._working_bytes
        at_step = step + max(1, int(room / growth) + 1)
        if at_step <= self._run.last_step:
            self._told_leak = True
            yield leak_event(step, at_step, growth, held_bytes + self._working_bytes, self._limit_bytes)

    def _longer_completions(self, step: int, held_bytes: int) -> Iterable[RunEvent]:
        assert self._run is not None
        most = getattr(getattr(self._run.hf_trainer, "args", None), "max_completion_length", None)
        if self._coming is None or most is None or self._told_completions:
            return
        self._completions.add(step, self._coming.completion_tokens)
        growth = self._completions.growth() if self._completions.is_due else None
        limit = None if growth is None else self._coming.completion_limit(self._limit_bytes - held_bytes, int(most))
        if growth is None or limit is None:
            return
        at_step = step + max(1, int((limit - self._coming.completion_tokens) / growth) + 1)
        if at_step <= self._run.last_step:
            self._told_completions = True
            yield completions_event(step, at_step, limit, growth, self._limit_bytes)

    def ends(self) -> Iterable[RunEvent]:
        self.stop()
        return ()

    def stop(self) -> None:
        """Stop looking at the trainer's micro-batches."""
        if self._micro_batches is not None:
            self._micro_batches.stop()
        self._coming = self._micro_batches = self._run = None
        self._trend, self._completions = Growth(), Growth()


def rhythm_of(run: Watched) -> tuple[int, Rhythm]:
    """(the epoch at work, from 0; the rhythm of its micro-batches)."""
    trainer = run.hf_trainer
    args, loader = trainer.args, trainer.callback_handler.train_dataloader
    accumulation = int(args.gradient_accumulation_steps)
    steps_an_epoch = max(1, -(-len(loader) // accumulation)) if hasattr(loader, "__len__") else max(1, run.last_step)
    epoch, done = divmod(run.first_step, steps_an_epoch)
    return epoch, Rhythm(
        accumulation=accumulation, first_step=run.first_step, first_micro_batch=done * accumulation,
        micro_batches_a_rollout=_a_rollout(args), flat=bool(getattr(trainer, "padding_free", False)),
        eager=getattr(getattr(trainer.model, "config", None), "_attn_implementation", "") == "eager",
    )  # fmt: skip


def _a_rollout(args: Any) -> int | None:
    if not hasattr(args, "steps_per_generation"):
        return None
    return int(args.steps_per_generation or 1) * int(getattr(args, "num_iterations", 1))


def sample_event(step: int, found: Crossing, held_bytes: int, limit_bytes: int, trainer: Any) -> RunEvent:
    """The warning of a sample that is too long for the limit."""
    held = held_bytes + found.before_bytes
    estimate, most = held + round(found.projection.estimate), held + round(found.projection.at_most)
    sure = estimate > limit_bytes
    needs = (
        f"an estimated {format_bytes(estimate)}, and at most {format_bytes(most)}," if found.projection.fitted
        else f"between {format_bytes(estimate)} and {format_bytes(most)}"
    )  # fmt: skip
    text = (
        f"memory {'will' if sure else 'may'} cross the limit at step {found.step:,}: sample {found.row:,} there is the "
        f"longest so far, {found.tokens:,} tokens{_completions(trainer)} against {found.largest_seen:,} until now, "
        f"and needs {needs} of {format_bytes(limit_bytes)}; {_advice(found, trainer)}"
    )
    return _event(step, text, found.step, estimate if sure else most, limit_bytes, sample=found.row,
                  at_most_bytes=most, tokens=found.tokens)  # fmt: skip


def _completions(trainer: Any) -> str:
    return " (with a completion as long as the longest so far)" if hasattr(trainer.args, "num_generations") else ""


def _advice(found: Crossing, trainer: Any) -> str:
    """Advice: the samples' length if the trainer cuts them."""
    if hasattr(trainer.args, "max_completion_length"):
        return f"lower max_completion_length or per_device_train_batch_size, or leave out prompt {found.row:,}"
    if found.fitting_tokens is None or not hasattr(trainer.args, "max_length"):
        return f"lower per_device_train_batch_size, or shorten sample {found.row:,}"
    return f"set max_length to at most {found.fitting_tokens:,}, or lower per_device_train_batch_size"


def leak_event(step: int, at_step: int, growth: float, projected: int, limit_bytes: int) -> RunEvent:
    """The warning of bytes that are held for ever."""
    text = (
        f"memory will cross the limit of {format_bytes(limit_bytes)} at about step {at_step:,}: what is held between "
        f"steps grows by {format_bytes(round(growth))} a step; look for tensors that a reward function or a callback "
        "keeps (append loss.item(), not the loss)"
    )
    return _event(step, text, at_step, round(projected + growth * (at_step - step)), limit_bytes, growth_bytes=growth)


def completions_event(step: int, at_step: int, tokens: int, growth: float, limit_bytes: int) -> RunEvent:
    """The warning of completions that become longer."""
    text = (
        f"memory will cross the limit of {format_bytes(limit_bytes)} at about step {at_step:,}: completions grow by "
        f"{growth:.3g} tokens a step, and the longest prompt with one of {tokens:,} tokens does not fit; set "
        f"max_completion_length below {tokens:,}, or lower per_device_train_batch_size"
    )
    return _event(step, text, at_step, limit_bytes, limit_bytes, completion_tokens=tokens)


def _event(step: int, text: str, at_step: int, projected: int, limit_bytes: int, **more: object) -> RunEvent:
    data: Mapping[str, object] = {
        "at_step": at_step, "projected_bytes": projected, "limit_bytes": limit_bytes, "sample": None, **more
    }  # fmt: skip
    return RunEvent(step=step, kind=EventKind.MEMORY, text=text, data=data)


# -- bytes of the CUDA card that trains -------------------------------------------------------------------------------
# A window needs torch's peak statistics reset. What was reset away is kept here, so `since_beginning` stays right:
# read peaks of a full run from it, and not from `torch.cuda.max_memory_allocated`, which then tells the last window
# only.

_ALLOCATED, _RESERVED = "allocated_bytes", "reserved_bytes"
_kept = {_ALLOCATED: 0, _RESERVED: 0}


def since_beginning() -> dict[str, int]:
    """peak_allocated_bytes and peak_reserved_bytes since the run began; empty on a machine that lacks a card."""
    if not torch.cuda.is_available():
        return {}
    found = _stats()
    return {f"peak_{name}": max(kept, _of(found, name, "peak")) for name, kept in _kept.items()}


def retries() -> dict[str, int]:
    """alloc_retries: number of times that torch gave cached blocks back and tried again, since the run began; {} on a
    CPU."""
    return {"alloc_retries": int(_stats().get("num_alloc_retries", 0))} if torch.cuda.is_available() else {}


class CudaGauge:
    """Reads the card of this process; some 30 microseconds a reading, as torch's own tables are slower."""

    def __init__(self) -> None:
        _kept.update({_ALLOCATED: 0, _RESERVED: 0})  # an earlier training of this process has ended
        self._used_bytes = _driver_bytes() or _cuda_bytes

    @property
    def capacity_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def allocated_bytes(self) -> int:
        """Bytes of live tensors."""
        return _of(_stats(), _ALLOCATED, "current")

    def window_bytes(self) -> int:
        """The most bytes of live tensors since the last call; a new window begins."""
        found = _stats()
        for name in _kept:
            _kept[name] = max(_kept[name], _of(found, name, "peak"))
        torch.cuda.reset_peak_memory_stats()
        return _of(found, _ALLOCATED, "peak")

    def outside_bytes(self) -> int:
        """Bytes in use on the card outside torch's allocator: CUDA's context, other processes."""
        return max(0, self._used_bytes() - _of(_stats(), _RESERVED, "current"))


def _stats() -> dict[str, Any]:
    return torch.cuda.memory_stats_as_nested_dict()


def _of(stats: dict[str, Any], name: str, moment: str) -> int:
    return int(stats[name]["all"][moment]) if name in stats else 0  # empty until the first tensor on the card


_EVERY_S = 1.0  # between two questions to the driver


class CardPeak:
    """Peak reserved bytes and the bytes outside torch's allocator, added as `autofit.probing.memory` adds them."""

    def __init__(self, outside_bytes: Callable[[], int]) -> None:
        self._ask = outside_bytes
        self._most_outside, self._asked_at = 0, -_EVERY_S

    def bytes_at(self, peak_reserved_bytes: int) -> int:
        """Device-used bytes at a peak of `peak_reserved_bytes`; the bytes outside are at most a second old."""
        now = time.monotonic()
        if now - self._asked_at >= _EVERY_S:
            self._most_outside, self._asked_at = max(self._most_outside, self._ask()), now
        return peak_reserved_bytes + self._most_outside


def card_use() -> CardPeak | None:
    """The use of this process' card, if the driver reports it."""
    used = _driver_bytes()
    return None if used is None else CardPeak(lambda: max(0, used() - torch.cuda.memory_reserved()))


def _driver_bytes() -> Callable[[], int] | None:
    """Function that asks the driver for the bytes in use on this process' card, if the driver reports them."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = own_handle(pynvml)
        used_bytes(pynvml, handle)
    except pynvml.NVMLError:
        return None
    return lambda: used_bytes(pynvml, handle)


def _cuda_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
