"""Whole commands with hostile options and files, each a fork of one process, some with Ctrl-C at a random moment.

Input N of a seed is always the same, so a storm goes on where the last one ended (storm.results).
A server that leaks, hangs or dies under them is one of the things that are looked for.
"""

import argparse
import functools
import random
import shutil
import signal
import time
from pathlib import Path

import tiny
import yaml
from search_driver import main as drive

from autofit.cli import main
from autofit.commands.arguments import parser
from storm.forks import Forks, Signalled
from storm.inputs import Found
from storm.odd_files import ODD_WORDS as ODD
from storm.odd_files import SECRET, write_files

NAME = "whole commands"
_SERVES = ("ui", "web")  # until they are interrupted
_NOT = ("server",)  # `server stop` would end the one that runs the inputs
_WRITES = ("--out", "--plot")  # named inside the input's folder: the storm may run as root
_ALWAYS = {"search": ["--trials", "1", "--no-confirm", "--no-advice", "--no-mlflow"], "run": ["--plan"], 
           "promote": ["--write-only"],           "check": ["--advice-time", "0s"], "estimate": ["--no-advice"],
           "monitor": ["--once"], "advise": ["--cards", "t4,h100", "--counts", "1"]}  # fmt: skip
_RECIPES = ("check", "estimate", "doctor", "search", "explain", "run")
_OF_STUDIES = ("verify", "report", "studies", "promote", "monitor", "jobs", "ui", "sync")
_SLOW = ("sync", "ui", "advise")  # seconds each: a tenth as often
_SIMULATED = ("check", "estimate", "search", "doctor")
_USED = {"run": "pipeline.yaml", "--accelerate_config": "accelerate.yaml", "--prices": "prices.yaml",
         "--space": "space.yaml", "--guards": "guards.yaml", "--trainer": "trainer.py:TRAINER",
         "--storage": "file:storage", "--dir": "studies"}  # fmt: skip
_SET = ("lora_r", "env.A", "launch.ranks", "max_steps", "deepspeed", "x.y", "model_name_or_path")
_WORKS = ("search", "check", "estimate", "advise", "run", "verify")  # a whole one may take minutes: it is interrupted
# What most inputs would trace again, for minutes: the recipe that stands where none is named, and the template's own.
_TRACED = (
    ["search", "--gpu", "a100-40gb", "--trials", "1", "--no-confirm", "--no-mlflow"],
    ["search", "run.yaml", "--gpu", "t4", "--trials", "1", "--no-mlflow"],
    ["search", "sft/run.yaml", "--gpu", "t4", "--trials", "1", "--no-mlflow"],
    ["estimate", "sft/run.yaml", "--gpu", "2xh100"],
)
_TRACES_S = 180.0
_LONGEST_S = {True: 10.0, False: 90.0}
_INTERRUPTED_AT = (-2.5, 0.5)  # exponents of ten of the seconds: most commands end in less than one
_LONGEST_LINE = 1000


def attack_commands(folder: Path, forks: Forks, *, inputs: int, seed: int, until: float, first: int = 0) -> Found:
    """`inputs` whole commands of the seed, from the number `first` on. The template and what was traced stay there."""
    found = Found()
    template = made_template(folder)
    if inputs and not (folder / "traced").exists():
        shutil.copytree(template, folder / "traced")
        for words in _TRACED:
            forks.call(words, folder / "traced", cache=folder / "cache", most_s=_TRACES_S)
    for number in range(first, first + inputs):
        if time.monotonic() > until:
            break
        _try(forks, template, folder / f"input-{number}", seed, number, found)
    return found


def arguments(dice: random.Random) -> list[str]:
    """The words of a command: those of its own options and files, and hostile ones."""
    commands = _parsers()
    name = dice.choice([*(name for name in commands if name not in _SLOW or dice.random() < 0.1), *_RECIPES])
    words = [name]
    for action in commands[name]._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if not action.option_strings:
            words += [_positional(name, action, dice)] if action.nargs != "?" or dice.random() < 0.8 else []
        elif dice.random() < _chance(name, action.option_strings[0]):
            words += _option(action, dice)
    if dice.random() < 0.03:
        words.insert(dice.randint(0, len(words)), dice.choice(ODD))
    given = {word.partition("=")[0] for word in words}
    more = _ALWAYS.get(name, [])
    return [*words, *([] if given & {word for word in more if word.startswith("--")} else more)]


def _chance(command: str, option: str) -> float:
    """How often an option is given: without its card or its studies a command ends at once."""
    if (option == "--gpu" and command in _SIMULATED) or (option == "--dir" and command in _OF_STUDIES):
        return 0.85
    return 0.05


@functools.cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    group = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    return {name: one for name, one in group.choices.items() if name not in _NOT}


def _positional(command: str, action: argparse.Action, dice: random.Random) -> str:
    if dice.random() < 0.05:
        return dice.choice(ODD)
    if action.choices is not None:
        return str(dice.choice(list(action.choices)))
    if command == "run":
        return "pipeline.yaml"
    if command == "explain":
        return dice.choice(["foreign.yaml", "foreign.sh", "foreign.yaml", "run.yaml"])
    if command in (*_RECIPES, "advise"):
        return dice.choice(["run.yaml", "run.yaml", "run.yaml", "foreign.yaml", "foreign.sh", "config.json"])
    return dice.choice(["best", "0", "1", "baseline", "-1", "x"])


def _option(action: argparse.Action, dice: random.Random) -> list[str]:
    name = action.option_strings[0]
    if action.nargs == 0:
        return [name]
    if name in _WRITES:
        return [name, dice.choice(["out.x", "no/such/out", "data", "/dev/full", ""])]
    if name == "--gpu" and dice.random() < 0.8:
        return [name, dice.choice(["a100-40gb", "rtx4090", "2xh100", "t4"])]
    if dice.random() < 0.2 and name != "--dir":
        return [name, dice.choice(ODD)]
    if action.choices is not None:
        return [name, str(dice.choice(list(action.choices)))]
    if name == "--set":
        return [name, f"{dice.choice(_SET)}={dice.choice(ODD)}"]
    if name in _USED:
        return [name, _USED[name]]
    if action.type is int and dice.random() < 0.9:
        return [name, dice.choice(["1", "2", "3", "8", "0", "-1", "1000000000", "9" * 30])]
    return [name, dice.choice(["1", "2", "8", "40GB", "10m", "a100-40gb", "rtx4090", "2xh100", "1,2", "5s", "0.1"])]


# -- one input --------------------------------------------------------------------------------------------------------


def _try(forks: Forks, template: Path, home: Path, seed: int, number: int, found: Found) -> None:
    """Try an input as a fork, a tenth of them at the product's own kept server."""
    dice = random.Random(f"{seed}:{number}")
    server = forks.kept if dice.random() < 0.1 else forks.own
    shutil.rmtree(home, ignore_errors=True)  # of a storm that was killed
    shutil.copytree(template, home, symlinks=True)
    changed = write_files(home, dice)
    words = arguments(dice)
    interrupted_s = 10 ** dice.uniform(*_INTERRUPTED_AT) if dice.random() < _interruptions(words[0]) else None
    began = time.monotonic()
    code, said = forks.call(
        words, home, server=server, cache=home.parent / "cache", most_s=_LONGEST_S[words[0] in _WORKS],
        signalled=None if interrupted_s is None else Signalled(number=signal.SIGINT, after_s=interrupted_s),
    )  # fmt: skip
    found.tried[NAME] += 1
    found.refused += code == 2
    found.slowest_s = max(found.slowest_s, time.monotonic() - began)
    interrupted = interrupted_s is not None or words[0] in _WORKS
    for what in _wrong(code, said, home, interrupted=interrupted):
        found.add_wrong(f"{words[0] if words else ''}: {what}", (seed, number, words, changed, said[-1500:]))
    # A mirror that is still at work there may make it anew: no other input has its name.
    shutil.rmtree(home, ignore_errors=True)


def _interruptions(command: str) -> float:
    """How often the command gets Ctrl-C at a random moment: a whole simulation takes as long as a hundred refusals."""
    return 1.0 if command in _SERVES else 0.9 if command in _WORKS else 0.2


def _wrong(code: int, said: str, home: Path, *, interrupted: bool) -> list[str]:
    """What must not be, of how the command ended."""
    errors = [line for line in said.splitlines() if line.startswith("autofit: ")]
    usage = any(line.startswith("autofit") and ": error: " in line for line in said.splitlines())
    checks = {
        "it did not end": code == -1,
        "no answer": code == -2,
        "a traceback": "Traceback (most recent" in said,
        f"exit code {code}": code not in (0, 1, 2, -1, -2) and not (interrupted and code in (130, -2)),
        "an error that is not one line": code == 2 and len(errors) != 1 and not usage,
        "an error longer than a paragraph": any(len(line) > _LONGEST_LINE for line in errors),
        "characters that move the cursor": any(ord(letter) < 32 and letter not in "\n\t\r" for letter in said),
        "a secret of the recipe": SECRET in said,
        "a secret in a file": any(_has_secret(path) for path in home.rglob("*")),
    }
    return [what for what, wrong in checks.items() if wrong]


def _has_secret(path: Path) -> bool:
    """Whether a file that autofit wrote has the secret; the inputs' own files, and a tuned YAML (0600), may."""
    own = path.suffix in (".yaml", ".sh") or path.is_symlink() or not path.is_file() or "cache" in path.parts
    return not own and SECRET.encode() in path.read_bytes()


# -- the server and the files -----------------------------------------------------------------------------------------


def made_template(folder: Path) -> Path:
    """A folder with a small study, a model and its data; recipes are written for each input."""
    template = folder / "template"
    if not template.exists():
        template.mkdir(parents=True)
        drive(template / "studies", 2, 0)
        main(["sync", "--dir", str(template / "studies")])  # to make its tables takes MLflow ten seconds
        tiny.write_recipe(template, tiny.write_model(template / "model"))
        values = yaml.safe_load((template / "run.yaml").read_text())
        values |= {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "out"}
        (template / "run.yaml").write_text(yaml.safe_dump(values))
        names = {"dataset_name": "sft/data", "output_dir": "out", "packing": False}  # a key of SFT alone
        tiny.write_offline_recipe("sft", template / "sft", Path("model"), **names)
    return template
