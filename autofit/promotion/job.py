"""The job that submitit runs for a promoted trial: its ranks, on its own slots, and their rescue. Never raises."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

from autofit.errors import AutofitError, ConfigError
from autofit.files import read_json, write_json, written_json
from autofit.hardware.hardware import threads_of_each
from autofit.plugin.protocol import UPDATE
from autofit.probing.result import exited_for_oom
from autofit.probing.slots import NoSlot, set_aside, slots
from autofit.probing.supervise import (
    PORT_IS_TAKEN,
    PORTS,
    Keep,
    ProcessEnding,
    RanksEnded,
    computing_env,
    free_port,
    keep_ranks,
)
from autofit.promotion.checkpoints import checkpoints, step_of
from autofit.promotion.ladder import RescueLadder, RescueStep
from autofit.promotion.place import Tuned
from autofit.promotion.run_folder import (
    ADDRESS,
    LOOPBACK,
    Oom,
    RunFolder,
    ask_to_end,
    asked_to_end,
    first_failure,
    forget_oom,
    forget_ranks,
    forget_unloadable,
    listen,
    log_of,
    on_node,
    place_of,
    read_oom,
    start_deaf,
    unloadable,
    write_ending,
)
from autofit.promotion.server import Beside, start_keeper
from autofit.proof.proof import Verdict, prove_changes
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe
from autofit.space.traits import describe_changes
from autofit.tuning.locks import exclusive
from autofit.watching.events import EventKind, RunEvent, keep_event, read_progress

_CHECKPOINTS = 5  # that are passed over, one after the other, as no rank can load them


def run_ranks(folder: Path, launch: Launch, keep: Keep) -> ProcessEnding:
    """Train on the ranks of `launch` until their end; what ended them is in the folder of the run.

    `keep` gets each rank's own part of its environment. Returns the end of the rank that failed first; of rank 0
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
    """Environment that a rank needs before its first import; the rest it asks accelerate's code for."""
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
    """Start one rank in a process of its own; its pid. It gets signals once it listens; earlier ones stay pending."""
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
    """True if another process than the keeper killed a rank."""
    return ending.exit_code < 0 and not ending.abandoned and not ending.deadline_passed


def _killed(folder: Path, rank: int, ending: ProcessEnding, launch: Launch) -> RunEvent:
    step, phase = place_of(folder, rank)
    name = signal.Signals(-ending.exit_code).name
    how = "by the kernel, as the machine had no memory left" if ending.kernel_oom else f"by {name}"
    text = (
        f"rank {rank} of {launch.ranks}{on_node(ending)} was killed {how} in the {phase}, after step {step}; all ranks "
        f"were ended; the same command goes on from the last checkpoint"
    )
    return RunEvent(step=step, kind=EventKind.RANK, text=text, data={"rank": rank, "phase": phase})


_DYING_S = 5.0  # in which a job that was killed is gone
_CARD = "cuda-"  # before the name of a card in that of its slot


def run_promoted(request_path: str) -> None:
    """Run the requested training. The outcome is final.json, failed.json or a resumable checkpoint in its folder."""
    request = written_json(request_path)
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
        if ending.left_pid is not None:  # withhold these slots while the training hangs in the driver
            set_aside(held, ending.left_pid)


def _env_of(cards: Sequence[str]) -> dict[str, str]:
    """The environment of a process on these cards; of one on the CPU if there are none."""
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


# -- a run that was out of memory goes on -----------------------------------------------------------------------------
# What was taken is kept in rescues.json, so that a later start of the run goes on with it.

_FILE = "rescues.json"
_MOST_UNCHANGED = 5  # starts with the same settings, each of which got further than the one before
FILES = (_FILE, "rescued.yaml", "rescued.accelerate.yaml")


def goes_on(request_path: Path, ending: ProcessEnding) -> bool:
    """True if the training is to start again: it was out of memory, and its request now has the next rung's values.

    If all rungs are used up, the reason is in failed.json.
    """
    request = written_json(request_path)
    folder = Path(str(request["folder"]))
    oom = read_oom(folder) or _killed_oom(request, folder, ending)
    forget_oom(folder)
    if oom is None or asked_to_end(folder):
        return False
    ladder = RescueLadder.from_json(cast("Mapping[str, object]", request["ladder"]))
    refused: list[str] = []
    again = any(rescue["step"] == oom.finished + 1 for rescue in rescues(folder)[-1:])
    for rung in ladder.rungs(taken(folder), oom, again=again):
        said = _proven(ladder, rung, folder, str(request["cwd"]))
        if said is not None:
            _take(folder, ladder, rung, oom, said)
            write_json(request_path, {**request, **carried(folder, ladder)})
            return True
        refused.append(describe_changes(rung.compared, ladder.running(taken(folder)).resolved))
    # one that changes nothing may do: a new process holds no fragments, and another one may have left the card
    if not again and sum(not rescue["changes"] for rescue in rescues(folder)) < _MOST_UNCHANGED:
        _take(folder, ladder, RescueStep(changes={}), oom, "no neutral change that needs less memory is left")
        return True
    RunFolder(folder).fail(_nothing_left(ladder, oom, folder, refused))
    return False


def taken(folder: Path) -> list[Mapping[str, object]]:
    """The changes of the rescues so far, in their order."""
    return [cast("Mapping[str, object]", rescue["changes"]) for rescue in rescues(folder)]


def rescues(folder: Path) -> list[dict[str, object]]:
    """The rescues of the run in `folder` so far, as JSON: changes, tier, step, resumed_from, text."""
    return cast("list[dict[str, object]]", (read_json(folder / _FILE) or {}).get("rescues", []))


def carried(folder: Path, ladder: RescueLadder) -> dict[str, object]:
    """Fields of a request of the run after its rescues: the values that run now, and the rescues."""
    return {"values": dict(ladder.running(taken(folder)).values), "rescues": rescues(folder)}


def _killed_oom(request: Mapping[str, object], folder: Path, ending: ProcessEnding) -> Oom | None:
    """The OOM of a training killed by the kernel, or ended by a library that was out of memory."""
    if RunFolder(folder).is_over:
        return None
    if ending.kernel_oom:
        message = "the system ended the process, as the memory of the machine was full"
    elif ending.exit_code == 1 and exited_for_oom(log_of(folder)):
        message = "bitsandbytes ended the process"
    else:
        return None
    lines, saved = read_progress(folder), checkpoints(Path(str(request["output_dir"])))
    finished = int(str(lines[-1]["step"])) if lines else 0
    resumes_from = max((step for step in map(step_of, saved) if step <= finished), default=0)
    return Oom(message=message, phase=UPDATE, finished=finished, resumes_from=resumes_from)


def _proven(ladder: RescueLadder, rung: RescueStep, folder: Path, cwd: str) -> str | None:
    """Support for a rung, in words: its gradient proof, or its allowed lower tier; None if the proof fails."""
    if rung.tier != "neutral":
        return f"{rung.tier}, as allowed"
    recipe = ladder.running(taken(folder))
    try:
        proof = prove_changes(
            rung.compared, rung.changes, trial=ladder.trial, trainer=ladder.trainer, keys=ladder.keys,
            compared=ladder.compared, values=recipe.values, resolved=recipe.resolved, cwd=Path(cwd),
            traits=ladder.traits,
        )  # fmt: skip
    except AutofitError as error:
        print(f"not proven: {error}", flush=True)  # to the job's log
        return None
    return None if proof.verdict is Verdict.REFUSED else proof.sentence


def _take(folder: Path, ladder: RescueLadder, rung: RescueStep, oom: Oom, said: str) -> None:
    """Keep the rescue: rescues.json, rescued.yaml, and an event."""
    before = ladder.running(taken(folder))
    text = _in_words(before, rung, oom, said)
    entry = {
        "changes": dict(rung.changes), "tier": rung.tier, "step": oom.finished + 1, "resumed_from": oom.resumes_from,
        "proof": said, "text": text,
    }  # fmt: skip
    write_json(folder / _FILE, {"rescues": [*rescues(folder), entry]})
    said_so_far = "\n".join(str(rescue["text"]) for rescue in rescues(folder))
    running = ladder.running(taken(folder)).values
    Tuned(values=running, comment=f"autofit: {said_so_far}").write(folder / "rescued.yaml")
    keep_event(folder, RunEvent(step=oom.finished, kind=EventKind.RESCUE, text=text, data=entry))


def _in_words(recipe: Recipe, rung: RescueStep, oom: Oom, said: str) -> str:
    start = f"goes on from step {oom.resumes_from}" if oom.resumes_from else "starts again from the beginning"
    again = f" ({oom.repeated} step(s) are trained again)" if oom.repeated else ""
    changes = describe_changes(rung.compared, recipe.resolved) if rung.changes else "the same settings"
    return (
        f"{oom.where}; the run {start}{again} with {changes}; the effective batch stays "
        f"{recipe.effective_batch_size}; {said}{_remarks(recipe, rung)}"
    )


def _remarks(recipe: Recipe, rung: RescueStep) -> str:
    """Differences under the rung that its equal gradient hides."""
    found = [rung.remark] if rung.remark else []
    if recipe.keys.accumulation in rung.changes and recipe.resolved.get("use_peft"):
        dropout = recipe.resolved.get("lora_dropout")
        found += [f"dropout (lora_dropout {dropout}) draws other masks for another micro-batch"] if dropout else []
    return "".join(f"; {remark}" for remark in found)


def _nothing_left(ladder: RescueLadder, oom: Oom, folder: Path, refused: list[str]) -> str:
    """Why the run ends, with what lower tiers could change."""
    so_far = [describe_changes({k: v for k, v in c.items() if v is not None}, {}) for c in taken(folder)]
    parts = [f"{oom.where}, and no {ladder.allow} change that needs less memory is left"]
    parts += [f"taken so far: {'; '.join(so_far)}"] if so_far else []
    parts += [f"not proven neutral: {'; '.join(refused)}"] if refused else []
    lower = list(_lower_tiers(ladder, oom, folder))
    parts += [f"with your leave: {'; '.join(lower)}"] if lower else ["promote a trial that uses less memory"]
    return ". ".join(parts)


def _lower_tiers(ladder: RescueLadder, oom: Oom, folder: Path) -> Iterator[str]:
    resolved = ladder.running(taken(folder)).resolved
    for rung in replace(ladder, allow="recipe").rungs(taken(folder), oom):
        if rung.tier != "neutral" and rung.tier != ladder.allow:
            yield f"{describe_changes(rung.compared, resolved)} (--allow {rung.tier})"
