"""The commands on studies: report, studies, ui, sync and monitor; and promote, verify, export, run and jobs."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.commands.common import (
    DONE,
    INTERRUPTED,
    NOTHING_FITS,
    dir_option,
    executor_option,
    say,
    settings,
    show,
    show_found,
    show_line,
    show_lines,
    show_parts,
    terminate_like_interrupt,
)
from autofit.errors import ConfigError
from autofit.recipe.pipeline import read_pipeline, record_path
from autofit.recipe.secrets import without_secrets
from autofit.tuning.storage import check_names, database_of
from autofit.units import format_metric
from autofit.watching.thresholds import read_guards

if TYPE_CHECKING:
    from autofit.api import SearchResult
    from autofit.api.job_list import Job
    from autofit.api.monitoring import Snapshot, Watch
    from autofit.tuning.record import Stop


def studies(options: argparse.Namespace) -> int:
    from autofit import api

    found = api.studies(options.dir)
    show_found(found, as_json=options.json)
    return DONE


def ui(options: argparse.Namespace) -> int:
    from autofit.api.arguments import studies_folder
    from autofit.tracking.study_mirror import sync
    from autofit.tracking.ui import pages, server
    from autofit.tuning.study import load_study

    terminate_like_interrupt()
    folder = studies_folder(options.dir)
    if options.port is not None and not 0 < options.port < 65536:
        raise ConfigError(f"--port must be between 1 and 65535; got {options.port}")
    load_study(folder, options.study)  # reports a wrong one first
    say("starting MLflow; this takes a while")
    sync(folder, options.study)
    found = pages(folder, options.study)
    try:
        with server(folder, port=options.port) as mlflow:
            address = mlflow.address  # by itself it opens MLflow's welcome page of GenAI
            print(f"all trials: {address}{found.table}")
            print(f"compare the front: {address}{found.compared}", flush=True)
            if found.summary is not None:
                print(f"the front as a picture: {address}{found.summary}", flush=True)
            say("Ctrl-C stops it")
            mlflow.wait()
    except KeyboardInterrupt:
        return DONE


def sync(options: argparse.Namespace) -> int:
    from autofit.api.arguments import studies_folder
    from autofit.tracking.database import tracking_uri
    from autofit.tracking.study_mirror import sync

    folder = studies_folder(options.dir)
    count = sync(folder, options.study, rebuild=options.rebuild)
    show_line(f"{count} finished trials are in MLflow ({without_secrets(tracking_uri(folder))})")
    return DONE


_REFRESH_S = 1.0


def monitor(options: argparse.Namespace) -> int:
    """One look with --once or --json, or into a file or pipe; else until Ctrl-C, which is its normal end."""
    from autofit import api
    from autofit.api.arguments import studies_folder
    from autofit.api.monitoring import Watch

    if options.json:
        print(json.dumps(api.monitor(options.dir).to_dict()))
    elif options.once or not sys.stdout.isatty():
        _print(api.monitor(options.dir))
    else:
        terminate_like_interrupt()
        _live(Watch(studies_folder(options.dir)))
    return DONE


def _print(snapshot: "Snapshot") -> None:
    from rich.console import Console

    from autofit.api.tables import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in snapshot.parts():
        console.print(table, crop=False)


def _live(watch: "Watch") -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                shown = Group(*watch.snapshot().parts(), "Ctrl-C ends this view, and nothing else.")
                live.update(shown, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return


def report(options: argparse.Namespace) -> int:
    if options.trial is not None and options.verl_log is None:
        raise ConfigError("--trial goes with --verl-log: give the log of the run too, or omit --trial")
    check_names(database_of(options.dir.absolute()), options.study, options.trial)  # before imports of seconds
    from autofit import api

    if options.verl_log is not None:
        from autofit.api.verl import compare_verl_log

        found = compare_verl_log(options.verl_log, study=options.study, folder=options.dir,
                                 trial=options.trial or "best")  # fmt: skip
        if options.json:
            print(json.dumps(found.to_dict()))
        else:
            head, *rows = str(found).splitlines()
            show_line(head)
            print("\n".join(rows))
        return DONE
    result = api.report(options.study, folder=options.dir, html=options.html)
    if options.html is not None:
        say(f"wrote {options.html}")
    return show_result(options, result)


def show_result(options: argparse.Namespace, result: "SearchResult") -> int:
    """Print a result, as words or as JSON; the exit code that follows from it."""
    if options.json:
        print(json.dumps(result.to_dict()))
    else:
        show_parts(result.verdict_parts())
        show_rest(options, result)
    return exit_code(result.stop, fits=result.winner is not None)


def show_rest(options: argparse.Namespace, result: "SearchResult") -> None:
    """Print what follows the verdict of a result: the advice, and the next command."""
    show_lines(result.advice_parts())
    if result.interrupted:
        show_line("Interrupted: the same `autofit search` command goes on with this search.")
    if result.winner is not None:
        from autofit.recipe.profile import profile

        where = dir_option(options.dir)
        written = "" if result.trains_on_data and _trains_here(result.device or "cpu") else " --write-only"
        first = f"promote best{written}"
        if result.trainer and profile(result.trainer).own_launch:  # its own command trains, and no gradient is compared
            first = f"export best --to {result.trainer}"
        show_line(f"Next: autofit {first}{where}   then: autofit ui{where}")
    sys.stdout.flush()


def _trains_here(studied: str) -> bool:
    """True if this machine has the card of a study, so that `promote` can train on it."""
    from autofit.promotion.place import training_device

    try:
        training_device(studied, "auto")
    except ConfigError:
        return False
    return True


def exit_code(stop: "Stop | None", *, fits: bool) -> int:
    """The exit code of a search that ended by `stop`, or of a report (None); `fits` is True if there is a winner."""
    from autofit.tuning.record import StopKind

    if stop is not None and stop.kind is StopKind.INTERRUPTED:
        return INTERRUPTED
    return DONE if fits else NOTHING_FITS


# -- the commands behind a search -------------------------------------------------------------------------------------

NOT_NEUTRAL = 1  # the claim is false


def verify(options: argparse.Namespace) -> int:
    check_names(database_of(options.dir.absolute()), options.study, options.trial)  # before imports of seconds
    from autofit import api

    found = api.verify(options.trial, study=options.study, folder=options.dir, on_event=lambda event: say(str(event)))
    show_found(found, as_json=options.json)
    return NOT_NEUTRAL if found.refused else DONE


def export(options: argparse.Namespace) -> int:
    check_names(database_of(options.dir.absolute()), options.study, options.trial)  # before imports of seconds
    from autofit.api.verl import export_to_verl

    found = export_to_verl(options.trial, study=options.study, folder=options.dir)
    print(json.dumps(found.to_dict()) if options.json else found)
    return DONE


def promote(options: argparse.Namespace) -> int:
    where = executor_option(options)
    read_guards(options.guards)
    check_names(database_of(options.dir.absolute()), options.study, options.trial, takes_points=True)
    from autofit import api

    terminate_like_interrupt()
    found = api.promote(
        options.trial, study=options.study, folder=options.dir, out=options.out, device=options.device,
        launch=not options.write_only, restart=options.restart, guards=options.guards, allow=options.allow,
        executor=where, on_step=lambda step: say(step_line(step)),
        on_event=lambda event: None if event.verdict else say(str(event)),
    )  # fmt: skip
    if found.status == "interrupted":
        return INTERRUPTED
    if options.json:
        print(json.dumps(found.to_dict()))
        return DONE
    if found.status == "written":
        return DONE
    show(found)
    print(f"its run is in MLflow: autofit ui{dir_option(options.dir)}")
    return DONE


def step_line(line: Mapping[str, object]) -> str:
    """A logged step of a run, in one line."""
    from autofit.watching.progress import progress_words

    shown = {
        "reward": "reward", "kl": "kl", "loss": "loss", "completions/mean_length": "length",
        "completions/clipped_ratio": "clipped", "mean_token_accuracy": "token accuracy",
        "rewards/accuracies": "pair accuracy", "accuracy": "pair accuracy", "completions_per_s": "completions/s",
        "samples_per_s": "samples/s",
    }  # fmt: skip
    parts = [f"{name} {format_metric(line[key])}" for key, name in shown.items() if key in line]
    return f"step {line['step']}/{line['max_steps']}: {', '.join(parts + progress_words(line))}"


def _look_at_stages(options: argparse.Namespace) -> None:
    """Raise ConfigError for a wrong key, value or device of a pipeline, before imports that take seconds.

    One that was begun may have stages that are done, which need neither a card nor their recipe.
    """
    from autofit.frontends.writing import source_of
    from autofit.hardware.hardware import training_device
    from autofit.plugin.registry import check_source_early

    read = read_pipeline(options.pipeline, changes=settings(options.set))
    begun = record_path(options.dir, read.name).exists()
    wrong = []
    for stage in () if begun else read.stages:
        if options.only not in (None, stage.name):
            continue
        if options.gpu is None:
            training_device(options.device or str(stage.options.get("device", "auto")))
        tokens = stage.options.get("prompt_tokens")
        try:
            check_source_early(
                source_of(stage.values), trainer=stage.trainer, changes={},
                device="cpu",  # also for a plan on a simulated card: the planned run trains on a dataset
                prompt_tokens=tokens if isinstance(tokens, int) else None,
            )  # fmt: skip
        except ConfigError as error:
            wrong.append(f"stage {stage.name}: {error}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def run(options: argparse.Namespace) -> int:
    where = executor_option(options)
    _look_at_stages(options)
    from autofit import api

    terminate_like_interrupt()
    result = api.run(
        options.pipeline, target_vram=options.target_vram, device=options.device, gpu=options.gpu,
        trials=options.trials, changes=settings(options.set), only=options.only, restart=options.restart,
        search=not options.no_search,
        plan=options.plan, folder=options.dir, mlflow=not options.no_mlflow,
        executor=where, on_event=lambda event: say(str(event)),
        on_step=lambda step: say(step_line(step)),
    )  # fmt: skip
    if options.json:
        print(json.dumps(result.to_dict()))
    else:
        show(result)
        if result.status == "done":
            runs = "" if options.no_mlflow else f"; its runs are in MLflow: autofit ui{dir_option(options.dir)}"
            print(f"the model is in {result.model_path}{runs}")
    return {"interrupted": INTERRUPTED, "nothing fits": NOTHING_FITS}.get(result.status, DONE)


_LOOK_S = 1.0


def jobs(options: argparse.Namespace) -> int:
    from autofit import api

    if (options.action == "list") == bool(options.ids) or (options.action == "tail" and len(options.ids) > 1):
        raise ConfigError("`autofit jobs` takes no ID, `autofit jobs cancel ID...` some, `autofit jobs tail ID` one")
    if options.follow and options.action != "tail":
        raise ConfigError("--follow is for `autofit jobs tail ID`; leave it out")
    found = api.jobs(options.dir)
    if options.action == "list":
        show_found(found, as_json=options.json)
        return DONE
    chosen = found.find(options.ids)
    if options.action == "cancel":
        said = {job.id: job.cancel() for job in chosen}
        if options.json:
            print(json.dumps({"cancelled": said}))
        else:
            print(*(f"{number} {text}" for number, text in said.items()), sep="\n")
        return DONE
    if options.json:
        print(json.dumps({**chosen[0].to_dict(), "log": str(chosen[0].log or ""), "lines": chosen[0].tail()}))
        return DONE
    _show_log(options, chosen[0])
    return DONE


def _show_log(options: argparse.Namespace, job: "Job") -> None:
    """Print the end of the job's log; with --follow also its growth, until the job ends or Ctrl-C."""
    from autofit import api

    path = job.log
    if path is None:
        say(f"{job.id} has printed nothing yet")
    else:
        say(f"{job.id}, {path}:")
        print(*job.tail(), sep="\n", flush=True)
    at, lives = 0 if path is None else path.stat().st_size, options.follow
    while lives:
        time.sleep(_LOOK_S)
        lives = any(other.id == job.id for other in api.jobs(options.dir))
        path = path or job.log
        if path is not None and path.is_file():
            with path.open("rb") as file:
                file.seek(min(at, path.stat().st_size))
                print(file.read().decode("utf-8", errors="replace"), end="", flush=True)
                at = file.tell()
