"""The watchers of a full run, for a promoted run and for a callback in a script, and the summary of its start.

That of its reward functions is here too: their seconds, their results, and one clear reason where they fail.
"""

import functools
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from autofit.errors import AutofitError
from autofit.probing.result import is_oom
from autofit.units import format_bytes, format_seconds
from autofit.watching.contract import (
    Actual,
    Promise,
    Row,
    StepFacts,
    Watched,
    Watcher,
    actual_of,
    contract,
    elsewhere,
    seconds_text,
    verdict,
)
from autofit.watching.events import EventKind, RunEvent, events_of, keep_event
from autofit.watching.guards import GuardWatcher
from autofit.watching.memory import CardPeak, MemoryWatcher, card_use
from autofit.watching.progress import ProgressWatcher
from autofit.watching.thresholds import Guard, GuardCheck

_MOST_NAMES = 8  # of LoRA's targets


class SummaryWatcher(Watcher):
    """One event when training begins: the model, the batches, and the promised memory."""

    def __init__(self, guards: Sequence[Guard] = ()) -> None:
        self._guards = guards

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        facts = facts_of(run, self._guards)
        width = max(map(len, facts))
        text = "\n".join([f"{run.trainer} on {_device(run)}", *(f"  {k:<{width}}  {v}" for k, v in facts.items())])
        return [RunEvent(step=run.first_step, kind=EventKind.START, text=text, data=facts)]


def facts_of(run: Watched, guards: Sequence[Guard] = ()) -> dict[str, str]:
    """{subject: words} of a run that begins; unknown ones are left out."""
    trainer = run.hf_trainer
    own = {} if trainer is None else _of_trainer(trainer, run)
    facts = {
        **own, "batch": _batch(run), "steps": _steps(run), "memory": _memory(run.promise),
        "guards": _guards([guard for guard in guards if _can_watch(guard, run)]),
    }  # fmt: skip
    return {key: text for key, text in facts.items() if text}


def _of_trainer(trainer: Any, run: Watched) -> dict[str, str]:
    model, args = trainer.model, trainer.args
    return {
        "model": _model(model), "adapter": _adapter(model), "precision": _precision(model, args),
        "checkpointing": _checkpointing(model, args), "optimizer": _optimizer(trainer),
        "lengths": _lengths(args), "rewards": _rewards(trainer), "reference": _reference(trainer),
        "saves": _saves(args),
    }  # fmt: skip


def _device(run: Watched) -> str:
    if run.device != "cuda":
        return "the CPU"
    import torch

    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{card.name} ({format_bytes(card.total_memory)})"


def _model(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    trained, count = _parameters(model)
    share = 100 * trained / max(1, count)
    origin = f" from {name}" if name else ""
    kind = next(c for c in type(base).__mro__ if not c.__name__.startswith("FSDP"))  # FSDP2 makes a class of its own
    return f"{kind.__name__}{origin}: {trained:,} of {count:,} parameters are trained ({share:.3g}%)"


def _parameters(model: Any) -> tuple[int, int]:
    """Parameters (trained, all); of 4-bit weights those that they stand for."""
    if hasattr(model, "get_nb_trainable_parameters"):
        trained, count = model.get_nb_trainable_parameters()
        return int(trained), int(count)
    if hasattr(model, "num_parameters"):
        return int(model.num_parameters(only_trainable=True)), int(model.num_parameters())
    each = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, grad in each if grad), sum(n for n, _ in each)


def _adapter(model: Any) -> str:
    config = next(iter(getattr(model, "peft_config", {}).values()), None)
    if config is None:
        return ""
    targets = config.target_modules
    names = sorted(targets) if isinstance(targets, set | list | tuple) else [str(targets)]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    rank = f" r {config.r}, alpha {config.lora_alpha}," if hasattr(config, "lora_alpha") else ""
    return f"{kind}{rank} on {', '.join(names[:_MOST_NAMES])}{more}"


def _precision(model: Any, args: Any) -> str:
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        counts[kind] = counts.get(kind, 0) + parameter.numel()
    held = " and ".join(sorted(counts, key=lambda kind: -counts[kind]))
    kind = "bfloat16" if getattr(args, "bf16", False) else "float16" if getattr(args, "fp16", False) else ""
    quantized = ", quantized" if getattr(model, "is_quantized", False) else ""
    return f"weights in {held}{quantized}" + (f", computed in {kind} where that is safe (autocast)" if kind else "")


def _checkpointing(model: Any, args: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    on = getattr(base, "is_gradient_checkpointing", getattr(args, "gradient_checkpointing", False))
    return "on: activations are computed again in the backward pass" if on else "off"


def _optimizer(trainer: Any) -> str:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    kind = "" if optimizer is None else f"{type(optimizer).__name__}, "
    args = trainer.args
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return f"{kind}learning rate {args.learning_rate:g} ({schedule})"


def _lengths(args: Any) -> str:
    completion, whole = getattr(args, "max_completion_length", None), getattr(args, "max_length", None)
    if completion:
        return f"completions of at most {completion} tokens"
    return f"samples of at most {whole} tokens" if whole else ""


def _rewards(trainer: Any) -> str:
    names = list(getattr(trainer, "reward_func_names", None) or ())
    given = getattr(trainer, "reward_weights", None)
    weights = [1.0] * len(names) if given is None else [float(weight) for weight in given]
    return ", ".join(f"{n} × {w:g}" if w != 1 else str(n) for n, w in zip(names, weights, strict=True))


def _reference(trainer: Any) -> str:
    beta = getattr(trainer, "beta", None)
    if not isinstance(beta, int | float):
        return ""
    if beta == 0:
        return "none: beta is 0, so no KL is computed"
    held = "a model of its own" if getattr(trainer, "ref_model", None) is not None else "without a second model"
    return f"KL with beta {beta:g}, {held}"


def _saves(args: Any) -> str:
    """The recipe's own checkpoints; a promoted run saves more, between them."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    steps = getattr(args, "save_steps", 0)
    often = {"steps": f"a checkpoint every {steps:g} steps", "epoch": "a checkpoint every epoch"}.get(strategy, "")
    most = getattr(args, "save_total_limit", None)
    return often and often + (f", of which the last {most} are kept" if most else "")


def _batch(run: Watched) -> str:
    """Effective batch = micro-batch × accumulation × ranks, in the trainer's words."""
    word = "completions" if run.generates else "samples"
    args = getattr(run.hf_trainer, "args", None)
    if args is None:
        return f"{run.samples_per_step} {word} a step"
    micro, steps, ranks = int(args.train_batch_size), int(args.gradient_accumulation_steps), int(args.world_size)
    whole = micro * steps * ranks
    text = f"micro-batch {micro} × accumulation {steps} × {ranks} rank{'s' * (ranks > 1)} = {whole} {word} a step"
    group = getattr(run.hf_trainer, "num_generations", None)
    return f"{text}: {whole / group:g} prompts × {group} completions" if run.generates and group else text


def _steps(run: Watched) -> str:
    epochs = getattr(getattr(run.hf_trainer, "state", None), "num_train_epochs", None)
    text = str(run.last_step)
    text += f" ({epochs} epoch{'s' * (epochs != 1)})" if isinstance(epochs, int) and epochs else ""
    text += f", goes on after step {run.first_step}" if run.first_step else ""
    step_s = None if run.promise is None else run.promise.step_s
    if step_s is None:
        return text
    whole = format_seconds(step_s * (run.last_step - run.first_step))
    return f"{text}; about {whole} at the promised {format_seconds(step_s)} a step"


def _memory(promise: Promise | None) -> str:
    if promise is None or promise.device_used_bytes is None:
        return ""
    limit = "" if promise.limit_bytes is None else f", limit {format_bytes(promise.limit_bytes)}"
    return f"{format_bytes(promise.device_used_bytes)} promised{limit} ({promise.fidelity} on {promise.device_name})"


def _can_watch(guard: Guard, run: Watched) -> bool:
    without_kl = getattr(run.hf_trainer, "beta", None) == 0 and guard.looks_at("kl")
    return guard.generates in (None, run.generates) and not (without_kl and guard.check is not GuardCheck.FINITE)


def _guards(guards: Sequence[Guard]) -> str:
    if not guards:
        return "none"
    stops = [guard.name for guard in guards if guard.stops]
    return (
        "of what it logs: "
        + ", ".join(guard.name for guard in guards)
        + (f"; the run stops at {', '.join(stops)}" if stops else "")
    )


def watchers(*, guards: Sequence[Guard]) -> list[Watcher]:
    """Everyone who looks at a run, with the guards that are on.

    A watcher is made anew for each start of a run. This list is the only place that names them.
    """
    return [
        SummaryWatcher(guards), RewardWatcher(), ProgressWatcher(), ContractWatcher(), MemoryWatcher(),
        GuardWatcher(guards),
    ]  # fmt: skip


# -- the watcher of the contract --------------------------------------------------------------------------------------

_FIRST_LOOK = 5  # steps after the first one of a start, then twice as many, and so on: each look reads every step time


class ContractWatcher(Watcher):
    """Holds a run against its promise, if it has one."""

    def __init__(self) -> None:
        self._promise: Promise | None = None
        self._actual = Actual(device="cpu")
        self._step_s: list[float] = []
        self._seen = 0  # steps of this start
        self._look_at = _FIRST_LOOK
        self._told: set[str] = set()  # rows reported as broken
        self._step = 0
        self._card: CardPeak | None = None
        self.of_trial = True  # False: a script's run, not that of a trial's own recipe
        self.rows: tuple[Row, ...] = ()  # the last comparison
        self.verdict = ""  # "" before the end

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """The promise in one sentence, with facts of the run in its data."""
        self._promise, self._step = run.promise, run.first_step
        self._card = card_use() if run.device == "cuda" else None
        if run.promise is None:
            return
        start = _start(run, run.promise) | {"of_trial": self.of_trial}
        before = [] if run.folder is None else events_of(run.folder)
        self._actual = actual_of(start, run.lines, before)
        self._step_s = list(self._actual.step_s)
        where = elsewhere(run.promise, self._actual)
        text = promise_text(run.promise, "completions" if run.generates else "samples", where)
        yield RunEvent(step=run.first_step, kind=EventKind.PROMISE, text=text, data=start)

    def step_ends(self, step: StepFacts) -> Iterable[RunEvent]:
        """A warning for each figure that is found broken, once."""
        self._step, self._seen = step.number, self._seen + 1
        if self._promise is None or self._seen == 1:
            return
        self._step_s.append(step.step_s)
        self._hold(self._device_used(step.device_used_bytes, step.peak_reserved_bytes))
        if self._seen <= self._look_at:
            return
        self._look_at *= 2
        self._compare()
        for row in self.rows:
            if row.kept is False and row.key not in self._told:
                self._told.add(row.key)
                text = f"the promise is broken so far: {row.text}"
                yield RunEvent(step=step.number, kind=EventKind.PROMISE, text=text, data={"row": row.to_json()})

    def _hold(self, used: int | None) -> None:
        """Keep the most bytes so far; an object is made only where they grew."""
        if used is not None and used > (self._actual.device_used_bytes or 0):
            self._actual = replace(self._actual, device_used_bytes=used)

    def _device_used(self, told: object, reserved: object) -> int | None:
        """Device-used bytes: as told, or on a card from its peak of reserved bytes."""
        if isinstance(told, int):
            return told
        return self._card.bytes_at(reserved) if self._card is not None and isinstance(reserved, int) else None

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        """Device-used bytes since the run began, on a card."""
        used = self._device_used(line.get("device_used_bytes"), line.get("peak_reserved_bytes"))
        return {} if used is None else {"device_used_bytes": used}

    def logs(self, line: Mapping[str, object]) -> Iterable[RunEvent]:
        """Records resident bytes, the only memory figure on a CPU. Emits no event."""
        rss = line.get("host_rss_bytes")
        if isinstance(rss, int) and rss > (self._actual.host_rss_bytes or 0):
            self._actual = replace(self._actual, host_rss_bytes=rss)
        return ()

    def ends(self) -> Iterable[RunEvent]:
        """The verdict, with the rows in its data."""
        if self._promise is None:
            return
        self._compare()
        self.verdict = verdict(self.rows, self._actual.rescues)
        kept = all(row.kept is not False for row in self.rows)
        yield RunEvent(step=self._step, kind=EventKind.VERDICT, text=self.verdict,
                       data={"kept": kept, "rows": [row.to_json() for row in self.rows]})  # fmt: skip

    def _compare(self) -> None:
        assert self._promise is not None
        self.rows = contract(self._promise, replace(self._actual, step_s=self._step_s))


def promise_text(promise: Promise, word: str, elsewhere: str = "") -> str:
    """The promise as one sentence; `word` names the samples of a step: samples or completions."""
    used, limit, step_s = promise.device_used_bytes, promise.limit_bytes, promise.step_s
    parts = [
        "" if used is None else f"{format_bytes(used)} device-used"
        + ("" if limit is None else f" of at most {format_bytes(limit)}"),
        "" if step_s is None else f"{seconds_text(step_s)} a step",
        "" if promise.samples_per_s is None else f"{promise.samples_per_s:.2f} {word}/s",
        "" if promise.effective_batch_size is None else f"effective batch {promise.effective_batch_size}",
    ]  # fmt: skip
    text = f"promised ({promise.fidelity} on {promise.device_name}): {', '.join(filter(None, parts))}"
    return f"{text}; {elsewhere}, so bytes and seconds are not compared" if elsewhere else text


def _start(run: Watched, promise: Promise) -> dict[str, object]:
    """Facts at the start of a run, as JSON: all that `contract_of` needs besides its logged steps."""
    own, ranks, text = _factors(run)
    whole = own * ranks
    return {
        "promise": promise.to_json(), "device": run.device, "device_name": _device_name(run.device),
        "generates": run.generates, "samples_per_step": whole, "effective_batch_size": whole, "batch_text": text,
    }  # fmt: skip


def _factors(run: Watched) -> tuple[int, int, str]:
    """(samples of one rank's step, ranks, their factors in words), from the trainer that runs where there is one."""
    arguments = getattr(run.hf_trainer, "args", None)
    ranks = int(getattr(arguments, "world_size", 0) or os.environ.get("WORLD_SIZE", 1))
    micro = getattr(arguments, "per_device_train_batch_size", None)
    accumulation = getattr(arguments, "gradient_accumulation_steps", None)
    if not isinstance(micro, int) or not isinstance(accumulation, int):
        return run.samples_per_step, ranks, f"{run.samples_per_step} a rank x {ranks} rank(s)"
    return micro * accumulation, ranks, f"{micro} x {accumulation} accumulated x {ranks} rank(s)"


def _device_name(device: str) -> str:
    """Name of this device in the results of a probe."""
    from autofit.probing.memory import cpu_name  # imports torch, as a run has anyway

    if device == "cpu":
        return cpu_name()
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).name)


# -- the watcher of reward functions ----------------------------------------------------------------------------------

_SLOW_S = 60.0  # of one call; told again after twice the time, and so on
_LOOK_EVERY_S = 1.0


class RewardFault(AutofitError):
    """A reward function raised an error, or returned something else than a reward for each completion."""


@dataclass(slots=True)
class _Calls:
    """The calls of one reward function since the last logged line."""

    seconds: float = 0.0
    completions: int = 0
    none: int = 0
    nan: int = 0

    def add(self, seconds: float, rewards: Sequence[Any]) -> None:
        self.seconds += seconds
        self.completions += len(rewards)
        self.none += sum(reward is None for reward in rewards)
        self.nan += sum(reward is not None and not isfinite(float(reward)) for reward in rewards)


class RewardWatcher(Watcher):
    """Runs each reward function of a TRL trainer within a clock, and adds its figures to the logged lines:

    rewards/NAME/seconds, its share of the run's time (seconds_frac), and, once there are any, the shares of completions
    for which it returned None or NaN. A call that takes longer than a minute is told while it runs.
    """

    def __init__(self) -> None:
        self._calls: dict[str, _Calls] = {}
        self._running: dict[str, float] = {}  # since when, of the calls at work
        self._flawed: set[str] = set()
        self._last_s = 0.0
        self._ended = threading.Event()
        self._trainer: Any = None

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        self._trainer = run.hf_trainer
        functions = getattr(run.hf_trainer, "reward_funcs", None)
        names = getattr(run.hf_trainer, "reward_func_names", None)
        if not isinstance(functions, list) or not names or len(functions) != len(names):
            return ()
        self._flawed = {key for line in run.lines for key in line if key.endswith(("/none_frac", "/nan_frac"))}
        for place, (function, name) in enumerate(zip(functions, names, strict=True)):
            if not _is_model(function):
                self._calls[name] = _Calls()
                functions[place] = self._clocked(function, name)
        if run.folder is not None and self._calls:
            threading.Thread(target=self._look, args=(run.folder,), daemon=True).start()
        return ()

    def adds(self, line: Mapping[str, object]) -> Mapping[str, object]:
        now_s = float(str(line.get("run_s", 0.0)))
        whole_s, self._last_s = now_s - self._last_s, now_s
        found: dict[str, object] = {}
        for name, calls in self._calls.items():
            found |= self._figures(f"rewards/{name}", calls, whole_s)
            self._calls[name] = _Calls()
        return found

    def ends(self) -> Iterable[RunEvent]:
        self._ended.set()
        return ()

    def _figures(self, head: str, calls: _Calls, whole_s: float) -> dict[str, float]:
        found = {f"{head}/seconds": calls.seconds}
        if whole_s > 0:
            found[f"{head}/seconds_frac"] = min(1.0, calls.seconds / whole_s)
        for word, count in (("none_frac", calls.none), ("nan_frac", calls.nan)):
            key = f"{head}/{word}"
            self._flawed |= {key} if count else set()
            if key in self._flawed and calls.completions:
                found[key] = count / calls.completions
        return found

    def _clocked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function` with its seconds counted, and its faults told by its name."""

        def scored(*args: Any, **kwargs: Any) -> list[Any]:
            with self._at_work(name, kwargs) as returned:
                returned.append(function(*args, **kwargs))
            return self._checked(name, returned[0], kwargs)

        async def scored_later(*args: Any, **kwargs: Any) -> list[Any]:
            with self._at_work(name, kwargs) as returned:
                returned.append(await function(*args, **kwargs))
            return self._checked(name, returned[0], kwargs)

        chosen: Callable[..., Any] = scored_later if _is_async(function) else scored
        return functools.update_wrapper(chosen, function)

    @contextmanager
    def _at_work(self, name: str, kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
        began = self._running[name] = time.monotonic()
        try:
            yield []
        except (Exception, SystemExit) as error:
            if isinstance(error, RewardFault) or is_oom(error):
                raise
            raise self._fault(name, _raised(error), kwargs) from error
        finally:
            self._running.pop(name, None)
            self._calls[name].seconds += time.monotonic() - began

    def _checked(self, name: str, returned: Any, kwargs: Mapping[str, Any]) -> list[Any]:
        """The function's result, as a list. Raises RewardFault unless it is a reward for each completion."""
        wanted = len(kwargs.get("completions", ()))
        try:
            rewards = list(returned)
        except TypeError:
            raise self._fault(name, f"returned {_short(returned)}, which is no list", kwargs) from None
        if wanted and len(rewards) != wanted:
            raise self._fault(name, f"returned {len(rewards)} rewards for {wanted} completions", kwargs)
        for place, reward in enumerate(rewards):
            if not _is_reward(reward):
                raise self._fault(name, f"returned {_short(reward)} as reward number {place + 1}", kwargs)
        self._calls[name].add(0.0, rewards)
        return rewards

    def _fault(self, name: str, what: str, kwargs: Mapping[str, Any]) -> RewardFault:
        step = int(self._trainer.state.global_step) + 1
        wanted = len(kwargs.get("completions", ()))
        return RewardFault(
            f"in step {step} the reward function {name!r} {what}; it must return a list with one number for each "
            f"completion ({wanted} in this call), or None for a completion that it does not score"
        )

    def _look(self, folder: Path) -> None:
        """Report slow calls while they run: a function that hangs would be waited for in silence."""
        told: dict[tuple[str, float], float] = {}  # {(name, begin): seconds of its next report}
        while not self._ended.wait(_LOOK_EVERY_S):
            for name, began in [*self._running.items()]:
                seconds = time.monotonic() - began
                if seconds > told.get((name, began), _SLOW_S):
                    told = {(name, began): 2 * seconds}
                    keep_event(folder, self._slow(name, seconds))

    def _slow(self, name: str, seconds: float) -> RunEvent:
        step = int(self._trainer.state.global_step)
        text = f"the reward function {name!r} has run for {seconds:.0f} s in step {step + 1}; training waits for it"
        data = {"guard": "reward_time", "metric": f"rewards/{name}/seconds", "since": step + 1, "value": seconds,
                "state": "waits", "tag": "autofit.guard.reward_time",
                "tag_value": f"since step {step + 1}: one call of {name} has run for {seconds:.0f} s"}  # fmt: skip
        return RunEvent(step=step, kind=EventKind.GUARD, text=text, data=data)


def _raised(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){_place(error)}"
    return f"raised {type(error).__name__}: {_short(str(error), quoted=False)}{_place(error)}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    return f" ({Path(own[0].filename).name}, line {own[0].lineno})" if own else ""


def _short(value: object, *, quoted: bool = True) -> str:
    text = " ".join((repr(value) if quoted else str(value)).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_reward(value: Any) -> bool:
    if value is None:
        return True
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _is_model(function: object) -> bool:
    """True if it is a reward model: TRL calls it otherwise."""
    from torch import nn

    return isinstance(function, nn.Module)


def _is_async(function: Any) -> bool:
    """As TRL tells it: also of functools.partial, and of objects that are called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
