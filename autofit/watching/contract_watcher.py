"""The watcher of the contract: says the promise at the start, compares seldom while it trains, judges at the end."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autofit.units import format_bytes
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
from autofit.watching.events import Kind, RunEvent, events_of

if TYPE_CHECKING:
    from autofit.watching.memory import CardPeak

_FIRST_LOOK = 5  # steps after the first one of a start, then twice as many, and so on: each look reads every step time


class ContractWatcher(Watcher):
    """Holds a run against its promise; says nothing of a run without one."""

    def __init__(self) -> None:
        self._promise: Promise | None = None
        self._actual = Actual(device="cpu")
        self._step_s: list[float] = []
        self._seen = 0  # steps of this start
        self._look_at = _FIRST_LOOK
        self._told: set[str] = set()  # rows that are told as broken
        self._step = 0
        self._card: CardPeak | None = None
        self.of_trial = True  # False: a script's run, not that of a trial's own recipe
        self.rows: tuple[Row, ...] = ()  # the last comparison
        self.verdict = ""  # "" before the end

    def begins(self, run: Watched) -> Iterable[RunEvent]:
        """The promise in one sentence, with what is known of the run in its data."""
        self._promise, self._step = run.promise, run.first_step
        self._card = _card_use() if run.device == "cuda" else None
        if run.promise is None:
            return
        start = _start(run, run.promise) | {"of_trial": self.of_trial}
        before = [] if run.folder is None else events_of(run.folder)
        self._actual = actual_of(start, run.lines, before)
        self._step_s = list(self._actual.step_s)
        where = elsewhere(run.promise, self._actual)
        text = promise_text(run.promise, "completions" if run.generates else "samples", where)
        yield RunEvent(step=run.first_step, kind=Kind.PROMISE, text=text, data=start)

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
                yield RunEvent(step=step.number, kind=Kind.PROMISE, text=f"the promise is broken so far: {row.text}",
                               data={"row": row.to_json()})  # fmt: skip

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
        """Nothing to say: the process' resident bytes are kept for a device that measures no others."""
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
        yield RunEvent(step=self._step, kind=Kind.VERDICT, text=self.verdict,
                       data={"kept": kept, "rows": [row.to_json() for row in self.rows]})  # fmt: skip

    def _compare(self) -> None:
        assert self._promise is not None
        self.rows = contract(self._promise, replace(self._actual, step_s=self._step_s))


def promise_text(promise: Promise, word: str, elsewhere: str = "") -> str:
    """The promise as one sentence; `word` says what a step trains on: samples or completions."""
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
    """What the start of a run tells of it, as JSON: all that `contract_of` needs besides its logged steps."""
    own, ranks, text = _batch(run)
    whole = own * ranks
    return {
        "promise": promise.to_json(), "device": run.device, "device_name": _device_name(run.device),
        "generates": run.generates, "samples_per_step": whole, "effective_batch_size": whole, "batch_text": text,
    }  # fmt: skip


def _batch(run: Watched) -> tuple[int, int, str]:
    """(samples of one rank's step, ranks, their factors in words), from the trainer that runs where there is one."""
    arguments = getattr(run.hf_trainer, "args", None)
    ranks = int(getattr(arguments, "world_size", 0) or os.environ.get("WORLD_SIZE", 1))
    micro = getattr(arguments, "per_device_train_batch_size", None)
    accumulation = getattr(arguments, "gradient_accumulation_steps", None)
    if not isinstance(micro, int) or not isinstance(accumulation, int):
        return run.samples_per_step, ranks, f"{run.samples_per_step} a rank x {ranks} rank(s)"
    return micro * accumulation, ranks, f"{micro} x {accumulation} accumulated x {ranks} rank(s)"


def _device_name(device: str) -> str:
    """What a probe on this device would call it."""
    from autofit.probing.memory import cpu_name  # imports torch, as a run has anyway

    if device == "cpu":
        return cpu_name()
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).name)


def _card_use() -> "CardPeak | None":
    from autofit.watching.memory import card_use  # imports torch

    return card_use()
