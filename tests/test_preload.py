"""The imports of the fork server, in one of its children; and what they put off, without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autofit.probing.fork_server import ForkServer
from autofit.probing.preload import _compiled_on_use


@pytest.mark.slow  # starts a fork server
def test_what_the_imports_leave_out_is_there_when_it_is_used(fork_server: ForkServer, tmp_path: Path) -> None:
    ending = fork_server.call(
        {
            "entry": "preloaded:run", "argument": str(tmp_path / "answer.json"), "cwd": str(Path(__file__).parent),
            "log": str(tmp_path / "log"), "env": dict(os.environ), "deadline_s": 60.0,
        }
    )  # fmt: skip
    assert ending.exit_code == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "answer.json").read_text()) == {
        "before": [],
        "assigned": [[0, 1], [1, 0]],
        "mlflow": True,
        "compile": "torch",
        "distributions": "function",
    }


def test_a_function_is_compiled_once_when_it_is_first_called_with_the_options_that_were_given() -> None:
    asked: list[object] = []

    def compile_now(function: object, **options: object) -> object:
        asked.append(options)
        return function

    later = _compiled_on_use(compile_now)

    def double(number: int) -> int:
        """Doubles."""
        return 2 * number

    twice = later(dynamic=False)(double)
    assert not asked
    assert (twice(2), twice(number=3), twice.__doc__) == (4, 6, "Doubles.")
    assert asked == [{"dynamic": False}]
    assert later(twice)(1) == 2
