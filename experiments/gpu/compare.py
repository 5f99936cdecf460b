"""compare: the errors of the predictions, by configuration and as quantiles, and where device-used bytes differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from scipy.stats import spearmanr

from gpu.folder import Row, by_name

GB = 1e9
BYTES = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "device-used": "device_used_bytes"}
SECONDS = {"step": "step_s", "rollout": "rollout_s", "update": "update_s"}
Pair = tuple[float, float]


def compare(predicted: Path, measured: Path, *, context_bytes: int) -> str:
    """The tables. `context_bytes` is the context that the simulated card was given."""
    told, found = by_name(predicted), by_name(measured)
    other = [name for name in told if name in found and found[name].get("versions") != told[name].get("versions")]
    told = {name: row for name, row in told.items() if name not in other}
    names = [name for name, row in found.items() if "status" in row]
    pairs = {
        name: {
            label: pair
            for label, key in (BYTES | SECONDS).items()
            if (pair := _pair(told.get(name, {}), found[name], key)) is not None
        }
        for name in names
    }
    heads = [f"{label + ' p/m':>22}" for label in BYTES | SECONDS]
    lines = [f"{'config':>14}  " + "  ".join([*heads, f"{'kernels, s':>10}"])]
    lines += [_row(name, pairs[name], told.get(name, {}), found[name]) for name in names]
    lines += ["", *_quantiles(list(pairs.values())), "", *_outside(names, found, context_bytes)]
    missing = [name for name in told if name not in found]
    lines += [f"not measured: {' '.join(missing)}"] if missing else []
    lines += [f"predicted by other versions, and not compared: {' '.join(other)}"] if other else []
    return "\n".join(lines) + "\n"


def errors(pairs: Sequence[Pair]) -> list[float]:
    """predicted / measured - 1."""
    return [told / found - 1 for told, found in pairs]


def rank_correlation(pairs: Sequence[Pair]) -> float | None:
    """Spearman's, with mean ranks for ties; None with fewer than three or without any spread."""
    sides = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in sides):
        return None
    return float(spearmanr(*sides).statistic)


def _pair(told: Row, found: Row, key: str) -> Pair | None:
    """(predicted, measured), the second above zero; 0 is not predicted.

    An OOM was not measured to its end, unless it ran without the limit.
    """
    uncapped = found.get("uncapped")
    if found.get("status") != "fit" and isinstance(uncapped, dict):
        found = uncapped
    if found.get("status") != "fit":
        return None
    values = [_number(row.get(key)) for row in (told, found)]
    return (values[0], values[1]) if values[1] else None


def _number(value: object) -> float:
    if isinstance(value, list):
        return float(median(value)) if value else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _row(name: str, pairs: Mapping[str, Pair], told: Row, found: Row) -> str:
    if not pairs:
        least = told.get("least_capacity_bytes") or told.get("device_used_bytes")
        said = f"predicted to need {_number(least) / GB:.2f} GB" if least else "not predicted"
        reason = str(found.get("reason", ""))[:90]
        return f"{name:>14}  {found.get('status')} in {found.get('oom_phase')}, {said}: {reason}"
    cells = []
    for label in BYTES | SECONDS:
        if label not in pairs:
            cells.append(f"{'-':>22}")
            continue
        a, b = (value / (GB if label in BYTES else 1) for value in pairs[label])
        cells.append(f"{a:7.3f} {b:7.3f} {a / b - 1:+6.1%}" if a else f"{'-':>7} {b:7.3f} {'-':>6}")
    kernels = found.get("kernels")
    seconds = kernels.get("device_s") if isinstance(kernels, dict) else None
    cells.append(f"{'-' if seconds is None else f'{seconds:.3f}':>10}")
    return f"{name:>14}  " + "  ".join(cells)


def _quantiles(found: Sequence[Mapping[str, Pair]]) -> list[str]:
    lines = []
    for label in BYTES | SECONDS:
        pairs = [row[label] for row in found if label in row and row[label][0]]
        if not pairs:
            continue
        sizes = sorted(map(abs, errors(pairs)))
        rank = rank_correlation(pairs)
        signed = median(errors(pairs))
        lines.append(
            f"{label:>12}: n {len(pairs)}, error median {signed:+.2%}; |error| median {median(sizes):.2%}, "
            f"90 % {sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]:.2%}, worst {sizes[-1]:.2%}"
            + ("" if rank is None else f"; rank {rank:.3f}")
        )
    return lines


def _outside(names: Sequence[str], found: Mapping[str, Row], context_bytes: int) -> list[str]:
    """What lies outside of torch's allocator, in MiB, at each moment that was read; simulated it is one figure."""
    lines = [f"bytes outside the allocator in MiB; simulated: {context_bytes / 2**20:.0f}"]
    heads = ("context", "cuBLAS", "loaded", "a step", "end", "NVML v1 - v2", "NVML v2 - CUDA")
    lines.append(f"{'config':>14}  " + "  ".join(f"{head:>14}" for head in heads))
    for name in names:
        readings = found[name].get("readings")
        if not isinstance(readings, dict) or readings.get("context") is None:
            continue
        cells = [readings.get("context"), readings.get("cublas")]
        cells += [_less(readings.get(key), "nvml_v2_used", "reserved") for key in ("loaded", "after a step", "end")]
        cells += [
            _less(readings.get("end"), *keys)
            for keys in (("nvml_v1_used", "nvml_v2_used"), ("nvml_v2_used", "cuda_used"))
        ]
        lines.append(f"{name:>14}  " + "  ".join(f"{'-' if c is None else f'{c / 2**20:.0f}':>14}" for c in cells))
    return lines if len(lines) > 2 else []


def _less(reading: object, first: str, second: str) -> int | None:
    """The difference of two figures of a reading."""
    if not isinstance(reading, dict) or first not in reading or second not in reading:
        return None
    return int(reading[first]) - int(reading[second])
