"""Studies from anywhere: another working directory, a moved or copied folder, a folder that is gone."""

import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import search_driver

from autofit import api
from autofit.api.arguments import studies_folder
from autofit.cli import main
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.probing.launch import is_alive
from autofit.probing.supervise import note_of
from autofit.promotion.place import check_found, missing, working_folder
from autofit.promotion.promotion import Promotion
from autofit.tracking.runs import client, experiment_id
from autofit.tuning.record import keep_record, record_of
from autofit.tuning.study import load_study

RECIPE = {
    "dataset_name": "data", "reward_funcs": ["rewards.exact"], "model_name_or_path": "org/model",
    "datasets": [{"path": "json", "data_files": "data/train.jsonl"}], "output_dir": "/nowhere/out",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the data and the rewards of RECIPE, and a folder of studies."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("{}\n")
    (folder / "rewards.py").write_text("exact = None\n")
    (folder / "studies").mkdir()
    return folder


def test_a_relative_folder_is_made_whole_once_so_that_a_job_in_another_folder_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search_driver.made(tmp_path / "project" / "studies", 2)
    seen: list[Promotion] = []

    def launched(promotion: Promotion, *, study_folder: Path, **_: object) -> str:
        seen.append(promotion)
        assert study_folder == tmp_path / "project" / "studies"
        raise ConfigError("far enough")

    monkeypatch.setattr("autofit.api.promoting.launch_run", launched)
    monkeypatch.setattr("autofit.promotion.promotion.checked", lambda *_, **__: _Proof())
    with pytest.raises(ConfigError, match="far enough"):
        api.promote("best", folder="project/studies")
    assert seen[0].folder.is_absolute()
    assert seen[0].yaml_path.is_absolute()


class _Proof:
    sentence, verdict, refused = "proven", "proven", False


def test_all_that_takes_a_folder_takes_a_relative_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search_driver.made(tmp_path / "project" / "studies", 2)
    monkeypatch.chdir(tmp_path / "project")
    assert api.report(folder="studies").winner is not None
    assert api.studies("studies").folder == tmp_path / "project" / "studies"
    assert api.jobs("studies").folder == tmp_path / "project" / "studies"
    assert api.monitor("studies").folder == tmp_path / "project" / "studies"


@pytest.mark.parametrize("command", [["studies"], ["report"], ["search"], ["monitor", "--once"], ["promote", "best"]])
def test_a_working_directory_that_was_deleted_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, gone = Path.cwd(), tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert main(command) == 2
        with pytest.raises(ConfigError, match="working directory was deleted"):
            studies_folder("studies")
    finally:
        os.chdir(here)
    said = capsys.readouterr().err
    assert said.startswith("autofit: the working directory was deleted")
    assert len(said.splitlines()) == 1


def test_a_run_works_in_the_folder_of_its_search_while_that_is_there(project: Path, tmp_path: Path) -> None:
    assert working_folder(tmp_path, project / "studies", RECIPE) == tmp_path


def test_a_moved_study_finds_its_data_beside_it_or_where_the_command_is_called(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "old"
    assert working_folder(gone, project / "studies", RECIPE) == project
    shutil.move(project / "studies", tmp_path / "archive" / "studies")
    monkeypatch.chdir(project)
    assert working_folder(gone, tmp_path / "archive" / "studies", RECIPE) == project


def test_what_of_a_moved_study_is_not_there_is_said_by_name(project: Path, tmp_path: Path) -> None:
    assert missing(RECIPE, project) == []
    (project / "rewards.py").unlink()
    (project / "data" / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"needs rewards\.exact \(reward_funcs\), data/train\.jsonl \(datasets\)"):
        check_found(RECIPE, project, searched_from=tmp_path / "old")


def test_a_stage_of_a_moved_pipeline_trains_from_the_model_of_the_stage_before_it_where_that_is_now(
    tmp_path: Path,
) -> None:
    search_driver.made(tmp_path / "old", 1)
    model = "promoted/p-first-trial-0/merged"
    (tmp_path / "old" / model).mkdir(parents=True)
    recipe = {
        "model_name_or_path": str(tmp_path / "old" / model),
        "reward_funcs": [str(tmp_path / "old" / model), "a.b"],
    }
    study = load_study(tmp_path / "old", "law")
    keep_record(study, replace(record_of(study), values=recipe, resolved=recipe))
    assert record_of(load_study(tmp_path / "old", "law")).values == recipe
    shutil.move(tmp_path / "old", tmp_path / "new")
    here = str(tmp_path / "new" / model)
    found = record_of(load_study(tmp_path / "new", "law"))
    assert found.values == found.resolved == {"model_name_or_path": here, "reward_funcs": [here, "a.b"]}


def test_the_job_of_the_original_is_not_that_of_its_copy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "request.json", {"folder": str(run)})
    write_json(run / "started.json", note_of(os.getpid()))
    shutil.copytree(run, tmp_path / "copy")
    assert is_alive(run)
    assert not is_alive(tmp_path / "copy")


def test_mlflow_writes_what_belongs_to_a_moved_study_where_it_is_now(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    api_of = client(old)
    api_of.create_run(experiment_id(api_of, old, "law"))
    shutil.move(old, new)
    run = client(new).search_runs([experiment_id(client(new), new, "law")])[0]
    assert str(run.info.artifact_uri).startswith(f"file://{new}/mlartifacts/law/")
    with closing(sqlite3.connect(new / "mlflow.db")) as database:
        places = database.execute("SELECT artifact_location FROM experiments").fetchall()
    assert all(str(place).startswith(f"file://{new}/") for (place,) in places)
