"""The rows that tools' own authors measured: two halves, and no error where the lengths are not known."""

from __future__ import annotations

import json
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers.modeling_utils as modeling

from experiments.frontends.peaks import predicting, table
from experiments.frontends.peaks.mixed import draw, packs
from experiments.frontends.peaks.predicting import with_deepspeed
from experiments.frontends.peaks.rows import KINDS, Row, read_rows
from experiments.frontends.peaks.then import NAME, loading
from experiments.frontends.peaks.whole_run import Event, Traced, grown, least

GIB = 2**30
ROW = Row(
    name="ms-swift/a", tool="ms-swift", version="1", source="a.sh", date="2025-01-01", measured_gib=10.0,
    half_digit_gib=0.5, kind="reserved or nvidia-smi", file="examples/a.sh", longest_tokens=(100, 200),
)  # fmt: skip


def answer(fewest: float, most: float) -> dict[str, Any]:
    ends = {"fewest": fewest, "most": most}
    return {end: {"allocated": 0, "reserved": 0, "used": int(used * GIB), "step_s": 1.0} for end, used in ends.items()}


def test_every_row_has_a_source_and_the_odd_half_is_kept_out_by_its_path() -> None:
    rows = read_rows()
    assert len({row.name for row in rows}) == len(rows) > 100
    for row in rows:
        assert all((row.source, row.date, row.measured_gib > 0, row.kind in KINDS, row.file or row.recipe))
        assert row.kept_out is bool(zlib.crc32((row.file or row.name).encode()) % 2)


@pytest.mark.parametrize(("fewest", "most", "said"), [(9.9, 10.0, "+0.0% (rounds to it)"), (9.0, 12.0, "inside"),
                                                      (12.0, 13.0, "outside")])  # fmt: skip
def test_a_row_has_an_error_only_where_its_lengths_decide_nothing(fewest: float, most: float, said: str) -> None:
    found = answer(fewest, most)
    assert table.compared(ROW, found) is (fewest > 0.98 * most)
    assert said in table.line(ROW, found)
    assert not table.compared(replace(ROW, longest_tokens=None), found)


def test_a_row_of_mixed_samples_has_an_error_and_one_that_a_race_decides_has_none() -> None:
    mixed = replace(ROW, samples=((500, 150.0, 80.0, 20, 200),))
    assert table.compared(mixed, {"most": answer(9.0, 12.0)["most"]})
    assert "100 to 200, mixed" in table.line(mixed, {"most": answer(9.0, 12.0)["most"]})
    raced = replace(mixed, undecided="a broadcast: nobody knows how far it is")
    assert not table.compared(raced, answer(10.0, 10.0))
    assert "not compared: a broadcast |" in table.line(raced, answer(10.0, 10.0))


def test_lengths_are_drawn_from_each_dataset_between_its_ends_and_the_same_each_time() -> None:
    parts = ((900, 3234.4, 2547.5, 91, 19548), (100, 58.9, 20.3, 32, 131))
    drawn = draw(parts, count=500, most=2048)
    assert drawn == draw(parts, count=500, most=2048)
    assert len(drawn) == 500
    assert 32 <= min(drawn) < 91
    assert 1900 < max(drawn) <= 2048
    alone = draw(parts[1:], count=2000, most=None)
    assert abs(sum(alone) / len(alone) - 58.9) < 3


def test_packed_rows_are_filled_by_the_longest_first_and_not_padded() -> None:
    parts = ((112958, 465.3, 320.1, 36, 6106),)
    rows = packs(parts, count=64, most=8192, together=128)
    assert rows == packs(parts, count=64, most=8192, together=128)
    assert len(rows) == 64
    assert max(rows) == 8192
    assert 8100 < min(rows) < 8192
    assert packs(((9, 5.0, 0.0, 5, 5),), count=3, most=12, together=4) == (10, 10, 10)


def test_a_whole_run_is_played_at_any_length_and_holds_the_blocks_of_each_new_longest_sample() -> None:
    part = (Event(0, 0.0, 2.0**20), Event(0))  # 1 MiB a token, which no smaller block serves
    traced = Traced(([], []), (part, part, ()))
    lengths = draw(((9, 60.0, 20.0, 20, 100),), count=160, most=100)
    reserved = dict(grown(traced, lengths))
    assert list(reserved) == [1, 5, 10]
    records: list[int] = []
    for tokens in lengths:
        if tokens > max(records, default=0):
            records.append(tokens)
    assert reserved[10] == round(sum(tokens + tokens % 2 for tokens in records) / 1024, 2)
    assert least(traced, lengths)["least"] == round(max(records) / 1024, 3)  # without the blocks of shorter ones


def test_rows_of_axolotl_have_the_allocator_settings_of_their_day_and_its_reserved_bytes() -> None:
    rows = {row.name: row for row in read_rows()}
    rounded = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:16"}
    assert rows["axolotl/plano/plano-4b-qlora"].changes["env"] == rounded
    assert rows["axolotl/plano/plano-4b-qlora"].kind == "reserved"
    assert rows["axolotl/devstral/devstral-small-qlora"].kind == "not said"  # before the logs had the key
    assert rows["axolotl/llama-2/lora"].changes["env"] is None


def test_what_is_known_of_a_difference_stands_beside_the_row() -> None:
    assert table.line(replace(ROW, why="logits that it does not make"), answer(10.0, 10.0)).endswith(
        "| logits that it does not make |"
    )


def test_a_row_that_was_refused_counts_as_not_read() -> None:
    text = table.table([ROW], {ROW.name: {"error": "ConfigError: a.sh, read as a file of ms-swift: awq is not read"}})
    assert "not read: ms-swift: awq is not read" in text
    assert f"| {table.METHODS['ms-swift']} | {'odd, kept out' if ROW.kept_out else 'even'} | 1 | 0 | 0 | - |" in text


def test_seconds_are_compared_by_rank() -> None:
    assert table.ranks([30.0, 10.0, 30.0, 20.0]) == [3.0, 0.5, 3.0, 1.5]
    rows = [replace(ROW, name=f"ms-swift/{n}", longest_tokens=(9, 9), measured_step_s=float(n + 1)) for n in range(5)]
    answers = {row.name: answer(10.0, 10.0) for row in rows}
    for row in rows:
        answers[row.name]["most"]["step_s"] = (row.measured_step_s or 0) ** 2
    assert "| 1.00 of 5 |" in table.table(rows, answers)


def test_rows_of_2023_that_pefts_code_of_then_decides_are_of_that_code() -> None:
    rows = {row.name: row for row in read_rows()}
    assert rows["axolotl/llama-2/lora"].trainer == rows["qwen/LoRA (emb) 7B, 512 tokens"].trainer == NAME
    assert rows["axolotl/llama-2/lora"].changes["gradient_checkpointing_kwargs"] == {"use_reentrant": True}
    assert rows["qwen/LoRA 7B, 512 tokens"].recipe["shifted_logits"] == "half"


def test_a_row_of_before_transformers_4_50_has_each_weight_loaded_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("autofit.estimate", lambda _, **words: asked.append(words))
    (tmp_path / "model").mkdir()
    row = replace(next(row for row in read_rows() if row.name == "qwen/LoRA 7B, 512 tokens"), trainer="")
    for date in (row.date, predicting.WARMED):
        predicting.estimate(replace(row, date=date), 512, tmp_path, tmp_path)
    assert [(words["changes"], words["trainer"]) for words in asked] == [({"weights_alone": True}, NAME), ({}, "hf")]
    taken = modeling.caching_allocator_warmup
    with loading(weights_alone=True):
        assert modeling.caching_allocator_warmup is not taken
    with loading(weights_alone=False):
        assert modeling.caching_allocator_warmup is taken


def test_a_script_of_ms_swift_has_the_deepspeed_config_of_its_day(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    config, script = tmp_path / "swift" / "llm" / "zero3.json", tmp_path / "run.sh"
    config.parent.mkdir(parents=True)
    git("init", "-q")
    for overlap in (True, False):
        config.write_text(json.dumps({"optimizer": {}, "zero_optimization": {"stage": 3, "overlap_comm": overlap}}))
        git("add", "-A")
        git("commit", "-q", "-m", "a")
    script.write_text("swift sft --model a --deepspeed zero3 \\\n --max_length 8\n")
    with_deepspeed(script, "HEAD~1", tmp_path)
    assert script.read_text() == f"swift sft --model a --deepspeed {tmp_path}/zero3.json \\\n --max_length 8\n"
    written = json.loads((tmp_path / "zero3.json").read_text())
    assert written == {"zero_optimization": {"stage": 3, "overlap_comm": True}}
