"""One row's prediction, in a process of its own: `python -m experiments.frontends.peaks.predicting NAME OUT DIR`."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import autofit
from autofit.api.estimating import Estimate
from autofit.files import write_json
from autofit.frontends.reading import read
from experiments.frontends.peaks.mixed import NAME as MIXED
from experiments.frontends.peaks.mixed import draw, packs
from experiments.frontends.peaks.rows import Row, read_rows
from experiments.frontends.peaks.then import NAME as THEN

DRAWN = 64  # lengths, which repeat after that
WARMED = "2025-03-21"  # transformers 4.50; before, it took no block for all weights before it loaded them
GONE = re.compile(r"^max_packed_sequence_len:.*\n", re.MULTILINE)  # Axolotl refuses it today; the row says the length
NAMED_ZERO = re.compile(r"(--deepspeed\s+)(zero[0-3](?:_offload)?)\b")


def estimate(row: Row, tokens: int | None, checkout: Path, folder: Path) -> Estimate:
    """The row on its card with a longest sample of `tokens`; None: as its file says."""
    changes: dict[str, object] = dict(row.changes)
    if row.shape:
        write_json(folder / "model" / "config.json", row.shape)
        changes["model_name_or_path"] = str(folder / "model")
    card = row.card if row.ranks == 1 else f"{row.ranks}x{row.card}"
    if tokens is not None:
        changes["max_length"] = tokens
    trainer, prompt = row.trainer or None, None
    recipe: str | dict[str, object]
    if row.file is not None:
        recipe = str(folder / "then" / row.path if row.commit else checkout / row.file)
        foreign = read(Path(recipe))
        assert foreign is not None
        changes = {key: value for key, value in changes.items() if foreign.values.get(key) != value}
    else:
        recipe, changes, trainer, prompt = {**row.recipe, **changes}, {}, row.trainer or "hf", tokens
    if row.samples:
        trainer = MIXED
        changes["sample_tokens"] = ",".join(map(str, lengths(row, tokens)))
        if row.packed_together:
            changes["packing"] = False  # rows of packs' lengths stand for them
    if row.date < WARMED and trainer in (MIXED, THEN, "hf"):
        trainer = MIXED if row.samples else THEN
        changes["weights_alone"] = True
    return autofit.estimate(recipe, gpu=card, trainer=trainer, changes=changes, prompt_tokens=prompt, lengths="off",
                            advice=False)  # fmt: skip


def lengths(row: Row, tokens: int | None) -> tuple[int, ...]:
    """What the rows of the training have, drawn."""
    if row.packed_together and tokens:
        return packs(row.samples, count=DRAWN, most=tokens, together=row.packed_together)
    return draw(row.samples, count=DRAWN, most=tokens)


def git(checkout: Path, *words: str) -> bytes:
    """What git says of a checkout."""
    return subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True).stdout


def files_of(commit: str, checkout: Path, folder: Path) -> None:
    """The tool's examples as they were at a commit, in `folder`: a script may name other files among them."""
    archive = git(checkout, "archive", commit, "examples")
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def with_deepspeed(script: Path, commit: str, checkout: Path) -> None:
    """Put ms-swift's own DeepSpeed config of that commit in the place of its name in a script.

    Its optimizer and schedule are left out: DeepSpeed would compile its AdamW, which has the same states.
    """
    text = script.read_text("utf-8")
    if (named := NAMED_ZERO.search(text)) is None:
        return
    listed = git(checkout, "ls-tree", "-r", "--name-only", commit, "swift").decode().splitlines()
    path = next(path for path in listed if path.endswith(f"/{named[2]}.json") and "megatron" not in path)
    config = json.loads(git(checkout, "show", f"{commit}:{path}"))
    kept = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    write_json(script.with_name(f"{named[2]}.json"), kept)
    script.write_text(NAMED_ZERO.sub(rf"\1{script.with_name(named[2])}.json", text), "utf-8")


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
        if row.shape:
            (Path(name) / "model").mkdir()
        if row.commit:
            files_of(row.commit, checkout, Path(name) / "then")
            file = Path(name) / "then" / row.path
            if row.tool == "ms-swift":
                with_deepspeed(file, row.commit, checkout)
            else:
                file.write_text(GONE.sub("", file.read_text("utf-8")), "utf-8")
        low, high = row.longest_tokens or (None, None)
        found: dict[str, object] = {"most": figures(estimate(row, high, checkout, Path(name)))}
        if low != high and not row.samples:
            found["fewest"] = figures(estimate(row, low, checkout, Path(name)))
    return found


def main() -> None:
    name, out, checkout = sys.argv[1:]
    row = next(row for row in read_rows() if row.name == name)
    write_json(Path(out), json.loads(json.dumps(predict(row, Path(checkout)))))


if __name__ == "__main__":
    main()
