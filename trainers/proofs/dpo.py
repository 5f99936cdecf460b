"""The small training of a gradient proof of DPO."""

from trl import DPOTrainer

from ..trl_config import TrlConfig
from .pairs import arguments, common_factor, rows, samples_per_step, shrunken, steps_of_a_round

__all__ = ["SAME", "build", "common_factor", "samples_per_step", "shrunken", "steps_of_a_round"]

SAME: dict[str, object] = {  # a length limit would drop or cut the fixed rows
    "max_length": None, "padding_free": False, "activation_offloading": False, "disable_dropout": True,
    "pad_token": None,
}  # fmt: skip


def build(config: TrlConfig, steps: int) -> DPOTrainer:
    """TRL's trainer over `steps` optimizer steps of fixed pairs."""
    return DPOTrainer(**arguments(config), train_dataset=rows(config, steps, "prompt", "chosen", "rejected"))
