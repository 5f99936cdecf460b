"""The recipes of public threads: they can be read and judged, and one runs from its file to the table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from autofit.errors import ConfigError
from autofit.fakegpu.specs import gpu_spec
from autofit.units import parse_bytes
from experiments.field import __main__ as field
from experiments.field import estimating, judge, table
from experiments.field.threads import SEED, Thread, read_seeds, read_threads

THREADS = read_threads()


def named(name: str) -> Thread:
    return next(thread for thread in THREADS if thread.name == name)


def test_each_thread_says_its_source_and_what_is_assumed_so_that_another_can_judge_it() -> None:
    for thread in THREADS:
        assert thread.url.startswith("https://github.com/")
        assert all((thread.said, thread.solved_by, thread.assumed, thread.date))
        assert thread.trainer in ("grpo", "sft", "dpo", "reward", "hf")
        room = parse_bytes(thread.target_vram) if thread.target_vram else 0
        assert room <= gpu_spec(thread.gpu).capacity_bytes


def test_enough_threads_count_and_every_need_is_among_them() -> None:
    counted = [thread for thread in THREADS if thread.counts]
    assert len(counted) >= 20
    assert {thread.need for thread in counted} == {"A", "B", "C", "D", "E"}


def test_a_thread_without_a_claim_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "- {name: a, need: D, symptom: {slow: true}, accepted: [], trainer: sft}\n", "utf-8"
    )
    with pytest.raises((ConfigError, TypeError)):
        read_threads(tmp_path)


def test_a_symptom_is_predicted_only_where_the_estimate_shows_it() -> None:
    memory, share = named("litgpt-781-a100"), named("trl-2751-l4")
    assert judge.symptom_predicted(memory, {"fits": False}) is True
    assert judge.symptom_predicted(memory, {"fits": True}) is False
    assert judge.symptom_predicted(memory, {"error": "failed"}) is None
    assert judge.symptom_predicted(read_seeds()[0], {"fits": True}) is None  # a field note is timed only
    assert judge.symptom_predicted(share, {"fits": True, "rollout_s": 9.0, "step_s": 10.0}) is True
    assert judge.symptom_predicted(share, {"fits": True, "rollout_s": 5.0, "step_s": 10.0}) is False
    assert judge.symptom_predicted(share, {"fits": False, "rollout_s": None, "step_s": None}) is False


def test_a_fix_must_be_among_the_first_three_pieces_and_go_the_accepted_way() -> None:
    batch, paged = named("litgpt-781-a100"), named("openrlhf-698-a100")
    own = {"per_device_train_batch_size": 4}
    other, smaller = {"lora_r": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 64}
    assert judge.fix_found(batch, {"advice": [other, smaller], "own": own}) == smaller
    assert judge.fix_found(batch, {"advice": [other, other, other, smaller], "own": own}) is None
    assert judge.fix_found(batch, {"advice": [{"per_device_train_batch_size": 8}], "own": own}) is None
    assert judge.fix_found(paged, {"advice": [{"optim": "paged_adamw_8bit"}]}) is not None
    assert judge.fix_found(paged, {"advice": [{"optim": "adamw_8bit"}]}) is None


def test_a_slow_step_asks_for_what_makes_it_faster_and_a_full_card_for_what_fits() -> None:
    said = {"changes": [{"changes": {"dtype": "bfloat16"}}], "faster": [{"changes": {"use_vllm": True}}]}
    assert estimating.pieces(said, slow=True) == [{"use_vllm": True}]
    assert estimating.pieces(said, slow=False) == [{"dtype": "bfloat16"}]
    assert estimating.pieces({"changes": []}, slow=True) == []


def test_the_newer_name_of_checkpointing_is_the_same_fix() -> None:
    assert judge.fix_found(named("openrl-99-a100"), {"advice": [{"activation_checkpointing": True}]}) is not None


def test_field_notes_are_timed_only_and_their_model_is_found_from_anywhere() -> None:
    seeds = read_seeds()
    assert {"000_before", "002_recommended", "004_7b"} <= {seed.name for seed in seeds}
    assert len([thread for thread in THREADS if thread.counts]) + len(seeds) == 40
    assert all(not seed.accepted and seed.need == SEED for seed in seeds)
    (d16,) = {str(seed.recipe["model_name_or_path"]) for seed in seeds if seed.name.startswith("002")}
    assert (Path(d16) / "config.json").is_file()


def test_the_table_says_how_long_verdicts_and_advice_took_and_beside_what_load() -> None:
    thread = named("litgpt-781-a100")
    slow: dict[str, object] = {
        "fits": False, "least_capacity_bytes": 50, "capacity_bytes": 40, "advice": [], "verdict_s": 31.0,
        "advised_s": 52.0, "load": 0.5, "advice_time_s": 20.0, "cpu_s": 9.0,
    }  # fmt: skip
    quick = {**slow, "verdict_s": 4.0, "advised_s": 20.0, "load": 9.0}
    found = table.times([slow, quick, {"fits": True}])
    assert found == [
        "Seconds of 2 cold commands, nothing kept (load 0.5 to 9 when each began): verdict 31 in the middle, 31 at "
        "worst; all advice 52, 52 at worst."
    ]
    assert table.times([{"fits": True}]) == []
    assert "| 31.0 | 52.0 | 9.0 |" in table.row(thread, slow)


def test_ranks_without_sharding_are_predicted_with_ddps_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def estimate(recipe: object, **options: object) -> None:
        asked.update(options)
        raise ConfigError("asked")

    monkeypatch.setattr("autofit.estimate", estimate)
    for thread in (named("trl-2972-h20"), named("trl-876-a100")):
        with pytest.raises(ConfigError, match="asked"):
            estimating.answer(thread)
        expected = ("4xh200", 4) if thread.ranks == 4 else ("a100-40gb", None)
        assert (asked["gpu"], asked["num_processes"]) == expected
    assert "| 4xh200 |" in table.row(named("trl-2972-h20"), {"error": "none"})


@pytest.mark.parametrize("stale", [True, False])
def test_a_refusal_of_todays_code_is_not_hidden_by_what_older_code_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    kept = tmp_path / "results" / "litgpt-781-a100.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"fits": False, "capacity_bytes": 9, "autofit": "0"}))
    monkeypatch.setattr(field, "is_stale", lambda _: stale)
    monkeypatch.setattr(field, "estimate", lambda *_, **__: {"error": "refused", "wall_s": 0.0, "cpu_s": 0.0})
    monkeypatch.setattr("sys.argv", ["field", "--only", kept.stem, "--results", str(kept.parent)])
    field.main()
    assert ("fits" in json.loads(kept.read_text())) is not stale


@pytest.mark.usefixtures("warm")
def test_a_thread_runs_from_its_recipe_to_its_row(tmp_path: Path) -> None:
    thread = replace(
        named("litgpt-781-a100"), gpu="t4", prompt_tokens=24,
        recipe={
            "model_name_or_path": str(tiny.write_model(tmp_path / "model")), "per_device_train_batch_size": 2,
            "bf16": False, "max_length": 24,
        },
        symptom={"fits": True},
    )  # fmt: skip
    answer = estimating.answer(thread, advice_s=0.0)
    assert judge.symptom_predicted(thread, answer) is True
    assert answer["own"] == {"per_device_train_batch_size": 2}
    assert f"| [{thread.name}]({thread.url}) |" in table.table([thread], {thread.name: answer})
