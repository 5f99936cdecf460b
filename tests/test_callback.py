"""`autofit.AutofitCallback` in a script of one's own: a plain transformers.Trainer on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import autofit
from autofit.errors import ConfigError
from autofit.watching.contract import Promise, contract_of, verdict_of
from autofit.watching.events import EventKind, events_of, read_progress

if TYPE_CHECKING:
    from transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def promised(step_s: float, batch: int) -> Promise:
    from autofit.probing.memory import cpu_name

    return Promise(
        device_name=cpu_name(), fidelity="measured", device_used_bytes=10**8, limit_bytes=10**9, step_s=step_s,
        samples_per_s=batch / step_s, effective_batch_size=batch, proof="gradient proven neutral",
    )  # fmt: skip


def trainer(model: Path, output: Path, callback: Any, *, steps: int = 8, **changes: Any) -> Trainer:
    """A script as anyone would write it: 2 x 2 samples a step."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = [{"input_ids": (ids := torch.arange(i, i + 6) % 50), "labels": ids} for i in range(64)]
    arguments = TrainingArguments(
        output_dir=str(output), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, **{"save_strategy": "no", **changes},
    )  # fmt: skip
    return Trainer(model=AutoModelForCausalLM.from_pretrained(model), args=arguments, train_dataset=rows,
                   callbacks=[callback])  # fmt: skip


def test_a_script_that_keeps_its_promise_is_told_so(tiny_model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    callback = autofit.AutofitCallback(promised(60.0, 4), folder=tmp_path / "kept", say=said.append)
    trainer(tiny_model, tmp_path, callback).train()
    assert callback.verdict.startswith("the promise is kept: step ")
    assert {row.key: row.kept for row in callback.rows} == {
        "device_used_bytes": None, "step_s": True, "samples_per_s": True, "effective_batch_size": True, "proof": None,
    }  # fmt: skip
    assert next(row for row in callback.rows if row.key == "effective_batch_size").actual_text.startswith("4 (2 x 2")
    assert said[-1] == f"autofit, step 8: {callback.verdict}"
    folder = tmp_path / "kept"
    assert [line["step"] for line in read_progress(folder)] == list(range(1, 9))
    assert {e.kind for e in events_of(folder)} >= {EventKind.PROMISE, EventKind.VERDICT}
    assert (contract_of(folder), verdict_of(folder)) == (callback.rows, callback.verdict)
    assert not list(tmp_path.glob("checkpoint-*"))  # those are the script's own matter


def test_a_script_with_another_batch_or_slower_steps_is_told_while_it_trains(tiny_model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    callback = autofit.AutofitCallback(promised(1e-6, 8), say=said.append)
    trainer(tiny_model, tmp_path, callback).train()
    broken = [text for text in said if "the promise is broken so far" in text]
    assert [text.partition(":")[0] for text in broken] == ["autofit, step 6"] * 3  # seconds, samples/s, batch
    assert "effective batch 4 (8 promised)" in broken[-1]
    assert callback.verdict.startswith("the promise is broken: step ")


def test_without_a_promise_nothing_is_compared(tiny_model: Path, tmp_path: Path) -> None:
    callback = autofit.AutofitCallback(say=lambda _: None)
    trainer(tiny_model, tmp_path, callback, steps=2).train()
    assert (callback.rows, callback.verdict) == ((), "")


@pytest.mark.slow
def test_a_script_that_goes_on_from_a_checkpoint_has_each_step_once(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = autofit.AutofitCallback(promised(60.0, 4), folder=folder, say=lambda _: None)
    trainer(tiny_model, tmp_path, first, save_strategy="steps", save_steps=3).train()
    second = autofit.AutofitCallback(promised(60.0, 4), folder=folder, say=lambda _: None)
    trainer(tiny_model, tmp_path, second).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [line["step"] for line in read_progress(folder)] == list(range(1, 9))
    assert [e.step for e in events_of(folder) if e.kind is EventKind.PROMISE] == [0, 3]
    assert [e.step for e in events_of(folder) if e.kind is EventKind.VERDICT] == [8]


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out promise or study"):
        autofit.AutofitCallback(promised(1.0, 4), study="mine")
    with pytest.raises(ConfigError, match="there are no studies in"):
        autofit.AutofitCallback(study="mine", studies=tmp_path)
