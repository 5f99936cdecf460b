"""A number of cards for a recipe: what it needs there, takes and costs; and which of several offers stand out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from autofit.recipe.keys import TIERS, Tier
from autofit.units import format_bytes, format_seconds

STEPS = 1000  # that a cost is of
_HOUR_S = 3600.0
_SOLD = 8 << 30  # cards are sold in multiples of 8 GB, of which drivers keep up to an eighth


class Verdict(StrEnum):
    FITS = "fits"
    TIGHT = "tight"  # it does as predicted, with less to spare than the prediction may be off
    OVER = "does not fit"
    NONE = "not possible"  # the batch cannot be split, or the card lacks what the recipe needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A number of cards, and the recipe on them: as it is, or with the mildest change that fits."""

    card: str
    count: int
    capacity_bytes: int  # of one card
    verdict: Verdict
    changes: Mapping[str, object] = field(default_factory=dict)
    tier: Tier = TIERS[0]
    batch: Mapping[str, object] = field(default_factory=dict)  # {key: value} of one rank, which `changes` may not name
    device_used_bytes: int | None = None  # of the rank with the most; of an offer over the card, what it would need
    cached_bytes: int = 0  # of them, those that PyTorch only keeps, where they fill the card
    host_bytes: int | None = None  # memory of the machine, of several ranks; None where it is not known
    step_s: float | None = None
    is_lower_bound: bool = False  # whether a step takes longer: the optimizer's part on the host is not timed
    samples_per_s: float | None = None
    usd_per_hour: float | None = None  # of all cards
    reason: str = ""  # why it is not possible, or does not fit

    @property
    def usd_per_1000_steps(self) -> float | None:
        """Cost of 1,000 optimizer steps; None without a price or seconds."""
        if self.usd_per_hour is None or self.step_s is None:
            return None
        return self.usd_per_hour * STEPS * self.step_s / _HOUR_S

    @property
    def shown_bytes(self) -> int | None:
        """The bytes to judge by: used, or where the allocator's cache fills the card, needed."""
        return None if self.device_used_bytes is None else self.device_used_bytes - self.cached_bytes

    @property
    def memory_bytes(self) -> int:
        """Memory of all cards."""
        return self.count * self.capacity_bytes

    @property
    def nominal_bytes(self) -> int:
        """Memory of all cards, as they are sold: that of an H100 and an A100, both of 80 GB, is the same."""
        return self.count * math.ceil(self.capacity_bytes / _SOLD) * _SOLD

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def words(self) -> str:
        """`2 x h100`, or `h100`."""
        return self.card if self.count == 1 else f"{self.count} x {self.card}"

    @property
    def step_words(self) -> str:
        """`3.15 s`, `over 9.53 s`, or `-` where nothing is known."""
        return "-" if self.step_s is None else f"{'over ' if self.is_lower_bound else ''}{format_seconds(self.step_s)}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "usd_per_1000_steps": self.usd_per_1000_steps}

    def __str__(self) -> str:
        if self.step_s is None or self.shown_bytes is None:
            return f"{self.words}: {self.verdict}{f', {self.reason}' if self.reason else ''}"
        used = f"{format_bytes(self.shown_bytes)} of {format_bytes(self.capacity_bytes)}"
        return f"{self.words}: {self.verdict}, {used}, {self.step_words} a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The offers that stand out among those of the highest tier that has one."""

    cheapest: Offer | None  # for 1,000 steps; None without a price
    fastest: Offer | None
    smallest: Offer | None  # by the nominal memory of all cards, then by the number of them, then by cost


def choice(offers: Sequence[Offer]) -> Choice:
    """The cheapest, the fastest and the smallest offer that fit; tight ones count where nothing fits."""
    fitting = [o for o in offers if o.fits] or [o for o in offers if o.verdict is Verdict.TIGHT]
    best = min((TIERS.index(o.tier) for o in fitting), default=0)
    pool = [o for o in fitting if TIERS.index(o.tier) == best]
    timed = [o for o in pool if not o.is_lower_bound] or pool
    inf = math.inf  # of what is not known
    priced = [o for o in timed if o.usd_per_1000_steps is not None]
    return Choice(
        cheapest=min(priced, key=lambda o: (o.usd_per_1000_steps or 0.0, o.step_s or 0.0), default=None),
        fastest=min((o for o in timed if o.step_s is not None), key=lambda o: (o.step_s or 0.0, o.count), default=None),
        smallest=min(
            pool,
            key=lambda o: (o.nominal_bytes, o.count, o.is_lower_bound, o.usd_per_1000_steps or inf, o.step_s or inf),
            default=None,
        ),
    )
