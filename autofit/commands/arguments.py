"""What the command line takes. Loads nothing heavy, so that `autofit --help` answers at once."""

import argparse
from pathlib import Path
from typing import NoReturn

from autofit import __version__
from autofit.errors import ConfigError, nearest


class _Parser(argparse.ArgumentParser):
    """argparse, with one line instead of the usage text on an error, and the nearest option for a wrong one."""

    def error(self, message: str) -> NoReturn:
        wrong = [word for word in message.split() if word.startswith("--")]
        hint = nearest(wrong[0], self._options()) if message.startswith("unrecognized") and wrong else ""
        raise ConfigError(f"{message}{hint}; see `{self.prog} --help`")

    def _options(self) -> list[str]:
        """The options of this parser and of its commands."""
        nested = [p for a in self._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
        return [s for parser in (self, *nested) for a in parser._actions for s in a.option_strings]


def parser() -> argparse.ArgumentParser:
    """The parser of every command; `options.command` is the command's name."""
    top = _Parser(
        prog="autofit",
        description="Find the fastest training configuration that fits a VRAM budget, at the same effective batch.",
    )
    top.add_argument("--version", action="version", version=f"autofit {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    search = _command(commands, "search", "find the Pareto front and the fastest config that fits")
    _recipe(search)
    search.add_argument("--demo", action="store_true", help="use the built-in demo: SmolLM2-135M on sums, on the CPU")
    search.add_argument("--target-vram", metavar="SIZE",
                        help="40GB (40e9 bytes) or 40GiB; without a card it says which one to simulate")  # fmt: skip
    search.add_argument("--headroom", metavar="SIZE", help="kept free below the target (default: 2%%, 0 on cpu)")
    search.add_argument("--device", choices=("auto", "cpu", "cuda", "sim"), default="auto",
                        help="where probes run (default: cuda where there is a card, else sim)")  # fmt: skip
    search.add_argument("--gpu", metavar="NAME", help="probe on this simulated card, for example a100-40gb: predicted")
    search.add_argument("--allow", choices=("neutral", "approximate", "recipe"), default="neutral",
                        help="the lowest tier of change to try (default: neutral, the same gradient)")  # fmt: skip
    search.add_argument("--space", help="a search space: a YAML file, or a name in search_spaces/")
    _add_trainer(search)
    search.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="ranks the recipe trains on (default: 1)"
    )
    search.add_argument("--trials", type=int, metavar="N", help="stop after N trials (default: 12, for --demo 6)")
    search.add_argument("--time-budget", metavar="TIME", help="stop after this long, for example 10m")
    search.add_argument("--plateau", type=int, metavar="N", help="stop after N trials without a better winner")
    search.add_argument("--min-gain", default="1%", metavar="SHARE",
                        help="stop when no candidate is expected to gain so much (default: 1%%; 0: never)")  # fmt: skip
    search.add_argument("--goal", choices=("speed", "memory", "utilisation"), default="speed",
                        help="speed: the fastest that fits (default); memory: the least memory at most 10%% slower "
                        "than that; utilisation: the fastest that fills 75 to 85%% of the target")  # fmt: skip
    search.add_argument("--sampler", choices=("autofit", "tpe", "gp", "nsga2", "random", "grid"), default="autofit",
                        help="what proposes candidates (default: autofit; the others are Optuna's)")  # fmt: skip
    search.add_argument("--measured-steps", type=int, default=2, metavar="N", help="timed optimizer steps a probe")
    search.add_argument("--deadline", default="15m", metavar="TIME", help="the longest that one probe may take")
    search.add_argument(
        "--parallel", type=int, metavar="N", help="probes at once (default: one a card, 1 on cpu, one a core simulated)"
    )
    search.add_argument("--no-confirm", action="store_true",
                        help="do not probe the winner once more, longer, before it is called the best")  # fmt: skip
    search.add_argument("--seed", type=int, default=0, help="seed of the proposals")
    search.add_argument("--study", help="name of the study (default: from the recipe, target and device)")
    search.add_argument("--no-mlflow", action="store_true", help="do not mirror trials to MLflow while searching")
    search.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")

    estimate = _command(commands, "estimate", "predict one config on a simulated card: bytes by phase, time")
    _recipe(estimate)
    estimate.add_argument("--gpu", metavar="NAME", help="the card, for example a100-40gb (default: by --target-vram)")
    estimate.add_argument("--target-vram", metavar="SIZE", help="use only so much of it (default: the whole card)")
    _add_trainer(estimate)
    estimate.add_argument("--deadline", default="15m", metavar="TIME", help="the longest that it may take")
    estimate.add_argument(
        "--plot", type=Path, metavar="FILE", help="a picture (PNG) of the bytes by phase and category"
    )
    estimate.add_argument("--no-changes", action="store_true",
                          help="where it does not fit, do not look for what would make it")  # fmt: skip
    estimate.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")

    verify = _command(
        commands, "verify", "prove a trial's gradient equal to the baseline's, or show by how much it is not"
    )
    verify.add_argument("trial", metavar="TRIAL", help="a trial's number, or `best`")
    verify.add_argument("--study", help="name of the study (default: the one used last)")
    verify.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")

    promote = _command(commands, "promote", "write a trial's YAML and launch its full run")
    promote.add_argument("trial", metavar="TRIAL", help="a trial's number, or `best`")
    promote.add_argument("--study", help="name of the study (default: the one used last)")
    promote.add_argument("--out", type=Path, metavar="FILE", help="also write the tuned YAML here")
    promote.add_argument("--write-only", action="store_true", help="write the YAML and do not launch the run")
    promote.add_argument("--restart", action="store_true", help="throw the run's checkpoints away and begin anew")
    promote.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")

    ui = _command(commands, "ui", "serve MLflow on loopback and print the compare page of the front")
    ui.add_argument("--study", help="name of the study (default: the one used last)")
    ui.add_argument("--port", type=int, help="port on 127.0.0.1 (default: a free one)")

    sync = _command(commands, "sync", "bring MLflow in line with a study, or rebuild it")
    sync.add_argument("--study", help="name of the study (default: the one used last)")
    sync.add_argument("--rebuild", action="store_true", help="delete the study's trial runs first")

    report = _command(commands, "report", "show a study's result again")
    report.add_argument("study", nargs="?", help="name of the study (default: the one used last)")
    report.add_argument("--json", action="store_true", help="print one JSON object, last on stdout")

    doctor = _command(commands, "doctor", "check a recipe and show what follows from it")
    doctor.add_argument("recipe", nargs="?", type=Path, help="the YAML that `trl TRAINER --config` takes")
    doctor.add_argument("--calibrate", action="store_true",
                        help="measure what PyTorch costs on this host, for the clock of simulated cards")  # fmt: skip
    _add_trainer(doctor)
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    doctor.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks the recipe trains on")
    return top


def _recipe(parser: _Parser) -> None:
    """The options that say what is trained."""
    parser.add_argument("recipe", nargs="?", type=Path,
                        help="the YAML that `trl TRAINER --config` takes (default: the built-in baseline)")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a key of the recipe; may be given several times")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, metavar="N",
                        help="on a simulated card: a made-up prompt of N tokens in place of the dataset")  # fmt: skip


def _add_trainer(parser: _Parser) -> None:
    parser.add_argument("--trainer", help="grpo, sft, dpo or reward (default: told by the recipe's keys, else grpo)")


def _command(commands: "argparse._SubParsersAction[_Parser]", name: str, text: str) -> _Parser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--dir", type=Path, default=Path("autofit-studies"), help="folder of the studies")
    parser.set_defaults(command=name)
    return parser
