"""The small training of a gradient proof of SFT."""

from trl import SFTTrainer

from ..trl_config import TrlConfig
from .pairs import arguments, common_factor, rows, samples_per_step, shrunken, steps_of_a_round

__all__ = ["SAME", "build", "common_factor", "samples_per_step", "shrunken", "steps_of_a_round"]

# Packing is off: it changes the rows, not the normalisation of the loss. The fixed rows select the tokens of the loss.
SAME: dict[str, object] = {
    "packing": False, "eval_packing": None, "assistant_only_loss": False,
    "chat_template_path": None, "dataset_kwargs": None, "activation_offloading": False, "eos_token": None,
    "pad_token": None,
}  # fmt: skip


def build(config: TrlConfig, steps: int) -> SFTTrainer:
    """TRL's trainer over `steps` optimizer steps of fixed prompts and completions."""
    config.training.max_length = None  # a limit would drop or cut the fixed rows; TRL refuses it without padding
    return SFTTrainer(**arguments(config), train_dataset=rows(config, steps, "prompt", "completion"))
