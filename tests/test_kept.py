"""Answers of simulated probes that are kept: the same probe starts no second job."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.probing.job import keep_answer, kept_answer
from autofit.probing.launch import Launcher
from autofit.probing.result import Fidelity, ProbeRequest, ProbeResult, ProbeSetup, ProbeStatus

FIT = ProbeResult(
    status=ProbeStatus.FIT, device="sim:l4", device_used_bytes=5, step_s=(1.0,), fidelity=Fidelity.PREDICTED
)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))


def request_in(folder: Path, values: Mapping[str, object] = {"lora_r": 8, "output_dir": "a"}) -> ProbeRequest:
    setup = ProbeSetup(
        trainer="grpo", device="sim:l4", limit_bytes=10, worst_case=folder.parent / "worst_case.json", deadline_s=9.0,
        server_socket=None, recipe_hash="data",
    )  # fmt: skip
    folder.mkdir()
    return setup.request(folder, values)


def test_the_second_of_two_equal_simulated_probes_is_answered_without_a_job(tmp_path: Path) -> None:
    keep_answer(request_in(tmp_path / "one"), FIT.to_json())
    again = request_in(tmp_path / "two", {"lora_r": 8, "output_dir": "b"})
    launcher = Launcher()
    launcher.submit(again)
    found = launcher.result(again.folder)
    assert found is not None
    assert (found.status, found.step_s, found.fidelity) == (FIT.status, FIT.step_s, FIT.fidelity)
    assert not (again.folder / "job.json").exists()


def test_a_models_folder_counts_by_what_it_says_and_not_by_its_place(tmp_path: Path) -> None:
    for name, width in (("one", 64), ("copy", 64), ("other", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"hidden_size": {width}}}')
        (tmp_path / name / "model.safetensors").write_text(name)
    asked = {name: {"model_name_or_path": str(tmp_path / name)} for name in ("one", "copy", "other", "gone")}
    keep_answer(request_in(tmp_path / "probe", asked["one"]), FIT.to_json())
    assert kept_answer(request_in(tmp_path / "again", asked["copy"])) is not None
    for name in ("other", "gone"):
        assert kept_answer(request_in(tmp_path / f"of_{name}", asked[name])) is None


def test_only_measurements_with_the_same_inputs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_in(tmp_path / "one")
    keep_answer(request, ProbeResult(status=ProbeStatus.FAILED, device="sim:l4").to_json())
    assert kept_answer(request) is None
    keep_answer(request, FIT.to_json())
    assert kept_answer(request) is not None
    for change in (
        {"values": {"lora_r": 16}}, {"limit_bytes": 11}, {"recipe_hash": "other data"}, {"recipe_hash": None},
        {"device": "sim:t4"}, {"device": "cuda"}, {"least_of_fits": False},
    ):  # fmt: skip
        assert kept_answer(replace(request, **change)) is None, change
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert kept_answer(request) is None
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    request.worst_case.write_text('{"longest_tokens": 9}')
    assert kept_answer(request) is None
