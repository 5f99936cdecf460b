"""Probes that other work slowed down are probed again; slow ones are injected into lawful answers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lawful
import numpy as np
import pytest
from search_driver import plan

from autofit.files import write_json
from autofit.forecast.predictions import Predictions
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.tuning.frontier import Trial, winner
from autofit.tuning.record import repeats
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.sentences import repeat_note
from autofit.tuning.study import trials_of


class Busy(Launcher):
    """Lawful answers at once; the probes named in `slower` take so many times as long, step by step."""

    def __init__(self, slower: Mapping[str, tuple[float, ...]]) -> None:
        super().__init__(lawful.at_once)
        self._slower = slower
        self.names: list[str] = []

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        self.names.append(request.folder.name)
        answer = lawful.result_of(request)
        if answer.step_s:
            times = self._slower.get(request.folder.name, (1.0, 1.0))
            answer = replace(answer, step_s=tuple(answer.step_s[0] * t for t in times))
        write_json(request.answer_path, answer.to_json())


def predicted(wanted: Plan) -> Plan:
    """`wanted` with predictions of half the seconds that its probes take: wrong, but alike for all."""
    space = wanted.space
    candidates = tuple(space.allowed())
    laws = [lawful.law({**wanted.recipe.resolved, **space.changes(c)}) for c in candidates]
    used, step = (np.array(column, dtype=float) for column in zip(*laws, strict=True))
    return replace(wanted, predictions=Predictions(candidates=candidates, floor_bytes=0.5 * used,
                                                   device_used_bytes=used, step_s=0.5 * step))  # fmt: skip


def searched(
    folder: Path, slower: Mapping[str, tuple[float, ...]], *, with_predictions: bool = False
) -> tuple[list[Trial], Busy, list[str]]:
    wanted, said = plan(folder, 6), list[str]()
    wanted = predicted(wanted) if with_predictions else wanted
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=(busy := Busy(slower)))
    search.on_note = said.append
    search.run()
    return trials_of(search.study), busy, said


def true_s(one: Trial) -> float:
    return lawful.law({"per_device_train_batch_size": 4, "gradient_checkpointing": True, **one.changes})[1]


@pytest.mark.parametrize(("victim", "with_predictions"), [(0, False), (2, True), (3, False)])
def test_a_probe_ten_times_too_slow_is_probed_again_and_does_not_count(
    tmp_path: Path, victim: int, with_predictions: bool
) -> None:
    name = f"trial-{victim:04d}-1"
    trials, busy, said = searched(tmp_path, {name: (10.0, 10.0)}, with_predictions=with_predictions)
    assert f"repeat-{victim:04d}-1" in busy.names
    slow = trials[victim]
    assert slow.first is not None
    assert slow.first.median_step_s == pytest.approx(10 * true_s(slow))
    for one in (t for t in trials if t.fits):
        assert one.step_s == pytest.approx(true_s(one)), one
    assert f"trial {victim} is probed again: it took " in "\n".join(said)
    assert f"trial {victim} was probed again: " in repeat_note(trials)
    assert "was disturbed and does not count" in repeat_note(trials)
    best = winner(trials)
    assert best is not None
    assert best.step_s == min(t.step_s or 0.0 for t in trials if t.fits)


def test_steps_that_disagree_are_doubted_and_a_second_probe_like_the_first_leaves_it(tmp_path: Path) -> None:
    slower = dict.fromkeys(("trial-0001-1", "repeat-0001-1"), (1.0, 3.0))
    trials, busy, said = searched(tmp_path, slower, with_predictions=True)
    assert busy.names.count("repeat-0001-1") == 1
    assert any("trial 1 is probed again: its steps took " in line for line in said)
    assert "trial 1 was probed again and was no faster than " in repeat_note(trials)


def test_a_steady_machine_probes_nothing_twice_and_a_busy_one_not_everything(tmp_path: Path) -> None:
    _, busy, said = searched(tmp_path / "steady", {}, with_predictions=True)
    assert not [n for n in busy.names if n.startswith("repeat")]
    assert said == []
    always = {f"trial-{n:04d}-1": (1.0, 3.0) for n in range(6)}
    _, busy, _ = searched(tmp_path / "busy", always, with_predictions=True)
    assert len([n for n in busy.names if n.startswith("repeat")]) == 4


def test_run_again_the_repeats_are_read_and_not_probed(tmp_path: Path) -> None:
    slower = {"trial-0000-1": (10.0, 10.0)}
    before = searched(tmp_path, slower)[0]
    wanted = plan(tmp_path, 6)
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=(busy := Busy(slower)))
    search.run()
    assert busy.names == []
    assert trials_of(search.study) == before
    assert list(repeats(search.study)) == [0]
    assert all(t.status in (ProbeStatus.FIT, ProbeStatus.OOM) for t in before)


class Unhurried(Busy):
    """As Busy, but a repeat is answered only after twenty looks."""

    def __init__(self, slower: Mapping[str, tuple[float, ...]]) -> None:
        super().__init__(slower)
        self._looks = 0

    def result(self, folder: Path) -> ProbeResult | None:
        if folder.name.startswith("repeat"):
            self._looks += 1
            if self._looks <= 20:
                return None
            self.names.append("answered")
        return super().result(folder)


def test_the_other_slots_are_kept_busy_while_a_probe_is_repeated(tmp_path: Path) -> None:
    wanted = replace(plan(tmp_path, 12), parallel=3)
    launcher = Unhurried({"trial-0002-1": (1.0, 9.0)})
    search = Search(wanted, open_study(wanted), server_socket=None, launcher=launcher)
    search.run()
    names = launcher.names
    meanwhile = names[names.index("repeat-0002-1") + 1 : names.index("answered")]
    assert len(meanwhile) >= 3
    assert all(name.startswith("trial-") for name in meanwhile)
    assert len([name for name in names if name.startswith("trial-")]) == 12
    assert set(repeats(search.study)) == {2}
