"""How well the seconds of collectives tell what other people's nccl-tests printed, on one machine and between machines.

Run: `python experiments/rates/nccl_tests.py`. The rows are of public threads and files that `rates/collectives.py` was
not made from; nothing is fitted to them. Where a thread tells a bus bandwidth alone, its seconds are worked out from
it by nccl-tests' own factors.
"""

import csv
import statistics
from pathlib import Path

from autofit.fakegpu.rates.collectives import CollectiveSeconds
from autofit.fakegpu.specs import GPU_SPECS

MEASURED = Path(__file__).parent / "measured" / "nccl_tests.csv"


def compare() -> list[tuple[str, str, int, float, float]]:
    """(source, what was run, bytes, measured us, predicted us) of each row."""
    with MEASURED.open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        machines, cards, nbytes = int(row["machines"]), int(row["cards"]), int(row["bytes"])
        seconds = CollectiveSeconds(GPU_SPECS[row["card"]], per_machine=cards, network_gbit=int(row["gbit"]))
        told = seconds.seconds(row["collective"], nbytes, machines * cards)  # type: ignore[arg-type]
        what = f"{machines}x{cards} {row['card']}, {row['gbit']} Gbit/s, {row['collective']}"
        found.append((row["source"], what, nbytes, float(row["us"]), told * 1e6))
    return found


def main() -> None:
    rows = compare()
    print("| source | ran | MiB | measured us | predicted / measured |\n|---|---|---|---|---|")
    for source, what, nbytes, measured, told in rows:
        print(f"| {source} | {what} | {nbytes / 2**20:.3g} | {measured:g} | {told / measured:.2f} |")
    groups = {"one machine": [], "several, 64 MiB and more": [], "several, less": []}  # type: dict[str, list[float]]
    for _, what, nbytes, measured, told in rows:
        several = "several, 64 MiB and more" if nbytes >= 64 << 20 else "several, less"
        groups["one machine" if what.startswith("1x") else several].append(told / measured)
    for name, ratios in groups.items():
        off = statistics.median(abs(ratio - 1) for ratio in ratios)
        print(f"{name}: {len(ratios)} rows, {off:.1%} off in the median, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
