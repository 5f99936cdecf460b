"""Drives one search with lawful probes: a process for tests to kill. Arguments: folder, trials."""

import sys
from pathlib import Path

import lawful
from recipes import grpo_recipe

from autofit.probing.launch import Launcher
from autofit.space.space import Space
from autofit.space.space_file import load_space
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.study import exclusive


def plan(folder: Path, trials: int | None, target_bytes: int = 150 * lawful.MB) -> Plan:
    recipe = grpo_recipe(per_device_train_batch_size=4, gradient_accumulation_steps=4, loss_type="dapo")
    space = Space.of(recipe, load_space(None, trainer="grpo"))
    return Plan(recipe=recipe, space=space, folder=folder, device="cpu", target_bytes=target_bytes, max_trials=trials,
                study_name="law")  # fmt: skip


def main(folder: Path, trials: int) -> None:
    with exclusive(folder / "locks", "law"):
        search = Search(plan(folder, trials), open_study(plan(folder, trials)), server_socket=None,
                        launcher=Launcher(lawful.run))  # fmt: skip
        try:
            print(search.run().words, flush=True)
        except KeyboardInterrupt:
            search.interrupt()
            sys.exit(130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
