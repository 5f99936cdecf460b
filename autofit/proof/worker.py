"""The gradient proof itself: accumulated gradients of recipes on one small model and identical samples, compared.

Runs in a process of its own (`python -m autofit.proof.worker REQUEST`), on the CPU, in float32. Each gradient
is that of a whole optimizer step of the real trainer, read before the optimizer uses it. What would make two runs
differ without changing the recipe (generation, dropout, clipping, the optimizer) is taken out or made the same.
"""

import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.plugin.hub import go_offline_without_a_hub
from autofit.plugin.protocol import Report
from autofit.plugin.registry import load
from autofit.probing.supervise import die_with_parent

Gradient = dict[str, torch.Tensor]

_MOST_SAMPLES = 256  # of one optimizer step; a larger one is shrunken alike in baseline and candidate
_MOST_STEPS = 3
_MOVE = 0.02  # of the weights' norm, in one step: enough to leave the policy that the rollouts came from
_SPREAD = 0.05  # of the noise on the trained weights, so that policy and reference differ and no LoRA matrix is zero
_WEIGHTY = 1e-2  # a parameter with a smaller share of the gradient's norm is measured against this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a gradient is from the baseline's, over the compared optimizer steps (the worst of them)."""

    relative: float  # ||g - g_baseline|| / ||g_baseline||
    steps: tuple[float, ...]
    parameter: str  # the one that differs most, relative to its own gradient
    parameter_relative: float


def run(request_path: str) -> int:
    """Answer the request at `request_path` in the file that it names. 0 when there is an answer."""
    began = time.perf_counter()
    gc.freeze()  # TRL collects garbage after every training; what was imported is none
    request = read_json(Path(request_path))
    assert request is not None
    try:
        with tempfile.TemporaryDirectory(prefix="autofit-proof-") as folder:
            answer = prove(request, Path(folder))
    except ConfigError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    write_json(Path(str(request["answer"])), answer | {"seconds": time.perf_counter() - began})
    return 0


def prove(request: Mapping[str, Any], folder: Path) -> dict[str, object]:
    """The candidate's difference from the baseline; above the bounds, that of each of its `parts` alone as well."""
    recipes: dict[str, dict[str, object]] = {
        "baseline": request["baseline"], "candidate": request["candidate"], **request["parts"],
    }  # fmt: skip
    proof = Proof(str(request["trainer"]), recipes, folder)
    small = proof.small
    answer: dict[str, object] = {
        "model": small.model, "stand_in": small.stand_in, "steps": small.steps,
        "samples_per_step": small.samples_per_step, "shrunken": small.divided_by, "versions": _versions(),
    }  # fmt: skip
    difference = proof.difference("candidate")
    answer |= {"difference": asdict(difference), "parts": {}}
    if difference.relative > request["bound"] or difference.parameter_relative > request["parameter_bound"]:
        answer["parts"] = {name: asdict(proof.difference(name)) for name in request["parts"]}
    return answer


class Proof:
    """Recipes (values by name, "baseline" among them) over the small trainings of their trainer."""

    def __init__(self, trainer: str, recipes: Mapping[str, Mapping[str, object]], folder: Path) -> None:
        go_offline_without_a_hub()
        self.small = load(trainer).small_trainings(recipes, folder, most_samples=_MOST_SAMPLES, most_steps=_MOST_STEPS)
        self._baseline: list[Gradient] | None = None

    def gradients(self, name: str) -> list[Gradient]:
        """The accumulated gradient of each optimizer step of the recipe `name`: {parameter: tensor}."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = self.small.run(name)
            for module in run.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            _spread(run.model)
            reader = _Reader(self._baseline)
            run.train(reader)
        return reader.steps

    def difference(self, name: str) -> Difference:
        """How far the recipe `name` is from the baseline. Raises ConfigError when they train other parameters."""
        if self._baseline is None:
            self._baseline = self.gradients("baseline")
        return compare(self._baseline, self.gradients(name))


def compare(baseline: list[Gradient], candidate: list[Gradient]) -> Difference:
    """The relative difference of two runs' gradients, step by step."""
    shapes = [[{n: tuple(g.shape) for n, g in step.items()} for step in steps] for steps in (baseline, candidate)]
    if shapes[0] != shapes[1]:
        raise ConfigError("the candidate trains other parameters than the baseline, so no gradient can be compared")
    relative: list[float] = []
    worst, worst_relative = "", 0.0
    for ours, theirs in zip(candidate, baseline, strict=True):
        norm = _norm(theirs)
        if not norm > 0 or not norm < float("inf"):
            raise ConfigError(f"the baseline's gradient has norm {norm}, so nothing can be compared with it")
        if not all(bool(g.isfinite().all()) for g in ours.values()):
            raise ConfigError("the candidate's gradient is not finite")
        gaps = {name: ours[name] - theirs[name] for name in theirs}
        relative.append(_norm(gaps) / norm)
        for name, gap in gaps.items():
            own = float(theirs[name].double().norm())
            share = float(gap.double().norm()) / max(own, _WEIGHTY * norm)
            if not worst or share > worst_relative:
                worst, worst_relative = name, share
    return Difference(relative=max(relative), steps=tuple(relative), parameter=worst, parameter_relative=worst_relative)


def _norm(gradient: Gradient) -> float:
    return float(sum(float(g.double().pow(2).sum()) for g in gradient.values()) ** 0.5)


class _Reader(Report):
    """Keeps the gradient of each optimizer step, and then steps along the baseline's.

    So every run is at the same weights in every step, and rounding does not grow from one step to the next.
    """

    def __init__(self, baseline: list[Gradient] | None) -> None:
        self.steps: list[Gradient] = []
        self._baseline = baseline

    def gradient_is_whole(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        self.steps.append(gradient)
        along = gradient if self._baseline is None else self._baseline[len(self.steps) - 1]
        if along.keys() == trained.keys():
            for name, parameter in trained.items():
                parameter.grad = along[name].clone()
        weights = _norm({name: p.detach() for name, p in trained.items()})
        for group in optimizer.param_groups:
            group["lr"] = _MOVE * weights / max(_norm(along), 1e-12)


def _spread(model: torch.nn.Module) -> None:
    """Add the same noise to the trained weights of every run."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_SPREAD)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "trl", "peft")}


if __name__ == "__main__":
    die_with_parent()
    os._exit(run(sys.argv[1]))
