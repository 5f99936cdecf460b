"""A checkpoint on the spot: after a step that failed, the run as it was before that step. Loads torch."""

import copy
from typing import Any

from transformers import TrainerCallback

from autofit.plugin.randoms import RandomStates


class Spot(TrainerCallback):  # type: ignore[misc]
    """Remembers, between two optimizer steps, what the next step will change besides weights and optimizer.

    A checkpoint is saved at the end of a step, so this is what a checkpoint of that moment would hold. Costs some
    microseconds a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._between_steps = False
        self._optimizer_began = False
        self._kept: tuple[Any, float, RandomStates] | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._between_steps = True

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._between_steps = False

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self._optimizer_began = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._between_steps, self._optimizer_began = True, False
        self._keep(state)

    def on_log(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._keep(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._keep(state)

    def _keep(self, state: Any) -> None:
        if self._between_steps:
            self._kept = (copy.copy(state), float(self._trainer.current_flos), RandomStates.now())

    def save(self) -> bool:
        """Save the checkpoint of the last finished step. False where it would not be exact, and nothing is saved.

        Weights and optimizer are those of the last finished step until the optimizer begins.
        """
        trainer = self._trainer
        spread = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.args.world_size > 1
        if self._kept is None or self._optimizer_began or spread:
            return False
        state, flos, randoms = self._kept
        if int(state.global_step) != int(trainer.state.global_step):
            return False
        trainer.state, trainer.current_flos = state, flos
        randoms.restore()
        trainer._save_checkpoint(trainer.model, trial=None)
        return True
