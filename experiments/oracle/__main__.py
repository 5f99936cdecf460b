"""`cd experiments; python -m oracle FOLDER [--only NAME ...]`, in the environment of `nox -s cuda`."""

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

from gpu.children import answered_by_ranks, scratch, server  # noqa: E402
from gpu.configs import Config  # noqa: E402
from gpu.folder import Folder, Row, append, by_name  # noqa: E402
from gpu.measure import PROBE, RESULTS, facts, measure  # noqa: E402
from gpu.predict import predict  # noqa: E402
from gpu.prepare import prepare  # noqa: E402
from null_gpu.build import CannotBuild, NullGpu, build, h100s  # noqa: E402

from autofit.fakegpu.specs import gpu_spec  # noqa: E402
from autofit.hardware.hardware import slot_names  # noqa: E402
from autofit.probing.fork_server import ForkServer  # noqa: E402
from autofit.probing.launch import Launcher  # noqa: E402
from autofit.recipe.launch import LAUNCH, Launch  # noqa: E402
from oracle.configs import RANKS, SINGLE, Ranks  # noqa: E402
from oracle.table import table  # noqa: E402

CARD = "h100"
_LONG_S = 1e9
_STAGES = ("prepare", "predict", "measure", "ranks", "table")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m oracle", description=__doc__)
    parser.add_argument("folder", type=Path, help="of models, data and results; a second command goes on there")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--stage", choices=_STAGES, help="that alone (default: one after the other)")
    given = parser.parse_args()
    folder, out = Folder(home=given.folder), given.folder / "results"
    if given.stage is None:
        each_stage(folder, given.only)
        return
    single = [one for one in SINGLE if not given.only or one.name in given.only]
    several = [one for one in RANKS if not given.only or name_of(one) in given.only]
    if given.stage == "prepare":
        prepare(folder, [*single, *(one.config for one in several)])
    elif given.stage == "predict":
        predict(folder, single, out, card=CARD, until_s=_LONG_S)
        of_ranks(folder, several, out / f"predicted-{CARD}.jsonl", f"sim:{CARD}")
    elif given.stage == "measure":
        measure(folder, single, out, device="cuda", until_s=_LONG_S, each_s=200)
    elif given.stage == "ranks":
        of_ranks(folder, several, out / RESULTS, "cuda")
    else:
        names = [one.name for one in single] + [name_of(one) for one in several]
        why = {one.name: f"{one.trainer}: {one.why}" for one in single} | {
            name_of(one): f"{one.config.trainer}: {one.ranks} ranks, {one.sharding}" for one in several
        }
        text = table(
            out / f"predicted-{CARD}.jsonl", out / RESULTS, names, why, facts("cpu"), str(datetime.now(UTC).date())
        )
        (out / "table.md").write_text(text)
        print(text, end="")


def each_stage(folder: Folder, only: Sequence[str]) -> None:
    """Each in a process of its own: the measurement with one card of the null GPU, that of ranks with two."""
    try:
        gpu = NullGpu(libraries=build(folder.home / "null_gpu"), home=folder.home.resolve())
    except CannotBuild as error:
        sys.exit(str(error))
    gpu = replace(gpu, libraries=gpu.libraries.resolve())
    for stage in _STAGES:
        command = [sys.executable, "-m", "oracle", str(folder.home), "--stage", stage, "--only", *only]
        more = {"AUTOFIT_CACHE": str(gpu.home / "cache")}
        if stage in ("measure", "ranks"):
            gpu.has(h100s(2 if stage == "ranks" else 1))
            more |= gpu.env()
        subprocess.run(command, check=True, env={**os.environ, **more})


def name_of(one: Ranks) -> str:
    return f"{one.config.name}-{one.sharding}"


def of_ranks(folder: Folder, configs: Sequence[Ranks], path: Path, device: str) -> None:
    """A line for each in the file `path`: the largest of its ranks."""
    done = {name for name, row in by_name(path).items() if row.get("status") == "fit"}
    with server(path.parent) as fork_server:
        for one in configs:
            if name_of(one) in done:
                continue
            with scratch() as place:
                row = probed(folder, one, place, device, fork_server)
            append(path, {"name": name_of(one), **row})
            print(name_of(one), row["status"], row.get("peak_allocated_bytes"), str(row["reason"])[:200], flush=True)


def probed(folder: Folder, one: Ranks, place: Path, device: str, fork_server: ForkServer) -> Row:
    """Simulated as `estimate` does; measured as the configurations of one rank are, without a checkpoint."""
    config: Config = one.config
    request = folder.request(config, place, device, limit_bytes=gpu_spec(CARD).capacity_bytes)
    launch = Launch(ranks=one.ranks, sharding=one.sharding)  # type: ignore[arg-type]
    values = {**request.values, LAUNCH: launch.to_values()}
    request = replace(request, values=values, server_socket=fork_server.socket_path)
    if device == "cuda":
        return answered_by_ranks(fork_server, PROBE, request, one.ranks)
    return Launcher().run(replace(request, slots=slot_names(device, one.ranks))).to_json()


if __name__ == "__main__":
    main()
