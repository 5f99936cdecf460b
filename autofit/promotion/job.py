"""The job that submitit runs for a promoted trial: the training in a child process, on its own slot. Never raises."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.probing.births import note_of
from autofit.probing.slots import NoSlot, set_aside, slots
from autofit.probing.supervise import Ending, computing_env, keep
from autofit.promotion.beside import Beside
from autofit.promotion.ending import write_ending
from autofit.promotion.interruption import ask_to_end, asked_to_end, listen, start_deaf
from autofit.promotion.rank_job import Keep, in_processes, run_ranks
from autofit.promotion.rescue import goes_on
from autofit.promotion.serving import start_keeper
from autofit.recipe.launch import Launch
from autofit.tuning.locks import exclusive

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
        if read_json(folder / "final.json") is None:
            try:
                _run(request, Path(request_path), folder)
            except NoSlot as error:
                write_json(folder / "failed.json", {"reason": str(error)})


def _run(request: Mapping[str, object], request_path: Path, folder: Path) -> None:
    write_json(folder / "started.json", note_of(os.getpid()))
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
            ending = train_to_the_end(
                request_path, folder, alone=lambda: keep(lambda: start_alone(str(request_path), folder, cwd, env)),
                ranks=in_processes(request_path, folder, cwd=cwd, env=env),
            )  # fmt: skip
            _set_aside(held, ending)
            return
        beside = Beside(
            folder, f"local-{os.getpid()}",
            start=lambda post: start_keeper(request_path, post, cwd=cwd, env=_env_of(cards[launch.ranks :])),
        )  # fmt: skip

        def alone(own: Mapping[str, str]) -> Ending:
            return keep(lambda: start_alone(str(request_path), folder, cwd, {**env, **own}), abandoned=beside.is_over)

        ranks = in_processes(request_path, folder, cwd=cwd, env=env, abandoned=beside.is_over)
        _set_aside(held, train_to_the_end(request_path, folder, alone=beside.alone(alone), ranks=beside.ranks(ranks)))


def _set_aside(held: tuple[str, ...], ending: Ending) -> None:
    """Give these slots to nobody while the training hangs in the driver."""
    if ending.left_pid is not None:
        set_aside(held, ending.left_pid)


def _env_of(cards: Sequence[str]) -> dict[str, str]:
    """The environment of a process on these cards; of one on the CPU where there are none."""
    env = computing_env()
    if cards:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    return env


def train_to_the_end(request_path: Path, folder: Path, *, alone: Callable[[], Ending], ranks: Keep) -> Ending:
    """Train, and after an OOM again with the next setting that needs less memory; keeps and returns the end.

    `alone` trains one process by itself, `ranks` those of a recipe that has more: a rescue may change which.
    """
    again = True
    while again:
        launch = Launch.of(cast("dict[str, object]", (read_json(request_path) or {})["values"]))
        ending = alone() if launch.is_alone else run_ranks(folder, launch, ranks)
        again = goes_on(request_path, ending)
    write_ending(folder, ending)
    return ending


def start_alone(request_path: str, folder: Path, cwd: str, env: dict[str, str]) -> int:
    """Start the training in one process; its pid. It hears signals once it listens, and none is lost before."""
    return start_deaf("autofit.promotion.training", Path(request_path), log=folder / "run.log", cwd=cwd, env=env)
