"""SFT trainers that are wrong on several ranks: a gradient proof must refuse what they claim."""

from typing import Any

from torch.utils.data import DataLoader

from autofit.trainers.sft import SftTrainer
from autofit.trainers.trl import TrlRun
from autofit.trainers.trl_config import TrlConfig


class _ScaledLoss(SftTrainer):  # type: ignore[misc]
    """The second rank's loss counts twice."""

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        compute = trainer.compute_loss

        def scaled(*args: Any, **kwargs: Any) -> Any:
            return compute(*args, **kwargs) * (1 + trainer.accelerator.process_index)

        trainer.compute_loss = scaled
        return super().run(trainer, config, tokens_per_step)


class _SameSamples(SftTrainer):  # type: ignore[misc]
    """All ranks train on the first rank's samples."""

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        size = config.training.per_device_train_batch_size
        trainer.get_train_dataloader = lambda: DataLoader(
            trainer.train_dataset, batch_size=size, collate_fn=trainer.data_collator
        )
        return super().run(trainer, config, tokens_per_step)


class _Faulty(SftTrainer):  # type: ignore[misc]
    """The second rank fails while the first waits for it."""

    def run(self, trainer: Any, config: TrlConfig, tokens_per_step: int | None = None) -> TrlRun:
        if trainer.accelerator.process_index == 1:
            raise ValueError("this rank has a fault")
        return super().run(trainer, config, tokens_per_step)


SCALED, SAME, FAULTY = _ScaledLoss(), _SameSamples(), _Faulty()
