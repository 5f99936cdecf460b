"""Does the number of ranks, or sharding over them, change a recipe's gradient? Measured on real gloo ranks of the CPU.

Run: python experiments/neutrality/ranks.py [--only TEXT]
A cell is ||g - g_1|| / ||g_1||: the accumulated gradient of N ranks against that of one, with the same micro-batch, the
same samples of an optimizer step and of a rollout over all ranks, in float32; the worst over the optimizer steps that a
rollout serves. It writes ranks.json and ranks.md. tests/test_neutrality.py holds the tiers against it.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from run import (
    BATCH,
    DPO_LOSSES,
    LOSSES,
    PLAIN,
    RLOO,
    Row,
    circumstances,
    grpo,
    only_of,
    plain,
    table,
    versions_of,
    write_models,
)

HERE = Path(__file__).parent
CASES = {f"{sharding}, {ranks} ranks": (ranks, sharding) for ranks in (2, 4) for sharding in ("ddp", "fsdp2")}


def rows() -> Iterator[Row]:
    """Every recipe of the table: trainer, name, settings and the kind of model."""
    for loss in LOSSES:
        yield grpo(loss, loss_type=loss)
    for loss in ("grpo", "dapo"):
        yield grpo(f"{loss}, 2 steps of each rollout", loss_type=loss, steps_per_generation=16)
        yield grpo(f"{loss}, top entropy 0.5", loss_type=loss, top_entropy_quantile=0.5)
        yield grpo(f"{loss}, entropy bonus", loss_type=loss, entropy_coef=0.01)
    yield grpo("dapo, 2 rollouts a step", loss_type="dapo", steps_per_generation=4)
    yield grpo("dapo, truncated completions masked", loss_type="dapo", mask_truncated_completions=True)
    yield grpo("dapo, num_iterations 2, beta 0.1", loss_type="dapo", num_iterations=2, beta=0.1)
    yield grpo("dapo, groups shared by ranks", loss_type="dapo", num_generations=16)
    yield grpo("grpo, rewards scaled by batch", scale_rewards="batch")
    two: dict[str, Any] = {"reward_funcs": ["a.b", "c.d"], "reward_weights": [1.0, 0.5]}
    yield grpo("grpo, 2 rewards normalised, then summed", **two, multi_objective_aggregation="normalize_then_sum")
    yield grpo("grpo, adaptive entropy bonus", use_adaptive_entropy=True, entropy_coef=0.01, entropy_target=9.0)
    yield grpo("grpo, off-policy mask, num_iterations 2", off_policy_mask_threshold=0.01, num_iterations=2)
    yield grpo("grpo, LoRA, beta 0.1", use_peft=True, lora_r=4, beta=0.1)
    yield grpo("grpo, positions that count padding", model="gpt2")
    yield grpo("grpo, mixture of experts, balanced", model="moe")
    yield grpo("grpo, mixture of experts, not balanced", model="moe", router_aux_loss_coef=0.0)
    for loss in ("nll", "dft"):
        yield {"trainer": "sft", "name": f"sft, {loss}", "settings": {**BATCH, "loss_type": loss}}
    yield {"trainer": "sft", "name": "sft, LoRA", "settings": {**BATCH, "use_peft": True, "lora_r": 4}}
    apart = {**BATCH, "loss_type": "nll", "average_tokens_across_devices": False}
    yield {"trainer": "sft", "name": "sft, tokens counted by each rank", "settings": apart}
    yield {"trainer": "sft", "name": "sft, mixture of experts, balanced", "settings": dict(BATCH), "model": "moe"}
    for loss in DPO_LOSSES:
        smoothing = {"label_smoothing": 0.1} if loss in ("robust", "exo_pair") else {}
        yield {"trainer": "dpo", "name": f"dpo, {loss}", "settings": {**BATCH, "loss_type": [loss], **smoothing}}
    yield {"trainer": "dpo", "name": "dpo, LoRA", "settings": {**BATCH, "use_peft": True, "lora_r": 4}}
    yield {"trainer": "dpo", "name": "dpo, mixture of experts, balanced", "settings": dict(BATCH), "model": "moe"}
    for name, own, model in (
        ("rloo", {}, "llama"), ("rloo, 2 iterations", {"num_iterations": 2}, "llama"),
        ("rloo, advantages normalised", {"normalize_advantages": True}, "llama"),
        ("rloo, learned positions", {}, "gpt2"),
        ("rloo, mixture of experts, balanced", {"router_aux_loss_coef": 0.02}, "moe"),
    ):  # fmt: skip
        yield {"trainer": "rloo", "name": name, "settings": {**RLOO, **own}, "model": model}
    yield {"trainer": "reward", "name": "reward", "settings": dict(BATCH)}
    yield {"trainer": "reward", "name": "reward, mixture of experts", "settings": dict(BATCH), "model": "moe"}
    yield {"trainer": "reward", "name": "reward, centred", "settings": {**BATCH, "center_rewards_coefficient": 0.01}}
    apart = {**PLAIN, "average_tokens_across_devices": False}
    yield {"trainer": "hf", "name": "hf, tokens counted by each rank", "settings": apart}
    yield from plain()


def spread(settings: Mapping[str, object], ranks: int, sharding: str) -> dict[str, object]:
    """The changes of `settings` that train the same samples over `ranks`."""
    changes: dict[str, object] = {"launch": {"ranks": ranks, "sharding": sharding}}
    for key in ("gradient_accumulation_steps", "steps_per_generation"):
        if isinstance(value := settings.get(key), int):
            changes[key] = value // ranks
    return changes


def measure(row: Row, models: Path, only: tuple[str, ...] = ()) -> dict[str, float | str]:
    """{case: relative difference of the gradient, or why there is none} of one recipe, for all cases or `only` some."""
    from autofit.errors import EnvironmentFault
    from autofit.proof.worker import GradientProof

    settings = row["settings"]
    assert isinstance(settings, dict)
    base: dict[str, Any] = {"model_name_or_path": str(models / str(row.get("model", "llama"))), "dataset_name": "none"}
    rewards = {"reward_funcs": ["a.b"]} if row["trainer"] in ("grpo", "rloo") else {}
    base = {**base, **rewards, **settings}
    named = {case: {**base, **spread(settings, *how)} for case, how in CASES.items() if case in only or not only}
    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        proof = GradientProof(str(row["trainer"]), {"baseline": base, **named}, Path(folder))
        for case in named:
            try:
                found[case] = float(f"{proof.difference(case).relative:.2e}")
            except (RuntimeError, EnvironmentFault) as error:
                found[case] = " ".join(str(error).split())[:120]
    return found


def measure_all(only: str) -> Iterator[Row]:
    """The rows whose name contains `only`, with their cells, one after another."""
    from autofit.plugin.models import go_offline_without_a_hub

    go_offline_without_a_hub()
    with tempfile.TemporaryDirectory() as temporary:
        models = write_models(Path(temporary))
        for row in rows():
            if only in str(row["name"]):
                with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    cells = measure(row, models)
                print(row["name"], cells, file=sys.stderr, flush=True)
                yield {**row, "cells": cells}


def markdown(results: Mapping[str, object]) -> str:
    """The table as Markdown: "rounding" is a difference below the bound."""
    found, bound = results["rows"], results["bound"]
    assert isinstance(found, list)
    assert isinstance(bound, float)
    versions = versions_of(results)
    lines = [
        "# Whether ranks and sharding keep the gradient",
        "",
        f"Made by `python experiments/neutrality/ranks.py` on {results['date']}, gloo ranks of one CPU, float32, "
        f"{versions}. Relative difference of the accumulated gradient of N ranks from that of one rank with the same "
        f"samples and the same micro-batch; up to {bound:.0e} is rounding.",
        "",
        *table(found, CASES, bound),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    only = only_of(__doc__)
    began = time.perf_counter()
    results = {**circumstances(), "rows": []}
    found = []
    for row in measure_all(only):
        found.append(row)
        results |= {"rows": found, "seconds": round(time.perf_counter() - began)}
        if not only:
            (HERE / "ranks.json").write_text(json.dumps(results, indent=1) + "\n")
            (HERE / "ranks.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
