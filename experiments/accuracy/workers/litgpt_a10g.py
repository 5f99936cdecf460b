"""Runs one finetuning config of litgpt, with litgpt's own `setup`, inside `fake_gpu`; prints its figures as JSON.

Usage, in the environment of the set: python -m experiments.accuracy.workers.litgpt_a10g CONFIG CHECKOUT FOLDER OUT

The checkout is at the commit that wrote the measured figure into litgpt's table, as its memory changed with its code.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autofit.fakegpu import fake_gpu
from experiments.accuracy.workers.figures import write_figures

LONGEST = 512  # the configs' max_seq_length; Alpaca2k has longer samples, which are cut


class Done(Exception):
    """Raised after the training, to leave out their final validation and saving."""


class Samples:
    """Rows of Alpaca2k, each as long as the longest: the table's peak is that of the longest batch."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if not 0 <= index < self.count:
            raise IndexError(index)
        counts = {"raw": LONGEST, "raw_plus_prompt_template": LONGEST}
        return {
            "input_ids": torch.ones(LONGEST, dtype=torch.int64),
            "labels": torch.ones(LONGEST, dtype=torch.int64),
            "token_counts": {name: torch.tensor([value]) for name, value in counts.items()},
        }


class Texts:
    """litgpt's data module, with stand-in samples."""

    prompt_style = SimpleNamespace(apply=lambda text: text)

    def connect(self, tokenizer: object, batch_size: int, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def prepare_data(self) -> None: ...

    def setup(self, stage: str = "") -> None: ...

    def train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(Samples(64 * self.batch_size), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(Samples(2 * self.batch_size), batch_size=self.batch_size)  # type: ignore[arg-type]


class Tokens:
    """litgpt's tokenizer: every prompt has 32 tokens."""

    eos_id = 1

    def __init__(self, *_: object) -> None: ...

    def encode(self, text: str, device: Any = None, **_: object) -> Any:
        import torch

        return torch.ones(32, dtype=torch.int64, device=device)

    def decode(self, *_: object) -> str:
        return ""


def accepted(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values that this version's function has a parameter for."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def main(config: str, checkout: Path, folder: Path, out: Path) -> None:
    sys.path.insert(0, str(checkout))
    import torch
    import yaml

    values = yaml.safe_load((checkout / "config_hub" / "finetune" / config).read_text(encoding="utf-8"))
    name = Path(values["checkpoint_dir"]).name
    started = time.perf_counter()
    peaks: list[int] = []
    with fake_gpu("a10g", record_places="PLACES" in os.environ) as gpu:
        method: Any = import_module("litgpt.finetune." + Path(config).stem)
        from litgpt.args import EvalArgs, TrainArgs

        fit_of, shape_of = method.fit, method.Config

        def fit(*args: Any, **options: Any) -> None:
            fit_of(*args, **options)
            peaks.append(torch.cuda.max_memory_allocated())  # litgpt prints it here
            raise Done

        def from_file(path: Path, **changes: Any) -> Any:
            return shape_of.from_name(name, **changes)

        readers = {reader: staticmethod(from_file) for reader in ("from_file", "from_json")}
        method.fit, method.Tokenizer, method.Config = fit, Tokens, type("Config", (shape_of,), readers)
        method.load_checkpoint = method.check_valid_checkpoint_dir = lambda *_, **__: None
        method.auto_download_checkpoint = lambda model_name, **_: model_name
        optimizer = values.get("optimizer", {}).get("init_args", {})  # earlier versions: arguments of the training
        train = {**optimizer, **values["train"], "max_steps": 2, "epochs": 1, "lr_warmup_steps": 1}
        arguments = {
            **values,
            "checkpoint_dir": folder,
            "out_dir": folder,
            "data": Texts(),
            "train": TrainArgs(**accepted(TrainArgs, train)),
            "eval": EvalArgs(**accepted(EvalArgs, {**values["eval"], "max_iters": 1})),
            "devices": 1,
        }
        with contextlib.suppress(Done):
            method.setup(**accepted(method.setup, arguments))
        if "PLACES" in os.environ:
            print(gpu.why_peak(int(os.environ["PLACES"])))
    figures = {
        "peak_allocated_bytes": peaks[0],
        "reserved_max_bytes": gpu.peak_reserved_bytes,
    }
    write_figures(out, figures, gpu, started)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
