"""The promise of a promoted trial: what its full run is held against."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import mean

from autofit.probing.result import ProbeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What the search promised of a trial's full run; None is "not known"."""

    device_name: str
    fidelity: str  # measured, or predicted on a simulated card
    device_used_bytes: int | None
    limit_bytes: int | None  # the target less the headroom
    step_s: float | None  # median seconds of an optimizer step; the mean where steps are not alike
    samples_per_s: float | None  # completions, where the trainer generates
    effective_batch_size: int | None
    proof: str = ""  # the gradient proof, as a sentence
    log_error: float | None = None  # predicted: half the width of the 90 % interval of the seconds, in logarithms
    steps_alike: bool = True  # False: a rollout serves several optimizer steps, so only some of them generate

    @classmethod
    def of(
        cls, figures: ProbeResult, *, limit_bytes: int | None, effective_batch_size: int | None, proof: str
    ) -> "Promise":
        """What the probe or confirmation run `figures` leads to expect of the full run."""
        alike = figures.steps_are_alike or not figures.step_s
        step_s = figures.median_step_s if alike else mean(figures.step_s)
        samples = figures.completions_per_step
        return cls(
            device_name=figures.device_name, fidelity=figures.fidelity, device_used_bytes=figures.device_used_bytes,
            limit_bytes=limit_bytes, step_s=step_s, samples_per_s=samples / step_s if samples and step_s else None,
            effective_batch_size=effective_batch_size, proof=proof, log_error=figures.log_error, steps_alike=alike,
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Promise":
        return cls(**content)  # type: ignore[arg-type]
