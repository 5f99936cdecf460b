"""What becomes of a probe, by what Slurm says of its job. No Slurm: its answers are given."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import lawful
import pytest
from search_driver import plan

from autofit.cluster.scheduler import JobState, executor_of
from autofit.cluster.slurm import SlurmQueue
from autofit.errors import EnvironmentFault
from autofit.files import write_json
from autofit.probing import cluster_launch
from autofit.probing.cluster_launch import ClusterLauncher, Pool, QueueJob, _Told, job_name
from autofit.probing.launch import Attempts, Next, end_in_slurm, what_next
from autofit.probing.result import Cause, ProbeResult, ProbeStatus
from autofit.promotion.promotion import Promotion, follow


class Said(SlurmQueue):
    """What Slurm says is set by the test; it is asked at every look."""

    def _refresh(self) -> None:
        self.calls += 1
        self.asked_at = time.monotonic()


class Cluster:
    """A launcher with one probe that job 7 has taken, and what Slurm says of that job."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue, self.said = Said(), list[str]()
        monkeypatch.setattr("autofit.cluster.slurm._queue", self.queue)
        monkeypatch.setattr(cluster_launch, "_LOOK_S", 0.0)
        monkeypatch.setattr("autofit.cluster.slurm.submit", lambda *_, **__: ["7"])
        self.pool = Pool(home / "probes/law/jobs")
        self.launcher = ClusterLauncher(executor_of({"kind": "slurm"}), self.pool.home)
        self.launcher.say = self.said.append
        self.attempts = Attempts(home=home / "probes/law", name="trial-0000")
        wanted = plan(home, 1)
        self.request = wanted.setup(server_socket=None).request(self.attempts.new_folder(), wanted.recipe.values)
        self.launcher.submit(self.request)
        assert self.pool.take("7") == "trial-0000-1"
        self.tell("RUNNING")
        assert self.result() is None

    def tell(self, state: str, name: str | None = None) -> None:
        name = job_name(self.pool.home) if name is None else name
        self.queue._states = {"7": JobState(state=state, nodes="n1", name=name)}

    def prints(self, text: str) -> None:
        """Job 7 has begun on its node, and its log ends with `text`."""
        write_json(self.pool.home / "begun" / "7", {"node": "n1", "pid": 1})
        self.pool.log_of("7").parent.mkdir(exist_ok=True)
        self.pool.log_of("7").write_text(f"submitit INFO - Loading\n{text}\n\n")

    def result(self) -> ProbeResult | None:
        return self.launcher.result(self.request.folder)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "FAILED", "PENDING", "REQUEUED"])
def test_a_probe_whose_job_was_ended_is_lost_to_the_cluster_and_repeated(cluster: Cluster, state: str) -> None:
    cluster.tell(state)
    result = cluster.result()
    assert result is not None
    assert (result.status, result.ended_with_job) == (ProbeStatus.LOST, True)
    assert "job 7 on n1" in result.reason
    assert what_next(result, cluster.request.folder, **cluster.attempts.counted()) is Next.REPEAT
    failed = state in ("TIMEOUT", "FAILED")  # without a reason of Slurm's own
    assert cluster.attempts.counted() == {"attempts": 0, "jobs": 1, "failed_jobs": failed}
    assert not cluster.pool.running()
    assert (cluster.request.folder / "cancel").exists()  # what still runs of it stops


def test_an_answer_wins_over_any_state_of_its_job(cluster: Cluster) -> None:
    write_json(cluster.request.answer_path, lawful.result_of(cluster.request).to_json())
    cluster.tell("NODE_FAIL")
    result = cluster.result()
    assert result is not None
    assert result.status is ProbeStatus.FIT


def test_an_answer_that_comes_after_its_job_has_completed_is_waited_for(cluster: Cluster) -> None:
    cluster.tell("COMPLETED")
    assert cluster.result() is None
    assert cluster.pool.running()
    write_json(cluster.request.answer_path, lawful.result_of(cluster.request).to_json())
    result = cluster.result()
    assert result is not None
    assert result.status is ProbeStatus.FIT


def test_a_job_that_completed_with_a_probe_and_left_no_answer_is_repeated_after_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_launch, "LATE_S", 0.0)
    cluster.tell("COMPLETED")
    result = cluster.result()
    assert result is not None
    assert (result.status, result.ended_with_job) == (ProbeStatus.LOST, True)


def test_a_job_out_of_host_memory_is_the_probes_own_fault(cluster: Cluster) -> None:
    cluster.tell("OUT_OF_MEMORY")
    result = cluster.result()
    assert result is not None
    assert result.cause is Cause.HOST_OOM
    assert "--mem" in result.reason
    assert cluster.attempts.counted() == {"attempts": 1, "jobs": 0, "failed_jobs": 0}


@pytest.mark.parametrize(
    ("state", "printed"),
    [
        ("FAILED", "slurmstepd-n1: error: StepId=1.0 exceeded memory limit (594796544 > 314572800), being killed"),
        ("CANCELLED", "slurmstepd: error: Exceeded job memory limit"),
        ("FAILED", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM"),
    ],
)
def test_a_job_that_slurm_ended_for_its_memory_without_saying_so_in_its_state_is_read_from_its_log(
    cluster: Cluster, state: str, printed: str
) -> None:
    cluster.prints(f"{printed}\nsrun: error: n1: task 0: Killed")
    cluster.tell(state)
    result = cluster.result()
    assert result is not None
    assert result.cause is Cause.HOST_OOM
    assert "give --mem more than the partition's default" in result.reason
    assert cluster.said[-1] == f"trial-0000-1: {result.reason}"


def test_a_run_that_slurm_ended_for_its_memory_is_told_so_whatever_its_state(cluster: Cluster, tmp_path: Path) -> None:
    write_json(tmp_path / "job.json", {"slurm": "7"})
    cluster.tell("FAILED")
    assert end_in_slurm(tmp_path) == "job 7 failed, on n1"
    (tmp_path / "job").mkdir()
    (tmp_path / "job/7_0_log.out").write_text("slurmstepd: error: StepId=7.0 exceeded memory limit (9 > 8)\n")
    assert end_in_slurm(tmp_path) == "job 7 was killed, as it used more memory than --mem, on n1"


def test_a_job_that_fails_is_repeated_with_what_it_printed_and_three_are_enough(cluster: Cluster) -> None:
    cluster.prints("Bus error")
    cluster.tell("FAILED")
    result = cluster.result()
    assert result is not None
    assert result.reason == "job 7 on n1 ended as FAILED while it had the probe; it printed: Bus error"
    assert cluster.said[-1] == f"trial-0000-1 is repeated: {result.reason}"
    counted = cluster.attempts.counted()
    assert what_next(result, cluster.request.folder, **{**counted, "failed_jobs": 2}) is Next.REPEAT
    assert what_next(result, cluster.request.folder, **{**counted, "failed_jobs": 3}) is Next.KEEP


def test_a_job_of_that_id_that_is_another_ones_has_not_our_probe(cluster: Cluster) -> None:
    cluster.tell("RUNNING", name="another")
    result = cluster.result()
    assert result is not None
    assert result.cause is Cause.JOB


def test_an_answer_of_squeue_older_than_the_take_says_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Said, "_refresh", lambda _: None)
    cluster.launcher._seen.since.clear()
    cluster.pool.put("trial-0000-1")
    assert cluster.pool.end("7", "trial-0000-1")
    assert cluster.pool.take("7") == "trial-0000-1"
    cluster.queue.asked_at = time.monotonic() - 1
    cluster.tell("PENDING")
    assert cluster.result() is None


@pytest.mark.parametrize("seen_s", [20.0, 100.0])
def test_a_probe_that_an_old_listing_of_nfs_shows_nowhere_is_not_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, seen_s: float
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    taken, ended = Pool.running, cluster.pool.end("7", "trial-0000-1")
    assert ended
    cluster.pool.put("trial-0000-1")
    assert cluster.result() is None
    assert cluster.pool.take("7") == "trial-0000-1"
    monkeypatch.setattr(Pool, "running", lambda _: {})  # this machine listed the folder before
    assert cluster.result() is None
    now += 20.0
    assert cluster.result() is None
    monkeypatch.setattr(Pool, "running", taken)
    now += seen_s
    assert cluster.result() is None
    assert cluster.pool.end("7", "trial-0000-1")
    now += 20.0
    assert cluster.result() is None  # its answer is not seen yet
    assert not (cluster.request.folder / "cancel").exists()
    write_json(cluster.request.answer_path, lawful.result_of(cluster.request).to_json())
    result = cluster.result()
    assert result is not None
    assert result.status is ProbeStatus.FIT


def test_a_probe_that_is_nowhere_is_lost_after_a_while(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.pool.end("7", "trial-0000-1")
    assert cluster.result() is None  # a file may be on its way
    monkeypatch.setattr(cluster_launch, "LATE_S", 0.0)
    result = cluster.result()
    assert result is not None
    assert result.cause is Cause.JOB


@pytest.mark.parametrize("comes", [True, False])
def test_a_run_whose_job_has_completed_is_over_once_nothing_of_its_end_can_come_any_more(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    write_json(tmp_path / "job.json", {"slurm": "7"})
    cluster.tell("COMPLETED")
    began, now = time.monotonic(), time.monotonic()

    def sleep(_: float) -> None:
        nonlocal now
        now += 1.0
        if comes and now > began + 30.0:  # NFS had shown the node's file to nobody else
            write_json(tmp_path / "final.json", {"steps": 12})

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    run = cast(Promotion, SimpleNamespace(folder=tmp_path))
    if comes:
        assert follow(run, lambda _: None) == {"steps": 12}
    else:
        with pytest.raises(EnvironmentFault, match="ended before its last step"):
            follow(run, lambda _: None)
        assert now >= began + 60.0


def test_twenty_jobs_that_end_with_a_probe_are_enough(cluster: Cluster) -> None:
    result = ProbeResult(status=ProbeStatus.LOST, device="cpu", cause=Cause.JOB)
    assert what_next(result, cluster.request.folder, attempts=1, jobs=19) is Next.REPEAT
    assert what_next(result, cluster.request.folder, attempts=1, jobs=20) is Next.KEEP


@pytest.mark.parametrize("cause", [Cause.HANGS, Cause.NO_CARD])
def test_a_node_on_whose_card_a_process_hangs_is_set_aside_and_its_probe_goes_to_another(
    cluster: Cluster, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    hung = ProbeResult(status=ProbeStatus.LOST, device="cuda", reason="process 9 hangs", cause=cause)
    write_json(cluster.request.answer_path, hung.to_json())
    assert QueueJob(home=cluster.pool.home, device="cuda")._is_broken(cluster.request.folder, cluster.pool)
    assert cluster.pool.faulty() == {"n1"}
    cluster.pool.end("7", "trial-0000-1")
    result = cluster.result()
    assert result is not None
    assert result.cause is Cause.JOB


def test_two_jobs_never_take_the_same_probe(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "jobs")
    pool.make()
    for name in ("trial-0001-1", "trial-0000-1"):
        pool.put(name)
    assert [pool.take("1"), pool.take("2"), pool.take("3")] == ["trial-0000-1", "trial-0001-1", None]
    assert pool.running() == {"trial-0000-1": "1", "trial-0001-1": "2"}


@pytest.mark.parametrize(("time_s", "cause"), [(60.0, Cause.DEADLINE), (3600.0, Cause.JOB)])
def test_a_first_probe_that_meets_the_jobs_time_limit_is_not_repeated(
    cluster: Cluster, time_s: float, cause: Cause
) -> None:
    job = QueueJob(home=cluster.pool.home, time_s=time_s)
    job._explain(cluster.request.folder, "7", _Told(signal=signal.SIGUSR2), is_first=True)
    cluster.pool.end("7", "trial-0000-1")
    result = cluster.result()
    assert result is not None
    assert result.cause is cause


@pytest.mark.parametrize(("asked", "allowed", "limit_s"), [(None, 300.0, 300), ("30", 300.0, 1800), (None, 1e9, 86400)])
def test_a_job_knows_its_time_limit_where_nobody_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, allowed: float, limit_s: int
) -> None:
    monkeypatch.setattr("autofit.cluster.slurm._partition_s", lambda name: allowed)
    launcher = ClusterLauncher(executor_of({"kind": "slurm", **({"time": asked} if asked else {})}), tmp_path / "jobs")
    assert launcher._allocation.time_s == limit_s
