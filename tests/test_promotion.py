"""Promotion: the tuned YAML runs in TRL's own script, and an interrupted run ends where an uninterrupted one does."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import command_line
import pytest
import tiny
import yaml
from command_line import run

import autofit
from autofit.files import read_json, write_json
from autofit.probing.fork_server import ForkServer
from autofit.tracking.runs import client, experiment_id
from autofit.tuning.study import load_study
from autofit.watching.events import read_progress

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 12


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a real search of 2 probes over the tiny recipe, in which 2 epochs of 6 steps are trained."""
    folder = tmp_path_factory.mktemp("promotion")
    tiny.write_recipe(folder, tiny_model, max_steps=None, num_train_epochs=2, temperature=1.0)
    tiny.write_dataset(folder / "data" / "train.jsonl", rows=12)
    done = run(folder, "search", "run.yaml", "--target-vram", "100MB", "--trials", "2", "--no-confirm", "--json",
               "--device", "cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fidelity"] == "measured"
    assert found["counts"] == {"asked": 2, "fit": 2, "oom": 0, "failed": 0, "lost": 0, "screened": 0}
    assert found["baseline"]["trial"] == 0
    assert found["winner"]["tier"] == "neutral"
    assert set(found["winner"]) >= {"trial", "tier", "changes", "device_used_bytes", "step_s", "completions_per_s",
                                    "speedup", "margin_bytes", "first_step_s"}  # fmt: skip
    return folder


def start(folder: Path, *arguments: str) -> command_line.Started:
    with (folder / "promote.log").open("ab") as log:
        return command_line.start(folder, *arguments, stdout=log, stderr=log)


def progress(folder: Path) -> list[dict[str, float]]:
    paths = list(folder.glob("autofit-studies/promoted/*/progress.jsonl"))
    text = paths[0].read_text() if paths else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 400
    while not any(line["step"] >= step for line in progress(folder)):
        assert time.monotonic() < deadline, (folder / "promote.log").read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_trl_runs_the_tuned_yaml_unchanged_for_a_step(studied: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    done = run(studied, "promote", "best", "--write-only", "--out", "tuned.yaml", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["status"], said["yaml_path"]) == ("written", "tuned.yaml")
    values = yaml.safe_load((studied / "tuned.yaml").read_text())
    assert values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] == 8
    arguments = ["--config", "tuned.yaml", "--max_steps", "1", "--output_dir", str(tmp_path)]
    ending = fork_server.call(
        {"entry": "offline_training:trl_grpo", "argument": json.dumps(arguments), "cwd": str(studied), "env": {},
         "log": str(tmp_path / "log"), "deadline_s": 300}
    )  # fmt: skip
    assert ending.exit_code == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.thorough
def test_interrupted_twice_and_resumed_it_ends_as_if_it_never_was(studied: Path, tmp_path: Path) -> None:
    whole = run(studied, "promote", "0", "--json")
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout.splitlines()[-1])
    reference = progress(studied)
    assert expected["steps"] == STEPS  # 2 epochs x 12 prompts / 2 prompts a step

    assert (
        run(studied, "promote", "0", "--json").stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    )  # done is done
    for path in studied.glob("autofit-studies/promoted/*"):
        path.rename(tmp_path / path.name)
    (studied / "out").rename(tmp_path / "out")

    first = start(studied, "promote", "0")
    wait_for_step(studied, 2)
    first.send_signal(signal.SIGINT)
    assert first.wait(timeout=300) == 130
    second = start(studied, "promote", "0")
    wait_for_step(studied, 7)  # in the second epoch
    request = next(studied.glob("autofit-studies/promoted/*/started.json"))
    (request.parent / "stop").touch()
    second.wait(timeout=300)
    third = run(studied, "promote", "0", "--json")
    assert third.returncode == 0, third.stderr
    final = json.loads(third.stdout.splitlines()[-1])
    assert (final["steps"], final["final_loss"]) == (expected["steps"], expected["final_loss"])
    resumed = progress(studied)
    assert [line["step"] for line in resumed] == list(range(1, STEPS + 1))
    for ours, theirs in zip(resumed, reference, strict=True):
        assert (ours["loss"], ours["reward"], ours["grad_norm"]) == (
            theirs["loss"],
            theirs["reward"],
            theirs["grad_norm"],
        )


@pytest.mark.parametrize(
    ("trainer", "changes"), [("sft", {"shuffle_dataset": True}),
                             pytest.param("dpo", {"precompute_ref_log_probs": True}, marks=pytest.mark.slow),
                             pytest.param("reward", {}, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_another_trainers_run_stopped_after_a_step_ends_as_if_it_never_was(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, trainer: str, changes: dict[str, object]
) -> None:
    path = tiny.write_offline_recipe(trainer, tmp_path, tiny_model, num_train_epochs=2, max_steps=-1, **changes)
    values = yaml.safe_load(path.read_text())
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    expected = _trained(whole, trainer, values, fork_server)
    assert expected is not None
    assert expected["steps"] == 6  # 2 epochs x 24 samples / 8 a step
    halves.mkdir()
    (halves / "stop").touch()
    assert _trained(halves, trainer, values, fork_server) is None
    assert [line["step"] for line in read_progress(halves)] == [1]
    (halves / "stop").unlink()
    final = _trained(halves, trainer, values, fork_server)
    assert final is not None
    assert (final["steps"], final["final_loss"], final["first_reward"]) == (6, expected["final_loss"], None)
    same = ("step", "loss", "grad_norm", "learning_rate")
    ours, theirs = ([[line[key] for key in same] for line in read_progress(f)] for f in (halves, whole))
    assert ours == theirs
    assert all(float(str(line["samples_per_s"])) > 0 for line in read_progress(halves))
    assert (halves / "out" / "adapter_model.safetensors").exists()


def _trained(folder: Path, trainer: str, values: dict[str, object], server: ForkServer) -> dict[str, object] | None:
    request = {
        "folder": str(folder), "device": "cpu", "trainer": trainer,
        "values": {**values, "output_dir": str(folder / "out"), "use_cpu": True},
        "output_dir": str(folder / "out"), "generates": False,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    write_json(folder / "request.json", request)
    ending = server.call(
        {"entry": "offline_training:run", "argument": str(folder / "request.json"), "cwd": str(folder),
         "log": str(folder / "log"), "env": {}, "deadline_s": 500}
    )  # fmt: skip
    assert ending.exit_code == 0, (folder / "log").read_text()
    return read_json(folder / "final.json")


@pytest.fixture(scope="module")
def promoted(studied: Path) -> "subprocess.CompletedProcess[str]":
    """The command that trained trial 0 to its end, mirrored to MLflow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AUTOFIT_MLFLOW")
        done = run(studied, "promote", "0", "--json")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_full_run_ends_with_its_contract_and_the_report_shows_it(
    studied: Path, promoted: "subprocess.CompletedProcess[str]"
) -> None:
    study, *_ = promoted.stderr.splitlines()
    assert study.startswith("study run-")
    assert study.endswith("(used last)")
    assert "promised (measured on " in promoted.stderr
    final = json.loads(promoted.stdout.splitlines()[-1])
    by_key = {row["key"]: row for row in final["contract"]}
    assert list(by_key) == ["device_used_bytes", "step_s", "samples_per_s", "effective_batch_size", "proof"]
    batch = by_key["effective_batch_size"]
    assert (batch["promised"], batch["actual"], batch["kept"]) == (8, 8, True)
    assert by_key["device_used_bytes"]["actual"] is None
    assert by_key["step_s"]["promised"] > 0
    assert by_key["step_s"]["actual"] > 0
    assert final["verdict"].startswith(
        ("the promise is kept: ", "the promise is broken: step")
    )  # a busy machine is slow
    assert final["verdict"] not in promoted.stderr, "it is told twice"
    found = autofit.report(folder=studied / "autofit-studies")
    (full,) = json.loads(json.dumps(found.to_dict()))["promoted"]
    assert (full["contract"], full["verdict"], full["state"]) == (final["contract"], final["verdict"], "done")
    assert f"Full run of trial 0 on cpu: done, step {STEPS} of {STEPS}" in str(found)


@pytest.mark.slow
@pytest.mark.usefixtures("promoted")
def test_the_promoted_run_is_in_mlflow_each_step_once_and_linked_to_its_trial(studied: Path) -> None:
    folder = studied / "autofit-studies"
    api = client(folder)
    study = load_study(folder, None).study_name
    runs = api.search_runs([experiment_id(api, folder, study)], filter_string="tags.`autofit.kind` = 'promoted'")
    run_ = next(r for r in runs if r.data.tags["autofit.trial"] == "0")
    assert run_.data.tags["autofit.status"] == "done"
    assert run_.data.tags["autofit.proof_verdict"] == "baseline"
    assert api.get_run(run_.data.tags["autofit.trial_run"]).data.tags["autofit.trial"] == "0"
    for name in ("loss", "reward", "completions/mean_length", "completions/clipped_ratio", "completions_per_s",
                 "host_rss_bytes"):  # fmt: skip
        steps = [m.step for m in api.get_metric_history(run_.info.run_id, name)]
        assert sorted(steps) == list(range(1, STEPS + 1)), name


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint(studied: Path, promoted: "subprocess.CompletedProcess[str]") -> None:
    expected = json.loads(promoted.stdout.splitlines()[-1])
    for path in [*studied.glob("autofit-studies/promoted/*"), studied / "out"]:
        shutil.rmtree(path)
    driver = start(studied, "promote", "0")
    wait_for_step(studied, 3)
    for path in studied.glob("autofit-studies/promoted/*/started.json"):
        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    assert driver.wait(timeout=300) == 2
    assert "run the same command to resume" in (studied / "promote.log").read_text()
    after = json.loads(run(studied, "promote", "0", "--json").stdout.splitlines()[-1])
    assert (after["steps"], after["final_loss"]) == (expected["steps"], expected["final_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "message"), [("99", "TRIAL must be"), ("bset", "nearest valid one is 'best'")])
def test_a_trial_that_is_not_there_is_refused(studied: Path, trial: str, message: str) -> None:
    done = run(studied, "promote", trial)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
