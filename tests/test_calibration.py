"""Host costs that are kept between commands: whose count, and what a real probe corrects."""

from dataclasses import replace
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.fakegpu import HostCosts
from autofit.fakegpu.calibrate import save_host_costs
from autofit.hardware import calibration
from autofit.probing.result import ProbeResult, ProbeStatus

MEASURED = ProbeResult(status=ProbeStatus.FIT, device="cuda", update_s=(2.0, 2.0), rollout_s=(9.0, 3.0, 3.0),
                       device_name="NVIDIA L4")  # fmt: skip
PREDICTED = ProbeResult(
    status=ProbeStatus.FIT,
    device="sim:l4",
    update_s=(1.0,),
    rollout_s=(2.0,),
    shares={"update": {"card": 0.97, "host": 0.03}, "rollout": {"card": 0.04, "host": 0.96}},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))


def test_without_a_calibration_the_published_costs_count_and_say_so() -> None:
    assert calibration.host_costs("sim:l4") == (None, calibration.PUBLISHED)
    assert calibration.fingerprint("sim:l4") == ""


def test_doctor_measures_this_host_once_for_every_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--calibrate"]) == 0
    assert "us a kernel" in capsys.readouterr().out
    costs, source = calibration.host_costs("sim:l4")
    assert costs is not None
    assert 1e-7 < costs.launch_s < 1e-3
    assert "measured on this host's CPU" in source
    assert calibration.fingerprint("sim:h100") == calibration.fingerprint("sim:l4") != ""


def test_a_real_probe_corrects_its_card_alone() -> None:
    own = HostCosts()
    costs = calibration.fit_card("sim:l4", predicted=PREDICTED, measured=MEASURED).costs
    assert costs == replace(
        own, gpu_slowdown=2.0, launch_s=own.launch_s * 1.5, recorded_launch_s=own.recorded_launch_s * 1.5,
        backward_launch_s=own.backward_launch_s * 1.5, view_s=own.view_s * 1.5,
    )  # fmt: skip
    found, source = calibration.host_costs("sim:l4")
    assert found == costs
    assert "fitted to a probe on NVIDIA L4" in source
    assert calibration.host_costs("sim:h100") == (None, calibration.PUBLISHED)


def test_a_probe_without_seconds_corrects_nothing() -> None:
    silent = replace(MEASURED, update_s=(), rollout_s=())
    assert calibration.fit_card("sim:l4", predicted=PREDICTED, measured=silent).costs is None
    assert calibration.found_path("sim:l4") is None


def test_a_correction_replaces_the_last_one() -> None:
    """A step that the card bounds is predicted with the last correction, so each search finds the same one."""
    for _ in range(4):
        now = calibration.host_costs("sim:l4")[0] or HostCosts()
        predicted = replace(PREDICTED, update_s=(1.0 * now.gpu_slowdown,), rollout_s=())
        costs = calibration.fit_card("sim:l4", predicted=predicted, measured=MEASURED).costs
        assert costs is not None
        assert costs.gpu_slowdown == pytest.approx(2.0)


@pytest.mark.parametrize(
    "shares", [{"update": {"card": 0.3, "host": 0.7}}, {"rollout": {"card": 0.5, "host": 0.5}}, {}]
)
def test_a_step_that_the_host_bounds_corrects_no_card(shares: dict[str, dict[str, float]]) -> None:
    """Its prediction does not move with the card's correction, which once grew from search to search: 9, 20, 37, 76."""
    fitted = calibration.fit_card("sim:l4", predicted=replace(PREDICTED, shares=shares), measured=MEASURED)
    assert fitted.costs is None
    assert "say nothing of the card" in fitted.why
    assert calibration.found_path("sim:l4") is None


@pytest.mark.parametrize(("update_s", "rollout_s", "why"), [(9.1, 3.0, "the card took 9.1 times"),
                                                            (2.0, 90.0, "the host took 45 times")])  # fmt: skip
def test_a_correction_that_cannot_be_is_not_stored(update_s: float, rollout_s: float, why: str) -> None:
    measured = replace(MEASURED, update_s=(update_s,), rollout_s=(rollout_s,))
    fitted = calibration.fit_card("sim:l4", predicted=PREDICTED, measured=measured)
    assert fitted.costs is None
    assert why in fitted.why
    assert calibration.found_path("sim:l4") is None


def test_a_correction_of_an_older_version_which_may_have_multiplied_is_not_read() -> None:
    path = calibration.costs_path().with_name("l4.json")
    save_host_costs(HostCosts(gpu_slowdown=75.8), path, source="fitted to a probe on NVIDIA L4")
    assert calibration.host_costs("sim:l4") == (None, calibration.PUBLISHED)


def test_the_host_is_measured_for_one_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = HostCosts(launch_s=50e-6)
    monkeypatch.setattr("autofit.fakegpu.calibrate.measure_host_costs", lambda: slow)
    assert calibration.launch_s("sim:l4") is None
    assert calibration.measure_for("l4") == 0
    assert calibration.launch_s("sim:l4") == pytest.approx(slow.launch_s)
    assert calibration.host_costs("sim:l4")[0] == slow
    assert calibration.host_costs("sim:h100") == (None, calibration.PUBLISHED)
