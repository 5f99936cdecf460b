"""The smallest other card that runs a recipe as it is: named only after its simulation."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from autofit.fakegpu.specs import GPU_SPECS, GpuSpec, gpu_spec
from autofit.forecast.margin import is_tight, needed_bytes, roomy_bytes, shown_bytes
from autofit.hardware.hardware import BFLOAT16_CAPABILITY, Device
from autofit.probing.result import ProbeResult, ProbeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
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


def other_card(result: ProbeResult, capacity_bytes: int, probe_on: Callable[[Device, int], ProbeResult]) -> Card | None:
    """The smallest card that runs the recipe of `result` with room: smaller where it fits so now, larger where not.

    `probe_on` simulates the recipe on a card (device, capacity). None where no such card is known.
    """
    spec = _likely(result, capacity_bytes)
    if spec is None:
        return None
    found = probe_on(f"sim:{spec.name}", spec.capacity_bytes)
    if found.status is not ProbeStatus.FIT or is_tight(found, spec.capacity_bytes):
        return None
    return Card(
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
        if (spec.capacity_bytes < capacity_bytes if fits else spec.capacity_bytes > capacity_bytes)
        if spec.compute_capability >= min(own.compute_capability, BFLOAT16_CAPABILITY)
        if roomy_bytes(spec.capacity_bytes, f"sim:{spec.name}") >= need - own.context_bytes + spec.context_bytes
    ]  # fmt: skip
    return min(cards, key=lambda spec: spec.capacity_bytes, default=None)
