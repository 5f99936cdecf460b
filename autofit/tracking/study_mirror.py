"""MLflow's mirror of a study: one top-level run per trial, rebuilt from Optuna at any time, any number of times.

Optuna holds the truth. `python -m autofit.tracking.study_mirror DIR STUDY` follows a search in a process of its own, so
that a slow or unreachable MLflow affects nothing else.
"""

import os
import select
import sys
from pathlib import Path
from typing import Any

from autofit.errors import AutofitError
from autofit.tracking.database import make_whole, tracking_uri
from autofit.tracking.many_runs import put_runs
from autofit.tracking.promoted_run import mirror_promoted
from autofit.tracking.runs import CONFIRMED, ENDED, KIND, client, experiment_id, runs_of, search, tracking_errors
from autofit.tracking.summary import mirror_summary
from autofit.tracking.trial_run import finished_run, how_confirmed, mirror_confirmation, mirror_trial
from autofit.tuning.frontier import baseline
from autofit.tuning.locks import exclusive
from autofit.tuning.record import record_of
from autofit.tuning.study import (
    database_errors,
    load_study,
    open_storage,
    study_names,
    with_confirmations,
)

_FOLLOW_S = 2.0
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
        mirror_summary(api, experiment, study.study_name, record, trials, runs.get("summary"))
        mirrored.update(new)
    return len(finished)


# -- the follower -----------------------------------------------------------------------------------------------------


def follow(folder: Path, study_name: str) -> None:
    """Mirror the study every 2 s until standard input closes, then once more."""
    os.nice(19)  # gives way to the probe, which is being timed
    study, ended = None, False
    mirrored: set[tuple[object, ...]] = set()
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], _FOLLOW_S)[0])
        try:
            study = study or load_study(folder, study_name)
            if ended:  # mirror every trial again, as MLflow's runs may have changed meanwhile
                mirrored.clear()
            with database_errors(folder), tracking_errors(folder):
                _mend(folder)
                _sync(folder, study, mirrored)
        except (AutofitError, OSError) as error:
            print(f"MLflow: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2])
