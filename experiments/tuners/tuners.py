"""Each tuner on the task, used as its page says; the simulated card raises torch.OutOfMemoryError as a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autofit.fakegpu import fake_gpu
from experiments.kept import patience
from experiments.tuners import task
from experiments.tuners.task import ACCUMULATION, CARD, MICRO, Outcome, trainer


def auto_find_batch_size() -> Outcome:
    """transformers' `auto_find_batch_size=True`."""
    with fake_gpu(CARD, record_places=False) as gpu:
        found, seen = trainer(gpu, MICRO, ACCUMULATION, finds=True)
        found.train()
        micro = found.state.train_batch_size
        return Outcome(probes=seen.begun, ooms=seen.begun - 1, micro_batch=micro, accumulation=ACCUMULATION,
                       samples_per_s=micro * ACCUMULATION / seen.step_s)  # fmt: skip


def find_executable_batch_size() -> Outcome:
    """accelerate's decorator around a function that trains."""
    from accelerate.utils import find_executable_batch_size as decorator

    tried: list[int] = []
    with fake_gpu(CARD, record_places=False) as gpu:

        @decorator(starting_batch_size=MICRO)  # type: ignore[untyped-decorator]
        def train(batch_size: int) -> float:
            tried.append(batch_size)
            made, seen = trainer(gpu, batch_size, ACCUMULATION)
            made.train()
            return seen.step_s

        step_s = train()
    return Outcome(probes=len(tried), ooms=len(tried) - 1, micro_batch=tried[-1], accumulation=ACCUMULATION,
                   samples_per_s=tried[-1] * ACCUMULATION / step_s)  # fmt: skip


def optuna_alone(trials: int = 4) -> Outcome:
    """Optuna's TPE over micro-batch and accumulation; an OOM is a failed trial (`catch`, as its pages show)."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def samples_per_s(trial: optuna.Trial) -> float:
        micro = trial.suggest_int("per_device_train_batch_size", 1, 32, log=True)
        accumulation = trial.suggest_categorical("gradient_accumulation_steps", [1, 2, 4, 8])
        with fake_gpu(CARD, record_places=False) as gpu:
            made, seen = trainer(gpu, micro, accumulation)
            made.train()
            return micro * accumulation / seen.step_s

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(samples_per_s, n_trials=trials, catch=(torch.OutOfMemoryError,))
    failed = sum(trial.state is optuna.trial.TrialState.FAIL for trial in study.trials)
    best = study.best_params
    return Outcome(probes=trials, ooms=failed, micro_batch=best["per_device_train_batch_size"],
                   accumulation=best["gradient_accumulation_steps"], samples_per_s=study.best_value)  # fmt: skip


def lightning_scaler() -> Outcome:
    """Lightning's Tuner.scale_batch_size in its default mode (power), then one fit with what it found."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    attempts: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.ends_s = 2, list[float]()
            self.model = task.model()

        def train_dataloader(self) -> object:
            attempts.append(self.batch_size)
            return torch.utils.data.DataLoader(task.Samples(), batch_size=self.batch_size)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *more: object) -> None:
            self.ends_s.append(gpu.elapsed_s)

    with fake_gpu(CARD, record_places=False) as gpu, tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "accelerator": "gpu", "devices": 1, "precision": "bf16-true", "logger": False, "max_steps": 2,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": folder, "accumulate_grad_batches": ACCUMULATION,
        }  # fmt: skip
        module = Module()
        found = Tuner(lightning.Trainer(**settings)).scale_batch_size(module, init_val=2, steps_per_trial=ACCUMULATION)
        tried, module.ends_s = sorted(set(attempts)), []
        lightning.Trainer(**settings).fit(module)
        step_s = module.ends_s[-1] - module.ends_s[-1 - ACCUMULATION]
    assert found is not None
    return Outcome(probes=len(tried), ooms=sum(size > found for size in tried), micro_batch=found,
                   accumulation=ACCUMULATION, samples_per_s=found * ACCUMULATION / step_s)  # fmt: skip


def autovram() -> Outcome:
    """autovram's `tune` of a script that reads its variables; it tries three precisions, the task's is bfloat16."""
    script = f"{sys.executable} -m experiments.tuners.autovram_script"
    words = [str(Path(sys.executable).parent / "autovram"), "tune", "--cmd", script, "--metric", "samples_per_s"]
    settings = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*words, "--timeout", str(patience(120))],
            cwd=folder,
            env=settings,
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads((Path(folder) / ".autovram" / "config.json").read_text(encoding="utf-8"))
    tried = re.findall(r"→ (OK|OOM|BAD)\s+samples_per_s=([\d.]+|-)", done.stdout)
    return Outcome(
        probes=len(tried),
        ooms=sum(status == "OOM" for status, _ in tried),
        micro_batch=found["micro_batch"],
        accumulation=found["grad_accum"],
        samples_per_s=max(float(speed) for status, speed in tried if status == "OK"),
    )


def autofit_search() -> Outcome:
    """`autofit search` on the same recipe, as a user types it."""
    recipe = (
        f"model_name_or_path: {task.MODEL}\ndtype: bfloat16\nbf16: false\nmax_length: {task.TOKENS}\n"
        f"optim: adamw_torch\nper_device_train_batch_size: {MICRO}\ngradient_accumulation_steps: {ACCUMULATION}\n"
        "gradient_checkpointing: false\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_text(recipe, encoding="utf-8")
        words = ["search", "run.yaml", "--trainer", "hf", "--gpu", CARD, "--prompt-tokens", str(task.TOKENS)]
        words += ["--trials", "6", "--no-advice", "--no-confirm", "--no-mlflow", "--json"]
        done = subprocess.run([sys.executable, "-m", "autofit", *words], cwd=folder, capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    told = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATION}
    told |= found["winner"]["changes"]
    micro, accumulation = told["per_device_train_batch_size"], told["gradient_accumulation_steps"]
    with fake_gpu(CARD, record_places=False) as gpu:  # by the clock of the other tuners, which leaves the host out
        made, seen = trainer(gpu, micro, accumulation)
        made.train()
    return Outcome(
        probes=found["counts"]["asked"],
        ooms=found["counts"]["oom"],
        micro_batch=micro,
        accumulation=accumulation,
        samples_per_s=micro * accumulation / seen.step_s,
    )


def deepspeed_autotuning() -> Outcome:
    """DeepSpeed's autotuner by its launcher, which looks for cards by itself, before any script can simulate one.

    Told to do without (DS_ACCELERATOR=cpu) it takes the host's memory for the card's (`total_memory` of its CPU
    accelerator). Reading its results is left for a machine with a card.
    """
    config = {
        "train_batch_size": MICRO * ACCUMULATION, "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION, "bf16": {"enabled": True}, "autotuning": {"enabled": True},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        words = [str(Path(sys.executable).parent / "deepspeed"), "--autotuning", "run", "--num_gpus", "1"]
        words += ["--num_nodes", "1", "train.py", "--deepspeed", "--deepspeed_config", "ds.json"]
        settings = {**os.environ, "DS_ACCELERATOR": "cuda"}
        done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True)
    raise RuntimeError(f"needs a GPU: {done.stderr.strip().splitlines()[-1]}")


TUNERS: dict[str, Callable[[], Outcome]] = {
    "autofit search": autofit_search,
    "transformers auto_find_batch_size": auto_find_batch_size,
    "accelerate find_executable_batch_size": find_executable_batch_size,
    "Lightning scale_batch_size": lightning_scaler,
    "Optuna alone": optuna_alone,
    "autovram": autovram,
    "DeepSpeed autotuning": deepspeed_autotuning,
}
