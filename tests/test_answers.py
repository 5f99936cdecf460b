"""An answer of a probe that its worker did not write is refused; a log does not fill the disk."""

import json
from pathlib import Path

import pytest

from autofit.probing import log_size
from autofit.probing.answers import refuse_other_answers
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
