"""Jobs that are shared between this process and forks of it, on a machine with cores to spare."""

import os
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

from autofit.probing.supervise import die_with_parent

T = TypeVar("T")
Job = Callable[[], T]


def results(jobs: Sequence[Job[T]], processes: int) -> list[T]:
    """What the jobs return, in their order; each of `processes`, this one among them, does its share.

    To be called before this process has run a backward pass, whose threads a fork does not have. The jobs of a fork
    that ends without an answer, by an exception or a kill, are done here, where an exception is raised.
    """
    shares = [jobs[number::processes] for number in range(min(processes, len(jobs)))]
    forks = [_begun(share) for share in shares[1:]]
    found = [[job() for job in shares[0]]]
    for share, fork in zip(shares[1:], forks, strict=True):
        answer = _ended(*fork)
        found.append([job() for job in share] if answer is None else answer)
    return [found[place % len(found)][place // len(found)] for place in range(len(jobs))]


def _begun(jobs: Sequence[Job[T]]) -> tuple[int, "Connection[None, list[T]]"]:
    """(pid, where its answer will be) of a fork that does the jobs. It ends with this process."""
    parent = os.getpid()
    reads, writes = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        writes.close()
        return pid, reads
    try:
        die_with_parent(parent)
        writes.send([job() for job in jobs])
    finally:
        os._exit(0)


def _ended(pid: int, reads: "Connection[None, list[T]]") -> list[T] | None:
    with reads:
        try:
            return reads.recv()
        except EOFError:
            return None
        finally:
            os.waitpid(pid, 0)
