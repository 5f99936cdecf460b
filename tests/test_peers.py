"""The estimators of experiments/peers see the same models, and are told only what they have words for."""

import json
import urllib.request

import pytest

from experiments.kept import newer, patience
from experiments.peers.hub import hub
from experiments.peers.peers import PEERS, CannotSayError
from experiments.peers.rows import Row, read_rows
from experiments.peers.table import error, ours

ROWS = {row.name: row for row in read_rows()}
BY_NAME = {peer.name: peer for peer in PEERS}


def test_rows_round_trip() -> None:
    assert all(Row.from_json(row.to_json()) == row for row in ROWS.values())


def test_the_stand_in_hub_answers_as_the_hub_does() -> None:
    with hub() as address:
        with urllib.request.urlopen(f"{address}/meta-llama/Llama-3.2-3B/resolve/main/config.json") as answer:
            assert json.load(answer)["num_hidden_layers"] == 28
        with urllib.request.urlopen(f"{address}/api/models/gpt2") as answer:
            assert json.load(answer)["safetensors"]["total"] == 124439808


@pytest.mark.parametrize(
    ("peer", "row", "reason"),
    [
        ("torch-preflight", "peft/lora-r32", "LoRA"),
        ("vramcalc", "two/mistral-lora-2", "several cards"),
        ("AgileRL", "peft/full", "training of all weights"),
        ("autofit estimate", "vramcalc/1b-full", "keeps its gradients"),
    ],
)
def test_a_row_beyond_an_estimators_words_is_no_error_of_it(peer: str, row: str, reason: str) -> None:
    with pytest.raises(CannotSayError, match=reason):
        BY_NAME[peer].command(ROWS[row], "bin")


def test_a_context_and_a_margin_are_left_out_where_allocated_bytes_were_measured() -> None:
    parts = {"total_estimated_gb": 10.0, "safety_margin_gb": 2.0, "cuda_overhead_gb": 1.0}
    printed = json.dumps({"memory": parts})
    assert BY_NAME["canifinetune"].read(printed, ROWS["litgpt/llama-2-7b"]).bytes == 7 * 2**30
    assert BY_NAME["canifinetune"].read(printed, ROWS["peft/lora-r32"]).bytes == 8 * 2**30


def test_autofits_own_error_is_of_the_loop_where_the_row_was_one() -> None:
    row = ROWS["peft/full"]
    said = {"autofit fit-check": {"bytes": row.measured_bytes}, "autofit estimate": {"bytes": 2 * row.measured_bytes}}
    assert ours(row, {row.name: said}) == 0.0
    assert error(row, {"cannot": "LoRA"}) is None


def test_an_answer_that_ran_out_of_time_takes_no_older_one_away() -> None:
    made = {"date": "2026-11-30", "autofit": "abc"}
    old, late = {"bytes": 7, "date": "2026-11-01"}, {"error": "no answer", "timed_out": 400, **made}
    assert newer(old, late) == {**old, "asked_again": "2026-11-30, autofit abc: not done after 400 s"}
    assert newer(None, late) == newer({"error": "it failed"}, late) == late
    assert newer(old, {"error": "it failed", **made}) == {"error": "it failed", **made}, "a fault is an answer"
    assert newer(newer(old, late), {"bytes": 8, **made}) == {"bytes": 8, **made}


def test_a_busy_machine_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 9.0, 9.0))
    assert patience(300) == 300
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 0.0, 0.0))
    assert patience(300) == 4.5 * 300
