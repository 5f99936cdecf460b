"""The imports of the fork server, in one of its children; and what they put off, without torch."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from pathlib import Path

import pytest

from autofit.plugin.lean import _compiled_on_use, _read_once, without_source
from autofit.probing import kept_server
from autofit.probing.fork_server import ForkServer


@pytest.mark.slow  # starts a fork server: that of the other tests runs commands too, which import more
def test_what_the_imports_leave_out_is_there_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the server that a process starts by itself, as its kept server was killed."""
    monkeypatch.setattr(kept_server, "hold", lambda: kept_server.Held(str(tmp_path / "gone"), None))
    with contextlib.closing(ForkServer(tmp_path / "server")) as server:
        ending = server.call(
            {
                "entry": "preloaded:run", "argument": str(tmp_path / "answer.json"), "cwd": str(Path(__file__).parent),
                "log": str(tmp_path / "log"), "env": dict(os.environ), "deadline_s": 60.0,
            }
        )  # fmt: skip
    assert ending.exit_code == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "answer.json").read_text()) == {
        "before": [],
        "samples": 1,
        "scipy": False,
        "card": True,
        "tells_nobody": True,
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


def test_a_file_and_a_line_are_told_without_reading_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> None:
        pytest.fail("the source was read")

    frame = inspect.currentframe()
    assert frame is not None
    whole = inspect.getframeinfo(frame)
    monkeypatch.setattr(inspect, "findsource", read)
    with without_source():
        told = inspect.getframeinfo(frame)
    assert (told.filename, told.function, told.code_context) == (whole.filename, whole.function, None)
    assert told.lineno > whole.lineno


def test_transformers_reads_a_folder_of_models_once_however_it_is_named() -> None:
    from transformers.utils import import_utils as imports

    folder = Path(imports.__file__).parents[1] / "models" / "auto"
    read = imports.create_import_structure_from_path
    with _read_once():
        found = imports.create_import_structure_from_path(str(folder / "__init__.py"))
        assert imports.create_import_structure_from_path(folder) is found
    assert found == read.__wrapped__(str(folder)) != {}
    assert imports.create_import_structure_from_path is read
