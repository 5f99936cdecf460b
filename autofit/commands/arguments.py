"""The options of every command. Its imports are light, so that `autofit --help` answers at once."""

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autofit import __version__
from autofit.commands.help import SHELLS, columns, epilog, folded, overview
from autofit.errors import ConfigError, nearest
from autofit.recipe.profile import TRAINERS
from autofit.recipe.secrets import without_secrets

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_UNKNOWN = "unrecognized arguments: "
_MACHINES = ("nodes", "nnodes", "num_nodes", "machines", "num_machines")  # as launchers say them
_NO_COMMAND = re.compile(r"argument COMMAND: invalid choice: '([^']*)'")
_SHARED: dict[str, dict[str, Any]] = {  # what several commands take, and mean the same by
    "trial": {"metavar": "TRIAL", "help": "a trial's number, `best`, or `leanest`: the least memory on the front"},
    "--study": {"help": "name of the study (default: the one used last)"},
    "--no-mlflow": {"action": "store_true", "help": "do not mirror trials to MLflow while searching"},
    "--json": {"action": "store_true", "help": "print one JSON object, last on stdout"},
}
_FILES = (".yaml", ".yml", ".json", ".sh", ".bash", ".py", ".ipynb", ".txt")  # names of files, and of no command
_OPEN_STUDIES = ("search", "promote", "verify", "report", "studies", "sync", "ui", "monitor", "run", "export")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with the nearest valid option in place of the usage text."""

    takes_command = False  # as `file` and `words`, which are all that stands behind it; options may follow a file

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if not self.takes_command or not found.words:
            return found, unknown
        if Path(found.file).suffix not in _FILES and found.words[0].partition("=")[0] not in self._options():
            return found, unknown
        again, unknown = super().parse_known_args([*found.words, "--", str(found.file)], found)
        return again, [*unknown, *again.words]

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()
            wrong = [word.partition("=")[0] for word in words if word.startswith("-")]
            hint = nearest(wrong[0], self._options()) if wrong else ""
            if wrong and wrong[0].strip("-").replace("-", "_") in _MACHINES and "--gpu" in self._options():
                hint = "; --gpu 2x8xh100 says two machines of eight cards"
            message = f"{_UNKNOWN}{' '.join(wrong or words)}"  # what stands after an option may be a password
        if (no_command := _NO_COMMAND.match(message)) is not None:
            hint = nearest(no_command[1], list(self._commands().choices))
            message = f"there is no command {no_command[1]!r}"
        raise ConfigError(f"{without_secrets(message)}{hint}; see `{self._asked()} --help`")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """As argparse prints helps and the version, but a failed write raises OSError."""
        (file or sys.stderr).write(message)
        sys.stdout.flush()

    def _commands(self) -> "argparse._SubParsersAction[_Parser]":
        (nested,) = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return nested

    def _options(self) -> list[str]:
        """The options that this parser takes."""
        return [s for a in self._actions for s in a.option_strings]

    def _asked(self) -> str:
        """The command whose help says more."""
        return self.prog


class _Top(_Parser):
    """The parser above the commands: its help has them by task. It reports arguments that a command leaves over."""

    _command: _Parser | None = None  # the one that was given

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._command = None
        found, unknown = super().parse_known_args(args, namespace)
        self._command = self._commands().choices.get(found.command)
        return found, unknown

    def _options(self) -> list[str]:
        return super()._options() if self._command is None else self._command._options()

    def _asked(self) -> str:
        return self.prog if self._command is None else self._command.prog

    def format_help(self) -> str:
        sentences = {str(choice.dest): str(choice.help) for choice in self._commands()._choices_actions}
        return overview("usage: autofit COMMAND [options]", str(self.description), sentences)


def parser() -> argparse.ArgumentParser:
    """The parser of every command; `options.command` is the command's name."""
    return _parser(columns())


@functools.cache
def _parser(_columns: int) -> argparse.ArgumentParser:
    """The parser, made once for a width of the terminal, as its sentences are folded."""
    top = _Top(
        prog="autofit",
        description="Find the fastest training configuration that fits a VRAM budget, at the same effective batch.",
    )
    top.add_argument("--version", action="version", version=f"autofit {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    init = _command(commands, "init", "write a commented recipe to start from")
    init.add_argument("trainer", nargs="?", choices=TRAINERS,
                      help="what it trains (default: by the columns of --dataset FILE, else grpo)")  # fmt: skip
    init.add_argument("--model", metavar="NAME", help="a model on the hub, or a folder")
    init.add_argument("--dataset", metavar="NAME", help="a dataset on the hub, or a file")
    init.add_argument("--out", type=Path, metavar="FILE", help="where it is written (default: TRAINER.yaml)")

    search = _command(commands, "search", "find the Pareto front and the fastest config that fits")
    _recipe(search)
    search.add_argument("--demo", action="store_true", help="use the built-in demo: SmolLM2-135M on sums, on the CPU")
    search.add_argument("--target-vram", metavar="SIZE",
                        help="memory to fit into: 40GB (40e9 bytes) or 40GiB (default: all of the card, or of the "
                        "machine with --device cpu); without a GPU its size chooses the simulated card")  # fmt: skip
    search.add_argument(
        "--headroom", metavar="SIZE", help="memory kept free below the target (default: 2%% of it, 0 on cpu)"
    )
    search.add_argument("--device", choices=("auto", "cpu", "cuda", "sim"), default="auto",
                        help="where probes run (default: cuda on a machine with a GPU, else sim)")  # fmt: skip
    search.add_argument(
        "--gpu",
        metavar="NAME",
        help="simulate this card: a100-40gb, 8xa100-80gb, or 2x8xh100 (2 machines of 8); results are predictions",
    )
    search.add_argument("--allow", choices=("neutral", "approximate", "recipe"), default="neutral",
                        help="what may change: neutral (same gradient; default), approximate, recipe; a lower tier is "
                        "tried where nothing of a higher one fits")  # fmt: skip
    search.add_argument(
        "--space", help="the search space: a YAML file, or a name in search_spaces/ (default: the trainer's own)"
    )
    _add_trainer(search)
    _launch(search)
    search.add_argument("--trials", type=int, metavar="N", help="stop after N trials (default: 12, for --demo 6)")
    search.add_argument("--time-budget", metavar="TIME", help="stop after this long, for example 10m")
    search.add_argument("--plateau", type=int, metavar="N", help="stop after N trials without a better winner")
    search.add_argument("--min-gain", default="1%", metavar="SHARE",
                        help="stop when no untried candidate is expected to be at least SHARE faster "
                        "(default: 1%%; 0: never)")  # fmt: skip
    search.add_argument("--goal", choices=("speed", "memory", "utilisation", "speed-at-any-tier"),
                        default="speed",
                        help="speed: the fastest that fits, of the highest tier that has one (default); "
                        "speed-at-any-tier: of all tiers that --allow has; memory: the least memory at most 10%% "
                        "slower than that; utilisation: the fastest that fills 75 to 85%% of the target")  # fmt: skip
    search.add_argument("--sampler", choices=("autofit", "tpe", "gp", "nsga2", "random", "grid"), default="autofit",
                        help="the sampler of candidates (default: autofit; the others are Optuna's)")  # fmt: skip
    search.add_argument("--measured-steps", type=int, default=2, metavar="N", help="timed optimizer steps a probe")
    search.add_argument("--deadline", default="15m", metavar="TIME", help="time limit of one probe")
    search.add_argument(
        "--parallel", type=int, metavar="N", help="probes at once (default: one a card, 1 on cpu, one a core simulated)"
    )
    search.add_argument("--no-confirm", action="store_true",
                        help="skip the winner's confirmation: longer probes, in turns with the baseline's")  # fmt: skip
    search.add_argument("--no-advice", action="store_true",
                        help="do not simulate, after the search, what lies outside the allowed tier")  # fmt: skip
    search.add_argument("--seed", type=int, default=0, help="seed of the proposals")
    search.add_argument("--study", help="name of the study (default: from the recipe, target and device)")
    _shared(search, "--no-mlflow", "--json")
    _stream(search)
    _executor(search, debugging=True).add_argument("--probes-per-job", type=int, metavar="N",
                                   help="probes of one job, one after the other (default: 1)")  # fmt: skip

    estimate = _command(commands, "estimate", "predict one config on a simulated card: bytes by phase, time")
    _card(estimate)
    estimate.add_argument("--libraries", type=Path, metavar="ENV",
                          help="an environment with another TRL, transformers, peft and accelerate (its folder, or its "
                               "python): say what the recipe holds with those")  # fmt: skip
    _lengths(estimate, "the typical step and the whole run")
    estimate.add_argument(
        "--plot", type=Path, metavar="FILE", help="a picture (.png, .svg, .pdf, ...) of one step's bytes by category"
    )
    estimate.add_argument("--no-advice", "--no-changes", dest="no_advice", action="store_true",
                          help="do not look for changes that make it fit, or faster, nor for another card")  # fmt: skip
    _shared(estimate, "--json")
    _stream(estimate)

    check = _command(commands, "check", "say in one line whether a config runs on a card; exit code 1 if not")
    _card(check)
    _lengths(check, "which steps fit where the worst case does not")
    _shared(check, "--json")
    _stream(check)

    _advise(commands)

    verify = _command(commands, "verify", "compare a trial's gradient with the baseline's on a small model")
    _shared(verify, "trial", "--study", "--json")

    promote = _command(commands, "promote", "write a trial's YAML and launch its full run")
    promote.add_argument(
        "trial", metavar="TRIAL",
        help="a trial's number, `best`, `leanest`, or p1, p2, ...: a point of the front that is known by prediction "
        "only, which is simulated or probed first",
    )  # fmt: skip
    _shared(promote, "--study")
    promote.add_argument("--out", type=Path, metavar="FILE", help="also write the tuned YAML here")
    promote.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                         help="where the run trains (default: where the search measured)")  # fmt: skip
    promote.add_argument("--write-only", action="store_true", help="write the YAML and do not launch the run")
    promote.add_argument("--guards", metavar="FILE",
                         help="what the run is watched for: a YAML laid over our guards.yaml, or off")  # fmt: skip
    promote.add_argument("--restart", action="store_true", help="delete the run's checkpoints and start from step 0")
    promote.add_argument("--allow", choices=("neutral", "approximate", "recipe"), default="neutral",
                         help="lowest tier of change that a run which is out of memory may make to go on (default: "
                              "neutral: the effective batch and the gradient stay as they are)")  # fmt: skip
    _shared(promote, "--json")
    _executor(promote).add_argument("--nodes", type=int, metavar="N", help="machines of the full run")

    _run(commands)
    _jobs(commands)

    export = _command(commands, "export", "print a trial in another tool's keys, to paste behind its command")
    export.add_argument("trial", metavar="TRIAL", help="a trial's number, or `best`")
    export.add_argument("--to", choices=("verl",), required=True,
                        help="the tool: verl takes overrides; what differs from a grpo recipe stands above as comments"
                        )  # fmt: skip
    _shared(export, "--study", "--json")

    ui = _command(commands, "ui", "serve MLflow on 127.0.0.1 and print the address that compares the Pareto front")
    _shared(ui, "--study")
    ui.add_argument("--port", type=int, help="port on 127.0.0.1 (default: a free one)")

    sync = _command(commands, "sync", "copy a study's trials to MLflow, or rebuild them there")
    _shared(sync, "--study")
    sync.add_argument("--rebuild", action="store_true", help="delete the study's trial runs first")

    report = _command(commands, "report", "show the result of a study again")
    report.add_argument("study", nargs="?", default=argparse.SUPPRESS, help="the same as --study")
    _shared(report, "--study")
    report.add_argument("--html", type=Path, metavar="FILE",
                        help="also write it as one web page, which needs nothing else")  # fmt: skip
    report.add_argument("--verl-log", type=Path, metavar="FILE",
                        help="compare what verl printed, or wrote as jsonl, with a trial's promise")  # fmt: skip
    report.add_argument("--trial", help="with --verl-log, the trial that verl ran (default: best)")
    _shared(report, "--json")

    studies = _command(commands, "studies", "list the studies in a folder, with their winners and promoted runs")
    _shared(studies, "--json")

    monitor = _command(commands, "monitor", "watch the cards, the running probes and the promoted runs")
    monitor.add_argument("--once", action="store_true", help="look once (as it does where stdout is no terminal)")
    monitor.add_argument("--json", action="store_true", help="look once and print one JSON object")

    doctor = _command(commands, "doctor", "check a recipe and show its effective batch, worst case and weights; "
                      "without one, check this machine's cards")  # fmt: skip
    doctor.add_argument(
        "recipe",
        nargs="?",
        type=_file_or_command,
        help="the YAML that `trl TRAINER --config` takes, or a file of verl, LLaMA-Factory, Axolotl, ms-swift or "
        "open-r1, a shell script, or a command in quotes",
    )
    doctor.add_argument("--calibrate", action="store_true",
                        help="measure PyTorch's launch costs on this host, for the simulated clock")  # fmt: skip
    _add_trainer(doctor)
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _shared(doctor, "--json")
    _stream(doctor)
    doctor.add_argument("--prompt-tokens", type=int, metavar="N",
                        help="with --gpu: a synthetic prompt of N tokens instead of the dataset")  # fmt: skip
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a key of the recipe; may be given several times")  # fmt: skip
    doctor.add_argument("--gpu", metavar="NAME", help="check it for this simulated card, for example a100-40gb")
    _as_of(doctor)
    _launch(doctor)

    explain = _command(commands, "explain", "say the trainer and the effective batch of another tool's file")
    explain.takes_command = True
    explain.add_argument("file", type=_file_or_command, metavar="FILE|COMMAND",
                         help="a YAML of verl, LLaMA-Factory, Axolotl, ms-swift or open-r1, a shell script that starts "
                         "verl, ms-swift, TRL or their like, or such a command itself, behind the options")  # fmt: skip
    explain.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    explain.add_argument("--num-processes", "--num_processes", dest="num_processes", type=int, metavar="N",
                         help="ranks (GPUs) that it is launched on, in place of what the file says")  # fmt: skip
    explain.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                         help="change a key of the file, in its tool's own spelling; may be given again")  # fmt: skip
    _shared(explain, "--json")

    script = _command(commands, "fit-check", "run a training script of your own on a simulated card for a few steps")
    script.add_argument("--gpu", metavar="NAME", help="the card, for example a100-40gb; before SCRIPT")
    script.add_argument("--target-vram", metavar="SIZE", help="memory to fit into (default: the whole card)")
    script.add_argument("--steps", type=int, default=2, metavar="N",
                        help="optimizer steps after which the script is ended (default: 2)")  # fmt: skip
    script.add_argument("--prompt-tokens", type=int, metavar="N",
                        help="where its data are not on this machine: samples of N tokens stand in")  # fmt: skip
    script.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a field of its TrainingArguments; may be given several times")  # fmt: skip
    script.add_argument("--advice-time", default="60s", metavar="TIME",
                        help="where it does not fit: time for changes to be tried, each a run of the script (default: "
                             "60s; 0: none)")  # fmt: skip
    _shared(script, "--json")
    script.add_argument("-m", action="store_true", dest="as_module",
                        help="SCRIPT is a module, here or installed, as python -m names it")  # fmt: skip
    script.add_argument("script", type=Path, metavar="SCRIPT",
                        help="a Python script or a notebook (.ipynb); it sees no network")  # fmt: skip
    more = script.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    more.required = False

    server = _command(commands, "server", "show or stop the kept server that makes the next command answer at once")
    server.add_argument("action", nargs="?", choices=("status", "stop"), default="status",
                        help="status (default), or stop")  # fmt: skip

    completion = _command(commands, "completion", "print what bash, zsh or fish needs to complete this command line")
    completion.add_argument("shell", choices=SHELLS, help="put its first line's command into the shell's start-up file")
    web = _command(commands, "web", "serve a page on 127.0.0.1 that says whether a training fits and what to change")
    web.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860; 0: a free one)")
    web.add_argument("--open", action="store_true", help="open the page in the browser")
    web.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                     help="address to listen on (default: 127.0.0.1); another needs --public")  # fmt: skip
    web.add_argument("--public", action="store_true",
                     help="for strangers: limits what each address may ask, and lets other sites show the page in a "
                     "frame")  # fmt: skip
    web.add_argument("--behind-proxy", action="store_true",
                     help="with --public: who asks is told by the last address of X-Forwarded-For")  # fmt: skip
    return top


def _advise(commands: "argparse._SubParsersAction[_Parser]") -> None:
    advise = _command(commands, "advise", "which card, and how many of them, for a recipe: memory, time and cost")
    _recipe(advise)
    advise.add_argument("--cards", metavar="NAMES", help="cards to look at, for example a100-80gb,h100, or all "
                        "(default: those that are rented most)")  # fmt: skip
    advise.add_argument("--counts", default="1,2,4,8", metavar="N,N", help="numbers of cards (default: 1,2,4,8)")
    advise.add_argument("--prices", type=Path, metavar="FILE",
                        help="a YAML of your prices, `card: dollars an hour` (default: public lists)")  # fmt: skip
    _add_trainer(advise)
    _launch(advise, other=False)
    advise.add_argument("--deadline", default="15m", metavar="TIME", help="time limit of one simulation")
    advise.add_argument("--parallel", type=int, metavar="N", help="simulations at once (default: one a core)")
    _shared(advise, "--json")


def _run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    run = _command(commands, "run", "tune and train the stages of a pipeline file, one after the other")
    run.add_argument("pipeline", type=Path, help="a YAML file with `stages:`, each with a recipe")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                     help="change a variable of the file, or STAGE.KEY of a stage's recipe; may be given several "
                     "times")  # fmt: skip
    run.add_argument("--target-vram", metavar="SIZE", help="memory that each stage fits into: 40GB or 40GiB")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where it trains (default: cuda)")
    run.add_argument("--gpu", metavar="NAME", help="with --plan: what would happen on this simulated card")
    run.add_argument("--trials", type=int, metavar="N", help="stop each search after N trials")
    run.add_argument("--only", metavar="STAGE", help="train this stage alone; those that it uses must be done")
    run.add_argument("--restart", action="store_true", help="train again from step 0; with --only that stage alone")
    run.add_argument("--no-search", action="store_true", help="probe each recipe as it is, once, and train it")
    run.add_argument("--plan", action="store_true", help="check every stage and say what would happen; train nothing")
    _shared(run, "--no-mlflow", "--json")
    _executor(run).add_argument("--nodes", type=int, metavar="N", help="machines of each full run")


class _Kinds(tuple[str, ...]):
    """The executors of an option; a scheduler of the user's own is named as module:object."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and ":" in name)


def _executor(parser: _Parser, *, debugging: bool = False) -> "argparse._ArgumentGroup":
    """The options of the executor of jobs; those of Slurm have sbatch's names."""
    group = parser.add_argument_group(
        "where jobs run",
        folded("An executor.yaml in the working directory has the same keys; options win over it.", indent=2),
    )
    kinds = _Kinds(("local", "slurm"))
    text = "local: this machine (default); slurm: jobs of a cluster"
    if debugging:
        kinds, text = _Kinds((*kinds, "debug")), f"{text}; debug: one after the other in this terminal, for breakpoints"
    group.add_argument("--executor", choices=kinds, help=text)
    for option in ("partition", "account", "qos", "constraint", "mem", "gpus-per-node"):
        group.add_argument(f"--{option}", metavar=option.upper(), help=argparse.SUPPRESS)
    group.add_argument("--cpus-per-task", type=int, metavar="N", help=argparse.SUPPRESS)
    group.add_argument("--time", metavar="TIME",
                       help="longest time of a job: 4h, or 4:00:00. Also, as sbatch has them: --partition --account "
                       "--qos --constraint --mem --gpus-per-node --cpus-per-task")  # fmt: skip
    group.add_argument("--slurm", action="append", default=[], metavar="KEY[=VALUE]",
                       help="any other option of sbatch; may be given several times")  # fmt: skip
    group.add_argument("--setup", action="append", metavar="LINE",
                       help="a line of shell in front of every job, such as `module load cuda`; may be given several "
                       "times")  # fmt: skip
    return group


def _jobs(commands: "argparse._SubParsersAction[_Parser]") -> None:
    jobs = _command(commands, "jobs", "list the jobs of a folder of studies, cancel them, or show what one prints")
    jobs.add_argument("action", nargs="?", choices=("list", "cancel", "tail"), default="list",
                      help="list (default), cancel ID..., or tail ID")  # fmt: skip
    jobs.add_argument("ids", nargs="*", metavar="ID", help="of the jobs to cancel, or of the one to show")
    jobs.add_argument("--follow", action="store_true", help="with tail: go on until the job ends")
    _shared(jobs, "--json")


def _file_or_command(text: str) -> Path | str:
    """A path; a command as it stands there, for in a path `hf://name` would be `hf:/name`."""
    return text if " " in text and not os.path.exists(text) else Path(text)


def _recipe(parser: _Parser) -> None:
    """The options that name the recipe."""
    parser.add_argument("recipe", nargs="?", type=_file_or_command,
                        help="the YAML that `trl TRAINER --config` takes, or a file of verl, LLaMA-Factory, Axolotl, "
                             "ms-swift or open-r1, a shell script, or a command in quotes (default: the built-in "
                             "baseline)")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a key of the recipe; may be given several times")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, metavar="N",
                        help="simulated card: a synthetic prompt of N tokens instead of the dataset, of sft, "
                             "dpo and reward a whole sample (the longest of several lengths)")  # fmt: skip


def _card(parser: _Parser) -> None:
    """The options of one config on one simulated card."""
    _recipe(parser)
    parser.add_argument("--gpu", metavar="NAME", help="the card, for example a100-40gb (default: by --target-vram)")
    parser.add_argument("--target-vram", metavar="SIZE", help="memory to fit into (default: the whole card)")
    _add_trainer(parser)
    _launch(parser)
    parser.add_argument("--deadline", default="15m", metavar="TIME", help="time limit of one simulation")
    _as_of(parser)
    parser.add_argument("--advice-time", default="20s", metavar="TIME",
                        help="time for changes to be tried after the verdict (default: 20s; 0: none); Ctrl-C ends it "
                             "and keeps what was found")  # fmt: skip


def _shared(parser: _Parser, *names: str) -> None:
    """Add options that several commands have."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def _lengths(parser: _Parser, what: str) -> None:
    parser.add_argument("--lengths", metavar="LENGTHS",
                        help="tokens of samples (grpo, rloo: of completions), for "
                             f"{what}: median, 95 %% and longest (300,900,2048), a file with a number a line, "
                             "FILE:COLUMN of CSV or JSON lines, or off (default: up to 2,000 samples of a dataset at "
                             "hand)")  # fmt: skip


def _stream(parser: _Parser) -> None:
    parser.add_argument("--stream", action="store_true",
                        help="with or without --json: a JSON object a line on stdout as things become known; \"is\" "
                             "says what it is (note, trial, verdict); the last line is the whole, as --json prints "
                             "it")  # fmt: skip


def _as_of(parser: _Parser) -> None:
    parser.add_argument("--as-of", metavar="LIBRARIES",
                        help='say what older libraries did with the recipe, for example "trl 0.14"')  # fmt: skip


def _launch(parser: _Parser, *, other: bool = True) -> None:
    """The options of the number of ranks of a recipe, and of their sharding: the spelling is `trl`'s."""
    parser.add_argument("--accelerate_config", "--accelerate-config", metavar="NAME|FILE",
                        help="how it is launched, as `trl` takes it: fsdp2, zero3, ... or a file")  # fmt: skip
    parser.add_argument("--num_processes", "--num-processes", "--world-size", type=int, metavar="N",
                        help="ranks that the recipe is written for: its effective batch is theirs (default: as the "
                             "accelerate config, the recipe or WORLD_SIZE says, else 1)")  # fmt: skip
    if not other:
        return
    parser.add_argument("--gpus", type=int, metavar="N",
                        help="train on N cards at the effective batch that the recipe has as written; --gpu NxNAME "
                             "says it too")  # fmt: skip


def _add_trainer(parser: _Parser) -> None:
    parser.add_argument(
        "--trainer",
        help="grpo, sft, dpo, reward, rloo, hf (a plain transformers.Trainer) or module:object (default: found from "
        "the recipe's keys, else grpo)",
    )


def _command(commands: "argparse._SubParsersAction[_Parser]", name: str, text: str) -> _Parser:
    parser = commands.add_parser(
        name, help=text, description=folded(text[0].upper() + text[1:] + "."), epilog=epilog(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, default=Path("autofit-studies"), help="folder of the studies")
    if name in _OPEN_STUDIES:
        parser.add_argument("--storage", metavar="URL",
                            help="Postgres that several people share: postgresql://USER@HOST/DATABASE, or file:PATH of "
                                 "a file with such a URL (default: AUTOFIT_STORAGE, else a file in the folder)"
                            )  # fmt: skip
    parser.set_defaults(command=name)
    return parser
