"""Kills of a full run at random moments, and torn files in its checkpoints: it must end as an undisturbed one."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tiny

from autofit.files import read_json
from autofit.watching.events import read_progress
from storm.commands import END_S, Kills, autofit_command, run_folder
from storm.inputs import Found
from storm.torn import TEARS

_STEPS = 60
_SAVE_S = 120.0


def kill_runs(folder: Path, *, kills: int, dice: random.Random, until: float) -> Found:
    """`autofit promote`, whose command, job or training is killed 4 times; it must end as an undisturbed one."""
    run = _FullRun.searched(folder)
    storm = Kills(run.whole, ("promote", "0", "--device", "cpu"), 1.0, 10.0, dice)
    return storm.run("kills of full runs", run.ends, kills=kills, until=until)


def tear_checkpoints(folder: Path, *, files: int, dice: random.Random, until: float) -> Found:
    """One file or two of the newest checkpoint are torn after a kill; the next run must see it and end all the same."""
    run, found, name = _FullRun.searched(folder), Found(), "torn checkpoints"
    while found.tried[name] < files and time.monotonic() < until:
        home = folder / f"torn-checkpoint-{found.tried[name]}"
        shutil.copytree(run.whole, home)
        newest = _killed_after_a_save(home)
        torn = dice.sample(sorted(p for p in newest.iterdir() if p.is_file()), dice.randint(1, 2))
        what = ", ".join(f"{path.name} {_tear(path, dice)}" for path in torn)
        found.tried[name] += len(torn)
        for wrong in run.ends(home):
            found.add_wrong(f"{name}: {wrong}", f"{what}: {(home / 'log').read_text()[-1500:]}")
        shutil.rmtree(home, ignore_errors=True)
    return found


@dataclass(frozen=True, slots=True)
class _FullRun:
    """A search in the folder `whole` whose trial 0 can be promoted, and the lines that this logs undisturbed."""

    whole: Path
    expected: list[list[object]]

    @classmethod
    def searched(cls, folder: Path) -> "_FullRun":
        whole, quiet = folder / "to-train", folder / "undisturbed"
        for old in (whole, quiet):
            shutil.rmtree(old, ignore_errors=True)
        recipe = tiny.write_offline_recipe(
            "sft", folder, tiny.write_model(folder / "model"), max_steps=_STEPS, save_steps=6, output_dir=None
        )
        command = [sys.executable, "-m", "autofit", "search", str(recipe), "--target-vram", "200MB", "--device", "cpu"]
        options = ["--trainer", "sft", "--trials", "1", "--no-mlflow", "--no-confirm", "--no-advice", "--dir"]
        subprocess.run([*command, *options, str(whole)], check=True, capture_output=True, cwd=folder)
        shutil.copytree(whole, quiet)
        code, expected = _trained(quiet)
        assert code == 0, (quiet / "log").read_text()
        return cls(whole, expected)

    def ends(self, home: Path) -> list[str]:
        """What is wrong with the full run in `home` once it is left to end, a phrase each."""
        code, steps = _trained(home)
        wrong = [f"the last promotion ended with code {code}"] if code else []
        if steps != self.expected:
            wrong.append(f"steps {[step for step, *_ in steps]}, or other losses than the undisturbed run's")
        return wrong


def _trained(home: Path) -> tuple[int, list[list[object]]]:
    code = autofit_command(home, "promote", "0", "--device", "cpu").wait(timeout=END_S)
    run = run_folder(home)
    lines = read_progress(run) if run.exists() else []
    return code, [[line.get(key) for key in ("step", "loss", "grad_norm")] for line in lines]


def _killed_after_a_save(home: Path) -> Path:
    """The newest checkpoint of a run that was killed once it had two."""
    command = autofit_command(home, "promote", "0", "--device", "cpu")
    deadline = time.monotonic() + _SAVE_S
    while len(saved := sorted(run_folder(home).glob("output/checkpoint-*/autofit-manifest.json"), key=_step)) < 2:
        assert time.monotonic() < deadline, (home / "log").read_text()
        assert command.poll() is None, (home / "log").read_text()
        time.sleep(0.05)
    job = read_json(run_folder(home) / "started.json") or {}
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(str(job["pid"])))
        for one in (process, *process.children(recursive=True)):
            one.kill()
    command.send_signal(signal.SIGKILL)
    command.wait()
    return saved[-1].parent


def _step(manifest: Path) -> int:
    return int(manifest.parent.name.rpartition("-")[2])


def _tear(path: Path, dice: random.Random) -> str:
    """Tear the file at `path`; how."""
    tears: dict[str, Callable[[Path, random.Random], None]] = {**TEARS, "missing": lambda path, _: path.unlink()}
    how = dice.choice(sorted(tears))
    tears[how](path, dice)
    return how
