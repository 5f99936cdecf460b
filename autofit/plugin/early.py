"""What is wrong with a recipe, as far as it can be told before torch is imported: its trainer's early check.

An installed trainer may have one: an entry point of the group `autofit.early_checks` with the trainer's name. It is a
function of (name, values, Inspection) that imports nothing heavy and raises ConfigError, in the same words, for what
`inspect` would refuse. A trainer without one is inspected at once.
"""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.plugin.registry import trainer_for
from autofit.recipe.launching import NO_OPTIONS, LaunchOptions, launched
from autofit.recipe.recipe import merge
from autofit.recipe.secrets import opened
from autofit.recipe.source import Source
from autofit.recipe.starting import OF_TRL

GROUP = "autofit.early_checks"


def look(
    source: Source, *, trainer: str | None, device: str, changes: Mapping[str, object],
    prompt_tokens: int | None = None, launch: LaunchOptions = NO_OPTIONS,
) -> None:  # fmt: skip
    """Raise ConfigError for what is wrong with `source` and `changes` over it, as far as it can be told at once."""
    values = merge(source.values, changes)
    named = trainer_for({**source.values, **changes}, trainer or source.trainer)
    read = launched(values, launch, of_trl=named in OF_TRL, own=source.launch)
    changed = [key.partition(".")[0] for key in changes]
    check_early(source, read.values, trainer=named, device=device, changed=changed, prompt_tokens=prompt_tokens)


def check_early(
    source: Source, values: Mapping[str, object], *, trainer: str, device: str, changed: Sequence[str],
    prompt_tokens: int | None,
) -> None:  # fmt: skip
    """Raise ConfigError where the early check of `trainer` refuses `values`: the recipe without its launch."""
    inspection = Inspection(
        device=device, worst_case=WorstCase(path=Path(os.devnull)), prompt_tokens=prompt_tokens,
        changed=tuple(key for key in changed if key in values),
    )  # fmt: skip
    for point in entry_points(group=GROUP, name=trainer):
        try:
            point.load()(trainer, opened(values), inspection)
        except ConfigError as error:
            raise ConfigError(f"{source.what}: {error}") from error
