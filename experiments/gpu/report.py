"""table.md: the campaign's tables as far as they go, from the files of its results."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from autofit.fakegpu.specs import gpu_spec
from autofit.files import read_json, write_atomically
from gpu.bisect import RESULTS as BISECTED
from gpu.bisect import least_capacity, tried
from gpu.card import Card
from gpu.compare import compare
from gpu.configs import Config
from gpu.folder import Row, by_name
from gpu.measure import AGAIN, RESULTS, facts
from gpu.predict import predictions
from gpu.searches import result_path, verdict

_VERSIONS = "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes"


def report(out: Path, told: Path, card: Card, configs: Sequence[Config], left_out: Sequence[str]) -> None:
    """Write table.md anew, in place by rename."""
    spec = None if card.simulated is None else gpu_spec(card.simulated)
    predicted = predictions(told, card.simulated or "none")
    table = compare(predicted, out / RESULTS, context_bytes=0 if spec is None else spec.context_bytes)
    found = by_name(out / RESULTS)
    here = facts("cpu")
    lines = [
        f"Measured: {card.words}. {', '.join(f'{name} {here[name]}' for name in _VERSIONS)}.",
        f"Predicted: {'nothing' if spec is None else f'on the simulated {spec.name}'}"
        f"{f'; {card.about}' if card.about else ''}.", "",
        "```text", table.rstrip(), "```", "",
        *(f"- {line}" for line in (*drift(found), *_kernels(found), *_capacities(out, configs),
                                   *_searches(out, configs, found), *left_out)),
    ]  # fmt: skip
    write_atomically(out / "table.md", "\n".join(lines) + "\n")


def drift(found: dict[str, Row]) -> list[str]:
    """A line for each configuration that was measured twice."""
    return [_drift(name, found[name], found[f"{name}{AGAIN}"]) for name in found if f"{name}{AGAIN}" in found]


def _drift(name: str, first: Row, second: Row) -> str:
    before, after = (row.get("step_s") for row in (first, second))
    if not (isinstance(before, list) and isinstance(after, list) and before and after):
        return f"drift: {name} was measured twice, and did not fit each time"
    minutes = (float(str(second["at"])) - float(str(first["at"]))) / 60
    used = int(str(second["device_used_bytes"])) - int(str(first["device_used_bytes"]))
    share = median(after) / median(before) - 1
    return f"drift: {name} again after {minutes:.0f} min: step {share:+.1%}, device-used {used / 1e6:+.1f} MB"


def _kernels(found: dict[str, Row]) -> list[str]:
    """Why kernels have no times, where none has."""
    told = [row["kernels"] for row in found.values() if isinstance(row.get("kernels"), dict)]
    reasons = {str(one["missing"]) for one in told if "missing" in one}  # type: ignore[index, operator]
    return [f"kernel times: {'; '.join(sorted(reasons))}"] if reasons else []


def _capacities(out: Path, configs: Sequence[Config]) -> list[str]:
    lines = []
    for config in (config for config in configs if "bisect" in config.tags):
        attempts = tried(out / BISECTED, config.name)
        if attempts and (ends := least_capacity(attempts, lambda _: {}, in_time=lambda: False)):
            low, high = (nbytes / 1e9 for nbytes in ends)
            lines.append(f"least capacity of {config.name}: above {low:.2f}, at most {high:.2f} GB")
    return lines


def _searches(out: Path, configs: Sequence[Config], found: dict[str, Row]) -> list[str]:
    grid = {config.name: found[config.name] for config in configs if "grid" in config.tags and config.name in found}
    answers = {name: read_json(result_path(out, name)) for name in ("T1", "T2")}
    return [f"search {verdict(name, answer, grid)}" for name, answer in answers.items() if answer is not None]
