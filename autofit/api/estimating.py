"""`autofit.estimate` and `autofit.check`: one config on a simulated card, in full, and whether it runs in one line."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from rich.table import Table

from autofit.api.arguments import as_argument, named_as_arguments, seconds, seconds_or_none, size
from autofit.api.events import STOPPING, Event, OnAdvice, OnEvent, keeping
from autofit.api.reading import (
    Given,
    check_prompt_tokens,
    describe_device,
    fork_server,
    read_recipe,
    source_of,
    suited,
)
from autofit.api.tables import Shown
from autofit.errors import Cancelled, ConfigError, EnvironmentFault, at_least_one, told
from autofit.files import ScratchFolder
from autofit.forecast.advice import Advice, Ending, advice_lines, ending_words, float32_words, then_lines
from autofit.forecast.change import Change
from autofit.forecast.estimate import Crash, Estimator, crash_of, estimate_json, estimate_table
from autofit.forecast.lengths import OFF, Lengths, read_lengths
from autofit.forecast.margin import care_lines, is_safe, is_tight, most_used_bytes, shown_bytes, step_words, used_words
from autofit.forecast.step_picture import memory_figure
from autofit.forecast.typical import Typical, longest_tokens, typical
from autofit.frontends.writing import changed
from autofit.hardware.hardware import Device, about_choice, choose_device_and_target
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import sample_lengths, worst_case_path
from autofit.probing.result import PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.as_of import Then, read_libraries, then_of, without_proposal
from autofit.recipe.findings import Severity, StatedLaunch, quantised
from autofit.recipe.launching import NO_OPTIONS, LaunchOptions, launch_options
from autofit.recipe.recipe import Recipe
from autofit.scripts.libraries import AskedRecipe, Libraries, Theirs, Today, asked_of, run_with
from autofit.space.knob import space_knobs
from autofit.space.space import Space
from autofit.space.traits import describe_left_out
from autofit.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADVICE_TIME = "20s"
_SAMPLES = 2_000  # of a dataset, whose lengths are counted
GivenLengths = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predicted(Shown):
    """One config on a simulated card."""

    recipe: Recipe
    device: Device  # sim: and the card
    capacity_bytes: int  # what may be used of it
    result: ProbeResult  # every figure of the simulated probe
    advice: Advice | None = None  # changes that would make it fit, or faster; None if none were searched for
    then: Then | None = None  # its behaviour with older libraries; None if none were named
    typical: Typical | None = None  # the steps as they are drawn from the lengths; None if these are unknown
    notes: tuple[str, ...] = ()  # of the recipe and its simulation, where no `on_event` heard them

    @property
    def fits(self) -> bool:
        """True if a step, a save and a resume stay within the capacity."""
        return self.result.status is ProbeStatus.FIT

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the search for advice; the changes found before are kept."""
        return self.advice is not None and self.advice.ending is Ending.INTERRUPT

    @property
    def noted(self) -> list[str]:
        """The lines of the notes."""
        return [f"note: {note}" for note in self.notes]

    @property
    def advised(self) -> list[str]:
        """Changes to make, a line each, as Python names arguments; [] if none were searched for, or are needed."""
        return [told(line, as_argument) for line in self.advice_parts()]

    def advice_parts(self) -> list[str]:
        """The lines of the advice, as in `parts`."""
        raise NotImplementedError


Found = TypeVar("Found", bound=Predicted)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Predicted):
    """Prediction for one config on a simulated card. `str` of it is a table of phases by category, and the verdict."""

    theirs: Theirs | None = None  # its memory with the libraries of another environment; None if none was named

    @property
    def tight(self) -> bool:
        """True if it fits with less to spare than the possible error of the prediction."""
        return is_tight(self.result, self.capacity_bytes)

    @property
    def device_used_bytes(self) -> int | None:
        """Bytes that the driver would report: the allocator's, and the context."""
        return self.result.device_used_bytes

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Most bytes of live tensors."""
        return self.result.peak_allocated_bytes

    @property
    def least_capacity_bytes(self) -> int | None:
        """Bytes of the smallest card on which it would run."""
        return self.result.least_capacity_bytes

    @property
    def step_s(self) -> float | None:
        """Seconds of one optimizer step, if it reached its end within the memory."""
        return self.result.median_step_s

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """The peak of each phase: load, rollout, scoring, update, optimizer."""
        return self.result.phases

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit estimate --json` prints: plain values only."""
        then = {} if self.then is None else {"as_of": self.then.to_json()}
        steps = {} if self.typical is None else {"typical": self.typical.to_json()}
        theirs = {} if self.theirs is None else {"with_libraries": self.theirs.to_json()}
        return {**estimate_json(self.result, self.capacity_bytes, self.advice), **then, **theirs, **steps}

    def parts(self) -> list[Table | str]:
        """The verdict, the phases by category, and the changes that would make it fit, or faster."""
        table, verdict = estimate_table(self.result, self.capacity_bytes)
        careful = care_lines(self.result, self.recipe, self.capacity_bytes)
        halves = [f"{words}." for words in float32_words(self.recipe, self.result, self.capacity_bytes)]
        older = then_lines(self.then, self.result, self.capacity_bytes)
        older += [] if self.theirs is None else self.theirs.lines(self.today)
        return [verdict, *careful, table, *halves, *older, *self.of_typical, *self.advice_parts(), *self.noted]

    @property
    def today(self) -> Today:
        """Bytes held with the installed libraries, for comparison with others."""
        return Today(trl=version("trl"), device_used_bytes=self.device_used_bytes, fits=self.fits)

    @property
    def of_typical(self) -> list[str]:
        """The lines of the typical step and of the whole run; [] if the lengths are unknown."""
        return [] if self.typical is None else self.typical.lines

    def advice_parts(self) -> list[str]:
        """Changes that would make it fit, or faster."""
        advice = self.advice
        return [] if advice is None else advice_lines(advice, self.recipe, self.result, self.capacity_bytes)

    def plot(self) -> "Figure":
        """A matplotlib Figure of the bytes (in GB) by category over one step, and the capacity."""
        return memory_figure(self.result, self.capacity_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Arguments of `autofit.estimate` or `autofit.check`, as they were given."""

    recipe: Given | None
    gpu: str | None
    target_vram: str | float | None
    trainer: str | None
    changes: Mapping[str, object] | None
    prompt_tokens: int | None
    deadline: str | float
    launch: LaunchOptions = NO_OPTIONS
    as_of: str | None = None
    lengths: GivenLengths | None = None
    libraries: Libraries | None = None

    def typical(self, made: Estimator, worst: ProbeResult, tell: OnEvent) -> Typical | None:
        """The typical step beside the `worst` case, by the lengths given, else by the dataset's own, if known."""
        if self.lengths == OFF or longest_tokens(made.recipe) is None:
            if self.lengths not in (None, OFF):
                name = made.recipe.trainer
                tell(
                    Event(
                        label="note", text=f"the given lengths are not used: it is not known how {name} pads by length"
                    )
                )
            return None
        lengths = own_lengths(made) if self.lengths is None else read_lengths(self.lengths)
        if lengths is None:
            return None
        try:
            return typical(made, worst, lengths)
        except (EnvironmentFault, Cancelled) as error:
            tell(Event(label="note", text=f"no typical step: {error}"))
            return None

    def of_libraries(self, made: Estimator) -> AskedRecipe | None:
        """The recipe for the libraries of the named environment, if one was named. Raises ConfigError."""
        if self.libraries is None:
            return None
        return asked_of(made.recipe, gpu=made.device.removeprefix("sim:"), target_bytes=made.capacity_bytes)

    def theirs(self, asked: AskedRecipe | None, made: Estimator, tell: OnEvent) -> Theirs | None:
        """Prediction of the recipe's memory with those libraries, if they were named."""
        if self.libraries is None or asked is None:
            return None
        tell(Event(text=f"simulating it with {self.libraries}"))
        return run_with(self.libraries, asked, made.folder / "libraries", deadline_s=made.deadline_s)

    def then(self, recipe: Recipe) -> Then | None:
        """Behaviour of `recipe` with the named older libraries, if some were named."""
        return None if self.as_of is None else then_of(recipe, self.as_of)


@contextlib.contextmanager
def estimator(asked: Asked, tell: OnEvent, *, server: ForkServer | None = None) -> Iterator[Estimator]:
    """The estimator of one recipe on one simulated card; its own server, by default, lives as long as the block."""
    with named_as_arguments(), ScratchFolder("estimate-") as folder:
        at_least_one("prompt-tokens", asked.prompt_tokens)
        if asked.as_of is not None:
            read_libraries(asked.as_of)
        if asked.lengths not in (None, OFF):
            read_lengths(asked.lengths)
        asked_bytes = size("target-vram", asked.target_vram)
        choose_device_and_target("sim", asked.gpu, asked_bytes)  # reports a wrong one before the recipe is asked for
        deadline_s = seconds("deadline", asked.deadline) or 0
        own, device, capacity, needs = suited(
            changed(source_of(asked.recipe, launch=asked.launch), asked.changes),
            partial(choose_device_and_target, "sim", asked.gpu, asked_bytes),
        )
        check_prompt_tokens(asked.prompt_tokens, device)
        server = server or fork_server(folder)
        try:
            stated = read_recipe(
                own, trainer=asked.trainer, device=device, scratch=folder / "inspection", server=server,
                prompt_tokens=asked.prompt_tokens, launch=asked.launch, say=lambda text: tell(Event(text=text)),
            )  # fmt: skip
            stated.check()
            if asked.as_of is not None or asked.libraries is not None:
                stated = without_proposal(stated)
            where = describe_device(device, capacity, stated.launch.cards)
            tell(Event(text=f"{stated.model} on {where}", read=True))
            if not stated.launch.is_plain:
                tell(Event(label="launch", text=stated.launch.words))
            if choice := about_choice(device, asked.gpu, asked_bytes, needs):
                tell(Event(label="card", text=choice))
            if stated.launch.offload != "none":
                tell(Event(label="note", text="the optimizer's step on the host is not timed: a step takes longer"))
            for note in (*stated.notes, *of_quantised(stated)):
                tell(Event(label="note", text=note))
            yield Estimator(
                recipe=stated, device=device, capacity_bytes=capacity, folder=folder / "probes", server=server,
                worst_case=worst_case_path(folder / "inspection"), deadline_s=deadline_s,
            )  # fmt: skip
        finally:
            server.close()


def own_lengths(made: Estimator) -> Lengths | None:
    """The lengths of some samples of the recipe's dataset; None if it is out of reach, or samples are generated."""
    if made.recipe.generates:  # the lengths of completions are not in the data
        return None
    told = sample_lengths(made.recipe, made.worst_case.parent, made.server, most=_SAMPLES)
    if told is None or not told["lengths"]:
        return None
    tokens, rows, count = cast("list[int]", told["lengths"]), cast(int, told["rows"]), cast(int, told["sampled"])
    all_of = f"all {rows:,} samples" if rows == count else f"{count:,} of {rows:,} samples"
    return Lengths(
        tokens=tuple(tokens), source=f"{all_of} of the dataset", samples=rows * len(tokens) / count,
        whole=rows == count, mean_tokens=cast(float, told["mean_tokens"]),
    )  # fmt: skip


def of_quantised(recipe: Recipe) -> list[str]:
    """Warnings on 4-bit weights on several ranks, with settings to use. Raises ConfigError if training would fail."""
    found = list(quantised(StatedLaunch(recipe=recipe)))
    for finding in found:
        if finding.stops:
            raise ConfigError(str(finding))
    return [str(finding) for finding in found if finding.severity is Severity.WARNING]


def with_typical(found: Found, asked: Asked, made: Estimator, tell: OnEvent) -> Found:
    """`found` with the typical step; at Ctrl-C as it is, with `interrupted` set."""
    try:
        return replace(found, typical=asked.typical(made, found.result, tell))
    except KeyboardInterrupt:
        tell(STOPPING)
        made.cancel()
        return replace(found, advice=Advice(ending=Ending.INTERRUPT))


def with_advice(
    found: Found, made: Estimator, look: Callable[[], Advice], advice_s: float, *,
    tell: OnEvent, on_advice: OnAdvice | None,
) -> Found:  # fmt: skip
    """`found` with the advice that `look` has after `advice_s` seconds at most, or at Ctrl-C.

    If all were tried and none is advised, the untried ones are reported.
    """
    if on_advice is not None:
        on_advice(advice_s)
    advice = made.within(advice_s, look, interrupted=lambda: tell(STOPPING))
    if not advice.changes and advice.ending is None:
        tell_left_out(made.recipe, made.device, tell)
    return replace(found, advice=advice)


def tell_left_out(recipe: Recipe, device: Device, tell: OnEvent) -> None:
    """Report the knobs left as they are, and why."""
    with contextlib.suppress(ConfigError):  # a recipe with no free knob has an estimate too
        left_out = Space.of(recipe, space_knobs(recipe), allow="recipe", device=device).left_out
        if left_out:
            tell(Event(label="left out", text=describe_left_out(left_out)))


def estimate(
    recipe: Given | None = None, *,
    gpu: str | None = None,
    target_vram: str | float | None = None,
    trainer: str | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    gpus: int | None = None,
    advice: bool = True,
    advice_time: str | float = ADVICE_TIME,
    as_of: str | None = None,
    libraries: str | os.PathLike[str] | None = None,
    lengths: GivenLengths | None = None,
    deadline: str | float = "15m",
    on_event: OnEvent | None = None,
    on_result: Callable[[Estimate], None] | None = None,
    on_typical: Callable[[Estimate], None] | None = None,
    on_advice: OnAdvice | None = None,
) -> Estimate:  # fmt: skip
    """Peak bytes by phase and category and the seconds of a step, of one config on a simulated card.

    `recipe`, `trainer`, `changes`, `prompt_tokens` and what says the launch (`accelerate_config`, `num_processes`,
    `gpus`) are as `autofit.search` takes them. `gpu` names the card, else
    the size of `target_vram` does (bytes, or text such as "40GB"), which also is how much of it may be used. `advice`
    looks for the cheapest changes that fit where it does not, or with too little to spare, else for changes that make
    it faster, and for another card; each is simulated, for `advice_time` at most (seconds, or "20s"; 0: none).
    `lengths` says how long samples are (for a trainer that generates, completions): "300,900,2048" (median, 95 % and
    longest, in tokens), a file, or the numbers; by default some samples of a dataset at hand, and "off" leaves them.
    By them the typical step and the whole run stand beside the worst case.
    `on_result` hears the estimate before both, `on_typical` before the advice, `on_advice` its seconds as it begins.
    Ctrl-C ends the search for advice and keeps what was found, with `interrupted` set. `as_of` names older libraries
    ("trl 0.14"): the differences of their behaviour from the installed ones' are told. `libraries` is an
    environment (its folder, or its python) whose TRL, transformers, peft and accelerate train the recipe too, in a
    process of their own; their memory is in `theirs`. `deadline` (seconds, or
    "15m") bounds one simulation.

    Raises ConfigError for a recipe or a card that cannot be, and EnvironmentFault when the simulation fails.
    """
    notes: list[str] = []
    tell = on_event or keeping(notes)
    with named_as_arguments():
        advice_s = seconds_or_none("advice-time", advice_time)
        gpu, launch = launch_options(
            gpu=gpu, accelerate_config=accelerate_config, num_processes=num_processes, gpus=gpus
        )
        other = None if libraries is None else Libraries(Path(libraries))
    asked = Asked(
        recipe=recipe, gpu=gpu, target_vram=target_vram, trainer=trainer, changes=changes, prompt_tokens=prompt_tokens,
        deadline=deadline, launch=launch, as_of=as_of, lengths=lengths, libraries=other,
    )  # fmt: skip
    with estimator(asked, tell) as made:
        for_libraries = asked.of_libraries(made)  # first: reports at once what they reject
        result = made.estimate()
        for note in result.notes:
            tell(Event(label="note", text=note))
        found = Estimate(
            recipe=made.recipe, device=made.device, capacity_bytes=made.capacity_bytes, result=result,
            then=asked.then(made.recipe), theirs=asked.theirs(for_libraries, made, tell),
        )  # fmt: skip
        if on_result is not None:
            on_result(found)
        found = with_typical(found, asked, made, tell)
        if on_typical is not None:
            on_typical(found)
        if advice and advice_s and not found.interrupted:
            look = partial(made.advice, result, tell=lambda text: tell(Event(text=text, trying=True)))
            found = with_advice(found, made, look, advice_s, tell=tell, on_advice=on_advice)
        return replace(found, notes=tuple(notes))


# -- check: for a test of one's own, and before a run -----------------------------------------------------------------

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Predicted):
    """Verdict on a config on a card. `str` of it is the verdict in one line, and a line for each change that helps."""

    crash: Crash | None = None  # the place where it runs out of memory; None if it fits

    @classmethod
    def of(cls, made: Estimator, result: ProbeResult, then: Then | None = None) -> "Check":
        """The verdict on the `result` of an estimator's recipe."""
        recipe, capacity = made.recipe, made.capacity_bytes
        return cls(
            recipe=recipe, device=made.device, capacity_bytes=capacity, result=result, then=then,
            crash=None if is_safe(result, capacity) else crash_of(result, recipe, capacity),
        )  # fmt: skip

    @property
    def mend(self) -> Change | None:
        """The first change that makes it fit with room to spare, if one was found."""
        return next(iter(() if self.advice is None else self.advice.changes), None)

    @property
    def verdict(self) -> Verdict:
        """`tight`: it fits as predicted, with less to spare than the prediction may be off."""
        if self.result.status is not ProbeStatus.FIT:
            return "does not fit"
        return "tight" if is_tight(self.result, self.capacity_bytes) else "fits"

    @property
    def tight(self) -> bool:
        """True if it fits with less to spare than the possible error of the prediction."""
        return self.verdict == "tight"

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit check --json` prints: plain values only."""
        shown, _ = shown_bytes(self.result, self.capacity_bytes)
        return {
            "verdict": self.verdict,
            "fits": self.fits,
            "tight": self.tight,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "device_used_bytes": self.result.device_used_bytes,
            "most_used_bytes": most_used_bytes(shown, self.device),
            "least_capacity_bytes": self.result.least_capacity_bytes,
            "step_s": self.result.median_step_s,
            "step_s_90": self.result.step_s_interval,
            "crash": None if self.crash is None else self.crash.to_json(),
            "float32_weights_bytes": self.recipe.weights_bytes if self._of_weights else None,
            "change": None if self.mend is None else self.mend.to_json(),
            "changes": [change.to_json() for change in (() if self.advice is None else self.advice.changes)],
            "advice_ended_by": None if self.advice is None or self.advice.ending is None else str(self.advice.ending),
            **({} if self.then is None else {"as_of": self.then.to_json()}),
            **({} if self.typical is None else {"typical": self.typical.to_json()}),
        }

    def parts(self) -> list[Table | str]:
        """The line, what decides a tight verdict, why the weights take so many bytes, and the changes."""
        older = then_lines(self.then, self.result, self.capacity_bytes)
        care = care_lines(self.result, self.recipe, self.capacity_bytes)
        return [self.line, *care, *self._of_weights, *older, *self.of_typical, *self.advice_parts(), *self.noted]

    @property
    def of_typical(self) -> list[str]:
        """One line on the steps that fit although the worst case exceeds the card; [] if all, or 0, or unknown."""
        line = None if self.typical is None else self.typical.fit_line
        return [] if line is None else [line]

    @property
    def _of_weights(self) -> list[str]:
        return float32_words(self.recipe, self.result, self.capacity_bytes)

    @property
    def line(self) -> str:
        """The verdict and why, in short sentences; if it exceeds the card, the place where it stops."""
        if not self.fits and self.crash is not None:
            return f"does not fit: {self.crash.where}{self._over(self.crash)}"
        where = "" if self.crash is None else f", in {self.crash.where}"
        return f"{self.verdict}: {used_words(self.result, self.capacity_bytes, where)}{step_words(self.result)}"

    def _over(self, crash: Crash) -> str:
        """Bytes over the capacity, in words: those at the peak of all phases, which may come after it has stopped."""
        if self.result.least_capacity_bytes is None:  # it stopped before all was asked for
            return f"; {self.result.reason}" if self.result.reason else ""
        over = f"{format_bytes(crash.over_bytes)} over"
        phases = {phase.name: phase.peak_allocated_bytes for phase in self.result.phases}
        last = max(phases, key=lambda name: phases[name], default=crash.phase)
        return f", {over}" if last == crash.phase else f"; {over} at the peak, in {last}"

    def advice_parts(self) -> list[str]:
        """Changes to make, a line each; [] if it fits, or if none were searched for."""
        if self.advice is None:
            return []
        lines = [
            f"{_setting(change)}: {format_bytes(change.shown_bytes)}{change.step_words}"
            for change in self.advice.changes
        ]
        if not lines and not self.advice.came_too_late:
            tried = "was found" if self.advice.ending else "that was tried makes it fit with room to spare"
            closest = self.advice.closest
            near = "" if closest is None else f"; the closest: {_setting(closest)} {closest.outcome}"
            lines = [f"no change {tried}{near}"]
        return [*lines, *ending_words(self.advice)]


def _setting(change: Change) -> str:
    return f"set {change.own or change.options.replace('--set ', '')} ({change.tier})"


def check(
    recipe: Given | None = None, *,
    gpu: str | None = None,
    target_vram: str | float | None = None,
    trainer: str | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    gpus: int | None = None,
    advice_time: str | float = ADVICE_TIME,
    as_of: str | None = None,
    lengths: GivenLengths | None = None,
    deadline: str | float = "15m",
    on_event: OnEvent | None = None,
    on_result: Callable[[Check], None] | None = None,
    on_typical: Callable[[Check], None] | None = None,
    on_advice: OnAdvice | None = None,
) -> Check:  # fmt: skip
    """Verdict on one config on a card, with the place where it stops and a change that helps. `tight`: it may fit.

    The arguments are those of `autofit.estimate`; `on_result` hears the verdict before any change is tried. Where only
    the worst case does not fit, it says which steps do, by `lengths` or by those of the dataset. Only if it
    does not fit, or is tight, are changes simulated, until the first one that makes it fit with room, and weights of 16
    bits in place of float32, for `advice_time` at most. Where the dataset is read, the longest sample is named, and the
    step that trains on it.

    Raises ConfigError for a recipe or a card that cannot be, and EnvironmentFault when the simulation fails.
    """
    notes: list[str] = []
    tell = on_event or keeping(notes)
    with named_as_arguments():
        advice_s = seconds_or_none("advice-time", advice_time)
        gpu, launch = launch_options(
            gpu=gpu, accelerate_config=accelerate_config, num_processes=num_processes, gpus=gpus
        )
    asked = Asked(
        recipe=recipe, gpu=gpu, target_vram=target_vram, trainer=trainer, changes=changes, prompt_tokens=prompt_tokens,
        deadline=deadline, launch=launch, as_of=as_of, lengths=lengths,
    )  # fmt: skip
    with estimator(asked, tell) as made:
        result = made.estimate()
        found = Check.of(made, result, asked.then(made.recipe))
        if on_result is not None:
            on_result(found)
        if not found.fits:
            found = with_typical(found, asked, made, tell)
            if on_typical is not None:
                on_typical(found)
        if advice_s and found.verdict != "fits" and not found.interrupted:
            look = partial(made.mends, result, tell=lambda text: tell(Event(text=text, trying=True)), wanted=1)
            found = with_advice(found, made, look, advice_s, tell=tell, on_advice=on_advice)
        return replace(found, notes=tuple(notes))
