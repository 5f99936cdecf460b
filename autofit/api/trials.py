"""One trial of a study as a row of a result."""

from collections.abc import Mapping
from dataclasses import dataclass

from autofit.probing.result import ProbeStatus
from autofit.recipe.keys import Tier
from autofit.tuning.frontier import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One candidate and what its probe said; None is "not measured". Figures are those of the longest probe."""

    number: int
    tier: Tier
    status: ProbeStatus | None  # fit, oom, failed or lost; None while it waits or is probed
    changes: Mapping[str, object]  # {key of the recipe: value}; empty for the recipe as it is
    device_used_bytes: int | None
    step_s: float | None  # of one optimizer step
    completions_per_s: float | None  # samples, for a trainer that does not generate
    speedup: float | None  # its completions per second over the baseline's; in turns with it if it was a finalist
    confirmed: bool | None  # whether it held in the longer probe; None where it had none
    at_least: bool = False  # its bytes are what it held when memory ran out
    reason: str = ""  # of an oom, a failure or a loss
    needs: tuple[str, ...] = ()  # packages without which it does not run; a simulated probe does without them
    margin_bytes: int | None = None  # what it leaves free under the limit (target less headroom); None without a fit
    first_step_s: float | None = None  # of its first probe, if that was doubted and repeated

    @classmethod
    def of(cls, trial: Trial, base: Trial | None, *, limit_bytes: int | None = None) -> "TrialResult":
        """The row of `trial`, with its speed-up over `base` and its margin."""
        used = trial.device_used_bytes if trial.fits else None
        return cls(
            number=trial.number, tier=trial.tier, status=trial.status, changes=trial.changes,
            device_used_bytes=trial.device_used_bytes, step_s=trial.step_s,
            completions_per_s=trial.completions_per_s, speedup=trial.speedup(base),
            confirmed=None if trial.confirmed is None else not trial.fell, at_least=trial.stopped_at_oom,
            reason="" if trial.figures is None else trial.figures.reason,
            margin_bytes=None if used is None or limit_bytes is None else limit_bytes - used,
            first_step_s=None if trial.first is None else trial.first.median_step_s,
            needs=trial.needs,
        )  # fmt: skip

    @property
    def fits(self) -> bool:
        """Whether it fitted whenever it was probed."""
        return self.status is ProbeStatus.FIT and self.confirmed is not False

    @property
    def stopped_at_oom(self) -> bool:
        """Whether its bytes are a lower bound, as memory ran out."""
        return self.at_least

    def to_dict(self) -> dict[str, object]:
        """The trial as `--json` has it; what was not measured is None."""
        return {
            "trial": self.number,
            "tier": self.tier,
            "status": None if self.status is None else str(self.status),
            "changes": dict(self.changes),
            "device_used_bytes": self.device_used_bytes,
            "step_s": self.step_s,
            "completions_per_s": self.completions_per_s,
            "speedup": self.speedup,
            "margin_bytes": self.margin_bytes,
            "first_step_s": self.first_step_s,
            "confirmed": self.confirmed,
            "needs": list(self.needs),
        }
