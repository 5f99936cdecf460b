"""The front holds no trial that a candidate without a probe is known to dominate."""

from dataclasses import replace
from pathlib import Path

import lawful
import pytest
from search_driver import plan
from test_front_plot import law, legend
from test_frontier import GB, trial

from autofit.api.results import read_result
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.probing.launch import Launcher
from autofit.probing.result import Fidelity, ProbeRequest
from autofit.promotion.promotion import choose
from autofit.tuning.foreseen import Foreseen, common_front
from autofit.tuning.frontier import SPEED
from autofit.tuning.search import FRONT_TRIALS, Plan, Search, open_study
from autofit.tuning.study import FOR_FRONT, load_study


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
    Search(wanted, open_study(wanted), server_socket=None, launcher=Launcher(probe)).run()  # type: ignore[arg-type]
    return wanted


def test_a_candidate_that_dominates_a_trial_takes_its_place_on_the_front() -> None:
    trials = [trial(0, 20.0, 13.2), trial(1, 13.0, 34)]
    ahead = [foreseen(14.0, 12.9), foreseen(35.0, 10.0), foreseen(13.5, 34.5)]
    front, predicted = common_front(trials, ahead)
    assert [t.number for t in front] == [1]
    assert predicted == ahead[:2]
    assert common_front(trials, [])[0] == [trials[1], trials[0]]


def test_a_probed_front_names_what_is_predicted_to_be_ahead_of_it_and_draws_it(tmp_path: Path) -> None:
    searched(tmp_path, lawful.at_once, trials=2)
    found = read_result(tmp_path, "law")
    assert found.foreseen
    both = [(t.step_s or 0, t.device_used_bytes or 0) for t in found.front]
    both += [(f.step_s, f.device_used_bytes) for f in found.foreseen]
    assert not any(a != b and a[0] <= b[0] and a[1] <= b[1] for a in both for b in both)
    assert str(found).count("not probed") == len(found.foreseen)
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
    with pytest.raises(ConfigError, match="no leanest trial: no trial fits yet"):
        choose([], "leanest", SPEED)
