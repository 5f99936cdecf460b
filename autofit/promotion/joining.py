"""A point of the front that is known by prediction only, probed as a trial of its study: then it can be promoted."""

from collections.abc import Callable
from pathlib import Path

import optuna

from autofit.cluster.executor import Executor
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import Scratch
from autofit.probing.cluster_launch import launcher_for
from autofit.probing.fork_server import server_for
from autofit.probing.launch import Launcher
from autofit.probing.result import ProbeRequest, ProbeSetup
from autofit.recipe.launch import Launch
from autofit.tuning.frontier import LEANEST, Foreseen, Trial, leanest_foreseen
from autofit.tuning.record import StudyRecord, forget_foreseen, record_of
from autofit.tuning.repeats import Prober
from autofit.tuning.study import begin_foreseen, driving, tell, trials_of
from autofit.units import format_bytes, format_seconds

Say = Callable[[str], None]


def as_a_trial(
    asked: str, study: optuna.Study, folder: Path, *, executor: Executor, say: Say, launcher: Launcher | None = None
) -> str:
    """What to call the trial that `asked` names, once every point that this means has been probed.

    A point known by prediction only becomes a trial: `p1` its own, "leanest" each that is predicted to be the leanest.
    Raises ConfigError for a study whose points cannot be probed, and EnvironmentFault for a probe that was killed.
    """
    while (point := _meant(asked, study)) is not None:
        trial = _probed(point, study, folder, executor=executor, say=say, launcher=launcher)
        if asked != LEANEST:
            return str(trial.number)
    return asked


def _meant(asked: str, study: optuna.Study) -> Foreseen | None:
    """The predicted point that `asked` names; None where it names a trial."""
    points = [point for point in record_of(study).points_ahead if point.name]
    if asked == LEANEST:
        return leanest_foreseen(trials_of(study), points)
    return next((point for point in points if point.name == asked), None)


def _probed(
    point: Foreseen, study: optuna.Study, folder: Path, *, executor: Executor, say: Say, launcher: Launcher | None
) -> Trial:
    home, record = folder / "probes" / study.study_name, record_of(study)
    earlier = _last_request(home)
    with driving(folder, study.study_name), Scratch("promote-") as scratch:
        trial = begin_foreseen(study, point)
        how = "simulated" if record.device.startswith("sim:") else "probed"
        say(
            f"{point.name} is known by prediction only ({format_bytes(point.device_used_bytes)}, "
            f"{format_seconds(point.step_s)} a step), so it is {how} first, as trial {trial.number}"
        )
        server = server_for(scratch) if launcher is None else None
        launcher = launcher or _launcher(record, executor, home)
        try:
            prober = Prober(
                setup=ProbeSetup.of(earlier, server_socket=None if server is None else server.socket_path), home=home,
                values=record.values, launcher=launcher, measured_steps=earlier.measured_steps,
            )  # fmt: skip
            result = prober.probe(trial, f"trial-{trial.number:04d}")
        finally:
            launcher.close()
            if server is not None:
                server.close()
        if result is None:
            raise EnvironmentFault(f"the probe of {point.name} was killed; run the same command again to repeat it")
        tell(study, trial.number, result, target_bytes=record.limit_bytes)
        forget_foreseen(study, point.name)
    found = trials_of(study)[trial.number]
    say(f"trial {found.number}: {_outcome(found)}")
    return found


def _outcome(trial: Trial) -> str:
    if trial.fits and trial.step_s is not None:
        return f"{format_bytes(trial.device_used_bytes or 0)}, {format_seconds(trial.step_s)} a step"
    return f"it does not fit: {trial.status}" if trial.result is None else f"{trial.status}: {trial.result.reason}"


def _last_request(home: Path) -> ProbeRequest:
    """The request of the study's last trial: a point is probed as the trials were."""
    found = sorted(home.glob("trial-*/request.json"))
    if not found:
        raise ConfigError(
            f"a point known by prediction only is probed as the study's trials were, and {home} has none of their "
            "requests any more; run its `autofit search` again"
        )
    return ProbeRequest.read(found[-1])


def _launcher(record: StudyRecord, executor: Executor, home: Path) -> Launcher:
    ranks = Launch.of(record.values).ranks
    return launcher_for(executor, home, device=record.device, card=record.card, cards=ranks)
