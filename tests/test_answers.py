"""Answers of probes: which is final, and what is read of a torn one; a log does not fill the disk."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from autofit import files
from autofit.files import keep_small, write_json
from autofit.probing import job
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import lives, note_of


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": "great"}', "\x00" * 100])
def test_an_answer_that_cannot_be_read_is_a_lost_probe(tmp_path: Path, text: str) -> None:
    (tmp_path / "answer.json").write_text(text)
    for name in ("job.json", "started.json"):
        (tmp_path / name).write_text("{torn")
    found = Launcher().result(tmp_path)
    assert found is not None
    assert found.status is ProbeStatus.LOST
    assert found.was_killed  # so it is probed again


def test_a_log_that_grows_without_end_is_cut_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_LOG_BYTES", 3000)
    monkeypatch.setattr(files, "_KEPT_BYTES", 1000)
    path = tmp_path / "probe.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"first\n" + b"x" * 5000)
        keep_small([path, tmp_path / "gone.log"])
        log.write(b"last\n")
    text = path.read_text()
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "left out" in text
    assert len(text) < 1200


def test_a_final_answer_is_read_at_once_and_no_other_while_the_job_lives(tmp_path: Path) -> None:
    answer = ProbeResult(status=ProbeStatus.FIT, device="cpu")
    write_json(tmp_path / "started.json", note_of(os.getpid()))
    write_json(tmp_path / "answer.json", answer.to_json())
    assert Launcher().result(tmp_path) is None
    write_json(tmp_path / "answer.json", answer.to_json() | {"wall_s": 0.1})
    found = Launcher().result(tmp_path)
    assert found is not None
    assert found.status is ProbeStatus.FIT


def test_the_answer_of_a_killed_job_is_not_that_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(request: ProbeRequest, env: dict[str, str]) -> int:
        return subprocess.Popen(["sh", "-c", "kill -9 $$"]).pid

    monkeypatch.setattr(job, "_start_cold", killed)
    request = ProbeRequest(folder=tmp_path, trainer="sft", values={}, device="cpu", limit_bytes=None, deadline_s=60,
                           worst_case=tmp_path, cwd=tmp_path, slots=("cpu-0",), server_socket=None)  # fmt: skip
    write_json(request.request_path, request.to_json())
    write_json(request.answer_path, ProbeResult(status=ProbeStatus.FIT, device="cpu").to_json())
    job.run_probe(str(request.request_path))
    found = Launcher().result(tmp_path)
    assert found is not None
    assert found.status is ProbeStatus.LOST


def test_a_step_of_the_clock_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    note = note_of(os.getpid())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert lives(note)
    assert not lives(note | {"birth": "another boot 1"})
    assert not lives(note | {"pid": 2**22})


def test_a_note_that_names_no_process_is_of_none_that_lives() -> None:
    assert not any(lives(wrong) for wrong in ({}, {"pid": "x"}, {"pid": -1}, {"pid": 2**22}, {"pid": os.getpid()}))
