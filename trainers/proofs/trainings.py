"""The small trainings of a gradient proof of TRL's trainers: one small model, fixed samples, one run per recipe."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig

from autofit.errors import ConfigError
from autofit.plugin.models import model_config
from autofit.plugin.protocol import Run, compared_attention

from ..trl_config import TrlConfig, counting
from .small_model import SAME, small_model


class TrlFamily(Protocol):
    """Parts of one of TRL's trainers that the small trainings need."""

    name: str

    def takes(self) -> set[str]: ...
    def parse(self, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig: ...
    def run(self, trainer: Any, config: TrlConfig) -> Run: ...


class TrlSmallTrainings:
    """Trainings of recipes ({name: TRL's YAML values}, including "baseline") on one small model saved in `folder`."""

    def __init__(
        self, trainer: TrlFamily, recipes: Mapping[str, Mapping[str, object]], folder: Path, *, most_samples: int,
        most_steps: int, ranks: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._trainer, self._recipes, self._ranks = trainer, recipes, ranks
        self._samples = _samples_of(trainer.name)
        known, fixed = trainer.takes(), {**SAME, **self._samples.SAME}
        self._fixed = {key: value for key, value in fixed.items() if value is None or key in known}
        self._folder = folder
        config = _config_of_model(recipes["baseline"])
        self.model, self.stand_in = small_model(config, folder / "model")
        self._layers = AutoConfig.from_pretrained(folder / "model").num_hidden_layers
        parsed = {name: self._counted(name) for name in recipes}
        self.divided_by = self._samples.common_factor(list(parsed.values()), most_samples)
        self.samples_per_step = self._samples.samples_per_step(parsed["baseline"]) // self.divided_by
        self.steps = min(most_steps, self._samples.steps_of_a_round(parsed["baseline"]))
        self._sizes = {name: self._smaller(config) for name, config in parsed.items()}

    def _parsed(self, values: Mapping[str, object], more: Mapping[str, object]) -> TrlConfig:
        places = {"model_name_or_path": str(self._folder / "model"), "output_dir": str(self._folder / "output")}
        overrides = {**self._fixed, **places, **more}
        if not compared_attention(values.get("attn_implementation")):
            overrides["attn_implementation"] = None  # the architecture's default: not every one has sdpa
        for key in ("lora_target_modules", "lora_target_parameters"):
            if isinstance(named := values.get(key), list):
                overrides[key] = [_of_few_layers(name, self._layers) for name in named]
        return self._trainer.parse(values, overrides=overrides)

    def _counted(self, name: str) -> TrlConfig:
        """The recipe `name` as its ranks read it, read by this one process."""
        ranks = self._ranks.get(name, 1)
        with counting(ranks):
            return replace(self._parsed(self._recipes[name], {}), ranks=ranks)

    def _smaller(self, config: TrlConfig) -> dict[str, object]:
        """The keys that make the step of the recipe `config` small."""
        return self._samples.shrunken(config, self.divided_by) if self.divided_by > 1 else {}

    def run(self, name: str) -> Run:
        """The training of the recipe `name`; for one of several ranks it is called in each of them."""
        config = replace(self._parsed(self._recipes[name], self._sizes[name]), ranks=self._ranks.get(name, 1))
        training = config.training
        training.max_steps = self.steps
        training.model_init_kwargs = {"dtype": "float32", "attn_implementation": config.model.attn_implementation}
        if self._ranks and hasattr(self._samples, "deal"):  # in a process of this run alone
            self._samples.deal(config)
        return self._trainer.run(self._samples.build(config, self.steps), config)


def _samples_of(trainer: str) -> Any:
    """The fixed samples of a trainer and how they are trained on: a module, or an object of `pairs`."""
    if trainer in ("sft", "dpo", "reward"):
        return getattr(importlib.import_module(".pairs", __package__), trainer.upper())
    return importlib.import_module(f".{trainer}", __package__)


def _of_few_layers(name: object, layers: int) -> str:
    """The module `name` with its layer number, if any, reduced modulo `layers`, the layers of the small model."""
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
