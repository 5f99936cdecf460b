"""Base of TRL's trainers as plug-ins: a recipe is the YAML of `trl NAME --config`, a run is TRL's own trainer."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig

from autofit.plugin.models import go_offline_without_a_hub
from autofit.plugin.protocol import KEPT, Facts, Inspection, SampleLengths, SmallTrainings, Task, WorstCase
from autofit.plugin.transformers_run import TransformersRun
from autofit.recipe.keys import BatchKeys, Tier, evaluates

from . import offline
from .common import Counts, lengths, read_worst_case, sampled, samples_per_step, split
from .image_prompts import has_images
from .inspection import ModelFacts, architecture_hash, keep, model_facts, with_stand_ins
from .key_table import KeyTable, keep_table, kept_table, table_of
from .keys import SAMPLES, TILE_TOKENS, note_of_ranks, on_ranks, sample_tiers
from .knobs import at_top_level, left_out
from .names import command_of, installed, one_name_each, overridden, parser_of, script, synonyms
from .offline import with_local_file
from .older import modern
from .rows import in_epoch, unmasked_is_larger
from .trl_config import ON_CPU, TrlConfig, counting, parse, plain

# Of samples that pack_dataset cuts from one stream, 1,000 at a time (trl/data_utils.py, _pack_wrapped).
_RESTS = (
    "packing wrapped: the few micro-batches with a row shorter than max_length (the rest of 1,000 samples) have an "
    "attention mask, which is not counted"
)
# Keys that a probe sets in every recipe: reports, pushes and plots change neither peak nor step time. An evaluation is
# asked for by the probe, where the recipe has one.
QUIET: dict[str, object] = {
    "report_to": "none", "push_to_hub": False, "eval_strategy": "no", "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "dataloader_num_workers": 0, "resume_from_checkpoint": None,
    "save_only_model": False, "load_best_model_at_end": False, "logging_strategy": "steps",
}  # fmt: skip


class TrlRun(TransformersRun):
    """A run of TRL's trainer."""

    @property
    def scoring_share(self) -> float:
        return float(getattr(self.trainer, "scoring_share", 0.0))


class TrlTrainer:
    """One of TRL's trainers. A subclass defines how to build it, its longest sample and the meaning of its keys."""

    name: str
    keys: BatchKeys
    phases: Mapping[str, str]  # method of TRL's trainer -> the phase while it runs
    phases_of_ranks: Mapping[str, str] = {}  # the same, where several ranks train: these win over `phases`
    quiet: Mapping[str, object] = {}  # keys that a probe sets besides QUIET
    auto_class: Any
    tile_tokens: int | None = None
    tiers: Callable[..., Mapping[str, Tier]]  # knobs that change more under a recipe than their space declares
    compared: tuple[str, ...]  # keys that its gradient proof trains with
    run_class: type[TrlRun] = TrlRun

    def __init__(self) -> None:
        script(self.name)  # takes a second, once in the fork server

    # -- defined by a subclass ---------------------------------------------------------------------------------------

    def real(self, config: TrlConfig) -> Any:
        """TRL's trainer for `config`, as TRL's own script makes it."""
        raise NotImplementedError

    def probed(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> Any:
        """TRL's trainer with random weights on the longest sample (`rows` of `worst_case`) only."""
        raise NotImplementedError

    def longest(self, config: TrlConfig, inspection: Inspection) -> dict[str, object]:
        """Save the longest sample in the inspection's folder; returns its fields of `Facts`."""
        raise NotImplementedError

    def most_tokens(self, config: TrlConfig) -> int | None:
        """The length to which every sample is cut; None if some are not."""
        return None

    def tokens_per_step(self, config: TrlConfig, worst_case: Mapping[str, Any]) -> int:
        """Tokens of one optimizer step on one rank, at full length."""
        raise NotImplementedError

    def architecture(self, config: TrlConfig) -> Any:
        """The auto class of the recipe's model."""
        return self.auto_class

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def space(self) -> Path:
        return Path(str(resources.files("autofit.search_spaces").joinpath(f"{self.name}.yaml")))

    def parse(self, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig:
        """`values` with `overrides` applied, as TRL's own parser reads them."""
        return parse(self.name, values, overrides=overrides)

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        with counting(inspection.ranks):
            return self._inspect(values, inspection)

    def _inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        table = keep_keys(self.name)  # first: the next misspelt key is told without an import of TRL
        offline.clear(inspection.worst_case.folder)
        read = modern(values, table.keys, inspection)
        inspection = read.inspection
        with offline.or_stated(inspection):
            given = with_local_file(read.values, needed=inspection.prompt_tokens is None)
        go_offline_without_a_hub()
        device = device_overrides(inspection.device if torch.cuda.is_available() else "cpu")  # a login node has no card
        given = overridden(self.name, given, inspection.changed)
        given, moved = at_top_level(self.name, given, self.parse(given, overrides=device), inspection.changed)
        config = self.parse(given, overrides=device)
        named = one_name_each(self.name, given, config.resolved)
        given, resolved = dict(named.values), named.resolved
        stored, of_weights = self._stored(config, resolved)
        if stored:
            given |= stored
            config = self.parse(given, overrides=device)
            resolved = {**resolved, **stored}
        try:
            config, model, longest = self._measured(config, given, inspection)
        except offline.OutOfReachError:
            tokens = self.most_tokens(config)
            if tokens is None or not inspection.simulated or inspection.prompt_tokens is not None:
                raise
            offline.clear(inspection.worst_case.folder)
            asked = replace(inspection, prompt_tokens=tokens)
            config, model, longest = self._measured(config, given, asked)
            longest["notes"] = (offline.cut_samples(tokens), *cast("tuple[str, ...]", longest.get("notes", ())))
        reasons = left_out(self.name, resolved, half=model.weights_bytes <= 2 * model.parameters)
        notes = cast("tuple[str, ...]", longest.pop("notes", ()))
        images = longest.pop("images", 0)
        tiers = on_ranks(
            self.tiers(resolved, balances_experts=model.balances_experts, counts_padding=model.counts_padding),
            many=inspection.many, generates=self.keys.rollout is not None,
        )  # fmt: skip
        return Facts(
            name=self.name, resolved=resolved, values={k: plain(v) for k, v in given.items()}, keys=self.keys,
            space=str(self.space), model=str(resolved["model_name_or_path"]), command=command_of(self.name),
            trains_on_data=bool(given.get("dataset_name") or given.get("datasets")),
            tiers=tiers,
            compared=tuple(dict.fromkeys(named.other_names.get(key, key) for key in self.compared)),
            tile_tokens=self.tile_tokens, forecasts=not images,
            other_names=named.other_names,
            notes=(*read.notes, *moved, *named.notes, *of_weights, *model.notes, *notes, *note_of_ranks(tiers)),
            version=installed(), spelling=read.spelling,
            left_out={named.name_of(knob): why for knob, why in reasons.items()},
            architecture_hash=architecture_hash(str(config.model.model_name_or_path)),
            model_parameters=model.parameters, weights_bytes=model.weights_bytes,
            vocab_size=model.vocab_size, embedding_parameters=model.embedding_parameters,
            **longest,  # type: ignore[arg-type]
        )  # fmt: skip

    def _measured(
        self, config: TrlConfig, given: dict[str, object], inspection: Inspection
    ) -> tuple[TrlConfig, ModelFacts, dict[str, object]]:
        """`config` with its stand-ins, the facts of the model, and those of the longest sample (`longest`)."""
        if inspection.simulated:
            config = with_stand_ins(self.name, given, config, inspection)
        model = model_facts(config, self.architecture(config), simulated=inspection.simulated)
        return config, model, self.longest(config, inspection)

    def _stored(self, config: TrlConfig, resolved: Mapping[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
        """The settings by which the model's weights are quantised already, where the recipe says none; and notes."""
        name = config.model.model_name_or_path
        if not name or resolved.get("load_in_4bit") or resolved.get("load_in_8bit"):
            return {}, ()
        trust = bool(config.training.trust_remote_code)
        return offline.quantised_already(name, revision=config.model.model_revision, trust_remote_code=trust)

    def build(self, values: Mapping[str, object], task: Task) -> TrlRun:
        if task.worst_case is None:
            return self._real_run(values, task)
        folder = task.worst_case.folder
        standing_in = offline.overrides(values, folder)
        if not os.path.isdir(str({**values, **standing_in}.get("model_name_or_path"))):
            go_offline_without_a_hub()
        device = ON_CPU if task.device == "cpu" else {}
        overrides = {**QUIET, **self.quiet, **device, **standing_in}
        config = self.parse(values, overrides={**overrides, "max_steps": task.steps, "output_dir": str(task.output)})
        config = replace(config, evaluates=evaluates({k: plain(v) for k, v in values.items()}))
        worst_case = read_worst_case(task.worst_case)
        return self.run(self.probed(config, worst_case), config, self.tokens_per_step(config, worst_case))

    def _real_run(self, values: Mapping[str, object], task: Task) -> TrlRun:
        go_offline_without_a_hub()
        overrides: dict[str, object] = {
            **device_overrides(task.device), "report_to": values.get("report_to", "none"), "logging_steps": 1,
            "logging_strategy": "steps", "disable_tqdm": True, "save_only_model": False, "resume_from_checkpoint": None,
            "output_dir": str(task.output),
            "auto_find_batch_size": False,  # after an OOM it would halve the effective batch; autofit holds it
        }  # fmt: skip
        config = self.parse(values, overrides=overrides)
        return self.run(self.real(config), config)

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        """TRL's `trainer` as a run."""
        samples = samples_per_step(config)
        phases = {**self.phases, **(self.phases_of_ranks if trainer.accelerator.num_processes > 1 else {})}
        run = self.run_class(trainer, phases=phases, samples_per_step=samples, tokens_per_step=tokens_per_step)
        run.evaluates = config.evaluates and trainer.eval_dataset is not None
        return run

    def layers(self, values: Mapping[str, object], worst_case: WorstCase) -> Any:
        standing_in = offline.overrides(values, worst_case.folder)
        name = standing_in.get("model_name_or_path", values["model_name_or_path"])
        return AutoConfig.from_pretrained(name, trust_remote_code=bool(values.get("trust_remote_code")))

    def small_trainings(
        self, recipes: Mapping[str, Mapping[str, object]], folder: Path, *, most_samples: int, most_steps: int,
        ranks: Mapping[str, int] | None = None,
    ) -> SmallTrainings:  # fmt: skip
        from .proofs.trainings import TrlSmallTrainings

        return TrlSmallTrainings(
            self, recipes, folder, most_samples=most_samples, most_steps=most_steps, ranks=ranks or {}
        )

    def takes(self) -> set[str]:
        """All keys that a recipe of this trainer may have."""
        return {field.name for kind in parser_of(self.name).dataclass_types for field in fields(kind) if field.init}


def keep_keys(trainer: str) -> KeyTable:
    """The table of the keys that TRL's `trainer` takes, which is kept unless there is one of the installed TRL."""
    table = kept_table(trainer)
    if table is None:
        parser = parser_of(trainer)
        table = table_of(trainer, parser, synonyms(trainer))
        keep_table(table, parser)
    return table


def device_overrides(device: str) -> Mapping[str, object]:
    """{key: value} that a recipe for a GPU needs in order to be parsed, or to run, without one."""
    return {} if device == "cuda" else ON_CPU


class SamplesTrainer(TrlTrainer):
    """Base of the SFT, DPO and reward trainers: they train on the rows of a dataset."""

    keys = SAMPLES
    phases = MappingProxyType({"_save_checkpoint": "save"})
    tile_tokens: int | None = TILE_TOKENS
    tiers = staticmethod(sample_tiers)

    def worst_case(self, config: TrlConfig) -> tuple[Any, dict[str, Any], SampleLengths]:
        """(the longest row after TRL's tokenisation, truncation and packing; its facts; the lengths of all rows)."""
        raise NotImplementedError

    def most_tokens(self, config: TrlConfig) -> int | None:
        most = config.training.max_length
        return most if isinstance(most, int) and most > 0 else None

    def prepared(self, config: TrlConfig, rows: Any) -> Any:
        """Some `rows` of the dataset, as the trainer trains on them."""
        raise NotImplementedError

    def widths(self, rows: Any) -> tuple[Counts, Counts]:
        """Of prepared rows: (tokens to which each would be padded alone, tokens of all its sequences), (rows,) each."""
        return lengths(rows, "input_ids"), lengths(rows, "input_ids")

    def sample_lengths(self, values: Mapping[str, object], folder: Path, *, most: int) -> dict[str, object] | None:
        """The lengths of `most` samples of the dataset drawn at random, or of fewer long ones; None for images.

        `sampled` of the `rows` of the dataset were tokenised; `folder` is the inspection's.
        """
        given = {**device_overrides("cpu"), **offline.overrides(values, folder)}
        config = self.parse(with_local_file(dict(values)), overrides=given)
        raw = split(config)
        if has_images(raw):
            return None
        rows = sampled(raw, most)
        longest, total = self.widths(self.prepared(config, rows))
        limit = config.training.max_length
        return {
            "lengths": (longest if limit is None else np.minimum(longest, limit)).tolist(),
            "mean_tokens": float(total.mean()), "sampled": len(rows), "rows": len(raw),
        }  # fmt: skip

    def longest(self, config: TrlConfig, inspection: Inspection) -> dict[str, object]:
        with offline.or_stated(inspection):
            row, facts, of_rows = self.worst_case(config)
        where = in_epoch(config, facts)
        made_up = inspection.prompt_tokens is not None  # a text dataset's samples, which it stands for, would vary
        of_rows = replace(
            of_rows, least=0 if made_up else of_rows.least,
            longest=of_rows.longest[:1] * KEPT if made_up and of_rows.filled else of_rows.longest,
            unmasked_is_larger=unmasked_is_larger(config, inspection.device),
        )  # fmt: skip
        facts["lengths"] = of_rows.to_json()
        if made_up:
            facts.pop("packed", None)  # of the samples that it stands for, rows are full
        keep(row, facts, inspection.worst_case)
        digest = hashlib.sha256(repr((facts, row[0])).encode())
        told = {"longest_sample_tokens": facts["longest_tokens"], "content_hash": digest.hexdigest()[:16]}
        if of_rows.filled and of_rows.least < of_rows.most:
            told["notes"] = (_RESTS,)
        return told if made_up else told | where
