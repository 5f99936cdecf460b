"""How far apart measurements of one card are, and how well another card's table tells a card without one.

Run: `python experiments/rates/between_cards.py [wheel]` (about a minute). The errors in
`autofit/fakegpu/rates/collectives.py` are from here.
"""

import sys

import numpy as np
from fitting import gemm_table, machine
from source import CARDS, download, gemms

PAIRS = (  # (card that is told, card whose table tells it): neighbours in a family, and across families
    ("h200_sxm", "h100_sxm"), ("h100_sxm", "h200_sxm"), ("b200_sxm", "b300_sxm"), ("rtx_pro_6000_server", "l40s"),
    ("l40s", "rtx_pro_6000_server"), ("l40s", "a100_sxm"), ("a100_sxm", "h100_sxm"), ("h100_sxm", "a100_sxm"),
)  # fmt: skip


def quantiles(ratios: np.ndarray) -> str:
    return " / ".join(f"{q:.2f}" for q in np.quantile(ratios, (0.05, 0.5, 0.95)))


def main() -> None:
    wheel = download(sys.argv[1] if len(sys.argv) > 1 else None)
    measured = {card.folder: gemms(wheel, card) for card in CARDS}
    tables = {card.folder: gemm_table(measured[card.folder], card) for card in CARDS}
    print("ratio told / measured, 5 % / median / 95 %\n\n| card | told by | m <= 64 | m >= 1024 |\n|---|---|---|---|")
    for card in CARDS:
        told_by = [(f"itself, {name}", tables[card.folder], gemms(wheel, card, name)) for name in card.frameworks[1:]]
        others = [other for told, other in PAIRS if told == card.folder]
        told_by += [(other, tables[other], measured[card.folder]) for other in others]
        for name, table, of in told_by:
            m, n, k = of.mesh
            usual = (np.minimum(n, k) >= 512) & ~np.isnan(of.seconds)
            cells = []
            for mine in (usual & (m <= 64), usual & (m >= 1024)):
                told = table.seconds(machine(card), m[mine], n[mine], k[mine])
                cells.append(quantiles(told / of.seconds[mine]))
            print(f"| {card.folder} | {name} | {' | '.join(cells)} |")
    print("\nachieved bandwidth of products with few rows of matrices beyond any cache, over the data sheet's")
    for card in CARDS:
        m, n, k = measured[card.folder].mesh
        seconds = measured[card.folder].seconds
        large = (m <= 16) & (n * k * 2 > 400e6) & ~np.isnan(seconds)
        moved = 2.0 * (m * n + n * k + m * k)[large]
        print(card.folder, quantiles(moved / seconds[large] / card.bandwidth_bytes_per_s))


if __name__ == "__main__":
    main()
