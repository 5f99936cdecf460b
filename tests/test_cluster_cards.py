"""Cards of a cluster's nodes: what keeps a node from taking probes, and the kind of card that a study is of."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import lawful
import pytest
import search_driver
import tiny
from drivers import Card, Driver

from autofit.api.planning import Planned, Request, make_plan
from autofit.cluster.nodes import (
    _key,
    asks_for_cards,
    cards_of_nodes,
    check_count,
    executor_findings,
    is_card_broken,
    named_cards,
    node_fault,
)
from autofit.cluster.scheduler import Executor, executor_of
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.hardware.hardware import is_of_kind, kind_of
from autofit.hardware.health import Look, compiling_faults, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.probing.cluster_launch import ClusterLauncher
from autofit.tuning.search import Search, open_study

if TYPE_CHECKING:
    from slurm_cluster import Cluster

    from autofit.probing.fork_server import ForkServer

H200 = "NVIDIA H200, 140 GiB"
OTHER = Card(name="NVIDIA A100-SXM4-80GB", uuid="GPU-2", total_mib=81920, capability=(8, 0))


@pytest.fixture
def driver(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The fake driver of this process's children."""
    made = Driver(libraries=libraries, cards=tmp_path / "cards")
    for name, value in made.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made.has(Card())
    return made


def test_a_node_with_a_free_card_of_the_kind_takes_probes(driver: Driver, tmp_path: Path) -> None:
    assert node_fault("cuda", tmp_path, card=H200) is None
    assert "2 cards are needed" in str(node_fault("cuda", tmp_path, card=H200, cards=2))
    assert look_at_cards().driver == "580.65.06"


def test_a_node_with_another_kind_is_told_by_both_names(driver: Driver, tmp_path: Path) -> None:
    driver.has(OTHER)
    assert node_fault("cuda", tmp_path, card=H200) == f"its card is {OTHER.name}, 80 GiB, and the study is of {H200}"
    assert node_fault("cuda", tmp_path, card="a100-80gb") is None
    assert node_fault("cpu", tmp_path, card=H200) is None


def test_a_card_that_others_hold_is_told_with_the_process_and_its_user(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.has(Card(used_mib=9000))
    assert "in use by processes that its driver does not name" in str(node_fault("cuda", tmp_path))
    driver.has(Card())
    (tmp_path / "processes").write_text(f"{Card().uuid} {os.getpid()} 5000\n")
    monkeypatch.setenv("FAKE_PROCESSES", str(tmp_path / "processes"))
    assert f"is held by process {os.getpid()} of " in str(node_fault("cuda", tmp_path))


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"FAKE_ECC": "3"}, "has 3 uncorrectable ECC errors"),
        ({"FAKE_CARDS": "/nowhere"}, "no card is visible"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "no card is visible"),
    ],
)
def test_a_broken_or_missing_card_is_a_fault(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert words in str(node_fault("cuda", tmp_path))


def test_a_driver_that_hangs_is_a_fault_and_does_not_hang_us(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_HANG", "1")
    assert look_at_cards(answer_s=1).faults == ("the driver does not answer within 1 s",)


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    assert "cannot write in" in str(node_fault("cpu", tmp_path / "gone"))


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: unspecified launch failure", False),
        ("ValueError: initialization error of the reward", False),
    ],
)
def test_only_words_that_name_the_card_blame_it(text: str, broken: bool) -> None:
    assert is_card_broken(text) is broken


def test_a_kind_is_a_board_with_its_size() -> None:
    def card(name: str, mib: int) -> Gpu:
        return Gpu(name=name, uuid="", capacity_bytes=mib << 20)

    assert is_of_kind(card("NVIDIA H200", 143500), kind_of(card("NVIDIA H200", 143771)))  # another driver's reserve
    assert not is_of_kind(card("NVIDIA GeForce RTX 3080", 10240), kind_of(card("NVIDIA GeForce RTX 3080", 12288)))
    assert not is_of_kind(card("NVIDIA A100 80GB PCIe", 81920), "a100-80gb")  # 300 W
    board = "NVIDIA GeForce RTX 4060 Ti"  # of 8 and of 16 GB
    assert [is_of_kind(card(board, mib), "rtx4060ti-16gb") for mib in (8188, 16380)] == [False, True]


def test_the_kind_can_be_named_and_more_ranks_than_cards_are_one_error() -> None:
    found = named_cards("A100 80GB", executor_of({"kind": "slurm", "gpus_per_node": "a100:2"}))
    assert (found.kind, len(found.cards)) == ("a100-80gb", 2)
    with pytest.raises(ConfigError, match="4 cards, and a job sees 2; give --gpus-per-node 4"):
        check_count(found.cards, 4)
    assert asks_for_cards(executor_of({"kind": "slurm", "slurm": {"gres": "gpu:1"}}))
    assert not asks_for_cards(executor_of({"kind": "slurm", "slurm": {"gres": "tmpdisk:10"}}))


def test_a_node_without_a_compiler_is_said_and_asked_again(tmp_path: Path) -> None:
    executor, said = executor_of({"kind": "slurm"}), list[str]()
    told = {**look_at(Card()), "node": "n1", "missing": "no C compiler is on the PATH"}
    path = tmp_path / f"{_key(executor)}.json"
    write_json(path, told)
    assert cards_of_nodes(executor, tmp_path, say=said.append).kind == H200
    assert said == ["the node n1: no C compiler is on the PATH; load it in setup (executor.yaml)"]
    assert not path.exists()
    write_json(path, {**told, "missing": ""})
    cards_of_nodes(executor, tmp_path, say=said.append)
    assert (len(said), path.exists()) == (1, True)


def look_at(card: Card) -> dict[str, object]:
    """What a node with such a card tells."""
    gpu = Gpu(name=card.name, uuid=card.uuid, capacity_bytes=card.total_mib << 20, compute_capability=card.capability)
    return Look(cards=(gpu,), driver="580.65.06").to_json()


def test_compilers_that_a_training_needs_and_builds_cut_off_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.match("no C compiler .*; no C[+][+] compiler .*offload", compiling_faults())
    for name in ("clang", "c++"):
        (tmp_path / name).touch(mode=0o755)
    assert compiling_faults() == ""
    lock = tmp_path / "torch_extensions" / "py312_cu130" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert f"holds {lock}; " in compiling_faults()


# -- on a real Slurm --------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(slurm: Cluster, libraries: Path, tmp_path: Path) -> Executor:
    """Jobs that see fake drivers: n1's card is fine, another process holds n2's, and n3's is of another kind."""
    home = tmp_path / "nodes"
    home.mkdir()
    cards = {"n1": Card(), "n2": Card(uuid="GPU-1"), "n3": OTHER}
    for node, card in cards.items():  # two each: Slurm gives a job the first or the second
        (home / node).write_text("".join(replace(card, uuid=f"{card.uuid}-{place}").line for place in range(2)))
    (home / "processes").write_text("".join(f"GPU-1-{place} {os.getpid()} 5000\n" for place in range(2)))
    setup = (f"export LD_LIBRARY_PATH={libraries} FAKE_CARDS={home}/$SLURMD_NODENAME FAKE_PROCESSES={home}/processes",
             f"export TORCH_EXTENSIONS_DIR={home}/built")  # fmt: skip
    return executor_of({"kind": "slurm", "gpus_per_node": "1", "mem": "500M", "time": "10", "setup": setup,
                        "probes_per_job": 4})  # fmt: skip


def test_a_short_job_tells_the_card_and_the_next_search_knows_it(nodes: Executor, tmp_path: Path) -> None:
    said: list[str] = []
    first = replace(nodes, slurm={"nodelist": "n1"})
    found = cards_of_nodes(first, tmp_path / "cluster", say=said.append)
    assert (found.kind, len(found.cards)) == (H200, 1)
    assert "asks a node for its card (job " in said[0]
    assert cards_of_nodes(first, tmp_path / "cluster", say=pytest.fail) == found
    other = replace(nodes, slurm={"nodelist": "n3"})
    assert cards_of_nodes(other, tmp_path / "cluster", say=said.append).kind == f"{OTHER.name}, 80 GiB"


def test_a_node_without_cards_is_one_error_that_says_what_to_ask_for(nodes: Executor, tmp_path: Path) -> None:
    (tmp_path / "nodes/n1").unlink()
    with pytest.raises(ConfigError, match="sees no card on the node n1; ask for cards with --gpus-per-node 1"):
        cards_of_nodes(replace(nodes, slurm={"nodelist": "n1"}), tmp_path / "cluster", say=lambda _: None)


def test_a_search_sets_the_occupied_node_and_the_one_of_another_kind_aside_and_names_them(
    nodes: Executor, slurm: Cluster, tmp_path: Path
) -> None:
    """The good node comes last, so that both others are looked at whatever the machine is busy with."""
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    wanted = replace(search_driver.plan(tmp_path, 6), device="cuda", card=H200, parallel=3, sampler="grid")
    launcher = ClusterLauncher(
        replace(nodes, cpus_per_task=8),
        wanted.probes_folder / "jobs",
        device="cuda",
        card=H200,
        function=lawful.at_once,
        idle_s=3,
    )
    study, said = open_study(wanted), list[str]()
    search = Search(wanted, study, server_socket=None, launcher=launcher)

    def note(text: str) -> None:
        said.append(text)
        if "is set aside" in text and sum("is set aside" in one for one in said) == 2:
            slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")

    search.on_note = note
    try:
        search.run()
    finally:
        launcher.close()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
    text = "\n".join(said)
    assert f"is held by process {os.getpid()}" in text
    assert f"its card is {OTHER.name}" in text
    assert "n2" in text
    assert "n3" in text


def test_a_study_of_another_kind_is_another_study_and_old_ones_keep_their_names(tmp_path: Path) -> None:
    plain = replace(search_driver.plan(tmp_path, 8), device="cuda")
    assert len({plain.fingerprint, replace(plain, card=H200).fingerprint, replace(plain, card="h100").fingerprint}) == 3


def test_doctor_tells_what_is_wrong_with_an_executor_file(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "executor.yaml").write_text("executor: slurm\npartition: gpu\ngpus_per_node: 1\n")
    assert [(f.where.rpartition(" ")[2], f.stops) for f in executor_findings(tmp_path, cards=2)] == [
        ("(gpus_per_node)", True), ("(partition)", True),
    ]  # fmt: skip
    (tmp_path / "executor.yaml").write_text(
        "executor: slurm\npartition: main\ntime: 2-00:00:00\nslurm: {requeue: false}\n"
    )
    requeue, limit = executor_findings(tmp_path, cards=1)
    assert "a full run ends at its time limit" in str(requeue)
    assert "the partition main allows" in str(limit)
    assert executor_findings(tmp_path / "none", cards=1) == []


def planned(recipe: Path, executor: Executor, server: ForkServer, folder: Path, **more: object) -> Planned:
    asked = dict.fromkeys(Request.__slots__) | {
        "recipe": recipe, "device": "auto", "allow": "neutral", "min_gain": 0.01, "goal": "speed",
        "sampler": "autofit", "measured_steps": 2, "deadline": "15m", "seed": 0, "folder": folder, "trainer": "sft",
        "launch": Request.__dataclass_fields__["launch"].default, "executor": executor,
    }  # fmt: skip
    return make_plan(Request(**{**asked, **more}), server)


@pytest.mark.slow
def test_a_login_node_without_a_card_plans_a_search_on_the_nodes_cards(
    nodes: Executor, tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model)
    text = path.read_text().replace("use_cpu: true\n", "")
    path.write_text(text.replace("bf16: false", "bf16: true"))
    first = replace(nodes, slurm={"nodelist": "n1"})
    plan = planned(path, first, fork_server, tmp_path).plan
    assert (plan.device, plan.card, plan.parallel) == ("cuda", H200, 4)
    assert plan.target_bytes == 143771 << 20
    with pytest.raises(ConfigError, match="--target-vram must be at most the card's memory"):
        planned(path, first, fork_server, tmp_path, target_vram="200GB")
    named = planned(path, replace(nodes, setup=()), fork_server, tmp_path, device="cuda", gpu="a100-80gb").plan
    assert (named.device, named.card) == ("cuda", "a100-80gb")
