"""`autofit promote`: write a trial's YAML and follow its full run."""

import argparse
import json
from collections.abc import Mapping

from autofit.commands.common import DONE, INTERRUPTED, dir_option, executor_option, say, show, terminate_like_interrupt
from autofit.tuning.storage import check_there, database_of
from autofit.watching.thresholds import read_guards


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
