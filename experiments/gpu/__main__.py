"""The command line of the campaign: `cd experiments; python -m gpu prepare|predict|measure|bisect|compare ...`."""

import argparse
import os
from pathlib import Path

for name in (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
):  # before anything imports their libraries
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from autofit.fakegpu.specs import gpu_spec  # noqa: E402
from autofit.units import parse_bytes  # noqa: E402
from gpu.bisect import bisect  # noqa: E402
from gpu.compare import compare  # noqa: E402
from gpu.configs import chosen  # noqa: E402
from gpu.folder import Folder  # noqa: E402
from gpu.measure import RESULTS, measure  # noqa: E402
from gpu.predict import predict  # noqa: E402
from gpu.prepare import prepare  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu", description="Predicted against measured on one card.")
    parser.add_argument("what", choices=("prepare", "predict", "measure", "bisect", "compare"))
    parser.add_argument("folder", type=Path, help="of what prepare makes")
    parser.add_argument("out", type=Path, nargs="?", help="of the results (default: FOLDER/results)")
    parser.add_argument("--only", nargs="*", default=[], help="names of configurations")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it without a card")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--card", default="h100", help="the simulated card of predict and compare")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which nothing new begins")
    parser.add_argument("--each", type=float, default=120, help="most seconds of one configuration")
    parser.add_argument("--limit", help="a target to emulate, such as 24GB")
    options = parser.parse_args()
    folder, out = Folder(home=options.folder), options.out or options.folder / "results"
    configs = chosen(tiny=options.tiny, only=tuple(options.only))
    card = gpu_spec(options.card)
    if options.what == "prepare":
        prepare(folder, configs)
    elif options.what == "predict":
        predict(folder, configs, out, card=card.name, until_s=options.until)
    elif options.what == "measure":
        limit = None if options.limit is None else parse_bytes(options.limit)
        measure(folder, configs, out, device=options.device, until_s=options.until, each_s=options.each,
                limit_bytes=limit)  # fmt: skip
    elif options.what == "bisect":
        bisect(folder, configs, out, device=options.device, until_s=options.until, each_s=options.each)
    else:
        table = compare(out / f"predicted-{card.name}.jsonl", out / RESULTS, context_bytes=card.context_bytes)
        (out / "table.txt").write_text(table)
        print(table, end="")


if __name__ == "__main__":
    main()
