"""Promote a trial: write its YAML, launch the full run as a job, follow it, and resume it from its checkpoint."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import optuna

from autofit.cluster.scheduler import LOCAL, Executor
from autofit.errors import ConfigError, EnvironmentFault, quoted
from autofit.files import ScratchFolder, private_folder, write_json
from autofit.frontends.command import script_text
from autofit.frontends.reading import SCRIPTS
from autofit.frontends.writing import OwnFile, stated
from autofit.hardware.hardware import Device, slot_names
from autofit.probing.cluster_launch import launcher_for
from autofit.probing.fork_server import server_for
from autofit.probing.launch import (
    LATE_S,
    Launcher,
    cancel_waiting,
    end_in_slurm,
    is_alive,
    is_of_cluster,
    place_in_slurm,
    start_job,
)
from autofit.probing.result import ProbeRequest, ProbeSetup
from autofit.promotion.checkpoints import checkpoints
from autofit.promotion.job import FILES as RESCUE_FILES
from autofit.promotion.job import carried, run_promoted
from autofit.promotion.ladder import RescueLadder
from autofit.promotion.place import (
    Tuned,
    check_found,
    check_ranks,
    for_slurm,
    machines_of,
    server_of,
    signal_s,
    training_device,
    working_folder,
)
from autofit.promotion.run_folder import RunFolder, ask_to_end, ending_of, log_of
from autofit.promotion.slurm_job import run_allocated
from autofit.proof.proof import Proof, checked
from autofit.recipe.keys import LAUNCH, RENAMED, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.launching import RolloutServer
from autofit.recipe.recipe import merge, own_names
from autofit.recipe.secrets import masked, sealed, sealed_text
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.space.traits import describe_changes
from autofit.tuning.frontier import Foreseen, Rule, Trial, leanest, leanest_foreseen, winner
from autofit.tuning.record import StudyRecord, forget_foreseen, record_of
from autofit.tuning.repeats import Prober
from autofit.tuning.sentences import confirmation_note
from autofit.tuning.storage import BEST, LEANEST, NAMES, check_is_of, database_of, keep_storage, no_trial
from autofit.tuning.study import begin_foreseen, database_errors, driving, load_study, tell, trials_of
from autofit.units import format_bytes, format_seconds
from autofit.watching.contract import Promise
from autofit.watching.events import EVENTS, PROGRESS, RunEvent, events_of, read_progress, stop_asked
from autofit.watching.thresholds import Guard

Line = tuple[object, object]  # a logged step as (time, step), or an event as (time, text)

_MOST = 3  # settings that are named
_LOOK_S = 0.1  # between two looks at a run


def edit_note(record: StudyRecord, cwd: Path) -> str:
    """Differences of the recipe's file from the study, if it was edited after the last search; else ""."""
    path = Path(str(record.foreign["path"])) if record.foreign else cwd / f"{record.recipe_name}.yaml"
    if not record.used or not os.path.isfile(path) or path.suffix not in (".yaml", ".yml", *SCRIPTS):
        return ""
    if path.stat().st_mtime <= datetime.fromisoformat(record.used).timestamp():
        return ""
    try:
        if record.foreign:
            texts = (str(record.foreign["text"]), sealed_text(script_text(path)))
            known, now = (sealed(stated(path, text)) for text in texts)
        else:
            known, now = _known(record), dict(_with_its_file(sealed(read_yaml_mapping(path, what="recipe"))))
    except ConfigError:
        return ""  # the study's copy is whole
    other = [
        key for key in {**known, **now}
        if key != "env"
        # of a recipe of TRL no key that is left out now, and none of older libraries
        and (record.foreign or (key in now and record.other_names.get(key, key) in record.resolved))
        and now.get(key) != known.get(key)
    ]  # fmt: skip
    if not other:
        return ""
    words = [f"{key} {_said(now, key)} (the study: {_said(known, key)})" for key in other[:_MOST]]
    more = f" and {len(other) - _MOST} more" if len(other) > _MOST else ""
    return (
        f"{path.name} was edited after the search and says {', '.join(words)}{more}; the study's copy is what is "
        "trained. To take the edit, run the search again"
    )


def _known(record: StudyRecord) -> dict[str, object]:
    """The study's content of its recipe's file, by the names that stand there."""
    older = {key: record.values[name] for key, name in record.other_names.items() if name in record.values}
    return {**_with_its_file(record.values), **older}


def _with_its_file(values: Mapping[str, object]) -> Mapping[str, object]:
    """`values` with `dataset_name: data.jsonl`, which the study has in the form of TRL's parser, `datasets: [...]`."""
    match values.get("datasets"):
        case [{"path": _, "data_files": str(file), **rest}] if not rest and "dataset_name" not in values:
            return {**{key: value for key, value in values.items() if key != "datasets"}, "dataset_name": file}
    return values


def _said(values: Mapping[str, object], key: str) -> str:
    return quoted(masked({key: values[key]})[key], 40) if key in values else "not given"


_YEAR_S = 365 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """The full run of one trial. All its files are in `folder`, so that later commands find the run."""

    folder: Path
    study: str
    trial: Trial
    device: Device
    trainer: str
    values: Mapping[str, object]
    yaml_path: Path
    tuned: Tuned
    written: tuple[Path, ...]  # `tuned` in this folder: its YAML, and an accelerate config for several ranks
    cwd: Path
    proof: Proof
    generates: bool
    trains_on_data: bool
    command: str | None  # the command that runs the tuned YAML without autofit, up to the file's name
    server: RolloutServer | None = None  # the vLLM server that the job of the run starts
    confirmation: str = ""  # the state of the trial's confirmation run, as a sentence
    promise: Promise | None = None
    ladder: RescueLadder | None = None  # what the run may change after an OOM
    own: OwnFile | None = None  # the tuned file of the tool that the user trains with, if that is another

    @property
    def output_dir(self) -> Path:
        path = Path(str(self.values.get("output_dir", self.folder.resolve() / "output")))
        return path if path.is_absolute() else self.cwd / path


def plan_promotion(
    folder: Path, *, study_name: str | None, trial: str, device: str = "auto", launch: bool = True,
    allow: Tier = "neutral", executor: Executor = LOCAL,
    say: Callable[[str], None] = lambda _: None,
) -> Promotion:  # fmt: skip
    """The promotion of `trial` (see `choose`) of a study in `folder`, after its proof; writes its tuned YAML.

    A point of the front that is known by prediction only is probed first, and so becomes a trial. `device` is where its
    run trains, with `executor` on machines of Slurm. Raises ConfigError, and writes nothing, for a trial that claims to
    be neutral and is not, and, where the run is to be launched, for a study of a card that this machine lacks.
    """
    study = load_study(folder, study_name)
    check_is_of(database_of(folder))
    keep_storage(database_of(folder))  # for the run, and those who look at it
    record = record_of(study)
    say(f"study {study.study_name}{' (used last)' if study_name is None else ''}")
    named = as_a_trial(trial, study, folder, executor=executor, say=say)
    chosen = choose(trials_of(study), named, record.rule)
    home = folder / "promoted" / f"{study.study_name}-trial-{chosen.number}"
    cwd = working_folder(record.cwd, folder, record.values)
    if launch and record.trains_on_data:
        check_found(record.values, cwd, searched_from=record.cwd)
    where = record.device
    if launch and record.trains_on_data:
        where = training_device(record.device, device, begun=RunFolder(home).request(), executor=executor)
    with database_errors(folder):  # the proof is kept there
        proof = checked(study, chosen, say=say)
    say(f"trial {chosen.number}: {proof.sentence}")
    if edited := edit_note(record, cwd):
        say(edited)
    sure = confirmation_note([chosen], record.rule)
    say(sure)
    given = record.values
    on_cpu: dict[str, object] = {"use_cpu": True} if "use_cpu" in record.resolved else {}
    extra = dict(on_cpu if record.device == "cpu" else {})  # a YAML tuned for a simulated card is for a real card
    own_device = {"use_cpu": where == "cpu"} if on_cpu and (where == "cpu" or record.device == "cpu") else {}
    if "output_dir" in record.resolved:
        own = given.get("output_dir")
        extra["output_dir"] = str(Path(str(own)) / home.name if own else home.resolve() / "output")
    own_launch = Launch.of(merge(given, chosen.yaml_changes))
    machines = machines_of(own_launch, executor)
    if machines != own_launch.machines:
        extra[LAUNCH] = replace(own_launch, machines=machines).to_values()
    comment = (
        f"autofit: trial {chosen.number} of study {study.study_name}, tier {chosen.tier}: "
        f"{describe_changes(chosen.changes, record.resolved, own_names(record.foreign))}\n"
        f"{proof.sentence}\n{sure}"
    )
    if spelling := _spelling(record, chosen.yaml_changes):
        comment += f"\n{spelling}"
        say(f"the YAML is {spelling}")
    remark = "" if record.trains_on_data else _of_made_up(record)
    tuned = Tuned(
        values=merge(given, {**chosen.yaml_changes, **extra}), comment=comment, command=record.command, remark=remark
    )
    server = None
    if launch and record.trains_on_data:
        check_ranks(tuned.launch, where, executor)
        server = server_of(merge(record.resolved, chosen.yaml_changes), tuned.values, where, executor, say=say)
    private_folder(folder / "promoted")
    path = home / "tuned.yaml"
    written = tuned.write(path, accelerate=home / "accelerate.yaml")
    values = merge(given, {**chosen.yaml_changes, **extra, **own_device})
    return Promotion(
        folder=home, study=study.study_name, trial=chosen, device=where, trainer=record.trainer,
        values=values, yaml_path=path, tuned=tuned, written=written,
        ladder=RescueLadder.of(record, chosen, trials_of(study), values=values, device=where, allow=allow),
        cwd=cwd, proof=proof, confirmation=sure, generates=record.batch_keys.rollout is not None,
        trains_on_data=record.trains_on_data, command=record.command, server=server,
        promise=promise_of(chosen, record, proof.sentence), own=_in_own_keys(record.foreign, chosen, say),
    )  # fmt: skip


def _spelling(record: StudyRecord, changes: Mapping[str, object]) -> str:
    """Note on the tuned YAML's keys for a user of older libraries; "" if the recipe has today's."""
    older = {new: old for old, new in reversed(RENAMED)}
    new = dict.fromkeys(outer for key in changes if (outer := key.partition(".")[0]) in older)
    said = "".join(f", {key} was {older[key]}" for key in new if key not in record.values)
    return f"written {record.spelling}{said}: an older TRL needs the older names" if record.spelling else ""


def _of_made_up(record: StudyRecord) -> str:
    if record.batch_keys.rollout is None:
        return "its samples were synthetic: add dataset_name"
    return "its prompts were synthetic: add dataset_name, and your own reward_funcs"


def _in_own_keys(origin: Mapping[str, object], chosen: Trial, say: Callable[[str], None]) -> OwnFile | None:
    """The user's file of another tool with the trial's changes, if there is one and it has keys for them."""
    if not origin:
        return None
    try:
        return OwnFile.of(origin, chosen.yaml_changes)
    except ConfigError as error:
        say(f"no file for {origin['tool']} is written: {error}")
        return None


def promise_of(chosen: Trial, record: StudyRecord, proof: str) -> Promise | None:
    """Expectations of the full run that follow from the trial's probe, or its confirmation."""
    if chosen.figures is None:
        return None
    return Promise.of(
        chosen.figures, limit_bytes=record.limit_bytes, effective_batch_size=record.effective_batch_size,
        proof=proof,
    )  # fmt: skip


def choose(trials: list[Trial], asked: str, rule: Rule, *, fitting: bool = True) -> Trial:
    """The trial that `asked` names: a number, "best" (the winner) or "leanest" (the least memory on the front).

    Raises ConfigError if there is none or it does not fit.
    """
    if asked in NAMES:
        found = winner(trials, **rule) if asked == BEST else leanest(trials)
        if found is None:
            raise ConfigError(
                f"there is no {asked} trial: no trial fits yet; run `autofit search` to its end, and where it has "
                "ended `autofit report` says what would fit"
            )
        return found
    numbers = [str(t.number) for t in trials]
    if asked not in numbers:
        raise no_trial(asked, len(trials))
    chosen = trials[numbers.index(asked)]
    if fitting and not chosen.fits:
        state = (
            "is not finished"
            if chosen.status is None
            else f"failed its confirmation run: {chosen.confirmed and chosen.confirmed.reason}"
            if chosen.fell
            else f"is {chosen.status}: {chosen.result and chosen.result.reason}"
        )
        raise ConfigError(
            f"only a trial that fits can be promoted, but trial {chosen.number} {state}; choose another trial"
        )
    return chosen


def launch(
    promotion: Promotion, *, study_folder: Path, restart: bool = False, guards: Sequence[Guard] | None = None,
    executor: Executor = LOCAL,
) -> str:  # fmt: skip
    """Start the run unless it is running or done. Returns "started", "resumed", "running" or "done"."""
    folder, run = promotion.folder, RunFolder(promotion.folder)
    if restart and not is_alive(folder):
        shutil.rmtree(promotion.output_dir, ignore_errors=True)
        for name in (PROGRESS, EVENTS, *RESCUE_FILES):
            (folder / name).unlink(missing_ok=True)
        run.forget_end(restart=True)
    if is_alive(folder):
        return "running"
    if run.final() is not None:
        return "done"
    run.forget_end()
    request = {
        "folder": str(folder.resolve()), "study_folder": str(study_folder.resolve()), "study": promotion.study,
        "trial": promotion.trial.number, "device": promotion.device, "trainer": promotion.trainer,
        "values": dict(promotion.values), "output_dir": str(promotion.output_dir.resolve()),
        "generates": promotion.generates, "cwd": str(promotion.cwd), "slots": list(slot_names(promotion.device, 1)),
        "proof": promotion.proof.sentence, "proof_verdict": str(promotion.proof.verdict),
        "confirmation": promotion.confirmation,
        "promise": None if promotion.promise is None else promotion.promise.to_json(),
        "guards": None if guards is None else [guard.to_json() for guard in guards],
        "serves": promotion.server is not None,
    }  # fmt: skip
    if promotion.ladder is not None:
        request |= {"ladder": promotion.ladder.to_json(), **carried(folder, promotion.ladder)}
    write_json(run.request_path, request)
    resumed = bool(checkpoints(promotion.output_dir))
    if executor.is_cluster:
        executor = for_slurm(executor, promotion.tuned.launch, promotion.device, promotion.server)
    start_job(
        folder, run_allocated if executor.is_cluster else run_promoted, str(run.request_path), timeout_s=_YEAR_S,
        executor=executor, signal_s=signal_s(executor),
    )  # fmt: skip
    return "resumed" if resumed else "started"


def follow(
    promotion: Promotion, show: Callable[[dict[str, object]], None], tell: Callable[[RunEvent], None] = lambda _: None,
    *, place: Callable[[str], None] = lambda _: None, known: Collection[Line] = (),
) -> dict[str, object]:  # fmt: skip
    """The final summary of the run; calls `show` with each logged step and `tell` with each event until it ends.

    Those that are `known` (see `logged`) are passed over. `place` is told where its job of Slurm is: in the queue and
    why, or on which nodes.

    Raises EnvironmentFault if the run ends without a summary: killed, or failed with a reason.
    """
    said = set(known)  # a rescue takes steps and events back, so no count would do
    read: list[tuple[int, int] | None] = []
    where: str | None = None
    ended_at: float | None = None
    while True:
        alive = is_alive(promotion.folder)
        if alive and (now := place_in_slurm(promotion.folder)) not in (None, where):
            where = now
            place(str(now))
        state = [_state(promotion.folder / name) for name in (PROGRESS, EVENTS)]
        if state != read:  # a long run has many lines, and seldom a new one
            read = state
            _say_new(promotion.folder, said, show, tell)
        final = RunFolder(promotion.folder).final()
        if final is not None:
            return final
        ended_at = None if alive else ended_at or time.monotonic()
        if ended_at is not None:
            late = is_of_cluster(promotion.folder) and time.monotonic() - ended_at < LATE_S
            fault = _fault(promotion.folder, more_may_come=late)
            if fault is not None:
                raise fault
        time.sleep(_LOOK_S)


def _fault(folder: Path, *, more_may_come: bool) -> EnvironmentFault | None:
    """The reason why a run that has ended is unfinished; None if its node's last words may still be on their way."""
    failure = RunFolder(folder).failure()
    if failure is not None:
        return EnvironmentFault(f"the run failed: {failure}; see {log_of(folder)}")
    asked = stop_asked(folder)
    if asked is not None:
        return EnvironmentFault(f"the run was stopped: {asked.text}; the same command goes on from there")
    reason = "; ".join(filter(None, (end_in_slurm(folder), ending_of(folder))))
    if not reason and more_may_come:
        return None
    return EnvironmentFault(
        f"the run ended before its last step ({reason or 'perhaps killed'}); run the same command to resume it; "
        f"see {log_of(folder)}"
    )


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of change of a file; another pair once it is written to or replaced. None: it is missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def logged(folder: Path) -> set[Line]:
    """The steps and the events of the run in `folder` so far, each by its time."""
    steps: set[Line] = {_of_step(line) for line in read_progress(folder)}
    return steps | {(event.time, event.text) for event in events_of(folder)}


def _of_step(line: Mapping[str, object]) -> Line:
    return line.get("time", 0), line["step"]


def _say_new(
    folder: Path, said: set[Line], show: Callable[[dict[str, object]], None],
    tell: Callable[[RunEvent], None],
) -> None:  # fmt: skip
    """Show the steps and tell the events that are new to `said`, in the order in which they happened."""
    news: list[tuple[Line, Callable[[], None]]] = []
    news += [(_of_step(line), partial(show, line)) for line in read_progress(folder)]
    news += [((event.time, event.text), partial(tell, event)) for event in events_of(folder)]
    for key, say in sorted(news, key=lambda one: float(str(one[0][0]))):
        if key not in said:
            said.add(key)
            say()


def stop(promotion: Promotion, *, wait_s: float = 120.0) -> bool:
    """Ask the run to save a checkpoint after its current step and to end; waits. True if it has ended."""
    ask_to_end(promotion.folder)
    cancel_waiting(promotion.folder)
    deadline = time.monotonic() + wait_s
    while is_alive(promotion.folder) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return not is_alive(promotion.folder)


def model_path(final: Mapping[str, object]) -> str:
    """The path of the trained model, relative to the working directory if it is below it."""
    path = Path(str(final["output_dir"]))
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


Say = Callable[[str], None]


def as_a_trial(
    asked: str, study: optuna.Study, folder: Path, *, executor: Executor, say: Say, launcher: Launcher | None = None
) -> str:
    """Name of the trial that `asked` means, once every point that this covers has been probed.

    A point known by prediction only becomes a trial: `p1` its own, "leanest" each that is predicted to be the leanest.
    Raises ConfigError for a study whose points cannot be probed, and EnvironmentFault for a probe that was killed.
    """
    while (point := _meant(asked, study)) is not None:
        trial = _probed(point, study, folder, executor=executor, say=say, launcher=launcher)
        if asked != LEANEST:
            return str(trial.number)
    return asked


def _meant(asked: str, study: optuna.Study) -> Foreseen | None:
    """The predicted point that `asked` names; None if it names a trial."""
    points = [point for point in record_of(study).points_ahead if point.name]
    if asked == LEANEST:
        return leanest_foreseen(trials_of(study), points)
    return next((point for point in points if point.name == asked), None)


def _probed(
    point: Foreseen, study: optuna.Study, folder: Path, *, executor: Executor, say: Say, launcher: Launcher | None
) -> Trial:
    home, record = folder / "probes" / study.study_name, record_of(study)
    earlier = _last_request(home)
    with driving(folder, study.study_name), ScratchFolder("promote-") as scratch:
        trial = begin_foreseen(study, point)
        how = "simulated" if record.device.startswith("sim:") else "probed"
        say(
            f"{point.name} is known by prediction only ({format_bytes(point.device_used_bytes)}, "
            f"{format_seconds(point.step_s)} a step), so it is {how} first, as trial {trial.number}"
        )
        server = server_for(scratch) if launcher is None else None
        launcher = launcher or _launcher(record, executor, home)
        try:
            prober = Prober(
                setup=ProbeSetup.of(earlier, server_socket=None if server is None else server.socket_path), home=home,
                values=record.values, launcher=launcher, measured_steps=earlier.measured_steps,
            )  # fmt: skip
            result = prober.probe(trial, f"trial-{trial.number:04d}")
        finally:
            launcher.close()
            if server is not None:
                server.close()
        if result is None:
            raise EnvironmentFault(f"the probe of {point.name} was killed; run the same command again to repeat it")
        tell(study, trial.number, result, target_bytes=record.limit_bytes)
        forget_foreseen(study, point.name)
    found = trials_of(study)[trial.number]
    say(f"trial {found.number}: {_outcome(found)}")
    return found


def _outcome(trial: Trial) -> str:
    if trial.fits and trial.step_s is not None:
        return f"{format_bytes(trial.device_used_bytes or 0)}, {format_seconds(trial.step_s)} a step"
    return f"it does not fit: {trial.status}" if trial.result is None else f"{trial.status}: {trial.result.reason}"


def _last_request(home: Path) -> ProbeRequest:
    """The request of the study's last trial: a point is probed as the trials were."""
    found = sorted(home.glob("trial-*/request.json"))
    if not found:
        raise ConfigError(
            f"a point known by prediction only is probed as the study's trials were, and {home} has none of their "
            "requests any more; run its `autofit search` again"
        )
    return ProbeRequest.read(found[-1])


def _launcher(record: StudyRecord, executor: Executor, home: Path) -> Launcher:
    ranks = Launch.of(record.values).ranks
    return launcher_for(executor, home, device=record.device, card=record.card, cards=ranks)
