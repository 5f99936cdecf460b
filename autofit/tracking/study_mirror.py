"""MLflow's mirrors: of a study, one top-level run per trial, and of a promoted run. Both can be made again at any time.

Optuna holds the truth of a study, the run's folder that of a promoted run: a kill of a mirror, a resume that repeated
steps or the loss of MLflow's database is mended.

`python -m autofit.tracking.study_mirror DIR STUDY` follows a search in a process of its own,
`python -m autofit.tracking.study_mirror REQUEST` a full run, so that a slow or unreachable MLflow affects nothing else.
"""

import json
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from mlflow.entities import Metric, Run, RunTag

from autofit.errors import AutofitError
from autofit.files import read_json, write_json, written_json
from autofit.probing.launch import is_alive
from autofit.promotion.run_folder import RunFolder
from autofit.tracking.database import make_whole, tracking_uri
from autofit.tracking.follower import MIRRORED, keep_mirrored, mirrored_state, told_of, told_to_end
from autofit.tracking.front_plot import STEP_FILES, study_figure, write_step
from autofit.tracking.runs import (
    COLOR,
    CONFIRMED,
    ENDED,
    KIND,
    PROMISE,
    ROLE,
    STATUS,
    STUDY,
    TIER,
    TRIAL,
    client,
    experiment_id,
    finished_run,
    how_confirmed,
    log_params,
    mirror_confirmation,
    mirror_trial,
    put_runs,
    role_tags,
    runs_of,
    search,
    tracking_errors,
    trial_params,
    trial_run_ids,
    with_gb,
    with_launch,
)
from autofit.tracking.ui import view_tags
from autofit.tuning.frontier import Trial, baseline, common_front, winner
from autofit.tuning.locks import exclusive
from autofit.tuning.record import StudyRecord, record_of
from autofit.tuning.sentences import confirmation_json, confirmation_note, why
from autofit.tuning.study import database_errors, load_study, open_storage, study_names, trials_of, with_confirmations
from autofit.units import format_bytes
from autofit.watching.contract import Row, contract_of
from autofit.watching.events import EVENTS, EventKind, RunEvent, events_of, read_progress

_SHOWN_EVENTS = 50
_FIGURES = ("step_s", "device_used_bytes", "samples_per_s")
_COUNTED = (EventKind.RESCUE, EventKind.RESUME, EventKind.CHECKPOINT)  # each of them is a tag of its own


def outcome(rows: Sequence[Row]) -> str:
    """kept, broken, or "not compared"; "" for an unpromised run."""
    kept = {row.kept for row in rows}
    return "broken" if False in kept else "kept" if True in kept else "not compared" if rows else ""


def contract_figures(promise: Mapping[str, Any] | None, rows: Sequence[Row]) -> dict[str, float]:
    """`promised_` and `actual_` seconds, bytes and samples a second, and the limit, as far as they are known."""
    known = promise or {}
    found: dict[str, object] = {f"promised_{key}": known.get(key) for key in _FIGURES}
    found["limit_bytes"] = known.get("limit_bytes")
    found |= {f"promised_{row.key}": row.promised for row in rows if row.key in _FIGURES}
    found |= {f"actual_{row.key}": row.actual for row in rows if row.key in _FIGURES}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def event_tags(events: Sequence[RunEvent]) -> dict[str, str]:
    """The tags of the events: the last of a guard, each rescue, each resume, the memory's warning, the verdict."""
    tags: dict[str, str] = {}
    counts = dict.fromkeys(EventKind, 0)
    for event in events:
        counts[event.kind] += 1
        name = _tag(event, counts[event.kind])
        if name:
            tags[name] = str(event.data.get("tag_value", event.text))
    return tags


def _tag(event: RunEvent, number: int) -> str:
    """The name of the event's tag; "" for one that stands in the note only."""
    if "tag" in event.data:
        return str(event.data["tag"])
    if event.kind in _COUNTED:
        return f"autofit.{event.kind}.{number}"
    if event.kind is EventKind.GUARD:
        return f"autofit.guard.{event.data.get('guard', number)}"
    return f"autofit.{event.kind}" if event.kind in (EventKind.MEMORY, EventKind.VERDICT) else ""


def note(request: Mapping[str, Any], state: str, rows: Sequence[Row], events: Sequence[RunEvent]) -> str:
    """The run's description in Markdown: its state, promised against actual, and its last events."""
    verdict = next((f" {event.text}" for event in reversed(events) if event.kind is EventKind.VERDICT), "")
    promise = outcome(rows)
    kept = f", and its promise is {promise}" if promise in ("kept", "broken") else ""
    parts = [f"**The full run of trial {request['trial']} is {state}{kept}.**{verdict}"]
    if rows:
        parts.append("| | promised | actual | |\n|---|---|---|---|\n" + "\n".join(_row(row) for row in rows))
    told = [f"- step {event.step}, {event.kind}: {_line(event.text)}" for event in events[-_SHOWN_EVENTS:]]
    return "\n\n".join([*parts, *(["\n".join(told)] if told else [])])


def _row(row: Row) -> str:
    kept = "" if row.kept is None else "kept" if row.kept else "**broken**"
    cells = (row.what, row.promised_text, row.actual_text, kept)
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())


Line = Mapping[str, object]
_BEGAN, _TRIAL_RUN = "autofit.began", "autofit.trial_run"  # time of the first step; id of the run of the trial's probe
_MIRROR = "autofit.mirror"  # who wrote last: a mirror process, or `autofit sync`
_RUN_STATUS = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_NO_METRICS = ("step", "time", "max_steps")
_MOST_METRICS = 900  # in one batch; MLflow takes 1,000


def mirror_promoted(study_folder: Path, study: str) -> None:
    """Bring all promoted runs of `study` up to date, also after kills."""
    for path in sorted((study_folder / "promoted").glob("*/request.json")):
        request = read_json(path)
        if request is not None and request["study"] == study:
            folder = path.parent  # the studies may have been moved since
            RunMirror({**request, "folder": str(folder), "study_folder": str(study_folder)}).update(
                ended=not is_alive(folder)
            )


class RunMirror:
    """The mirror of one promoted run. Keeps in memory what MLflow has already."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._folder, self._study_folder = Path(str(request["folder"])), Path(str(request["study_folder"]))
        self._steps: dict[str, set[int]] = {}  # steps that MLflow has, by the metric that was asked for
        self._run_id, self._told, self._id = "", "", uuid.uuid4().hex

    def update(self, *, ended: bool) -> str | None:
        """Copy the data that MLflow lacks; returns the id of MLflow's run, or None before the first step or event.

        `ended` says that no process trains any more. Raises MlflowException, and ConfigError if another mirror is busy.
        """
        lines, events = read_progress(self._folder), events_of(self._folder)
        if not lines and not events and not ended:
            return None
        now = f"{RunFolder(self._folder).state(lambda: not ended)} {len(lines)} {len(events)}"
        if now == self._told and not ended:
            return self._run_id
        with exclusive(self._study_folder / "locks", f"mlflow-{self._folder.name}", wait_s=_LOCK_S):
            api = client(self._study_folder)
            run = self._run(api, lines)
            if run.data.tags.get(_MIRROR) != self._id:
                self._take_over(api, run)
            self._log(api, [line for line in lines if self._is_new(api, line)])
            if now != self._told:
                self._tell(api, run, lines, events, ended=ended)
            self._told = now
        return self._run_id

    # -- the run --

    def _run(self, api: Any, lines: Sequence[Line]) -> Run:
        """MLflow's run: the one of this start, or a new one after `promote --restart`."""
        experiment = experiment_id(api, self._study_folder, str(self._request["study"]))
        began = str(lines[0].get("time", "")) if lines else ""
        found = search(api, experiment, " and ".join(f"tags.`{key}` = '{value}'" for key, value in self._who().items()))
        known = [run for run in found if not began or run.data.tags.get(_BEGAN, began) == began]
        for run in found:
            if run not in known[:1]:
                api.delete_run(run.info.run_id)
        run = known[0] if known else self._create(api, experiment, lines)
        if began and _BEGAN not in run.data.tags:
            api.set_tag(run.info.run_id, _BEGAN, began)
        return run

    def _take_over(self, api: Any, run: Run) -> None:
        """Begin with a run that is new, or that another mirror has written to: ask MLflow for its steps again."""
        self._run_id, self._told, self._steps = str(run.info.run_id), "", {}
        study, number = str(self._request["study"]), int(self._request["trial"])
        found = load_study(self._study_folder, study)
        values, tags = with_launch(self._request["values"]), {_MIRROR: self._id}
        for trial in trials_of(found):
            if trial.number == number:  # its knobs, under the names that trials have
                values |= trial_params(trial, record_of(found).resolved)
                tags |= {TIER: trial.tier, _TRIAL_RUN: "".join(trial_run_ids(api, self._study_folder, study, [number]))}
                self._draw_step(api, trial, record_of(found))
        log_params(api, self._run_id, {key: value for key, value in values.items() if key not in run.data.params})
        api.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items() if value])

    def _draw_step(self, api: Any, trial: Trial, record: StudyRecord) -> None:
        """Log the picture of the trial's step, once."""
        if any(file.path in STEP_FILES for file in api.list_artifacts(self._run_id)):
            return
        probes = self._study_folder / "probes" / str(self._request["study"])
        with tempfile.TemporaryDirectory() as temporary:
            for path in write_step(trial, record, probes=probes, into=Path(temporary)):
                api.log_artifact(self._run_id, str(path))

    def _who(self) -> dict[str, str]:
        return {STUDY: str(self._request["study"]), TRIAL: str(self._request["trial"]), KIND: "promoted"}

    def _create(self, api: Any, experiment: str, lines: Sequence[Line]) -> Run:
        known = ("proof", "proof_verdict", "confirmation")
        tags = self._who() | {STATUS: "running"} | role_tags("full run")
        tags |= {f"autofit.{key}": str(self._request[key]) for key in known if key in self._request}
        name = f"promoted trial-{int(self._request['trial']):04d}"
        start_ms = _at_ms(lines[0]) if lines else None  # of a run that is mirrored after its end
        created: Run = api.create_run(experiment, start_time=start_ms, tags=tags, run_name=name)
        return created

    # -- steps --

    def _is_new(self, api: Any, line: Line) -> bool:
        """True if MLflow lacks the step. It stores the metrics of a step atomically."""
        names = list(_figures(line))
        if not names:
            return False
        name = "step_s" if "step_s" in names else names[0]
        if name not in self._steps:
            self._steps[name] = {int(metric.step) for metric in api.get_metric_history(self._run_id, _named(name))}
        return int(str(line["step"])) not in self._steps[name]

    def _log(self, api: Any, lines: Sequence[Line]) -> None:
        for batch in _batches(lines):
            api.log_batch(self._run_id, metrics=[metric for line in batch for metric in _metrics(line)])
            for line in batch:
                for steps in self._steps.values():
                    steps.add(int(str(line["step"])))

    # -- the promise, events and state --

    def _tell(self, api: Any, run: Run, lines: Sequence[Line], events: Sequence[RunEvent], *, ended: bool) -> None:
        state = RunFolder(self._folder).state(lambda: not ended)
        rows = contract_of(self._folder) or ()
        text = note(self._request, state, rows, events)
        tags = {STATUS: state, "mlflow.note.content": text, PROMISE: outcome(rows), **event_tags(events)}
        figures = contract_figures(self._request.get("promise"), rows)
        at_step = int(str(lines[-1]["step"])) if lines else 0
        at_ms = int(1000 * time.time())
        metrics = [Metric(key, value, at_ms, at_step) for key, value in with_gb(figures).items()]
        api.log_batch(self._run_id, metrics=metrics, tags=[RunTag(k, v[:5000]) for k, v in tags.items() if v])
        if (self._folder / EVENTS).exists():
            api.log_artifact(self._run_id, str(self._folder / EVENTS))
        status = _RUN_STATUS[state]
        if run.info.status != status and status == "RUNNING":
            api.update_run(run.info.run_id, status=status)
        elif run.info.status != status:
            api.set_terminated(run.info.run_id, status=status, end_time=_at_ms(lines[-1]) if lines else None)
        if state != "running":
            write_json(self._folder / MIRRORED, mirrored_state(self._folder, ended=ended))


def _figures(line: Line) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in line.items()
        if key not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _metrics(line: Line) -> list[Metric]:
    return [Metric(_named(k), v, _at_ms(line), int(str(line["step"]))) for k, v in with_gb(_figures(line)).items()]


def _at_ms(line: Line) -> int:
    return int(1000 * float(str(line.get("time", time.time()))))


def _named(key: str) -> str:
    """`key` with the characters that MLflow takes in a metric's name."""
    return re.sub(r"[^\w\-./ ]", "_", key)


def _batches(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Whole lines, as many as MLflow takes at once: it stores a batch atomically."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        count = 2 * len(line)
        if batch and size + count > _MOST_METRICS:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += count
    if batch:
        yield batch


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
    """Mirror trials missing in `mirrored`; add them to it. Returns the number of finished trials."""
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
    """Call `look` every `every_s`, or `rest` times its duration if longer, and a last time with True."""
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
