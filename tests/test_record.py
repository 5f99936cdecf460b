"""What is kept with a study: typed, the same after a round trip, and readable from studies of before."""

import json
from dataclasses import fields, replace
from pathlib import Path

import optuna
import pytest

from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import BatchKeys
from autofit.tuning.comparison import Comparison, Pair
from autofit.tuning.record import (
    StudyRecord,
    keep_comparison,
    keep_confirmation,
    keep_proof,
    keep_record,
    kept_proof,
    record_of,
)
from autofit.tuning.study import load_study, open_storage, study_names, tell, trials_of

FIT = ProbeResult(status=ProbeStatus.FIT, device="cpu", device_used_bytes=7, step_s=(1.0,))
RECORD = StudyRecord(
    keys=BatchKeys(length="max_length"), compared=("loss_type",), command="trl sft --config", trains_on_data=False,
    fingerprint="abc", owner="ann@node7", used="2026-11-21T10:00:00+00:00", card="a100-80gb", device="cpu",
    target_bytes=100, headroom_bytes=2, trainer="grpo", values={"lora_r": 8}, resolved={"lora_r": 8, "beta": 0.0},
    recipe_name="run", foreign={"tool": "Axolotl"},
    effective_batch_size=16, cwd=Path("/somewhere"), allow="approximate", goal="memory",
    sampler="tpe", baseline_predicted={"step_s": 1.5}, least_floor_bytes=5.0, screened=3, relaxed="the recipe tier",
    outside={"trial": 0}, sensitivity={"trial": 0}, predicted={"candidates": 1}, tiers={"dtype": "recipe"},
    left_out={"optim": "no card"}, other_names={"gradient_checkpointing": "activation_checkpointing"},
    spelling="in the keys of TRL 1.16.0", space="grpo.yaml", traits={"spare": {"less": ["a"], "proof": "harmless"}},
    foreseen=({"tier": "neutral", "changes": {"lora_r": 4}, "step_s": 1.0, "device_used_bytes": 5},),
)  # fmt: skip
COMPARISON = Comparison(pairs=(Pair(baseline_s=2.0, finalist_s=1.0),), searched=Pair(baseline_s=2.5, finalist_s=1.0))


def new_study(folder: Path, name: str = "s") -> optuna.Study:
    storage = open_storage(folder, create=True)
    return optuna.create_study(study_name=name, storage=storage, directions=["minimize", "minimize"])


def test_a_record_is_the_same_when_the_study_is_opened_again(tmp_path: Path) -> None:
    keep_record(new_study(tmp_path), RECORD)
    assert record_of(load_study(tmp_path, "s")) == RECORD
    assert StudyRecord.from_json(json.loads(json.dumps(RECORD.to_json()))) == RECORD
    assert all(getattr(RECORD, f.name) != getattr(StudyRecord(), f.name) for f in fields(StudyRecord))
    assert RECORD.rule == {"goal": "memory", "target_bytes": 98}


def test_only_what_differs_is_written_as_each_attribute_is_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = new_study(tmp_path)
    keep_record(study, RECORD)
    written: list[str] = []
    monkeypatch.setattr(optuna.Study, "set_user_attr", lambda self, key, value: written.append(key))
    keep_record(study, replace(RECORD, screened=4))
    assert written == ["screened"]


def test_a_study_written_before_there_were_records_is_opened_with_its_confirmation_and_its_proof(
    tmp_path: Path,
) -> None:
    study = new_study(tmp_path)
    before = {
        "fingerprint": "abc", "used": "2026-11-20", "device": "sim:t4", "target_bytes": 100, "headroom_bytes": 2,
        "values": {"lora_r": 8}, "trainer": "sft", "cwd": "/somewhere", "resolved": {"lora_r": 8}, "goal": "speed",
        "proof 0": {"verdict": "baseline"}, "of another time": 1,
    }  # fmt: skip
    for key, value in before.items():
        study.set_user_attr(key, value)
    trial = study.ask()
    for key, value in {"tier": "recipe", "changes": {"lora_r": 4}, "yaml_changes": {"lora_r": 4, "x": None}}.items():
        trial.set_user_attr(key, value)
    tell(study, 0, FIT, target_bytes=98)
    long = {k: v for k, v in FIT.to_json().items() if k != "cause"}
    study.set_user_attr("confirmation 0", long)

    study = load_study(tmp_path, None)
    record = record_of(study)
    assert (record.trainer, record.limit_bytes, record.cwd) == ("sft", 98, Path("/somewhere"))
    assert (record.screened, record.sensitivity) == (0, None)
    (found,) = trials_of(study)
    assert (found.tier, found.changes, found.yaml_changes) == ("recipe", {"lora_r": 4}, {"lora_r": 4, "x": None})
    assert (found.confirmed, found.comparison) == (FIT, None)
    assert kept_proof(study, 0) == {"verdict": "baseline"}
    assert kept_proof(study, 1) is None


def test_what_is_kept_of_a_trial_is_kept_with_the_study_as_the_trial_is_finished(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    keep_record(study, RECORD)
    study.ask()
    tell(study, 0, FIT, target_bytes=None)
    keep_confirmation(study, 0, replace(FIT, step_s=(2.0,)))
    keep_comparison(study, 0, COMPARISON)
    keep_proof(study, 0, {"key": "k"})
    study = load_study(tmp_path, "s")
    assert trials_of(study)[0].comparison == COMPARISON
    assert trials_of(study)[0].step_s == 2.0
    assert kept_proof(study, 0) == {"key": "k"}


def test_the_study_used_last_comes_last_and_one_that_is_not_ours_first(tmp_path: Path) -> None:
    keep_record(new_study(tmp_path, "late"), RECORD)
    keep_record(new_study(tmp_path, "early"), replace(RECORD, used="2026-11-01T10:00:00+00:00"))
    new_study(tmp_path, "not ours")
    assert study_names(open_storage(tmp_path)) == ["not ours", "early", "late"]
