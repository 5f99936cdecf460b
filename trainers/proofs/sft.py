"""What a gradient proof of SFT trains on."""

from trl import SFTTrainer

from ..trl_config import TrlConfig
from .pairs import arguments, common_factor, rows, samples_per_step, shrunken, steps_of_a_round

__all__ = ["SAME", "build", "common_factor", "samples_per_step", "shrunken", "steps_of_a_round"]

# Packing changes the rows, not how a loss divides; the fixed rows say by themselves which tokens count.
SAME: dict[str, object] = {  # a limit of length would drop or cut the fixed rows
    "max_length": None, "packing": False, "eval_packing": None, "padding_free": False, "assistant_only_loss": False,
    "chat_template_path": None, "dataset_kwargs": None, "activation_offloading": False, "eos_token": None,
    "pad_token": None,
}  # fmt: skip


def build(config: TrlConfig, steps: int) -> SFTTrainer:
    """TRL's trainer over `steps` optimizer steps of fixed prompts and completions."""
    return SFTTrainer(**arguments(config), train_dataset=rows(config, steps, "prompt", "completion"))
