"""MLflow's mirror of a study: one top-level run per trial, rebuilt from Optuna at any time, any number of times.

Optuna holds the truth. `python -m autofit.tracking.study_mirror DIR STUDY` follows a search in a process of its own, so
that a slow or unreachable MLflow affects nothing else.
"""

import contextlib
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # reports an unreachable server within seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import alembic.util
import mlflow
import sqlalchemy.exc
from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from autofit.errors import AutofitError, EnvironmentFault
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.space.describe import describe_changes
from autofit.tracking.front_plot import front_figure
from autofit.tuning.frontier import SPEED, Trial, baseline, pareto_front, winner
from autofit.tuning.record import StudyRecord, record_of
from autofit.tuning.sentences import confirmation_json, confirmation_note, why
from autofit.tuning.study import database_errors, database_path, exclusive, load_study, with_confirmations
from autofit.units import format_bytes

STUDY, TRIAL, STATUS, KIND = "autofit.study", "autofit.trial", "autofit.status", "autofit.kind"
ENDED, CONFIRMED = "autofit.ended", "autofit.confirmation"
_FOLLOW_S = 2.0
_LOCK_S = 15.0  # longest wait of one mirror for another
_FEW = 50  # up to this number, runs are looked up one by one: 10 ms each in an experiment of 1,000
_RUN_STATUS = {ProbeStatus.FIT: "FINISHED", ProbeStatus.OOM: "FAILED", ProbeStatus.FAILED: "FAILED",
               ProbeStatus.LOST: "KILLED"}  # fmt: skip


def tracking_uri(folder: Path) -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file beside the studies (never Optuna's own: both use alembic)."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"


def client(folder: Path) -> MlflowClient:
    return MlflowClient(tracking_uri(folder))


def experiment_id(api: MlflowClient, folder: Path, study_name: str) -> str:
    """The id of the study's experiment, made if missing. Artifacts lie beside the studies, or on MLflow's server."""
    found = api.get_experiment_by_name(study_name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            api.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
    local = tracking_uri(folder).startswith("sqlite:")
    location = (folder / "mlartifacts" / study_name).resolve().as_uri() if local else None
    try:
        return str(api.create_experiment(study_name, artifact_location=location, tags={STUDY: study_name}))
    except MlflowException:
        found = api.get_experiment_by_name(study_name)  # another process made it a moment ago
        if found is None:
            raise
        return str(found.experiment_id)


@contextlib.contextmanager
def tracking_errors(folder: Path) -> Iterator[None]:
    """Turn errors of MLflow and its database into one EnvironmentFault."""
    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, alembic.util.CommandError) as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split())[:200]
        raise EnvironmentFault(
            f"MLflow at {tracking_uri(folder)} cannot be used: {reason}; the studies are unharmed: repair or move "
            f"MLflow's database, then run `autofit sync` to rebuild it"
        ) from error


def sync(folder: Path, study_name: str | None = None, *, rebuild: bool = False) -> int:
    """Copy the study to MLflow; `rebuild` deletes its trial runs first. Returns the number of mirrored trials.

    Raises EnvironmentFault if MLflow or its database cannot be used.
    """
    study = load_study(folder, study_name)
    with tracking_errors(folder):
        return _sync(folder, study, set(), rebuild=rebuild)


def _sync(folder: Path, study: Any, mirrored: set[tuple[object, ...]], *, rebuild: bool = False) -> int:
    """Mirror trials not yet in `mirrored`; add them to it. Returns the number of finished trials."""
    api = client(folder)
    with exclusive(folder / "locks", f"mlflow-{study.study_name}", wait_s=_LOCK_S):
        experiment = experiment_id(api, folder, study.study_name)
        if rebuild:
            for run in _runs(api, experiment).values():
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
        runs = _runs(api, experiment, None if len(new) > _FEW else [t.number for t in new.values()])
        record = record_of(study)
        for (number, ended, _), trial in new.items():
            known = runs.get(str(number))
            if known is not None and known.data.tags.get(ENDED, str(ended)) != str(ended):
                api.delete_run(known.info.run_id)  # mirrors a trial of an earlier study of this name that was deleted
                known = None
            if known is None or known.info.status == "RUNNING":
                known = _mirror(api, experiment, study.study_name, record, trial, known, ended)
            sure = _how_confirmed(trial)
            if sure is not None and sure != known.data.tags.get(CONFIRMED):
                _mirror_confirmation(api, known.info.run_id, trial, sure)
        _summary(api, experiment, study.study_name, record, trials, runs.get("summary"))
        mirrored.update(new)
    return len(finished)


def trial_run_ids(api: MlflowClient, folder: Path, study_name: str, numbers: Sequence[int]) -> list[str]:
    """Ids of the runs that mirror the trials `numbers`, without those that have no run yet."""
    runs = _runs(api, experiment_id(api, folder, study_name), numbers)
    return [str(runs[str(number)].info.run_id) for number in numbers if str(number) in runs]


def _runs(api: MlflowClient, experiment: str, numbers: Sequence[int] | None = None) -> dict[str, Run]:
    """{trial number: its run} for all trials, or for `numbers`, and the study's own run under "summary"."""
    if numbers is None:
        return _search(api, experiment, f"tags.`{KIND}` != 'promoted'")
    found = _search(api, experiment, f"tags.`{KIND}` = 'study'")
    for number in numbers:
        found |= _search(api, experiment, f"tags.`{KIND}` != 'promoted' AND tags.`{TRIAL}` = '{number}'")
    return found


def _search(api: MlflowClient, experiment: str, where: str) -> dict[str, Run]:
    found: dict[str, Run] = {}
    token = None
    while True:
        page = api.search_runs(
            [experiment], filter_string=where, run_view_type=ViewType.ACTIVE_ONLY, max_results=1000, page_token=token
        )
        for run in page:
            tags = run.data.tags
            found[tags.get(TRIAL, "summary")] = run
        token = page.token
        if not token:
            return found


def _how_confirmed(trial: Trial) -> str | None:
    """The result of a trial's confirmation in words; None before it."""
    result = trial.confirmed
    if result is None:
        return None
    if result.status is not ProbeStatus.FIT:
        return f"{result.status}: {result.reason}"
    return confirmation_note([trial], SPEED)


def _mirror_confirmation(api: Any, run_id: str, trial: Trial, sure: str) -> None:
    """Log the confirmation of a finalist as `confirmed_` metrics and a tag of its trial's run.

    The baseline's is logged anew after each finalist that it was compared with, so the time is that of the logging.
    """
    assert trial.confirmed is not None
    found = {key: value for key, value in _metrics(trial.confirmed).items() if "." not in key}
    if trial.comparison is not None:
        found |= {key: getattr(trial.comparison, key) for key in ("speedup", "low", "high")}
    at_ms = int(1000 * time.time())
    metrics = [Metric(f"confirmed_{key}", value, at_ms, 0) for key, value in found.items()]
    api.log_batch(run_id, metrics=metrics, tags=[RunTag(CONFIRMED, sure)])


def _mirror(
    api: Any, experiment: str, study_name: str, record: StudyRecord, trial: Trial, run: Run | None,
    ended: datetime | None,
) -> Run:  # fmt: skip
    result = trial.result
    assert result is not None
    at_ms = int(ended.timestamp() * 1000) if ended is not None else 0
    resolved = record.resolved
    tags = {
        STUDY: study_name, TRIAL: str(trial.number), STATUS: str(result.status), KIND: "trial", ENDED: str(ended),
        "autofit.tier": trial.tier, "autofit.device": result.device,
        "autofit.changes": describe_changes(trial.changes, resolved),
        "autofit.shown_as": "pruned" if result.status is ProbeStatus.OOM else str(result.status),
        "mlflow.note.content": result.reason or describe_changes(trial.changes, resolved),
    }  # fmt: skip
    if run is None:
        start_ms = at_ms - int(1000 * (result.wall_s or 0))
        run = api.create_run(experiment, start_time=start_ms, tags=tags, run_name=f"trial-{trial.number:04d}")
    params = [Param(key, str(value)[:6000]) for key, value in _params(trial, resolved).items()]
    metrics = [Metric(key, value, at_ms, 0) for key, value in _metrics(result).items()]
    for start in range(0, max(1, len(params)), 90):
        api.log_batch(run.info.run_id, params=params[start : start + 90])
    api.log_batch(run.info.run_id, metrics=metrics, tags=[RunTag(k, v) for k, v in tags.items()])
    api.set_terminated(run.info.run_id, status=_RUN_STATUS[result.status], end_time=at_ms)
    return run


def _params(trial: Trial, resolved: Mapping[str, object]) -> dict[str, object]:
    """Every knob's value, including derived ones, so that MLflow's parallel coordinates show all differences."""
    names = {**{k: v for k, v in trial.params.items() if not k.startswith("env.")}, **trial.changes}
    always = ("gradient_accumulation_steps", "steps_per_generation", "per_device_train_batch_size")
    base = {key: resolved.get(key) for key in always if key in resolved}
    return {**base, **names, "tier": trial.tier}


def _metrics(result: ProbeResult) -> dict[str, float]:
    found: dict[str, float | int | None] = {
        "step_s": result.median_step_s, "completions_per_s": result.completions_per_s,
        "tokens_per_s": result.tokens_per_s, "device_used_bytes": result.device_used_bytes,
        "peak_reserved_bytes": result.peak_reserved_bytes, "peak_allocated_bytes": result.peak_allocated_bytes,
        "process_s": result.process_s, "wall_s": result.wall_s,
        "rollout_s": _mean(result.rollout_s), "update_s": _mean(result.update_s),
    }  # fmt: skip
    found |= {f"peak_allocated_bytes.{p.name}": p.peak_allocated_bytes for p in result.phases}
    return {key: float(value) for key, value in found.items() if value is not None}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# -- the study's own run ----------------------------------------------------------------------------------------------


def _summary(
    api: Any, experiment: str, study_name: str, record: StudyRecord, trials: list[Trial], run: Run | None
) -> None:
    """Write the study's own run: its summary as text and JSON, and the plot of its Pareto front, as artifacts."""
    finished = [t for t in trials if t.result is not None]
    if not finished:
        return
    if run is None:
        run = api.create_run(experiment, tags={STUDY: study_name, KIND: "study"}, run_name="summary")
    run_id = run.info.run_id
    confirmed = sum((t.confirmed is not None) + (t.comparison is not None) for t in finished)
    known = (run.data.tags.get("autofit.trials"), run.data.tags.get("autofit.confirmations", "0"))
    if known == (str(len(finished)), str(confirmed)) and run.info.status == "FINISHED":
        return
    target, rule = record.target_bytes, record.rule
    sentence = why(trials, record.resolved, target, rule)
    best, sure = winner(trials, **rule), confirmation_note(trials, rule)
    note = f"**{sentence}**\n\n{len(finished)} trials on {record.device}"
    note += f", target {format_bytes(target)}" if target else ""
    note += f"\n\n{sure}" if sure else ""
    api.set_tag(run_id, "mlflow.note.content", note)
    api.set_tag(run_id, "autofit.winner", "" if best is None else str(best.number))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "summary.md").write_text(note + "\n")
        content = {"study": study_name, "why": sentence, "winner": None if best is None else best.number,
                   "front": [t.number for t in pareto_front(trials)],
                   "confirmation": confirmation_json(trials, rule)}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
        front_figure(trials, pareto_front(trials), baseline(trials), target).savefig(folder / "front.png", dpi=110)
        for path in sorted(folder.iterdir()):
            api.log_artifact(run_id, str(path))
    api.set_tag(run_id, "autofit.trials", str(len(finished)))
    api.set_tag(run_id, "autofit.confirmations", str(confirmed))
    api.set_terminated(run_id)


# -- the follower -----------------------------------------------------------------------------------------------------


def follow(folder: Path, study_name: str) -> None:
    """Mirror the study every 2 s until standard input closes, then once more."""
    os.nice(19)  # gives way to the probe, which is being timed
    mlflow.set_tracking_uri(tracking_uri(folder))
    study, ended = None, False
    mirrored: set[tuple[object, ...]] = set()
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], _FOLLOW_S)[0])
        try:
            study = study or load_study(folder, study_name)
            if ended:  # mirror every trial again, as MLflow's runs may have changed meanwhile
                mirrored.clear()
            with database_errors(database_path(folder)), tracking_errors(folder):
                _sync(folder, study, mirrored)
        except (AutofitError, OSError) as error:
            print(f"MLflow: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2])
