"""`autofit search`: from the options to a plan, the search itself and its display."""

import argparse
import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.commands.common import (
    at_least_one,
    check_prompt_tokens,
    describe,
    fork_server,
    given,
    ignore_interrupts,
    prepared,
    remove,
    say,
    terminate_like_interrupt,
)
from autofit.commands.report import show_result
from autofit.errors import ConfigError
from autofit.files import cache_folder
from autofit.recipe.baseline import baseline_path
from autofit.tuning.stop import Stop, StopKind
from autofit.units import format_bytes, format_seconds, parse_bytes, parse_frac, parse_seconds

if TYPE_CHECKING:
    import optuna

    from autofit.forecast.forecast import Forecast
    from autofit.probing.fork_server import ForkServer
    from autofit.recipe.recipe import Recipe
    from autofit.tuning.frontier import Trial
    from autofit.tuning.search import Plan, Progress, Search


def search(options: argparse.Namespace) -> int:
    from autofit.probing.prepare import keep_worst_case
    from autofit.tuning.confirmation import confirm
    from autofit.tuning.search import Search, open_study
    from autofit.tuning.study import exclusive

    _check_search(options)
    terminate_like_interrupt()
    folder: Path = options.dir
    server = fork_server(folder)
    try:
        plan, scratch = _plan(options, server)
        forecast = _forecast(plan, scratch, server)
        plan = replace(plan, predictions=None if forecast is None else forecast.predictions)
        with exclusive(folder / "locks", plan.name), _mirror(options, (study := open_study(plan)).study_name):
            keep_worst_case(scratch, plan.probes_folder)
            remove(scratch)
            say(f"{'study':>16}: {plan.name} (in {folder}), {len(plan.space.allowed())} candidates of tier "
                 f"{plan.space.allow} or above")  # fmt: skip
            search = Search(plan, study, server_socket=server.socket_path)
            try:
                with _display(search, plan):
                    stop = search.run()
                if not options.no_confirm:
                    confirm(plan, study, server_socket=server.socket_path, say=say)
                if plan.device == "cuda":
                    _correct_clock(plan, study, server)
            except KeyboardInterrupt:
                ignore_interrupts()
                search.interrupt()
                stop = Stop(StopKind.INTERRUPTED, "interrupted")
            _keep_sensitivity(options, plan, study, forecast)
        return show_result(options, folder, plan.name, stop)
    finally:
        server.close()


def _check_search(options: argparse.Namespace) -> None:
    if options.demo and options.recipe is not None:
        raise ConfigError(f"give a recipe or --demo, not both; got {options.recipe} and --demo")
    if options.recipe is None and not options.demo and options.device in ("cpu", "cuda"):
        raise ConfigError(
            f"the built-in baseline has made-up prompts and runs on a simulated card; give a recipe or leave --device "
            f"{options.device} out"
        )
    for name in ("trials", "plateau", "measured_steps", "parallel", "world_size", "prompt_tokens"):
        at_least_one("--" + name.replace("_", "-"), getattr(options, name))
    if options.study is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", options.study):
        raise ConfigError(f"--study names a folder: a letter or digit, then also '.', '_', '-'; got {options.study!r}")
    if options.world_size > 1:
        raise ConfigError(f"probes run on one GPU so far, so --world-size must be 1; got {options.world_size}")


def _plan(options: argparse.Namespace, server: "ForkServer") -> "tuple[Plan, Path]":
    from autofit.hardware.hardware import choose_device_and_target
    from autofit.space.space import Space
    from autofit.space.space_file import load_space, space_knobs
    from autofit.tuning.search import Plan

    budget = given("--time-budget", options.time_budget, parse_seconds)
    deadline_s = given("--deadline", options.deadline, parse_seconds) or 0
    asked = options.device
    if asked == "auto" and options.gpu is None:
        asked = "cpu" if options.demo else "auto" if options.recipe is not None else "sim"
    device, target = choose_device_and_target(
        asked, options.gpu, given("--target-vram", options.target_vram, parse_bytes)
    )
    check_prompt_tokens(options, device)
    headroom = 0 if device == "cpu" else target // 50
    if options.headroom is not None:
        headroom = 0 if options.headroom in ("0", "0B") else given("--headroom", options.headroom, parse_bytes) or 0
    if headroom >= target:
        raise ConfigError(
            f"--headroom must be below the target of {format_bytes(target)}; got {format_bytes(headroom)}"
        )
    path = _demo_recipe() if options.demo else options.recipe or baseline_path()
    scratch = options.dir / "inspections" / f"{path.stem}-{os.getpid()}"
    if options.space is not None:
        load_space(options.space, trainer=None)  # a wrong one is said at once
    recipe = prepared(path, options, device, scratch, server)
    for name, text in (*recipe.describe(), ("device", describe(device, target))):
        say(f"{name:>16}: {text}")
    space = Space.of(recipe, space_knobs(recipe, options.space), allow=options.allow, device=device)
    _check_target(recipe, target - headroom, options.allow)
    open_ended = budget is not None or options.plateau is not None
    plan = Plan(
        recipe=recipe, space=space, folder=options.dir, device=device, target_bytes=target, headroom_bytes=headroom,
        study_name=options.study, max_trials=options.trials or (None if open_ended else 6 if options.demo else 12),
        budget_s=budget,
        plateau_trials=options.plateau, sampler=options.sampler, goal=options.goal,
        min_gain_frac=given("--min-gain", options.min_gain, parse_frac) or None,
        parallel=options.parallel or _probes_at_once(device),
        measured_steps=options.measured_steps, deadline_s=deadline_s, seed=options.seed,
    )  # fmt: skip
    return plan, scratch


def _probes_at_once(device: str) -> int:
    """One probe a card; simulated ones share nothing but the processor; on the CPU a second would slow the first."""
    from autofit.hardware.hardware import gpus

    if device.startswith("sim:"):
        return min(4, os.cpu_count() or 1)
    return len(gpus()) if device == "cuda" else 1


def _forecast(plan: "Plan", scratch: Path, server: "ForkServer") -> "Forecast | None":
    """What the simulated card says of every candidate; None on the CPU, or on a card that is not known."""
    import numpy as np

    from autofit.forecast.forecast import Forecaster
    from autofit.hardware.hardware import simulated_twin
    from autofit.probing.prepare import worst_case_path

    device = simulated_twin(plan.device)
    if device is None:
        return None
    began = time.monotonic()
    forecaster = Forecaster(
        device=device, worst_case=worst_case_path(scratch), server=server, scratch=scratch / "forecasts",
        kept=cache_folder() / "forecasts",
    )  # fmt: skip
    try:
        forecast = forecaster.forecast(plan.space)
    except BaseException:
        remove(scratch)
        raise
    predictions = forecast.predictions
    known = int(np.isfinite(predictions.step_s).sum())
    too_large = int((predictions.floor_bytes > (plan.limit_bytes or math.inf)).sum())
    say(f"{'predicted':>16}: {known} of {len(predictions.candidates)} candidates in "
        f"{format_seconds(time.monotonic() - began)}; {too_large} cannot fit")  # fmt: skip
    return forecast


def _keep_sensitivity(
    options: argparse.Namespace, plan: "Plan", study: "optuna.Study", forecast: "Forecast | None"
) -> None:
    """Keep with the study what lies around its winner, for `report`: knobs of every tier, as far as it is known."""
    from autofit.space.space import Space
    from autofit.space.space_file import space_knobs
    from autofit.tuning.frontier import winner
    from autofit.tuning.record import keep_record, record_of
    from autofit.tuning.sensitivity import sensitivity
    from autofit.tuning.study import trials_of

    trials, record = trials_of(study), record_of(study)
    best = winner(trials, **record.rule)
    if best is None:
        return
    knobs = space_knobs(plan.recipe, options.space)
    space = Space.of(plan.recipe, knobs, allow="recipe", device=plan.device)
    kept = sensitivity(
        space, trials, best, limit_bytes=plan.limit_bytes,
        predict=lambda other, tokens: None if forecast is None else forecast.of(space, other, completion_tokens=tokens),
    )  # fmt: skip
    keep_record(study, replace(record, sensitivity=kept))


def _correct_clock(plan: "Plan", study: "optuna.Study", server: "ForkServer") -> None:
    """Correct the clock of the card's simulated twin by the winner's measured seconds, and keep that for the card."""
    from autofit.forecast.estimate import Estimator
    from autofit.hardware import calibration
    from autofit.hardware.hardware import simulated_twin
    from autofit.probing.prepare import worst_case_path
    from autofit.recipe.recipe import merge
    from autofit.tuning.frontier import winner
    from autofit.tuning.record import record_of
    from autofit.tuning.study import trials_of

    device, best = simulated_twin(plan.device), winner(trials_of(study), **record_of(study).rule)
    if device is None or best is None or best.result is None or plan.limit_bytes is None:
        return
    estimator = Estimator(
        recipe=plan.recipe, device=device, capacity_bytes=plan.limit_bytes,
        folder=plan.folder / "calibrations" / plan.name,
        worst_case=worst_case_path(plan.probes_folder), server=server, deadline_s=plan.deadline_s,
    )  # fmt: skip
    predicted = estimator.probe(merge(plan.recipe.values, best.changes))
    if calibration.fit_card(device, predicted=predicted, measured=best.result) is not None:
        say(f"{'calibrated':>16}: the clock of {device} by this search's winner")


def _check_target(recipe: "Recipe", limit_bytes: int, allow: str) -> None:
    """Refuse a target that not even the weights fit into, quantised to 4 bits where the user allows that."""
    weights, parameters = recipe.weights_bytes, recipe.model_parameters
    if weights is None or parameters is None:
        return
    least = min(weights, int(parameters * 0.53)) if allow == "recipe" and recipe.uses_lora else weights
    if least > limit_bytes:
        raise ConfigError(
            f"--target-vram less the headroom must hold at least the model's weights of {format_bytes(least)} "
            f"(dtype {recipe.resolved.get('dtype')}); got {format_bytes(limit_bytes)}; raise it or change dtype"
        )


def _demo_recipe() -> Path:
    from autofit.demo import prepare_smollm2

    return prepare_smollm2(cache_folder(), progress=say)


@contextlib.contextmanager
def _mirror(options: argparse.Namespace, study: str) -> Iterator[None]:
    """MLflow's mirror in a process of its own; a slow or absent MLflow costs the search at most 20 s at its end."""
    import subprocess

    if options.no_mlflow:
        yield
        return
    log_path: Path = options.dir / "mlflow.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autofit.tracking.study_mirror", str(options.dir), study],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            say(f"MLflow is behind (see {log_path}); `autofit sync` brings it up to date")


@contextlib.contextmanager
def _display(search: "Search", plan: "Plan") -> Iterator[None]:
    """A live line on a terminal, plain lines elsewhere; both on stderr."""
    from rich.console import Console
    from rich.text import Text

    from autofit.commands.tables import trial_line

    console = Console(stderr=True)
    resolved = plan.recipe.resolved

    def told(trial: "Trial") -> None:
        line = trial_line(trial, resolved)
        if console.is_terminal:
            console.print(line, markup=False, highlight=False)
        else:
            say(line)

    search.on_told = told
    if not console.is_terminal:
        yield
        return
    with console.status("starting") as status:
        search.on_progress = lambda progress: status.update(Text(_progress_text(progress, plan)))
        yield


def _progress_text(progress: "Progress", plan: "Plan") -> str:
    from autofit.space.describe import describe_changes

    done = sum(t.result is not None for t in progress.trials)
    now = ", ".join(f"trial {t.number}: {describe_changes(t.changes, plan.recipe.resolved)}" for t in progress.probing)
    best = "none yet"
    if progress.best is not None and progress.best.step_s is not None:
        best = f"trial {progress.best.number} at {format_seconds(progress.best.step_s)} a step"
    left = "" if progress.left_s is None else f", about {format_seconds(progress.left_s)} left"
    return f"{done} done, probing {now or '...'} | best {best} | {format_seconds(progress.elapsed_s)}{left}"
