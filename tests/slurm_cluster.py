"""A real Slurm on this machine for tests: munge, slurmctld and several slurmd on loopback, in a folder of their own.

Debian's packages slurmctld, slurmd, slurm-client and munge, and root. Every node has cards that are null devices:
`--gpus-per-node` schedules them and sets CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CARDS, CPUS = 2, 8  # of a node
MAIN = {"main": "Nodes=ALL Default=YES MaxTime=60 State=UP"}
# More arguments of `cluster`: a job of the partition `urgent` puts one of `main` back into the queue. No accounting.
PREEMPTION: Mapping[str, Mapping[str, str]] = {
    "partitions": {
        "main": f"{MAIN['main']} PriorityTier=1 PreemptMode=REQUEUE",
        "urgent": "Nodes=ALL MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF",
    },
    "conf": {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"},
}


# Daemons of Slurm listen on the address of the machine's name: where that is not loopback they get another name.
_AS_LOCALHOST = ("unshare", "--uts", "sh", "-c", 'hostname localhost && exec "$0" "$@"')


def missing() -> str | None:
    """What this machine lacks for a Slurm of its own; None where it has all."""
    for command in ("slurmctld", "slurmd", "sbatch", "munged"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"{command} is not installed (apt-get install slurmctld slurmd slurm-client munge)"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    if (
        not _is_loopback(_host())
        and subprocess.run([*_AS_LOCALHOST, "true"], capture_output=True, check=False).returncode
    ):
        return "the machine's own name must resolve to 127.0.0.1, or `unshare --uts` be allowed"
    try:
        with tempfile.TemporaryDirectory() as folder:
            _make_card(Path(folder) / "card")
    except OSError:
        return "a node's cards are device files, which cannot be made here (mknod)"
    return None


def _make_card(path: Path) -> None:
    """A null device."""
    os.mknod(path, 0o20666, os.makedev(1, 3))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running Slurm. Jobs and commands find it by the variable SLURM_CONF."""

    folder: Path
    nodes: tuple[str, ...]

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "SLURM_CONF": str(self.conf)},
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def start_node(self, node: str) -> None:
        self.start("slurmd", "-N", node)

    def start(self, *daemon: str) -> None:
        """Start a daemon of Slurm that listens on loopback."""
        self.run(*(() if _is_loopback(_host()) else _AS_LOCALHOST), *daemon)

    def kill_node(self, node: str) -> None:
        """`kill -9` of a node's slurmd and of all that it started: a machine that went away."""
        for pid in (int((self.folder / f"run/slurmd-{node}.pid").read_text()), *self._steps(node)):
            with suppress(psutil.NoSuchProcess):
                for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                    process.kill()

    def _steps(self, node: str) -> list[int]:
        """The processes of slurmd that keep the steps of jobs on `node`."""
        return [process.pid for process in _keepers(self.folder / "spool" / node)]

    def idle(self, *, within_s: float = 30) -> None:
        """Wait until every node is idle."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            said = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
            if set(said) >= set(self.nodes):
                return
            time.sleep(0.1)
        raise AssertionError(self.run("sinfo", "--Node", "--long"))

    def clear(self) -> None:
        """Cancel all jobs, bring all nodes up, and wait until they are idle."""
        with suppress(AssertionError):  # at once: a job that does not heed SIGTERM would take KillWait
            self.run("scancel", "--user=root", "--state=RUNNING", "--full", "--signal=KILL")
        self.run("scancel", "--user=root")
        for node in self.nodes:
            pid = self.folder / f"run/slurmd-{node}.pid"
            if not pid.exists() or not lives(int(pid.read_text())):
                self.start_node(node)
            with suppress(AssertionError):  # it is neither drained nor down
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.idle()


@contextmanager
def cluster(
    *, nodes: int = 3, cards: int = CARDS, conf: Mapping[str, str] | None = None, partitions: Mapping[str, str] = MAIN
) -> Iterator[Cluster]:
    """A Slurm with this many nodes, each with null devices for `cards`.

    `conf` has more lines of slurm.conf, `partitions` {name: the rest of its line}; PREEMPTION has both.
    """
    home = Path(tempfile.mkdtemp(prefix="slurm-"))
    made = Cluster(folder=home, nodes=tuple(f"n{i + 1}" for i in range(nodes)))
    try:
        _start(made, cards, conf or {}, partitions)
        yield made
    finally:
        _stop(made)
        shutil.rmtree(home, ignore_errors=True)


def _start(made: Cluster, cards: int, conf: Mapping[str, str], partitions: Mapping[str, str]) -> None:
    home = made.folder
    for name in ("munge", "state", "spool", "log", "run", "dev"):
        (home / name).mkdir()
    (home / "munge/key").write_bytes(os.urandom(64))
    (home / "munge/key").chmod(0o400)
    (home / "munge").chmod(0o755)
    files = [f"--{name}={home}/munge/{name.split('-')[0]}"
             for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")]  # fmt: skip
    made.run("munged", "--force", *files)  # as root, so that it needs no folder that others can enter
    for card in range(cards):
        _make_card(home / f"dev/nvidia{card}")
    lines = [f"{key}={value}" for key, value in {**_conf(made), **conf}.items()]
    lines += [
        f"NodeName={node} NodeHostname={_own_name()} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=8000 "
        f"Gres=gpu:{cards} State=UNKNOWN"
        for node, port in zip(made.nodes, _ports(len(made.nodes)), strict=True)
    ]
    lines += [f"PartitionName={name} {rest}" for name, rest in partitions.items()]
    made.conf.write_text("\n".join([*lines, ""]))
    (home / "gres.conf").write_text(f"NodeName={','.join(made.nodes)} Name=gpu File={home}/dev/nvidia[0-{cards - 1}]\n")
    (home / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
    made.start("slurmctld", "-c")
    for node in made.nodes:
        made.start_node(node)
    made.idle()


def _host() -> str:
    return socket.gethostname()


def _own_name() -> str:
    """The name that the daemons find themselves under."""
    return _host().split(".")[0] if _is_loopback(_host()) else "localhost"


def _is_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return False
    return all(str(address[0]).startswith("127.") for *_, address in found)


def _ports(count: int) -> list[int]:
    """Free ports of loopback."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


def _conf(made: Cluster) -> dict[str, str]:
    home = made.folder
    return {
        "ClusterName": "autofit", "SlurmctldHost": f"{_own_name()}(127.0.0.1)", "SlurmctldPort": str(_ports(1)[0]),
        "SlurmUser": "root", "SlurmdUser": "root", "AuthType": "auth/munge",
        "AuthInfo": f"socket={home}/munge/socket,cred_expire=5",  # else a requeued job waits two minutes
        "CredType": "cred/munge", "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny", "ReturnToService": "2",
        "SwitchType": "switch/none", "MpiDefault": "none", "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherParams": "OverMemoryKill,UsePss", "JobAcctGatherFrequency": "task=1",
        "LaunchParameters": "disable_send_gids", "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory", "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0,"
        "requeue_setup_env_fail",
        "GresTypes": "gpu", "JobRequeue": "1", "AccountingStorageType": "accounting_storage/none", "KillWait": "5",
        "MessageTimeout": "10", "SlurmctldTimeout": "30", "SlurmdTimeout": "15", "InactiveLimit": "0",
        "MinJobAge": "300", "Waittime": "0", "EpilogMsgTime": "100", "StateSaveLocation": f"{home}/state",
        "SlurmdSpoolDir": f"{home}/spool/%n", "SlurmctldPidFile": f"{home}/run/slurmctld.pid",
        "SlurmdPidFile": f"{home}/run/slurmd-%n.pid", "SlurmctldLogFile": f"{home}/log/slurmctld.log",
        "SlurmdLogFile": f"{home}/log/slurmd-%n.log", "SlurmdParameters": "config_overrides", "DefMemPerCPU": "512",
    }  # fmt: skip


def _stop(made: Cluster) -> None:
    """`kill -9` of all that belongs to it, jobs and what they started too: nothing of it is needed afterwards."""
    ours = [psutil.Process(), *psutil.Process().parents()]
    while found := [process for process in _processes(made) if process not in ours]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


def _processes(made: Cluster) -> list[psutil.Process]:
    """The daemons, the keepers of steps and their jobs, and whatever else was started with the variable SLURM_CONF."""
    home, found = made.folder, []
    for path in (*(home / "run").glob("*.pid"), home / "munge/pid"):
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            daemon = psutil.Process(int(path.read_text()))
            found += [daemon] if daemon.name() in ("slurmctld", "slurmd", "munged") else []
    for keeper in _keepers(home / "spool"):
        with suppress(psutil.NoSuchProcess):
            found += [keeper, *keeper.children(recursive=True)]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(made.conf):
                found.append(process)
    return [process for process in set(found) if _runs(process)]


def lives(pid: int) -> bool:
    """Whether there is such a process that is not a zombie, which some machines' first process leaves for long."""
    with suppress(psutil.NoSuchProcess):
        return _runs(psutil.Process(pid))
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _keepers(spool: Path) -> list[psutil.Process]:
    """The processes that keep steps whose sockets are in `spool`; their environment is overwritten by their titles."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "slurmstepd" and any(
                str(one.laddr).startswith(f"{spool}/") for one in process.net_connections("unix")
            ):
                found.append(process)
    return found
