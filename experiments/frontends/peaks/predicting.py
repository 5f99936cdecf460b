"""One row's prediction, in a process of its own: `python -m experiments.frontends.peaks.predicting NAME OUT DIR`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import autofit
from autofit.api.estimating import Estimate
from autofit.files import write_json
from autofit.frontends.reading import read
from experiments.frontends.peaks.rows import Row, read_rows


def estimate(row: Row, tokens: int | None, checkout: Path, folder: Path) -> Estimate:
    """The row on its card with a longest sample of `tokens`; None: as its file says."""
    changes: dict[str, object] = dict(row.changes)
    model = folder / "model"
    if row.shape:
        model.mkdir(exist_ok=True)
        write_json(model / "config.json", row.shape)
        changes["model_name_or_path"] = str(model)
    card = row.card if row.ranks == 1 else f"{row.ranks}x{row.card}"
    if tokens is not None:
        changes["max_length"] = tokens
    recipe: str | dict[str, object]
    if row.file is not None:
        recipe = str(checkout / row.file)
        foreign = read(Path(recipe))
        assert foreign is not None
        changes = {key: value for key, value in changes.items() if foreign.values.get(key) != value}
        trainer, prompt = None, None
    else:
        recipe, changes, trainer = {**row.recipe, **changes}, {}, "hf"
        prompt = tokens
    return autofit.estimate(recipe, gpu=card, trainer=trainer, changes=changes, prompt_tokens=prompt,
                            advice=False)  # fmt: skip


def figures(answer: Estimate) -> Mapping[str, object]:
    """The bytes and seconds of an estimate."""
    result = answer.result
    return {
        "allocated": result.peak_allocated_bytes, "reserved": result.peak_reserved_bytes,
        "used": result.device_used_bytes, "step_s": answer.step_s, "notes": list(result.notes),
    }  # fmt: skip


def predict(row: Row, checkout: Path) -> dict[str, object]:
    """Figures at the most tokens that the longest sample has, and at the fewest where that is another number."""
    with tempfile.TemporaryDirectory() as name:
        low, high = row.longest_tokens or (None, None)
        found: dict[str, object] = {"most": figures(estimate(row, high, checkout, Path(name)))}
        if low != high:
            found["fewest"] = figures(estimate(row, low, checkout, Path(name)))
    return found


def main() -> None:
    name, out, checkout = sys.argv[1:]
    row = next(row for row in read_rows() if row.name == name)
    write_json(Path(out), json.loads(json.dumps(predict(row, Path(checkout)))))


if __name__ == "__main__":
    main()
