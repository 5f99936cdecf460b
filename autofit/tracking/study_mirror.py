"""MLflow's mirror of a study: one top-level run per trial, rebuilt from Optuna at any time, any number of times.

Optuna holds the truth. `python -m autofit.tracking.study_mirror DIR STUDY` follows a search in a process of its own,
`python -m autofit.tracking.study_mirror REQUEST` a full run, so that a slow or unreachable MLflow affects nothing else.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from mlflow.entities import Run

from autofit.errors import AutofitError
from autofit.files import written_json
from autofit.tracking.database import make_whole, tracking_uri
from autofit.tracking.follower import keep_mirrored, told_of, told_to_end
from autofit.tracking.front_plot import study_figure, write_step
from autofit.tracking.promoted_run import RunMirror, mirror_promoted
from autofit.tracking.runs import (
    COLOR,
    CONFIRMED,
    ENDED,
    KIND,
    ROLE,
    STUDY,
    TRIAL,
    client,
    experiment_id,
    finished_run,
    how_confirmed,
    mirror_confirmation,
    mirror_trial,
    put_runs,
    role_tags,
    runs_of,
    search,
    tracking_errors,
    trial_run_ids,
)
from autofit.tracking.ui import view_tags
from autofit.tuning.frontier import Trial, baseline, common_front, winner
from autofit.tuning.locks import exclusive
from autofit.tuning.record import StudyRecord, record_of
from autofit.tuning.sentences import confirmation_json, confirmation_note, why
from autofit.tuning.study import database_errors, load_study, open_storage, study_names, with_confirmations
from autofit.units import format_bytes

_WINNER = "autofit.winner"


def mirror_summary(
    api: Any, experiment: str, study_name: str, record: StudyRecord, trials: list[Trial], run: Run | None, probes: Path
) -> None:
    """Bring the study's own run, the roles of its trials and the saved views up to date, if a trial was added.

    The study's folder of `probes` has how the memory of the winner's step came and went.
    """
    finished = [t for t in trials if t.result is not None]
    if not finished:
        return
    if run is None:
        run = api.create_run(experiment, tags={STUDY: study_name, KIND: "study"}, run_name="summary")
    confirmed = sum((t.confirmed is not None) + (t.comparison is not None) for t in finished)
    state = {"autofit.trials": str(len(finished)), "autofit.confirmations": str(confirmed)}
    if run.info.status == "FINISHED" and all(run.data.tags.get(key) == value for key, value in state.items()):
        return
    roles = roles_of(trials, record)
    _mark(api, experiment, roles)
    shown = [t for t in finished if t.number in roles]
    for key, value in view_tags(finished, shown, record.resolved, run.info.start_time).items():
        api.set_experiment_tag(experiment, key, value)
    best = winner(trials, **record.rule)
    if best is not None and run.data.tags.get(_WINNER) != str(best.number):
        with tempfile.TemporaryDirectory() as temporary:
            for path in write_step(best, record, probes=probes, into=Path(temporary)):
                api.log_artifact(run.info.run_id, str(path))
    _write(api, run.info.run_id, study_name, record, trials)
    for key, value in state.items():
        api.set_tag(run.info.run_id, key, value)
    api.set_terminated(run.info.run_id)


def roles_of(trials: Sequence[Trial], record: StudyRecord) -> dict[int, str]:
    """{trial number: winner, baseline or front} of the trials to compare."""
    best, base = winner(trials, **record.rule), baseline(trials)
    roles = {t.number: "front" for t in common_front(trials, record.points_ahead)[0]}
    if base is not None and base.result is not None:
        roles[base.number] = "baseline"
    if best is not None:
        roles[best.number] = "winner and baseline" if base is not None and best.number == base.number else "winner"
    return roles


def _mark(api: Any, experiment: str, roles: Mapping[int, str]) -> None:
    """Tag the runs of these trials with their role, and take the tag off those that lost it."""
    where = f"tags.`{ROLE}` LIKE '%' AND tags.`{KIND}` = 'trial' AND tags.`{TRIAL}` LIKE '%'"  # users delete tags
    had = {run.data.tags[TRIAL]: run for run in search(api, experiment, where)}
    for marked, run in had.items():
        if marked not in map(str, roles):
            for key in (ROLE, COLOR):
                if key in run.data.tags:
                    api.delete_tag(run.info.run_id, key)
    new = [n for n, role in roles.items() if str(n) not in had or had[str(n)].data.tags[ROLE] != role]
    runs = runs_of(api, experiment, new) if new else {}
    for number in new:
        if str(number) in runs:
            for key, value in role_tags(roles[number]).items():
                api.set_tag(runs[str(number)].info.run_id, key, value)


def _write(api: Any, run_id: str, study_name: str, record: StudyRecord, trials: list[Trial]) -> None:
    """The summary as text and JSON, and the plot of the Pareto front, as artifacts."""
    target, rule = record.target_bytes, record.rule
    sentence = why(trials, record.resolved, target, rule)
    best, sure = winner(trials, **rule), confirmation_note(trials, rule)
    front, ahead = common_front(trials, record.points_ahead)
    note = f"**{sentence}**\n\n{sum(t.result is not None for t in trials)} trials on {record.device}"
    note += f", target {format_bytes(target)}" if target else ""
    note += f"\n\n{sure}" if sure else ""
    api.set_tag(run_id, "mlflow.note.content", note)
    api.set_tag(run_id, _WINNER, "" if best is None else str(best.number))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "summary.md").write_text(note + "\n")
        content = {"study": study_name, "why": sentence, "winner": None if best is None else best.number,
                   "front": [t.number for t in front], "foreseen": [f.to_json() for f in ahead],
                   "confirmation": confirmation_json(trials, rule)}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
        study_figure(study_name, trials, record).savefig(folder / "front.png", dpi=110)
        for path in sorted(folder.iterdir()):
            api.log_artifact(run_id, str(path))


_FOLLOW_S = 2.0
_REST = 4  # times as long as a look took, before the next one: the search has the processors
_LOCK_S = 15.0  # longest wait of one mirror for another
_FEW = 50  # up to this number, runs are looked up one by one: 10 ms each in an experiment of 1,000


def sync(folder: Path, study_name: str | None = None, *, rebuild: bool = False) -> int:
    """Copy the study and its full runs to MLflow; `rebuild` deletes its runs first. Returns the number of its trials.

    Every study is copied where MLflow's database was broken and is made anew. Raises EnvironmentFault if MLflow or its
    database cannot be used.
    """
    study = load_study(folder, study_name)
    with tracking_errors(folder):
        _mend(folder)
        count = _sync(folder, study, set(), rebuild=rebuild)
        mirror_promoted(folder, study.study_name)
    return count


def _mend(folder: Path) -> None:
    """Copy all studies if MLflow's database was broken and had to be made anew."""
    if make_whole(folder):
        for name in study_names(open_storage(folder)):
            _sync(folder, load_study(folder, name), set())
            mirror_promoted(folder, name)


def _sync(folder: Path, study: Any, mirrored: set[tuple[object, ...]], *, rebuild: bool = False) -> int:
    """Mirror trials not yet in `mirrored`; add them to it. Returns the number of finished trials."""
    api = client(folder)
    with exclusive(folder / "locks", f"mlflow-{study.study_name}", wait_s=_LOCK_S):
        experiment = experiment_id(api, folder, study.study_name)
        if rebuild:
            for run in search(api, experiment, f"tags.`{KIND}` LIKE '%'"):
                api.delete_run(run.info.run_id)
        frozen = study.get_trials(deepcopy=False)
        trials = with_confirmations(study, frozen)
        finished = {
            (t.number, frozen[t.number].datetime_complete, t.confirmed and t.confirmed.step_s): t
            for t in trials
            if t.result is not None
        }
        new = {key: trial for key, trial in finished.items() if key not in mirrored}
        if not new and mirrored:
            return len(finished)
        runs = runs_of(api, experiment, None if len(new) > _FEW else [t.number for t in new.values()])
        record, base = record_of(study), baseline(trials)
        fresh = [key for key in new if str(key[0]) not in runs]
        if len(fresh) > _FEW and tracking_uri(folder).startswith("sqlite:"):
            made = [finished_run(study.study_name, record, new[key], key[1], base) for key in fresh]
            put_runs(api, experiment, made)
            runs = runs_of(api, experiment)
        for (number, ended, _), trial in new.items():
            known = runs.get(str(number))
            if known is not None and known.data.tags.get(ENDED, str(ended)) != str(ended):
                api.delete_run(known.info.run_id)  # mirrors a trial of an earlier study of this name that was deleted
                known = None
            if known is None or known.info.status == "RUNNING":
                known = mirror_trial(api, experiment, study.study_name, record, trial, known, ended, base)
            sure = how_confirmed(trial)
            if sure is not None and sure != known.data.tags.get(CONFIRMED):
                mirror_confirmation(api, known.info.run_id, trial, sure)
        probes = folder / "probes" / study.study_name
        mirror_summary(api, experiment, study.study_name, record, trials, runs.get("summary"), probes)
        mirrored.update(new)
    return len(finished)


# -- mirrors as processes of their own --------------------------------------------------------------------------------

_RUN_S = 1.0
_REST_OF_RUN = 5  # times the seconds of an update: the mirror of a long run takes a sixth of a core at most


def follow(folder: Path, study_name: str) -> None:
    """Mirror the study every 2 s, or less often where that takes long, until standard input closes; then once more."""
    study: optuna.Study | None = None
    mirrored: set[tuple[object, ...]] = set()

    def look(ended: bool) -> None:
        nonlocal study
        study = study or load_study(folder, study_name)
        if ended:  # mirror every trial again, as MLflow's runs may have changed meanwhile
            mirrored.clear()
        with database_errors(folder), tracking_errors(folder):
            _mend(folder)
            told_now = told_of(study)
            _sync(folder, study, mirrored)
        if ended:
            keep_mirrored(folder, study_name, told_now)

    _until_told(look, every_s=_FOLLOW_S, rest=_REST)


def follow_run(request_path: Path) -> None:
    """Mirror a promoted run until standard input closes, then once more, and close MLflow's run."""
    request = written_json(request_path)
    folder, study, trial = Path(str(request["study_folder"])), str(request["study"]), int(str(request["trial"]))
    run, has_trial = RunMirror(request), False

    def look(ended: bool) -> None:
        nonlocal has_trial
        with tracking_errors(folder):
            if not has_trial and not trial_run_ids(client(folder), folder, study, [trial]):
                sync(folder, study)
            has_trial = True
            run.update(ended=ended)

    _until_told(look, every_s=_RUN_S, rest=_REST_OF_RUN)


def _until_told(look: Callable[[bool], None], *, every_s: float, rest: float) -> None:
    """Call `look` every so many seconds, after `rest` times as long as it took, and a last time with True."""
    told = told_to_end()
    os.nice(19)  # gives way to the probe, which is being timed, or to the training
    ended, took_s = False, 0.0
    while not ended:
        ended = told.wait(max(every_s, rest * took_s))
        began = time.monotonic()
        try:
            look(ended)
        except (AutofitError, OSError) as error:
            print(f"MLflow: {error}", file=sys.stderr, flush=True)
        took_s = time.monotonic() - began


if __name__ == "__main__":
    if len(sys.argv) > 2:
        follow(Path(sys.argv[1]), sys.argv[2])
    else:
        follow_run(Path(sys.argv[1]))
    os._exit(0)  # at once: to unload MLflow takes ten times as long as the last look, over a minute on a busy machine
