"""The inspection of a recipe by its trainer, once, before any probe.

Runs in a child of the fork server, because trainers import torch and may import the user's code.
"""

import sysconfig
import traceback
from dataclasses import replace
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, UnknownKeyError
from autofit.files import read_json, write_json
from autofit.plugin.models import go_offline
from autofit.plugin.protocol import Inspection, Trainer, WorstCase
from autofit.plugin.registry import load
from autofit.recipe.launch import split
from autofit.recipe.secrets import opened, sealed


def run(request_path: str) -> int:
    """Inspect the recipe of the request at `request_path` and write the request's `answer` file. Always returns 0."""
    request = read_json(Path(request_path))
    assert request is not None
    inspection = Inspection(
        device=str(request["device"]), worst_case=WorstCase(path=Path(str(request["worst_case"]))),
        prompt_tokens=cast(int | None, request.get("prompt_tokens")),
        changed=tuple(cast(list[str], request["changed"])), ranks=cast(int, request.get("ranks", 1)),
        cards=cast("int | None", request.get("cards")),
    )  # fmt: skip
    answer: dict[str, object]
    try:
        trainer = load(str(request["trainer"]))
    except ConfigError as error:
        answer = {"error": error.marked, "of_trainer": True}
    except (SystemExit, KeyboardInterrupt) as error:
        said = f"the trainer {request['trainer']!r} ended the import {_exit_of(error)}"
        answer = {"error": said, "of_trainer": True, "printed": not _has_words(error)}
    else:
        answer = _told(trainer, cast(dict[str, object], request["values"]), inspection)
    write_json(Path(str(request["answer"])), answer)
    return 0


def sample_lengths(request_path: str) -> int:
    """The lengths of some samples of the recipe's data, of a trainer that tells them; writes the `answer`. Returns 0.

    `request` is that of an inspection that has ended: its data is at hand, so nothing is fetched.
    """
    request = read_json(Path(request_path))
    assert request is not None
    tells = getattr(load(str(request["trainer"])), "sample_lengths", None)
    go_offline()
    values = split(opened(cast(dict[str, object], request["values"])))[1]
    found = None if tells is None else tells(values, Path(str(request["folder"])), most=cast(int, request["most"]))
    write_json(Path(str(request["answer"])), {"found": found})
    return 0


def _exit_of(error: SystemExit | KeyboardInterrupt) -> str:
    """How code of the user's ended its process, in words."""
    if isinstance(error, KeyboardInterrupt):
        return "by KeyboardInterrupt"
    return f"by sys.exit({'' if error.code is None else repr(error.code)[:300]})"


def _has_words(error: SystemExit | KeyboardInterrupt) -> bool:
    """Whether the exit says why; else what was printed before it may."""
    return isinstance(error.args[0] if error.args else None, str)


def _told(trainer: Trainer, values: dict[str, object], inspection: Inspection) -> dict[str, object]:
    """The facts of the recipe `values` as JSON, or the reason why there are none."""
    try:
        facts = trainer.inspect(opened(values), inspection)
        return replace(facts, values=sealed(facts.values), resolved=sealed(facts.resolved)).to_json()
    except ConfigError as error:
        return {"error": error.marked, "of_key": isinstance(error, UnknownKeyError)}
    except (SystemExit, KeyboardInterrupt) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if not _is_librarys(frame.filename)]
        where = f" ({own[-1]})" if own else ""
        said = f"its trainer, or code that it names (rewards, tools), ended {_exit_of(error)}{where}"
        return {"error": said, "printed": not _has_words(error)}
    except Exception as error:  # of the trainer's own code, which may be anyone's
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"error": f"the trainer {trainer.name} failed on it: {text} ({Path(last.filename).name}:{last.lineno})"}


def _is_librarys(file: str) -> bool:
    """Whether a source file is Python's own or of an installed package."""
    return "site-packages" in file or file.startswith(("<frozen", sysconfig.get_path("stdlib")))
