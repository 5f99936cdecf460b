"""Wall seconds of commands by an older commit and by today's code, in turns: `python -m experiments.acceptance.older`.

Machines differ by more than a goal asks for: one command of one commit took 5 s on the machine on which the goals were
set and 19 s on another. What can be compared is both commits on one machine in one run, and how a goal stands to the
seconds that were counted when it was set. Both commits run with the libraries of this Python; each command starts with
a cache of its own, and with no kept server but where its row says "again".
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from experiments.kept import commit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = HERE / "older.json"
OLDER = "4cd187d5"  # the commit on which the goals were set: 46,940 lines in 368 modules
_BETWEEN_S = 6.0  # a server of the first command is on its move for 5 s
_RECIPE = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "use_peft": True, "lora_r": 16,
    "lora_target_modules": "all-linear", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
    "num_generations": 8, "max_completion_length": 512, "reward_funcs": ["think_format_reward"],
}  # fmt: skip
FILES = {
    "recipe.yaml": _RECIPE, "key.yaml": {**_RECIPE, "gradient_acumulation_steps": 4},
    "value.yaml": {**_RECIPE, "dtype": "bfloat17"},
}  # fmt: skip
_CHECK = ("--gpu", "a100-80gb", "--prompt-tokens", "512")


@dataclass(frozen=True, slots=True)
class Command:
    """A command; the seconds that were counted when its goal was set, and the goal, in seconds of that machine."""

    name: str
    words: tuple[str, ...]
    counted_s: float
    goal_s: float
    fresh: bool = True  # with nothing cached and no server
    times: int = 1  # that it runs in a round: one of half a second differs more between two runs


COMMANDS = (
    Command("check, a typo in a key", ("check", "key.yaml", *_CHECK), 2.9, 0.3, times=5),
    Command("check, a wrong value", ("check", "value.yaml", *_CHECK), 2.9, 0.3, times=5),
    Command("check of an 8B GRPO with LoRA, nothing cached", ("check", "recipe.yaml", *_CHECK), 5.4, 4.0),
    Command("the same check again", ("check", "recipe.yaml", *_CHECK), 2.9, 0.7, fresh=False),
    Command("README's search, nothing cached", ("search", "--target-vram", "40GB"), 34.0, 20.0),
    Command("README's search, the second time", ("search", "--target-vram", "40GB"), 7.0, 3.0, fresh=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.acceptance.older", description=__doc__)
    parser.add_argument("--older", default=OLDER, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="only the commands of half a second; the others stay")
    options = parser.parse_args()
    commits = {"older": options.older, "today": commit()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
    commands = [one for one in COMMANDS if one.times > 1 or not options.short]
    found = dict(json.loads(OUT.read_text(encoding="utf-8"))["seconds"]) if options.short else {}
    found |= {one.name: {"older": [], "today": []} for one in commands}
    with tempfile.TemporaryDirectory() as folder:
        for which, of in commits.items():
            unpack(of, Path(folder) / which)
        for _ in range(options.rounds):
            for which in commits:
                for name, seconds in timed(Path(folder) / which, commands):
                    found[name][which].append(round(seconds, 2))
                    print(f"{which:5}  {name}: {seconds:.2f} s", flush=True)
            told = {
                "commits": commits, "date": datetime.date.today().isoformat(), "versions": versions,
                "cores": os.cpu_count(), "seconds": found,
            }  # fmt: skip
            OUT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def unpack(of: str, folder: Path) -> None:
    """The package of the commit `of` in `folder`, laid out as it is installed."""
    folder.mkdir()
    packed = subprocess.run(
        ("git", "archive", of, "autofit", "trainers", "search_spaces"), cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(("tar", "-x"), cwd=folder, input=packed.stdout, check=True)
    for part in ("trainers", "search_spaces"):
        (folder / part).rename(folder / "autofit" / part)


def timed(code: Path, commands: Sequence[Command]) -> list[tuple[str, float]]:
    """(name, seconds to the verdict or the end) of each run of the commands by the package in `code`."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(code), "AUTOFIT_CACHE": f"{folder}/cache", "TMPDIR": folder}
        for place, command in enumerate(command for one in commands for command in [one] * one.times):
            if command.fresh:
                _stop(environment)
                environment["AUTOFIT_CACHE"] = f"{folder}/cache{place}"
                work = Path(folder) / f"work{place}"
                work.mkdir()
                for name, values in FILES.items():
                    (work / name).write_text(yaml.safe_dump(values), encoding="utf-8")
            else:
                time.sleep(_BETWEEN_S)
            rows.append((command.name, first_words(command, work, environment)))
        _stop(environment)
    return rows


def first_words(command: Command, folder: Path, environment: dict[str, str]) -> float:
    """Seconds until a check says its verdict; of other commands, or where it is an error, until the end."""
    began = time.monotonic()
    with subprocess.Popen(
        (sys.executable, "-c", _MAIN, *command.words), cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = None
        for line in process.stdout:
            if said is None and line.lower().startswith("fits"):
                said = time.monotonic() - began
    return said if said is not None else time.monotonic() - began


# What the installed command runs, by both commits: without the folder of the work before the package.
_MAIN = """
import sys
sys.argv[0] = "autofit"
try:
    from autofit.start import main
except ModuleNotFoundError:
    from autofit.cli import main
sys.exit(main())
"""


def _stop(environment: dict[str, str]) -> None:
    """End a kept server; the older commit may have no such command."""
    words = (sys.executable, "-c", _MAIN, "server", "stop")
    subprocess.run(words, env=environment, capture_output=True, check=False)


if __name__ == "__main__":
    main()
