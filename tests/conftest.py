"""Fixtures that cost seconds and are shared: the tiny model, one fork server, ... Which tests share a worker."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import command_line
import counted_work
import durations
import pytest
import tiny
from drivers import Driver, compiled
from null_gpu.build import NullGpu, build
from null_gpu.build import missing as no_null_gpu
from slurm_cluster import Cluster, cluster, missing

from autofit.cluster.slurm import SlurmQueue
from autofit.plugin.lean import lean_imports
from autofit.probing import kept_server
from autofit.probing.fork_server import ForkServer

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Jobs and drivers are processes of their own: they import the tests' helpers too, and the experiments.
HELPERS = (Path(__file__).parent, Path(__file__).parents[1] / "experiments")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, HELPERS), os.environ.get("PYTHONPATH")]))
# Tiny models gain nothing from a second thread, and threads that spin beside another worker cost seconds: a training
# under torch's profiler took 49 s of processor time with two threads, 20 s with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # until all tests are collected: collections while modules are imported take seconds, and free nothing
_whole_collections = 0
_COUNTED = pytest.StashKey[list[dict[str, int]]]()
DEFAULT = "not slow and not thorough and not gpu and not cuda"  # as in pyproject.toml


# Files whose tests share an expensive fixture, or what another has left: each runs on one worker.
TOGETHER = {
    "tests/demo/test_tiny.py", "tests/fakegpu/test_formula.py", "tests/test_ahead.py", "tests/test_confirmation.py",
    "tests/test_contract.py", "tests/test_engine_probes.py", "tests/test_floors.py", "tests/test_installed.py",
    "tests/test_interruption.py", "tests/test_mlflow_pages.py", "tests/test_probe.py", "tests/test_promoted_run.py",
    "tests/test_promotion.py", "tests/test_rank_runs.py", "tests/test_tracking.py", "tests/test_web.py",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without xdist (`-p no:xdist`) its option in pyproject.toml is taken and means nothing."""
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Hand out one test at a time, in order, but the files of TOGETHER whole.

    Not `--dist=loadgroup`: xdist 3.8 names groups in an attribute that pytest 9.2 no longer reads.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class TestsAndFiles(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if file in TOGETHER else nodeid

    config.option.loadscopereorder = False  # the longest training, in tests/demo, begins first
    return TestsAndFiles(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only slow tests are asked for, files without one are not imported."""
    if collection_path.suffix != ".py" or not config.getoption("markexpr").startswith("slow and "):
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    has_slow = "mark.slow" in collection_path.read_text("utf-8") or file in durations.files()
    return None if has_slow else True


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Where whole folders are collected, their imports put off what few tests use, as those of the fork server do."""
    with lean_imports() if all(Path(each).is_dir() for each in session.config.args) else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of durations.tsv as slow, but for whole cases of a capability, which the default tests have.

    Whole files first, after the longest training, then those with the longest tests: the short ones that follow keep
    all workers busy to the end.
    """
    long = durations.read()
    durations.collected.update(f"{item.nodeid.split('::')[0]}::{item.name}" for item in items)
    longest: dict[str, float] = {}  # of each file's tests, in seconds
    for item in items:
        file = item.nodeid.split("::")[0]
        row = long.get(f"{file}::{item.name}")
        if row is not None:
            longest[file] = max(row.seconds, longest.get(file, 0.0))
            if not row.is_default:
                item.add_marker("slow")

    def place(item: pytest.Item) -> tuple[bool, bool, float]:
        file = item.nodeid.split("::")[0]
        return not file.startswith("tests/demo/"), file not in TOGETHER, -longest.get(file, 0.0)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Leave what was imported out of later garbage collections, as the fork server does.

    Trainers collect garbage several times a training, which takes 0.35 s with torch, transformers and TRL in memory.
    """
    if "autofit.tracking.database" in sys.modules:
        import mlflow_template

        mlflow_template.install()
    if "autofit.tuning.study" in sys.modules:
        import optuna_template

        optuna_template.install()
    if "autofit.fakegpu.device" in sys.modules:
        import shared_operations

        shared_operations.install()
        counted_work.count_cards()
    gc.freeze()  # collected first, 5 % of the objects would go, for a second
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """CI ends after 90 minutes wherever it is: on a slow machine, slow tests are left out from a time on."""
    until = os.environ.get("AUTOFIT_SLOW_TESTS_UNTIL")  # seconds since the epoch
    if until and item.get_closest_marker("slow") and time.time() > float(until):
        pytest.skip("CI's time is used up: nox -s slow")


def pytest_runtest_logfinish() -> None:
    """After a training leave what tests made and kept out of later collections, too: each training asks for many."""
    global _whole_collections
    before, _whole_collections = _whole_collections, gc.get_stats()[-1]["collections"]
    if _whole_collections - before > 10:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker of xdist counted."""
    if (counted := getattr(node, "workeroutput", {}).get("counted")) is not None:
        node.config.stash.setdefault(_COUNTED, []).append(counted)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of work on to the one that shows them; a whole default run above its budget fails."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["counted"] = config.stash.get(_COUNTED, [counted_work.total([])])[0]
    elif _is_whole(config) and counted_work.above(counted_work.total(config.stash.get(_COUNTED, []))):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show what was counted."""
    found = counted_work.total(config.stash.get(_COUNTED, []))
    terminalreporter.write_line(f"started: {', '.join(f'{count} {kind}' for kind, count in found.items())}")
    for sentence in counted_work.above(found) if _is_whole(config) else []:
        terminalreporter.write_line(sentence, red=True)


def _is_whole(config: pytest.Config) -> bool:
    """True for a run of all default tests by two workers, as each worker starts some of its own."""
    own = config.getoption("keyword") or config.getoption("markexpr") != DEFAULT or config.getoption("lf", False)
    own = own or config.getoption("numprocesses") != 2
    return not own and all(Path(each).resolve() == Path(__file__).parent for each in config.args)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """What commands keep between runs or share with others goes to folders of this session's own."""
    os.environ["AUTOFIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["AUTOFIT_SERVER"] = "0"  # no command of a test leaves a server behind, unless the test is of that
    os.environ["AUTOFIT_MLFLOW"] = "0"  # a mirror imports for 4 s, and a training waits for its own; see `mirrored`
    # The slots of probes lie there: sessions and workers of pytest-xdist do not wait for each other's. A short path,
    # as a socket's has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="autofit-tests-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        command_line.session_begins(Path(folder))
        counted_work.begin(Path(folder) / "counted")
        yield
        command_line.session_ends()
        pytestconfig.stash[_COUNTED] = [counted_work.counts()]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_recipe(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GRPO recipe in a folder of its own, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return tiny.write_recipe(tmp_path, tiny_model)


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Variables that a test sets, as a trainer does those of a recipe's `env`, end with it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches and full runs of this test are mirrored to MLflow while they work, as outside of tests."""
    monkeypatch.delenv("AUTOFIT_MLFLOW")


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The kept server that runs the tests' commands: one import of torch, transformers and TRL for both (5 s)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_server, "_here", str(command_line.server()))
        server = ForkServer(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


@pytest.fixture
def warm(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's fork server answers the calls of commands that run in this process: they start none."""
    assert fork_server.is_ready()
    monkeypatch.setattr(kept_server, "_here", fork_server.socket_path)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake driver's libraries."""
    return compiled(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def driver(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A fake driver whose cards the tests of a file share."""
    return Driver(libraries=libraries, cards=tmp_path_factory.mktemp("driver") / "cards")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers and 4,003 words, so that the logits are what decides."""
    from fakegpu.tiny_trainers import saved_model

    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> NullGpu:
    reason = no_null_gpu()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("null-gpu")
    return NullGpu(libraries=build(folder / "libraries"), home=folder)


@pytest.fixture(scope="session")
def _slurm() -> Iterator[Cluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with cluster() as made:
        yield made


@pytest.fixture
def slurm(_slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A real Slurm of three nodes of this machine, idle, which this test's processes use."""
    monkeypatch.setenv("SLURM_CONF", str(_slurm.conf))
    monkeypatch.setattr("autofit.cluster.slurm._queue", SlurmQueue(every_s=0.3))
    yield _slurm
    _slurm.clear()
