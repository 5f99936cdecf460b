"""Host costs that are kept between commands: whose count, and what a real probe corrects."""

from dataclasses import replace
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.fakegpu import HostCosts
from autofit.hardware import calibration
from autofit.probing.result import ProbeResult, ProbeStatus

MEASURED = ProbeResult(status=ProbeStatus.FIT, device="cuda", update_s=(2.0, 2.0), rollout_s=(9.0, 3.0, 3.0),
                       device_name="NVIDIA L4")  # fmt: skip
PREDICTED = ProbeResult(status=ProbeStatus.FIT, device="sim:l4", update_s=(1.0,), rollout_s=(2.0,))


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
    costs = calibration.fit_card("sim:l4", predicted=PREDICTED, measured=MEASURED)
    assert costs == replace(own, gpu_slowdown=2.0, launch_s=own.launch_s * 1.5,
                            backward_launch_s=own.backward_launch_s * 1.5, view_s=own.view_s * 1.5)  # fmt: skip
    found, source = calibration.host_costs("sim:l4")
    assert found == costs
    assert "fitted to a probe on NVIDIA L4" in source
    assert calibration.host_costs("sim:h100") == (None, calibration.PUBLISHED)


def test_a_probe_without_seconds_corrects_nothing() -> None:
    silent = replace(MEASURED, update_s=(), rollout_s=())
    assert calibration.fit_card("sim:l4", predicted=PREDICTED, measured=silent) is None
    assert calibration.found_path("sim:l4") is None
