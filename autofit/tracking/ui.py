"""`autofit ui`: MLflow's server for the studies' folder, on loopback, and the addresses of a study's pages."""

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

from autofit.errors import ConfigError, EnvironmentFault, option
from autofit.probing.supervise import free_port
from autofit.tracking.database import tracking_uri
from autofit.tracking.runs import PROMISE, ROLE, STATUS, TIER, client, experiment_id, runs_of, trial_params
from autofit.tuning.frontier import Trial
from autofit.tuning.study import load_study

_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Paths of MLflow's pages of a study: the table of all trials, the charts that compare the front, the summary."""

    table: str
    compared: str
    summary: str | None  # with the picture of the front; None before the first trial


def pages(folder: Path, study_name: str | None) -> Pages:
    """The pages of the study in MLflow, as they are after `sync`."""
    study = load_study(folder, study_name)
    api = client(folder)
    experiment = experiment_id(api, folder, study.study_name)
    summary = runs_of(api, experiment, []).get("summary")
    return Pages(
        table=runs_path(experiment, TABLE),
        compared=runs_path(experiment, COMPARED),
        summary=None if summary is None else run_path(experiment, summary.info.run_id, "artifacts/front.png"),
    )


@dataclass(frozen=True, slots=True)
class MlflowServer:
    """MLflow's server at work."""

    address: str
    log: Path
    _keeper: "subprocess.Popen[bytes]"

    def wait(self) -> NoReturn:
        """Wait for ever, or raise EnvironmentFault once the server has ended by itself."""
        code = self._keeper.wait()
        raise EnvironmentFault(
            f"MLflow's server ended by itself, with exit code {code}: run the same command again; see {self.log}"
        )


@contextmanager
def server(folder: Path, *, port: int | None) -> Iterator[MlflowServer]:
    """Run MLflow's server for `folder`. It ends with this process, however that ends.

    Raises ConfigError if the port is in use.
    """
    port = free_port() if port is None else port
    if _in_use(port):
        raise ConfigError(
            f"{option('port', str(port))} is in use on this machine; choose another port or omit {option('port')}"
        )
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    artifacts = str((folder / "mlartifacts").resolve())
    command = [
        sys.executable, "-P", "-m", "autofit.probing.supervise", "mlflow", "server", "--host", "127.0.0.1",
        "--port", str(port), "--workers", "1", "--backend-store-uri", tracking_uri(folder), "--default-artifact-root",
        artifacts,
    ]  # fmt: skip
    log = folder / "ui.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, process, log)
        yield MlflowServer(address, log, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _wait_until_up(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EnvironmentFault(f"MLflow's server ended with exit code {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):  # noqa: S310  (loopback)
                return
        except OSError:
            time.sleep(0.1)
    raise EnvironmentFault(f"MLflow's server did not answer within {_START_S:.0f} s; see {log}")


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


# -- saved views of MLflow's runs page --------------------------------------------------------------------------------
# MLflow 3.17 keeps the choice of columns and charts in the browser, and opens a saved view, a tag of the experiment,
# from the address: `/#/experiments/1/runs?viewStateShareKey=NAME`. So the links that autofit prints open right in any
# browser.

TABLE, COMPARED = "autofit-trials", "autofit-front"
_TAG = "mlflow.sharedViewState."
_FIRST = ("per_device_train_batch_size", "gradient_checkpointing", "gradient_accumulation_steps")
_MOST_COLUMNS, _MOST_AXES = 8, 6  # of knobs: more are not readable side by side
_FIGURES = ("step_s", "device_used_GB", "speedup")
_PROMISED = ("promised_step_s", "actual_step_s", "promised_device_used_GB", "actual_device_used_GB", "limit_GB")
_MOST_TAG = 5000  # characters of an experiment's tag before MLflow 3.17, which takes 20,000
_KNOBS, _CHARTS = "autofit-knobs", "autofit-figures"  # the sections of the charts


def runs_path(experiment: str, view: str) -> str:
    """The path of the experiment's runs page in the view TABLE or COMPARED."""
    mode = {"compareRunsMode": "CHART"} if view == COMPARED else {}
    query = urlencode({"viewStateShareKey": view, **mode, "workflowType": "machine_learning"})
    return f"/#/experiments/{experiment}/runs?{query}"


def run_path(experiment: str, run_id: str, tab: str = "") -> str:
    """The path of the page of one run."""
    return f"/#/experiments/{experiment}/runs/{run_id}{tab and '/'}{tab}?workflowType=machine_learning"


def view_tags(
    trials: Sequence[Trial], shown: Sequence[Trial], resolved: Mapping[str, object], at_ms: int
) -> dict[str, str]:
    """The experiment's tags of both views: all `trials` as a table, and those to compare, `shown`, as charts."""
    table = _state(columns=_columns(trials, resolved), where="", sort="metrics.`step_s`")
    compared = _state(columns=_columns(shown, resolved), where=f"tags.`{ROLE}` LIKE '%'", sort="metrics.`step_s`",
                      charts=_charts(differing(shown, resolved)[:_MOST_AXES]))  # fmt: skip
    return {
        _TAG + TABLE: _tag_value("autofit: all trials", table, at_ms),
        _TAG + COMPARED: _tag_value("autofit: front, baseline and full runs compared", compared, at_ms),
    }


def differing(trials: Sequence[Trial], resolved: Mapping[str, object]) -> list[str]:
    """The knobs in which `trials` differ: micro-batch, checkpointing, accumulation, then those with most values."""
    rows = [trial_params(trial, resolved) for trial in trials]
    values = {name: {str(row[name]) for row in rows} for name in _in_all(rows)}
    names = [name for name, found in values.items() if len(found) > 1 and name != "tier"]
    ranks = {name: rank for rank, name in enumerate(_FIRST)}
    return sorted(names, key=lambda name: (ranks.get(name, len(_FIRST)), -len(values[name]), name))


def _in_all(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Names that every row has: MLflow leaves a run out of a chart where one is missing."""
    return [name for name in rows[0] if all(name in row for row in rows)] if rows else []


def _columns(trials: Sequence[Trial], resolved: Mapping[str, object]) -> list[str]:
    """The table's columns from left to right."""
    return [
        *(f"tags.`{name}`" for name in (STATUS, TIER, ROLE)), *(f"metrics.`{name}`" for name in _FIGURES),
        *(f"params.`{name}`" for name in differing(trials, resolved)[:_MOST_COLUMNS]), f"tags.`{PROMISE}`",
        *(f"metrics.`{name}`" for name in _PROMISED),
    ]  # fmt: skip


def _width(column: str) -> int:
    """Pixels of a column: its whole name, except the long names of knobs, three of them on a screen."""
    return min(150 if column.startswith("params") else 250, max(90, 34 + 8 * len(column.split("`")[1])))


def _state(
    *, columns: Sequence[str], where: str, sort: str, charts: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The state of MLflow's runs page with every field, as older versions lack defaults."""
    own = {"compareRunCharts": list(charts), "compareRunSections": _sections()} if charts else {}
    return {
        "searchFilter": where, "orderByKey": sort, "orderByAsc": True, "startTime": "ALL", "lifecycleFilter": "Active",
        "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns), "columnOrder": list(columns),
        "columnWidths": {column: _width(column) for column in columns}, "runsExpanded": {}, "runsPinned": [],
        "runsHidden": [], "runsVisibilityMap": {}, "runsHiddenMode": "SHOW_ALL" if charts else "FIRST_10_RUNS", **own,
        "viewMaximized": False, "runListHidden": False, "useGroupedValuesInCharts": True,
        "isAccordionReordered": bool(charts),  # else MLflow sorts the sections by name, among those of all metrics
        "hideEmptyCharts": True, "groupBy": None, "groupsExpanded": {}, "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }  # fmt: skip


def _sections() -> list[dict[str, Any]]:
    """One wide chart above three in a row; sections of other metrics follow."""
    shape = {"display": True, "isReordered": False, "deleted": False, "isGenerated": False}
    return [
        {"uuid": _KNOBS, "name": "Knobs that differ", "columns": 1, "cardHeight": 400, **shape},
        {"uuid": _CHARTS, "name": "Step time and memory", "columns": 3, "cardHeight": 360, **shape},
    ]


def _charts(knobs: Sequence[str]) -> list[dict[str, Any]]:
    """The parallel coordinates of the knobs with memory and step time, and memory against step time."""
    speed, memory = {"key": "step_s", "type": "METRIC"}, {"key": "device_used_GB", "type": "METRIC"}
    return [
        _card(_KNOBS, "PARALLEL", selectedParams=list(knobs), selectedMetrics=["device_used_GB", "step_s"],
              showAllRuns=True),
        _card(_CHARTS, "SCATTER", xaxis=speed, yaxis=memory),
        _card(_CHARTS, "BAR", metricKey="step_s"),
        _card(_CHARTS, "BAR", metricKey="device_used_GB"),
    ]  # fmt: skip


def _card(section: str, kind: str, **content: object) -> dict[str, Any]:
    name = f"{section}-{kind}-{content.get('metricKey', '')}"
    return {
        "uuid": name, "type": kind, "runsCountToCompare": 50, "metricSectionId": section, "deleted": False,
        "isGenerated": False, **content,
    }  # fmt: skip


def _tag_value(name: str, state: Mapping[str, Any], at_ms: int) -> str:
    """The value of a view's tag: MLflow 3.17 reads the compressed `state` of a named view, earlier ones the fields."""
    text = json.dumps(state, separators=(",", ":"))
    packed = "deflate;" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    named = {"name": name, "createdAt": at_ms, "updatedAt": at_ms, "state": packed}
    both = json.dumps({**named, **state}, separators=(",", ":"))
    return both if len(both) <= _MOST_TAG else json.dumps(named)
