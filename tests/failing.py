"""Trainers that run out of memory once, where `inject.json` of the run's folder says so, and note their samples.

Each is TRL's own trainer, named as `failing:SFT`. `inject.json` is a list of {"step", "micro", "where"}: the optimizer
step and its micro-batch, from 0, and where in it: after the backward pass, in the optimizer, or in the rollout.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autofit.plugin.protocol import Task
from autofit.plugin.registry import load


class Failing:
    """The installed trainer `name`, which fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def __getattr__(self, attribute: str) -> Any:
        if self.__dict__["_loaded"] is None:
            self._loaded = load(self.__dict__["_name"])
        return getattr(self._loaded, attribute)

    def build(self, values: Mapping[str, object], task: Task) -> Any:
        folder = task.output.parent
        early = folder / "inject-at-build"
        if early.exists():
            early.unlink()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        run = self.__getattr__("build")(values, task)
        _Injection(run.trainer, folder)
        return run


class _Injection:
    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder
        self._micro, self._last = -1, -1
        trainer.compute_loss = self._noting(trainer.compute_loss)
        trainer.training_step = self._failing(trainer.training_step, "backward")
        if hasattr(trainer, "_generate"):
            trainer._generate = self._failing(trainer._generate, "rollout")
        trainer.create_optimizer = self._hooked(trainer.create_optimizer)

    def _hooked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            found.register_step_post_hook(lambda *_: self._fail("optimizer"))
            return found

        return create

    def _failing(self, original: Callable[..., Any], where: str) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._fail(where)
            return result

        return failing

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            step = int(self._trainer.state.global_step)
            self._micro = self._micro + 1 if step == self._last else 0
            self._last = step
            with (self._folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rows": _rows(inputs)}) + "\n")
            return original(model, inputs, *args, **kwargs)

        return noting

    def _fail(self, where: str) -> None:
        path = self._folder / "inject.json"
        wanted = json.loads(path.read_text()) if path.exists() else []
        now = {"step": int(self._trainer.state.global_step), "where": where}
        now |= {"micro": self._micro} if where == "backward" else {}
        if now in wanted:
            path.write_text(json.dumps([other for other in wanted if other != now]))
            torch.rand(7)  # as dropout or sampling of the failed step would draw
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def _rows(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each sample of a micro-batch, without padding."""
    if "completion_ids" not in inputs:
        return _unpadded(inputs["input_ids"], inputs["attention_mask"])
    prompts = _unpadded(inputs["prompt_ids"], inputs["prompt_mask"])
    completions = _unpadded(inputs["completion_ids"], inputs["completion_mask"])
    return [p + c for p, c in zip(prompts, completions, strict=True)]


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


GRPO, SFT, DPO, REWARD = (Failing(name) for name in ("grpo", "sft", "dpo", "reward"))
