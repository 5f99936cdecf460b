"""A full run as a job of a real Slurm: it goes on after whatever the cluster does to it."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import yaml
from slurm_cluster import Cluster
from test_server import RESOLVED, recipe

from autofit.cluster.nodes import only_cards
from autofit.cluster.scheduler import LOCAL, OwnJob, executor_of
from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.plugin.protocol import own_checkpoints
from autofit.probing.launch import cancel_waiting, end_in_slurm, is_alive, place_in_slurm, start_job
from autofit.promotion.place import Tuned, check_ranks, for_slurm, machines_of, server_of
from autofit.promotion.run_folder import REQUEUES, ask_to_end, ending_of
from autofit.promotion.slurm_job import Machines, _env, begin, run_allocated, superseded
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch
from autofit.recipe.launching import RolloutServer
from autofit.watching.events import EventKind, events_of, read_progress

SAME = ("step", "loss", "grad_norm", "learning_rate")


def folder_of_run(home: Path, model: Path, launch: Launch, **changes: object) -> Path:
    """The folder of a run of SFT that has not begun."""
    home.mkdir()
    path = tiny.write_offline_recipe("sft", home, model, use_peft=False, **changes)
    values = {**yaml.safe_load(path.read_text()), "use_cpu": True}
    values |= {} if launch.is_plain else {LAUNCH: launch.to_values()}
    write_json(home / "request.json", {
        "folder": str(home), "device": "cpu", "trainer": "sft", "output_dir": str(home / "out"), "generates": False,
        "values": values, "cwd": str(home), "slots": [], "study_folder": str(home), "study": "none", "trial": 0,
    })  # fmt: skip
    return home


def start(folder: Path, nodes: int = 1) -> str:
    """The number of the run's job."""
    for name in ("stop", "failed.json"):
        (folder / name).unlink(missing_ok=True)
    asked = executor_of({"kind": "slurm", "nodes": nodes, "mem": "2G", "time": "50"})
    start_job(folder, run_allocated, str(folder / "request.json"), timeout_s=0, executor=asked)
    return str((read_json(folder / "job.json") or {})["slurm"])


def wait(folder: Path, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.1)


def logs(folder: Path) -> str:
    found = [*folder.glob("*.log"), *folder.glob("job/*.out"), *folder.glob("*.json")]
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(found))


def ended(folder: Path) -> dict[str, object] | None:
    wait(folder, lambda: not is_alive(folder))
    return read_json(folder / "final.json")


def steps(folder: Path) -> int:
    return len(read_progress(folder))


def lines(folder: Path) -> list[list[object]]:
    return [[line.get(key) for key in SAME] for line in read_progress(folder)]


def resumed(folder: Path) -> list[int]:
    return [event.step for event in events_of(folder) if event.kind is EventKind.RESUME]


@pytest.mark.slow
def test_a_run_goes_on_after_usr2_and_ends_as_if_it_never_was(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, Launch(), max_steps=400)
    job = start(folder)
    wait(folder, lambda: steps(folder) >= 2)
    assert str(place_in_slurm(folder)).startswith(f"job {job} runs on n")
    slurm.run("scancel", "--signal=USR2", job)
    wait(folder, lambda: resumed(folder))
    ask_to_end(folder)
    assert ended(folder) is None
    assert ending_of(folder) == "asked to end"
    assert (read_json(folder / REQUEUES) or {})["fruitless"] == 0
    done = steps(folder)
    assert 2 <= resumed(folder)[0] < done < 400
    assert [line[0] for line in lines(folder)] == list(range(1, done + 1))
    assert (own_checkpoints(folder / "out") / f"checkpoint-{done}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("after_usr2", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run_of_two_nodes_names_the_node_of_a_killed_rank(
    slurm: Cluster, tiny_model: Path, tmp_path: Path, after_usr2: bool
) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, Launch(ranks=2, machines=2), max_steps=4000)
    job = start(folder, nodes=2)
    wait(folder, lambda: steps(folder) >= 2)
    if after_usr2:
        slurm.run("scancel", "--signal=USR2", job)
        wait(folder, lambda: resumed(folder))
        since = resumed(folder)[0]
        wait(folder, lambda: steps(folder) > since)
        assert [line[0] for line in lines(folder)] == list(range(1, steps(folder) + 1))
    [victim] = [p for p in psutil.process_iter(["cmdline"]) if _is_rank(p, folder, "1")]
    began = time.monotonic()
    victim.kill()
    assert ended(folder) is None
    assert time.monotonic() - began < 60
    assert not [p for p in psutil.process_iter(["cmdline"]) if _is_rank(p, folder, None)]
    [event] = [event for event in events_of(folder) if event.kind is EventKind.RANK]
    assert re.search(r"rank 1 of 2 on n\d was killed by SIGKILL in the ", event.text)
    assert re.fullmatch(r"rank 1 on n\d: killed by signal 9.*", str(ending_of(folder)))


def _is_rank(process: psutil.Process, folder: Path, rank: str | None) -> bool:
    with suppress(psutil.Error):
        if str(folder / "request.json") in (process.info["cmdline"] or ()):
            return rank is None or process.environ().get("RANK") == rank
    return False


@pytest.mark.thorough
def test_a_cancelled_run_says_so_and_the_next_job_resumes_it(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, Launch(), max_steps=4000)
    job = start(folder)
    wait(folder, lambda: steps(folder) >= 2)
    slurm.run("scancel", job)
    assert ended(folder) is None
    assert str(end_in_slurm(folder)).startswith(f"job {job} was cancelled, on n")
    assert not (folder / REQUEUES).exists()  # Slurm was not asked to start it again
    start(folder)
    wait(folder, lambda: resumed(folder))


@pytest.mark.thorough
def test_a_run_whose_node_goes_away_goes_on_on_another(slurm: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path / "run", tiny_model, Launch(), max_steps=4000, save_steps=2)
    start(folder)
    wait(folder, lambda: steps(folder) >= 6)
    lost = str((read_json(folder / "started.json") or {})["node"])
    slurm.kill_node(lost)
    wait(folder, lambda: resumed(folder))
    assert (read_json(folder / "started.json") or {})["node"] != lost
    assert resumed(folder)[0] >= 4


def test_a_job_in_the_queue_says_why_it_waits_and_is_cancelled_as_it_has_nothing_to_save(
    slurm: Cluster, tmp_path: Path
) -> None:
    write_json(tmp_path / "request.json", {})
    asked = executor_of({"kind": "slurm", "slurm": {"begin": "now+1hour"}})
    start_job(tmp_path, run_allocated, str(tmp_path / "request.json"), timeout_s=0, executor=asked)
    wait(tmp_path, lambda: "(BeginTime)" in str(place_in_slurm(tmp_path)))
    assert is_alive(tmp_path)
    cancel_waiting(tmp_path)
    wait(tmp_path, lambda: not is_alive(tmp_path))
    assert "was cancelled" in str(end_in_slurm(tmp_path))


def at(node: int, attempt: str = "7-0") -> OwnJob:
    return OwnJob(job="7", id="7", attempt=attempt, node=node, nodes=2, name=f"n{node + 1}")


def test_the_first_machine_orders_and_a_rank_killed_on_another_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnJob, "first_address", lambda _: "10.0.0.1")
    seen: dict[int, Mapping[str, str]] = {}

    def start_rank(rank: int, own: Mapping[str, str]) -> int:
        seen[rank] = own
        return subprocess.Popen(["sleep", "100"]).pid

    begin(tmp_path, at(0))
    with multiprocessing.get_context("fork").Pool(1) as pool:
        other = pool.apply_async(_follow, (tmp_path,))
        machines = Machines(tmp_path, at(0), start_rank)
        found = machines.keep([{"RANK": str(rank)} for rank in range(4)])
        machines.dismiss()
        other.get(timeout=20)
    assert sorted(seen) == [0, 1]
    assert seen[0]["MASTER_ADDR"] == "10.0.0.1"
    assert found.first == 2
    assert [(end.rank, end.node, end.abandoned) for end in found.endings] == [
        (0, "n1", True), (1, "n1", True), (2, "n2", False), (3, "n2", False),
    ]  # fmt: skip


def _follow(folder: Path) -> None:
    def start_rank(rank: int, own: Mapping[str, str]) -> int:
        return subprocess.Popen(["sh", "-c", "sleep 1; kill -9 $$" if rank == 2 else "sleep 2; exit 1"]).pid

    Machines(folder, at(1), start_rank).follow()


def test_a_process_that_slurm_gave_up_sees_that_the_run_was_started_elsewhere(tmp_path: Path) -> None:
    begin(tmp_path, at(0))
    assert not superseded(tmp_path, at(1))
    begin(tmp_path, at(0, attempt="7-1"))
    assert superseded(tmp_path, at(1))
    Machines(tmp_path, at(1), lambda *_: 0, round=1).follow()  # returns: nobody will dismiss it


ON_SLURM = executor_of({"kind": "slurm"})


def test_nodes_divide_the_ranks_of_the_recipe_and_cards_are_asked_for() -> None:
    launch = Launch(ranks=8)
    assert machines_of(launch, executor_of({"kind": "slurm", "nodes": 2})) == 2
    assert machines_of(Launch(ranks=8, machines=4), ON_SLURM) == 4
    with pytest.raises(ConfigError, match=r"8 rank\(s\) of the run cannot be divided by --nodes 3; give 1, 2, 4"):
        machines_of(launch, executor_of({"kind": "slurm", "nodes": 3}))
    with pytest.raises(ConfigError, match=r"on 4 machines .* and --nodes is 2"):
        machines_of(Launch(ranks=8, machines=4), executor_of({"kind": "slurm", "nodes": 2}))
    check_ranks(Launch(ranks=8, machines=4), "cuda", ON_SLURM)  # the nodes have the cards, not this machine
    asked = for_slurm(ON_SLURM, Launch(ranks=8, machines=4), "cuda")
    assert (asked.nodes, asked.gpus_per_node) == (4, "2")
    own = executor_of({"kind": "slurm", "slurm": {"gres": "gpu:a100:2"}})
    assert for_slurm(own, launch, "cuda").gpus_per_node is None


def test_on_this_machine_a_server_has_cards_that_the_recipe_gives_it() -> None:
    assert server_of(RESOLVED, recipe(), "cuda", LOCAL) is None  # the user's own, as TRL's guide has it
    assert server_of(RESOLVED, recipe(2), "cpu", LOCAL) is None
    server = server_of(RESOLVED, recipe(2), "cuda", LOCAL)
    assert server is not None
    assert server.cards == 2


def test_the_server_has_a_node_more_and_every_node_the_cards_of_the_larger_part() -> None:
    said: list[str] = []
    values = recipe(4) | {LAUNCH: Launch(ranks=4, machines=2, server_ranks=4).to_values()}
    server = server_of(RESOLVED, values, "cuda", ON_SLURM, say=said.append)
    asked = for_slurm(ON_SLURM, Launch(ranks=4, machines=2, server_ranks=4), "cuda", server)
    assert (asked.nodes, asked.gpus_per_node) == (3, "4")
    assert said == [
        "its vLLM server gets a node of its own with 4 cards, so the job asks for 3 nodes; it logs to server.log in "
        "the folder of the run"
    ]
    asked = for_slurm(ON_SLURM, Launch(ranks=8), "cuda", RolloutServer(model="m"))
    assert (asked.nodes, asked.gpus_per_node) == (2, "8")
    asked = for_slurm(ON_SLURM, Launch(), "cpu", RolloutServer(model="m"))
    assert (asked.nodes, asked.gpus_per_node) == (2, None)


def test_a_training_sees_no_more_cards_than_it_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process that sees two cards trains as torch's DataParallel, on both."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert only_cards(1) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert only_cards(2) == {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.mark.parametrize(("launch", "cards"), [({}, "4"), ({"ranks": 4, "machines": 2}, "4,5")])
def test_a_node_with_more_cards_than_ranks_gives_the_training_those_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, launch: dict[str, Any], cards: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    values = {LAUNCH: Launch(**launch).to_values()} if launch else {}
    mine = replace(at(0), nodes=Launch(**launch).machines)
    assert _env({"values": values, "device": "cuda"}, mine)["CUDA_VISIBLE_DEVICES"] == cards
    assert _env({"values": values, "device": "cpu"}, mine)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_accelerate_takes_the_config_of_several_machines(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = Tuned(values={LAUNCH: Launch(ranks=8, machines=2, sharding="fsdp2").to_values()}, comment="").write(
        tmp_path / "tuned.yaml"
    )[1]
    given = ["--config_file", str(path), "--machine_rank", "1", "--main_process_ip", "n1", "script.py"]
    args = _validate_launch_command(launch_command_parser().parse_args(given))[0]
    assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 8, 1)
    assert (args.main_process_ip, args.main_process_port) == ("n1", 29500)
