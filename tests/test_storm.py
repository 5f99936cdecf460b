"""The attack on what reads input, short; `nox -s storm` is the long one, with torn files and kills."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_cluster
from postgres_server import missing
from storm.clocks import NAME as CLOCKS
from storm.clocks import step_clocks
from storm.command_kills import kill_commands
from storm.commands import kill_mirrors, kill_servers
from storm.databases import kill_postgres
from storm.forks import forking
from storm.full_runs import kill_runs, tear_checkpoints
from storm.inputs import Found, Reader, attack, attempt
from storm.kills import kill_creations, kill_searches
from storm.late_files import NAME as LATE_FILES
from storm.late_files import search_late
from storm.neighbours import NAME, meet_neighbours
from storm.pages import ask_pages
from storm.pipelines import kill_pipelines
from storm.quota import reach_quotas
from storm.readers import READERS
from storm.results import Result, Results, table
from storm.torn import tear_files
from storm.whole import NAME as WHOLE
from storm.whole import attack_commands


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_hostile_input_ends_in_a_value_or_one_line(reader: Reader, tmp_path: Path) -> None:
    found = attack(reader, tmp_path, inputs=20, seed=17)
    assert found.tried.total() == 20
    assert not found.wrong


def test_a_traceback_and_a_line_that_is_none_are_noticed(tmp_path: Path) -> None:
    def raises(given: object, _: Path) -> None:
        raise TypeError(given)

    found = Found()
    attempt(Reader(name="x", makes=READERS[0].makes, reads=raises), 5, tmp_path, found)
    assert list(found.wrong.values()) == ["5"]


@pytest.mark.slow
def test_torn_files_lose_nothing(tmp_path: Path) -> None:
    found = tear_files(tmp_path, files=2, dice=random.Random(17), until=time.monotonic() + 300)
    assert found.tried.total() == 2
    assert not found.wrong


@pytest.mark.thorough
def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    dice, until = random.Random(17), time.monotonic() + 60
    found = kill_creations(tmp_path / "births", kills=4, dice=dice, until=until)
    found += kill_searches(tmp_path / "searches", kills=4, dice=dice, until=until)
    assert found.tried.total() == 8
    assert not found.wrong


@pytest.mark.thorough
def test_kills_of_whole_commands_lose_nothing_of_a_study(tmp_path: Path) -> None:
    with forking() as forks:
        found = kill_commands(tmp_path, forks, kills=3, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried.total() == 3
    assert not found.wrong


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kill",
    [kill_mirrors, kill_servers, kill_runs, kill_pipelines],
    ids=["mirrors", "servers", "full runs", "pipelines"],
)
def test_kills_after_a_search_lose_nothing(tmp_path: Path, kill: Callable[..., Found]) -> None:
    found = kill(tmp_path, kills=2, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried.total() == 2
    assert not found.wrong


@pytest.mark.thorough
@pytest.mark.skipif(missing() is not None, reason="Postgres is not installed")
def test_kills_of_a_postgres_and_of_searches_in_it_lose_nothing(tmp_path: Path) -> None:
    found = kill_postgres(tmp_path, kills=3, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried["kills of a Postgres"] == 3
    assert not found.wrong


@pytest.mark.thorough
def test_a_quota_that_is_reached_is_told_and_once_lifted_nothing_was_lost(tmp_path: Path) -> None:
    found = reach_quotas(tmp_path, quotas=4, dice=random.Random(17), until=time.monotonic() + 120)
    assert found.tried["quotas"] >= 1
    assert not found.wrong


@pytest.mark.thorough
def test_a_clock_that_is_set_forth_and_back_loses_nothing(tmp_path: Path) -> None:
    found = step_clocks(tmp_path, steps=1, dice=random.Random(17), until=time.monotonic() + 120)
    assert found.tried[CLOCKS] > 1
    assert not found.wrong


@pytest.mark.thorough
@pytest.mark.skipif(slurm_cluster.missing() is not None, reason="Slurm is not installed")
def test_a_search_that_sees_the_files_of_its_nodes_late_repeats_no_probe(tmp_path: Path) -> None:
    found = search_late(tmp_path, searches=1, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried[LATE_FILES] == 1
    assert not found.wrong


@pytest.mark.thorough
def test_hostile_questions_to_the_page_end_in_an_answer_and_shut_nobody_out(tmp_path: Path) -> None:
    found = ask_pages(tmp_path, questions=20, dice=random.Random(17), until=time.monotonic() + 120)
    assert found.tried["questions to the page"] >= 5
    assert not found.wrong


@pytest.mark.thorough
def test_a_run_passes_over_a_checkpoint_that_was_torn(tmp_path: Path) -> None:
    found = tear_checkpoints(tmp_path, files=1, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried["torn checkpoints"] >= 1
    assert not found.wrong


@pytest.mark.thorough  # 42 s; CI has what others may do with each folder (test_owners.py)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_of_the_machine_changes_and_reads_nothing(tmp_path: Path) -> None:
    found = meet_neighbours(tmp_path, meetings=1, dice=random.Random(17), until=time.monotonic() + 60)
    assert found.tried[NAME] > 100
    assert not found.wrong


@pytest.mark.thorough  # CI has hostile input to each reader above, and whole commands from everywhere (test_places.py)
def test_whole_commands_with_hostile_options_and_files_end_in_an_answer_or_one_line(tmp_path: Path) -> None:
    (tmp_path / "traced").mkdir()  # nothing is traced first
    with forking() as forks:
        found = attack_commands(tmp_path, forks, inputs=5, seed=17, first=8, until=time.monotonic() + 300)
    assert found.tried[WHOLE] == 5
    assert not found.wrong


def test_a_storm_goes_on_where_the_last_one_of_its_seed_ended_and_its_table_has_all_of_them(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    assert results.next_of("kills of searches", 1) == 0
    for seed, first, tried, commit in ((1, 0, 8, "a"), (2, 0, 4, "a"), (1, 8, 3, "b")):
        wrong = {"a traceback": 2} if commit == "b" else {}
        results.add(
            Result(
                kind="kills of searches", seed=seed, first=first, tried=tried, refused=0, seconds=1.5, wrong=wrong,
                date="2026-11-26", commit=commit,
            )
        )  # fmt: skip
    assert results.next_of("kills of searches", 1) == 11
    assert results.next_of("kills of mirrors", 1) == 0
    lines = table(results.all()).splitlines()
    assert "| **kills**, all | 15 | 2,000 | 1: 11, 2: 4 | 2 | b: 3 | 2 | 3.33 |" in lines
    assert "- 2026-11-26, b, seed 1, kills of searches 8 to 11: a traceback (2x)" in lines
