"""The job's part of a run of several ranks: starts them, and says which one ended them all. No torch here."""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autofit.files import write_json
from autofit.hardware.hardware import threads_of_each
from autofit.probing.rank_probes import PORT_IS_TAKEN, PORTS
from autofit.probing.rank_processes import RanksEnded, free_port, keep_ranks
from autofit.probing.supervise import Ending
from autofit.promotion.ending import on_node
from autofit.promotion.interruption import asked_to_end, start_deaf
from autofit.promotion.rank_files import (
    ADDRESS,
    LOOPBACK,
    first_failure,
    forget_ranks,
    forget_unloadable,
    log_of,
    place_of,
    unloadable,
)
from autofit.recipe.launch import Launch
from autofit.watching.events import Kind, RunEvent, keep_event

_CHECKPOINTS = 5  # that are passed over, one after the other, as no rank can load them


Keep = Callable[[Sequence[dict[str, str]]], RanksEnded]  # starts a rank in each environment, and waits for all


def run_ranks(folder: Path, launch: Launch, keep: Keep) -> Ending:
    """Train on the ranks of `launch` until their end; what ended them is in the folder of the run.

    `keep` gets what is each rank's own in its environment. Returns the end of the rank that failed first; of rank 0
    where none did.
    """
    forget_unloadable(folder)
    ports = checkpoints = 0
    while True:
        forget_ranks(folder, launch.ranks)
        port, known = free_port(), unloadable(folder)
        ended = keep([_own(launch, rank, port) for rank in range(launch.ranks)])
        killed = any(_was_killed(ending) for ending in ended.endings)
        if ended.worst.exit_code == PORT_IS_TAKEN and ports < PORTS:
            ports += 1
        elif ended.first is not None and not killed and len(unloadable(folder)) > len(known):
            checkpoints += 1
            if checkpoints > _CHECKPOINTS:
                break
        else:
            break
    _say(folder, launch, ended)
    return ended.worst


def _own(launch: Launch, rank: int, port: int) -> dict[str, str]:
    """What a rank must know before its first import; the rest it asks accelerate's code for."""
    threads = threads_of_each(launch.ranks // launch.machines)
    return {"RANK": str(rank), ADDRESS: LOOPBACK, "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}


def in_processes(
    request_path: Path, folder: Path, *, cwd: str, env: Mapping[str, str],
    abandoned: Callable[[], bool] = lambda: False,
) -> Keep:  # fmt: skip
    """Keeps each rank in a new process of this machine, until `abandoned`."""

    def keep(own: Sequence[dict[str, str]]) -> RanksEnded:
        def start(rank: int) -> int:
            return start_rank(request_path, folder, rank, cwd, {**env, **own[rank]})

        return keep_ranks(start, len(own), abandoned=abandoned)

    return keep


def start_rank(request_path: Path, folder: Path, rank: int, cwd: str, env: Mapping[str, str]) -> int:
    """Start one rank in a process of its own; its pid. It hears signals once it listens, and none is lost before."""
    return start_deaf("autofit.promotion.rank_training", request_path, log=log_of(folder, rank), cwd=cwd, env=env)


def _say(folder: Path, launch: Launch, ended: RanksEnded) -> None:
    """Put the reason of the rank that ended all in place: failed.json for an error, an event for a killed rank."""
    if ended.first is None or any((folder / name).exists() for name in ("final.json", "failed.json", "oom.json")):
        return
    killed = [rank for rank, ending in enumerate(ended.endings) if _was_killed(ending)]
    if killed and not asked_to_end(folder):
        keep_event(folder, _killed(folder, killed[0], ended.endings[killed[0]], launch))
        return
    failure = first_failure(folder, launch.ranks)
    if failure is not None and not killed:
        step, phase = place_of(folder, failure.rank)
        who = f"rank {failure.rank}{on_node(ended.endings[failure.rank])}"
        reason = f"{who}: {failure.reason} (in the {phase}, after step {step})"
        write_json(folder / "failed.json", {"reason": reason})


def _was_killed(ending: Ending) -> bool:
    """Whether somebody else than the keeper killed a rank."""
    return ending.exit_code < 0 and not ending.abandoned and not ending.deadline_passed


def _killed(folder: Path, rank: int, ending: Ending, launch: Launch) -> RunEvent:
    step, phase = place_of(folder, rank)
    name = signal.Signals(-ending.exit_code).name
    how = "by the kernel, as the machine had no memory left" if ending.kernel_oom else f"by {name}"
    text = (
        f"rank {rank} of {launch.ranks}{on_node(ending)} was killed {how} in the {phase}, after step {step}; all ranks "
        f"were ended; the same command goes on from the last checkpoint"
    )
    return RunEvent(step=step, kind=Kind.RANK, text=text, data={"rank": rank, "phase": phase})
