"""Safe-DPO: DPO whose pairs are ordered, and weighed, by two frozen reward models, one for help and one for safety.

Each answer has the score `helpful + safety_weight * safe`, which is help less safety_weight x cost, as a safety model
scores the answer without harm higher. The answer with the higher score is the preferred one, whatever the data says
(`relabel`), and the loss asks for a margin that grows with the difference of the scores:

    -log sigmoid(beta * (log-ratio of preferred - log-ratio of other) - margin_scale * difference)

Everything else is TRL's DPOTrainer. Policy, reference and both reward models are on the trainer's device, in a probe
with random weights of the same shape, so the memory that a search measures is that of all four.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOTrainer

from autofit.errors import ConfigError
from autofit.plugin.protocol import Facts, Inspection
from autofit.trainers.common import random_model
from autofit.trainers.dpo import DpoTrainer
from autofit.trainers.own_keys import OwnKeys
from autofit.trainers.trl import TrlRun
from autofit.trainers.trl_config import TrlConfig

_SCORING = ("helpful_model", "safety_model")
Score = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]  # a batch of 2P answers -> (2P,)


@dataclass(frozen=True)
class Settings:
    """The keys of a recipe besides those of `trl dpo`."""

    helpful_model: str
    safety_model: str
    safety_weight: float = 1.0
    margin_scale: float = 0.1
    relabel: bool = True  # False: the data's order stays, and the margin of a pair may be below 0


class SafeDpo(OwnKeys, DpoTrainer):  # type: ignore[misc]
    settings = Settings
    phases = MappingProxyType({**DpoTrainer.phases, "score_safety": "scoring"})

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        facts: Facts = super().inspect(values, inspection)
        if not inspection.simulated:
            _check_tokenizers(str(facts.resolved["model_name_or_path"]), self.read(self._split(values)[1]))
        return facts

    def real(self, config: TrlConfig) -> DPOTrainer:
        trainer = super().real(config)
        trainer.score_safety = self._scores(trainer, config, _trained)
        return trainer

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> DPOTrainer:
        trainer = super().probed(config, worst_case)
        trainer.score_safety = self._scores(trainer, config, _random)
        return trainer

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        if not hasattr(trainer, "score_safety"):  # a gradient proof: its small model has no reward models
            trainer.score_safety = _made_up
        _prefer_by_score(trainer, self.own(config))
        return super().run(trainer, config, tokens_per_step)

    def _scores(self, trainer: Any, config: TrlConfig, load: Callable[..., Any]) -> Score:
        """The combined score of both reward models, on the trainer's device."""
        own, device, pad = self.own(config), trainer.accelerator.device, trainer.processing_class.pad_token_id
        helpful, safe = (
            load(key, getattr(own, key), config, pad).to(device).requires_grad_(False).eval() for key in _SCORING
        )

        def scores(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
            with torch.no_grad():
                found = [model(**inputs).logits[:, 0].float() for model in (helpful, safe)]
            total: torch.Tensor = found[0] + own.safety_weight * found[1]
            return total

        scores.models = (helpful, safe)  # type: ignore[attr-defined]  # for who counts what is in memory
        return scores


def _prefer_by_score(trainer: Any, own: Settings) -> None:
    """Let `trainer` order each pair by its scores, and ask for their difference as a margin.

    A margin inside the loss is the same as a reference that likes the preferred answer better by margin / beta, so the
    trainer gets such reference scores and computes its own loss.
    """
    original, precomputed = trainer._compute_loss, trainer.precompute_ref_logps
    trainer.precompute_ref_logps = True  # of the loss: the scores of the reference come with the batch

    def compute(model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if precomputed:
            reference = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
        else:
            reference = trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, inputs)
        chosen, rejected = trainer.score_safety(inputs).chunk(2)
        swapped = (rejected > chosen) if own.relabel else torch.zeros_like(chosen, dtype=torch.bool)
        difference = torch.where(swapped, rejected - chosen, chosen - rejected)
        batch = {name: _swapped(inputs[name], swapped) for name in ("input_ids", "attention_mask", "completion_mask")}
        first, second = _swapped(torch.cat(reference), swapped).chunk(2)
        _log(trainer, swapped, difference)
        margin = own.margin_scale * difference / trainer.beta
        batch |= {"ref_chosen_logps": first + margin, "ref_rejected_logps": second}
        return original(model, {**inputs, **batch}, return_outputs)

    trainer._compute_loss = compute


def _swapped(rows: torch.Tensor, swapped: torch.Tensor) -> torch.Tensor:
    """The 2P rows (chosen before rejected) with both rows of each pair in `swapped` (P,) exchanged."""
    pairs = len(swapped)
    places = torch.arange(pairs, device=rows.device)
    first = torch.where(swapped, places + pairs, places)
    return rows[torch.cat([first, (first + pairs) % (2 * pairs)])]


def _log(trainer: Any, swapped: torch.Tensor, difference: torch.Tensor) -> None:
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics["safety/relabelled"].append(swapped.float().mean().item())
    metrics["safety/score_difference"].append(difference.mean().item())


def _trained(key: str, name: str, config: TrlConfig, pad: int) -> Any:
    """The reward model `name`. Raises ConfigError for a model that was never trained to score."""
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=1, pad_token_id=pad, dtype=config.model.dtype or "float32", output_loading_info=True,
        trust_remote_code=bool(config.training.trust_remote_code),
    )  # fmt: skip
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"{key} {name!r} has no trained score ({', '.join(missing[:3])} would be random); give a model that "
            "`trl reward` trained"
        )
    return model


def _random(key: str, name: str, config: TrlConfig, pad: int) -> Any:
    """A model of the same shape, dtype and bytes as `_trained` loads."""
    model = random_model(
        name, AutoModelForSequenceClassification, num_labels=1, dtype=config.model.dtype or "float32",
        trust_remote_code=bool(config.training.trust_remote_code),
    )  # fmt: skip
    model.config.get_text_config().pad_token_id = pad
    return model


def _made_up(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Fixed scores (2P,) of a proof, which depend on the answer's tokens alone."""
    return (batch["input_ids"] * batch["completion_mask"]).sum(-1).float() % 7


def _check_tokenizers(policy: str, own: Settings) -> None:
    """Raise ConfigError unless both reward models read the policy's tokens."""
    words = AutoTokenizer.from_pretrained(policy).get_vocab()
    for key in _SCORING:
        name = getattr(own, key)
        try:
            same = AutoTokenizer.from_pretrained(name).get_vocab() == words
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key} {name!r} has no tokenizer that transformers can load") from error
        if not same:
            raise ConfigError(f"{key} must have the tokenizer of model_name_or_path, as it reads its tokens; {name!r} "
                              f"and {policy!r} differ")  # fmt: skip


TRAINER = SafeDpo()
