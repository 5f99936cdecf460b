"""Kills of `autofit run` between and within the stages of a pipeline: each stage must end as an undisturbed one's."""

import json
import random
import shutil
import time
from pathlib import Path

import tiny
import yaml

from autofit.files import write_atomically
from autofit.watching.events import read_progress
from storm.commands import Kills, autofit_command
from storm.inputs import Found

_COMMAND = ("run", "pipeline.yaml", "--no-search", "--no-mlflow", "--device", "cpu", "--target-vram", "1GB")
_STEPS = 20
_END_S = 1200.0
_LATEST_FRAC = 0.6  # of the undisturbed seconds: later, most of those that go on have ended before they are killed
Stages = list[list[list[object]]]  # of each stage, in order: [step, loss, norm of the gradient] of each step


def kill_pipelines(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """Two stages, of which the second goes on with the model of the first, killed 4 times and then left to end."""
    if not kills:
        return Found()
    whole, quiet, took = folder / "pipeline", folder / "undisturbed-pipeline", folder / "undisturbed-pipeline.json"
    if not took.exists():  # the next part has it, where the folder stays
        shutil.rmtree(quiet, ignore_errors=True)
        _write(whole, tiny.write_model(folder / "model"))
        shutil.copytree(whole, quiet)
        began = time.monotonic()
        code, expected = _ended(quiet)
        assert code == 0, (quiet / "log").read_text()
        assert [len(lines) for lines in expected] == [_STEPS, _STEPS], expected
        write_atomically(took, json.dumps([time.monotonic() - began, expected]))
    undisturbed_s, expected = json.loads(took.read_text())

    def ends(home: Path) -> list[str]:
        code, stages = _ended(home)
        wrong = [f"the last run ended with code {code}"] if code else []
        return wrong + ([] if stages == expected else ["other steps or losses than the undisturbed run's"])

    storm = Kills(whole, _COMMAND, 1.0, _LATEST_FRAC * undisturbed_s, dice)
    return storm.run("kills of pipelines", ends, kills=kills, until=until)


def _write(folder: Path, model: Path) -> None:
    folder.mkdir(exist_ok=True)
    recipe = tiny.write_offline_recipe("sft", folder, model, max_steps=_STEPS, save_steps=5, output_dir=None)
    values = yaml.safe_load(recipe.read_text())
    stages = {"first": values, "second": {**values, "model_name_or_path": "${first}", "seed": 8}}
    pipeline = {"stages": {name: {"trainer": "sft", "values": own} for name, own in stages.items()}}
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))


def _ended(home: Path) -> tuple[int, Stages]:
    """(exit code, what each stage logged) of the command, which is left to end."""
    code = autofit_command(home, *_COMMAND).wait(timeout=_END_S)
    runs = sorted(run for run in (home / "promoted").glob("*") if run.is_dir())  # "first" before "second"
    return code, [[[line.get(key) for key in ("step", "loss", "grad_norm")] for line in read_progress(run)]
                  for run in runs]  # fmt: skip
