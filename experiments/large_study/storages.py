"""Optuna's JournalStorage beside our SoleWriter over SQLite: `python experiments/large_study/storages.py`.

One process asks, sets two attributes, looks at all trials and tells, as a search does without its probes. Then a study
is opened again, and writers of each storage are killed at random moments, each followed by another one. --smoke: 20
trials and one kill, and no file. Writes storages.json next to this file.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from autofit.tuning.study import SoleWriter
from experiments.kept import commit

NAMES = ("journal", "sole_writer")
_RESULT = {"result": {"phases": [{"name": "update", "peak_allocated_bytes": 1}] * 20}}
_WRITES = (0.05, 0.4)  # seconds after which a writer is killed
_HERE = Path(__file__).resolve()


def opened(name: str, path: Path) -> BaseStorage:
    if name == "journal":
        return JournalStorage(JournalFileBackend(str(path)))
    return SoleWriter(RDBStorage(f"sqlite:///{path}"))


def alone(storage: BaseStorage) -> contextlib.AbstractContextManager[None]:
    return storage.alone() if isinstance(storage, SoleWriter) else contextlib.nullcontext()


def one(study: optuna.Study, number: int) -> None:
    """A trial, as a search makes one."""
    trial = study.ask()
    trial.set_user_attr("changes", {"per_device_train_batch_size": number})
    trial.set_user_attr("result", _RESULT)
    study.get_trials(deepcopy=False)
    study.tell(trial, float(number))


def trials(name: str, counts: list[int], folder: Path) -> dict[str, object]:
    """Seconds of wall and of the processor until each count, the file's size, and seconds to open it again."""
    path = folder / f"{name}.db"
    storage, found = opened(name, path), {}
    with alone(storage):
        study = optuna.create_study(storage=storage, study_name="s")
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(1, max(counts) + 1):
            one(study, number)
            if number in counts:
                found[str(number)] = [
                    round(time.perf_counter() - wall, 2), round(time.process_time() - cpu, 2)
                ]  # fmt: skip
                print(name, number, found[str(number)], flush=True)
    began = time.perf_counter()
    again = optuna.load_study(study_name="s", storage=opened(name, path)).get_trials(deepcopy=False)
    assert len(again) == max(counts)
    return {
        "wall_s, cpu_s": found, "reopened_s": round(time.perf_counter() - began, 2),
        "file_mb": round(path.stat().st_size / 1e6, 1),
    }  # fmt: skip


def kills(name: str, count: int, folder: Path) -> dict[str, object]:
    """Writers that are killed: seconds until each begins, what is readable at last, and the files they left."""
    path, chance, starts, told = folder / f"kills-{name}.db", random.Random(3), [], 0
    for _ in range(count + 1):
        began = time.perf_counter()
        with subprocess.Popen([sys.executable, str(_HERE), "--write", name, str(path)], stdout=subprocess.PIPE,
                              text=True) as writer:  # fmt: skip
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            starts.append(round(time.perf_counter() - began, 1))
            time.sleep(chance.uniform(*_WRITES))
            writer.send_signal(signal.SIGKILL)
            told += sum(1 for _ in writer.stdout)
    left = sorted(file.name for file in folder.glob(f"{path.name}*") if file != path)
    began = time.perf_counter()
    study = optuna.load_study(study_name="s", storage=opened(name, path))
    states = [trial.state.is_finished() for trial in study.get_trials(deepcopy=False)]
    assert sum(states) >= told, "a trial was lost"
    return {
        "kills": count + 1, "told": told, "readable": sum(states), "starts_s": starts, "files_left": left,
        "opened_last_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def write(name: str, path: Path) -> None:
    """Make trials until killed; a line for each that was told."""
    storage = opened(name, path)
    study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
    with alone(storage):
        one(study, 0)
        print("begun", flush=True)
        while True:
            one(study, 0)
            print("told", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--kills", type=int, default=11, help="writers that follow the first one")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", nargs=2, metavar=("STORAGE", "PATH"), help="be a writer, which is killed")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.write:
        write(options.write[0], Path(options.write[1]))
    counts, ends = ([20], 0) if options.smoke else (options.trials, options.kills)
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as home:
        found = {name: trials(name, counts, Path(home)) | kills(name, ends, Path(home)) for name in NAMES}
    told = json.dumps({"date": date.today().isoformat(), "commit": commit(), "optuna": version("optuna"),
                       "load_average_before": load, "cores": os.cpu_count(), **found}, indent=1)  # fmt: skip
    print(told)
    if not options.smoke:
        _HERE.with_suffix(".json").write_text(told + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
