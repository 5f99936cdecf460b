"""The command line of the campaign: `python -m experiments.gpu run`, or its steps one by one."""

import argparse
import os
import sys
from pathlib import Path

for name in (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
):  # before anything imports their libraries
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

from autofit.errors import AutofitError  # noqa: E402
from autofit.fakegpu.specs import gpu_spec  # noqa: E402
from autofit.units import parse_bytes  # noqa: E402
from gpu.allowance import Allowance  # noqa: E402
from gpu.bisect import bisect  # noqa: E402
from gpu.campaign import Plan, run  # noqa: E402
from gpu.children import server  # noqa: E402
from gpu.compare import compare  # noqa: E402
from gpu.configs import Config, chosen  # noqa: E402
from gpu.folder import Folder  # noqa: E402
from gpu.measure import RESULTS, measure  # noqa: E402
from gpu.predict import predict, predictions  # noqa: E402
from gpu.prepare import prepare  # noqa: E402

_STEPS = ("prepare", "predict", "measure", "bisect", "compare")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu", description="Predicted against measured on one card."
    )
    parser.add_argument("what", choices=("run", *_STEPS), help="run: all of it; the others are its steps")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".gpu"), help="of what prepare makes (.gpu)")
    parser.add_argument("out", type=Path, nargs="?", help="of a step's results (default: FOLDER/results)")
    parser.add_argument("--minutes", type=float, default=40, help="the most that run takes (40)")
    parser.add_argument("--trials", type=int, default=12, help="of each search of run (12)")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it without a card")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of measure and bisect")
    parser.add_argument("--card", default="h100", help="the simulated card of predict and compare")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which a step begins nothing new")
    parser.add_argument("--each", type=float, default=120, help="most seconds of one configuration")
    parser.add_argument("--limit", help="a target that measure emulates, such as 24GB")
    options = parser.parse_args()
    folder, out = Folder(home=options.folder), options.out or options.folder / "results"
    try:
        _run(options, folder, out)
    except AutofitError as error:
        print(f"gpu: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(options: argparse.Namespace, folder: Folder, out: Path) -> None:
    if options.what == "run":
        plan = Plan(tiny=options.tiny, only=tuple(options.only), minutes=options.minutes, each_s=options.each,
                    trials=options.trials)  # fmt: skip
        run(folder, plan)
        return
    configs, card = chosen(tiny=options.tiny, only=tuple(options.only)), gpu_spec(options.card)
    if options.what == "prepare":
        prepare(folder, configs)
    elif options.what == "compare":
        table = compare(predictions(out, card.name), out / RESULTS, context_bytes=card.context_bytes)
        (out / "table.txt").write_text(table)
        print(table, end="")
    else:
        _run_step(options, folder, out, configs)


def _run_step(options: argparse.Namespace, folder: Folder, out: Path, configs: tuple[Config, ...]) -> None:
    allowance = Allowance.of(options.until, options.each)
    with server(out) as fork_server:
        if options.what == "predict":
            predict(fork_server, folder, configs, out, card=gpu_spec(options.card).name, allowance=allowance)
        elif options.what == "bisect":
            bisect(fork_server, folder, configs, out, device=options.device, allowance=allowance)
        else:
            limit = None if options.limit is None else parse_bytes(options.limit)
            measure(fork_server, folder, configs, out, device=options.device, allowance=allowance, limit_bytes=limit,
                    profiles=options.device == "cuda" and limit is None)  # fmt: skip


if __name__ == "__main__":
    main()
