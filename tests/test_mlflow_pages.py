"""MLflow's pages of a study, opened by the links that `autofit ui` prints: their state, and what a browser shows."""

import base64
import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lawful
import psutil
import pytest
import written_runs as written
from at_once import AtOnce
from search_driver import plan

from autofit.recipe.secrets import masked
from autofit.tracking.runs import client, experiment_id, search
from autofit.tracking.study_mirror import sync
from autofit.tracking.ui import differing, pages, run_path, server
from autofit.tuning.record import record_of
from autofit.tuning.search import Search, open_study
from autofit.tuning.study import load_study, trials_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.filterwarnings("ignore")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]  # fmt: skip
_NO_ASSISTANT = (
    "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');"
    "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');"
)
_WAIT_MS = 300_000  # a loaded machine starts the page's scripts slowly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of 10 trials in MLflow, with a full run of trial 0 that met an alert."""
    folder = tmp_path_factory.mktemp("studies")
    wanted = plan(folder, 10)
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    run = written.write_request(folder)
    written.write_start(run)
    written.write_steps(run, range(1, 21))
    written.write_end(run, 20)
    sync(folder, "law")
    return folder


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """The saved views of the experiment, as MLflow 3.17 reads them."""
    api = client(folder)
    tags = api.get_experiment(experiment_id(api, folder, "law")).tags
    prefix = "mlflow.sharedViewState."
    views = {key.removeprefix(prefix): json.loads(text) for key, text in tags.items() if key.startswith(prefix)}
    for view in views.values():
        packed = base64.b64decode(view["state"].removeprefix("deflate;"))
        view["packed"] = json.loads(zlib.decompress(packed))
    return views


def test_the_experiment_is_of_model_training_and_has_both_views(folder: Path) -> None:
    api = client(folder)
    experiment = api.get_experiment(experiment_id(api, folder, "law"))
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    found = states(folder)
    assert set(found) == {"autofit-trials", "autofit-front"}
    for view in found.values():  # MLflow before 3.17 reads the fields beside the packed state
        assert view["packed"] == {key: view[key] for key in view["packed"]}
        assert view["name"].startswith("autofit: ")
    assert all(len(value) < 5000 for value in experiment.tags.values())  # as long as MLflow 3.5 takes


def test_the_table_shows_the_figures_and_the_knobs_in_which_trials_differ(folder: Path) -> None:
    study = load_study(folder, "law")
    columns = states(folder)["autofit-trials"]["selectedColumns"]
    knobs = differing(trials_of(study), record_of(study).resolved)
    assert {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"} <= set(knobs)
    for name in ("tags.`autofit.status`", "tags.`autofit.tier`", "metrics.`step_s`", "metrics.`device_used_GB`",
                 "metrics.`speedup`", *(f"params.`{knob}`" for knob in knobs[:8])):  # fmt: skip
        assert name in columns


def test_the_front_is_compared_by_the_knobs_that_differ_step_time_and_memory(folder: Path) -> None:
    view = states(folder)["autofit-front"]
    parallel = next(card for card in view["compareRunCharts"] if card["type"] == "PARALLEL")
    assert parallel["selectedMetrics"] == ["device_used_GB", "step_s"]
    assert view["isAccordionReordered"], "or MLflow sorts the sections, and those of other metrics come first"
    api = client(folder)
    shown = search(api, experiment_id(api, folder, "law"), view["searchFilter"])
    trials = [run for run in shown if run.data.tags["autofit.kind"] == "trial"]
    assert [run.data.tags["autofit.kind"] for run in shown].count("promoted") == 1
    assert {"winner", "baseline"} <= {run.data.tags["autofit.role"] for run in trials}
    for knob in parallel["selectedParams"]:
        assert len({run.data.params[knob] for run in trials}) > 1


def test_secrets_are_masked_by_their_name_and_their_look_and_nothing_else() -> None:
    given = {"hub_token": "x", "api_key": "x", "pad_token": "<pad>", "max_new_tokens": 5, "env": {"A": "b"},
             "model_init_kwargs": {"token": "x", "dtype": "bf16"}, "urls": ["https://me:pass@host/x"],
             "note": "hf_abcdefghijkl", "token": None}  # fmt: skip
    assert masked(given) == {
        "hub_token": "***", "api_key": "***", "pad_token": "<pad>", "max_new_tokens": 5, "env": {"A": "***"},
        "model_init_kwargs": {"token": "***", "dtype": "bf16"}, "urls": ["https://***@host/x"], "note": "***",
        "token": None,
    }  # fmt: skip


@contextmanager
def browser_page() -> "Iterator[Page]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1700, "height": 1100})
            page.add_init_script(_NO_ASSISTANT)
            page.set_default_timeout(_WAIT_MS)
            yield page
        finally:
            browser.close()


def take(page: "Page", name: str) -> None:
    """A screenshot to look at, where AUTOFIT_SCREENSHOTS names a folder."""
    if "AUTOFIT_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["AUTOFIT_SCREENSHOTS"]) / f"{name}.png")


def _serve(folder: Path, told: Connection) -> None:
    with server(folder, port=None) as mlflow:
        told.send(mlflow.address)
        time.sleep(600)


@dataclass(frozen=True)
class Ui:
    """A process that serves the pages, and their address."""

    process: ForkProcess
    address: str


@pytest.fixture(scope="module")
def ui(folder: Path) -> Iterator[Ui]:
    hears, tells = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(folder, tells))
    process.start()
    assert hears.poll(90)
    yield Ui(process, hears.recv())
    process.kill()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
def test_the_pages_show_it_in_a_real_browser(folder: Path, ui: Ui) -> None:
    from playwright.sync_api import expect

    found, view = pages(folder, "law"), states(folder)["autofit-front"]
    api = client(folder)
    experiment = experiment_id(api, folder, "law")
    full_run = search(api, experiment, "tags.`autofit.kind` = 'promoted'")[0].info.run_id
    with browser_page() as page:
        page.goto(ui.address + found.table)
        for column in ("tags.`autofit.status`", "metrics.`step_s`", "metrics.`device_used_GB`", "metrics.`speedup`"):
            expect(page.locator(f'.ag-header-cell[col-id="{column}"]')).to_be_visible(timeout=_WAIT_MS)
        for row in ("trial-0000", "promoted trial-0000"):
            expect(page.get_by_text(row, exact=True).first).to_be_visible(timeout=_WAIT_MS)
        take(page, "table")
        page.goto(ui.address + found.compared)
        parallel = next(card for card in view["compareRunCharts"] if card["type"] == "PARALLEL")
        axes = page.locator("g.dimension")
        expect(axes).to_have_count(len(parallel["selectedParams"]) + 2, timeout=_WAIT_MS)
        for name in (*parallel["selectedParams"], "device_used_GB", "step_s"):
            expect(axes.filter(has_text=name)).to_have_count(1)
        place = page.get_by_text("Knobs that differ").first.bounding_box()
        assert place is not None
        assert place["y"] < 500, "below the charts of other metrics"
        take(page, "compared")
        page.goto(ui.address + run_path(experiment, full_run))
        for text in ("promised", "actual", "promised_step_s", "actual_step_s"):
            expect(page.get_by_text(text, exact=True).first).to_be_visible(timeout=_WAIT_MS)
        take(page, "full-run")
        page.goto(ui.address + run_path(experiment, full_run, "artifacts/step.svg"))
        expect(page.get_by_role("img", name="step.svg").first).to_be_visible(timeout=_WAIT_MS)
        take(page, "full-run-step")
        assert found.summary is not None
        page.goto(ui.address + found.summary)
        expect(page.get_by_role("img", name="front.png").first).to_be_visible(timeout=_WAIT_MS)
        take(page, "front")
        page.get_by_text("step.svg", exact=True).first.click()
        expect(page.get_by_role("img", name="step.svg").first).to_be_visible(timeout=_WAIT_MS)
        take(page, "step")


@pytest.mark.slow
def test_a_killed_ui_takes_the_server_and_its_workers_along(ui: Ui) -> None:
    started = psutil.Process(ui.process.pid).children(recursive=True)
    assert len(started) >= 2  # the keeper and the server
    ui.process.kill()
    ui.process.join()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
