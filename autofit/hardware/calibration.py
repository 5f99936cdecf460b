"""Host costs of the simulated clock: fitted to a probe on that card, else measured on this host, else on others.

Stored in the cache folder, one file for the host and one for each card. The files are optional.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autofit.files import cache_folder
from autofit.hardware.hardware import Device

if TYPE_CHECKING:
    from autofit.fakegpu import HostCosts

PUBLISHED = "published measurements of other hosts (autofit doctor --calibrate measures this one)"
_HOST = "host"


class Seconds(Protocol):
    """Times of a probe: seconds of the rollout and of the update, one entry per measured step."""

    @property
    def rollout_s(self) -> tuple[float, ...]: ...
    @property
    def update_s(self) -> tuple[float, ...]: ...
    @property
    def device_name(self) -> str: ...


def costs_path(name: str = _HOST) -> Path:
    """The path of the file with the costs of this host, or with those fitted to probes on the card `name`."""
    return cache_folder() / "host_costs" / f"{name}.json"


def found_path(device: Device) -> Path | None:
    """The costs file for a simulated `device`: its card's, else this host's; None if neither exists."""
    names = (device.removeprefix("sim:"), _HOST)
    return next((path for path in map(costs_path, names) if path.is_file()), None)


def host_costs(device: Device) -> "tuple[HostCosts | None, str]":
    """(costs for a simulated `device` or None for the published ones, their source as text)."""
    path = found_path(device)
    if path is None:
        return None, PUBLISHED
    from autofit.fakegpu.calibrate import load_host_costs

    costs = load_host_costs(path)
    record = json.loads(path.read_text())
    return costs, f"{record['source']}, {record['measured_at'][:10]}"


def fingerprint(device: Device) -> str:
    """The content of the costs file for a simulated `device`; "" without one."""
    path = found_path(device)
    return "" if path is None else path.read_text()


def measure() -> "HostCosts":
    """This host's costs, measured on the CPU in about a second, and stored. Imports torch."""
    from autofit.fakegpu.calibrate import measure_host_costs, save_host_costs

    costs = measure_host_costs()
    save_host_costs(costs, costs_path(), source="measured on this host's CPU")
    return costs


def fit_card(device: Device, *, predicted: Seconds, measured: Seconds) -> "HostCosts | None":
    """The costs for a simulated `device`, corrected by a real probe of the same recipe on that card, and stored.

    None, and nothing is stored, if either probe has no seconds. Imports torch.
    """
    from statistics import median

    from autofit.fakegpu import HostCosts
    from autofit.fakegpu.calibrate import fit_to_probe, save_host_costs

    pairs = {name: (getattr(predicted, name), getattr(measured, name)) for name in ("rollout_s", "update_s")}
    seconds: dict[str, float] = {}
    for name, (told, found) in pairs.items():
        if told and found and median(told) > 0 and median(found) > 0:
            seconds |= {f"predicted_{name}": median(told), f"measured_{name}": median(found)}
    if not seconds:
        return None
    costs = fit_to_probe(host_costs(device)[0] or HostCosts(), **seconds)
    card = device.removeprefix("sim:")
    save_host_costs(costs, costs_path(card), source=f"fitted to a probe on {measured.device_name or card}")
    return costs
