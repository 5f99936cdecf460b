"""One rank of a promoted run: the full training of a recipe with a launch, resumable from every whole checkpoint.

Runs in a process of its own for each rank (`python -m autofit.promotion.rank_training REQUEST`), with RANK,
MASTER_ADDR and MASTER_PORT in its environment. Rank 0 records the run; the others follow it. Loads torch.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.protocol import Run, Task
from autofit.plugin.ranks import as_rank
from autofit.plugin.registry import load
from autofit.probing.oom import is_oom
from autofit.probing.rank_probes import PORT_IS_TAKEN
from autofit.probing.supervise import die_with_parent
from autofit.promotion.checkpoints import delete_own, print_leniently, reason_of
from autofit.promotion.endings import (
    ADDRESS,
    Place,
    forget_unloadable,
    tell_failure,
    tell_unloadable,
    unloadable,
)
from autofit.promotion.interruption import ask_after_signal, listen, received
from autofit.promotion.reports import Following, Leading, Together
from autofit.promotion.server import with_address
from autofit.promotion.start import Start, not_loaded
from autofit.promotion.training import final_of, start_mirror, stop_mirror, watched_of, watchers_of
from autofit.promotion.whereabouts import tell_oom, tell_oom_of_rank
from autofit.recipe.launch import split
from autofit.recipe.secrets import opened
from autofit.watching.events import read_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """What rank 0 decides before the training."""

    checkpoint: Path | None
    step: int
    asked_to_end: bool


def main(request_path: str) -> int:
    """Train until the end, a stop request, or an error, which this rank tells in the folder. The exit code."""
    request = read_json(Path(request_path))
    assert request is not None
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    folder, output = Path(str(request["folder"])), Path(str(request["output_dir"]))
    launch, values = split(with_address(opened(cast("dict[str, object]", request["values"]))))
    try:
        device, address = str(request["device"]), os.environ[ADDRESS]
        with _mirrored(request, folder, rank), as_rank(launch, rank=rank, port=port, device=device, address=address):
            _train({**request, "values": values}, folder, output)
    except dist.DistNetworkError:
        traceback.print_exc()
        return PORT_IS_TAKEN
    except Exception as error:
        if is_oom(error):  # the job goes on with a setting that needs less
            tell_oom(folder, output, error, rank=rank)
            return 1
        traceback.print_exc()
        with contextlib.suppress(EnvironmentFault):  # a full disk
            tell_failure(folder, rank, reason_of(error, output))
        return 1
    return 0


def _train(request: Mapping[str, Any], folder: Path, output: Path) -> None:
    began = time.monotonic()
    run = load(request["trainer"]).build(request["values"], Task(device=request["device"], output=output))
    together = Together()
    place = Place(folder, together.rank)
    start = Start(folder, output, unloadable=unloadable(folder)) if together.rank == 0 else None
    beginning: _Beginning = together.decided(lambda: _beginning(start, run))
    if beginning.asked_to_end:
        return
    report = _report(request, folder, run, start, beginning.step)
    report.joins(together, place)
    with _errors_told(folder, output, run, report, beginning.checkpoint):
        run.train(report, resume_from=beginning.checkpoint)
    if report.stopped:
        return
    run.save_model(output)
    if isinstance(report, Leading):
        report.ends()
        final = final_of(read_progress(folder), report.steps, output, time.monotonic() - began)
        together.wait()  # until every rank has saved its part
        write_json(folder / "final.json", final)
        delete_own(output)
    else:
        together.wait()


def _beginning(start: Start | None, run: Run) -> _Beginning:
    assert start is not None
    start.choose(run)
    return _Beginning(checkpoint=start.checkpoint, step=start.step, asked_to_end=received() is not None)


def _report(
    request: Mapping[str, Any], folder: Path, run: Run, start: Start | None, first_step: int
) -> Leading | Following:
    if start is None:
        return Following(first_step)
    return Leading(run, watched_of(request, folder, run, first_step), [start, *watchers_of(request)])


@contextmanager
def _errors_told(
    folder: Path, output: Path, run: Run, report: Leading | Following, checkpoint: Path | None
) -> Iterator[None]:
    """Context of a training: an OOM is told with the rank, a checkpoint that cannot be loaded by its name."""
    try:
        yield
    except Exception as error:
        passed = None if report.began else not_loaded(checkpoint, error)
        if is_oom(error):
            traceback.print_exc()
            tell_oom_of_rank(folder, output, error, run, report)
        elif passed is not None:
            tell_unloadable(folder, passed.checkpoint, passed.reason)
        raise
    else:
        forget_unloadable(folder)


@contextmanager
def _mirrored(request: dict[str, Any], folder: Path, rank: int) -> Iterator[None]:
    """Context in which rank 0 has a mirror to MLflow."""
    mirror = start_mirror(request, folder) if rank == 0 else None
    try:
        yield
    finally:
        stop_mirror(mirror)


def _leave(code: int) -> None:
    """End this process at once: after a failure, leaving the process group would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent()
    listen(lambda: ask_after_signal(Path(sys.argv[1]).parent))
    print_leniently()
    _leave(main(sys.argv[1]))
