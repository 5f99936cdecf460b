"""Builds mass models from a few short simulated trainings of the real trainer, one variable changed at a time.

A mass model covers one structure: all settings except the variables. `B` is the micro-batch, `G` the completions
generated at once, `C` the completion length, `r` the LoRA rank. TRL's loss works in tiles of tokens, so micro-batches
with more tokens than a tile have a separate model. Imports torch.
"""

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from autofit.fakegpu import FakeGpu, fake_gpu, gpu_spec
from autofit.fakegpu.clock import KnownCosts
from autofit.fakegpu.depth.expand import Mark, TracedRun, expanded
from autofit.fakegpu.depth.layers import LayerClock
from autofit.fakegpu.depth.stack import (
    TRACED_UNITS,
    NotRepeatingError,
    Stack,
    layer_prints,
    plan_stack,
    shallow_models,
    text_config,
)
from autofit.fakegpu.formula.formula import MassModel, Trace, Variation
from autofit.fakegpu.formula.kernel_log import KernelKinds, KernelLog
from autofit.fakegpu.linear_loss import in_proportion
from autofit.fakegpu.op_cache import Known
from autofit.fakegpu.rates.kernels import KernelSeconds
from autofit.fakegpu.specs import HostCosts
from autofit.files import ScratchFolder, write_json, written_json
from autofit.forecast.evaluation import BETWEEN, LAST, OF_MICRO_BATCH, Evaluated, Parts, plain
from autofit.forecast.predictions import LATER, Shape, accumulation_of
from autofit.hardware.calibration import host_costs
from autofit.plugin.protocol import (
    EVALUATION,
    LOAD,
    OPTIMIZER,
    SCORING,
    UPDATE,
    Control,
    Report,
    Task,
    Trainer,
    WorstCase,
)
from autofit.plugin.ranks import simulated_rank
from autofit.plugin.registry import load
from autofit.probing.simulated import layers_alike, needs_all_layers
from autofit.probing.supervise import Job, shared_out
from autofit.recipe.keys import BatchKeys
from autofit.recipe.launch import Launch, split
from autofit.recipe.secrets import opened

MOST_LAYERS = 12  # a model whose layers do not repeat is traced whole up to this number of layers
DEPTHS = (2, 3)  # middle units of the traces that tell what a unit adds: the first, the last, and one between


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point to trace: values of the variables, and the shape of a step."""

    micro_batch: int
    completion: int
    rank: int | None
    accumulation: int
    chunk: int

    @property
    def generated(self) -> int:
        return self.micro_batch * self.chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Peak live bytes of each phase of a traced training, and seconds of its second step after the rollout.

    `update_s` is None if the layers do not repeat: then no clock ran.
    """

    peaks: dict[str, int]
    update_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Errors of a model against a training that was traced as a test: relative ones of its bytes and its seconds."""

    bytes_frac: float = 0.0  # the largest error of a phase's peak, over the largest peak
    seconds_frac: float = 0.0  # forecast over traced, less 1; 0 where no seconds were traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Subject of a trace: the recipe `values`, of a model of `layers` layers, on the simulated `device`."""

    trainer: Trainer
    layers: int
    keys: BatchKeys
    values: Mapping[str, object]
    device: str
    worst_case: WorstCase
    tile_tokens: int | None  # tokens of a micro-batch that the loss processes at once
    evaluated_group: int = 1  # completions of one prompt in an evaluation
    own_tokens: int = 0  # of the recipe's own micro-batch, less their powers of 2; 0 where rollouts decide
    sizes: Set[int] = frozenset()  # of the model's weights
    operations: Known = field(default_factory=dict)  # outputs of operations, which the traces share
    costs: KnownCosts = field(default_factory=dict)  # of operations

    def trace(self, point: Point, stack: Stack | None = None, *, evaluates: bool = False) -> Trace:
        """Two optimizer steps at `point`, with all layers or with those that `stack` keeps.

        After them it `evaluates` if the recipe does: as many samples as there, whatever the point is.
        """
        with self._card(stack) as gpu:
            marks = self._train(gpu, point, evaluates=evaluates)
            kept = self.layers if stack is None else len(stack.kept)
            return Trace.of(gpu, kept, self._in_whole_tiles(marks.log.kinds(marks.repeats), point))

    def _in_whole_tiles(self, kernels: KernelKinds, point: Point) -> KernelKinds:
        """The kernels with the last tile of the loss as a part of a whole one.

        A sample counts with or without its first token, and the padded one has a token less. A size that weights have
        is not taken for rows.
        """
        if self.tile_tokens is None:
            return kernels
        longest = point.completion or int(self.worst_case.facts["longest_tokens"])
        rows = {point.micro_batch * each - less for each in (longest, longest - 1) for less in (0, 1)}
        for rest in {each % self.tile_tokens for each in rows} - {0} - self.sizes:
            kernels = kernels.in_whole_tiles(self.tile_tokens, rest)
        return kernels

    def seen(self, point: Point, stack: Stack | None) -> "Seen":
        """Figures of a training at `point` with all layers.

        With a `stack`, few layers are traced and expanded to all, or, where their events do not repeat, all traced.
        """
        if stack is not None:
            with contextlib.suppress(NotRepeatingError), self._card(stack, follow_layers=True) as gpu:
                marks = self._train(gpu, point, evaluates=True)
                run = expanded(gpu, marks.marks)
                return Seen(peaks=_peaks(run), update_s=_update_s(run, marks.second_step))
        return Seen(peaks=self.trace(point, evaluates=True).peaks)

    @contextmanager
    def _card(self, stack: Stack | None, *, follow_layers: bool = False) -> Iterator[FakeGpu]:
        gc.collect()
        gc.freeze()  # what is left of earlier traces stays; the collections that trainers ask for need not look at it
        spec = gpu_spec(self.device.removeprefix("sim:"))
        few = nullcontext() if stack is None else shallow_models(stack, pattern=layers_alike(self.values))
        card = fake_gpu(
            spec, host_costs=host_costs(self.device)[0], enforce_capacity=False, follow_layers=follow_layers
        )
        alike = in_proportion(0 if follow_layers else self.own_tokens)
        with simulated_rank(Launch.of(self.values), device=self.device), alike, card as gpu, few:
            gpu.only_last_decode_steps = gpu.plays_micro_batches = True
            gpu.memory.keeps_empty = not follow_layers
            if gpu.tracer.shortcut is not None:
                gpu.tracer.shortcut.known = self.operations
            gpu.clock.known = self.costs
            yield gpu

    def _train(self, gpu: FakeGpu, point: Point, *, evaluates: bool) -> "_Marks":
        keys = self.keys
        changed = split(self.values)[1] | {keys.micro_batch: point.micro_batch, keys.accumulation: point.accumulation}
        if keys.rollout is not None:
            assert keys.group is not None
            assert keys.completion is not None
            changed |= {keys.rollout: point.chunk, keys.group: 2, keys.completion: point.completion}
            changed.pop(keys.rollout_batch or "", None)
            if keys.evaluation_group is not None:
                changed[keys.evaluation_group] = self.evaluated_group
        if point.rank is not None:
            changed["lora_r"] = point.rank
        passes = int(cast(int, changed.get(keys.reuse or "")) or 1)
        marks = _Marks(gpu, accumulation=point.accumulation, served=passes * point.chunk, evaluates=evaluates)
        with ScratchFolder("trace-") as folder:
            task = Task(device=self.device, output=folder, worst_case=self.worst_case, steps=2)
            launch = Launch.of(self.values)
            marks.is_alone = launch.is_alone
            if launch.is_plain:
                marks.one_in_first_step = "first"
            elif not launch.is_deepspeeds and not launch.server_ranks and keys.rollout is None:
                marks.one_in_first_step = "last"  # DeepSpeed counts the micro-batches by itself
            run = self.trainer.build(changed, task)
            run.train(marks)
        marks.enter("end")
        if scored := marks.scored_before:  # each step has its share of them
            marks.repeats[SCORING] = scored * point.accumulation / run.scoring_share
        return marks


def _peaks(run: TracedRun) -> dict[str, int]:
    """Peak live bytes of each phase of a run over its allocations, unrounded."""
    live = np.cumsum(run.nbytes)
    found: dict[str, int] = {}
    for mark, end in zip(run.marks, [*(m.event for m in run.marks[1:]), len(live)], strict=True):
        within = live[mark.event : end][run.nbytes[mark.event : end] > 0]
        if len(within):
            found[mark.name] = max(found.get(mark.name, 0), int(within.max()))
    return found


def _update_s(run: TracedRun, first: int) -> float:
    """Seconds of forward, backward and optimizer from mark number `first` on."""
    ends = [*run.seconds(), 0.0]
    return sum(
        ends[number + 1] - ends[number]
        for number, mark in enumerate(run.marks[:-1])
        if number >= first and plain(mark.name) in OF_MICRO_BATCH
    )


class _Marks(Report):
    """A report that labels the simulated card's allocations and kernels with their phase."""

    def __init__(self, gpu: FakeGpu, *, accumulation: int, served: int, evaluates: bool) -> None:
        self._gpu = gpu
        self._evaluates = evaluates
        self._samples_each_step = served <= accumulation
        self._accumulation = accumulation
        self.log = KernelLog()
        self.log.phase_of_step = OPTIMIZER
        self.marks: list[Mark] = []
        gpu.clock.log = self.log
        self.at = LOAD
        self.second_step = 0  # number of the mark at which it begins
        self.later = False
        self.is_alone = True  # False: gradients of several ranks are added up in a step's last micro-batch
        self._trained = 0  # micro-batches of this step
        self.repeats: dict[str, float] = {}
        self.scored_before = 0  # micro-batches that were scored before the training (DPO's reference)
        self._trains = False
        self.enter(LOAD)

    def enter(self, phase: str) -> str:
        left, self.at = self.at, phase
        if phase == EVALUATION:  # its seconds are in no step
            self._measure(on=False)
        name, clock = phase + LATER if self.later else phase, self._gpu.clock
        stretch = clock.cut() if isinstance(clock, LayerClock) else 0
        self.marks.append(Mark(name=name, event=len(self._gpu.memory.log), stretch=stretch))
        self._gpu.memory.enter_phase(name)
        self.log.phase = name + self._last if phase == UPDATE else phase
        return left

    @property
    def _last(self) -> str:
        return LAST if self.later and not self.is_alone and self._trained == self._accumulation - 1 else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name == SCORING and not self._trains:
            self._measure(on=True)
            self.scored_before += 1
        left = self.enter(name)
        if self.log.on:
            self.repeats[name] = self.repeats.get(name, 0) + 1
        yield
        self.enter(left)

    def step_begins(self, step: int) -> None:
        """Record only the second step; the first makes the optimizer's state, whatever its rollout returns.

        A micro-batch of the second that is like the first's is played from it, so that one is recorded too.
        """
        self.later, self._trained, is_second = False, 0, step == 1
        self._trains = True
        self._measure(on=True)
        self._gpu.skips_rollouts = self._samples_each_step and not is_second
        if is_second:
            self.log.restart(kept=SCORING if self.scored_before else "")
            last = 0 if self.is_alone else 1
            self.repeats = {UPDATE: 1, UPDATE + LATER: self._accumulation - 1 - last, UPDATE + LATER + LAST: last}
            self.second_step = len(self.marks)
        self.enter(UPDATE)

    def _measure(self, *, on: bool) -> None:
        self.log.on = on
        self._gpu.clock.asleep = not on and not isinstance(self._gpu.clock, LayerClock)

    def step_ends(self, step: int) -> Control:
        return Control(evaluate=self._evaluates and step > 1)

    def micro_step_ends(self) -> None:
        self.later, self._trained = True, self._trained + 1
        self.enter(UPDATE)

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.later = False
        self.enter(OPTIMIZER)

    def optimizer_ends(self) -> None:
        self.enter(BETWEEN)


# -- one structure ----------------------------------------------------------------------------------------------------


def run(request_path: str) -> int:
    """Build the mass model requested at `request_path` and write the request's answer files. Always returns 0."""
    request = written_json(request_path)
    answer = Path(str(request["answer"]))
    request["values"] = opened(cast("dict[str, object]", request["values"]))
    gc.collect()
    gc.freeze()  # excludes the imported modules from later collections
    try:
        keys = BatchKeys.from_json(cast(dict[str, "str | None"], request["keys"]))
        asked = {k: v for k, v in request.items() if k in {field.name for field in fields(Structure)}}
        structure = Structure(**{**asked, "keys": keys})  # type: ignore[arg-type]
        model, mismatch, evaluated = structure.model()
    except NotRepeatingError as error:
        write_json(answer, {"refused": str(error)})
        return 0
    except Exception as error:
        traceback.print_exc()
        write_json(answer, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return 0
    partly = answer.with_suffix(f".{os.getpid()}.npz")
    model.save(partly)
    os.replace(partly, answer.with_suffix(".npz"))
    told = {"mismatch": mismatch.bytes_frac, "seconds_mismatch": mismatch.seconds_frac,
            "evaluated": None if evaluated is None else evaluated.to_json()}  # fmt: skip
    write_json(answer, {**told, "layers": structure.recording.layers})
    return 0


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A recipe less its variables. `hold_out` is a point of the space: variables, accumulation and chunk."""

    trainer: str
    keys: BatchKeys
    tile_tokens: int | None  # tokens of a micro-batch that the loss processes at once
    values: Mapping[str, object]
    device: str
    worst_case: str
    large: bool  # True: micro-batches have more tokens than a tile
    padded: bool = False  # whether the worst micro-batches have padding
    one: bool = False  # whether a step has one micro-batch, in which several ranks add up its gradients
    reused: bool  # True: a rollout serves several optimizer steps
    micro: int = 1  # samples of the recipe's own micro-batch, less their powers of 2
    varies_rank: bool
    evaluated_group: int = 1  # completions of one prompt in an evaluation
    ranges: Mapping[str, tuple[float, float]]
    hold_out: Mapping[str, int]
    processes: int = 1  # that trace it
    sketch: bool = False  # True: `hold_out` has the completion, rank and chunk of a model of the micro-batch alone

    @cached_property
    def recording(self) -> Recording:
        return Recording(
            trainer=load(self.trainer), layers=self._config.num_hidden_layers, keys=self.keys, values=self.values,
            device=self.device, worst_case=WorstCase(path=Path(self.worst_case), padded=self.padded),
            tile_tokens=self.tile_tokens, evaluated_group=self.evaluated_group, sizes=self._taken,
            own_tokens=0 if self._generates else self.micro * self._sample_tokens,
        )  # fmt: skip

    @cached_property
    def _config(self) -> Any:
        return text_config(load(self.trainer).layers(split(self.values)[1], WorstCase(path=Path(self.worst_case))))

    @cached_property
    def stack(self) -> Stack | None:
        """The fewest layers with every kind of allocation; None: all, or NotRepeatingError if these are too many."""
        every = layers_alike(self.values)
        try:
            if needs_all_layers(self.values):
                raise NotRepeatingError("a model with fewer layers would train otherwise")
            stack = plan_stack(self._config, pattern=every)
        except NotRepeatingError:
            if self._config.num_hidden_layers > MOST_LAYERS:
                raise
            return None
        prints = [(layer, i % every == 0) for i, layer in enumerate(layer_prints(self._config))]
        middle = set(prints[stack.first : stack.first + stack.period])
        edges = {prints[i] for i in replace(stack, traced_units=0).kept}
        return replace(stack, traced_units=0 if middle <= edges else 1)

    def model(self) -> tuple[MassModel, Mismatch, Evaluated | None]:
        """(mass model, its error at the hold-out, the evaluation there).

        The hold-out is a point that no trace of the model has, with all layers; a sketch has none, and no error: its
        traces have the evaluation. Raises NotRepeatingError.
        """
        if self.sketch:
            return self._sketched(), Mismatch(), None
        stack, recording = self.stack, self.recording
        base = self._base()
        at, varied = self._variations(base)
        depths = [] if stack is None else [(base, replace(stack, traced_units=units)) for units in DEPTHS]
        points = [(base, stack), *depths, *((point, stack) for *_, point, _ in varied)]
        jobs: list[Job[Any]] = [partial(recording.trace, *point) for point in points]
        traced, *traces, seen = shared_out([*jobs, self._seen_at_hold_out], self.processes)
        model = MassModel.fit(
            traced,
            [
                Variation(variable=name, value=value, trace=trace, instead_of=other)
                for (name, value, _, other), trace in zip(varied, traces[len(depths) :], strict=True)
            ],
            depths=(traces[0], traces[1]) if depths else (traced, traced), at=at,
            ranges={name: self.ranges[name] for name in at}, layers=recording.layers, seconds=self._seconds,
        )  # fmt: skip
        if not self._generates:
            fetched = traced.left_by(BETWEEN) / base.accumulation / base.micro_batch
            model = replace(model, sample_bytes=fetched, micro_batches=base.accumulation)
        return (model, *self._held_out(model, seen))

    def _sketched(self) -> MassModel:
        """A model of the micro-batch alone: three traces of a short step, at the recipe's completion and rank.

        The first of its two depths is also the base of the variation.
        """
        own, recording = self.hold_out, self.recording
        micro = self._base().micro_batch
        base = Point(
            micro_batch=micro, completion=own.get("C", 0), rank=own["r"] if self.varies_rank else None,
            accumulation=self._accumulation, chunk=own["chunk"],
        )  # fmt: skip
        stacks = [None if self.stack is None else replace(self.stack, traced_units=units) for units in DEPTHS]
        wider = self._wider(micro)
        points = [(base, stack) for stack in dict.fromkeys(stacks)] + [(replace(base, micro_batch=wider), stacks[0])]
        low, *deeper, more = shared_out([partial(recording.trace, *p, evaluates=True) for p in points], self.processes)
        ranges = {name: self.ranges[name] for name in ("B", "C") if name == "B" or self._generates}
        return MassModel.fit(
            low, [Variation(variable="B", value=wider, trace=more)], depths=(low, deeper[0] if deeper else low),
            at={"B": micro}, ranges=ranges, layers=recording.layers, seconds=self._seconds,
        )  # fmt: skip

    @property
    def _seconds(self) -> KernelSeconds:
        costs = host_costs(self.device)[0] or HostCosts()
        return KernelSeconds(gpu_spec(self.device.removeprefix("sim:")), costs)

    def _wider(self, micro: int) -> int:
        if self._generates:
            return micro + 4
        usual = micro + (2 if micro > 2 and self._is_within(micro + 2) else 1)
        others = (more for more in range(micro + 1, micro + 4) if self._is_within(more))
        return min([usual, *others], key=self._coincides)

    def _is_within(self, micro: int) -> bool:
        """True if so many samples are, as all of this structure, above a tile of the loss, or not."""
        return self.tile_tokens is None or (micro * self._sample_tokens > self.tile_tokens) == self.large

    def _coincides(self, micro: int) -> bool:
        """True if `micro` samples have as many tokens in a product as a weight has rows or columns."""
        sequences = cast("Mapping[str, int]", self._worst_case.get("lengths") or {}).get("sequences", 1)
        return micro * self._sample_tokens * sequences in self._taken

    @cached_property
    def _taken(self) -> set[int]:
        return _sizes(self._config)

    def _base(self) -> Point:
        """A point whose numbers are hardly the size of anything else, so that each is seen in the shapes."""
        micro, completion = 0 if self._generates else self._fewest_samples, 0
        if self._generates:  # the length is 1 above a multiple of 128, which tells apart to what it is rounded up
            micro = 62 if self.large else 10
            completion = 67 + (62 - self._prompt_tokens) % 128
        rank = self._ranks[0] if self.varies_rank else None
        several = self._accumulation
        chunk = 2 * several if self.reused else 1
        return Point(micro_batch=micro, completion=completion, rank=rank, accumulation=several, chunk=chunk)

    @property
    def _ranks(self) -> tuple[int, int]:
        """Two ranks that are hardly the size of anything else, near the recipe's.

        Optimizers hold the states of small matrices otherwise: bitsandbytes pages those of 10^5 elements or more.
        """
        own = self.hold_out["r"]
        primes = [n for n in range(7, max(own, 11) + 1) if all(n % d for d in range(2, n))]
        return primes[-2], primes[-1]

    @property
    def _accumulation(self) -> int:
        return accumulation_of(not Launch.of(self.values).is_alone, one=self.one)

    @property
    def _fewest_samples(self) -> int:
        """The usual number of samples, or another one whose tokens differ from all sizes of a weight.

        The product of 2,048 tokens and that of a weight with 2,048 rows would be one kind of kernel.
        """
        usual, allowed = self._usual_samples
        nearest = sorted(allowed, key=lambda micro: abs(micro - usual))
        return min(nearest, key=lambda micro: self._coincides(micro) + self._coincides(self._wider(micro)))

    @property
    def _usual_samples(self) -> tuple[int, range]:
        """(the usual number, all that the tile of the loss allows); one alone has no padding."""
        if self.tile_tokens is None:
            return 3, range(2, 8)
        within = self.tile_tokens // self._sample_tokens
        if self.large:
            least = max(3, within + 1)
            return least, range(least, within + 8)
        least = 2 if self.padded else 1
        return max(least, min(3, within // 2)), range(least, max(least + 1, within))

    @property
    def _generates(self) -> bool:
        return self.keys.rollout is not None

    @property
    def _sample_tokens(self) -> int:
        return int(self._worst_case["longest_tokens"])

    @property
    def _prompt_tokens(self) -> int:
        return int(self._worst_case.get("prompt_tokens", 0))

    @cached_property
    def _worst_case(self) -> dict[str, Any]:
        return WorstCase(path=Path(self.worst_case)).facts

    def _variations(self, base: Point) -> tuple[dict[str, float], list[tuple[str, float, Point, str | None]]]:
        """({variable: base value}, [(variable, other value, point to trace, variable that must change with it)])."""
        wider = self._wider(base.micro_batch)
        at: dict[str, float] = {"B": base.micro_batch}
        varied: list[tuple[str, float, Point, str | None]] = [("B", wider, replace(base, micro_batch=wider), None)]
        if base.rank is not None:
            at["r"] = base.rank
            rank = self._ranks[1]
            varied.append(("r", rank, replace(base, rank=rank), None))
        if self._generates:
            at |= {"G": base.generated, "C": base.completion}
            longer = base.completion + 181  # more than 128, and no multiple of 8
            if self.ranges["C"][0] != self.ranges["C"][1] or self.ranges["C"][0] != base.completion:
                varied.append(("C", longer, replace(base, completion=longer), None))
            more = replace(base, chunk=2 * base.chunk)
            varied.append(("G", more.generated, more, "B"))
        return at, varied

    def _seen_at_hold_out(self) -> Seen:
        want, stack = self.hold_out, self.stack
        point = Point(
            micro_batch=want["B"], completion=want.get("C", 0), rank=want.get("r") if self.varies_rank else None,
            accumulation=want["accumulation"], chunk=want["chunk"],
        )  # fmt: skip
        return self.recording.seen(point, None if stack is None else replace(stack, traced_units=TRACED_UNITS))

    def _held_out(self, model: MassModel, seen: Seen) -> tuple[Mismatch, Evaluated | None]:
        want, recording = self.hold_out, self.recording
        shape = Shape(want["B"], want["accumulation"], want["chunk"], want.get("C", 0), want.get("r", 0))
        told = Parts.of(model, recording.layers, (shape,))
        peak = seen.peaks.pop(EVALUATION, None)
        evaluated = None if peak is None else Evaluated.of(peak, told, prompt=self._prompt_tokens)
        top = max(seen.peaks.values())
        bytes_frac = max(
            abs((float(told.peaks[phase][0]) if phase in told.peaks else 0.0) - peak) / top
            for phase, peak in seen.peaks.items()
        )
        update_s = float((told.step_s - told.before_update_s)[0])
        seconds_frac = update_s / seen.update_s - 1 if seen.update_s else 0.0
        return Mismatch(bytes_frac=bytes_frac, seconds_frac=seconds_frac), evaluated


def _sizes(config: Any) -> set[int]:
    """The sizes of a text model's weights: those of its layers, and the numbers in its config."""
    found = {value for value in vars(config).values() if isinstance(value, int)}
    with contextlib.suppress(NotRepeatingError):  # a model that cannot be built by itself
        for layer in set(layer_prints(config)):
            for *_, shapes in cast("Sequence[tuple[Any, ...]]", layer):
                found.update(size for _, shape in shapes for size in shape)
    return found
