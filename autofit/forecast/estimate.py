"""One config on a simulated card: bytes by phase and category, step time, and whether it fits."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.table import Table

from autofit.errors import Cancelled, ConfigError, EnvironmentFault
from autofit.fakegpu.rates.collectives import nccl_bytes
from autofit.fakegpu.specs import gpu_spec
from autofit.files import write_json
from autofit.folding import Folding
from autofit.forecast.advice import WANTED, Advice, Ending, advice_json, cheapest_changes, within
from autofit.forecast.change import Tell, Trier, faster_changes, other_card
from autofit.forecast.levers import Levers
from autofit.forecast.margin import is_safe, is_tight, most_used_bytes, shown_bytes, step_words, used_words
from autofit.forecast.step_picture import categories_of, in_order
from autofit.hardware.hardware import Device
from autofit.plugin.protocol import EVALUATION, IN_ORDER, LOAD, LOG_PROBS, OPTIMIZER, ROLLOUT, SCORING, UPDATE
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import cancel, run_probe
from autofit.probing.prepare import last_words
from autofit.probing.result import Cause, ProbeResult, ProbeSetup, ProbeStatus
from autofit.recipe.findings import clashes
from autofit.recipe.recipe import Recipe
from autofit.units import format_bytes, format_seconds

PARALLEL = 2  # probes at once, if several are requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Probes variants of one recipe on a simulated card of `capacity_bytes`."""

    recipe: Recipe
    device: Device
    capacity_bytes: int
    folder: Path
    worst_case: Path
    server: ForkServer
    deadline_s: float
    least_of_fits: bool = True  # whether a fit has its least capacity, which takes a second or more
    cancelled: threading.Event = field(default_factory=threading.Event)  # set, no probe begins any more

    def estimate(self) -> ProbeResult:
        """The probe result of the unchanged recipe. Raises EnvironmentFault if the simulation itself fails.

        Raises ConfigError for settings that are known to fail together.
        """
        if clash := next(clashes(self.recipe), None):
            raise ConfigError(f"{clash.key}: {clash.what}; {clash.fix}")
        result = self.probe(self.recipe.values)
        if result.status not in (ProbeStatus.FIT, ProbeStatus.OOM):
            raise EnvironmentFault(f"the simulation failed: {result.reason}")
        return result

    def probe(self, values: Mapping[str, object]) -> ProbeResult:
        """The probe result of the recipe `values`. Safe to call from several threads at once.

        Runs the job in this process, because no later command would look for its answer.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        setup = ProbeSetup(
            trainer=self.recipe.trainer, device=self.device, limit_bytes=self.capacity_bytes,
            worst_case=self.worst_case, deadline_s=self.deadline_s, parallel=PARALLEL,
            server_socket=self.server.socket_path, recipe_hash=self.recipe.named_hash,
            least_of_fits=self.least_of_fits,
        )  # fmt: skip
        request = setup.request(Path(tempfile.mkdtemp(dir=self.folder)), values)
        write_json(request.request_path, request.to_json())
        if not self.cancelled.is_set():
            run_probe(str(request.request_path))
        result = ProbeResult.read(request.answer_path)
        if result is None:
            raise Cancelled("the simulation was cancelled before it answered")
        printed = "" if result.cause is Cause.RAISED else last_words(request.log_path)  # which is deleted soon
        return replace(result, reason=result.reason.replace(f"; see {request.log_path}", printed))

    def probe_on(self, device: Device, capacity_bytes: int, values: Mapping[str, object] | None = None) -> ProbeResult:
        """The same on another simulated card; by default, of the recipe as it is."""
        return replace(self, device=device, capacity_bytes=capacity_bytes).probe(values or self.recipe.values)

    def cancel(self) -> None:
        """End the probes at work, in other threads, and those to come: each raises Cancelled."""
        self.cancelled.set()  # first: a probe whose folder is not there yet sees this
        for folder in self.folder.glob("*"):
            cancel(folder)

    def mends(self, result: ProbeResult, *, tell: Tell = lambda _: None, wanted: int = WANTED) -> Advice:
        """The cheapest changes that would make the recipe of `result` fit with room to spare."""
        return cheapest_changes(
            self.recipe, self.device, self.probe, capacity_bytes=self.capacity_bytes, base=result, wanted=wanted,
            workers=PARALLEL, tell=tell,
        )  # fmt: skip

    def advice(self, result: ProbeResult, *, tell: Tell = lambda _: None) -> Advice:
        """Changes that make the recipe of `result` fit with room to spare, or, if it does, faster; and another card."""
        safe = is_safe(result, self.capacity_bytes)
        with ThreadPoolExecutor(1) as pool:
            card = pool.submit(other_card, result, self.capacity_bytes, self.probe_on, self.recipe.launch)
            found = self._faster(result, tell) if safe else self.mends(result, tell=tell)
            with contextlib.suppress(Cancelled):
                found = replace(found, card=card.result())
            return found

    def within(self, limit_s: float, look: Callable[[], Advice], *, interrupted: Callable[[], None]) -> Advice:
        """The advice that `look` finds until `limit_s` seconds have passed, or Ctrl-C comes, which is reported first.

        After such an end this estimator probes nothing more.
        """

        def cancel(ending: Ending) -> None:
            if ending is Ending.INTERRUPT:
                interrupted()
            self.cancel()

        found, ending = within(limit_s, look, cancel=cancel)
        return replace(found, ending=ending)

    def trier(self, tell: Tell) -> Trier:
        """Tries changes of the recipe on the simulated card."""
        return Trier(
            recipe=self.recipe, device=self.device, capacity_bytes=self.capacity_bytes, probe=self.probe, tell=tell
        )

    def _faster(self, result: ProbeResult, tell: Tell) -> Advice:
        try:
            levers = Levers.of(self.recipe, self.device)
        except ConfigError:
            return Advice()
        faster, untried = faster_changes(levers, self.trier(tell), result, workers=PARALLEL)
        return Advice(faster=faster, untried=untried)


def estimate_json(result: ProbeResult, capacity_bytes: int, advice: Advice | None = None) -> dict[str, object]:
    """The object that `autofit estimate --json` prints."""
    phases = [
        {
            "name": p.name,
            "peak_allocated_bytes": p.peak_allocated_bytes,
            "categories": result.categories.get(p.name, {}),
        }
        for p in result.phases
    ]
    return {
        "peak_allocated_bytes": result.peak_allocated_bytes, "peak_reserved_bytes": result.peak_reserved_bytes,
        "device_used_bytes": result.device_used_bytes, "least_capacity_bytes": result.least_capacity_bytes,
        "capacity_bytes": capacity_bytes, "fits": result.status is ProbeStatus.FIT, "phases": phases,
        "rollout_s": result.rollout_s[0] if result.rollout_s else None,
        "update_s": result.update_s[0] if result.update_s else None, "step_s": result.median_step_s,
        "step_s_90": result.step_s_interval, "fidelity": result.fidelity, "host_costs": result.host_costs,
        "notes": list(result.notes), "computed_in_s": result.process_s, "tight": is_tight(result, capacity_bytes),
        "most_used_bytes": most_used_bytes(shown_bytes(result, capacity_bytes)[0], result.device),
        **advice_json(advice or Advice()),
    }  # fmt: skip


_NEARLY_ALL = 0.95


def estimate_table(result: ProbeResult, capacity_bytes: int) -> tuple[Table, str]:
    """A table of phases by category, and the verdict: whether it fits, missing bytes, and the largest category."""
    names = [n for n in categories_of(result.categories) if any(n in c for c in result.categories.values())]
    table = Folding(title=f"{result.device_name}, {result.fidelity}")
    table.add_column("phase")
    timed = LOG_PROBS in result.phase_s  # a generation of several passes, of which each has settings of its own
    for name in [*(["seconds"] if timed else []), "peak allocated", *names]:
        table.add_column(name, justify="right", no_wrap=True)
    for phase in in_order(result.phases):
        bytes_of = result.categories.get(phase.name, {})
        cells = [format_bytes(bytes_of[n]) if n in bytes_of else "-" for n in names]
        took = [format_seconds(result.phase_s[phase.name]) if phase.name in result.phase_s else "-"] if timed else []
        table.add_row(phase.name, *took, format_bytes(phase.peak_allocated_bytes), *cells)
    return table, _verdict(result, capacity_bytes)


def _verdict(result: ProbeResult, capacity_bytes: int) -> str:
    least = result.least_capacity_bytes
    if result.status is not ProbeStatus.FIT and (least is None or not result.phases):
        return f"It does not fit: {result.reason or f'out of memory in {result.oom_phase}'}."
    top = max(result.phases, key=lambda p: p.peak_allocated_bytes)
    held = result.categories.get(top.name, {})
    largest = max(held, key=lambda name: held[name]) if held else "?"
    if result.status is ProbeStatus.FIT:
        verdict = "is tight" if is_tight(result, capacity_bytes) else "fits"
        verdict += f": {used_words(result, capacity_bytes)}"
    else:
        over = format_bytes((least or 0) - capacity_bytes)
        verdict = f"does not fit: it needs {format_bytes(least or 0)}, {over} over the limit."
    times = step_words(result, _before_the_update(result)) if result.step_s else ""
    share = f"{held[largest] / top.peak_allocated_bytes:.0%}" if held else "?"
    return f"It {verdict}{times} The peak is in {top.name}, and its largest part is {largest} ({share})."


def _before_the_update(result: ProbeResult) -> str:
    """` (rollout 51.6 s)`; unnamed if other passes take part of it, as a table has that phase's own."""
    before_s = result.rollout_s[0]
    if not before_s:
        return ""
    name = ROLLOUT if any(p.name == ROLLOUT for p in result.phases) else SCORING
    if result.phase_s and result.phase_s.get(name, 0.0) < _NEARLY_ALL * before_s:
        return f" ({format_seconds(before_s)} before the update)"
    return f" ({name} {format_seconds(before_s)})"


# -- the place where a run that does not fit stops --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The first phase whose bytes exceed the card, with the longest sample; None is "unknown"."""

    phase: str
    over_bytes: int  # 0 where only the prediction's error may exceed the card
    sample: int | None = None  # its row in the dataset, counted from 0
    step: int | None = None  # the optimizer step that trains on it, counted from 1: an earlier one may stop too
    tokens: int | None = None  # of the sample, or of the prompt where the trainer generates
    evaluated: int | None = None  # samples at once, where it stops in the evaluation
    completion_tokens: int | None = None  # that follow the prompt, where the trainer generates

    @property
    def where(self) -> str:
        """`update of sample 4,812 (the longest, 1,950 tokens; step 301 at the latest)`."""
        if self.phase == LOAD:
            return "load, before the first step"
        if self.phase == OPTIMIZER:
            return "optimizer, at the first step"
        if self.evaluated is not None:
            of = "" if self.tokens is None else f" ({self.tokens:,} tokens each)"
            return f"evaluation of {self.evaluated:,} samples at once{of}"
        longest = [] if self.sample is None else ["the longest"]
        longest += [] if self.tokens is None else [self._length]
        facts = [", ".join(longest)] if longest else []
        facts += [] if self.step is None else [f"step {self.step:,} at the latest"]
        about = f" ({'; '.join(facts)})" if facts else ""
        return f"{self.phase} of {'the longest sample' if self.sample is None else f'sample {self.sample:,}'}{about}"

    @property
    def _length(self) -> str:
        if self.completion_tokens is None:
            return f"{self.tokens:,} tokens"
        return f"{self.tokens:,} prompt + {self.completion_tokens:,} completion tokens"

    def to_json(self) -> dict[str, object]:
        some = ("evaluated", "completion_tokens")  # that only some crashes have
        return {name: value for name, value in asdict(self).items() if name not in some or value is not None}


def crash_of(result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> Crash:
    """Place where the recipe of `result` exceeds a card of `capacity_bytes`, with its longest sample."""
    card = gpu_spec(result.device.removeprefix("sim:"))
    context = card.context_bytes + nccl_bytes(card, recipe.launch.ranks)
    peaks = {p.name: p.peak_allocated_bytes + context for p in result.phases}
    over = [name for name in IN_ORDER if peaks.get(name, 0) > capacity_bytes]
    phase = over[0] if over else max(peaks, key=lambda name: peaks[name], default=result.oom_phase or UPDATE)
    evaluates = phase == EVALUATION
    return Crash(
        phase=phase, over_bytes=max(0, (result.least_capacity_bytes or 0) - capacity_bytes),
        sample=None if evaluates else recipe.longest_row, step=None if evaluates else step_of_longest(recipe),
        evaluated=recipe.evaluated_samples if evaluates else None,
        tokens=_tokens(recipe, evaluated=evaluates),
        completion_tokens=recipe.max_completion_tokens if recipe.generates and not evaluates else None,
    )  # fmt: skip


def _tokens(recipe: Recipe, *, evaluated: bool) -> int | None:
    if recipe.generates:
        return None if evaluated else recipe.longest_prompt_tokens
    return recipe.longest_sample_tokens


def step_of_longest(recipe: Recipe) -> int | None:
    """The optimizer step of the first epoch, counted from 1, that trains on the longest sample, if known."""
    place, count = recipe.longest_place, recipe.num_samples
    if place is None or count is None:
        return None
    if not recipe.generates:
        return place // recipe.effective_batch_size + 1
    prompts = recipe.generation_batch_size // recipe.num_generations
    rollout = place // prompts
    if rollout >= count // prompts:
        return None  # TRL leaves out the last prompts of an epoch that fill no rollout
    passes = recipe.resolved.get(recipe.keys.reuse or "", 1)
    micro_steps = recipe.steps_per_generation * (passes if isinstance(passes, int) else 1)
    return rollout * micro_steps // recipe.grad_accum_steps + 1
