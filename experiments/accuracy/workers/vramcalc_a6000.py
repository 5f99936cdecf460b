"""Measures one configuration with vramcalc's own `bench` inside `fake_gpu`, and writes its figures.

Usage, in the environment of the set: python -m experiments.accuracy.workers.vramcalc_a6000 ROW CHECKOUT FOLDER OUT

A row's name is MODEL/WORD/WORD ..., the words as their page has them: inference or train, a length, pure or amp, ckpt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from autofit.fakegpu import fake_gpu
from autofit.recipe import catalogue
from experiments.accuracy.workers.figures import write_figures

OWNERS = {"Qwen2.5-1.5B": "Qwen"}  # of all others: meta-llama


def options(words: list[str]) -> dict[str, object]:
    """The arguments of their `bench` that the words of a row stand for."""
    told: dict[str, object] = {
        "mode": "train" if "train" in words else "inference", "grad_checkpoint": "ckpt" in words,
        "precision": "pure" if "pure" in words else "amp", "attn_impl": "eager" if "eager" in words else "sdpa",
        "seq_len": next((int(word) for word in words if word.isdigit()), 2048),
    }  # fmt: skip
    return {**told, "lora_rank": 16} if "lora=16" in words else told


def main(row: str, checkout: Path, folder: Path, out: Path) -> None:
    import torch
    import transformers
    from vramcalc.bench import bench  # type: ignore[import-not-found]

    name, *words = row.split("/")
    known = catalogue.architecture(f"{OWNERS.get(name, 'meta-llama')}/{name}")
    assert known is not None
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(dict(known.config)), encoding="utf-8")

    def from_pretrained(path: str, torch_dtype: torch.dtype, attn_implementation: str) -> object:
        config = transformers.AutoConfig.from_pretrained(path)
        return kind.from_config(config, dtype=torch_dtype, attn_implementation=attn_implementation)

    started = time.perf_counter()
    with fake_gpu("a6000", record_places=False) as gpu:
        kind = transformers.AutoModelForCausalLM
        kind.from_pretrained = from_pretrained
        done = bench(folder / name, **options(words))
    if done.status != "ok":
        raise SystemExit(f"their program stopped: {done.error}")
    write_figures(out, {"peak_allocated_bytes": done.measured["total"], "buckets": done.measured}, gpu, started)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
