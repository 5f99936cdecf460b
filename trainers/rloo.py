"""TRL's RLOOTrainer: as `trl rloo` builds it, or on its longest prompt with random weights for a probe."""

import trl.trainer.rloo_trainer as trl_rloo
from trl import RLOOTrainer

from .grpo import RolloutTrainer
from .keys import COMPARED, rloo_tiers


class RlooTrainer(RolloutTrainer):
    """`trl rloo`. Its loss computes the logits of a whole micro-batch at once, without tiles."""

    name = "rloo"
    trl_class, trl_module = RLOOTrainer, trl_rloo
    tiers = staticmethod(rloo_tiers)
    compared = (
        *COMPARED,
        "steps_per_generation", "generation_batch_size", "num_iterations", "beta", "normalize_advantages",
        "mask_truncated_completions", "reward_weights", "reward_clip_range",
    )  # fmt: skip


TRAINER = RlooTrainer()
