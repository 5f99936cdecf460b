"""What public logs of verl measured, beside what `autofit estimate` says of the same settings.

Run: python experiments/verl_logs/run.py [NUMBER ...], the rows of rows.yaml by number from 1, all by default. It keeps
the rows that it does not run again. Writes results.json and table.md.

Allocated bytes are those of the actor's process, without vLLM's, as verl logs them: the most since the process began.
Of a run of `one_step` the update does not count, which is predicted with the optimizer's states that the first has not.
Where vLLM is in the trainer's process (`vllm_in_process`, verl before 0.6), torch counts its weights and cache also
while it sleeps, since vLLM unmaps them without telling torch: both are added, as autofit's engine has them.

A simulated generation has completions of full length. Of a row with `completions`, whose lengths its log tells, the
engine's law has as many of the least, mean and most length, in the row's settings. Such a verl gave the weights to the
engine inside of its timer `gen`. With `v0` the engine is vLLM's first, which leaves the card idle between two steps and
launches adapters slower. A row of `one_step` is the first, whose update also locks the host's memory for the
optimizer's states: verl moves them there at its end (`to("cpu", non_blocking=True)`).
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml

import autofit
from autofit.api.verl import VerlLog, rows_of
from autofit.errors import ConfigError
from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.rates.collectives import nccl_bytes
from autofit.fakegpu.specs import HostCosts, gpu_spec
from autofit.probing.result import ProbeResult
from autofit.recipe.catalogue import architecture
from experiments.kept import commit

HERE = Path(__file__).parent
KEPT = HERE / "results.json"
GIB = 1 << 30
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
# Seconds of a step in which vLLM's first engine leaves the card idle: 5 to 13 ms (vllm-project/vllm#6854); the least.
V0_IDLE_S = 5e-3
# What it took for one of its 18 launches a layer for adapters (fourteen of Triton, four buffers) without graphs, at
# least: 80 layers went from 17.6 to 6.5 tokens a second for one sequence (vllm-project/vllm#13204, vLLM 0.7.0).
V0_ADAPTER_LAUNCH_S = (1 / 6.5 - 1 / 17.6) / 80 / 18
# Bytes a second of locking host memory: 32 MB in 11.6 ms (rapidsai/dask-cuda#106).
PINNED_PER_S = 32e6 / 11.6e-3
ADAPTER_LAUNCHES = 12  # a layer in 0.8.3, whose kernels take all slices of a product (vllm-project/vllm#14685)
SIZES = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "tensor_model_parallel_size")


def predicted(row: Mapping[str, Any], common: Mapping[str, object]) -> dict[str, object]:
    """The phases of a row as a simulated card has them, in GiB, and the seconds of verl's timers."""
    values = {**common, **row["values"], **row.get("assumed", {}), **row.get("lengths", {})}
    words = " ".join(f"{key}={value}" for key, value in values.items())
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.sh"
        script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
        try:
            found = autofit.estimate(script, gpu=row["gpu"], advice=False).result
        except ConfigError as error:
            return {"refused": str(error)}
    parts = found.categories
    served = {name: held.get("vLLM", 0) for name, held in parts.items()}
    phases = {
        phase.name: round((phase.peak_allocated_bytes - served[phase.name]) / GIB, 3)
        for phase in found.phases if parts.get(phase.name)
    }  # fmt: skip
    later = max(
        size for name, size in phases.items() if name != "load" and (name != "update" or not row.get("one_step"))
    )
    if row.get("vllm_in_process"):  # which counts what it holds once it is there, asleep too
        later += pool_gib(row, values)
    most = round(max(later, phases.get("load", 0.0)), 3)
    return {
        "allocated_gib": most, "phases_gib": phases, "seconds": seconds(row, found, values),
        "computed_in_s": round(time.monotonic() - began),
    }  # fmt: skip


def pool_gib(row: Mapping[str, Any], values: Mapping[str, object]) -> float:
    """The weights and the cache of an engine: its share of the card without what it computes with.

    vLLM before 0.11 looks at the card before its communicators are there, so that they count in its share as well
    (init_device of vllm/worker/worker.py).
    """
    law = engine(row, values)
    return (law.cache_bytes - nccl_bytes(law.spec, law.ranks)) / GIB


def engine(row: Mapping[str, Any], values: Mapping[str, object]) -> VllmEngine:
    """The engine of a row, without weights; verl before 0.6 had no graphs unless told to, and no vLLM that prepares a
    step while the card computes."""
    known = architecture(str(values[f"{MODEL}.path"]))
    assert known is not None
    usual: Mapping[str, object] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    settings = {key: str(values.get(f"{ROLLOUT}.{key}", usual.get(key))) for key in SIZES}
    return VllmEngine(
        spec=gpu_spec(row["gpu"].partition("x")[2] or row["gpu"]), costs=HostCosts(), decoder=Decoder.of(known.config),
        weights_bytes=0, utilization=float(settings["gpu_memory_utilization"]), longest=1,
        most_sequences=int(settings["max_num_seqs"]), ranks=int(settings["tensor_model_parallel_size"]),
        batched_tokens=int(settings["max_num_batched_tokens"]), eager=True, waits=True,
        lora_rank=int(str(values.get(f"{MODEL}.lora_rank", 0))),
    )  # fmt: skip


def generation_s(row: Mapping[str, Any], values: Mapping[str, object]) -> float:
    """Seconds of a generation whose completions have the lengths of the log."""
    law, told = engine(row, values), row["completions"]
    cards = int(str(values["trainer.n_gpus_per_node"]))
    group = int(str(values.get(f"{ROLLOUT}.n", 1)))
    count = int(str(values["data.train_batch_size"])) * group * law.ranks // cards
    lengths = spread(count, least=told["least"], mean=told["mean"], most=told["most"])
    idle_s = 0.0
    if row.get("v0"):
        launches = ADAPTER_LAUNCHES * law.decoder.layers if law.lora_rank else 0
        idle_s = (V0_IDLE_S + launches * (V0_ADAPTER_LAUNCH_S - law.costs.launch_s)) * told["most"]
    return law.generation_s([told["prompt"]] * count, lengths, group=group) + idle_s


def spread(count: int, *, least: int, mean: float, most: int) -> list[int]:
    """So many lengths in any order, of this least, mean and most."""
    power = (most - least) / (mean - least) - 1
    lengths = [round(least + (most - least) * ((number + 0.5) / count) ** power) for number in range(count)]
    lengths[-1] = most
    random.Random(0).shuffle(lengths)
    return lengths


def seconds(row: Mapping[str, Any], found: ProbeResult, values: Mapping[str, object]) -> dict[str, float]:
    """The seconds of verl's timers, those that a row's log has; all of them where it has none."""
    prompts, mini = (int(str(values[key])) for key in ("data.train_batch_size", MINI))
    log = VerlLog(steps=1, allocated_bytes=None, reserved_bytes=None, seconds={})
    rows = {each.name.removeprefix("timing_s/"): each.promised for each in rows_of(log, found, prompts // mini)}
    if "completions" in row:
        rows["gen"] = generation_s(row, values) + (rows.get("update_weights") or 0.0)
    if row.get("one_step"):
        rows["update_actor"] = (rows["update_actor"] or 0.0) + found.categories["update"]["optimizer"] / PINNED_PER_S
    timed = row.get("seconds", {})
    return {name: round(took, 2) for name, took in rows.items() if name in (timed or rows) and took is not None
            and name != "allocated"}  # fmt: skip


def in_order(took: Mapping[str, float]) -> str:
    """`update_actor 22.2 > gen 4.2`."""
    return " > ".join(f"{name} {took[name]}" for name in sorted(took, key=lambda name: -took[name]))


def table(rows: list[dict[str, Any]], kept: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = ["| run | verl | card | measured, GiB | predicted, GiB | off | what is known of the difference |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        found = kept.get(row["name"], {})
        size, off = found.get("allocated_gib"), found.get("off")
        if row["allocated_gib"] is None:
            continue
        shown = ("not run", "") if size is None else (f"{size:.2f}", f"{off:+.1%}")
        cells = (row["name"], row["verl"], row["card"], row["allocated_gib"], *shown, row.get("why", ""))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| run | timing_s of the log | predicted | same order |", "|---|---|---|---|"]
    for row in rows:
        if timed := row.get("seconds"):
            told = kept.get(row["name"], {}).get("seconds", {})
            same = sorted(timed, key=timed.__getitem__) == sorted(told, key=told.__getitem__)
            ordered = (row["name"], in_order(timed), in_order(told) or "not run", "yes" if same else "no")
            lines.append(f"| {' | '.join(ordered)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    given = yaml.safe_load((HERE / "rows.yaml").read_text("utf-8"))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    wanted = [int(word) for word in sys.argv[1:]] or range(1, len(given["rows"]) + 1)
    for number in wanted:
        row = given["rows"][number - 1]
        found = predicted(row, given["common"])
        told = {"measured_gib": row["allocated_gib"], **found, "commit": commit()}
        if "allocated_gib" in found and row["allocated_gib"] is not None:
            told["off"] = round(found["allocated_gib"] / row["allocated_gib"] - 1, 4)
        kept[row["name"]] = told
        print(row["name"], told, flush=True)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    (HERE / "table.md").write_text(table(given["rows"], kept))


if __name__ == "__main__":
    main()
