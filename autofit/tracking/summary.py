"""What MLflow shows of a whole study: its own run with the summary and the front, the front's runs, saved views."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from autofit.tracking.front_plot import study_figure
from autofit.tracking.runs import COLOR, KIND, ROLE, STUDY, TRIAL, role_tags, runs_of, search
from autofit.tracking.views import view_tags
from autofit.tuning.foreseen import common_front
from autofit.tuning.frontier import Trial, baseline, winner
from autofit.tuning.record import StudyRecord
from autofit.tuning.sentences import confirmation_json, confirmation_note, why
from autofit.units import format_bytes


def mirror_summary(
    api: Any, experiment: str, study_name: str, record: StudyRecord, trials: list[Trial], run: Run | None
) -> None:
    """Bring the study's own run, the roles of its trials and the saved views up to date, if a trial was added."""
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
    marked = [r for r in search(api, experiment, f"tags.`{ROLE}` LIKE '%'") if r.data.tags[KIND] == "trial"]
    had = {int(run.data.tags[TRIAL]): run for run in marked}
    for number, run in had.items():
        if number not in roles:
            for key in (ROLE, COLOR):
                if key in run.data.tags:
                    api.delete_tag(run.info.run_id, key)
    new = [n for n, role in roles.items() if n not in had or had[n].data.tags[ROLE] != role]
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
    api.set_tag(run_id, "autofit.winner", "" if best is None else str(best.number))
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
