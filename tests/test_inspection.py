"""Code of the user's that ends its own process while the recipe is read: its last words reach the user."""

from pathlib import Path

import pytest

from autofit.errors import AutofitError, ConfigError
from autofit.files import read_json, write_json
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import inspect, prepare
from autofit.recipe.yaml_file import read_source

TRAINER = """
import os, signal, sys
class Own:
    name = "own"
    def inspect(self, values, inspection):
        {body}
    def start(self, task): ...
    proof = run = start
{head}
TRAINER = Own()
"""
ENDS = {
    'sys.exit("set MY_KEY first")': "set MY_KEY first", "raise KeyboardInterrupt": "KeyboardInterrupt",
    'print("set MY_KEY first"); os._exit(3)': "exit code 3, .*; it printed last: set MY_KEY first",
    'print("set MY_KEY first", file=sys.stderr); sys.exit(1)': r"by sys.exit\(1\).*; it printed last: set MY_KEY first",
    "import warnings; warnings.warn('x'); os.kill(os.getpid(), signal.SIGSEGV)": r"crashed its process \(SIGSEGV\)$",
}  # fmt: skip


@pytest.mark.parametrize("ending", list(ENDS)[:2])
def test_an_exit_while_the_trainer_is_imported_or_reads_is_an_answer(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, head, body in (("at_import", ending, "pass"), ("at_reading", "", ending)):
        (tmp_path / f"{name}_{len(ending)}.py").write_text(TRAINER.format(head=head, body=body))
        answer = tmp_path / f"{name}.json"
        request = {
            "trainer": f"{name}_{len(ending)}:TRAINER", "values": {}, "changed": [], "device": "cpu",
            "worst_case": str(tmp_path / "worst.json"), "answer": str(answer),
        }  # fmt: skip
        write_json(tmp_path / "request.json", request)
        monkeypatch.setattr("autofit.probing.prepare.load", _loaded)
        assert inspect(str(tmp_path / "request.json")) == 0
        said = str((read_json(answer) or {})["error"])
        assert ENDS[ending] in said
        assert (f"{name}_{len(ending)}.py:6" in said) == (name == "at_reading")


def _loaded(name: str) -> object:
    """The trainer `name`, without the checks of a whole one."""
    return __import__(name.partition(":")[0]).TRAINER


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDS)
def test_the_last_words_of_a_reward_module_are_told_and_no_deleted_log_is_named(
    ending: str, tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "tiny_rewards.py").write_text(f"import os, signal, sys\n{ending}\n")
    with pytest.raises(AutofitError, match=ENDS[ending]) as raised:
        prepare(read_source(tiny_recipe), trainer="grpo", device="cpu", folder=tmp_path, server=fork_server)
    assert ".log" not in str(raised.value)


def test_a_reward_module_that_calls_autofit_is_refused_and_does_not_start_itself_again(
    tiny_recipe: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "tiny_rewards.py").write_text("import autofit\nautofit.check('run.yaml', gpu='l40s')\n")
    with pytest.raises(AutofitError, match="tiny_rewards gave ConfigError: a file that autofit imports calls autofit"):
        prepare(read_source(tiny_recipe), trainer="grpo", device="cpu", folder=tmp_path, server=fork_server)


def test_only_processes_that_import_the_recipes_code_may_not_start_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFIT_INSIDE", "1")
    with pytest.raises(ConfigError, match="under if __name__ == "):
        ForkServer(tmp_path)
