"""The study in Optuna: the only record of a search. Everything else is rebuilt from it."""

import contextlib
import fcntl
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import optuna
import sqlalchemy.exc
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import ConfigError, EnvironmentFault, nearest
from autofit.files import cannot_write
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.tuning.born_whole import is_there, put_in_place
from autofit.tuning.frontier import Trial
from autofit.tuning.lock_holder import holder_of, wait_until_free
from autofit.tuning.record import comparisons, confirmations, is_own, record_of, repeats

logging.getLogger("alembic").setLevel(logging.WARNING)
optuna.logging.set_verbosity(optuna.logging.ERROR)

_BUSY_S = 60.0  # longest wait for another process that writes
_LOCK_S = 120.0  # longest wait for another process that makes the database, which takes a second


def database_path(folder: Path) -> Path:
    return folder / "studies.db"


def open_storage(folder: Path, *, create: bool = False) -> RDBStorage:
    """The SQLite database of the studies in `folder`. Raises EnvironmentFault if it cannot be used."""
    path = database_path(folder)
    if not create and not path.exists():
        raise ConfigError(f"there are no studies in {folder}; run `autofit search` first, or point --dir at its folder")
    with database_errors(path):
        if create and not is_there(path):
            with exclusive(folder / "locks", "studies-database", wait_s=_LOCK_S):
                if not is_there(path):
                    put_in_place(path, _make)
        wait_until_free(path, most_s=_BUSY_S)
        storage = _storage(path)
        _check_version(path, storage)
        return storage


def _storage(path: Path) -> RDBStorage:
    return RDBStorage(
        f"sqlite:///{path.resolve()}", engine_kwargs={"connect_args": {"timeout": _BUSY_S}},
        skip_compatibility_check=True,  # Optuna's own check raises a plain RuntimeError; _check_version replaces it
    )  # fmt: skip


def _make(path: Path) -> None:
    """All tables of Optuna in the new file `path`."""
    _storage(path).engine.dispose()


def _check_version(path: Path, storage: RDBStorage) -> None:
    """Raise EnvironmentFault if this Optuna cannot read the tables."""
    version = storage.get_current_version()
    if version == storage.get_head_version():
        return
    older = version in storage.get_all_versions()
    fix = f"run `optuna storage upgrade --storage {storage.url}`" if older else "update it: pip install -U optuna"
    raise EnvironmentFault(
        f"{path} was written by another version of Optuna: its tables have version {version}, but Optuna "
        f"{optuna.__version__} needs {storage.get_head_version()}; {fix}, or choose another folder with --dir"
    )


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turn errors of the database into one clear EnvironmentFault."""
    try:
        yield
    except (sqlalchemy.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
        cause = error if isinstance(error, sqlalchemy.exc.DBAPIError) else error.__cause__ or error
        at_fault = cause.orig if isinstance(cause, sqlalchemy.exc.DBAPIError) else cause
        raise EnvironmentFault(f"{path} cannot be used as a database: {at_fault}; {_advice(at_fault, path)}") from error
    except OSError as error:
        raise EnvironmentFault(cannot_write(path, error)) from error


def _advice(error: BaseException | None, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # its upper bytes are details
    if code == sqlite3.SQLITE_FULL:
        return "free some space and run the same command again: no finished trial is lost"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{holder_of(path)} has locked it: run the same command again once that has ended; no trial is lost"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return "make the file writable or choose another folder with --dir"
    return "move the file away, or choose another folder with --dir"


@contextlib.contextmanager
def exclusive(folder: Path, name: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock `name`, waiting up to `wait_s`: one process drives a study. The lock ends with the process.

    Raises ConfigError if another process holds it for all of that time.
    """
    path = folder / f"{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise EnvironmentFault(cannot_write(path, error)) from error
    with file:
        deadline = time.monotonic() + wait_s
        while not _locked(file):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"another autofit process is working on {name}; wait until it ends, or choose another study "
                    f"with --study"
                )
            time.sleep(0.1)
        yield


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def study_names(storage: RDBStorage) -> list[str]:
    """Names of all studies, last used at the end. Not from Optuna's summaries: they read every trial of every study."""
    with database_errors(Path(storage.engine.url.database or "")):
        studies = storage.get_all_studies()
    return [s.study_name for s in sorted(studies, key=lambda s: record_of(s).used)]


def own_studies(folder: Path) -> list[optuna.Study]:
    """The studies in `folder` that autofit made, last used at the end. Raises ConfigError without a database."""
    storage = open_storage(folder)
    names = study_names(storage)
    with database_errors(database_path(folder)):
        found = [optuna.load_study(study_name=name, storage=storage) for name in names]
        return [study for study in found if is_own(study)]


def load_study(folder: Path, name: str | None) -> optuna.Study:
    """The study `name` in `folder`, or the last used one. Raises ConfigError if there is none, or not of autofit."""
    storage = open_storage(folder)
    names = study_names(storage)
    if not names:
        raise ConfigError(f"there are no studies in {folder}; run `autofit search` first")
    if name is not None and name not in names:
        known = ", ".join(names)
        raise ConfigError(f"there is no study {name!r} in {folder}{nearest(name, names)}; there are: {known}")
    with database_errors(database_path(folder)):
        study = optuna.load_study(study_name=name or names[-1], storage=storage)
        if not is_own(study):  # the last used one is another program's only where all are
            raise ConfigError(
                f"the study {study.study_name!r} in {folder} was not made by autofit; run `autofit search` first, or "
                f"point --dir at its folder"
            )
        return study


def to_trial(frozen: FrozenTrial) -> Trial:
    """Optuna's trial as a plain value."""
    attrs = frozen.user_attrs
    result = attrs.get("result")
    return Trial(
        number=frozen.number,
        tier=cast(Tier, attrs.get("tier", "neutral")),
        changes=attrs.get("changes", {}),
        params=frozen.params,
        yaml_changes=attrs.get("yaml_changes", {}),
        needs=tuple(attrs.get("needs", ())),
        result=None if result is None or not frozen.state.is_finished() else ProbeResult.from_json(result),
    )


def trials_of(study: optuna.Study) -> list[Trial]:
    """All trials of `study` in order, as plain values, with the confirmations of its finalists."""
    return with_confirmations(study, study.get_trials(deepcopy=False))


def with_confirmations(study: optuna.Study, frozen: list[FrozenTrial]) -> list[Trial]:
    """`frozen`, trials of `study`, as plain values with their repeats and confirmations, like `trials_of`."""
    numbers = [t.number for t in frozen]
    confirmed, compared, again = confirmations(study, numbers), comparisons(study, numbers), repeats(study)
    return [
        replace(to_trial(t).repeated(again.get(t.number)), confirmed=confirmed.get(t.number),
                comparison=compared.get(t.number))
        for t in frozen
    ]  # fmt: skip


def note_candidate(
    trial: optuna.trial.Trial, *, tier: Tier, changes: Mapping[str, object], yaml_changes: Mapping[str, object],
    needs: Sequence[str] = (),
) -> None:  # fmt: skip
    """Store the candidate's tier and changes with a new trial, and the packages that it needs."""
    stored = {"tier": tier, "changes": dict(changes), "yaml_changes": dict(yaml_changes), "needs": list(needs)}
    for name, value in stored.items():
        trial.set_user_attr(name, value)


def tell(study: optuna.Study, number: int, result: ProbeResult, *, target_bytes: int | None) -> None:
    """Tell Optuna the result of trial `number`; `target_bytes` is the target less the headroom.

    An OOM is told as a complete but infeasible trial, graded by the bytes over the target: samplers ignore FAIL.
    """
    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.trial.Trial(study, frozen._trial_id)
    trial.set_user_attr("result", result.to_json())
    trial.set_user_attr("status", str(result.status))
    if result.status in (ProbeStatus.FAILED, ProbeStatus.LOST):
        study.tell(number, state=TrialState.FAIL)
        return
    used = result.device_used_bytes
    if result.status is ProbeStatus.FIT:
        assert used is not None
        assert result.median_step_s is not None
        _constrain(trial, frozen, used - target_bytes if target_bytes is not None else 0)
        study.tell(number, [result.median_step_s, float(used)])
        return
    trial.set_user_attr("shown_as", "pruned")
    limit = target_bytes if target_bytes is not None else result.limit_bytes or 0
    held = max(used or 0, limit + 1)
    _constrain(trial, frozen, held - limit)
    study.tell(number, [_slowest_step_s(study), float(held)])


def _constrain(trial: optuna.trial.Trial, frozen: FrozenTrial, over_bytes: int) -> None:
    """Set the trial's constraint to its bytes over the target, once: a killed run may have set it already."""
    if not frozen.constraints:
        trial.set_constraint("bytes_over_target", float(over_bytes))


def _slowest_step_s(study: optuna.Study) -> float:
    """Seconds imputed to a trial that never completed a step: the slowest measured step, or 1.0 without any."""
    values = [t.values[0] for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.values]
    return max(values, default=1.0)


def requeue(study: optuna.Study, frozen: FrozenTrial) -> None:
    """Put a RUNNING trial without a probe back in the queue, so that the same trial is probed again."""
    study._storage.set_trial_state_values(frozen._trial_id, TrialState.WAITING)
