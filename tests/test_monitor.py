"""What `autofit monitor` and `autofit studies` say: of cards by a fake driver, of probes and runs by their files."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lawful
import psutil
import pytest
from at_once import AtOnce
from drivers import FAKE_GPU_UUID, Card, Driver
from search_driver import plan

import autofit
from autofit.api.promoted import Runs
from autofit.cli import main
from autofit.cluster.slurm import SlurmQueue
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.hardware.health import HostUse, ProcessUse, host_use, tree_use
from autofit.probing.launch import probes_at_work
from autofit.probing.result import ProbeRequest
from autofit.probing.supervise import note_of
from autofit.recipe.recipe import merge
from autofit.tuning.search import Search, open_study
from autofit.watching.events import EventKind, RunEvent, keep_event

MB = 10**6
OTHER = "GPU-11111111-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study of 4 trials."""
    folder = tmp_path_factory.mktemp("studies")
    wanted = plan(folder, 4)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    return folder


@pytest.fixture
def folder(studied: Path, tmp_path: Path) -> Path:
    """A copy of it to write into."""
    return Path(shutil.copytree(studied, tmp_path / "copy"))


def started(folder: Path, pid: int | None = None) -> None:
    """Say that the job in `folder` is the process `pid`: this one, unless it is given."""
    process = psutil.Process(pid)
    write_json(folder / "started.json", note_of(process.pid))


def probing(folder: Path, name: str = "trial-0009-1", *, device: str = "cpu", phase: str | None = "rollout") -> Path:
    """The files of a probe at work, whose job is this process."""
    home = folder / "probes" / "law" / name
    values = merge(plan(folder, 1).recipe.values, {"per_device_train_batch_size": 8})
    request = ProbeRequest(
        folder=home, trainer="grpo", values=values, device=device, limit_bytes=150 * MB, worst_case=folder / "w.json"
    )
    write_json(request.request_path, request.to_json())
    started(home)
    if phase is not None:
        request.phase_path.write_text(phase)
    return home


def line(step: int, **figures: object) -> dict[str, object]:
    return {"step": step, "max_steps": 100, "time": 1000.0 + 2 * step, "run_s": 2.0 * step, "step_s": 2.0,
            "reward": 0.5, **figures}  # fmt: skip


def running(folder: Path, trial: int = 1, *, device: str = "cpu", steps: int = 10, **figures: object) -> Path:
    """The files of a promoted run at work, whose job is this process."""
    home = folder / "promoted" / f"law-trial-{trial}"
    write_json(home / "request.json", {"study": "law", "trial": trial, "device": device})
    started(home)
    (home / "progress.jsonl").write_text("".join(json.dumps(line(n, **figures)) + "\n" for n in range(1, steps + 1)))
    promise = {"device_name": "cpu", "fidelity": "measured", "device_used_bytes": 100 * MB, "limit_bytes": 150 * MB,
               "step_s": 1.0, "samples_per_s": 16.0, "effective_batch_size": 16, "proof": "proven"}  # fmt: skip
    start = {"promise": promise, "device": "cpu", "device_name": "cpu", "generates": True, "samples_per_step": 16,
             "batch_text": "4 x 4", "effective_batch_size": 16}  # fmt: skip
    keep_event(home, RunEvent(step=0, kind=EventKind.PROMISE, text="promised", data=start))
    return home


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# -- the host, probes and runs ----------------------------------------------------------------------------------------


def test_without_a_card_it_shows_the_cpu_and_what_our_processes_hold(folder: Path) -> None:
    probing(folder)
    found = autofit.monitor(folder)
    assert found.cards == ()
    assert found.host.capacity_bytes == psutil.virtual_memory().total
    assert 0 < found.host.used_bytes < found.host.capacity_bytes
    assert found.host.utilisation_frac is not None
    assert 0 <= found.host.utilisation_frac <= 1
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]  # with the fork server of other tests
    own = sum(process.memory_info().rss for process in tree)
    assert found.host.ours_rss_bytes == pytest.approx(own, rel=0.5)
    (probe,) = found.probes
    assert probe.rss_bytes == found.host.ours_rss_bytes
    assert probe.cpu_frac is not None


def test_a_probe_says_what_it_changes_where_it_is_and_for_how_long(folder: Path) -> None:
    home = probing(folder)
    os.utime(home / "request.json", (time.time() - 60, time.time() - 60))
    (probe,) = autofit.monitor(folder).probes
    assert (probe.study, probe.trial, probe.name, probe.device, probe.phase) == ("law", 9, "trial 9", "cpu", "rollout")
    assert probe.changes == "per_device_train_batch_size 4 -> 8"
    assert probe.limit_bytes == 150 * MB
    assert 60 <= probe.elapsed_s < 70


def test_waiting_simulated_and_confirming_probes_are_shown_and_ended_or_dead_ones_are_not(folder: Path) -> None:
    probing(folder, "trial-0010-1", device="sim:t4", phase=None)
    probing(folder, "confirm-0003-with-0000-01-1")
    ended = probing(folder, "trial-0011-1")
    (ended / "answer.json").write_text("{}")
    dead = probing(folder, "trial-0012-1")
    write_json(dead / "started.json", note_of(2**22))
    (folder / "probes" / "law" / "stand_in_model").mkdir()
    (folder / "probes" / "law" / "trial-0013-1").mkdir()
    (folder / "probes" / "law" / "trial-0014-1").mkdir()
    (folder / "probes" / "law" / "trial-0014-1" / "request.json").write_text("[")
    found = probes_at_work(folder)
    assert {(p.name, p.phase, p.request.device) for p in found} == {
        ("confirmation of trial 3", "rollout", "cpu"), ("trial 10", None, "sim:t4")
    }  # fmt: skip


def test_a_probe_whose_job_the_scheduler_has_forgotten_is_not_shown_as_running(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home := probing(folder)).joinpath("job.json").write_text('{"slurm": "14_0"}')
    said: dict[str, str | None] = {"squeue": "14_0|RUNNING|n1|None|autofit-x\n"}
    monkeypatch.setattr("autofit.cluster.slurm._call", lambda *_, **__: said["squeue"])
    for answer, shown in ((said["squeue"], [home]), ("", []), (None, [home])):  # None: slurmctld does not answer
        said["squeue"] = answer
        monkeypatch.setattr("autofit.cluster.slurm._queue", SlurmQueue())
        assert [probe.folder for probe in probes_at_work(folder)] == shown


def test_processor_time_is_that_of_the_living_processes_whichever_ended_or_began() -> None:
    before = ProcessUse(rss_bytes=1, cpu_s={1: 4.0, 2: 9.0, 3: 7.0})
    now = ProcessUse(rss_bytes=1, cpu_s={1: 5.0, 3: 0.5, 4: 2.0})  # 2 ended, 4 began, and 3 is another process now
    assert now.cpu_s_since(before) == 3.0


def test_the_worker_of_a_fork_server_counts_and_another_process_with_its_id_does_not(folder: Path) -> None:
    home = probing(folder)
    child = subprocess.Popen([sys.executable, "-c", "import time; x = bytearray(50_000_000); time.sleep(60)"])
    started(home, child.pid)
    (home / "pid").write_text(str(os.getpid()))  # a process elsewhere: this one is not below the child
    try:
        (probe,) = probes_at_work(folder)
        use = probe.use()
        assert use is not None
        assert {child.pid, os.getpid()} <= use.pids
        os.utime(home / "pid", (0, 0))  # written before this process began: the id is another's
        use = probe.use()
        assert use is not None
        assert use.pids == {child.pid}
    finally:
        child.kill()
        child.wait()


def test_a_run_says_how_far_it_is_when_it_ends_and_what_was_promised(folder: Path) -> None:
    running(folder, peak_allocated_bytes=7 * MB, peak_reserved_bytes=9 * MB, alloc_retries=2)
    (run,) = autofit.monitor(folder).runs
    assert run.progress is not None
    assert (run.state, run.progress.step, run.progress.last_step) == ("running", 10, 100)
    assert run.progress.eta_s == pytest.approx(180)
    assert (run.peak_allocated_bytes, run.peak_reserved_bytes, run.alloc_retries) == (7 * MB, 9 * MB, 2)
    step = next(row for row in run.contract if row.key == "step_s")
    assert (step.promised, step.actual, step.kept) == (1.0, 2.0, False)
    assert run.kept is False
    assert run.last_event == "promised"


def test_what_a_run_does_not_say_of_its_allocator_is_unknown_and_not_zero(folder: Path) -> None:
    running(folder, steps=0)
    (run,) = autofit.monitor(folder).runs
    assert run.progress is None
    assert (run.peak_allocated_bytes, run.peak_reserved_bytes, run.alloc_retries) == (None, None, None)


def test_runs_at_work_come_first_and_of_the_ended_the_last_three(folder: Path) -> None:
    for trial in range(1, 7):
        home = running(folder, trial)
        if trial != 6:
            write_json(home / "started.json", note_of(2**22))
        for name in ("progress.jsonl", "request.json"):
            os.utime(home / name, (1000 + trial, 1000 + trial))
    write_json(folder / "promoted" / "law-trial-5" / "final.json", {"steps": 100})
    found = [(run.trial, run.state) for run in autofit.monitor(folder).runs]
    assert found == [(6, "running"), (5, "done"), (4, "interrupted"), (3, "interrupted")]


def test_files_that_are_no_runs_are_passed_over(folder: Path) -> None:
    for name, text in (("a", "{"), ("b", "{}"), ("c", '{"study": "law"}'), ("d", "[1]")):
        home = folder / "promoted" / name
        home.mkdir(parents=True)
        (home / "request.json").write_text(text)
    home = running(folder)
    (home / "progress.jsonl").write_text('{"step": 1, "max_steps": 3}\nnonsense\n[1]\n{"step": 2, "max_')
    found = autofit.monitor(folder).runs
    assert [run.progress and run.progress.step for run in found] == [1]


def test_a_watch_sees_new_steps_and_the_end_of_a_run(folder: Path) -> None:
    home = running(folder)
    runs = Runs(folder)
    (run,) = runs.now()
    with (home / "progress.jsonl").open("a") as file:
        file.write(json.dumps(line(11)) + "\n")
    (run,) = runs.now()
    assert runs.last_line(run)["step"] == 11
    write_json(home / "final.json", {"steps": 11})
    assert [run.state for run in runs.now()] == ["done"]


def test_a_long_run_is_read_from_its_end(folder: Path) -> None:
    home = running(folder, steps=20_000)
    began = time.perf_counter()
    runs = Runs(folder)
    runs.now()
    first_s = time.perf_counter() - began
    with (home / "progress.jsonl").open("a") as file:
        file.write(json.dumps(line(20_001)) + "\n")
    began = time.perf_counter()
    (run,) = runs.now()
    assert runs.last_line(run)["step"] == 20_001
    assert time.perf_counter() - began < 0.5 * first_s


def test_the_hosts_use_is_over_the_time_between_two_looks() -> None:
    early = HostUse(cores=2, capacity_bytes=9, used_bytes=1, busy_s=100.0, at_s=10.0)
    assert replace(early, busy_s=102.0, at_s=12.0).utilisation_since(early) == 0.5
    assert early.utilisation_since(None) is None
    assert replace(early, busy_s=500.0, at_s=11.0).utilisation_since(early) == 1.0
    assert host_use().busy_s > 0
    assert tree_use(2**22) is None


# -- the cards --------------------------------------------------------------------------------------------------------


def told(driver: Driver, folder: Path, processes: str = "", *arguments: str) -> Any:
    """The snapshot of `autofit monitor --json` with this driver."""
    (driver.cards.parent / "processes").write_text(processes)
    env = driver.env(FAKE_PROCESSES=str(driver.cards.parent / "processes"))
    command = [sys.executable, "-m", "autofit", "monitor", "--json", "--dir", str(folder), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cards_processes_are_named_by_the_run_that_they_belong_to(driver: Driver, folder: Path) -> None:
    driver.has(Card(total_mib=1000, reserved_mib=10, used_mib=300), Card(uuid=OTHER, name="B"))
    running(folder, device="cuda", peak_allocated_bytes=200, peak_reserved_bytes=250, alloc_retries=3)
    ours, others = os.getpid(), os.getppid()
    found = told(driver, folder, f"{FAKE_GPU_UUID} {ours} 120\n{FAKE_GPU_UUID} {others} 70\n{OTHER} {2**22} -1\n")
    first, second = found["cards"]
    assert (first["device_used_bytes"], first["capacity_bytes"]) == (300 << 20, 1000 << 20)
    assert first["utilisation_frac"] == 0.87
    assert first["processes"][0] == {"pid": ours, "used_bytes": 120 << 20, "what": "full run of trial 1"}
    assert first["processes"][1]["what"] not in ("", "full run of trial 1")
    assert (first["peak_allocated_bytes"], first["peak_reserved_bytes"], first["alloc_retries"]) == (200, 250, 3)
    assert second["processes"] == [{"pid": 2**22, "used_bytes": None, "what": ""}]
    assert (second["peak_allocated_bytes"], second["alloc_retries"]) == (None, None)
    assert found["runs"][0]["device_used_bytes"] == 120 << 20


def test_of_a_slice_what_its_driver_does_not_tell_is_unknown(driver: Driver, folder: Path) -> None:
    driver.has(Card(kind="sliced"), Card(kind="slice", uuid="MIG-1", name="slice", total_mib=100, used_mib=1))
    (card,) = told(driver, folder)["cards"]
    assert card["utilisation_frac"] is None
    assert card["processes"] == []
    assert card["device_used_bytes"] == 1 << 20


# -- the commands -----------------------------------------------------------------------------------------------------


def test_one_look_is_printed_where_there_is_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(folder)
    probing(folder)
    assert main(["monitor", "--dir", str(folder)]) == 0
    out = capsys.readouterr().out
    for word in ("cpu, ", "trial 9", "rollout", "10/100", "3m00s", "Trial 1: the promise", "NO"):
        assert word in out, word
    assert main(["monitor", "--once", "--dir", str(folder)]) == 0


def test_json_has_the_same_and_is_plain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(folder)
    found = asked(capsys, "monitor", "--dir", str(folder))
    assert set(found) == {"time", "folder", "cards", "host", "probes", "runs"}
    assert found["runs"][0]["contract"][1]["key"] == "step_s"


@pytest.mark.parametrize("made", [False, True])
def test_the_cards_are_shown_before_the_first_search(
    made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if made:
        (tmp_path / "autofit-studies").mkdir()
    assert main(["monitor"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"Devices at .*cpu, \d+ cores.*There are no studies in.* yet", told, re.DOTALL)


@pytest.mark.parametrize("made", ["foreign", "file"])
def test_a_folder_without_studies_is_one_clear_error(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    if made == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        (folder / "notes.txt").write_text("")
    for arguments in (["monitor"], ["monitor", "--json"]):
        assert main([*arguments, "--dir", str(folder)]) == 2
        told = capsys.readouterr().err
        assert told == (
            f"autofit: there are no studies in {folder}; run `autofit search` first, or point --dir at its folder\n"
        )
    with pytest.raises(ConfigError, match="point folder at its folder"):
        autofit.monitor(folder)


def test_names_with_markup_are_shown_as_they_are(folder: Path) -> None:
    home = running(folder, 7)
    write_json(home / "request.json", {"study": "[red]law[/]", "trial": 7, "device": "cpu"})
    found = replace(autofit.monitor(folder), folder=Path("[bold]x"))
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    for table in found.parts():
        console.print(table)
    text = console.export_text()
    assert "[red]law[/]" in text
    assert "[bold]x" in text
    assert all("[red]law[/]" in shown and "[bold]x" in shown for shown in (str(found), found._repr_html_()))


class Terminal:
    """A terminal whose text is read all the time: a program that writes to a full one waits."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while sent := os.read(self._ours, 65536):
                self._text += sent.decode(errors="replace")

    def shows(self, text: str, *, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while text not in self._text and time.monotonic() < deadline:
            time.sleep(0.1)
        return text in self._text


@pytest.mark.slow
def test_on_a_terminal_the_view_is_live_and_ctrl_c_ends_it(folder: Path) -> None:
    home, terminal = running(folder), Terminal()
    command = [sys.executable, "-m", "autofit", "monitor", "--dir", str(folder)]
    env = {**os.environ, "COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=terminal.theirs, stdout=terminal.theirs, stderr=subprocess.PIPE, env=env)
    os.close(terminal.theirs)
    try:
        assert terminal.shows("10/100", within_s=60)
        with (home / "progress.jsonl").open("a") as file:
            file.write(json.dumps(line(11)) + "\n")
        assert terminal.shows("11/100", within_s=30)
        before = cpu_s(process.pid)
        time.sleep(3)
        assert cpu_s(process.pid) - before < 1.5  # it rests between two looks
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    use = tree_use(pid)
    assert use is not None
    return sum(use.cpu_s.values())


# -- the studies ------------------------------------------------------------------------------------------------------


def test_studies_are_listed_with_winner_and_promoted_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(folder, 3)
    (study,) = asked(capsys, "studies", "--dir", str(folder))["studies"]
    assert (study["study"], study["model"], study["trainer"], study["device"]) == ("law", "m", "grpo", "cpu")
    assert (study["target_bytes"], study["trials"], study["finished"]) == (150 * MB, 4, 4)
    best = autofit.report(folder=folder).winner
    assert best is not None
    assert (study["winner"]["trial"], study["winner"]["speedup"]) == (best.number, best.speedup)
    assert study["promoted"] == [{"trial": 3, "state": "running", "step": 10, "last_step": 100, "kept": False}]
    assert main(["studies", "--dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"trial {best.number}, {best.speedup:.2f}x" in out
    assert f"law: trial {best.number} wins with" in out


def test_the_study_used_last_is_at_the_end_and_those_of_other_programs_are_left_out(folder: Path) -> None:
    import optuna

    optuna.create_study(study_name="theirs", storage=f"sqlite:///{folder / 'studies.db'}")
    open_study(replace(plan(folder, 2), study_name="new"))
    found = autofit.studies(folder)
    assert [s.name for s in found.studies] == ["law", "new"]
    assert found.studies[1].winner is None
    assert found.to_dict()["studies"]


def test_a_database_without_studies_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import optuna

    optuna.create_study(study_name="theirs", storage=f"sqlite:///{tmp_path / 'studies.db'}")
    assert asked(capsys, "studies", "--dir", str(tmp_path)) == {"studies": []}
    assert str(autofit.studies(tmp_path)) == f"there are no studies in {tmp_path}"
