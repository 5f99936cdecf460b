"""The commands that look at studies: `autofit report`, `studies`, `ui`, `sync` and `monitor`."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from autofit.commands.common import (
    DONE,
    INTERRUPTED,
    NOTHING_FITS,
    dir_option,
    say,
    show,
    show_found,
    show_line,
    terminate_like_interrupt,
)
from autofit.errors import ConfigError
from autofit.recipe.secrets import without_secrets
from autofit.tuning.storage import check_there, database_of

if TYPE_CHECKING:
    from autofit.api import SearchResult
    from autofit.api.monitoring import Watch
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
    load_study(folder, options.study)  # a wrong one is told first
    say("starting MLflow; this takes a while")
    sync(folder, options.study)
    found = pages(folder, options.study)
    try:
        with server(folder, port=options.port) as mlflow:
            address = mlflow.address
            print(f"MLflow: {address}")
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
    print(f"{count} finished trials are in MLflow ({without_secrets(tracking_uri(folder))})")
    return DONE


_REFRESH_S = 1.0


def monitor(options: argparse.Namespace) -> int:
    """One look with --once or --json, and where the output is not a terminal; else until Ctrl-C, which is its end."""
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


def _print(snapshot: object) -> None:
    from rich.console import Console

    from autofit.api.snapshot_tables import tables_of
    from autofit.api.tables import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables_of(snapshot):  # type: ignore[arg-type]
        console.print(table, crop=False)


def _live(watch: "Watch") -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from autofit.api.snapshot_tables import tables_of

    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                shown = Group(*tables_of(watch.snapshot()), "Ctrl-C ends this view, and nothing else.")
                live.update(shown, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return


def report(options: argparse.Namespace) -> int:
    if options.trial is not None and options.verl_log is None:
        raise ConfigError("--trial goes with --verl-log: give the log of the run too, or omit --trial")
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit import api

    if options.verl_log is not None:
        from autofit.api.verl import compare_verl_log

        found = compare_verl_log(options.verl_log, study=options.study, folder=options.dir,
                                 trial=options.trial or "best")  # fmt: skip
        print(json.dumps(found.to_dict()) if options.json else found)
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
        show(result)
        if result.interrupted:
            show_line("Interrupted: the same `autofit search` command goes on with this search.")
        if result.winner is not None:
            where = dir_option(options.dir)
            written = "" if result.trains_on_data and _trains_here(result.device or "cpu") else " --write-only"
            show_line(f"Next: autofit promote best{written}{where}   then: autofit ui{where}")
    return exit_code(result.stop, fits=result.winner is not None)


def _trains_here(studied: str) -> bool:
    """Whether this machine has the card of a study, so that `promote` can train on it."""
    from autofit.promotion.place import training_device

    try:
        training_device(studied, "auto")
    except ConfigError:
        return False
    return True


def exit_code(stop: "Stop | None", *, fits: bool) -> int:
    """Of a search that ended so, or of a report (None); `fits` says whether there is a winner."""
    from autofit.tuning.record import StopKind

    if stop is not None and stop.kind is StopKind.INTERRUPTED:
        return INTERRUPTED
    return DONE if fits else NOTHING_FITS
