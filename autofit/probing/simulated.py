"""The `sim:` device: memory recorder and clock of the simulated GPU. Imports torch.

A probe is traced with the fewest layers that show the repeating pattern, and then expanded to all layers: every
allocation, free and second of the deep run, at the cost of a shallow one. A run without a repeating pattern is traced
again at full depth.
"""

import gc
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise, product
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from autofit.fakegpu import FakeGpu, fake_gpu, gpu_spec
from autofit.fakegpu.card import Timeline, timeline_of
from autofit.fakegpu.depth.expand import (
    LeftOut,
    Mark,
    RoundsDifferError,
    TracedRun,
    expanded,
    expanded_host,
    with_rounds,
    without_marks,
)
from autofit.fakegpu.depth.layers import LayerClock
from autofit.fakegpu.depth.stack import NotRepeatingError, repeats, shallow_models, stands_for
from autofit.fakegpu.known_values import ASSUMPTIONS
from autofit.fakegpu.memory import HostTensors, held_bytes
from autofit.fakegpu.rates.collectives import COLLECTIVES, HOST, log_error
from autofit.fakegpu.replay import Unlimited
from autofit.hardware.calibration import host_costs
from autofit.hardware.nvml import CardState
from autofit.plugin.protocol import BEFORE_UPDATE, OPTIMIZER, ROLLOUT, UPDATE
from autofit.plugin.transformers_run import COMPUTED
from autofit.probing.host_memory import HostMemory, host_memory
from autofit.probing.result import Fidelity, PhasePeak
from autofit.recipe.launch import Launch

_PARTS = 240  # of a step's events, for its picture
_NEAR_FRAC = 0.9  # of the limit: where less suffices, gaps between blocks do not matter
_FEW_GAPS_FRAC = 0.01  # of the least capacity


@contextmanager
def _uncollected() -> Iterator[None]:
    """Context free of garbage collections: 10^5 blocks of a replay start several, of all objects of the process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of a probe on the simulated card: peaks per phase, and seconds per measured step."""

    peaks: tuple[PhasePeak, ...]
    step_s: tuple[float, ...]
    rollout_s: tuple[float, ...]
    update_s: tuple[float, ...]
    sync_s: tuple[float, ...] = ()
    phase_s: Mapping[str, float] = field(default_factory=dict)
    card_states: tuple[CardState, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStretch:
    """Live bytes as a stretch of a run begins, the most in it, and its seconds."""

    name: str
    begins_bytes: int
    peak_bytes: int
    seconds: float


class SimMemory:
    """A simulated card: its allocations are only counted, and seconds come from its clock.

    The card has no limit while the probe runs, so that a candidate over the target reports its excess; the verdict
    comes from a replay of its allocations under the target.
    """

    least_measured_s = 0.0

    def __init__(self, device: str, limit_bytes: int | None) -> None:
        self._spec = gpu_spec(device.removeprefix("sim:"))
        self._costs, self._costs_source = host_costs(device)
        self._limit_bytes = self._spec.capacity_bytes if limit_bytes is None else limit_bytes
        self.device_name = f"{self._spec.full_name} (simulated)"
        self.rank = 0  # of several, the one that is simulated
        self._gpu: FakeGpu | None = None
        self._marks: list[Mark] = []
        self._steps: list[int] = []  # indices of the marks at which measured steps begin and end, alternating
        self._windows: list[tuple[int, bool]] = []  # marks at which micro-batches end; True if it was left out
        self._shares_of: dict[int, dict[str, float]] = {}  # shares of the part left out after a mark, by phase
        self._traced_s: dict[str, dict[str, float]] = {}  # phase -> seconds of each part of its traced kernels
        self._began: Mapping[str, float] = {}
        self._last: Mapping[str, float] = {}  # seconds of each part since the mark before the last one
        self._of_computed: Mapping[str, float] = {}  # in the last micro-batch that was computed
        self._log_error: float | None = None
        self._bounds: dict[str, dict[str, float]] = {}
        self._run: TracedRun | None = None
        self._times: list[float] = []  # of the run, at each mark
        self._replay: Unlimited | None = None
        self.least_of_fits = True
        self._host: HostMemory | None = None
        self._host_tensors: HostTensors | None = None
        self._host_loaded = 0

    def card_state(self) -> None:
        return None

    @contextmanager
    def card(
        self, *, pattern: int | None, follow_host: bool = False, plays_micro_batches: bool = False
    ) -> Iterator[None]:
        """A fresh card; with a `pattern`, models made inside have only the layers needed to show it.

        That is the number of layers after which the training treats them alike. With `follow_host` the tensors in
        the memory of the host are counted too. With `plays_micro_batches` one like another before it is not traced.
        """
        self._marks, self._steps, self._windows = [], [], []
        self._traced_s, self._began, self._shares_of = {}, {}, {}
        with fake_gpu(
            self._spec, host_costs=self._costs, enforce_capacity=False, record_places=False, follow_layers=True
        ) as gpu:
            self._gpu = gpu
            gpu.plays_micro_batches = plays_micro_batches
            self._host_tensors = gpu.follow_host() if follow_host else None
            self.device_name = f"{self._spec.full_name} (simulated, {gpu.mode} mode)"
            with nullcontext() if pattern is None else shallow_models(pattern=pattern):
                yield

    def host_has_loaded(self) -> None:
        """The models are loaded: what the host holds from here on is counted by itself."""
        if self._host_tensors is not None:
            self._host_loaded = len(self._host_tensors.log)

    def note_host(self, launch: Launch, loaded_bytes: int, *, saved_bytes: int | None) -> None:
        """Note the host memory of all ranks after this one has trained a model that was loaded with `loaded_bytes`.

        `saved_bytes` are the most that a rank gathers to save it.
        """
        host = self._host_tensors
        if host is None or self._gpu is None or self._gpu.layers is None:
            return
        marks = [Mark(name=UPDATE, event=event, stretch=0) for event in (self._host_loaded, len(host.log))]
        try:
            run = expanded_host(host, self._gpu.layers, marks)
        except NotRepeatingError:
            self._host = host_memory(launch, loaded_bytes, whole_bytes=saved_bytes)
            return
        trains = run.marks[0].event
        held, pinned = held_bytes(run.nbytes, run.categories)
        load_bytes = int(held[:trains].max(initial=0))
        if launch.sharding == "ddp" and 2 * load_bytes < loaded_bytes:
            return  # each rank has loaded onto its own card
        self._host = host_memory(
            launch, loaded_bytes, whole_bytes=saved_bytes, load_bytes=load_bytes,
            share_bytes=int(held[trains - 1]) if trains else 0,
            kept_bytes=int(held[trains:].max(initial=0)), pinned_bytes=int(pinned[trains:].max(initial=0)),
        )  # fmt: skip

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def switch(self, left: str, entered: str) -> PhasePeak:
        """Marks the phase change. The peaks are zero here; `simulation` has them after the run."""
        if self._gpu is not None:
            clock = self._gpu.clock
            assert isinstance(clock, LayerClock)
            self._gpu.memory.enter_phase(entered)
            self._marks.append(Mark(name=entered, event=len(self._gpu.memory.log), stretch=clock.cut()))
            now = clock.traced_s
            self._last = {part: max(0.0, seconds - self._began.get(part, 0.0)) for part, seconds in now.items()}
            self._add_traced(left, self._last)
            self._began = now
        return PhasePeak(name=left, peak_allocated_bytes=0, peak_reserved_bytes=0, device_used_bytes=0)

    def _add_traced(self, phase: str, seconds: Mapping[str, float]) -> None:
        spent = self._traced_s.setdefault(phase, {})
        for part, each in seconds.items():
            spent[part] = spent.get(part, 0.0) + each

    def mark_step(self) -> None:
        """Mark the last phase change as the begin or end of a measured step."""
        self._steps.append(len(self._marks) - 1)

    def end_micro_batch(self, *, left_out: bool) -> None:
        """The last phase change is the end of a micro-batch of many that are alike, or of one that was left out."""
        self._windows.append((len(self._marks) - 1, left_out))
        if left_out:
            self._add_traced(UPDATE, self._of_computed)
        else:
            self._of_computed = self._last

    def micro_batches_alike(self) -> bool:
        """True if the last two micro-batches took and gave back storages of the same sizes."""
        assert self._gpu is not None
        start, middle, end = (self._marks[mark].event for mark, _ in self._windows[-COMPUTED:])
        sizes = self._gpu.memory.log.nbytes
        return sorted(sizes[start:middle]) == sorted(sizes[middle:end])

    def _repeated(self, run: TracedRun) -> TracedRun:
        """The run with the parts left out, and without the marks between stretches that are alike.

        If phases begin within each stretch, the part left out stays between two marks: its seconds are shared among
        the phases as those of the stretch before it.
        """
        groups = self._left_out()
        run = with_rounds(run, groups)
        dropped, shares = {mark for mark, _ in self._windows}, dict[int, dict[str, float]]()
        phased = [group for group in groups if group.bounds[2] > group.bounds[1] + 1]
        times = run.seconds() if phased else []
        for (_, start, end), _, last in phased:
            dropped -= {end, last}
            seconds = self._seconds(times, start, end)
            shares[end] = {name: each / max(sum(seconds.values()), 1e-12) for name, each in seconds.items()}
        kept = [number for number in range(len(self._marks)) if number not in dropped]
        self._steps = [kept.index(number) for number in self._steps]
        self._marks = [self._marks[number] for number in kept]
        self._shares_of = {kept.index(number): each for number, each in shares.items()}
        self._windows = []
        return without_marks(run, dropped)

    def _left_out(self) -> list[LeftOut]:
        """The marks around all that was left out in a row."""
        found, windows = list[LeftOut](), [mark for mark, _ in self._windows]
        for left_out, row in groupby(range(len(windows)), key=lambda place: self._windows[place][1]):
            if not left_out:
                continue
            places = list(row)
            before, marks = windows[places[0] - COMPUTED : places[0]], windows[places[0] : places[-1] + 1]
            if marks != list(range(before[-1] + 1, before[-1] + 1 + len(marks))):
                raise RoundsDifferError("a phase begins where micro-batches are left out")
            found.append(LeftOut((before[0], before[1], before[2]), marks[0], marks[-1]))
        return found

    def now_s(self) -> float:
        return self._gpu.elapsed_s if self._gpu is not None else 0.0

    @_uncollected()
    def simulation(self, *, share_of_scoring: float = 0.0, share_of_rollout: float = 1.0) -> Simulation:
        """The whole run, expanded to all layers. Raises NotRepeatingError.

        Seconds of scoring done once before training (DPO's reference) are distributed: each step gets
        `share_of_scoring` of them. A rollout that serves several steps counts `share_of_rollout` in each.
        """
        assert self._gpu is not None
        run = self._run = self._repeated(expanded(self._gpu, self._marks))
        times = self._times = run.seconds()
        self._replay = Unlimited(run.log, [m.event for m in run.marks], settings=self._gpu.settings)
        found = [
            PhasePeak(
                name=mark.name, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved,
                device_used_bytes=reserved + self.outside_bytes,
            )
            for number, (mark, (allocated, reserved)) in enumerate(zip(run.marks, self._replay.phases, strict=True))
            if number not in self._shares_of
        ]  # fmt: skip
        steps = [self._seconds(times, a, b) for a, b in zip(self._steps[::2], self._steps[1::2], strict=True)]
        for step, phase in product(steps, BEFORE_UPDATE):
            step[phase] *= share_of_rollout
        before = self._seconds(times, 0, self._steps[0])["scoring"] * share_of_scoring
        clock = self._gpu.clock
        machines = -(-clock.ranks // clock.collectives.per_machine)
        self._log_error = log_error(self._spec, self._shares(steps), clock.ranks, machines=machines)
        self._bounds = {UPDATE: self._shares(_only(steps, (UPDATE, OPTIMIZER)))}
        if not self._gpu.clock.skipped_s:  # of the seconds of an engine's own law no part is known
            self._bounds[ROLLOUT] = self._shares(_only(steps, BEFORE_UPDATE))
        return Simulation(
            peaks=tuple(found),
            step_s=tuple(sum(s.values()) + before for s in steps),
            rollout_s=tuple(sum(s[phase] for phase in BEFORE_UPDATE) + before for s in steps),
            update_s=tuple(s["update"] + s["optimizer"] for s in steps),
            sync_s=tuple(s["sync"] for s in steps) if any(s["sync"] for s in steps) else (),
            phase_s={name: seconds for name, seconds in steps[-1].items() if seconds} if steps else {},
        )

    @_uncollected()
    def stretches(self) -> list[LiveStretch]:
        """Bytes and seconds of each stretch from one phase change to the next, over all layers.

        Raises NotRepeatingError.
        """
        assert self._gpu is not None
        run = expanded(self._gpu, self._marks)
        live, times = np.concatenate([[0], np.cumsum(run.nbytes)]), run.seconds()
        return [
            LiveStretch(
                name=mark.name, begins_bytes=int(live[mark.event]), seconds=ended - began,
                peak_bytes=int(live[mark.event : after.event + 1].max()),
            )
            for (mark, after), (began, ended) in zip(pairwise(run.marks), pairwise(times), strict=True)
        ]  # fmt: skip

    def _shares(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Shares of the steps' seconds by part: in each phase, those of its traced kernels, of however few layers."""
        spent: defaultdict[str, float] = defaultdict(float)
        for step in steps:
            for phase, seconds in step.items():
                traced = self._traced_s.get(phase, {})
                for part, of_part in traced.items():
                    spent[part] += seconds * of_part / max(sum(traced.values()), 1e-12)
        return {part: seconds / max(sum(spent.values()), 1e-12) for part, seconds in spent.items()}

    def _seconds(self, times: list[float], first: int, last: int) -> defaultdict[str, float]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for number, (began, ended) in enumerate(pairwise(times[first : last + 1]), start=first):
            for name, share in self._shares_of.get(number, {self._marks[number].name: 1.0}).items():
                seconds[name] += (ended - began) * share
        return seconds

    @property
    def outside_bytes(self) -> int:
        assert self._gpu is not None
        return self._gpu.outside_bytes

    @_uncollected()
    def account(self) -> dict[str, Any]:
        """Least capacity, bytes by category at each phase's peak, and the device-used bytes under the target.

        Without `least_of_fits`, a probe that fits without returning cached blocks has no least capacity.
        """
        run, unlimited, outside = self._run, self._replay, self.outside_bytes
        assert run is not None
        assert unlimited is not None
        used = unlimited.peaks[1] + outside
        least = growing = None
        if self.least_of_fits or used > self._limit_bytes:
            room = self._limit_bytes - outside
            least = min(used, unlimited.least_capacity(first_bytes=room) + outside)
            if used > self._limit_bytes >= least:  # the allocator returns cached blocks before it raises OOM
                used = unlimited.replay(room).peak_reserved_bytes + outside
            elif least > self._limit_bytes:
                used = least
            growing = self._growing_capacity(least)
        told = [note for note in self._gpu.notes if note not in ASSUMPTIONS] if self._gpu else []
        names = ["" if number in self._shares_of else mark.name for number, mark in enumerate(run.marks)]
        begins = [mark.event for mark in run.marks]
        line = timeline_of(run.nbytes, run.categories, list(zip(begins, names, strict=True)))
        return {
            "device_used_bytes": used, "least_capacity_bytes": least, "growing_capacity_bytes": growing,
            "categories": {p.name: {k: v for k, v in p.categories.items() if v} for p in line.phases if p.name},
            "course": self._course(line), "fidelity": Fidelity.PREDICTED, "host_costs": self._costs_source,
            "log_error": self._log_error,
            "shares": {name: _card_and_host(shares) for name, shares in self._bounds.items() if shares},
            "notes": (*told, *(() if self._host is None else (self._host.told,))), "host": self._host,
        }  # fmt: skip

    def _course(self, line: Timeline) -> dict[str, Any]:
        """Live MiB of the last measured step by category, at the highest moment of each of equal parts of its events.

        {"live": {category: [MiB, one a part]}, "phases": [[name, its first part, its seconds]]}; {} without a step.
        """
        if not self._steps or self._run is None:
            return {}
        marks, times = self._run.marks, self._times
        first, last = self._steps[-2:]
        start, end = marks[first].event, marks[last].event
        cuts = np.unique(np.linspace(start, end, _PARTS + 1).astype(int)).tolist()
        if len(cuts) < 3:
            return {}
        phases = [
            [self._marks[number].name, max(0, bisect_right(cuts, marks[number].event) - 1), after - before]
            for number, (before, after) in enumerate(pairwise(times[first : last + 1]), start=first)
            if number not in self._shares_of
        ]
        live = {name: [round(nbytes / 2**20, 1) for nbytes in values] for name, values in line.highest(cuts).items()}
        return {"live": live, "phases": phases}

    def _growing_capacity(self, least: int) -> int | None:
        """The least capacity with expandable segments, of the same events, if gaps between blocks decide."""
        run, unlimited, outside = self._run, self._replay, self.outside_bytes
        assert run is not None
        assert unlimited is not None
        assert self._gpu is not None
        settings, limit = self._gpu.settings, self._limit_bytes
        live = unlimited.peaks[0] + outside
        is_near = live <= limit and least > _NEAR_FRAC * limit
        if settings.expandable_segments or not is_near or least - live <= _FEW_GAPS_FRAC * least:
            return None
        grown = Unlimited(run.log, settings=replace(settings, expandable_segments=True))
        return grown.least_capacity(first_bytes=limit - outside) + outside


def _only(steps: Sequence[Mapping[str, float]], phases: Sequence[str]) -> list[dict[str, float]]:
    return [{phase: step[phase] for phase in phases if step.get(phase)} for step in steps]


def _card_and_host(shares: Mapping[str, float]) -> dict[str, float]:
    """The share of the card's kernels, and that of the host while the card is idle; the rest waits for other ranks."""
    host, others = shares.get(HOST, 0.0), shares.get(COLLECTIVES, 0.0)
    return {"card": max(0.0, 1.0 - host - others), "host": host}


@contextmanager
def simulated(device: str, limit_bytes: int | None) -> Iterator[SimMemory]:
    """The memory recorder of `device` ("sim:a100-40gb") with a limit of `limit_bytes`."""
    yield SimMemory(device, limit_bytes)


def loaded_bytes(model: Any) -> int:
    """Bytes of one copy of a transformers model as it is loaded, with all layers."""
    standing = _standing(model)
    whole = 0.0
    for name, parameter in model.named_parameters():
        numel = getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 the parameter itself is empty
        whole += numel * parameter.element_size() * repeats(name, standing)
    return round(whole)


def saved_bytes(model: Any, optimizer: Any, launch: Launch, *, with_optimizer: bool) -> int:
    """Bytes of the model as it is trained, or of the optimizer's state if it has more and is saved too: of all layers
    and ranks. FSDP1 leaves each rank a flat piece of a parameter, whose size says little of one and is right in sum.
    """
    standing, pieces = _standing(model), launch.ranks if launch.sharding == "fsdp1" else 1
    weights = moments = 0.0
    for name, parameter in model.named_parameters():
        copies = pieces * repeats(name, standing)
        weights += parameter.nbytes * copies
        state = optimizer.state.get(parameter, {}) if with_optimizer else {}
        moments += sum(value.nbytes for value in state.values() if isinstance(value, Tensor)) * copies
    return round(max(weights, moments))


def _standing(model: Any) -> dict[int, float]:
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    return stands_for(text_config()) if text_config is not None else {}


def needs_all_layers(values: Mapping[str, object]) -> bool:
    """True if a model with fewer layers would train otherwise.

    LoRA settings may name single layers, and a recipe may train some of them only, or add some. DeepSpeed lays all
    parameters into flat buffers, which is not a pattern of layers that could be repeated.
    """
    if Launch.of(values).is_deepspeeds:
        return True
    if any(values.get(key) is not None for key in ("trainable_layers", "added_layers")):
        return True
    named = [str(value) for key, value in values.items() if key.startswith("lora_") and not isinstance(value, float)]
    return any(re.search(r"layers|\.\d|[\[(]\d", name) for name in named)


def layers_alike(values: Mapping[str, object]) -> int:
    """After how many layers a recipe treats them alike: `every_n_layers` of its activation checkpointing, or 1."""
    for key in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):  # the new name wins
        given = values.get(key)
        options = yaml.safe_load(given) if isinstance(given, str) else given
        if options:
            found = options.get("every_n_layers", 1) if isinstance(options, dict) else 1
            return found if isinstance(found, int) and found > 1 else 1
    return 1
