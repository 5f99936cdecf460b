"""The commands behind a search: `autofit promote`, `verify`, `export`, `run` and `jobs`."""

import argparse
import json
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
    terminate_like_interrupt,
)
from autofit.errors import ConfigError
from autofit.recipe.pipeline import read_pipeline
from autofit.tuning.storage import check_there, database_of
from autofit.watching.thresholds import read_guards

if TYPE_CHECKING:
    from autofit.api.job_list import Job

NOT_NEUTRAL = 1  # what was to be proven is not so


def verify(options: argparse.Namespace) -> int:
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit import api

    found = api.verify(options.trial, study=options.study, folder=options.dir, on_event=lambda event: say(str(event)))
    show_found(found, as_json=options.json)
    return NOT_NEUTRAL if found.refused else DONE


def export(options: argparse.Namespace) -> int:
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit.api.verl import export_to_verl

    found = export_to_verl(options.trial, study=options.study, folder=options.dir)
    print(json.dumps(found.to_dict()) if options.json else found)
    return DONE


def promote(options: argparse.Namespace) -> int:
    where = executor_option(options)
    read_guards(options.guards)
    check_there(database_of(options.dir.absolute()))  # all this before imports that take a second
    from autofit import api

    terminate_like_interrupt()
    found = api.promote(
        options.trial, study=options.study, folder=options.dir, out=options.out, device=options.device,
        launch=not options.write_only, restart=options.restart, guards=options.guards, allow=options.allow,
        executor=where, on_step=lambda step: say(step_line(step)),
        on_event=lambda event: say(str(event)),
    )  # fmt: skip
    if found.status == "interrupted":
        return INTERRUPTED
    if found.status == "written":
        return DONE
    if options.json:
        print(json.dumps(found.to_dict()))
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
    parts = [f"{name} {_number(line[key])}" for key, name in shown.items() if key in line]
    return f"step {line['step']}/{line['max_steps']}: {', '.join(parts + progress_words(line))}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def run(options: argparse.Namespace) -> int:
    where = executor_option(options)
    read_pipeline(options.pipeline, changes=settings(options.set))  # a wrong key is told before imports of a second
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
        if options.json:
            print(json.dumps(found.to_dict()))
        else:
            show(found)
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
    """Print the end of the job's log; with --follow what is added to it, until the job ends. Ctrl-C ends that."""
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
