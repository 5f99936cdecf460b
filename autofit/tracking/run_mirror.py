"""MLflow's record of a promoted run, copied from progress.jsonl: each step once, even if the run is resumed."""

import select
import sys
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag

from autofit.errors import AutofitError
from autofit.files import read_json
from autofit.promotion.progress import read_progress
from autofit.tracking.study_mirror import (
    KIND,
    STATUS,
    STUDY,
    TRIAL,
    client,
    experiment_id,
    sync,
    tracking_errors,
    trial_run_ids,
)

_EVERY_S = 1.0


def main(request_path: str) -> None:
    """Mirror the run until standard input closes, then once more, and close MLflow's run."""
    request = read_json(Path(request_path))
    assert request is not None
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], _EVERY_S)[0])
        try:
            with tracking_errors(Path(str(request["study_folder"]))):
                mirror(request, ended=ended)
        except (AutofitError, OSError) as error:
            print(f"MLflow: {error}", file=sys.stderr, flush=True)


def mirror(request: dict[str, Any], *, ended: bool) -> str | None:
    """Copy the new steps to MLflow; returns the id of MLflow's run, or None while there is no step."""
    folder, study_folder, study = Path(request["folder"]), Path(request["study_folder"]), str(request["study"])
    lines = read_progress(folder)
    if not lines and not ended:
        return None
    api: Any = client(study_folder)
    experiment = experiment_id(api, study_folder, study)
    tags = {STUDY: study, TRIAL: str(request["trial"]), KIND: "promoted"}
    where = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
    found = api.search_runs([experiment], filter_string=where)
    if found:
        run = found[0]
    else:
        trial_runs = trial_run_ids(api, study_folder, study, [int(request["trial"])])
        if not trial_runs:
            sync(study_folder, study)
            trial_runs = trial_run_ids(api, study_folder, study, [int(request["trial"])])
        link = {"autofit.trial_run": "".join(trial_runs), STATUS: "running"}
        link |= {
            f"autofit.{key}": str(request[key]) for key in ("proof", "proof_verdict", "confirmation") if key in request
        }
        run = api.create_run(experiment, tags=tags | link, run_name=f"promoted trial-{int(request['trial']):04d}")
        params = [Param(k, str(v)[:500]) for k, v in request["values"].items()]
        for start in range(0, len(params), 90):
            api.log_batch(run.info.run_id, params=params[start : start + 90])
    run_id = run.info.run_id
    done = max((int(m.step) for m in api.get_metric_history(run_id, "loss")), default=0)
    for line in lines:
        if int(str(line["step"])) > done:
            api.log_batch(run_id, metrics=_metrics(line))
    if ended:
        final = read_json(folder / "final.json")
        state = "done" if final is not None else "interrupted"
        api.log_batch(run_id, tags=[RunTag(STATUS, state)])
        api.set_terminated(run_id, status="FINISHED" if final is not None else "KILLED")
    elif run.info.status != "RUNNING":
        api.update_run(run_id, status="RUNNING")
    return str(run_id)


def _metrics(line: dict[str, Any]) -> list[Metric]:
    at_ms = int(1000 * float(line.get("time", time.time())))
    skip = ("step", "time", "max_steps")
    return [Metric(k, float(v), at_ms, int(line["step"])) for k, v in line.items() if k not in skip]


if __name__ == "__main__":
    main(sys.argv[1])
