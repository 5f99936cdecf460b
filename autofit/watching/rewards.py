"""The reward functions of a run: their seconds, what they return, and one clear reason where they fail."""

import functools
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from autofit.errors import AutofitError
from autofit.probing.result import is_oom
from autofit.watching.contract import Watched, Watcher
from autofit.watching.events import Kind, RunEvent, keep_event

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
        """What the function returned, as a list. Raises RewardFault if it is not a reward for each completion."""
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
        """Tell of calls that take long while they run: a function that never returns would be waited for in silence."""
        told: dict[tuple[str, float], float] = {}  # by name and begin, seconds when it is told next
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
        return RunEvent(step=step, kind=Kind.GUARD, text=text, data=data)


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
    """Whether it is a reward model: TRL calls it otherwise."""
    from torch import nn

    return isinstance(function, nn.Module)


def _is_async(function: Any) -> bool:
    """As TRL tells it: also of functools.partial, and of objects that are called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
