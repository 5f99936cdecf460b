"""The job that submitit runs for a promoted trial: its ranks in child processes, on its own slots. Never raises."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError
from autofit.files import read_json
from autofit.hardware.hardware import threads_of_each
from autofit.probing.rank_probes import PORT_IS_TAKEN, PORTS
from autofit.probing.slots import NoSlot, set_aside, slots
from autofit.probing.supervise import Keep, ProcessEnding, RanksEnded, computing_env, free_port, keep_ranks
from autofit.promotion.interruption import ask_to_end, asked_to_end, listen, start_deaf
from autofit.promotion.rescue import goes_on
from autofit.promotion.run_folder import (
    ADDRESS,
    LOOPBACK,
    RunFolder,
    first_failure,
    forget_ranks,
    forget_unloadable,
    log_of,
    on_node,
    place_of,
    read_oom,
    unloadable,
    write_ending,
)
from autofit.promotion.server import Beside
from autofit.promotion.server_keeper import start_keeper
from autofit.recipe.launch import Launch
from autofit.tuning.locks import exclusive
from autofit.watching.events import Kind, RunEvent, keep_event

_CHECKPOINTS = 5  # that are passed over, one after the other, as no rank can load them


def run_ranks(folder: Path, launch: Launch, keep: Keep) -> ProcessEnding:
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
    return start_deaf("autofit.promotion.training", request_path, log=log_of(folder, rank), cwd=cwd, env=env)


def _say(folder: Path, launch: Launch, ended: RanksEnded) -> None:
    """Put the reason of the rank that ended all in place: failed.json for an error, an event for a killed rank."""
    if ended.first is None or RunFolder(folder).is_over or read_oom(folder) is not None:
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
        RunFolder(folder).fail(reason)


def _was_killed(ending: ProcessEnding) -> bool:
    """Whether somebody else than the keeper killed a rank."""
    return ending.exit_code < 0 and not ending.abandoned and not ending.deadline_passed


def _killed(folder: Path, rank: int, ending: ProcessEnding, launch: Launch) -> RunEvent:
    step, phase = place_of(folder, rank)
    name = signal.Signals(-ending.exit_code).name
    how = "by the kernel, as the machine had no memory left" if ending.kernel_oom else f"by {name}"
    text = (
        f"rank {rank} of {launch.ranks}{on_node(ending)} was killed {how} in the {phase}, after step {step}; all ranks "
        f"were ended; the same command goes on from the last checkpoint"
    )
    return RunEvent(step=step, kind=Kind.RANK, text=text, data={"rank": rank, "phase": phase})


_DYING_S = 5.0  # in which a job that was killed is gone
_CARD = "cuda-"  # before the name of a card in that of its slot


def run_promoted(request_path: str) -> None:
    """Run the requested training. The outcome is final.json, failed.json or a resumable checkpoint in its folder."""
    request = read_json(Path(request_path))
    assert request is not None
    folder = Path(str(request["folder"]))
    listen(lambda: ask_to_end(folder))
    with ExitStack() as lock:
        try:
            lock.enter_context(exclusive(folder, "training", wait_s=_DYING_S))
        except ConfigError:  # a command started another job, and was killed before it could note it
            return
        if RunFolder(folder).final() is None:
            try:
                _run(request, Path(request_path), folder)
            except NoSlot as error:
                RunFolder(folder).fail(str(error))


def _run(request: Mapping[str, object], request_path: Path, folder: Path) -> None:
    RunFolder(folder).start()
    names = tuple(cast(list[str], request["slots"]))
    launch = Launch.of(cast("dict[str, object]", request["values"]))
    serves, on_cards = bool(request.get("serves")), names[0].startswith(_CARD)
    count = (launch.cards if serves else launch.ranks) if on_cards else 1
    with slots(names, count, abandoned=lambda: asked_to_end(folder)) as held:
        if held is None:
            return
        cards = [name.removeprefix(_CARD) for name in held] if on_cards else []
        env, cwd = _env_of(cards[: launch.ranks]), str(request["cwd"])
        if not serves:
            keep = in_processes(request_path, folder, cwd=cwd, env=env)
        else:
            server = Beside(
                folder, f"local-{os.getpid()}",
                start=lambda post: start_keeper(request_path, post, cwd=cwd, env=_env_of(cards[launch.ranks :])),
            )  # fmt: skip
            keep = server.beside(in_processes(request_path, folder, cwd=cwd, env=env, abandoned=server.is_over))
        ending = train_to_the_end(request_path, folder, keep)
        if ending.left_pid is not None:  # give these slots to nobody while the training hangs in the driver
            set_aside(held, ending.left_pid)


def _env_of(cards: Sequence[str]) -> dict[str, str]:
    """The environment of a process on these cards; of one on the CPU where there are none."""
    env = computing_env()
    if cards:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    return env


def train_to_the_end(request_path: Path, folder: Path, keep: Keep) -> ProcessEnding:
    """Train, and after an OOM again with the next setting that needs less memory; keeps and returns the end.

    `keep` starts a process in each environment that it gets, and waits for all: a rescue may change how many.
    """
    again = True
    while again:
        launch = Launch.of(cast("dict[str, object]", (read_json(request_path) or {})["values"]))
        ending = keep([{}]).alone if launch.is_alone else run_ranks(folder, launch, keep)
        again = goes_on(request_path, ending)
    write_ending(folder, ending)
    return ending
