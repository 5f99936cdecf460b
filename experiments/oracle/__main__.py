"""`cd experiments; python -m oracle FOLDER`, in the environment of `nox -s cuda`."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from gpu.allowance import Allowance  # noqa: E402
from gpu.children import server  # noqa: E402
from gpu.folder import Folder  # noqa: E402
from gpu.measure import RESULTS, facts, measure  # noqa: E402
from gpu.predict import predict, predictions  # noqa: E402
from gpu.prepare import prepare  # noqa: E402
from gpu.probe import STEPS  # noqa: E402
from gpu.ranks import of_ranks  # noqa: E402
from null_gpu.build import CannotBuild, NullGpu, build, h100s  # noqa: E402

from autofit.errors import ConfigError  # noqa: E402
from oracle.chance import drawn, drawn_on_ranks  # noqa: E402
from oracle.configs import SEVERAL, SINGLE  # noqa: E402
from oracle.families import families  # noqa: E402
from oracle.table import table  # noqa: E402

CARD = "h100"
_LONG_S = 1e9
_STAGES = ("prepare", "predict", "measure", "ranks", "table")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m oracle", description=__doc__)
    parser.add_argument("folder", type=Path, help="of models, data and results; a second command goes on there")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--chance", nargs=2, type=int, metavar=("SEED", "COUNT"),
                        help="instead of those of configs.py: COUNT drawn by chance")  # fmt: skip
    parser.add_argument("--families", action="store_true", help="instead: each causal language model of transformers")
    parser.add_argument("--on-ranks", action="store_true", help="with --chance: drawn on 2 to 4 ranks, with a sharding")
    parser.add_argument("--stage", choices=_STAGES, help="that alone (default: one after the other)")
    given = parser.parse_args()
    folder, out = Folder(home=given.folder), given.folder / "results"
    allowance = Allowance.of(_LONG_S, 300)
    if given.stage is None:
        each_stage(folder, given.only, given.chance or (), given.on_ranks, given.families)
        return
    on_one, on_ranks = (families(), ()) if given.families else (SINGLE, SEVERAL)
    if given.chance:
        on_one, on_ranks = ((), drawn_on_ranks(*given.chance)) if given.on_ranks else (drawn(*given.chance), ())
    single = [one for one in on_one if not given.only or one.name in given.only]
    several = [one for one in on_ranks if not given.only or one.name in given.only]
    if given.stage == "prepare":
        for config in (*single, *(one.config for one in several)):
            try:
                prepare(folder, [config])
            except (ConfigError, ImportError) as error:
                print(f"{config.name} is refused: {str(error).strip().splitlines()[0]}", flush=True)
    elif given.stage != "table":
        with server(out) as fork_server:
            if given.stage == "predict":
                predict(fork_server, folder, single, out, card=CARD, allowance=allowance)
                of_ranks(fork_server, folder, several, predictions(out, CARD), card=CARD, device=f"sim:{CARD}",
                         allowance=allowance)  # fmt: skip
            elif given.stage == "measure":
                measure(fork_server, folder, single, out, device="cuda", allowance=allowance)
            else:
                of_ranks(fork_server, folder, several, out / RESULTS, card=CARD, device="cuda", allowance=allowance)
    else:
        names = [one.name for one in single] + [one.name for one in several]
        why = {one.name: f"{one.trainer}: {one.why}" for one in single} | {
            one.name: f"{one.config.trainer}: {one.launch.words}: {one.config.why}" for one in several
        }
        text = table(predictions(out, CARD), out / RESULTS, names, why, facts("cpu"), str(datetime.now(UTC).date()))
        (out / "table.md").write_text(text)
        print(text, end="")


def each_stage(folder: Folder, only: Sequence[str], chance: Sequence[int], on_ranks: bool, of_families: bool) -> None:
    """Each in a process of its own: the measurement with one card of the null GPU, that of ranks with two."""
    try:
        gpu = NullGpu(libraries=build(folder.home / "null_gpu"), home=folder.home.resolve())
    except CannotBuild as error:
        sys.exit(str(error))
    gpu = replace(gpu, libraries=gpu.libraries.resolve())
    for stage in _STAGES:
        command = [sys.executable, "-m", "oracle", str(folder.home), "--stage", stage, "--only", *only]
        command += ["--chance", *map(str, chance)] if chance else []
        command += ["--on-ranks"] if on_ranks else []
        command += ["--families"] if of_families else []
        more = {"AUTOFIT_CACHE": str(gpu.home / "cache"), "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}  # no cuDNN there
        if stage in ("measure", "ranks"):
            gpu.has(h100s(4 if stage == "ranks" else 1))
            more |= gpu.env(small_values=stage == "ranks")
            more |= {STEPS: "1"} if of_families else {}  # as many steps as are predicted: the second one
        subprocess.run(command, check=True, env={**os.environ, **more})


if __name__ == "__main__":
    main()
