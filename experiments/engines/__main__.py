"""Throughputs that others measured with vLLM, beside the simulated engine's: `python -m experiments.engines`."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.specs import HostCosts, gpu_spec
from autofit.recipe.catalogue import architecture

HERE = Path(__file__).parent
ASYNCHRONOUS = (0, 14)  # since when the host prepares a step while the card computes, by default


def rows() -> list[dict[str, str]]:
    with (HERE / "published.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def engine(row: dict[str, str]) -> VllmEngine:
    """The engine of a row."""
    shape = architecture(row["model"])
    assert shape is not None, row["model"]
    version = tuple(int(part) for part in row["vllm"].split(".")[:2]) if row["vllm"] != "?" else ASYNCHRONOUS
    most = min(int(row["max_num_seqs"]), int(row["concurrency"] or row["max_num_seqs"]))
    return VllmEngine(
        spec=gpu_spec(row["card"]), costs=HostCosts(), decoder=Decoder.of(shape.config),
        weights_bytes=2 * shape.parameters, utilization=float(row["utilization"]), longest=8192, most_sequences=most,
        batched_tokens=int(row["batched_tokens"]), greedy=row["sampling"] == "greedy", logprobs=False,
        waits=version < ASYNCHRONOUS, lora_rank=int(row["lora_rank"] or 0),
    )  # fmt: skip


def tokens_per_s(row: dict[str, str]) -> float:
    """The simulated throughput, in the measure of a row: output tokens, prompts and output, or decoding alone."""
    at, requests = engine(row), int(row["requests"])
    prompt, completion = int(row["prompt"]), int(row["completion"])  # on average; all are played to the longest
    seconds = at.generation_s([prompt] * requests, int(row["longest"]), group=int(row["group"]))
    if row["measure"] == "decode":
        first = at.generation_s([prompt] * requests, 1, group=int(row["group"]))
        return requests * (completion - 1) / (seconds - first)
    return requests * (completion + (prompt if row["measure"] == "total" else 0)) / seconds


def main() -> None:
    """Write table.md and print it."""
    errors: dict[str, list[float]] = {}
    lines = ["| measured | vLLM | tokens/s | simulated | error |", "|---|---|---|---|---|"]
    for row in rows():
        told, measured = tokens_per_s(row), float(row["tokens_per_s"])
        error = told / measured - 1
        errors.setdefault(row["where"], []).append(error)
        lines.append(
            f"| {row['name']} ({row['measure']}) | {row['vllm']} | {measured:.0f} | {told:.0f} | {error:+.0%} |"
        )
    lines.append("")
    for where, each in errors.items():
        within = (np.abs(each) <= 0.2).sum()
        lines.append(f"- {where}: within 20 %: {within} of {len(each)}; median {np.median(np.abs(each)):.0%}")
    (HERE / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
