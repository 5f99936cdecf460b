"""ftuneai's Python API on a row: `python ftune_row.py FOLDER`. Its hub's address is fixed: it is set here."""

import json
import os
import sys
from pathlib import Path

import ftuneai.hub
from ftuneai import Estimator

CARDS = {"a10g": "A10G-24GB", "a100-80gb": "A100-80GB", "t4": "T4-16GB"}  # its list lacks the L40S and the A6000


def main() -> None:
    ftuneai.hub.HF_API_BASE = os.environ["HF_ENDPOINT"]
    row = json.loads((Path(sys.argv[1]) / "row.json").read_text(encoding="utf-8"))
    target = {("q_proj", "v_proj"): "attention"}.get(tuple(row["lora_targets"]), "attention_all")
    if not set(row["lora_targets"]) <= {"q_proj", "k_proj", "v_proj", "o_proj"}:
        target = "all_linear"
    told = Estimator(
        model=row["model"], method=row["method"], quantization="4bit" if row["method"] == "qlora" else "none",
        batch_size=row["micro_batch"], seq_length=row["tokens"], gradient_checkpointing=row["checkpointing"],
        lora_rank=row["lora_r"] or 16, lora_target=target, flash_attention=row["attention"] != "eager",
        sharding="fsdp" if row["sharding"] == "fsdp" else "none", num_gpus=row["ranks"],
    )  # fmt: skip
    memory = told.estimate_memory()
    step_s = None
    if row["card"] in CARDS:  # hours are rounded to a tenth, so the time of many steps is asked for
        steps = 100_000
        samples = steps * row["micro_batch"] * row["ranks"]
        step_s = told.estimate_time(gpu=CARDS[row["card"]], dataset_size=samples, epochs=1).total_hours * 3600 / steps
    parts = {key: value for key, value in vars(memory).items() if key.endswith("_gb")}
    print(json.dumps({**parts, "step_s": step_s}))


if __name__ == "__main__":
    main()
