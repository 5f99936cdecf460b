"""The command line: argv in, tables out. The only module that prints or exits.

Heavy imports happen inside the commands, so that `autofit --help` answers at once.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from autofit.arguments import parser
from autofit.errors import AutofitError, ConfigError, EnvironmentFault
from autofit.units import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from autofit.probing.warm import WarmServer
    from autofit.recipe import Recipe, TrainerName
    from autofit.tuning.frontier import Trial
    from autofit.tuning.search import Plan, Progress, Search

T = TypeVar("T")
DONE, NOTHING_FITS, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (0 done, 1 nothing fits, 2 wrong usage, 130 interrupted)."""
    try:
        options = parser().parse_args(argv)
        return _COMMANDS[options.command](options)
    except AutofitError as error:
        _say(f"autofit: {error}")
        return WRONG_USAGE
    except KeyboardInterrupt:
        _say("autofit: interrupted; run the same command again to go on")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG_USAGE
    except OSError as error:
        _say(f"autofit: {_os_error(error)}")
        return WRONG_USAGE


def _os_error(error: OSError) -> str:
    from autofit.files import cannot_write

    return cannot_write(Path(str(error.filename or ".")), error)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be 1 or more; got {value}")


def _given(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """The value of an option, or None when it was not given; an error names the option."""
    try:
        return None if text is None else parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


# -- search -----------------------------------------------------------------------------------------------------------


def _search(options: argparse.Namespace) -> int:
    from autofit.tuning.search import Search, open_study
    from autofit.tuning.study import exclusive

    _check_search(options)
    _terminate_like_interrupt()
    folder: Path = options.dir
    server = _warm(folder)
    try:
        plan, scratch = _plan(options, server)
        for name, text in plan.recipe.describe():
            _say(f"{name:>16}: {text}")
        with exclusive(folder / "locks", plan.name), _mirror(options, plan.name):
            study = open_study(plan)
            _keep_worst_case(scratch, plan.probes_folder)
            _say(f"{'study':>16}: {plan.name} (in {folder}), {len(plan.space.allowed())} candidates of tier "
                 f"{plan.space.allow} or above")  # fmt: skip
            search = Search(plan, study, warm_socket=server.socket_path)
            with _display(search, plan):
                try:
                    stopped = search.run()
                except KeyboardInterrupt:
                    _ignore_interrupts()
                    search.interrupt()
                    stopped = "interrupted"
        return _show_result(options, folder, plan.name, stopped)
    finally:
        server.close()


def _dir_option(folder: Path) -> str:
    """What a command that is proposed needs to find `folder`."""
    return "" if folder == Path("autofit-studies") else f" --dir {folder}"


def _check_search(options: argparse.Namespace) -> None:
    if options.demo and options.recipe is not None:
        raise ConfigError(f"give a recipe or --demo, not both; got {options.recipe} and --demo")
    if not options.demo and options.recipe is None:
        raise ConfigError("a search needs a recipe: give the path of a YAML file, or --demo")
    for name in ("trials", "plateau", "measured_steps", "parallel", "world_size"):
        _at_least_one("--" + name.replace("_", "-"), getattr(options, name))
    if options.study is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", options.study):
        raise ConfigError(f"--study names a folder: a letter or digit, then also '.', '_', '-'; got {options.study!r}")
    if options.world_size > 1:
        raise ConfigError(f"probes run on one GPU so far, so --world-size must be 1; got {options.world_size}")


def _warm(folder: Path) -> "WarmServer":
    from autofit.probing.warm import WarmServer

    try:
        return WarmServer(folder)
    except FileExistsError as error:
        raise ConfigError(f"--dir {folder} must be a folder, and is a file") from error


def _plan(options: argparse.Namespace, server: "WarmServer") -> "tuple[Plan, Path]":
    from autofit.hardware import choose_device, choose_target, gpus
    from autofit.space import Space, load_space
    from autofit.tuning.search import Plan

    budget = _given("--time-budget", options.time_budget, parse_seconds)
    deadline_s = _given("--deadline", options.deadline, parse_seconds) or 0
    asked = "cpu" if options.demo and options.device == "auto" and options.gpu is None else options.device
    device = choose_device(asked, options.gpu)
    target = choose_target(_given("--target-vram", options.target_vram, parse_bytes), device)
    headroom = 0 if device == "cpu" else target // 50
    if options.headroom is not None:
        headroom = 0 if options.headroom in ("0", "0B") else _given("--headroom", options.headroom, parse_bytes) or 0
    if headroom >= target:
        raise ConfigError(
            f"--headroom must be below the target of {format_bytes(target)}; got {format_bytes(headroom)}"
        )
    path = _demo_recipe() if options.demo else options.recipe
    trainer = _trainer(options, path)
    knobs = load_space(options.space, trainer=trainer)
    scratch = options.dir / "inspections" / f"{path.stem}-{os.getpid()}"
    recipe = _prepared(path, options, device, scratch, server)
    space = Space.of(recipe, knobs, allow=options.allow, device=device)
    _check_target(recipe, target - headroom, options.allow)
    open_ended = budget is not None or options.plateau is not None
    plan = Plan(
        recipe=recipe, space=space, folder=options.dir, device=device, target_bytes=target, headroom_bytes=headroom,
        study_name=options.study, max_trials=options.trials or (None if open_ended else 6 if options.demo else 12),
        budget_s=budget,
        plateau_trials=options.plateau, parallel=options.parallel or (len(gpus()) if device == "cuda" else 1),
        measured_steps=options.measured_steps, deadline_s=deadline_s, seed=options.seed,
    )  # fmt: skip
    return plan, scratch


def _keep_worst_case(scratch: Path, folder: Path) -> None:
    """Move the worst case from where the recipe was read to the study's probes, and drop the rest."""
    from autofit.probing.prepare import worst_case_path

    folder.mkdir(parents=True, exist_ok=True)
    if not worst_case_path(folder).exists():  # the same study has the same one
        shutil.rmtree(folder / "worst_row", ignore_errors=True)
        os.replace(scratch / "worst_row", folder / "worst_row")
        os.replace(worst_case_path(scratch), worst_case_path(folder))
    _remove(scratch)


def _prepared(path: Path, options: argparse.Namespace, device: str, scratch: Path, server: "WarmServer") -> "Recipe":
    from autofit.probing.prepare import prepare

    trainer = _trainer(options, path)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        recipe = prepare(
            path, trainer=trainer, device=device, folder=scratch, server=server,
            world_size=options.world_size,
        )  # fmt: skip
    except AutofitError:
        _remove(scratch)
        raise
    return recipe


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _trainer(options: argparse.Namespace, path: Path) -> "TrainerName":
    """The trainer that was asked for, or the one whose keys the recipe has."""
    from autofit.recipe import read_yaml_mapping
    from autofit.trainer_keys import trainer_of

    return trainer_of(read_yaml_mapping(path, what="recipe"), options.trainer)


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

    cache = Path(os.environ.get("AUTOFIT_CACHE") or Path.home() / ".cache" / "autofit")
    return prepare_smollm2(cache, progress=_say)


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
            [sys.executable, "-m", "autofit.tracking", str(options.dir), study],
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
            _say(f"MLflow is behind (see {log_path}); `autofit sync` brings it up to date")


def _show_result(options: argparse.Namespace, folder: Path, name: str, stopped: str) -> int:
    from autofit.tables import front_table, to_json
    from autofit.tuning.frontier import why, winner
    from autofit.tuning.search import BROKEN
    from autofit.tuning.study import load_study, trials_of

    study = load_study(folder, name)
    trials, attrs = trials_of(study), study.user_attrs
    target = cast("int | None", attrs.get("target_bytes"))
    sentence = why(trials, attrs["resolved"], target)
    screened = int(attrs.get("screened", 0))
    if stopped == BROKEN:
        raise EnvironmentFault(f"{sentence}; mend that and run the same command again")
    if not options.json:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 150
        Console(width=width).print(front_table(trials, attrs["resolved"], target))
        print(f"{sentence}.")
        print(f"Stopped because {stopped}." if stopped else "", end="\n" if stopped else "")
        if winner(trials) is not None:
            where = _dir_option(folder)
            print(f"Next: autofit promote best{where}   then: autofit ui{where}")
    else:
        content = to_json(
            trials, study=name, target_bytes=target, screened=screened, stopped=stopped, sentence=sentence
        )
        print(json.dumps(content))
    if stopped == "interrupted":
        return INTERRUPTED
    return DONE if winner(trials) is not None else NOTHING_FITS


@contextlib.contextmanager
def _display(search: "Search", plan: "Plan") -> Iterator[None]:
    """A live line on a terminal, plain lines elsewhere; both on stderr."""
    from rich.console import Console
    from rich.text import Text

    from autofit.tables import trial_line

    console = Console(stderr=True)
    resolved = plan.recipe.resolved

    def told(trial: "Trial") -> None:
        line = trial_line(trial, resolved)
        if console.is_terminal:
            console.print(line, markup=False, highlight=False)
        else:
            _say(line)

    search.on_told = told
    if not console.is_terminal:
        yield
        return
    with console.status("starting") as status:
        search.on_progress = lambda progress: status.update(Text(_progress_text(progress, plan)))
        yield


def _progress_text(progress: "Progress", plan: "Plan") -> str:
    from autofit.tuning.frontier import describe_changes

    done = sum(t.result is not None for t in progress.trials)
    now = ", ".join(f"trial {t.number}: {describe_changes(t.changes, plan.recipe.resolved)}" for t in progress.probing)
    best = "none yet"
    if progress.best is not None and progress.best.step_s is not None:
        best = f"trial {progress.best.number} at {format_seconds(progress.best.step_s)} a step"
    left = "" if progress.left_s is None else f", about {format_seconds(progress.left_s)} left"
    return f"{done} done, probing {now or '...'} | best {best} | {format_seconds(progress.elapsed_s)}{left}"


def _terminate_like_interrupt() -> None:
    """SIGTERM ends a search the way Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _say("stopping the probe at work; its trial waits for the next run")


# -- estimate ---------------------------------------------------------------------------------------------------------


def _estimate(options: argparse.Namespace) -> int:
    import tempfile

    from autofit.estimate import estimate, estimate_json, estimate_table, plot_phases
    from autofit.hardware import choose_device, choose_target
    from autofit.probing.prepare import worst_case_path
    from autofit.probing.warm import WarmServer

    device = choose_device("sim", options.gpu)
    capacity = choose_target(_given("--target-vram", options.target_vram, parse_bytes), device)
    deadline_s = _given("--deadline", options.deadline, parse_seconds) or 0
    options.world_size = 1
    with tempfile.TemporaryDirectory(prefix="autofit-estimate-") as temporary:
        folder = Path(temporary)
        server = WarmServer(folder)
        try:
            recipe = _prepared(options.recipe, options, device, folder / "inspection", server)
            recipe.check()
            result = estimate(
                recipe, device, capacity, folder=folder / "probe", server=server,
                worst_case=worst_case_path(folder / "inspection"), deadline_s=deadline_s,
            )  # fmt: skip
        finally:
            server.close()
    if options.plot is not None:
        plot_phases(result, capacity, options.plot)
    if options.json:
        print(json.dumps(estimate_json(result, capacity)))
    else:
        from rich.console import Console

        table, sentence = estimate_table(result, capacity)
        Console(width=None if sys.stdout.isatty() else 150).print(table)
        print(sentence)
    return DONE if estimate_json(result, capacity)["fits"] else NOTHING_FITS


# -- the other commands -----------------------------------------------------------------------------------------------


def _report(options: argparse.Namespace) -> int:
    from autofit.tuning.study import load_study

    return _show_result(options, options.dir, load_study(options.dir, options.study).study_name, "")


def _promote(options: argparse.Namespace) -> int:
    from autofit.files import write_atomically
    from autofit.promotion import follow, launch, model_path, plan_promotion, stop
    from autofit.tuning.study import exclusive

    _terminate_like_interrupt()
    promotion = plan_promotion(options.dir, study_name=options.study, trial=options.trial)
    if options.out is not None:
        write_atomically(options.out, promotion.yaml_path.read_text(encoding="utf-8"))
    _say(f"wrote {options.out or promotion.yaml_path}")
    if options.write_only:
        return DONE
    with exclusive(options.dir / "locks", promotion.folder.name):
        how = launch(promotion, study_folder=options.dir, restart=options.restart)
        _say(f"trial {promotion.trial.number} of {promotion.study}: the run is {how}")
        try:
            final = follow(promotion, lambda line: _say(_step_line(line)))
        except KeyboardInterrupt:
            _say("saving a checkpoint after the step at work; run the same command again to resume")
            stop(promotion)
            return INTERRUPTED
    if options.json:
        print(json.dumps({"study": promotion.study, "trial": promotion.trial.number, **final}))
        return DONE
    print(f"{final['steps']} steps done, final loss {_number(final['final_loss'])}")
    if final["first_reward"] is not None:
        window = final["reward_window_steps"]
        print(f"mean reward {_number(final['first_reward'])} over the first {window} step(s), "
              f"{_number(final['last_reward'])} over the last {window}")  # fmt: skip
    print(f"the model is in {model_path(final)}; its run is in MLflow: autofit ui{_dir_option(options.dir)}")
    return DONE


def _step_line(line: dict[str, object]) -> str:
    shown = {
        "reward": "reward", "kl": "kl", "loss": "loss", "completions/mean_length": "length",
        "completions/clipped_ratio": "clipped", "mean_token_accuracy": "token accuracy",
        "rewards/accuracies": "pair accuracy", "accuracy": "pair accuracy", "completions_per_s": "completions/s",
        "samples_per_s": "samples/s",
    }  # fmt: skip
    parts = [f"{name} {_number(line[key])}" for key, name in shown.items() if key in line]
    return f"step {line['step']}/{line['max_steps']}: {', '.join(parts)}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _ui(options: argparse.Namespace) -> int:
    from autofit.tracking import sync
    from autofit.ui import compare_path, server

    _terminate_like_interrupt()
    if options.port is not None and not 0 < options.port < 65536:
        raise ConfigError(f"--port must be between 1 and 65535; got {options.port}")
    sync(options.dir, options.study)
    path = compare_path(options.dir, options.study)
    try:
        with server(options.dir, port=options.port) as address:
            print(f"MLflow: {address}")
            print(f"compare the front: {address}{path}", flush=True)
            _say("Ctrl-C stops it")
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return DONE


def _sync(options: argparse.Namespace) -> int:
    from autofit.tracking import sync, tracking_uri

    count = sync(options.dir, options.study, rebuild=options.rebuild)
    print(f"{count} finished trials are in MLflow ({tracking_uri(options.dir)})")
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from autofit.hardware import choose_device
    from autofit.probing.warm import WarmServer

    _at_least_one("--world-size", options.world_size)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="autofit-doctor-") as temporary:
        server = WarmServer(Path(temporary))
        try:
            device = choose_device(options.device)
            recipe = _prepared(options.recipe, options, device, Path(temporary) / "inspection", server)
        finally:
            server.close()
    recipe.check()
    for name, text in recipe.describe():
        print(f"{name:>16}: {text}")
    return DONE


_COMMANDS = {
    "search": _search, "estimate": _estimate, "promote": _promote, "ui": _ui, "sync": _sync, "report": _report,
    "doctor": _doctor,
}  # fmt: skip
