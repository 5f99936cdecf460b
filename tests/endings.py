"""Ways for a probe's process to end, as entries of the fork server and as reward functions."""

import ctypes
import os
import signal
import subprocess
import sys
import time


def segfault(_: str) -> int:
    ctypes.string_at(0)
    return 0


def killed(_: str) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def leaves(_: str) -> int:
    os._exit(3)


def hangs(_: str) -> int:
    time.sleep(600)
    return 0


def leaves_grandchildren(path: str) -> int:
    """Start a child, and a child of a child in a session of its own; write their pids to `path`."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
    orphan = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip()
    with open(path, "w") as file:
        file.write(f"{child.pid} {orphan}")
    return 0


# -- as reward functions ----------------------------------------------------------------------------------------------


def reward_that_exits(completions: list[str], **_: object) -> list[float]:
    sys.exit(5)


def reward_that_crashes(completions: list[str], **_: object) -> list[float]:
    segfault("")
    return []


def reward_that_raises(completions: list[str], **_: object) -> list[float]:
    raise KeyError("answer")


def reward_that_hangs(completions: list[str], **_: object) -> list[float]:
    time.sleep(600)
    return []


def has_sets_in_one_order(_: str) -> int:
    """0 where each process hashes names alike, so that sets of them have the same order."""
    return sys.flags.hash_randomization
