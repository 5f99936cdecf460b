"""The gradient proof itself: accumulated gradients of recipes on one small model and identical samples, compared.

Runs in a process of its own (`python -m autofit.proof.worker REQUEST`), on the CPU, in float32. Each gradient
is that of a whole optimizer step of TRL's own trainer, read before the optimizer uses it. What would make two runs
differ without changing the recipe (generation, dropout, clipping, the optimizer) is taken out or made the same.
"""

import gc
import importlib
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, TrainerCallback

from autofit.errors import ConfigError
from autofit.files import read_json, write_json
from autofit.probing.inspection import go_offline_without_a_hub
from autofit.probing.supervise import die_with_parent
from autofit.proof.proof_keys import compared_attention
from autofit.recipe.trl_config import TrlConfig, parse
from autofit.trainers.proofs.samples import SAME
from autofit.trainers.proofs.small_model import model_config, small_model

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
    trainer = str(request["trainer"])
    recipes: dict[str, dict[str, object]] = {
        "baseline": request["baseline"], "candidate": request["candidate"], **request["parts"],
    }  # fmt: skip
    proof = Proof(trainer, recipes, folder)
    answer: dict[str, object] = {
        "model": proof.model, "stand_in": proof.stand_in, "steps": proof.steps, "samples_per_step": proof.samples,
        "shrunken": proof.shrunken, "versions": _versions(),
    }  # fmt: skip
    difference = proof.difference("candidate")
    answer |= {"difference": asdict(difference), "parts": {}}
    if difference.relative > request["bound"] or difference.parameter_relative > request["parameter_bound"]:
        answer["parts"] = {name: asdict(proof.difference(name)) for name in request["parts"]}
    return answer


class Proof:
    """Recipes (TRL's YAML values by name, "baseline" among them) over one small model saved in `folder`."""

    def __init__(self, trainer: str, recipes: Mapping[str, Mapping[str, object]], folder: Path) -> None:
        go_offline_without_a_hub()
        self._samples = importlib.import_module(f"autofit.trainers.proofs.{trainer}")
        self._trainer = trainer
        parser = importlib.import_module(f"trl.scripts.{trainer}").make_parser()
        known = {field.name for kind in parser.dataclass_types for field in fields(kind) if field.init}
        fixed = {**SAME, **self._samples.SAME}
        self._fixed = {key: value for key, value in fixed.items() if value is None or key in known}
        self._folder = folder
        baseline = recipes["baseline"]
        config = _config_of_model(baseline)
        self.model, self.stand_in = small_model(config, folder / "model")
        self._layers = AutoConfig.from_pretrained(folder / "model").num_hidden_layers
        parsed = {name: self._parsed(values, {}) for name, values in recipes.items()}
        self.shrunken = self._samples.common_factor(list(parsed.values()), _MOST_SAMPLES)
        self.samples = self._samples.samples_per_step(parsed["baseline"]) // self.shrunken
        self.steps = min(_MOST_STEPS, self._samples.steps_of_a_round(parsed["baseline"]))
        self._configs = {name: self._small(recipes[name], config) for name, config in parsed.items()}
        self._baseline: list[Gradient] | None = None

    def _parsed(self, values: Mapping[str, object], more: Mapping[str, object]) -> TrlConfig:
        places = {"model_name_or_path": str(self._folder / "model"), "output_dir": str(self._folder / "output")}
        overrides = {**self._fixed, **places, **more}
        if not compared_attention(values.get("attn_implementation")):
            overrides["attn_implementation"] = None  # what the architecture takes by itself: not every one has sdpa
        for key in ("lora_target_modules", "lora_target_parameters"):
            if isinstance(named := values.get(key), list):
                overrides[key] = [_of_few_layers(name, self._layers) for name in named]
        return parse(self._trainer, values, overrides=overrides)

    def _small(self, values: Mapping[str, object], config: TrlConfig) -> TrlConfig:
        if self.shrunken > 1:
            config = self._parsed(values, self._samples.shrunken(config, self.shrunken))
        config.training.max_steps = self.steps
        return config

    def gradients(self, name: str) -> list[Gradient]:
        """The accumulated gradient of each optimizer step of the recipe `name`: {parameter: tensor}."""
        config = self._configs[name]
        training = config.training
        training.model_init_kwargs = {"dtype": "float32", "attn_implementation": config.model.attn_implementation}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self._samples.build(config, self.steps)
            for module in trainer.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            _spread(trainer.model)
            reader = _Reader(self._baseline)
            trainer.add_callback(reader)
            trainer.train()
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


class _Reader(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradient of each optimizer step, and then steps along the baseline's.

    So every run is at the same weights in every step, and rounding does not grow from one step to the next.
    """

    def __init__(self, baseline: list[Gradient] | None) -> None:
        self.steps: list[Gradient] = []
        self._baseline = baseline

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: object
    ) -> None:
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


def _of_few_layers(name: object, layers: int) -> str:
    """`name` of a module with the number of its layer, if it has one, among those of the small model."""
    return re.sub(r"(?<![^.])\d+(?![^.])", lambda found: str(int(found[0]) % layers), str(name))


def _config_of_model(values: Mapping[str, object]) -> Any:
    name = str(values.get("model_name_or_path"))
    try:
        return model_config(
            name, revision=str(values.get("model_revision", "main")),
            trust_remote_code=bool(values.get("trust_remote_code", False)),
        )  # fmt: skip
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the config of {name!r} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "trl", "peft")}


if __name__ == "__main__":
    die_with_parent()
    os._exit(run(sys.argv[1]))
