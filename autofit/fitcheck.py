"""`fit_check`: does a training loop of your own fit on a GPU, and how much memory is left? No trainer needed.

The module is not called `fit_check`, since a submodule of that name would hide the function `autofit.fit_check`.
Importing it loads no torch.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar, cast

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GpuSpec, UnknownGpuError, gpu_spec
from autofit.hardware.calibration import host_costs
from autofit.hardware.hardware import choose_device_and_target
from autofit.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    import torch

    from autofit.fakegpu import FakeGpu

T = TypeVar("T")
PRINTED_ROWS = 12
_BUILD = "pass a function without arguments that builds the model on the card, for example lambda: GPT(config).cuda()"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveAtPeak:
    """Tensors of one category that one line of code allocated, alive at the peak."""

    category: str
    allocated_bytes: int
    count: int
    place: str  # file:line function

    @property
    def short_place(self) -> str:
        """`place` with the last two parts of its path."""
        path, colon, rest = self.place.rpartition(":")
        return "/".join(PurePath(path).parts[-2:]) + colon + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCheck:
    """The predicted memory and time of a training loop on one simulated GPU. `str()` of it is a table."""

    gpu: str  # the card's name, such as "a100-40gb"
    capacity_bytes: int  # of the card, as its driver reports it
    target_bytes: int  # the bytes that the loop may use: target_vram, or the whole card
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int  # peak reserved and the CUDA context, on a card without a limit
    least_capacity_bytes: int | None  # the smallest sufficient target, to within 16 MiB above; None: see out_of_memory
    step_s: float | None  # simulated seconds of the last step; None if no step was completed
    peak_phase: str  # "build", "step 1", "step 2"
    alive_at_peak: tuple[AliveAtPeak, ...]  # largest first
    notes: tuple[str, ...]  # parts of the run that were not simulated as the card would run them
    out_of_memory: str | None = None  # the message, if the code ran out of memory under a limit that it set itself

    @property
    def fits(self) -> bool:
        """True if the loop runs within the target. Cached blocks that PyTorch can free under pressure are left out."""
        return self.margin_bytes is not None and self.margin_bytes >= 0

    @property
    def margin_bytes(self) -> int | None:
        """Target less least capacity: the bytes left over, or, below zero, the bytes missing."""
        return None if self.least_capacity_bytes is None else self.target_bytes - self.least_capacity_bytes

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        of = f"{format_bytes(self.target_bytes)} on {self.gpu}"
        if self.least_capacity_bytes is None or self.margin_bytes is None:
            return f"does not fit in {of}: the code ran out of memory, and the figures end there"
        if self.fits:
            return f"fits in {of}, with {format_bytes(self.margin_bytes)} left"
        needed, missing = format_bytes(self.least_capacity_bytes), format_bytes(-self.margin_bytes)
        return f"does not fit in {of}: it needs {needed}, {missing} too much"

    def to_dict(self) -> dict[str, object]:
        """All fields and `fits`, `margin_bytes` and `verdict`, as plain values that JSON takes."""
        rows = [asdict(row) for row in self.alive_at_peak]
        derived = {"fits": self.fits, "margin_bytes": self.margin_bytes, "verdict": self.verdict}
        return asdict(self) | {"alive_at_peak": rows, "notes": list(self.notes)} | derived

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {name:<16}{value:>12}  {meaning}".rstrip() for name, value, meaning in self._figures()]
        if self.alive_at_peak:
            lines.append(f"alive at the peak, in {self.peak_phase}:")
            lines += [f"  {name:<12}{size:>12}  {count:>5} x  {place}" for name, size, count, place in self._rows()]
        return "\n".join([*lines, *(f"note: {note}" for note in self._remarks())])

    def _repr_html_(self) -> str:
        figures = "".join(_html_row(*row) for row in self._figures())
        alive = "".join(_html_row(*row) for row in self._rows())
        notes = "".join(f"<li>{escape(note)}</li>" for note in self._remarks())
        return (
            f"<p><b>{escape(self.verdict)}</b></p><table>{figures}</table>"
            f"<p>alive at the peak, in {escape(self.peak_phase)}:</p>"
            f"<table><tr><th>category</th><th>size</th><th>tensors</th><th>allocated in</th></tr>{alive}</table>"
            f"<ul>{notes}</ul>"
        )

    def _figures(self) -> Iterator[tuple[str, str, str]]:
        least = self.least_capacity_bytes
        yield "peak allocated", format_bytes(self.peak_allocated_bytes), "live tensors"
        yield "peak reserved", format_bytes(self.peak_reserved_bytes), "held by PyTorch's allocator"
        beyond = least is not None and least <= self.target_bytes < self.device_used_bytes
        more = ", on a card without a limit" if beyond else ""
        yield "device used", format_bytes(self.device_used_bytes), f"with the CUDA context{more}"
        yield "least capacity", "-" if least is None else format_bytes(least), "the smallest target that is enough"
        yield "step", self._step, "predicted"

    @property
    def _step(self) -> str:
        if self.step_s is None:
            return "-"
        return f"{self.step_s * 1e3:.4g} ms" if self.step_s < 1 else format_seconds(self.step_s)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        large = sum(row.allocated_bytes * 1000 >= self.peak_allocated_bytes for row in self.alive_at_peak)
        shown = min(large, PRINTED_ROWS)  # the largest are first
        for row in self.alive_at_peak[:shown]:
            yield row.category, format_bytes(row.allocated_bytes), str(row.count), row.short_place
        rest = self.alive_at_peak[shown:]
        if rest:
            size, count = sum(row.allocated_bytes for row in rest), sum(row.count for row in rest)
            yield "the rest", format_bytes(size), str(count), f"{len(rest)} more place{'s' if len(rest) > 1 else ''}"

    def _remarks(self) -> Iterator[str]:
        if self.out_of_memory is not None:
            yield self.out_of_memory
        yield from self.notes


def fit_check(
    model: "Callable[[], object] | torch.nn.Module", step: Callable[..., object], *, gpu: str, steps: int = 2,
    target_vram: str | int | None = None,
) -> FitCheck:  # fmt: skip
    """Peak memory and step time of a training loop on the simulated card `gpu`, and whether it fits.

    `model()` builds the model on the card, and may build its optimizer too. `step` gets the value that `model()`
    returned, a tuple as separate arguments, and does one whole optimizer step: `step(model, optimizer)` for a function
    that returns `(model, optimizer)`. A module built beforehand, on the CPU or on meta, may be given instead: a copy of
    it is moved to the card, and the given one is left as it is. Its optimizer has to be made inside `step`, of the
    model that `step` gets.

    Two steps show the peak, since most optimizers make their state at the end of the first one. `target_vram`
    ("20GB", "20GiB" or a number of bytes) is the part of the card that may be used; None is the whole card.
    A loop that needs more is a result (`fits` is False), not an exception. Bad input raises ConfigError.
    """
    spec, target_bytes, build = _checked(model, step, gpu, steps, target_vram)
    from autofit.fakegpu import fake_gpu

    costs, _ = host_costs(f"sim:{spec.name}")
    with fake_gpu(spec, host_costs=costs, enforce_capacity=False) as card:
        loop = CheckedLoop(card)
        loop.run(build, step, steps)
        return loop.result(target_bytes)


# ---------------------------------------------------------------------- input
def _checked(
    model: object, step: object, gpu: object, steps: object, target_vram: object
) -> "tuple[GpuSpec, int, Callable[[FakeGpu], object]]":
    """The card, its usable bytes, and a function that builds the state; one ConfigError names every bad field."""
    wrong: list[str] = []

    def read(reader: Callable[..., T], *given: object) -> T | None:
        try:
            return reader(*given)
        except ConfigError as error:
            wrong.append(str(error))
            return None

    build = read(_builder, model)
    if not callable(step):
        wrong.append(f"step must be a function that does one optimizer step on what model() returns; got {step!r}")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        wrong.append(f"steps must be a whole number of at least 1 (2 show the optimizer's state); got {steps!r}")
    spec = read(_spec, gpu)
    asked = read(_size, target_vram)
    target = None if spec is None or wrong else read(_target, spec, asked)
    if wrong or spec is None or target is None or build is None:
        raise ConfigError("; ".join(wrong))
    return spec, target, build


def checked_card(gpu: object, target_vram: object) -> tuple[GpuSpec, int]:
    """The card, and the bytes of it that may be used. Raises ConfigError."""
    spec = _spec(gpu)
    return spec, _target(spec, _size(target_vram))


def _spec(gpu: object) -> GpuSpec:
    if not isinstance(gpu, str):
        raise ConfigError(f'gpu must be the name of a card, such as "a100-40gb"; got {gpu!r}')
    try:
        return gpu_spec(gpu)
    except UnknownGpuError as error:
        raise ConfigError(f"gpu must be the name of a known card: {error}") from error


def _size(target_vram: object) -> int | None:
    if isinstance(target_vram, str):
        try:
            return parse_bytes(target_vram)
        except ConfigError as error:
            raise ConfigError(f"target_vram: {error}") from error
    if target_vram is None or (type(target_vram) is int and target_vram > 0):
        return target_vram
    raise ConfigError(f'target_vram must be a size such as "20GB", or a whole number of bytes; got {target_vram!r}')


def _target(spec: GpuSpec, asked: int | None) -> int:
    try:
        return choose_device_and_target("sim", spec.name, asked)[1]
    except ConfigError as error:
        raise ConfigError(
            f"target_vram must be at most the capacity of {spec.name}, {format_bytes(spec.capacity_bytes)}; got "
            f"{format_bytes(cast(int, asked))}; lower it or name a larger gpu"
        ) from error


def _builder(model: object) -> "Callable[[FakeGpu], object]":
    import torch

    if isinstance(model, torch.nn.Module):
        return _mover(model)
    if not callable(model):
        raise ConfigError(f"model must be a function that builds the model; got {model!r}; {_BUILD}")
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ConfigError(f"model must take no arguments; got {model!r} ({error}); {_BUILD}") from error
    except ValueError:
        pass  # a builtin without a signature
    return lambda card: model()


def _mover(model: "torch.nn.Module") -> "Callable[[FakeGpu], object]":
    """A function that puts a copy of a module built outside on the card. The copy shares tensors until it is moved."""
    tensors = [*model.parameters(), *model.buffers()]
    elsewhere = sorted({str(tensor.device) for tensor in tensors} - {"cpu", "meta"})
    if elsewhere:
        raise ConfigError(f"a model built beforehand must be on the CPU or on meta; got one on {elsewhere}; {_BUILD}")
    try:
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"a model built beforehand must be one that can be copied; got {error}; {_BUILD}") from error

    def move(card: "FakeGpu") -> object:
        if card.mode == "cpu" or any(tensor.is_meta for tensor in tensors):
            return twin.to_empty(device="cuda")
        return twin.cuda()

    return move


# ---------------------------------------------------------------------- the run
class CheckedLoop:
    """One run of a training loop on a simulated card."""

    def __init__(self, card: "FakeGpu") -> None:
        self._card = card
        self.step_s: float | None = None
        self.out_of_memory: str | None = None
        self.steps = 0

    def run(self, build: "Callable[[FakeGpu], object]", step: Callable[..., object], steps: int) -> None:
        import torch

        card = self._card
        try:
            with self._watched_optimizers():
                with card.phase("build"):
                    state = build(card)
                arguments = state if type(state) is tuple else (state,)
                _check_arguments(step, arguments)
                for number in range(1, steps + 1):
                    with card.phase(f"step {number}"):
                        began_s = card.elapsed_s
                        step(*arguments)
                        self.step_s = card.elapsed_s - began_s
        except torch.OutOfMemoryError as error:
            self.out_of_memory = str(error)
        if not card.peak_allocated_bytes:
            raise ConfigError(f"the model must be on the card, and nothing was allocated there; {_BUILD}")
        if steps == 1:
            card.note("one step only: optimizer state made at its end is not yet there at the peak; steps=2 shows it")
        if not self.steps and self.out_of_memory is None:
            card.note(
                "no step of a torch.optim optimizer was seen: its state is counted only if step made it otherwise"
            )

    @contextmanager
    def _watched_optimizers(self) -> Iterator[None]:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def before_step(optimizer: "torch.optim.Optimizer", args: object, kwargs: object) -> None:
            self.steps += 1
            if any(not isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    f"an optimizer must hold the parameters of the model on the card; the {type(optimizer).__name__} "
                    "holds some that were built outside of fit_check; build it together with the model, in a function "
                    "that returns (model, optimizer)"
                )

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield
        finally:
            handle.remove()

    def result(self, target_bytes: int) -> FitCheck:
        card = self._card
        report = card.why_peak(limit=len(card.memory.allocations))
        return FitCheck(
            gpu=card.spec.name, capacity_bytes=card.spec.capacity_bytes, target_bytes=target_bytes,
            peak_allocated_bytes=card.peak_allocated_bytes, peak_reserved_bytes=card.peak_reserved_bytes,
            device_used_bytes=card.device_used_bytes,
            least_capacity_bytes=card.least_capacity_bytes if self.out_of_memory is None else None, step_s=self.step_s,
            peak_phase=report.phase,
            alive_at_peak=_alive([(i.category, i.place, i.nbytes, i.count) for i in report.items]),
            notes=tuple(card.notes), out_of_memory=self.out_of_memory,
        )  # fmt: skip


def _check_arguments(step: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        inspect.signature(step).bind(*arguments)
    except TypeError as error:
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise ConfigError(f"step must take what model() returned, ({given}); got a step with {error}") from error
    except ValueError:
        pass  # a builtin without a signature


def _alive(items: list[tuple[str, str, int, int]]) -> tuple[AliveAtPeak, ...]:
    """(category, place, bytes, count) of each kind of tensor, summed for each category and place, largest first."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for category, place, nbytes, count in items:
        before = sums.get((category, place), (0, 0))
        sums[category, place] = (before[0] + nbytes, before[1] + count)
    rows = [AliveAtPeak(category=k[0], place=k[1], allocated_bytes=v[0], count=v[1]) for k, v in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.allocated_bytes))


def _html_row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
