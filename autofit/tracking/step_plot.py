"""The picture of a trial's step as files, for MLflow: the winner's in the study's run, a full run's in its own."""

from pathlib import Path

from autofit.forecast.step_picture import memory_figure
from autofit.probing.launch import Attempts
from autofit.probing.result import ProbeResult
from autofit.tuning.frontier import Trial
from autofit.tuning.record import StudyRecord

NAMES = ("step.png", "step.svg")


def write_step(trial: Trial, record: StudyRecord, *, probes: Path, into: Path) -> list[Path]:
    """The files of the picture in the folder `into`; [] where no phase of the trial's step is known.

    The study keeps the peaks of each phase; how they came is in the answer in the study's folder of `probes`.
    """
    result = _with_course(trial, probes)
    if result is None or not result.phases:
        return []
    figure = memory_figure(result, record.target_bytes, what=f"trial {trial.number}")
    found = [into / name for name in NAMES]
    for path in found:
        figure.savefig(path, dpi=110)
    return found


def _with_course(trial: Trial, probes: Path) -> ProbeResult | None:
    own = trial.before_confirmation.result
    for folder in reversed(Attempts(home=probes, name=f"trial-{trial.number:04d}").folders()):
        answer = ProbeResult.read(folder / "answer.json")
        if answer is not None and own is not None and answer.device_used_bytes == own.device_used_bytes:
            return answer
    return own
