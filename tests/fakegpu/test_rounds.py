"""Micro-batches that are alike are repeated, not traced: the run is the one in which each was traced."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from autofit.fakegpu.allocator import AllocatorSettings
from autofit.fakegpu.depth.delay import Delay
from autofit.fakegpu.depth.expand import LeftOut, Mark, TracedRun, with_rounds, without_marks
from autofit.fakegpu.depth.stack import NotRepeatingError
from autofit.fakegpu.replay import Unlimited, least_capacity, replay

MIB = 1 << 20
COUNT = 40  # micro-batches of a step
TRACED = (0, 1, 2, COUNT - 1)


class Training:
    """Two steps of micro-batches: gradients stay, activations go, and the loss goes with the next micro-batch.

    After each step the cache is emptied. `beside` has the micro-batches whose temporaries are of another stream.
    """

    def __init__(
        self, *, left_out: Collection[int] = (), grows: bool = False, keeps: bool = False, beside: Collection[int] = ()
    ) -> None:
        self.beside, self.streams = beside, dict[int, int]()
        self.ids: list[int] = []
        self.nbytes: list[int] = []
        self.live: dict[str, tuple[int, int]] = {}
        self.count = 0
        self.stretches: list[tuple[int, Delay]] = []
        self.marks: list[Mark] = []
        self.groups: list[LeftOut] = []
        self.windows: set[int] = set()
        self.emptied: list[int] = []
        self.take("weights", 300 * MIB)
        for step in range(2):
            self.mark(0.5, "rollout")
            out = []
            for at in range(COUNT):
                if at in left_out:
                    self.loss()
                    out.append(len(self.marks))
                else:
                    self.micro_batch(at, grows=grows, keeps=keeps)
                if at < COUNT - 1:
                    self.windows.add(len(self.marks))
                self.mark(0.001 if at in left_out else 2.0, "update")
            self.groups += [LeftOut((out[0] - 3, out[0] - 2, out[0] - 1), out[0], out[-1])] if out else []
            if not step:
                self.take("state", 600 * MIB)
            self.give("gradients")
            self.give("loss")
            self.emptied.append(len(self.ids))
            self.mark(1.0, "optimizer")

    def take(self, name: str, nbytes: int) -> None:
        self.live[name] = self.count, nbytes
        self.ids.append(self.count)
        self.nbytes.append(nbytes)
        self.count += 1

    def give(self, name: str) -> None:
        number, nbytes = self.live.pop(name)
        self.ids.append(number)
        self.nbytes.append(-nbytes)

    def loss(self) -> None:
        self.take("new loss", 4)
        if "loss" in self.live:
            self.give("loss")
        self.live["loss"] = self.live.pop("new loss")

    def micro_batch(self, at: int, *, grows: bool, keeps: bool) -> None:
        for layer in range(6):
            self.take(f"activation {layer}", (7 + layer) * MIB + (at * MIB if grows else 0))
        if keeps:
            self.take(f"metric {at}", 512)
        if at == 0:
            self.take("gradients", 300 * MIB)
        self.loss()
        for layer in reversed(range(6)):
            self.take("temporary", 5 * MIB)
            if at in self.beside:
                self.streams[self.ids[-1]] = 1
            self.give(f"activation {layer}")
            self.give("temporary")

    def mark(self, seconds: float, name: str) -> None:
        self.stretches.append((0, Delay.passed(seconds)))
        self.marks.append(Mark(name=name, event=len(self.ids), stretch=len(self.stretches)))

    @property
    def run(self) -> TracedRun:
        ids, nbytes = np.array(self.ids), np.array(self.nbytes)
        zeros = np.zeros(len(ids), np.int64)
        return TracedRun(ids=ids, nbytes=nbytes, tags=zeros, categories=zeros, stretches=tuple(self.stretches),
                   marks=tuple(self.marks), emptied=tuple(self.emptied), streams=self.streams)  # fmt: skip


LEFT_OUT = set(range(COUNT)) - set(TRACED)


@pytest.mark.parametrize("beside", [(), range(COUNT)], ids=["one stream", "two streams"])
@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_the_repeated_run_is_the_run_in_which_all_was_traced(
    settings: AllocatorSettings, beside: Collection[int]
) -> None:
    full, short = Training(beside=beside), Training(left_out=LEFT_OUT, beside=beside)
    assert len(short.ids) < len(full.ids) / 5
    made = with_rounds(short.run, short.groups)
    np.testing.assert_array_equal(made.nbytes, full.run.nbytes)
    assert made.emptied == full.run.emptied
    assert [(mark.name, mark.event) for mark in made.marks] == [(mark.name, mark.event) for mark in full.marks]
    assert made.seconds() == pytest.approx(full.run.seconds())
    assert replay(made.log, settings=settings) == replay(full.run.log, settings=settings)
    assert least_capacity(made.log, settings=settings) == least_capacity(full.run.log, settings=settings)
    for capacity in (1290 * MIB, 1310 * MIB):  # the allocator gives back cached blocks, or cannot go on
        assert replay(made.log, settings=settings, capacity_bytes=capacity) == replay(
            full.run.log, settings=settings, capacity_bytes=capacity
        )


def test_the_replay_stops_where_the_allocator_goes_in_circles_and_the_phases_are_the_same() -> None:
    full, short = Training(), Training(left_out=LEFT_OUT)
    made = without_marks(with_rounds(short.run, short.groups), short.windows)
    true = without_marks(full.run, full.windows)
    found, expected = (Unlimited(run.log, [mark.event for mark in run.marks]) for run in (made, true))
    assert found.phases == expected.phases
    assert found.least_capacity() == expected.least_capacity()
    assert made.seconds() == pytest.approx(true.seconds())


def test_micro_batches_among_which_the_cache_is_emptied_are_not_repeated() -> None:
    short = Training(left_out=LEFT_OUT)
    short.emptied.append(short.marks[short.groups[0].first].event - 1)
    with pytest.raises(NotRepeatingError):
        with_rounds(short.run, short.groups)


@pytest.mark.parametrize("how", ["grows", "keeps", "beside"])
def test_micro_batches_that_differ_or_leave_something_behind_are_not_repeated(how: str) -> None:
    beside = (TRACED[1],) if how == "beside" else ()
    short = Training(left_out=LEFT_OUT, grows=how == "grows", keeps=how == "keeps", beside=beside)
    with pytest.raises(NotRepeatingError):
        with_rounds(short.run, short.groups)
