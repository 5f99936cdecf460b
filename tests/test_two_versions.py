"""Two versions of autofit on one folder: what a newer one wrote is read as far as known, or refused in a line."""

import json
import os
from pathlib import Path

import pytest

from autofit.errors import AutofitError
from autofit.files import read_json, write_json
from autofit.probing.launch import Launcher, is_alive
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.tuning.record import StudyRecord


def test_unknown_fields_of_a_newer_version_are_passed_over() -> None:
    record = StudyRecord(fingerprint="f").to_json() | {"of_tomorrow": 1}
    assert StudyRecord.from_json(record).fingerprint == "f"
    answer = ProbeResult(status=ProbeStatus.FIT, device="cpu").to_json() | {"of_tomorrow": {"x": 1}}
    assert ProbeResult.from_json(answer).status is ProbeStatus.FIT


def test_a_request_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    request = ProbeRequest(folder=tmp_path, trainer="grpo", values={}, device="cpu", limit_bytes=1,
                           worst_case=tmp_path / "w")  # fmt: skip
    write_json(request.request_path, request.to_json() | {"of_tomorrow": 1})
    assert ProbeRequest.read(request.request_path) == request


def test_a_status_or_a_note_of_a_newer_version_is_a_lost_probe_and_no_traceback(tmp_path: Path) -> None:
    write_json(tmp_path / "started.json", {"pid": os.getpid(), "birth": {"of": "tomorrow"}})
    assert not is_alive(tmp_path)
    write_json(tmp_path / "answer.json", {"status": "of tomorrow", "device": "cpu"})
    found = Launcher().result(tmp_path)
    assert found is not None
    assert found.status is ProbeStatus.LOST


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 10_000, "\x00"])
def test_a_torn_file_of_our_own_is_one_line_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "final.json").write_text(text)
    with pytest.raises(AutofitError, match=r"final\.json must hold a JSON object and does not: delete it"):
        read_json(tmp_path / "final.json")
    (tmp_path / "final.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path / "final.json") == {"a": 1}
