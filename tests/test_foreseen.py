"""The front holds no trial that a candidate without a probe is known to dominate."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import lawful
import pytest
from at_once import AtOnce
from search_driver import plan
from test_front_plot import law, legend
from test_frontier import GB, trial

from autofit.api.arguments import named_as_arguments
from autofit.api.results import read_result
from autofit.cluster.scheduler import LOCAL
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import write_json
from autofit.probing.result import Cause, Fidelity, ProbeRequest, ProbeResult, ProbeStatus
from autofit.promotion.promotion import as_a_trial, choose
from autofit.tuning.frontier import SPEED, Foreseen, common_front
from autofit.tuning.record import record_of
from autofit.tuning.search import FRONT_TRIALS, Plan, Search, open_study
from autofit.tuning.study import FOR_FRONT, load_study, trials_of


def foreseen(step_s: float, used_gb: float) -> Foreseen:
    return Foreseen(tier="neutral", changes={}, step_s=step_s, device_used_bytes=int(used_gb * GB))


def simulated(request_path: str) -> None:
    """The lawful probe as a simulation of a second."""
    request = ProbeRequest.read(Path(request_path))
    found = replace(lawful.result_of(request), fidelity=Fidelity.PREDICTED, process_s=1.0)
    write_json(request.answer_path, found.to_json())


def searched(folder: Path, probe: object, *, trials: int | None = None) -> Plan:
    wanted = replace(plan(folder, trials), min_gain_frac=0.5)  # the winner is found after few trials
    wanted = replace(wanted, predictions=law(wanted))
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(probe)).run()  # type: ignore[arg-type]
    return wanted


def test_a_candidate_that_dominates_a_trial_takes_its_place_on_the_front() -> None:
    trials = [trial(0, 20.0, 13.2), trial(1, 13.0, 34)]
    ahead = [foreseen(14.0, 12.9), foreseen(35.0, 10.0), foreseen(13.5, 34.5)]
    front, predicted = common_front(trials, ahead)
    assert [t.number for t in front] == [1]
    assert predicted == ahead[:2]
    assert common_front(trials, [])[0] == [trials[1], trials[0]]


def test_a_probed_front_names_what_is_predicted_to_be_ahead_of_it_and_draws_it(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=1)
    found = read_result(tmp_path, "law")
    assert found.foreseen
    both = [(t.step_s or 0, t.device_used_bytes or 0) for t in found.front]
    both += [(f.step_s, f.device_used_bytes) for f in found.foreseen]
    assert not any(a != b and a[0] <= b[0] and a[1] <= b[1] for a in both for b in both)
    assert str(found).count("predicted, not probed") == len(found.foreseen)
    assert all(f"trial {point.name}\n" in str(found) or f" {point.name} " in str(found) for point in found.foreseen)
    assert "predicted, on the front" in legend(found.plot())


def test_a_simulated_search_traces_what_belongs_on_the_front_and_ends_there(tmp_path: Path) -> None:
    searched(tmp_path, simulated)
    trials = load_study(tmp_path, "law").get_trials(deepcopy=False)
    for_front = [t for t in trials if t.user_attrs.get(FOR_FRONT)]
    assert 0 < len(for_front) <= FRONT_TRIALS
    assert min(t.values[1] for t in for_front) == min(t.values[1] for t in trials)
    searched(tmp_path, simulated)
    assert len(load_study(tmp_path, "law").get_trials(deepcopy=False)) == len(trials)


def test_a_trial_is_named_by_its_number_or_as_the_best_or_the_leanest() -> None:
    trials = [trial(0, 20.0, 13.2), trial(1, 13.0, 34), trial(2, 35.0, 10), trial(3, 36.0, 11)]
    assert [choose(trials, name, SPEED).number for name in ("best", "leanest", "3")] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"must be `best`, `leanest` or the number .* got 'leannest'; .*leanest"):
        choose(trials, "leannest", SPEED)
    with pytest.raises(ConfigError, match=r"^TRIAL must be"):
        choose(trials, "7", SPEED)
    with pytest.raises(ConfigError, match=r"^trial must be"), named_as_arguments():
        choose(trials, "7", SPEED)
    with pytest.raises(ConfigError, match="no leanest trial: no trial fits yet"):
        choose([], "leanest", SPEED)


def joined(folder: Path, asked: str, probe: object, said: list[str]) -> str:
    study = load_study(folder, "law")
    launcher = AtOnce(probe)  # type: ignore[arg-type]
    return as_a_trial(asked, study, folder, executor=LOCAL, say=said.append, launcher=launcher)


def test_a_point_known_by_prediction_only_is_probed_as_the_trials_were_before_it_is_promoted(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=1)
    points, said = read_result(tmp_path, "law").foreseen, list[str]()
    assert joined(tmp_path, "p1", lawful.at_once, said) == "1"
    assert said[0].startswith("p1 is known by prediction only (")
    assert said[0].endswith("so it is probed first, as trial 1")
    assert re.fullmatch(r"trial 1: .* GB, .* s a step", said[1])
    now = trials_of(load_study(tmp_path, "law"))[1]
    assert now.changes == points[0].changes
    assert choose(trials_of(load_study(tmp_path, "law")), "1", SPEED) == now
    requests = [ProbeRequest.read(tmp_path / f"probes/law/trial-000{n}-1/request.json") for n in (0, 1)]
    assert replace(requests[0], folder=Path(), values={}) == replace(requests[1], folder=Path(), values={})
    names = [point.name for point in record_of(load_study(tmp_path, "law")).points_ahead]
    assert names == [point.name for point in points[1:]]  # the others keep their names


def test_the_leanest_is_probed_where_only_a_prediction_says_that_it_is(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=1)
    expected = min(read_result(tmp_path, "law").foreseen, key=lambda point: point.device_used_bytes)
    said: list[str] = []
    assert joined(tmp_path, "leanest", lawful.at_once, said) == "leanest"
    assert said[0].startswith(f"{expected.name} is known by prediction only")
    assert choose(trials_of(load_study(tmp_path, "law")), "leanest", SPEED).number == len(said) // 2
    assert joined(tmp_path, "leanest", lawful.at_once, said := []) == "leanest"
    assert said == []


def killed_once(request_path: str) -> None:
    """The first attempt of a probe is lost, and so is the second: nothing is told."""
    request = ProbeRequest.read(Path(request_path))
    found = ProbeResult(status=ProbeStatus.LOST, device=request.device, reason="killed", cause=Cause.KILLED, wall_s=0.1)
    write_json(request.answer_path, found.to_json())


def test_a_point_whose_probe_was_killed_is_the_same_trial_the_next_time(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=1)
    with pytest.raises(EnvironmentFault, match="the probe of p1 was killed; run the same command again"):
        joined(tmp_path, "p1", killed_once, [])
    assert joined(tmp_path, "p1", lawful.at_once, []) == "1"


def test_a_trial_needs_no_probe_and_a_study_without_its_probes_says_what_to_do(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=1)
    assert [joined(tmp_path, name, killed_once, []) for name in ("0", "best", "nonsense")] == ["0", "best", "nonsense"]
    with pytest.raises(ConfigError, match="`autofit promote` probes a point of the front that no probe has reached"):
        choose(trials_of(load_study(tmp_path, "law")), "p1", SPEED)
    shutil.rmtree(tmp_path / "probes")
    with pytest.raises(ConfigError, match="run its `autofit search` again"):
        joined(tmp_path, "p1", lawful.at_once, [])
