"""Data that a gradient proof of RLOO trains on: GRPO's fixed completions and rewards, put in at RLOO's own methods."""

import torch
from trl import RLOOTrainer
from trl.trainer import rloo_trainer

from ..trl_config import TrlConfig
from .grpo import arguments, common_factor, first_generation, fixed_samples, samples_per_step, shrunken
from .grpo import deal as deal_in

__all__ = ["SAME", "build", "common_factor", "deal", "samples_per_step", "shrunken", "steps_of_a_round"]

SAME: dict[str, object] = {
    "shuffle_dataset": False, "disable_dropout": True, "use_vllm": False, "log_completions": False,
    "use_transformers_continuous_batching": False, "use_transformers_paged": False, "generation_kwargs": None,
}  # fmt: skip


def steps_of_a_round(config: TrlConfig) -> int:
    """Optimizer steps until every kind of step has been taken: those that reuse a rollout too."""
    training = config.training
    micro_steps = int(training.steps_per_generation * training.num_iterations)
    return -(-micro_steps // int(training.gradient_accumulation_steps))


class _FixedRollouts(RLOOTrainer):  # type: ignore[misc]
    """RLOO on fixed completions, whose rewards are those of the rollout that was generated last."""

    rewards: list[float]
    rollouts = 0

    def _generate(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        self.rollouts += 1
        torch.manual_seed(self.rollouts)  # of the shuffle that follows
        longest = int(self.args.max_completion_length)
        samples = fixed_samples(prompts, longest=longest, first=first_generation(self, prompts))
        self.rewards[:] = [s.reward for s in samples]  # in the order of the completions, which need not differ
        for name in ("mean_length", "min_length", "max_length", "clipped_ratio"):
            self._metrics["train"][f"completions/{name}"].append(0.0)
        return [list(s.prompt) for s in samples], [list(s.completion) for s in samples], prompts


def deal(config: TrlConfig) -> None:
    """Make TRL's trainer give each optimizer step of a rollout the same samples on any number of ranks."""
    deal_in(config, rloo_trainer)


def build(config: TrlConfig, steps: int) -> RLOOTrainer:
    """TRL's trainer over `steps` optimizer steps of fixed rollouts."""
    rewards: list[float] = []

    def fixed(**_: object) -> list[float]:
        return rewards

    trainer = _FixedRollouts(**arguments(config, steps, fixed))
    trainer.rewards = rewards
    return trainer
