"""The promise of a promoted trial: what its full run is held against."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the search promised of a trial's full run; None is "not known"."""

    device_name: str
    fidelity: str  # measured, or predicted on a simulated card
    device_used_bytes: int | None
    limit_bytes: int | None  # the target less the headroom
    step_s: float | None  # median seconds of an optimizer step
    samples_per_s: float | None  # completions, where the trainer generates
    effective_batch_size: int | None
    proof: str = ""  # the gradient proof, as a sentence

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Promise":
        return cls(**content)  # type: ignore[arg-type]
