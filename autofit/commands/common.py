"""Common parts of several commands: messages to the user, a bar during long steps, and options."""

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from autofit.errors import AutofitError, ConfigError, printable, quoted, told, visible
from autofit.files import cache_folder, read_json, write_json
from autofit.lines import on_terminal, wrapped
from autofit.tuning.storage import storage_option
from autofit.units import format_seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from autofit.api import Check, Estimate
    from autofit.api.events import Event
    from autofit.api.tables import Shown
    from autofit.cluster.scheduler import Executor
    from autofit.plugin.registry import Looked


class LaunchArguments(TypedDict):
    """Arguments of the API that say the launch."""

    accelerate_config: str | None
    num_processes: int | None
    gpus: int | None


DONE, NOTHING_FITS, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def say(text: str, *, label: int = 0) -> None:
    """Print to stderr, in one write: simulations beside each other say theirs from threads.

    With a `label` of so many columns the lines after the first stand under what follows it.
    """
    with SCREEN:
        sys.stderr.write(on_terminal(text, is_terminal=sys.stderr.isatty(), label=label) + "\n")
        sys.stderr.flush()


def show_line(text: str) -> None:
    """Print to stdout, with marked options as they are typed."""
    print(on_terminal(told(text, str), is_terminal=sys.stdout.isatty()))


def show_fact(name: str, text: str) -> None:
    """Print `name: text`, the names of several such lines one under another."""
    label = f"{name:>16}: "
    print(on_terminal(label + visible(text), is_terminal=sys.stdout.isatty(), label=len(label)))


def stranger_in(packages: Path) -> str | None:
    """Advice on PyPI's `autofit`, another project that writes into our folder, if it is installed.

    Ours is installed as `autofit-llm`. Looking at the names in the folder `packages` takes no import.
    """
    found = next(packages.glob("autofit-[0-9]*.dist-info"), None)
    if found is None:
        return None
    name = found.name.removesuffix(".dist-info").replace("-", " ", 1)
    return (
        f"{name} is installed over this program's files (on PyPI that name is another project's; this one is "
        "autofit-llm): pip uninstall autofit, then install this one again"
    )


def hears(event: "Event") -> None:
    """Print an event; one of an interrupt makes later interrupts ignored, while the work stops."""
    if event.interrupted:
        ignore_interrupts()
    said = str(event)
    say(said, label=len(said) - len(event.text) if event.label else 0)


def streams(event: "Event") -> None:
    """Print an event as a JSON object on a line of stdout; after an interrupt, later ones are ignored."""
    if event.interrupted:
        ignore_interrupts()
    if event.trial is not None:
        stream("trial", {**event.trial.to_dict(), "text": event.text})
    else:
        stream("note", {"label": event.label, "text": event.text})


def stream(kind: str, content: Mapping[str, object]) -> None:
    """Print a JSON object on a line of stdout at once, in one write: several threads may; "is" names its kind."""
    sys.stdout.write(json.dumps({"is": kind, **content}) + "\n")
    sys.stdout.flush()


def show_lines(lines: Sequence[str]) -> None:
    """Print the sentences of a result whose head was shown before."""
    for line in lines:
        show_line(line)
    sys.stdout.flush()


def ended(found: "Check | Estimate", *, as_json: bool) -> int:
    """Print the lines after the verdict, or the whole as JSON; the exit code."""
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show_lines(found.advice_parts())
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.fits else NOTHING_FITS


def show(result: "Shown") -> None:
    """Print the tables and sentences of a result."""
    show_parts(result.parts())


def show_parts(parts: Iterable["Table | str"]) -> None:
    """Print tables and sentences; a table is as wide as the terminal."""
    from rich.console import Console

    from autofit.api.tables import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        if isinstance(part, str):
            show_line(part)
        else:
            console.print(part, crop=False)
    sys.stdout.flush()  # before anything else that takes long


def show_found(found: "Shown", *, as_json: bool) -> None:
    """Print a result: as one JSON object, or as tables and sentences."""
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show(found)


def dir_option(folder: Path) -> str:
    """Options with which a proposed command finds the studies of `folder`."""
    where = "" if folder == Path("autofit-studies") else f" --dir {folder}"
    return where + storage_option(folder)


def settings(given: Sequence[str]) -> dict[str, object]:
    """{key: value} of `--set key=value` options, each value read as YAML; of a key given twice the last one counts.

    A name in capitals is a variable of the recipe's `env`, as verdicts and searches name it.
    """
    from autofit.recipe.yaml_file import parse_yaml

    changes: dict[str, object] = {}
    for text in given:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set takes key=value, for example --set lora_r=8; got {quoted(text)}")
        try:
            changes[f"env.{key}" if key.isupper() and "." not in key else key] = parse_yaml(value)
        except ConfigError as error:
            raise ConfigError(f"--set {printable(key, 80)}: {error}") from error
    return changes


def look_early(options: argparse.Namespace, *, device: str) -> "Looked":
    """Raise ConfigError for a key, a value or a file of the recipe that is found wrong in milliseconds.

    The API finds the same, after its imports. `device` is "sim:" for a simulated card.
    """
    from autofit.frontends.writing import changed, source_of
    from autofit.plugin.registry import check_source_early
    from autofit.recipe.launching import launch_options

    _, launch = launch_options(
        gpu=getattr(options, "gpu", None), accelerate_config=options.accelerate_config,
        num_processes=options.num_processes, gpus=getattr(options, "gpus", None),
    )  # fmt: skip
    own = changed(
        source_of(options.recipe, ranks=launch.num_processes), settings(getattr(options, "set", ())),
    )  # fmt: skip
    with own.in_its_words():
        return check_source_early(
            own.source, trainer=options.trainer, device=device, changes=own.changes,
            prompt_tokens=options.prompt_tokens or own.source.prompt_tokens, launch=launch,
        )  # fmt: skip


def begin_server() -> None:
    """Let the libraries of the trainers be imported in their own process, while this one imports the rest."""
    from autofit.probing.fork_server import begin

    begin()


def executor_option(options: argparse.Namespace) -> "Executor":
    """The executor of jobs from the options and the executor.yaml of the working directory.

    Raises EnvironmentFault if that is Slurm, and its commands are missing.
    """
    from autofit.cluster.scheduler import check_commands, read_executor

    names = (
        "partition", "account", "qos", "constraint", "mem", "gpus_per_node", "cpus_per_task", "nodes", "time", "setup",
        "probes_per_job",
    )  # fmt: skip
    more: dict[str, object] = {}
    for text in options.slurm:
        key, equals, value = text.removeprefix("--").partition("=")
        more[key] = value if equals else True
    given = {name: getattr(options, name, None) for name in names}
    executor = read_executor(options.executor, {**given, "slurm": more or None}, Path.cwd())
    check_commands(executor)
    return executor


def terminate_like_interrupt() -> None:
    """SIGTERM, and the signals with which Slurm warns, end a command the way Ctrl-C does."""

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _interrupt)
    lose_no_interrupt()


_came = threading.Event()  # an interrupt


def _interrupt(*_: object) -> None:
    _came.set()
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """True if an interrupt came since the command began; the import of a C library may raise another error for it."""
    return _came.is_set()


def lose_no_interrupt() -> None:
    """Let Ctrl-C be noted, and sent once more where Python drops it: in a destructor or a weak reference's callback."""
    _came.clear()
    in_main = threading.current_thread() is threading.main_thread()  # others may set no handler
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if not isinstance(sys.unraisablehook, _Again):
        sys.unraisablehook = _Again(sys.unraisablehook)


@dataclass(frozen=True, slots=True)
class _Again:
    """In the place of the hook `show`: sends an interrupt once more, and lets the hook tell of all else."""

    show: Callable[["sys.UnraisableHookArgs"], object]

    def __call__(self, what: "sys.UnraisableHookArgs") -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):  # here a signal would be dropped as well
            ends = callable(signal.getsignal(signal.SIGTERM))  # SIGINT may be ignored then, as in the background
            number = signal.SIGTERM if ends else signal.SIGINT
            threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        else:
            self.show(what)


def ignore_interrupts() -> None:
    """Ignore further interrupts, while interrupted work stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def launch_arguments(options: argparse.Namespace) -> LaunchArguments:
    """The options of the launch, as arguments of the API."""
    return {
        "accelerate_config": options.accelerate_config, "num_processes": options.num_processes, "gpus": options.gpus
    }  # fmt: skip


# -- a line on a terminal while a step takes long ---------------------------------------------------------------------
# How long a step takes is known from the last time: the seconds of each are kept (`autofit.files.cache_folder`). A
# step that has a limit is said to end by then.

SCREEN = threading.RLock()  # held while a line is written: one that meets the bar's first drawing would join it
_CELLS = 20  # of a bar
_EVERY_S = 0.25
_KEPT = 200  # steps whose seconds are kept
_NOTED_S = 1.0  # a step that took less has no bar worth keeping


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStep:
    """A step at work: its words, and how long it may take, or took the last time."""

    words: str
    began_s: float
    most_s: float | None = None
    last_s: float | None = None

    def line(self, now_s: float, *, width: int) -> str:
        """`[#####...............] simulating the recipe, 3 s, about 8 s left`; a narrow terminal omits the bar."""
        spent_s = max(0.0, now_s - self.began_s)
        whole_s = self.most_s or self.last_s
        left = ""
        if whole_s is not None and whole_s > spent_s:
            left = f", {'at most' if self.most_s else 'about'} {_round(whole_s - spent_s)} left"
        elif self.last_s is not None and self.most_s is None:
            left = f", more than the last {_round(self.last_s)}"
        text = f"{self.words}, {_round(spent_s)}{left}"
        bar = f"[{self._cells(spent_s, whole_s)}] "
        return bar + text if len(bar) + len(text) <= width else text

    @staticmethod
    def _cells(spent_s: float, whole_s: float | None) -> str:
        """The part that is done; if unknown, a mark that moves."""
        if whole_s:
            done = min(_CELLS - 1, int(_CELLS * spent_s / whole_s))
            return "#" * done + "." * (_CELLS - done)
        at = int(spent_s / _EVERY_S) % _CELLS
        return "." * at + "#" + "." * (_CELLS - 1 - at)


class Bar:
    """The line of the steps of one command about `what`; hidden unless stderr is a terminal."""

    def __init__(self, command: str, what: str, *, shown: bool = True) -> None:
        self._of = f"{command} {what}"
        self._shown = shown
        self._step: ProgressStep | None = None
        self._live: Live | None = None
        self._told: list[str] = []  # above the line, until the step ends

    def begin(self, words: str, *, most_s: float | None = None) -> None:
        """The step at work from now on; the one before it has ended."""
        self.end()
        if not self._shown:
            return
        last_s = paces().get(f"{self._of} {words}")
        self._step = ProgressStep(words=words, began_s=time.monotonic(), most_s=most_s, last_s=last_s)
        self._start()

    def tell(self, text: str) -> bool:
        """Show `text` above the line until the step ends, with the earlier texts; False if there is no such line."""
        if self._live is not None:
            self._told.append(text)
        return self._live is not None

    def end(self) -> None:
        """End the step: its seconds are kept, and the line is gone with the texts above it."""
        self._stop()
        step, self._step = self._step, None
        spent_s = 0.0 if step is None else time.monotonic() - step.began_s
        if step is not None and step.most_s is None and spent_s >= _NOTED_S:
            keep_pace(f"{self._of} {step.words}", spent_s)

    def close(self) -> None:
        """End the command, perhaps before its step, whose time is then discarded."""
        self._stop()
        self._step = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        if not console.is_terminal or console.is_dumb_terminal:
            return
        self._live = Live(
            get_renderable=lambda: self._now(console.width, console.height), console=console,
            refresh_per_second=1 / _EVERY_S, transient=True, redirect_stdout=False,
        )  # fmt: skip
        with SCREEN:
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with SCREEN:
                live.stop()
        self._told.clear()

    def _now(self, width: int, height: int) -> "Text":
        from rich.text import Text

        line = "" if self._step is None else self._step.line(time.monotonic(), width=width - 1)
        told = [part for text in self._told for part in wrapped(text, width)]
        return Text("\n".join([*told[-max(1, height - 2) :], line]), no_wrap=True, overflow="ellipsis")


def paces(path: Path | None = None) -> dict[str, float]:
    """{step: seconds that it took the last time}."""
    try:
        found = read_json(path or _path()) or {}
    except (AutofitError, OSError, ValueError):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def keep_pace(name: str, spent_s: float, path: Path | None = None) -> None:
    """Keep the seconds of a step, if the folder is writable."""
    known = paces(path)
    known.pop(name, None)
    kept = dict([*known.items(), (name, round(spent_s, 1))][-_KEPT:])
    with contextlib.suppress(AutofitError, OSError):
        write_json(path or _path(), kept)


def _path() -> Path:
    return cache_folder() / "paces.json"


def _round(seconds: float) -> str:
    """Whole seconds below a minute: tenths would flicker."""
    return f"{seconds:.0f} s" if seconds < 60 else format_seconds(seconds)


def words_of(what: Sequence[object]) -> str:
    """The name of a command's subject, by its recipe and card, as the steps are kept under it."""
    return " ".join(str(one) for one in what if one is not None)
