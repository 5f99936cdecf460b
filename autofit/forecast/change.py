"""What may be changed: a recipe's settings, or its card. Each with its result on a simulated card."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, gpu_spec
from autofit.forecast.margin import is_tight, needed_bytes, roomy_bytes, shown_bytes
from autofit.frontends.writing import own_words
from autofit.hardware.hardware import BFLOAT16_CAPABILITY, Device
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.findings import OFFLOAD
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.recipe import Recipe, merge
from autofit.space.traits import describe_changes, set_options
from autofit.units import format_bytes, format_seconds

Probe = Callable[[Mapping[str, object]], ProbeResult]
Tell = Callable[[str], None]
_SMALLER_FRAC = 0.95  # of the bytes: cards sold as 80 GB differ by less than a thousandth


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the recipe, in TRL's own keys, and its result on the simulated card."""

    changes: Mapping[str, object]
    given: Mapping[str, object]  # as a YAML takes them: with the keys that must go (None)
    tier: Tier
    settings: int  # number of changed settings; derived keys do not count
    device_used_bytes: int
    shown_bytes: int  # to judge it by: `margin.shown_bytes`
    least_capacity_bytes: int | None  # None where it ran out before all was asked for
    step_s: float | None
    fits: bool
    tight: bool = False  # it fits with less to spare than the prediction may be off
    own: str = ""  # the change in the keys of the file that the recipe was; "" where that was none
    failure: str = ""  # why it could not be tried; "" where it could

    @classmethod
    def of(
        cls, result: ProbeResult, *, changes: Mapping[str, object], given: Mapping[str, object], tier: Tier,
        settings: int, capacity_bytes: int, own: str = "",
    ) -> "Change":  # fmt: skip
        """The change with the `result` of its probe."""
        used, least = result.device_used_bytes, result.least_capacity_bytes
        tried = result.status in (ProbeStatus.FIT, ProbeStatus.OOM)
        fits = result.status is ProbeStatus.FIT
        return cls(
            changes=changes, given=given, tier=tier, settings=settings, device_used_bytes=used or 0,
            shown_bytes=shown_bytes(result, capacity_bytes)[0], least_capacity_bytes=least,
            step_s=result.median_step_s, fits=fits, tight=is_tight(result, capacity_bytes), own=own,
            failure="" if tried else result.reason or str(result.status),
        )  # fmt: skip

    @property
    def cost(self) -> tuple[int, bool, int, float]:
        """The order of advice: the highest tier, room to spare, the fewest settings, the fastest step."""
        return TIERS.index(self.tier), self.tight, self.settings, self.step_s or 0.0

    @property
    def options(self) -> str:
        """The options of the command line that make the change: `--set gradient_checkpointing=true`."""
        return set_options(self.given)

    @property
    def how(self) -> str:
        """How to make the change: in the user's own file where that is another tool's, else by options."""
        return f"in your file: {self.own}" if self.own else self.options

    @property
    def step_words(self) -> str:
        """`, 3.15 s a step`; "over" where the optimizer steps on the host, which is not timed; "" if not known."""
        if self.step_s is None:
            return ""
        over = "" if self.given.get(OFFLOAD, "none") == "none" else "over "
        return f", {over}{format_seconds(self.step_s)} a step"

    @property
    def outcome(self) -> str:
        """`fits: 18.20 GB, 3.15 s a step`; what came of trying it."""
        if self.failure:
            return "could not be tried"
        if not self.fits:
            least = self.least_capacity_bytes
            return "does not fit" if least is None else f"does not fit: it needs {format_bytes(least)}"
        spare = "leaves too little to spare" if self.tight else "fits"
        return f"{spare}: {format_bytes(self.shown_bytes)}{self.step_words}"

    def to_json(self) -> dict[str, object]:
        return {
            "changes": dict(self.changes),
            "options": self.options,
            **({"own": self.own} if self.own else {}),
            "tier": self.tier,
            "device_used_bytes": self.device_used_bytes,
            "shown_bytes": self.shown_bytes,
            "step_s": self.step_s,
            "tight": self.tight,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trier:
    """Tries changes of one recipe on the simulated card, and tells each."""

    recipe: Recipe
    device: Device
    capacity_bytes: int
    probe: Probe
    tell: Tell

    @property
    def room_bytes(self) -> int:
        """The most device-used bytes that leave room to spare."""
        return roomy_bytes(self.capacity_bytes, self.device)

    @property
    def context_bytes(self) -> int:
        """Bytes of the CUDA context on the card."""
        return gpu_spec(self.device.removeprefix("sim:")).context_bytes

    def result(
        self, changes: Mapping[str, object], given: Mapping[str, object], *, tier: Tier, settings: int
    ) -> tuple[Change, ProbeResult]:
        """The change with its probe's result, and that result."""
        self.tell(f"trying {describe_changes(changes, self.recipe.resolved)} ({tier})")
        result = self.probe(merge(self.recipe.values, given))
        change = Change.of(
            result,
            changes=changes,
            given=given,
            tier=tier,
            settings=settings,
            capacity_bytes=self.capacity_bytes,
            own=own_words(self.recipe.foreign, given),
        )
        self.tell(f"{change.own or change.options} {change.outcome}")
        return change, result


# -------------------------------------------------------------------------------------------------------- another card


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCard:
    """A card, and the recipe's bytes and seconds on it."""

    name: str
    capacity_bytes: int
    device_used_bytes: int
    shown_bytes: int  # to judge it by: `margin.shown_bytes`
    step_s: float | None

    @property
    def options(self) -> str:
        return f"--gpu {self.name}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "options": self.options}


def other_card(
    result: ProbeResult, capacity_bytes: int, probe_on: Callable[[Device, int], ProbeResult]
) -> OtherCard | None:
    """The smallest card that runs the recipe of `result` with room: smaller where it fits so now, larger where not.

    `probe_on` simulates the recipe on a card (device, capacity). None where no such card is known.
    """
    spec = _likely(result, capacity_bytes)
    if spec is None:
        return None
    found = probe_on(f"sim:{spec.name}", spec.capacity_bytes)
    if found.status is not ProbeStatus.FIT or is_tight(found, spec.capacity_bytes):
        return None
    return OtherCard(
        name=spec.name, capacity_bytes=spec.capacity_bytes, device_used_bytes=found.device_used_bytes or 0,
        shown_bytes=shown_bytes(found, spec.capacity_bytes)[0], step_s=found.median_step_s,
    )  # fmt: skip


def _likely(result: ProbeResult, capacity_bytes: int) -> GpuSpec | None:
    """The smallest card with room for as many bytes that computes in bfloat16, if the present one does."""
    own = gpu_spec(result.device.removeprefix("sim:"))
    fits = result.status is ProbeStatus.FIT and not is_tight(result, capacity_bytes)
    need = needed_bytes(result)
    cards = [
        spec for spec in GPU_SPECS.values()
        if (spec.capacity_bytes < _SMALLER_FRAC * capacity_bytes if fits else spec.capacity_bytes > capacity_bytes)
        if spec.compute_capability >= min(own.compute_capability, BFLOAT16_CAPABILITY)
        if roomy_bytes(spec.capacity_bytes, f"sim:{spec.name}") >= need - own.context_bytes + spec.context_bytes
    ]  # fmt: skip
    return min(cards, key=lambda spec: spec.capacity_bytes, default=None)
