"""The table: predicted and measured bytes of each configuration, and the quantiles of their errors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from gpu.folder import Row, by_name

_KINDS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes"}
_VERSIONS = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")


def table(
    predicted: Path, measured: Path, names: Sequence[str], why: Mapping[str, str], versions: Row, date: str
) -> str:
    """Markdown, with what could not be compared, and why, at its end."""
    told, found = by_name(predicted), by_name(measured)
    pairs = {name: errors(told.get(name, {}), found.get(name, {})) for name in names}
    compared = {name: pair for name, pair in pairs.items() if pair}
    first = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS)
    lines = [
        f"{date}; the real CUDA build of torch without a card, and no card was measured. {first}.",
        "",
        "| configuration | | allocated, GB | error | reserved, GB | error |",
        "|---|---|---|---|---|---|",
    ]
    for name, pair in compared.items():
        cells = [cell for kind, key in _KINDS.items() for cell in (_gb(peak(found[name], key)), f"{pair[kind]:+.3%}")]
        lines.append(f"| {name} | {why[name]} | {' | '.join(cells)} |")
    lines += ["", *(_quantiles(kind, [pair[kind] for pair in compared.values()]) for kind in _KINDS if compared)]
    lines += [*(_not_compared(name, told.get(name, {}), found.get(name, {})) for name in names if not pairs[name])]
    return "\n".join(lines).rstrip() + "\n"


def errors(told: Row, found: Row) -> dict[str, float]:
    """{kind: predicted / measured - 1}; empty unless both ran to their end."""
    if told.get("status") != "fit" or found.get("status") != "fit":
        return {}
    return {kind: peak(told, key) / peak(found, key) - 1 for kind, key in _KINDS.items()}


def peak(row: Row, key: str) -> int:
    return int(str(row[key]))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f}"


def _quantiles(kind: str, found: Sequence[float]) -> str:
    sizes = sorted(map(abs, found))
    within = sum(size <= 0.0005 for size in sizes)
    return (f"- {kind}: n {len(sizes)}, |error| mean {mean(sizes):.3%}, median {median(sizes):.3%}, worst "
            f"{sizes[-1]:.2%}; {within} within 0.05 %.")  # fmt: skip


def _not_compared(name: str, told: Row, found: Row) -> str:
    sides = [f"{side} {row.get('status', 'not run')}" for side, row in (("predicted", told), ("measured", found))]
    reason = str(found.get("reason") or told.get("reason") or "").split("\n")[0].split("; see ")[0][:160].strip()
    return f"- not compared: {name}: {', '.join(sides)}{f': {reason}' if reason else ''}"
