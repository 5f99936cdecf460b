"""What the keys of a recipe mean to the search: how samples are batched, and how far a change may go."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Tier = Literal["neutral", "approximate", "recipe"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKeys:
    """The keys that say how a trainer batches its samples; None where the trainer has no such key.

    Effective batch = micro-batch x accumulation x ranks. A trainer with `rollout` generates micro-batch x rollout
    completions at once on each rank, in groups of `group` completions of one prompt.
    """

    micro_batch: str = "per_device_train_batch_size"  # samples in one forward and backward on one rank
    accumulation: str = "gradient_accumulation_steps"  # micro-batches in one optimizer step
    rollout: str | None = None  # micro-batches whose completions are generated at once
    rollout_batch: str | None = None  # the same as a number of completions; a tuned recipe says it one way only
    group: str | None = None  # completions of one prompt
    reuse: str | None = None  # how often a rollout is trained on
    completion: str | None = None  # tokens of the longest completion
    length: str | None = None  # tokens of the longest sample

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, str | None]) -> "BatchKeys":
        return cls(**content)  # type: ignore[arg-type]
