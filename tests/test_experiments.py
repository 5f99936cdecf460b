"""The experiments start: what they import of autofit is there, and they call it as it can be called."""

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments import smoke
from experiments.acceptance import page

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").rglob("*.py"))


def ours(tree: ast.Module) -> Iterator[tuple[str, str, object]]:
    """(name in the file, where it is from, the object) of all that is imported from autofit by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "autofit":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):  # a module of a package
                    importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", getattr(module, alias.name)


def problem(call: ast.Call, called: Callable[..., object]) -> str | None:
    """Why `called` refuses the arguments of `call`; None if it takes them, or if they are not all written there."""
    if any(isinstance(given, ast.Starred) for given in call.args) or any(word.arg is None for word in call.keywords):
        return None
    try:
        signature = inspect.signature(called)
    except ValueError:
        return None
    try:
        signature.bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "experiments")))
def test_an_experiment_calls_autofit_as_it_is_today_so_that_its_figures_can_be_made_again(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    known = {name: found for name, _, found in ours(tree)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    wrong = []
    for call in calls:
        called = known.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if callable(called) and (why := problem(call, called)) is not None:
            wrong.append(f"{path.name}:{call.lineno} {ast.unparse(call.func)}: {why}")
    assert not wrong


def test_types_are_checked_in_every_experiment_and_each_has_a_shortest_command_or_a_need() -> None:
    text = f"{(ROOT / '.ci' / 'types').read_text('utf-8')} {(ROOT / 'pyproject.toml').read_text('utf-8')}"
    known = {name.split("/")[0] for name in (*smoke.COMMANDS, *smoke.NEEDS)}
    parts = [path.relative_to(ROOT / "experiments").parts for path in FILES]
    for folder in sorted({first for first, *rest in parts if rest}):
        assert re.search(rf"\b{folder}\b", text), folder
        assert folder in known


def test_an_experiment_that_ends_with_an_error_has_failed_and_one_that_still_runs_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"wrong": "print(1); raise ValueError('no such key')", "long": "import time; time.sleep(60)"}
    monkeypatch.setattr(smoke, "COMMANDS", {name: ["-c", text] for name, text in programs.items()})
    assert smoke.run("wrong", tmp_path, 60)[0].endswith("ValueError: no such key")
    assert smoke.run("long", tmp_path, 1)[0] == ""


def test_ci_runs_four_short_experiments_which_the_commit_draws_and_all_come_up() -> None:
    assert set(smoke.SHORT) <= set(smoke.COMMANDS)
    assert set(smoke.SERVERS) <= set(smoke.COMMANDS)
    drawn = [smoke.sample(f"{number:040x}") for number in range(40)]
    assert drawn == [smoke.sample(f"{number:040x}") for number in range(40)]
    assert {len(set(names)) for names in drawn} == {4}
    assert {name for names in drawn for name in names} == set(smoke.SHORT)
    assert "python -m experiments.smoke --sample" in (ROOT / ".ci" / "smoke").read_text("utf-8")
    assert re.search(r"for part in .*\bsmoke\b", (ROOT / ".ci" / "run").read_text("utf-8"))


def test_an_experiment_whose_server_is_not_installed_is_named_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import postgres_server

    monkeypatch.setattr(postgres_server, "missing", lambda: "postgres is not installed")
    assert smoke.lacking("shared_studies") == "postgres is not installed"
    assert smoke.lacking("engines") is None


WITH_COMMIT = (
    "busy_machine/results.json", "drift/results.json", "fakegpu_depth/results.json", "full_run/overhead.json",
    "full_run/peak.json", "large_study/results.json", "large_study/storages.json", "probe_overhead/results.json",
    "slurm/cost.json", "slurm/scale.json", "slurm/storm.json", "slurm/two_nodes.json", "tiny_reward/results.json",
    "two_cards/results.json", "verl_boundaries/results.json", "verl_logs/results.json",
)  # fmt: skip


def commits_of(found: object) -> list[object]:
    """The commit of a file of results, or of each of its rows; None where there is none."""
    if isinstance(found, list):
        return [row.get("commit") for row in found]
    assert isinstance(found, dict)
    if "commit" in found or "commit" in found.get("summary", {}):
        return [found.get("commit") or found["summary"]["commit"]]
    return [row.get("commit") for row in found.values() if isinstance(row, dict)] or [None]


def test_results_name_the_commit_that_made_them() -> None:
    made_by = {
        name: commits_of(json.loads((ROOT / "experiments" / name).read_text("utf-8"))) for name in WITH_COMMIT
    }  # fmt: skip
    assert not [name for name, commits in made_by.items() if not commits or None in commits]
    if page.no_history():
        pytest.skip(page.no_history())
    assert not page.unknown(sorted({str(commit) for commits in made_by.values() for commit in commits}))


def search_experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program of experiments/search_efficiency, which imports its neighbours by their names."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "search_efficiency"))
    for name in ("cases", "law", "habits", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("run")


def test_a_median_of_fewer_searches_is_told_with_the_values_it_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    run = search_experiment(monkeypatch)
    assert run.median_interval([2] * 100) == [2, 2]
    assert run.median_interval(list(range(1, 101))) == [40, 61]
    assert run.median_interval([3, 1, 2]) == [1, 3]


def test_the_search_experiment_searches_a_case_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = search_experiment(monkeypatch)
    run._CASES["small"] = case = run.cases.case_of(run.cases.RECIPES[0], run.law.CARDS["rtx4090"])
    row = run.search(("autofit", "small", 0.05, 0, "law:truth", 3, False))
    assert len(case.grid) > 10
    assert len(row["speed"]) == 3
    assert row["speed"][-1] > 0


def test_a_value_that_was_not_measured_is_its_neighbours_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "rates"))
    smoothed = importlib.import_module("fitting").smoothed
    values = smoothed(np.array([1.0, np.nan, 3.0]), [np.array([0.0, 1.0, 2.0])], [0.1])
    assert values == pytest.approx([1.0, 2.0, 3.0], abs=1e-3)
