"""MLflow's experiment of a study and the runs in it: how they are named, opened and found."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # reports an unreachable server within seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import alembic.util
import sqlalchemy.exc
from mlflow.entities import Experiment, Run, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from autofit.errors import EnvironmentFault
from autofit.recipe.secrets import without_secrets
from autofit.tracking.database import make_whole, tracking_uri

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
    """Ids of the runs that mirror the trials `numbers`, without those that have no run yet."""
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
