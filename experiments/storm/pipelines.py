"""Kills of `autofit run` between and within the stages of a pipeline: each stage must end as an undisturbed one's."""

import random
import shutil
import time
from pathlib import Path

import tiny
import yaml

from autofit.watching.events import read_progress
from storm.commands import Kills, autofit_command
from storm.inputs import Found

_COMMAND = ("run", "pipeline.yaml", "--no-search", "--no-mlflow", "--device", "cpu", "--target-vram", "1GB")
_STEPS = 20
_END_S = 1200.0
Stages = dict[str, list[list[object]]]  # {stage's run: [step, loss, norm of the gradient] of each step}


def kill_pipelines(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """Two stages, of which the second goes on with the model of the first, killed 4 times and then left to end."""
    if not kills:
        return Found()
    whole, quiet = folder / "pipeline", folder / "undisturbed-pipeline"
    _write(whole, tiny.write_model(folder / "model"))
    shutil.copytree(whole, quiet)
    began = time.monotonic()
    code, expected = _ended(quiet)
    most_s = time.monotonic() - began
    assert code == 0, (quiet / "log").read_text()
    assert [len(lines) for lines in expected.values()] == [_STEPS, _STEPS], expected

    def ends(home: Path) -> list[str]:
        code, stages = _ended(home)
        wrong = [f"the last run ended with code {code}"] if code else []
        return wrong + [f"other steps or losses than the undisturbed run's in {name}"
                        for name, lines in expected.items() if stages.get(name) != lines]  # fmt: skip

    return Kills(whole, _COMMAND, 1.0, most_s, dice).run("kills of pipelines", ends, kills=kills, until=until)


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
    runs = sorted((home / "promoted").glob("*"))
    return code, {
        run.name: [[line.get(key) for key in ("step", "loss", "grad_norm")] for line in read_progress(run)]
        for run in runs if run.is_dir()
    }  # fmt: skip
