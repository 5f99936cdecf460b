"""Trainers as plug-ins: the protocol that each is written against, and adapters that make one a few methods."""

from autofit.plugin.protocol import Control, Facts, Inspection, Report, Run, SmallTrainings, Task, Trainer, WorstCase
from autofit.recipe.keys import BatchKeys, Tier

__all__ = [
    "BatchKeys", "Control", "Facts", "Inspection", "Report", "Run", "SmallTrainings", "Task", "Tier", "Trainer",
    "WorstCase",
]  # fmt: skip
