"""Fixtures that cost seconds and are shared: the tiny model, and one fork server."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from autofit.probing.fork_server import ForkServer

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Jobs and drivers are processes of their own: they import the tests' helpers too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What commands keep between runs goes to a folder of this session's own."""
    os.environ["AUTOFIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_recipe(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GRPO recipe in a folder of its own, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tiny.write_recipe(tmp_path, tiny_model)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()
