"""The study in Optuna: the only record of a search. Errors of its database, and damage, are one clear line."""

import contextlib
import copy
import functools
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import optuna
import sqlalchemy.exc
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage, _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from autofit.errors import AutofitError, ConfigError, EnvironmentFault, one_line, option
from autofit.files import cannot_write
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.tuning.frontier import Foreseen, Trial
from autofit.tuning.locks import exclusive, holder_of, is_there, put_in_place, wait_until_free, warn_of_a_network
from autofit.tuning.record import comparisons, confirmations, is_own, record_of, repeats, sealed_file
from autofit.tuning.storage import (
    CALLS,
    Database,
    cause_of,
    check_is_of,
    check_there,
    database_of,
    keep_storage,
    no_study,
)


class SoleWriter(_CachedStorage):
    """The cache that Optuna puts before a database; within `alone` it reads only data written through it.

    Optuna reads each unfinished trial anew at each look, and a search with N probes in flight looks several times a
    trial: what this process, the only writer, did not write since its last look is not read again.
    A write is noted before it is tried: one that failed, or that was interrupted, is read again too.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._alone = False
        self._written: dict[int, set[int]] = {}  # study read since `alone` began -> trials written since they were read
        self._attributes: dict[int, dict[str, Any]] = {}  # study -> its user attributes
        self._ordered: dict[int, list[FrozenTrial]] = {}  # study -> its trials by number, as far as they were read

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one that writes trials and attributes of a study, which its lock must ensure."""
        self._forget()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._forget()

    def _forget(self) -> None:
        self._written.clear()
        self._attributes.clear()
        self._ordered.clear()

    # -- reading ----------------------------------------------------------------------------------------------------

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """The study's attributes; within `alone` one object for all callers, which must leave it unchanged."""
        if not self._alone:
            return super().get_study_user_attrs(study_id)
        if study_id not in self._attributes:
            self._attributes[study_id] = super().get_study_user_attrs(study_id)
        return self._attributes[study_id]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if deepcopy or not self._alone:
            return super().get_all_trials(study_id, deepcopy, states)
        self._read_trials_from_remote_storage(study_id)
        ordered = self._ordered.setdefault(study_id, [])
        trials = self._studies[study_id].trials
        ordered += [trials[number] for number in range(len(ordered), len(trials))]
        return list(ordered) if states is None else [trial for trial in ordered if trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        place = self._trial_id_to_study_id_and_number.get(trial_id)
        if not self._alone or place is None:
            return super().get_trial(trial_id)
        study_id, number = place
        self._read_trials_from_remote_storage(study_id)
        trial = self._studies[study_id].trials[number]
        return trial if trial.state.is_finished() else copy.deepcopy(trial)  # Optuna's Trial changes its own

    def _add_trials_to_cache(self, study_id: int, trials: list[FrozenTrial]) -> None:
        super()._add_trials_to_cache(study_id, trials)
        ordered = self._ordered.get(study_id, [])
        for trial in trials:
            if trial.number < len(ordered):
                ordered[trial.number] = trial

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        written = self._written.get(study_id)
        if written is not None:
            if not written:
                return
            trials = self._studies[study_id].trials
            newest = trials[max(trials)]._trial_id if trials else -1
            found = self._backend._get_trials(study_id, None, written, newest)
            with self._lock:
                self._add_trials_to_cache(study_id, found)
            if len(trials) == 1 + max(trials, default=-1):
                written.clear()
                return  # else a trial was made twice, for the first answer was lost: it is older than the newest
        super()._read_trials_from_remote_storage(study_id)
        if self._alone:
            self._written[study_id] = set()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _note(self, trial_id: int) -> None:
        place = self._trial_id_to_study_id_and_number.get(trial_id)
        if place is not None and place[0] in self._written:
            self._written[place[0]].add(trial_id)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        written = self._written.get(study_id)
        if written is None:
            return super().create_new_trial(study_id, template_trial)
        written.add(-1)  # a trial whose number is not known yet
        made = super().create_new_trial(study_id, template_trial)
        if len(self._studies[study_id].trials) == 1 + self._trial_id_to_study_id_and_number[made][1]:
            written.discard(-1)  # else one before it was made, whose answer was lost
        return made

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._note(trial_id)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        self._note(trial_id)
        return super().set_trial_state_values(trial_id, state, values)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._note(trial_id)
        super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._note(trial_id)
        super().set_trial_system_attr(trial_id, key, value)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._note(trial_id)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._attributes.pop(study_id, None)
        super().set_study_user_attr(study_id, key, value)


# Of JSON, text, an enumeration or a structure that differs from the written one.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError)
T = TypeVar("T")


@contextlib.contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the database of the studies in `folder` into one clear EnvironmentFault."""
    try:
        yield
    except (sqlalchemy.exc.DBAPIError, StorageInternalError) as error:
        database, at_fault = database_of(folder), cause_of(error)
        if database.url is None:
            advice = _advice(at_fault, database.path)
        else:
            from autofit.tuning.postgres import postgres_advice

            advice = postgres_advice(at_fault, database)
        reason = str(at_fault).strip().partition("\n")[0]
        raise EnvironmentFault(f"{database} cannot be used as a database: {reason}; {advice}") from error
    except OSError as error:
        raise cannot_write(database_of(folder).path, error) from error


def _advice(error: BaseException | None, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # its upper bytes are details
    if code == sqlite3.SQLITE_FULL:
        return "free some space and run the same command again: no finished trial is lost"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"{holder_of(path)} has locked it: run the same command again once that has ended; no trial is lost"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return f"make the file writable or choose another folder with {option('dir')}"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_OK):  # OK: a text that is not UTF-8
        return f"move the file away, or choose another folder with {option('dir')}"
    if code == sqlite3.SQLITE_IOERR:
        return (
            f"the disk failed, or a quota is used up (see `quota`, `df {path.parent}`): mend that and run the same "
            f"command again; the file is left as it is"
        )
    return f"run the same command again, or choose another folder with {option('dir')}; the file is left as it is"


def _told(call: Callable[..., T], folder: Path, *, reads: bool) -> Callable[..., T]:
    """A call of the database that raises its errors, and where it `reads` damage, as one clear EnvironmentFault."""

    @functools.wraps(call)
    def told(*args: object, **kwargs: object) -> T:
        with database_errors(folder):
            try:
                return call(*args, **kwargs)
            except _DAMAGED as error:
                if not reads or isinstance(error, AutofitError):
                    raise
                raise damage(folder, error) from error

    return told


def damage(folder: Path, error: Exception) -> EnvironmentFault:
    """The error of a database with corrupted content."""
    database = database_of(folder)
    fix = f"move the file away, or choose another folder with {option('dir')}"
    if database.url is not None:
        fix = f"restore it, or choose another database with {option('storage')}"
    return EnvironmentFault(
        f"{database} is damaged: what it holds cannot be read ({type(error).__name__}: {one_line(str(error), 80)}); "
        f"{fix}"
    )


logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # a traceback of what Ctrl-C or a lost server closed
optuna.logging.set_verbosity(optuna.logging.ERROR)

FOR_FRONT = "for_front"  # attribute of a trial that was probed only for its place on the front
_BUSY_S = 60.0  # longest wait for another process that writes
_LOCK_S = 120.0  # longest wait for another process that makes the database, which takes a second


def open_storage(folder: Path, *, create: bool = False) -> RDBStorage:
    """The database of the studies in `folder`. Raises EnvironmentFault if it is unusable."""
    database = database_of(folder)
    with database_errors(folder):
        if create:
            check_is_of(database)
        try:
            storage = (_own if database.url is None else _shared)(database, create=create)
        except UnicodeDecodeError as error:  # in the names of tables, which SQLite shows as they are
            raise damage(folder, error) from error
        for name in CALLS:
            reads = name.lstrip("_").startswith("get")
            setattr(storage, name, _told(getattr(storage, name), folder, reads=reads))
        _check_version(database, storage)
        if create:
            keep_storage(database)
        return storage


def _shared(database: Database, *, create: bool) -> RDBStorage:
    from autofit.tuning.postgres import keep_locks, open_postgres

    storage = open_postgres(database, create=create)
    sqlalchemy.event.listen(storage.engine, "connect", keep_locks)
    return storage


def _own(database: Database, *, create: bool) -> RDBStorage:
    """The SQLite file of `database`."""
    folder, path = database.folder, database.path
    if not create:
        check_there(database)
    if create:
        warn_of_a_network(path)
    if create and not is_there(path):
        with exclusive(folder / "locks", "studies-database", wait_s=_LOCK_S):
            if not is_there(path):
                put_in_place(path, _make)
    wait_until_free(path, most_s=_BUSY_S)
    return _storage(path)


def _storage(path: Path) -> RDBStorage:
    return RDBStorage(
        f"sqlite:///{path.resolve()}", engine_kwargs={"connect_args": {"timeout": _BUSY_S}},
        skip_compatibility_check=True,  # Optuna's own check raises a plain RuntimeError; _check_version replaces it
    )  # fmt: skip


def _make(path: Path) -> None:
    """All tables of Optuna in the new file `path`."""
    _storage(path).engine.dispose()


def _check_version(database: Database, storage: RDBStorage) -> None:
    """Raise EnvironmentFault if the tables are of another version of Optuna."""
    version = storage.get_current_version()
    if version == storage.get_head_version():
        return
    older = version in storage.get_all_versions()
    url = f"sqlite:///{database.path.resolve()}" if database.url is None else str(database)
    fix = f"run `optuna storage upgrade --storage {url}`" if older else "update it: pip install -U optuna"
    raise EnvironmentFault(
        f"{database} was written by another version of Optuna: its tables have version {version}, but Optuna "
        f"{optuna.__version__} needs {storage.get_head_version()}; {fix}, or choose another folder with {option('dir')}"
    )


@contextlib.contextmanager
def driving(folder: Path, name: str) -> Iterator[None]:
    """Be the only process that works on the study `name`: of this folder, and of a shared database on all machines.

    Raises ConfigError if another one does, with its user, machine and process id where the database is shared.
    """
    with contextlib.ExitStack() as stack:
        database = database_of(folder)
        if database.url is not None:
            from autofit.tuning.postgres import sole_driver

            with database_errors(folder):
                stack.enter_context(sole_driver(database, name))
        stack.enter_context(exclusive(folder / "locks", name))
        yield


def study_names(storage: RDBStorage) -> list[str]:
    """Names of all studies, last used at the end. Optuna's summaries would read every trial of every study."""
    return [s.study_name for s in sorted(storage.get_all_studies(), key=lambda s: record_of(s).used)]


def own_studies(folder: Path) -> list[optuna.Study]:
    """The studies in `folder` that autofit made, last used at the end. Raises ConfigError if there is no database."""
    storage = open_storage(folder)
    found = [optuna.load_study(study_name=name, storage=storage) for name in study_names(storage)]
    return [study for study in found if is_own(study)]


def load_study(folder: Path, name: str | None) -> optuna.Study:
    """The study `name` in `folder`, or the last used one. Raises ConfigError if it is missing, or another program's."""
    storage = open_storage(folder)
    names, database = study_names(storage), database_of(folder)
    if not names:
        raise ConfigError(f"there are no studies in {database.home}; run `autofit search` first")
    if name is not None and name not in names:
        raise no_study(name, names, database)
    study = optuna.load_study(study_name=name or names[-1], storage=storage)
    if not is_own(study):  # the last used one is another program's only where all are
        raise ConfigError(
            f"the study {study.study_name!r} in {database.home} was not made by autofit; run `autofit search` first, "
            f"or point {option('dir')} at its folder"
        )
    _seal(study)
    if database.url is None:
        _follow_move(study, folder.resolve())
    return study


_OF_A_RUN = re.compile(r".*/(promoted/[^/]+/.+)", re.DOTALL)  # an earlier stage's model, in a later one's recipe


def _follow_move(study: optuna.Study, folder: Path) -> None:
    """Name what runs in `folder` trained where it is now, in the recipe of a study whose folder was moved."""

    def now(value: object) -> object:
        if isinstance(value, Mapping):
            return {key: now(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [now(inner) for inner in value]
        found = _OF_A_RUN.fullmatch(value) if isinstance(value, str) else None
        if found is None or os.path.exists(found[0]) or not os.path.exists(folder / found[1]):
            return value
        return str(folder / found[1])

    kept = study.user_attrs
    with contextlib.suppress(optuna.exceptions.StorageInternalError):
        for name in ("values", "resolved"):
            if (moved := now(kept.get(name, {}))) != kept.get(name, {}):
                study.set_user_attr(name, moved)


def _seal(study: optuna.Study) -> None:
    """Take the secrets out of another tool's file, which an earlier autofit kept with them, where it can be written."""
    origin = record_of(study).foreign
    if (kept := sealed_file(origin)) != origin:
        with contextlib.suppress(optuna.exceptions.StorageInternalError):
            study.set_user_attr("foreign", kept)


def to_trial(frozen: FrozenTrial) -> Trial:
    """Optuna's trial as a plain value."""
    attrs = frozen.user_attrs
    result = attrs.get("result")
    return Trial(
        number=frozen.number, tier=cast(Tier, attrs.get("tier", "neutral")), changes=attrs.get("changes", {}),
        params=frozen.params, yaml_changes=attrs.get("yaml_changes", {}), needs=tuple(attrs.get("needs", ())),
        result=None if result is None or not frozen.state.is_finished() else ProbeResult.from_json(result),
    )  # fmt: skip


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
    needs: Sequence[str] = (), for_front: bool = False,
) -> None:  # fmt: skip
    """Store the candidate's tier and changes with a new trial, and the packages that it needs.

    `for_front`: it is probed only for its place on the front.
    """
    stored = _stored(tier=tier, changes=changes, yaml_changes=yaml_changes, needs=needs, for_front=for_front)
    for name, value in stored.items():
        trial.set_user_attr(name, value)


def _stored(
    *, tier: Tier, changes: Mapping[str, object], yaml_changes: Mapping[str, object], needs: Sequence[str],
    for_front: bool,
) -> dict[str, object]:  # fmt: skip
    about: dict[str, object] = {"tier": tier, "changes": dict(changes), "yaml_changes": dict(yaml_changes)}
    return about | {"needs": list(needs), **({FOR_FRONT: True} if for_front else {})}


def begin_foreseen(study: optuna.Study, point: Foreseen) -> Trial:
    """A running trial of the predicted `point`: a new one, or that of an earlier command that was killed."""
    frozen = study.get_trials(deepcopy=False)
    begun = next((t for t in frozen if not t.state.is_finished() and t.params == point.params), None)
    if begun is not None:
        return to_trial(begun)
    about = _stored(
        tier=point.tier, changes=point.changes, yaml_changes=point.yaml_changes, needs=point.needs, for_front=True
    )
    study.add_trial(
        optuna.trial.create_trial(
            state=TrialState.RUNNING, params=dict(point.params), distributions=frozen[0].distributions, user_attrs=about
        )
    )
    return to_trial(study.get_trials(deepcopy=False)[-1])


def tell(study: optuna.Study, number: int, result: ProbeResult, *, target_bytes: int | None) -> None:
    """Tell Optuna the result of trial `number`; `target_bytes` is the target less the headroom.

    An OOM is told as a complete but infeasible trial, graded by the bytes over the target: samplers ignore FAIL.
    """
    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.trial.Trial(study, frozen._trial_id)
    trial.set_user_attr("result", replace(result, course={}).to_json())  # a picture's numbers are more than all others
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
    """Seconds imputed to a trial that failed to complete a step: the slowest measured step, or 1.0 by default."""
    values = [t.values[0] for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.values]
    return max(values, default=1.0)


def requeue(study: optuna.Study, frozen: FrozenTrial) -> None:
    """Put a RUNNING trial that lost its probe back in the queue, so that the same trial is probed again."""
    study._storage.set_trial_state_values(frozen._trial_id, TrialState.WAITING)
