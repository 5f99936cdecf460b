"""Fixtures that cost seconds and are shared: the tiny model, and one fork server."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from autofit.probing.fork_server import ForkServer

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Jobs and drivers are processes of their own: they import the tests' helpers too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without xdist (`-p no:xdist`) its options in pyproject.toml are taken and mean nothing."""
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses")
        parser.addoption("--dist")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests for one worker")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep between runs or share with others goes to folders of this session's own."""
    os.environ["AUTOFIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # The slots of probes lie there: sessions and workers of pytest-xdist do not wait for each other's. A short path,
    # as a socket's has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="autofit-tests-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield


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
