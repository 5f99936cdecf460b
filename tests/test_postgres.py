"""Studies that several people share, on a real Postgres: searches at once, kills, restarts, roles, and no password."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import command_line
import optuna
import pytest
from at_once import AtOnce
from lawful import at_once
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from postgres_server import PASSWORD, SECRET, Server, missing, server, wait_until
from search_driver import plan

from autofit.api import report, studies
from autofit.cli import main
from autofit.errors import AutofitError, ConfigError, EnvironmentFault
from autofit.probing.result import ProbeRequest
from autofit.tuning.frontier import Trial
from autofit.tuning.postgres import keep_locks
from autofit.tuning.record import record_of
from autofit.tuning.search import Search, open_study
from autofit.tuning.storage import VARIABLE, use_storage
from autofit.tuning.study import database_errors, driving, load_study, open_storage, trials_of

HERE = Path(__file__).parent
_numbers = count(1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with server() as made:
        yield made


@pytest.fixture
def url(postgres: Server) -> str:
    """The URL of a new database, with a password."""
    return postgres.new_database(f"studies{next(_numbers)}")


@pytest.fixture
def folder(url: str, tmp_path: Path) -> Path:
    """A folder whose studies are in that database."""
    use_storage(tmp_path / "studies", url)
    return tmp_path / "studies"


def search(folder: Path, trials: int = 4) -> optuna.Study:
    """A whole search in this process."""
    with driving(folder, "law"):
        study = open_study(plan(folder, trials))
        Search(plan(folder, trials), study, server_socket=None, launcher=AtOnce(at_once)).run()
    return study


def driver(folder: Path, trials: int, storage: str) -> subprocess.Popen[str]:
    """A search with lawful probes as a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "search_driver.py"), str(folder), str(trials)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, VARIABLE: storage, "LAWFUL_S": "0.05"},
    )  # fmt: skip


def finished(folder: Path) -> int:
    """Trials of the study `law` with a result."""
    try:
        return sum(t.result is not None for t in trials_of(load_study(folder, "law")))
    except AutofitError:  # it is not there yet
        return 0


def complete(folder: Path, trials: int) -> bool:
    """Whether the study has these trials, each once, and none that nobody works on."""
    found = load_study(folder, "law").get_trials()
    return [t.number for t in found] == list(range(trials)) and all(t.state is TrialState.COMPLETE for t in found)


# -- several at once --


def test_a_study_goes_on_from_another_folder_and_both_find_it(folder: Path, url: str, tmp_path: Path) -> None:
    search(folder, 3)
    use_storage(tmp_path / "bob", url)
    search(tmp_path / "bob", 5)
    assert complete(folder, 5)
    assert [s.name for s in studies(folder).studies] == ["law"]
    assert report("law", folder=tmp_path / "bob").winner is not None
    assert record_of(load_study(folder, "law")).owner.endswith(os.uname().nodename)


def test_a_study_that_is_driven_twice_is_refused_with_the_name_of_its_driver(
    folder: Path, url: str, tmp_path: Path
) -> None:
    use_storage(tmp_path / "bob", url)
    told = rf"working on law in .*: autofit .*@.* pid {os.getpid()} \(role ann"
    with driving(folder, "law"), driving(tmp_path / "bob", "x"), pytest.raises(ConfigError, match=told):
        search(tmp_path / "bob")
    search(tmp_path / "bob")  # it is free again


def test_another_recipe_under_the_same_name_is_refused_with_the_name_of_its_owner(folder: Path, url: str) -> None:
    search(folder)
    other = replace(plan(folder, 4), measured_steps=7)
    with pytest.raises(ConfigError, match=r"'law' was made by \S+@\S+ for another recipe.*give another name"):
        open_study(other)


def test_four_first_searches_at_once_make_one_database(folder: Path) -> None:
    failed: list[BaseException] = []

    def make(name: str) -> None:
        try:
            optuna.create_study(study_name=name, storage=open_storage(folder, create=True))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(f"s{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(optuna.get_all_study_names(open_storage(folder))) == ["s0", "s1", "s2", "s3"]


@pytest.mark.slow
def test_a_killed_driver_frees_its_study_and_loses_no_trial(url: str, tmp_path: Path) -> None:
    use_storage(tmp_path / "ann", url)
    use_storage(tmp_path / "bob", url)
    first = driver(tmp_path / "ann", 8, url)
    wait_until(lambda: finished(tmp_path / "ann") >= 2, within_s=60)
    first.kill()
    first.wait()
    search(tmp_path / "bob", 8)  # ann's probe at work is not in bob's folder
    assert complete(tmp_path / "bob", 8)


def test_a_trial_that_was_made_twice_is_probed_as_well(folder: Path) -> None:
    with driving(folder, "law"):
        study = open_study(plan(folder, 5))
        at_work = Search(plan(folder, 5), study, server_socket=None, launcher=AtOnce(at_once))
        told = count(1)

        def make_another(_: Trial) -> None:  # as a server that stops between the commit of a new trial and its answer
            if next(told) == 2:
                study.ask()

        at_work.on_told = make_another
        at_work.run()
    assert complete(folder, 5)


# -- a server that goes away --


@pytest.mark.parametrize("how", ["fast", "kill"])
def test_a_restart_of_the_server_is_waited_for_and_nothing_is_lost(
    postgres: Server, folder: Path, caplog: pytest.LogCaptureFixture, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.tuning.postgres._QUIET_S", 0.2)
    with driving(folder, "law"):
        study = open_study(plan(folder, 6))
        launcher, asked = AtOnce(at_once), count(1)
        submit = launcher.submit

        def submit_and_restart(request: ProbeRequest) -> None:
            submit(request)
            if next(asked) == 3:  # before its result is told: Optuna itself tries several times to make a trial
                _restart(postgres, how)

        monkeypatch.setattr(launcher, "submit", submit_and_restart)
        Search(plan(folder, 6), study, server_socket=None, launcher=launcher).run()
        with pytest.raises(ConfigError, match=r"working on law"), driving(folder, "law"):
            pass  # the lock was taken again
    assert complete(folder, 6)
    assert "waiting up to 60 s for postgresql://ann@127.0.0.1" in caplog.text
    assert "is back" in caplog.text
    assert SECRET not in caplog.text


def _restart(postgres: Server, how: str) -> None:
    postgres.kill() if how == "kill" else postgres.stop()
    threading.Timer(0.8, postgres.start).start()


def test_who_lost_its_study_to_another_while_the_server_was_away_ends(folder: Path, postgres: Server) -> None:
    with driving(folder, "law"):
        database = postgres.sql("SELECT datname FROM pg_database WHERE datname ~ 'studies' ORDER BY oid DESC LIMIT 1")
        held = "SELECT pid, objid, classid FROM pg_locks WHERE locktype = 'advisory'"
        pid, low, high = postgres.sql(held, database).split("|")
        postgres.sql(f"SELECT pg_terminate_backend({pid})")
        key = int(high) << 32 | int(low)
        other = subprocess.Popen(postgres.psql(f"SELECT pg_advisory_lock({key}), pg_sleep(60)", database))
        try:
            wait_until(lambda: bool(postgres.sql(held, database)))
            with pytest.raises(ConfigError, match=r"another autofit process is working on law.*psql"):
                keep_locks()
        finally:
            other.kill()
            other.wait()


def test_a_server_that_is_down_refuses_or_has_no_room_is_one_line(postgres: Server, url: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"Connection refused.*check the server"):
        studies(tmp_path / "a", storage="postgresql://ann@127.0.0.1:1/db")
    with pytest.raises(EnvironmentFault, match=r"password authentication failed.*PGPASSWORD"):
        studies(tmp_path / "b", storage=url.replace(PASSWORD, "wrong"))
    with pytest.raises(ConfigError, match=r"there are no studies in postgresql://ann@127.0.0.1.*autofit search"):
        studies(tmp_path / "c", storage=url)
    name = url.rpartition("/")[2]
    postgres.sql(f'ALTER DATABASE "{name}" CONNECTION LIMIT 0')
    with pytest.raises(EnvironmentFault, match=r"too many connections.*run the same command again"):
        studies(tmp_path / "c", storage=url)


def test_a_full_disk_of_the_server_is_told_and_nothing_is_lost(folder: Path, url: str, postgres: Server) -> None:
    study = search(folder, 2)
    told = r"could not extend file.*No space left.*free some space on the server"
    with postgres.full(url.rpartition("/")[2]), pytest.raises(EnvironmentFault, match=told), database_errors(folder):
        study.set_user_attr("large", os.urandom(10**6).hex())
    search(folder, 4)
    assert complete(folder, 4)


# -- roles, passwords, versions --


def test_a_role_that_can_only_read_reports_and_mirrors_but_does_not_search(
    folder: Path, url: str, postgres: Server, tmp_path: Path
) -> None:
    search(folder)
    look, reader = tmp_path / "look", url.replace("//ann", "//reader")
    assert studies(look, storage=reader).studies[0].fits
    assert report(folder=look).winner is not None
    with pytest.raises(EnvironmentFault, match=r"must write to postgresql://reader@.*role reader can only read"):
        search(look)
    empty = postgres.new_database(f"studies{next(_numbers)}").replace("//ann", "//reader")
    use_storage(tmp_path / "empty", empty)
    with pytest.raises(EnvironmentFault, match=r"permission denied for schema public.*role reader lacks a right"):
        search(tmp_path / "empty")


def test_a_database_of_another_optuna_is_told_without_the_password(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(folder)
    monkeypatch.setattr(RDBStorage, "get_head_version", lambda self: "v9.9.9.a")
    with pytest.raises(EnvironmentFault, match=r"another version of Optuna.*--storage postgresql://ann@127\.0\.0\.1"):
        report(folder=folder)


def test_a_folder_remembers_its_database_and_takes_no_other(folder: Path, url: str, tmp_path: Path) -> None:
    search(folder)
    again = tmp_path / "again"
    folder.rename(again)
    secret = tmp_path / "url"
    use_storage(again, url.rpartition("/")[0] + "/elsewhere")
    with pytest.raises(ConfigError, match=r"are in postgresql://ann@.*/studies\d+, and not in .*/elsewhere; choose"):
        open_storage(again, create=True)
    secret.write_text(url)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others can read .*chmod 600"):
        report(folder=tmp_path / "x", storage=f"file:{secret}")
    secret.chmod(0o600)
    assert report(folder=tmp_path / "x", storage=f"file:{secret}").winner is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [("mysql://u:hidden@h/d", "got mysql:"), ("postgresql://u:hid@den:x@h:port/d", "cannot be read as one"),
     ("studies.db", "no scheme"), ("file:nowhere", "nowhere cannot be read: No such file"),
     ("postgresql://h/d?sslpassword=hidden", "must not have an sslpassword")],
)  # fmt: skip
def test_a_wrong_storage_is_one_line_that_shows_no_password(
    given: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert main(["studies", "--dir", str(tmp_path), "--storage", given]) == 2
    told = capfd.readouterr().err
    assert message in told
    assert "hid" not in told
    assert told.splitlines()[-1].startswith("autofit: ")
    assert ("seen by others" in told) == ("hid" in given)


def test_a_missing_driver_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'psycopg2-binary>=2\.9\.9'"):
        studies(tmp_path, storage="postgresql://h/d")


@pytest.mark.slow
def test_no_file_no_output_and_no_row_has_the_password(
    postgres: Server, url: str, tmp_path: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, url)
    outputs = []
    for command in (
        ["search", str(tiny_recipe), "--device", "cpu", "--target-vram", "4GB", "--trials", "2", "--no-confirm",
         "--storage", url],
        ["studies"], ["report", "--html", str(tmp_path / "report.html")], ["sync"], ["monitor", "--once"],
        ["promote", "best", "--write-only"], ["sync", "--storage", url.replace("//ann", "//reader")],
    ):  # fmt: skip
        done = command_line.run(Path.cwd(), *command, "--dir", str(tmp_path / "studies"))
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        outputs.append(done.stdout + done.stderr)
    dumped = subprocess.run(postgres.psql("TABLE study_user_attributes; TABLE trial_user_attributes",
                                          url.rpartition("/")[2]), capture_output=True, check=True).stdout  # fmt: skip
    places = tmp_path, Path(os.environ["AUTOFIT_CACHE"]), Path(os.environ["TMPDIR"])
    files = [p.read_bytes() for place in places for p in place.rglob("*") if p.is_file()]
    texts = ["".join(outputs).encode(), dumped, *files]
    assert (tmp_path / "studies" / "mlflow.db").exists()
    assert any(b"postgresql://ann@" in text for text in texts)
    assert not any(secret.encode() in text for text in texts for secret in (SECRET, PASSWORD))
