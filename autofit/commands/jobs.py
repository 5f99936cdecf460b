"""`autofit jobs`: list the jobs of a folder of studies, cancel some, or show what one prints."""

import argparse
import json
import time
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, say, show
from autofit.errors import ConfigError

if TYPE_CHECKING:
    from autofit.api.job_list import Job

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
