"""The vLLM server beside a full run: its keeper, its address and its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_server import recipe

from autofit.files import write_json
from autofit.probing.supervise import ProcessEnding, RanksEnded
from autofit.promotion import job
from autofit.promotion.server import Beside, Post, address_variables, last_words, serve, with_address
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch


def test_a_training_finds_this_start_s_server_in_its_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "localhost")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert with_address({"vllm_server_port": 8000}) == {"vllm_server_port": 8000}
    own = address_variables("http://10.0.0.7:4242", address="10.0.0.1", port=5151)
    assert (own["no_proxy"], own["VLLM_HOST_IP"]) == ("localhost,10.0.0.7", "10.0.0.1")
    for key, value in own.items():
        monkeypatch.setenv(key, value)
    found = with_address({"vllm_server_port": 8000})
    assert found["vllm_server_base_url"] == "http://10.0.0.7:4242"
    assert found["vllm_group_port"] == 5151


def test_on_one_machine_training_and_server_share_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def keeps(request_path: Path, post: Post, *, cwd: str, env: Mapping[str, str]) -> int:
        seen["server"] = env["CUDA_VISIBLE_DEVICES"]
        return subprocess.Popen(["true"]).pid

    def trains(path: Path, folder: Path, keep: Callable[[list[dict[str, str]]], object]) -> ProcessEnding:
        keep([{}])
        return ProcessEnding(exit_code=0)

    monkeypatch.setattr(job, "listen", lambda _: None)
    monkeypatch.setattr(job, "train_to_the_end", trains)
    monkeypatch.setattr(job, "start_keeper", keeps)
    monkeypatch.setattr(job, "in_processes", lambda *_, env, **__: seen.update(env) or (lambda own: None))
    monkeypatch.setattr("autofit.probing.slots.slots_folder", lambda: tmp_path)
    values = recipe(1) | {LAUNCH: Launch(ranks=2, server_ranks=1).to_values()}
    request = {"folder": str(tmp_path), "cwd": "/", "slots": ["cuda-a", "cuda-b", "cuda-c"], "values": values}
    write_json(tmp_path / "request.json", {**request, "serves": True})
    job.run_promoted(str(tmp_path / "request.json"))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["server"]) == ("a,b", "c")


def test_a_server_whose_machine_is_gone_is_lost_and_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keeper would have told anything else; a job of Slurm then starts again, on other nodes."""
    monkeypatch.setattr("autofit.promotion.server._KNOCK_S", 0.01)
    run = Beside(tmp_path, "7-0")
    post = Post(folder=tmp_path, name="7-0", number=1)

    def train(_: object) -> RanksEnded:
        assert not run.is_over()
        server.close()
        while not run.is_over():
            time.sleep(0.02)
        return RanksEnded(endings=(ProcessEnding(exit_code=-9, abandoned=True),))

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as keeper:
        keeper.submit(_answers_soon, post, server.getsockname()[1])
        run.beside(train)([{}])
    assert run.is_lost
    assert not (tmp_path / "failed.json").exists()


def _answers_soon(post: Post, port: int) -> None:
    while not post.ordered():
        time.sleep(0.01)
    post.answers(f"http://127.0.0.1:{port}")


def test_a_command_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    write_json(tmp_path / "request.json", {"values": recipe(), "cwd": str(tmp_path)})
    post = Post(folder=tmp_path, name="7-0", number=1)
    env = {"PATH": "/nowhere"}
    serve(post, tmp_path / "request.json", address="127.0.0.1", env=env, over=lambda: False, where=" on n3")
    assert post.why_ended() == (
        "the vLLM server on n3 could not be started: `trl vllm-serve` is not there: `trl` is not on the PATH; see "
        f"{tmp_path / 'server.log'}"
    )


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("loads\nready to serve\n\n", "ready to serve"),
        ("ValueError: no such model\nshutting down\n", "ValueError: no such model"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nRuntimeError: Engine core "
            "initialization failed. See root cause above.\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        ("OSError: x\nRuntimeError: Engine core initialization failed. See root cause above.\n", "OSError: x"),
        ("", ""),
    ],
)
def test_the_last_words_of_a_server_are_those_that_name_the_cause(tmp_path: Path, log: str, said: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(f"ValueError: of an earlier server\n{log}")
    assert last_words(path, len("ValueError: of an earlier server\n")) == said
