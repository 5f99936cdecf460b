"""Which knobs keep the gradient, for which recipe? Every cell is a gradient proof on one small Llama, on the CPU.

Run: python experiments/neutrality/run.py [--only TEXT]
A cell is ||g - g_baseline|| / ||g_baseline|| of the accumulated gradient, identical rollouts, float32; the worst over
the optimizer steps that a rollout serves, and for the split over a larger and a smaller micro-batch. It writes
results.json and table.md. tests/test_neutrality.py holds the claims of autofit/space/ and search_spaces/ against
results.json, and measures some of the cells again.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
GRPO = {**BATCH, "steps_per_generation": 8, "num_generations": 4, "max_completion_length": 64, "loss_type": "grpo"}
RLOO = {key: value for key, value in GRPO.items() if key != "loss_type"}
PLAIN = {**BATCH, "objective": "sft", "gradient_checkpointing": True}
LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
              "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")  # fmt: skip

OPTIONS = "activation_checkpointing_kwargs"

Row = dict[str, object]


def rows() -> Iterator[Row]:
    """Every recipe of the table: trainer, name, settings and the kind of model."""
    for loss in LOSSES:
        yield grpo(f"{loss}", loss_type=loss)
        yield grpo(f"{loss}, beta 0.1", loss_type=loss, beta=0.1)
        yield grpo(f"{loss}, num_iterations 2", loss_type=loss, num_iterations=2)
        yield grpo(f"{loss}, truncated completions masked", loss_type=loss, mask_truncated_completions=True)
    for loss in ("grpo", "dapo", "cispo"):
        yield grpo(f"{loss}, 2 steps of each rollout", loss_type=loss, steps_per_generation=16)
        yield grpo(f"{loss}, 4 rollouts a step", loss_type=loss, steps_per_generation=2)
        yield grpo(f"{loss}, importance of sequences", loss_type=loss, importance_sampling_level="sequence")
        yield grpo(f"{loss}, rewards scaled by batch", loss_type=loss, scale_rewards="batch")
        yield grpo(f"{loss}, rewards not scaled", loss_type=loss, scale_rewards="none")
        yield grpo(f"{loss}, top entropy 0.5", loss_type=loss, top_entropy_quantile=0.5)
        yield grpo(f"{loss}, entropy bonus", loss_type=loss, entropy_coef=0.01)
    two_groups: dict[str, Any] = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_generations": 8}
    for loss in ("grpo", "dapo", "bnpo"):
        yield grpo(f"{loss}, 2 groups", **two_groups, loss_type=loss)
    yield grpo("grpo, rewards scaled by batch, 2 groups", **two_groups, scale_rewards="batch")
    yield grpo("luspo, importance of sequences", loss_type="luspo", importance_sampling_level="sequence")
    yield grpo("grpo, adaptive entropy bonus", use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=9.0)
    two: dict[str, Any] = {"reward_funcs": ["a.b", "c.d"], "reward_weights": [1.0, 0.5]}
    yield grpo("grpo, 2 rewards summed, then normalised", **two)
    yield grpo("grpo, 2 rewards normalised, then summed", **two, multi_objective_aggregation="normalize_then_sum")
    yield grpo("grpo, two-sided clipping, num_iterations 2", delta=1.05, num_iterations=2, epsilon=0.1)
    yield grpo("dapo, clipped higher, num_iterations 2", loss_type="dapo", epsilon_high=0.28, num_iterations=2)
    yield grpo("grpo, off-policy mask, num_iterations 2", off_policy_mask_threshold=0.01, num_iterations=2)
    yield grpo("grpo, beta 0.1, bias-corrected KL, num_iterations 2", beta=0.1, use_bias_correction_kl=True,
               num_iterations=2)  # fmt: skip
    yield grpo("grpo, temperature 0.7", temperature=0.7)
    yield grpo("grpo, padded to 8 tokens", pad_to_multiple_of=8)
    yield grpo("grpo, LoRA, beta 0.1", use_peft=True, lora_r=4, beta=0.1)
    yield grpo("dapo, LoRA", use_peft=True, lora_r=4, loss_type="dapo")
    yield grpo("grpo, positions that count padding", model="gpt2")
    yield grpo("grpo, mixture of experts, balanced", model="moe")
    yield grpo("grpo, mixture of experts, not balanced", model="moe", router_aux_loss_coef=0.0)
    for loss in ("nll", "dft"):
        yield {"trainer": "sft", "name": f"sft, {loss}", "settings": {**BATCH, "loss_type": loss}}
    yield {"trainer": "sft", "name": "sft, LoRA", "settings": {**BATCH, "use_peft": True, "lora_r": 4}}
    yield {"trainer": "sft", "name": "sft, mixture of experts, balanced", "settings": dict(BATCH), "model": "moe"}
    for loss in DPO_LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("robust", "exo_pair") else {}
        yield {"trainer": "dpo", "name": f"dpo, {loss}", "settings": {**BATCH, "loss_type": [loss], **smoothing}}
    yield {"trainer": "dpo", "name": "dpo, LoRA", "settings": {**BATCH, "use_peft": True, "lora_r": 4}}
    yield {"trainer": "dpo", "name": "dpo, sigmoid and sft", "settings": {**BATCH, "loss_type": ["sigmoid", "sft"]}}
    yield {"trainer": "dpo", "name": "dpo, mixture of experts, balanced", "settings": dict(BATCH), "model": "moe"}
    for name, own, model in (
        ("rloo", {}, "llama"), ("rloo, no KL", {"beta": 0.0}, "llama"),
        ("rloo, 2 iterations", {"num_iterations": 2}, "llama"),
        ("rloo, advantages normalised", {"normalize_advantages": True}, "llama"),
        ("rloo, LoRA", {"use_peft": True, "lora_r": 4}, "llama"), ("rloo, learned positions", {}, "gpt2"),
        ("rloo, mixture of experts, balanced", {"router_aux_loss_coef": 0.02}, "moe"),
    ):  # fmt: skip
        yield {"trainer": "rloo", "name": name, "settings": {**RLOO, **own}, "model": model}
    yield {"trainer": "reward", "name": "reward", "settings": dict(BATCH)}
    yield {"trainer": "reward", "name": "reward, mixture of experts", "settings": dict(BATCH), "model": "moe"}
    yield {"trainer": "reward", "name": "reward, centred", "settings": {**BATCH, "center_rewards_coefficient": 0.01}}
    yield from plain()


def plain() -> Iterator[Row]:
    """The recipes of a plain transformers.Trainer."""
    for name, own, model in (
        ("hf", {}, "llama"), ("hf, LoRA", {"use_peft": True, "lora_r": 4}, "llama"),
        ("hf, padded to max_length", {"pad_to_max_length": True}, "llama"),
        ("hf, last layer only", {"trainable_layers": 1}, "llama"), ("hf, learned positions", {}, "gpt2"),
        ("hf, mixture of experts", {}, "moe"), ("hf, mixture of experts, balanced", {}, "moe, balanced"),
        ("hf, dpo", {"objective": "dpo"}, "llama"), ("hf, reward", {"objective": "reward"}, "llama"),
        ("hf, dpo, LoRA", {"objective": "dpo", "use_peft": True, "lora_r": 4}, "llama"),
    ):  # fmt: skip
        yield {"trainer": "hf", "name": name, "settings": {**PLAIN, **own}, "model": model}


def grpo(name: str, *, model: str = "llama", **settings: object) -> Row:
    """A GRPO recipe: 8 micro-batches of 4 completions, 4 of each prompt."""
    return {"trainer": "grpo", "name": name, "settings": {**GRPO, **settings}, "model": model}


def knobs(trainer: str, settings: Mapping[str, object]) -> dict[str, list[dict[str, object]]]:
    """{knob: the changes to measure}, each at the same effective batch."""
    accumulation, chunk = settings["gradient_accumulation_steps"], settings.get("steps_per_generation")
    assert isinstance(accumulation, int)
    found: dict[str, list[dict[str, object]]] = {"per_device_train_batch_size": []}
    for micro in (8, 2):
        split: dict[str, object] = {"per_device_train_batch_size": micro,
                                    "gradient_accumulation_steps": accumulation * 4 // micro}  # fmt: skip
        if isinstance(chunk, int):
            split["steps_per_generation"] = chunk * 4 // micro
        found["per_device_train_batch_size"].append(split)
    if trainer in ("grpo", "rloo") and chunk == accumulation and settings.get("num_iterations", 1) == 1:
        found["steps_per_generation"] = [{"steps_per_generation": 2}]
    if trainer == "dpo":
        found["precompute_ref_log_probs"] = [{"precompute_ref_log_probs": True}]
    if trainer in ("sft", "dpo", "reward", "hf"):
        scored_before = {"precompute_ref_log_probs": True} if trainer == "dpo" else {}
        found[f"{OPTIONS}.every_n_layers"] = [{**scored_before, OPTIONS: {"every_n_layers": 2}}]
    if trainer == "sft" and not settings.get("use_peft"):  # TRL 1.16 fails under LoRA
        found[f"{OPTIONS}.selective"] = [{OPTIONS: {"selective": True}}]
    if trainer == "sft":
        found["padding_free"] = [{"padding_free": True, "max_length": None}]  # TRL takes it without packing only so
    return found | {
        "gradient_checkpointing": [{"gradient_checkpointing": False}],
        "attn_implementation": [{"attn_implementation": "eager"}],
    }


def measure(row: Row, models: Path, only: tuple[str, ...] = ()) -> dict[str, float]:
    """{knob: relative difference of the gradient} of one recipe, for all knobs or `only` some."""
    from autofit.proof.worker import GradientProof

    settings = row["settings"]
    assert isinstance(settings, dict)
    base: dict[str, object] = {
        "model_name_or_path": str(models / str(row.get("model", "llama"))),
        "dataset_name": "none",
    }
    if row["trainer"] in ("grpo", "rloo"):
        base["reward_funcs"] = ["a.b"]
    base |= settings
    changes = {k: c for k, c in knobs(str(row["trainer"]), settings).items() if k in only or not only}
    named = {f"{knob} {i}": {**base, **c} for knob, cs in changes.items() for i, c in enumerate(cs)}
    with tempfile.TemporaryDirectory() as folder:
        proof = GradientProof(str(row["trainer"]), {"baseline": base, **named}, Path(folder))
        found = {name: proof.difference(name).relative for name in named}
    return {knob: max(found[f"{knob} {i}"] for i in range(len(cs))) for knob, cs in changes.items()}


def write_models(folder: Path) -> Path:
    """The configs of a Llama with grouped queries, a mixture of experts and a GPT-2; the proof makes them small."""
    from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

    LlamaConfig(num_attention_heads=4, num_key_value_heads=2, hidden_size=256).save_pretrained(folder / "llama")
    Qwen3MoeConfig(num_hidden_layers=2).save_pretrained(folder / "moe")
    Qwen3MoeConfig(num_hidden_layers=2, output_router_logits=True).save_pretrained(folder / "moe, balanced")
    GPT2Config().save_pretrained(folder / "gpt2")
    return folder


def measure_all(only: str, workers: int) -> list[Row]:
    """The rows whose name contains `only`, with their cells; each worker measures a row on one thread."""
    wanted = [row for row in rows() if only in str(row["name"])]
    with tempfile.TemporaryDirectory() as temporary:
        models = write_models(Path(temporary))
        with multiprocessing.get_context("spawn").Pool(workers, initializer=_prepare) as pool:
            done = []
            for row in pool.imap(partial(_with_cells, models=models), wanted):
                print(row["name"], row["cells"], file=sys.stderr, flush=True)
                done.append(row)
    return done


def _prepare() -> None:
    """A worker's settings."""
    import torch

    from autofit.plugin.models import go_offline_without_a_hub

    go_offline_without_a_hub()
    torch.set_num_threads(1)


def _with_cells(row: Row, *, models: Path) -> Row:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        cells = measure(row, models)
    return {**row, "cells": {knob: float(f"{value:.2e}") for knob, value in cells.items()}}


def markdown(results: Mapping[str, object]) -> str:
    """The table as Markdown: "rounding" is a difference below the bound."""
    found, bound = results["rows"], results["bound"]
    assert isinstance(found, list)
    assert isinstance(bound, float)
    columns = list(dict.fromkeys(knob for row in found for knob in row["cells"]))
    versions = versions_of(results)
    lines = [
        "# Which knobs keep the gradient",
        "",
        f"Made by `python experiments/neutrality/run.py` on {results['date']}, CPU, float32, {versions}. Relative "
        f"difference of the accumulated gradient from the baseline's; up to {bound:.0e} is rounding.",
        "",
        *table(found, columns, bound),
    ]
    return "\n".join(lines) + "\n"


def versions_of(results: Mapping[str, object]) -> str:
    """The packages with which `results` were measured."""
    return ", ".join(f"{name} {number}" for name, number in dict(results["versions"]).items())  # type: ignore[call-overload]


def table(found: list[dict[str, Any]], columns: Iterable[str], bound: float) -> Iterator[str]:
    """The lines of a Markdown table: a row a recipe, whose "cells" are looked up by column."""
    columns = list(columns)
    yield "| recipe | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in found:
        cells = [_cell(row["cells"].get(column), bound) for column in columns]
        yield f"| {row['name']} | " + " | ".join(cells) + " |"


def _cell(value: float | str | None, bound: float) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0e}" if value <= bound else f"**{100 * value:.2g} %**"


def only_of(about: str | None) -> str:
    """The text that --only gives; empty: all rows."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the rows whose name contains this, and write nothing")
    return str(parser.parse_args().only)


def circumstances() -> dict[str, object]:
    """When, where and with what a table is measured."""
    from autofit.proof.proof import ROUNDING

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"cpu ({platform.machine()})",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "bound": ROUNDING,
    }


def main() -> None:
    only = only_of(__doc__)
    began = time.perf_counter()
    results = {**circumstances(), "rows": measure_all(only, os.cpu_count() or 1)}
    results["seconds"] = round(time.perf_counter() - began)
    if not only:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "table.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
