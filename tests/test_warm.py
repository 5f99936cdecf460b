"""The kept server: who may use it, that a command in it is the command, and that nothing depends on it."""

import contextlib
import errno
import importlib.util
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tiny

from autofit import start
from autofit.files import ScratchFolder
from autofit.probing import fork_server, kept_place, kept_server
from autofit.probing.fork_server import ForkServer

# A server without torch, whose commands do what their first word says.
_SERVES = """
import json, os, signal, sys, time
import autofit.cli
from autofit.probing import kept_place, kept_server

def main(argv):
    if argv[0] == "tell":
        print(json.dumps({"cwd": os.getcwd(), "env": os.environ.get("SEEN"), "argv": sys.argv, "in": sys.stdin.read(),
                          "tty": [os.isatty(n) for n in range(3)], "files": len(os.listdir("/proc/self/fd"))}))
        return 7
    if argv[0] == "size":
        print(*os.get_terminal_size(), os.isatty(1))
        return 0
    if argv[0] == "wait":
        print(os.getpid(), flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            return 130
    if argv[0] == "die":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    raise SystemExit(3)

autofit.cli.main = main
kept_server._OF_COMMANDS, kept_server._LOOKS_EVERY_S = tuple(sys.argv[3:]), 0.1
kept_server.IDLE_S = float(sys.argv[1])
sys.modules["edited"] = type(sys)("edited")
sys.modules["edited"].__file__ = sys.argv[2]
kept_place.ask_for_one()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as autofit.probing.fork_server does
kept_server.stay(str(kept_place.socket_path()), began_s=time.time() + 1, keep_call=lambda *_: None)
"""
_ASKS = """
import sys
from autofit.probing import kept_server
code = kept_server.run_there(sys.argv[1:])
sys.exit(99 if code is None else code)
"""
NOT_RUN = 99


class Server:
    """A server in a process of its own, and the environment in which it is found."""

    def __init__(self, folder: Path, idle_s: float = 30, imports: tuple[str, ...] = ()) -> None:
        self.env = {**os.environ, "AUTOFIT_SERVER": "1", "TMPDIR": str(folder)}
        self.edited = folder / "edited.py"
        self.edited.write_text("A = 1")
        os.utime(self.edited, (1, 1))
        command = [sys.executable, "-c", _SERVES, str(idle_s), str(self.edited), *imports]
        self.process = subprocess.Popen(command, env=self.env)
        self.home = folder / f"autofit-servers-{os.getuid()}"
        while not self.sockets and self.process.poll() is None:
            time.sleep(0.02)

    @property
    def sockets(self) -> list[Path]:
        return [path for path in self.home.glob("*") if not path.suffix]

    def start(self, *words: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", _ASKS, *words], env={**self.env, **env}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, **env: str) -> tuple[int, str]:
        with self.start(*words, **env) as asked:
            out, _ = asked.communicate(timeout=30)
        return asked.returncode, out

    def ended(self) -> bool:
        return self.process.wait(timeout=10) == 0 and not self.sockets


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as a socket's has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        yield Path(folder)


@pytest.fixture
def server(short: Path) -> Iterator[Server]:
    made = Server(short)
    yield made
    made.process.kill()
    made.process.wait()


def first_line(asked: "subprocess.Popen[str]") -> str:
    assert asked.stdout is not None
    return asked.stdout.readline().strip()


def test_a_command_in_it_has_the_folder_the_variables_the_input_and_the_exit_code(server: Server) -> None:
    code, out = server.run("tell", "--json", TERM="dumb", SSH_TTY="x", PWD="y")
    told = json.loads(out)
    assert code == 7
    assert told["cwd"] == os.getcwd()
    assert told["argv"] == ["autofit", "tell", "--json"]
    assert told["in"] == ""
    assert told["tty"] == [False] * 3
    assert told["files"] <= 4  # the three streams, and the look at them: no descriptor of the server's


def test_a_command_that_is_given_while_it_imports_is_run_by_it(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short / "imported.py").write_text(
        "import pathlib\nhere = pathlib.Path(__file__).parent\n"
        "(here / 'seen').write_text(' '.join(p.name for p in here.glob('autofit-servers-*/*')))\n"
    )
    os.utime(short / "imported.py", (1, 1))
    monkeypatch.setenv("PYTHONPATH", str(short))
    server = Server(short, imports=("imported",))
    assert server.run("tell")[0] == 7
    assert (short / "seen").read_text() == server.sockets[0].name
    server.process.kill()
    server.process.wait()


def test_a_variable_that_a_library_may_read_makes_another_server(server: Server) -> None:
    assert server.run("tell", SEEN="1")[0] == NOT_RUN
    assert server.run("tell", CUDA_VISIBLE_DEVICES="0")[0] == NOT_RUN
    assert server.run("tell")[0] == 7


@pytest.mark.parametrize("limits", [["nice", "-n", "3"], ["setpriv", "--no-new-privs"]], ids=lambda words: words[0])
def test_a_process_with_less_time_or_fewer_rights_does_not_get_those_of_the_server(
    server: Server, limits: list[str]
) -> None:
    asked = subprocess.run([*limits, sys.executable, "-c", _ASKS, "tell"], env=server.env, stdin=subprocess.DEVNULL)
    assert asked.returncode == NOT_RUN


def test_a_message_that_is_none_ends_no_server_and_leaves_no_descriptor(server: Server) -> None:
    (path,) = server.sockets
    files = Path(f"/proc/{server.process.pid}/fd")
    open_before = len(list(files.iterdir()))
    for message in (b"[1]\n", b'["ask"]\n', b"5\n", b"[" * 50_000 + b"\n", b"\xff\n", b"\n", b"x" * 2**23 + b"\n", b""):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(str(path))
            socket.send_fds(connection, [message[:9] or b"\n"], [0, 0, 0, 0])
            connection.sendall(message[9:])
            connection.recv(1)
    assert server.run("tell")[0] == 7
    assert len(list(files.iterdir())) == open_before


def test_a_package_that_is_installed_is_a_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages)])
    before = kept_server._marks()
    (packages / "deepspeed").mkdir()
    assert kept_server._marks()[str(packages)] != before[str(packages)]


def test_a_package_that_is_loaded_on_use_is_marked_and_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "heavy.py").write_text("raise SystemExit('loaded')")
    spec = importlib.util.spec_from_file_location("heavy", tmp_path / "heavy.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    monkeypatch.setitem(sys.modules, "heavy", lazy := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(lazy)
    assert kept_server._marks()[str(tmp_path / "heavy.py")] is not None


def test_without_proc_there_is_no_server_and_no_fault(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    def missing() -> list[object]:
        raise FileNotFoundError("/proc/self/ns")

    monkeypatch.setattr(tempfile, "tempdir", str(short))
    assert kept_place.socket_path() is not None
    monkeypatch.setattr(kept_place, "_environment", missing)
    assert kept_place.socket_path() is None


def test_a_folder_in_the_place_of_a_socket_ends_no_sweep(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    own = kept_place.own_folder()
    assert own is not None
    (own / "folder").mkdir()
    assert kept_place.sweep() == []


@pytest.mark.parametrize("off", [{"AUTOFIT_SERVER": "0"}, {"AUTOFIT_SERVER": ""}])
def test_it_is_turned_off_by_a_variable(server: Server, off: dict[str, str]) -> None:
    assert server.run("tell", **off)[0] == NOT_RUN


def test_there_is_none_in_ci_or_in_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOFIT_SERVER", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert kept_place.is_allowed()
    for name in ("CI", "SLURM_JOB_ID"):
        with monkeypatch.context() as here:
            here.setenv(name, "1")
            assert not kept_place.is_allowed()


@pytest.mark.parametrize(("way", "said"), [(["script.py"], "True"), (["-m", "script"], "False")])
@pytest.mark.parametrize("variable", ["1", "0", None])
def test_a_plain_script_uses_one_where_its_user_asks_and_what_autofit_starts_does_not(
    tmp_path: Path, way: list[str], said: str, variable: str | None
) -> None:
    (tmp_path / "script.py").write_text("from autofit.probing.kept_place import is_asked_for\nprint(is_asked_for())\n")
    env = {name: value for name, value in os.environ.items() if name not in ("AUTOFIT_SERVER", "CI", "SLURM_JOB_ID")}
    env |= {} if variable is None else {"AUTOFIT_SERVER": variable}
    ran = subprocess.run([sys.executable, *way], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == (said if variable == "1" else "False")


def test_ctrl_c_goes_to_the_command_and_its_exit_code_comes_back(server: Server) -> None:
    with server.start("wait") as asked:
        assert int(first_line(asked)) != asked.pid
        asked.send_signal(signal.SIGINT)
        out, _ = asked.communicate(timeout=30)
    assert asked.returncode == 130
    assert out == "interrupted\n"


def test_ctrl_c_right_after_the_command_was_let_go_is_not_lost(server: Server) -> None:
    line = kept_place.connected(server.sockets[0])
    assert line is not None
    with line, open(os.devnull, "r+") as nothing:
        line.settimeout(10)
        assert kept_server.is_taken(line, ["wait"], Path(), streams=[nothing.fileno()] * 3)
        line.sendall(kept_server.GO + bytes([signal.SIGINT]))
        assert json.loads(line.recv(64)) == {"code": 130}


def test_a_command_that_a_signal_ends_ends_its_caller_the_same_way(server: Server) -> None:
    assert server.run("die")[0] == -signal.SIGTERM


def test_a_caller_that_is_killed_takes_its_command_along(server: Server) -> None:
    with server.start("wait") as asked:
        command = psutil.Process(int(first_line(asked)))
        asked.kill()
    psutil.wait_procs([command], timeout=10)
    assert not command.is_running()
    assert server.run("tell")[0] == 7


def test_a_caller_whose_server_is_killed_with_its_command_runs_it_itself(server: Server) -> None:
    with server.start("wait") as asked:
        command = psutil.Process(int(first_line(asked)))
        keeper = command.parent()
        assert keeper is not None
        server.process.kill()
        keeper.kill()
        assert asked.wait(timeout=10) == NOT_RUN
    psutil.wait_procs([command], timeout=10)
    assert not command.is_running()
    assert server.run("tell")[0] == NOT_RUN  # the socket is there, and nobody behind it


def test_commands_run_beside_each_other(server: Server) -> None:
    waiting = [server.start("wait") for _ in range(3)]
    assert len({first_line(asked) for asked in waiting}) == 3
    for asked in waiting:
        asked.send_signal(signal.SIGINT)
    for asked in waiting:
        with asked:
            assert asked.wait(timeout=30) == 130


def test_it_is_not_used_once_a_file_that_it_imported_has_changed(server: Server) -> None:
    assert server.run("tell")[0] == 7
    server.edited.write_text("A = 2")
    assert server.run("tell")[0] == NOT_RUN
    assert server.ended()


def test_it_ends_when_nothing_was_asked_for_a_while(short: Path) -> None:
    assert Server(short, idle_s=0.3).ended()


def test_a_notebook_that_holds_it_keeps_it_from_ending(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(short, idle_s=0.5)
    monkeypatch.setattr(kept_place, "is_asked_for", lambda: True)
    monkeypatch.setattr(kept_place, "socket_path", lambda: server.sockets[0])
    held = kept_server.hold()
    assert held is not None
    time.sleep(1)
    assert server.process.poll() is None
    held.close()
    assert server.ended()


def test_stop_lets_a_running_command_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = server.sockets
    with server.start("wait") as asked:
        first_line(asked)
        assert kept_server.ask(path, "status")["running"] == 1
        assert kept_server.ask(path, "stop")["pid"] == server.process.pid
        assert server.run("tell")[0] == NOT_RUN
        asked.send_signal(signal.SIGINT)
        assert asked.wait(timeout=30) == 130
    assert server.ended()


def test_a_newer_server_stops_the_older_one(server: Server) -> None:
    newer = Server(server.home.parent)
    assert server.process.wait(timeout=10) == 0
    assert newer.run("tell")[0] == 7
    newer.process.kill()
    newer.process.wait()


def test_the_terminal_is_the_callers(server: Server) -> None:
    here, there = pty.openpty()
    os.set_blocking(here, True)
    subprocess.run(["stty", "rows", "33", "cols", "77"], stdin=there, check=True)
    done = subprocess.run([sys.executable, "-c", _ASKS, "size"], env=server.env, stdin=there, stdout=there)
    assert done.returncode == 0
    assert os.read(here, 1000).decode().split() == ["77", "33", "True"]
    os.close(here)
    os.close(there)


def test_a_folder_that_others_may_enter_or_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = kept_place.own_folder()
    assert folder is not None
    folder.chmod(0o755)
    assert kept_place.own_folder() is None
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert kept_place.own_folder() is None


def test_without_room_for_its_folder_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert kept_place.own_folder() is None
    assert kept_place.socket_path() is None


def test_the_socket_of_a_killed_server_is_swept_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(server.home.parent))
    assert kept_place.sweep() == server.sockets
    server.process.kill()
    server.process.wait()
    (beside,) = (path.with_name(f"{path.name}.123") for path in server.sockets)
    beside.write_text("")  # of one that begins
    assert kept_place.sweep() == []
    assert [path.name for path in server.home.iterdir()] == [beside.name]


def test_a_socket_that_nobody_answers_is_no_server(tmp_path: Path) -> None:
    assert kept_place.connected(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    assert kept_place.connected(tmp_path / "file") is None
    assert kept_server.ask(tmp_path / "file", "status") == {}


def test_a_command_that_a_server_may_run_waits_for_no_other_import() -> None:
    code = (
        "import sys, autofit.start; "
        "sys.exit(bool({'yaml', 'psutil', 'argparse', 'autofit.cli', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_commands_that_need_a_terminal_or_the_cards_of_this_machine_run_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(start, "_CARDS", ("/dev/null",))
    ran = [["check", "r.yaml"], ["estimate", "--json"], ["search", "r.yaml", "--gpu", "t4"], ["doctor", "--gpu=t4"]]
    not_ran = [
        [], ["--help"], ["check", "--help"], ["search", "r.yaml"], ["doctor"], ["search", "--executor", "debug"],
        ["promote", "best"], ["doctor", "--gpu", "t4", "--calibrate"],
    ]  # fmt: skip
    assert all(map(start.pays, ran))
    assert not any(map(start.pays, not_ran))


class _Slow(ForkServer):
    """A server without torch that takes half a second to move to its place."""

    def _start(self) -> None:
        self._home, self._stays = ScratchFolder(), True
        self.socket_path, self.place = str(self._home.path / "warm"), kept_place.socket_path()
        slow = "kept_server._stop_others = lambda _: time.sleep(0.5)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import time; from autofit.probing import fork_server, kept_server; {slow}; "
             f"kept_server._OF_COMMANDS = (); "
             f"fork_server.serve({self.socket_path!r}, preloads=False, stays={str(self.place)!r})"],
            stdin=subprocess.PIPE,
        )  # fmt: skip


def test_a_command_ends_once_its_server_is_where_the_next_one_looks(
    monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    server = _Slow(short)
    assert server.is_ready()
    server.close()
    assert server.place is not None
    assert kept_place.connected(server.place) is not None
    assert kept_server.ask(server.place, "stop") != {}
    assert server._process is not None
    server._process.wait(timeout=20)
    assert not Path(server.socket_path).parent.exists()


def test_a_server_that_moves_before_its_command_looks_again_stays(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    server = _Slow(short)
    assert server.is_ready()
    process = server._process
    assert process is not None
    assert process.stdin is not None
    close = process.stdin.close

    def close_and_wait() -> None:  # as on a machine whose processors are all taken
        close()
        while Path(server.socket_path).exists():
            time.sleep(0.01)

    monkeypatch.setattr(process.stdin, "close", close_and_wait)
    server.close()
    assert server.place is not None
    assert kept_server.ask(server.place, "stop") != {}
    process.wait(timeout=20)


@pytest.mark.slow
def test_the_second_check_is_run_by_what_the_first_one_left(tmp_path: Path, short: Path, tiny_model: Path) -> None:
    recipe = tiny.write_recipe(tmp_path, tiny_model)
    env = {**os.environ, "AUTOFIT_SERVER": "1", "TMPDIR": str(short), "AUTOFIT_CACHE": str(tmp_path / "cache")}

    def autofit(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "autofit", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        done.stderr = re.sub("still reading .*\n", "", done.stderr)  # of a busy machine
        return done

    asked = ("check", str(recipe), "--gpu", "t4")
    first = autofit(*asked)
    for _ in range(200):
        if ": 0 commands, 0 running" in autofit("server").stdout:
            break
        time.sleep(0.3)
    second = autofit(*asked)
    assert (second.returncode, second.stdout, second.stderr) == (first.returncode, first.stdout, first.stderr)
    assert ": 1 commands" in autofit("server").stdout
    assert "unknown key" in autofit(*asked, "--set", "lora_rr=8").stderr
    assert autofit("server", "stop").stdout.startswith("stopped process")
    assert "no server is kept" in autofit("server").stdout


_FIRST = """
import sys
from autofit.cli import main
from autofit.probing import fork_server, kept_place

class Popen:
    pid = 0
    def __init__(self, command, **_):
        print(command[3], sorted({"autofit.api.searching", "optuna", "numpy", "torch"} & set(sys.modules)))
        sys.exit(5)

fork_server.subprocess.Popen = Popen
kept_place.ask_for_one()
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", [["check", "--gpu", "h100"], ["search", "--gpu", "h100"]], ids=lambda c: c[0])
def test_the_server_starts_before_the_command_imports_what_it_needs_itself(short: Path, command: list[str]) -> None:
    (short / "run.yaml").write_text("model_name_or_path: Qwen/Qwen3-0.6B\nreward_funcs: [accuracy_reward]\n")
    asked = [sys.executable, "-c", _FIRST, command[0], "run.yaml", *command[1:], "--prompt-tokens", "64"]
    env = {**os.environ, "AUTOFIT_SERVER": "1", "TMPDIR": str(short)}
    found = subprocess.run(asked, cwd=short, env=env, capture_output=True, text=True)
    assert (found.returncode, found.stdout.split(maxsplit=1)) == (5, ["autofit.probing.fork_server", "[]\n"]), (
        found.stderr
    )


def test_a_server_that_was_begun_is_the_next_one_and_leaves_its_log_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.setattr(ForkServer, "_start", lambda self: self.log_path.write_text("said\n"))
    fork_server.begin()
    assert fork_server._begun == []  # none is asked for
    monkeypatch.setattr(kept_place, "is_asked_for", lambda: True)
    monkeypatch.setattr(kept_server, "hold", lambda: None)
    fork_server.begin()
    fork_server.begin()
    (begun,) = fork_server._begun
    made = fork_server.server_for(short / "study")
    assert made is begun
    assert fork_server._begun == []
    assert fork_server.server_for(short / "other") is not begun
    made.close()
    assert (short / "study" / "fork_server.log").read_text() == "said\n"
    assert not made.log_path.exists()
