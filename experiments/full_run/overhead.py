"""What our callback, recorder and watchers cost of a step: paired, in one run.

Run: `python experiments/full_run/overhead.py [--pairs N]`; writes overhead.json beside it.

Two trainings of a plain `transformers.Trainer` on the CPU: one of a tiny model, one whose step takes 50 ms and more.
Every second step is trained without the callback: its hooks are not called. Each step is counted from its begin to the
next one's, so that its log line and the files are in it, in seconds of CPU time of the process and in wall seconds:
other work on the machine disturbs the wall clock by more than we measure. Two figures come of it: the difference of a
step with the callback and the mean of its neighbours without, and the CPU time inside our hooks.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import autofit
from autofit.watching.contract import Promise
from experiments.kept import commit

SIZES = {  # hidden size, layers, tokens of a sample
    "tiny": (32, 2, 16),
    "step of 50 ms and more": (128, 4, 96),
}
BATCH = 8
GRPO_METRICS = (  # are added to what is logged, so that lines and guards are those of a GRPO run
    "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "entropy", "kl", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "rewards/exact/mean", "rewards/exact/std", "rewards/format/mean", "rewards/format/std", "step_time",
    "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",
    "clip_ratio/region_mean",
)  # fmt: skip
WARM_UP = 10  # steps that are not counted


@dataclass
class Times:
    """By step number: the (wall, CPU) clocks when it began, and the CPU seconds inside our hooks."""

    began: dict[int, tuple[float, float]] = field(default_factory=dict)
    inside: dict[int, float] = field(default_factory=dict)


class EverySecondStep(TrainerCallback):  # type: ignore[misc]
    """Calls the hooks of `inner` in every second step."""

    def __init__(self, inner: TrainerCallback) -> None:
        self.inner, self.times, self._step = inner, Times(), 0

    def _call(self, name: str, *args: Any, **given: Any) -> None:
        if self._step % 2 == 0:
            return
        began = time.thread_time()
        getattr(self.inner, name)(*args, **given)
        self.times.inside[self._step] = self.times.inside.get(self._step, 0.0) + time.thread_time() - began

    def on_train_begin(self, *args: Any, **given: Any) -> None:
        self.inner.on_train_begin(*args, **given)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.times.began[state.global_step] = time.perf_counter(), time.process_time()
        self._step = state.global_step + 1
        self._call("on_step_begin", args, state, control, **given)

    def on_step_end(self, *args: Any, **given: Any) -> None:
        self._call("on_step_end", *args, **given)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **given: Any) -> None:
        as_grpo = logs | {name: random.gauss(1.0, 0.1) for name in GRPO_METRICS} if "loss" in logs else logs
        self._call("on_log", args, state, control, logs=as_grpo, **given)


def training(size: str, steps: int, folder: Path) -> Times:
    """The times of a training of `steps` steps, each logged."""
    hidden, layers, tokens = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.randint(512, (tokens,))), "labels": ids} for _ in range(256)]
    promise = Promise(
        device_name="elsewhere", fidelity="measured", device_used_bytes=None, limit_bytes=None, step_s=1.0,
        samples_per_s=1.0, effective_batch_size=BATCH,
    )  # fmt: skip
    ours = EverySecondStep(autofit.AutofitCallback(promise, folder=folder / "kept", say=lambda _: None))
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=steps, logging_steps=1, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[ours]).train()
    return ours.times


def alone(folder: Path, steps: int = 500) -> float:
    """CPU microseconds of the hooks of a logged step, one after the other without training: with warm caches."""
    args = SimpleNamespace(
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        world_size=1,
        device=SimpleNamespace(type="cpu"),
    )
    state, control = SimpleNamespace(global_step=0, max_steps=10**6, is_world_process_zero=True), SimpleNamespace()
    ours = autofit.AutofitCallback(folder=folder, say=lambda _: None)
    ours.on_train_begin(args, state, control)
    began = time.thread_time()
    for state.global_step in range(1, steps + 1):
        ours.on_step_begin(args, state, control)
        ours.on_step_end(args, state, control)
        ours.on_log(args, state, control, {"loss": 1.0} | {name: random.gauss(1.0, 0.1) for name in GRPO_METRICS})
    return round(1e6 * (time.thread_time() - began) / steps, 1)


def figures(times: Times) -> dict[str, object]:
    """Seconds of a step without us, and the cost by both ways of measuring it."""
    inside = [s for n, s in times.inside.items() if n > WARM_UP]
    wall, cpu = paired(times, 0), paired(times, 1)
    return {
        "pairs": len(inside), "wall": wall, "cpu": cpu,
        "inside_hooks_us": round(1e6 * statistics.median(inside), 1),
        "inside_hooks_mean_us": round(1e6 * statistics.mean(inside), 1),
        "inside_hooks_frac_of_cpu": statistics.mean(inside) / float(str(cpu["step_s"])),
    }  # fmt: skip


def paired(times: Times, clock: int) -> dict[str, object]:
    """Median step without us, and the median and quartiles of the difference that we make, by one of the two clocks."""
    starts = [times.began[n][clock] for n in sorted(times.began)]
    step_s = {n: b - a for n, (a, b) in enumerate(pairwise(starts), start=1) if n > WARM_UP}
    base = statistics.median(s for n, s in step_s.items() if n % 2 == 0)
    pairs = [s - (step_s[n - 1] + step_s[n + 1]) / 2 for n, s in step_s.items()
             if n % 2 and n - 1 in step_s and n + 1 in step_s]  # fmt: skip
    low, middle, high = (round(1e6 * s, 1) for s in statistics.quantiles(pairs, n=4))
    return {
        "step_s": base,
        "difference_us": middle,
        "quartiles_us": [low, high],
        "difference_frac": middle / 1e6 / base,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=150)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        warm_us = alone(Path(folder))
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = figures(training(size, 2 * pairs + WARM_UP, Path(folder)))
        print(size, json.dumps(found[size]), flush=True)
    packages = {name: version(name) for name in ("torch", "transformers")}
    content = {"date": str(date.today()), "commit": commit(), "device": "cpu", "cores": os.cpu_count(), "threads": 1,
               "versions": packages, "load_average": os.getloadavg()[1], "hooks_alone_us": warm_us,
               "results": found}  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
