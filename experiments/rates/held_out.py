"""How well each card's table tells products and attention that it was not made from.

Run: `python experiments/rates/held_out.py [wheel]` (downloads the wheel if none is given, about 5 minutes)

Three ways of holding out products: shapes at random (one in ten), whole pairs of (n, k) with all their m (one in ten),
and whole values of m (one in four, with the neighbour one above, which has the same waves). The first row of each card
is the clock before: the larger of FLOPs at 70 % of the data sheet's rate and bytes at 80 % of its bandwidth, and 2 us.
Two further rows say how far apart two measurements of one product are: those of the other frameworks' tables.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fitting import Flags, attention_table, gemm_table, machine
from source import CARDS, Card, Floats, Measured, attention, download, gemms

RANGES = (("m <= 64", 0, 64), ("64 < m < 1024", 64, 1023), ("m >= 1024", 1023, np.inf), ("all", 0, np.inf))


def errors(told: Floats, measured: Floats) -> str:
    """Median and 95th percentile of the relative error, and the share within 25 %, in percent."""
    wrong = np.abs(told / measured - 1.0)
    return f"{100 * np.median(wrong):.1f} / {100 * np.quantile(wrong, 0.95):.0f} / {100 * np.mean(wrong <= 0.25):.1f}"


def by_range(told: Floats, measured: Measured, chosen: Flags) -> str:
    m = measured.mesh[0]
    cells = []
    for _, above, to in RANGES:
        mine = chosen & (m > above) & (m <= to)
        cells.append(errors(told[mine], measured.seconds[mine]))
    return " | ".join(cells)


def held_out_sets(measured: Measured) -> Iterator[tuple[str, Flags]]:
    """(name, the products that are held out)."""
    random = np.random.default_rng(0)
    there = ~np.isnan(measured.seconds)
    yield "random shapes", there & (random.random(there.shape) < 0.1)
    yield "pairs of n, k", there & (random.random(there.shape[1:]) < 0.1)[None]
    twins = np.cumsum(np.append(True, (np.diff(measured.ms) > 1) | (measured.ms[1:] <= 17)))
    yield "values of m", there & ((twins % 4 == 2) & (measured.ms < measured.ms[-1]))[:, None, None]


def roofline(card: Card, measured: Measured) -> Floats:
    m, n, k = measured.mesh
    flops, moved = 2 * m * n * k, 2 * (m * n + m * k + n * k)
    rates = flops / (0.7 * card.half_flops_per_s), moved / (0.8 * card.bandwidth_bytes_per_s)
    return np.maximum(np.maximum(*rates), 2e-6)


def products(wheel: Path, card: Card) -> Iterator[str]:
    measured = gemms(wheel, card)
    for name, chosen in held_out_sets(measured):
        if name == "random shapes":
            yield f"| {card.folder} | before, random shapes | {by_range(roofline(card, measured), measured, chosen)} |"
        table = gemm_table(measured, card, ~chosen)
        told = np.full(measured.seconds.shape, np.nan)
        told[chosen] = table.seconds(machine(card), *(x[chosen] for x in measured.mesh))
        yield f"| {card.folder} | {name} | {by_range(told, measured, chosen)} |"
    table = gemm_table(measured, card)
    for framework in card.frameworks[1:]:
        other = gemms(wheel, card, framework)
        there = ~np.isnan(other.seconds)
        told = table.seconds(machine(card), *other.mesh)
        yield f"| {card.folder} | measured with {framework} | {by_range(told, other, there)} |"


def attentions(wheel: Path, card: Card, shortest_s: float) -> Iterator[str]:
    """Shapes held out at random, one in ten, for prefill and decoding."""
    both = attention(wheel, card, "context"), attention(wheel, card, "generation")
    random = np.random.default_rng(0)
    known = [random.random(len(each.batch)) > 0.1 for each in both]
    table = attention_table(*both, card, shortest_s, (known[0], known[1]))
    for name, each, mine in zip(("prefill", "decode"), both, known, strict=True):
        chosen = ~mine & ((each.queries > 1) if name == "prefill" else True)
        shapes = (each.batch, each.heads, each.key_heads, each.queries, each.keys, each.dim)
        told = table.seconds(machine(card), *(x[chosen] for x in shapes), causal=name == "prefill")
        yield f"| {card.folder} | {name} | {errors(told, each.seconds[chosen])} | {int(chosen.sum())} |"


def main() -> None:
    wheel = download(sys.argv[1] if len(sys.argv) > 1 else None)
    print(f"| card | held out | {' | '.join(name for name, _, _ in RANGES)} |\n|---|---|---|---|---|---|")
    for card in CARDS:
        for line in products(wheel, card):
            print(line, flush=True)
    print("\n| card | attention | median / p95 / within 25 % | shapes |\n|---|---|---|---|")
    for card in CARDS:
        for line in attentions(wheel, card, float(np.nanmin(gemms(wheel, card).seconds))):
            print(line, flush=True)


if __name__ == "__main__":
    main()
