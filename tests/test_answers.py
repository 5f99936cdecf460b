"""An answer of a probe that its worker did not write is refused; a log does not fill the disk."""

import json
import os
import time
from pathlib import Path

import pytest

from autofit.files import write_json
from autofit.probing import log_size
from autofit.probing.answers import Seal, refuse_other_answers
from autofit.probing.births import lives, note_of
from autofit.probing.launch import Launcher
from autofit.probing.log_size import keep_small
from autofit.probing.result import ProbeResult, ProbeStatus


def test_only_a_whole_answer_with_the_token_stays(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    good = ProbeResult(status=ProbeStatus.FIT, device="cpu").to_json()
    refuse_other_answers(path, "t")  # there is none
    for text in ("", "{", "[1]", "null", json.dumps(good), json.dumps(good | {"token": "x"}), '{"token": "t"}',
                 json.dumps(good | {"token": "t", "status": "great"})):  # fmt: skip
        path.write_text(text)
        refuse_other_answers(path, "t")
        assert not path.exists(), text
    path.write_text(json.dumps(good | {"token": "t"}))
    refuse_other_answers(path, "t")
    assert path.exists()


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
    monkeypatch.setattr(log_size, "MOST_BYTES", 3000)
    monkeypatch.setattr(log_size, "_KEPT_BYTES", 1000)
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


def test_a_final_answer_is_believed_at_once_and_a_forged_one_not_while_the_job_lives(tmp_path: Path) -> None:
    seal, answer = Seal(), ProbeResult(status=ProbeStatus.FIT, device="cpu", wall_s=0.1).to_json()
    write_json(tmp_path / "started.json", note_of(os.getpid()) | seal.shown)
    for forged in (answer, answer | {"seal": "x"}, answer | seal.shown):
        write_json(tmp_path / "answer.json", forged)
        assert Launcher().result(tmp_path) is None
    write_json(tmp_path / "answer.json", seal.put_on(answer))
    found = Launcher().result(tmp_path)
    assert found is not None
    assert found.status is ProbeStatus.FIT


def test_a_step_of_the_clock_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    note = note_of(os.getpid())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert lives(note | {"create_time": 5.0})  # as the clock said before it was set
    assert not lives(note | {"birth": "another boot 1"})
    assert not lives(note | {"pid": 2**22})


def test_notes_of_an_earlier_version_are_understood() -> None:
    note = {key: value for key, value in note_of(os.getpid()).items() if key != "birth"}
    assert lives(note)
    assert not lives(note | {"create_time": 0.0})
    assert not any(lives(wrong) for wrong in ({}, {"pid": "x"}, {"pid": -1}, {"pid": 1, "create_time": "x"}))
