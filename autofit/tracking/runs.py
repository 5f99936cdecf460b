"""MLflow's experiment of a study and the runs in it: how they are named, opened and found."""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # reports an unreachable server within seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import alembic.util
import sqlalchemy.exc
from mlflow.entities import Experiment, Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlParam, SqlRun, SqlTag
from mlflow.tracking import MlflowClient

from autofit.errors import EnvironmentFault
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.recipe import own_names
from autofit.recipe.secrets import masked, without_secrets
from autofit.space.traits import describe_changes
from autofit.tracking.database import make_whole, tracking_uri
from autofit.tuning.frontier import SPEED, Trial
from autofit.tuning.record import StudyRecord
from autofit.tuning.sentences import confirmation_note

logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it shows a traceback of what it also raises
STUDY, TRIAL, STATUS, KIND = "autofit.study", "autofit.trial", "autofit.status", "autofit.kind"
ENDED, CONFIRMED, TIER = "autofit.ended", "autofit.confirmation", "autofit.tier"
ROLE = "autofit.role"  # winner, baseline, front or full run: the runs to compare
PROMISE = "autofit.promise"  # of a full run: kept, broken or not compared
COLOR = "mlflow.runColor"  # of a run in all charts; MLflow draws it from the run's id where there is none
_COLORS = {"winner": "#00a972", "winner and baseline": "#00a972", "baseline": "#ff9e1b", "full run": "#8b5cf6"}
_EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}  # not a GenAI app: its page is the runs table


def client(folder: Path) -> MlflowClient:
    """MLflow's client of the studies' folder; makes MLflow's database first if it is missing or broken."""
    make_whole(folder)
    return MlflowClient(tracking_uri(folder))


def experiment_id(api: MlflowClient, folder: Path, study_name: str) -> str:
    """The id of the study's experiment, made if missing. Artifacts lie beside the studies, or on MLflow's server."""
    found = api.get_experiment_by_name(study_name)
    if found is not None:
        return _reopened(api, found)
    local = tracking_uri(folder).startswith("sqlite:")
    location = (folder / "mlartifacts" / study_name).resolve().as_uri() if local else None
    tags = {STUDY: study_name, **_EXPERIMENT_KIND}
    try:
        return str(api.create_experiment(study_name, artifact_location=location, tags=tags))
    except MlflowException:
        found = api.get_experiment_by_name(study_name)  # another process made it a moment ago
        if found is None:
            raise
        return str(found.experiment_id)


def _reopened(api: MlflowClient, found: Experiment) -> str:
    if found.lifecycle_stage == "deleted":
        api.restore_experiment(found.experiment_id)
    for key, value in _EXPERIMENT_KIND.items():
        if key not in found.tags:
            api.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)


def role_tags(role: str) -> dict[str, str]:
    """The tags of a run with this role: the winner is green in every study, the baseline orange."""
    return {ROLE: role} | ({COLOR: _COLORS[role]} if role in _COLORS else {})


@contextlib.contextmanager
def tracking_errors(folder: Path) -> Iterator[None]:
    """Turn errors of MLflow and its database into one EnvironmentFault."""
    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, alembic.util.CommandError) as error:
        of_database = getattr(error, "orig", None) or getattr(error.__cause__, "orig", None)  # without the statement
        reason = " ".join(str(of_database or error).split())[:200]
        raise EnvironmentFault(
            f"MLflow at {without_secrets(tracking_uri(folder))} cannot be used: {without_secrets(reason)}; the studies "
            f"are unharmed: repair or move MLflow's database, then run `autofit sync` to rebuild it"
        ) from error


def trial_run_ids(api: MlflowClient, folder: Path, study_name: str, numbers: Sequence[int]) -> list[str]:
    """Ids of the runs that mirror the trials `numbers`, as far as they exist."""
    runs = runs_of(api, experiment_id(api, folder, study_name), numbers)
    return [str(runs[str(number)].info.run_id) for number in numbers if str(number) in runs]


def runs_of(api: MlflowClient, experiment: str, numbers: Sequence[int] | None = None) -> dict[str, Run]:
    """{trial number: its run} for all trials, or for `numbers`, and the study's own run under "summary"."""
    if numbers is None:
        return _by_trial(search(api, experiment, f"tags.`{KIND}` != 'promoted'"))
    found = _by_trial(search(api, experiment, f"tags.`{KIND}` = 'study'"))
    for number in numbers:
        found |= _by_trial(search(api, experiment, f"tags.`{KIND}` != 'promoted' AND tags.`{TRIAL}` = '{number}'"))
    return found


def _by_trial(runs: Sequence[Run]) -> dict[str, Run]:
    return {run.data.tags.get(TRIAL, "summary"): run for run in runs}


def search(api: MlflowClient, experiment: str, where: str) -> list[Run]:
    """The active runs that MLflow's filter `where` matches."""
    found: list[Run] = []
    token = None
    while True:
        page = api.search_runs(
            [experiment], filter_string=where, run_view_type=ViewType.ACTIVE_ONLY, max_results=1000, page_token=token
        )
        found += page
        token = page.token
        if not token:
            return found


# -- the run of a trial: its params, metrics and tags -----------------------------------------------------------------

_RUN_TABLES = (SqlRun, SqlTag, SqlParam, SqlMetric, SqlLatestMetric)  # a run before what refers to it
_AT_ONCE = 200  # runs of one transaction: others wait for the file meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run as MLflow shows it."""

    name: str
    status: str
    began_ms: int
    ended_ms: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


def put_runs(api: Any, experiment: str, runs: Sequence[FinishedRun]) -> None:
    """Put `runs`, which are new, into the experiment of a database that this machine has as a file: at once.

    Through MLflow's client each takes four commits, 70 ms.
    """
    place = api.get_experiment(experiment).artifact_location
    engine = api._tracking_client.store.engine
    for start in range(0, len(runs), _AT_ONCE):
        rows: dict[Any, list[dict[str, object]]] = {table: [] for table in _RUN_TABLES}
        for run in runs[start : start + _AT_ONCE]:
            _add(rows, run, int(experiment), str(place))
        with engine.begin() as connection:
            for table, found in rows.items():
                if found:
                    connection.execute(table.__table__.insert(), found)


def _add(rows: dict[Any, list[dict[str, object]]], run: FinishedRun, experiment: int, place: str) -> None:
    own: dict[str, object] = {"run_uuid": uuid.uuid4().hex}
    rows[SqlRun].append(own | {
        "name": run.name, "experiment_id": experiment, "status": run.status, "start_time": run.began_ms,
        "end_time": run.ended_ms, "lifecycle_stage": "active", "user_id": "unknown", "source_type": "UNKNOWN",
        "source_name": "", "entry_point_name": "", "source_version": "",
        "artifact_uri": f"{place}/{own['run_uuid']}/artifacts",
    })  # fmt: skip
    tags = {"mlflow.runName": run.name, **run.tags}
    rows[SqlTag] += [own | {"key": key, "value": value[:8000]} for key, value in tags.items()]
    rows[SqlParam] += [own | {"key": key, "value": value} for key, value in run.params.items()]
    metrics = [
        own | {"key": key, "value": value, "timestamp": run.ended_ms, "step": 0, "is_nan": False}
        for key, value in run.metrics.items()
    ]
    rows[SqlMetric] += metrics
    rows[SqlLatestMetric] += metrics


_RUN_STATUS = {ProbeStatus.FIT: "FINISHED", ProbeStatus.OOM: "FAILED", ProbeStatus.FAILED: "FAILED",
               ProbeStatus.LOST: "KILLED"}  # fmt: skip


def mirror_trial(
    api: Any, experiment: str, study_name: str, record: StudyRecord, trial: Trial, run: Run | None,
    ended: datetime | None, base: Trial | None,
) -> Run:  # fmt: skip
    """The run of a finished trial, in MLflow; `run` is the one that was begun before. `base` is the baseline."""
    made = finished_run(study_name, record, trial, ended, base)
    if run is None:
        run = api.create_run(experiment, start_time=made.began_ms, tags=dict(made.tags), run_name=made.name)
    metrics = [Metric(key, value, made.ended_ms, 0) for key, value in made.metrics.items()]
    log_params(api, run.info.run_id, trial_params(trial, record.resolved))
    api.log_batch(run.info.run_id, metrics=metrics, tags=[RunTag(k, v) for k, v in made.tags.items()])
    api.set_terminated(run.info.run_id, status=made.status, end_time=made.ended_ms)
    return run


def finished_run(
    study_name: str, record: StudyRecord, trial: Trial, ended: datetime | None, base: Trial | None
) -> FinishedRun:
    """MLflow's view of a finished trial, before its confirmation. `base` is the baseline."""
    result = trial.result
    assert result is not None
    at_ms = int(ended.timestamp() * 1000) if ended is not None else 0
    return FinishedRun(
        name=f"trial-{trial.number:04d}", status=_RUN_STATUS[result.status],
        began_ms=at_ms - int(1000 * (result.wall_s or 0)), ended_ms=at_ms,
        params=_params(trial_params(trial, record.resolved)),
        metrics=with_gb(_metrics(result) | _compared(trial, base, record)),
        tags=_tags(study_name, trial, result, record) | {ENDED: str(ended)},
    )  # fmt: skip


def _tags(study_name: str, trial: Trial, result: ProbeResult, record: StudyRecord) -> dict[str, str]:
    changes = describe_changes(trial.changes, record.resolved, own_names(record.foreign))
    return {
        STUDY: study_name, TRIAL: str(trial.number), STATUS: str(result.status), KIND: "trial", TIER: trial.tier,
        "autofit.device": result.device, "autofit.changes": changes,
        "autofit.shown_as": "pruned" if result.status is ProbeStatus.OOM else str(result.status),
        "mlflow.note.content": result.reason or changes,
    }  # fmt: skip


def log_params(api: Any, run_id: str, values: Mapping[str, object]) -> None:
    """Log `values`, less secrets, in the batches that MLflow takes. Logged again, they must be the same."""
    params = [Param(key, value) for key, value in _params(values).items()]
    for start in range(0, len(params), 90):
        api.log_batch(run_id, params=params[start : start + 90])


def _params(values: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value)[:6000] for key, value in masked(values).items()}


def with_launch(values: Mapping[str, object]) -> dict[str, object]:
    """`values` with the launch as parameters of its own, under the names of its knobs: launch.ranks and so on."""
    launch = values.get(LAUNCH)
    if not isinstance(launch, Mapping):
        return dict(values)
    own = {f"{LAUNCH}.{key}": value for key, value in launch.items()}
    return {**own, **{key: value for key, value in values.items() if key != LAUNCH}}


def trial_params(trial: Trial, resolved: Mapping[str, object]) -> dict[str, object]:
    """Every knob's value, including derived ones, so that MLflow's parallel coordinates show all differences."""
    names = {**{k: v for k, v in trial.params.items() if not k.startswith("env.")}, **trial.changes}
    always = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    base = {key: resolved.get(key) for key in (*always, LAUNCH) if key in resolved}
    return {**with_launch(base), **names, "tier": trial.tier}


def with_gb(figures: Mapping[str, float]) -> dict[str, float]:
    """`figures`, and beside each `x_bytes` an `x_GB` of 10^9 bytes: MLflow's pages print plain numbers."""
    return {
        **figures,
        **{key.replace("_bytes", "_GB", 1): value / 1e9 for key, value in figures.items() if "_bytes" in key},
    }


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


def _compared(trial: Trial, base: Trial | None, record: StudyRecord) -> dict[str, float]:
    """The speed-up over the baseline in the probes of the search, and the limit of the memory."""
    speedup = trial.before_confirmation.speedup(base and base.before_confirmation) if trial.fits else None
    found = {"speedup": speedup and round(speedup, 3), "limit_bytes": record.limit_bytes}
    return {key: float(value) for key, value in found.items() if value is not None}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# -- confirmations ----------------------------------------------------------------------------------------------------


def how_confirmed(trial: Trial) -> str | None:
    """The result of a trial's confirmation in words, once it has one."""
    result = trial.confirmed
    if result is None:
        return None
    if result.status is not ProbeStatus.FIT:
        return f"{result.status}: {result.reason}"
    return confirmation_note([trial], SPEED)


def mirror_confirmation(api: Any, run_id: str, trial: Trial, sure: str) -> None:
    """Log the confirmation of a finalist as `confirmed_` metrics and a tag of its trial's run.

    The baseline's is logged anew after each finalist that it was compared with, so the time is that of the logging.
    """
    assert trial.confirmed is not None
    found = {key: value for key, value in _metrics(trial.confirmed).items() if "." not in key}
    if trial.comparison is not None:
        found |= {key: getattr(trial.comparison, key) for key in ("speedup", "low", "high")}
    at_ms = int(1000 * time.time())
    metrics = [Metric(f"confirmed_{key}", value, at_ms, 0) for key, value in with_gb(found).items()]
    api.log_batch(run_id, metrics=metrics, tags=[RunTag(CONFIRMED, sure)])
