"""Trains one experiment of PEFT's MetaMathQA suite with their run.py inside `fake_gpu`, and writes its figures.

Usage, in the environment of the set: python -m experiments.accuracy.workers.peft_l40s EXPERIMENT CHECKOUT FOLDER OUT

Trained are the longest batch and four others. Left out are the loss on Wikipedia (8.1 GB reserved when simulated) and
the evaluations (50 prompts, 300 new tokens). Those of steps 250, 750, ... start from the cached blocks of a bucket's
longest batches. LoRA's then reserve nothing more; prefix tuning's do (2.3 GB when simulated), so its row is too low.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest import mock

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.fakegpu.rates.collectives import log_error
from autofit.recipe import catalogue
from experiments.accuracy.workers import stand_ins
from experiments.accuracy.workers.figures import write_figures

MODEL = "meta-llama/Llama-3.2-3B"
VOCABULARY, EOS = 128256, 128001
# Batches here: the longest of the run, and four of the 20 that their iterator sorts by length and takes longest first.
BUCKET, USUAL = 5, (2, 7, 12, 17)
# Tokens of the longest of 5,000 batches: the one unknown of the set, since MetaMathQA's texts are not at hand. Fitted
# on the row lora/llama-3.2-3B-rank32 alone: of the lengths tried (592 to 712) it comes nearest to its reserved peak.
LONGEST = 704
# The other samples: quantiles of a gamma distribution of shape 4 (assumed) with the mean that each of their results
# prints: 4,198,051 tokens in 20,000 samples, one token of padding included.
MEAN, SHAPE = 4_198_051 / 20_000 - 1, 4.0


def lengths() -> list[int]:
    """Tokens of the samples of one bucket: the longest batch of the run, then usual ones."""
    import numpy as np
    from scipy.stats import gamma

    usual = gamma.ppf((np.arange(80) + 0.5) / 80, SHAPE, scale=MEAN / SHAPE)[::-1]
    batches = [usual[4 * number : 4 * number + 4] for number in USUAL]
    return [LONGEST] + 3 * [int(0.9 * LONGEST)] + [int(n) for batch in batches for n in batch]


def training_rows() -> dict[str, list[str]]:
    """Samples that their template and the stand-in tokenizer turn into the wanted lengths."""
    template = 5  # Question: Think step by step. (`Answer:` and the first word of the answer are one)
    wanted = 2 * lengths()
    return {
        "type": ["x"] * len(wanted),
        "original_question": ["x"] * len(wanted),
        "query": [stand_ins.words(n // 3) for n in wanted],
        "response": [stand_ins.words(n - n // 3 - template) for n in wanted],
    }


def write_model(folder: Path) -> None:
    """Write the model's folder once: its config from the catalogue, its weights as a sparse file."""
    import torch
    import transformers

    if (folder / "config.json").exists():
        return
    known = catalogue.architecture(MODEL)
    assert known is not None
    config = transformers.AutoConfig.for_model(**dict(known.config))
    with torch.device("meta"):
        shell = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in shell.named_parameters()}
    content = {**config.to_dict(), "architectures": [type(shell).__name__], "dtype": "bfloat16"}
    stand_ins.write_checkpoint(folder, content, shapes)


@dataclass
class Steps:
    """Their progress bar over the training steps; it notes what the card says after each."""

    numbers: range
    gpu: FakeGpu
    seconds: list[float] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds of each part of the run after a step

    def __iter__(self) -> Iterator[int]:
        import torch

        for number in self.numbers:
            start = self.gpu.elapsed_s
            yield number
            self.seconds.append(self.gpu.elapsed_s - start)
            self.allocated.append(torch.cuda.memory_allocated())
            self.reserved.append(torch.cuda.max_memory_reserved())
            self.parts.append(self.gpu.clock.traced_s)

    @property
    def log_error(self) -> float:
        """Half the width of the 90 % interval of the usual steps' seconds, in logarithms."""
        spent = {part: s - self.parts[0][part] for part, s in self.parts[-1].items()}
        return log_error(self.gpu.spec, {part: s / sum(spent.values()) for part, s in spent.items()})

    def set_postfix(self, *_: object) -> None: ...

    @property
    def usual(self) -> slice:
        """The steps without the first, whose batch is the longest of 5,000."""
        return slice(1, None)


def main(experiment: str, checkout: Path, folder: Path, out: Path) -> None:
    suite = checkout / "method_comparison" / "MetaMathQA"
    if not (suite / "experiments" / experiment).is_dir():
        raise SystemExit(f"this commit of PEFT has no experiment {experiment}")  # their program would train all weights
    sys.path[:0] = [str(checkout / "src"), str(suite)]
    os.chdir(suite)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.disable_caching()
    write_model(folder)
    questions = datasets.Dataset.from_dict({"question": [stand_ins.words(64)] * 50, "answer": ["#### 1"] * 50})
    sets = {
        "meta-math/MetaMathQA": {"train": datasets.Dataset.from_dict(training_rows())},
        "openai/gsm8k": datasets.DatasetDict(train=questions, test=questions),
        "HuggingFaceFW/finewiki": SimpleNamespace(take=lambda count: []),
    }
    tokens = stand_ins.tokenizer(vocabulary=VOCABULARY, eos_id=EOS)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    started = time.perf_counter()
    errors: list[str] = []
    with (
        fake_gpu("l40s", record_places=False) as gpu,
        mock.patch.object(datasets, "load_dataset", lambda name, *_, **__: sets[name]),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", return_value=tokens),
    ):
        import data  # type: ignore[import-not-found]
        import run  # type: ignore[import-not-found]
        import utils  # type: ignore[import-not-found]

        def load(pretrained_model_name_or_path: str, **options: Any) -> Any:
            return from_pretrained(str(folder), **options)

        steps = Steps(range(1, BUCKET + 1), gpu)
        config_of = run.get_train_config
        utils.AutoModelForCausalLM = SimpleNamespace(from_pretrained=load)
        data.CHAR_LIMIT = 10**6  # a stand-in's token has more letters than one of a text
        run.BUCKET_FACTOR, run.ACCELERATOR_EMPTY_CACHE_SCHEDULE = BUCKET, BUCKET // 2
        run.get_train_config = lambda path: replace(config_of(path), max_steps=BUCKET, eval_steps=BUCKET)
        run.calculate_mean_per_token_loss = lambda **_: 1.5  # they refuse to train where it is not from 1 to 2
        run.evaluate = lambda **_: ([""], [""])
        run.get_accuracy = lambda **_: 0.0
        run.get_file_size = lambda *_, **__: 0
        run.get_base_model_info = run.get_dataset_info = lambda name: None
        run.tqdm = lambda _: steps
        run.print_verbose = lambda *_, **__: None
        run.log_results = lambda *, train_result, **_: errors.append(train_result.error_msg)
        run.main(path_experiment=f"experiments/{experiment}", experiment_name=experiment, clean=True, bucket_name=None)
    if errors != [""]:
        raise SystemExit(f"their program stopped: {errors}")
    figures = {
        "reserved_max_bytes": gpu.peak_reserved_bytes,
        "peak_allocated_bytes": gpu.peak_allocated_bytes,
        "allocated_mean_bytes": fmean(steps.allocated[steps.usual]),
        "step_s": fmean(steps.seconds[steps.usual]),
        "log_error": round(steps.log_error, 3),
    }
    write_figures(out, figures, gpu, started)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]))
