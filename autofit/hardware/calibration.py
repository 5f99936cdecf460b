"""Host costs of the simulated clock: fitted to a probe on that card, else measured on this host, else on others.

Stored in the cache folder, one file for the host and one for each card. The files are optional.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from autofit.files import cache_folder, read_json
from autofit.hardware.hardware import Device

if TYPE_CHECKING:
    from autofit.fakegpu import HostCosts

PUBLISHED = "published measurements of other hosts (autofit doctor --calibrate measures this one)"
_HOST = "host"
# Share of the seconds from which the card, or the host, is said to bound them. Of the smallest steps too the card has
# 0.15 to 0.22, since no kernel is shorter than a few microseconds.
_CARD_BOUND, _HOST_BOUND = 0.9, 0.8


class Seconds(Protocol):
    """Times of a probe: seconds of the rollout and of the update, one entry per measured step."""

    @property
    def rollout_s(self) -> tuple[float, ...]: ...
    @property
    def update_s(self) -> tuple[float, ...]: ...
    @property
    def device_name(self) -> str: ...


class Prediction(Seconds, Protocol):
    """A simulated probe, which also says what bounds its seconds."""

    @property
    def shares(self) -> Mapping[str, Mapping[str, float]]: ...


def costs_path(name: str = _HOST) -> Path:
    """The path of the file with the costs of this host, or with those fitted to probes on the card `name`.

    Corrections in `host_costs`, where they once were, had multiplied from search to search: they are not read.
    """
    return cache_folder() / ("host_costs" if name == _HOST else "card_costs") / f"{name}.json"


def found_path(device: Device) -> Path | None:
    """The costs file for a simulated `device`: its card's, else this host's, if one exists."""
    names = (device.removeprefix("sim:"), _HOST)
    return next((path for path in map(costs_path, names) if path.is_file()), None)


def host_costs(device: Device) -> "tuple[HostCosts | None, str]":
    """(costs for a simulated `device`, None for the published ones; their source as text)."""
    path = found_path(device)
    if path is None:
        return None, PUBLISHED
    from autofit.fakegpu.calibrate import load_host_costs

    costs = load_host_costs(path)
    if costs is None:
        return None, PUBLISHED
    record = json.loads(path.read_text())
    return costs, f"{record['source']}, {record['measured_at'][:10]}"


def fingerprint(device: Device) -> str:
    """The content of the costs file for a simulated `device`; "" if there is none."""
    path = found_path(device)
    return "" if path is None else path.read_text()


def launch_s(device: Device) -> float | None:
    """Host seconds of a kernel's launch in the costs file, if any, for a simulated `device`. Free of torch."""
    record = read_json(path) if (path := found_path(device)) is not None else None
    costs = (record or {}).get("host_costs")
    seconds = costs.get("launch_s") if isinstance(costs, dict) else None
    return seconds if isinstance(seconds, float) else None


def measure(name: str = _HOST) -> "HostCosts":
    """This host's costs, measured on the CPU in about a second, and stored, for the card `name` or any. Imports torch.

    The same program took two hosts of H100s 11 and 22 us a kernel (experiments/gpu), so that no published figure can
    be right for both.
    """
    from autofit.fakegpu.calibrate import measure_host_costs, save_host_costs

    costs = measure_host_costs()
    save_host_costs(costs, costs_path(name), source="measured on this host's CPU")
    return costs


def measure_for(name: str) -> int:
    """In a child of the fork server: `measure` for the card `name`."""
    measure(name)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The costs of a card after a real probe on it; None if the probe corrects none of them, and why."""

    costs: "HostCosts | None" = None
    why: str = ""


def fit_card(device: Device, *, predicted: Prediction, measured: Seconds) -> Fitted:
    """The costs for a simulated `device`, corrected by a real probe of the same recipe on that card, and stored.

    `predicted` used the costs that are kept now, and the card's kernels (or the host) take nearly all of the seconds
    that correct them: so the correction is measured / uncorrected, whatever the last one was, and replaces that. From
    steps that the other one bounds it would multiply from search to search. Imports torch.
    """
    from autofit.fakegpu import FakeGpuError, HostCosts
    from autofit.fakegpu.calibrate import checked_correction, fit_to_probe, save_host_costs

    seconds: dict[str, float] = {}
    for name, by, least in (("update", "card", _CARD_BOUND), ("rollout", "host", _HOST_BOUND)):
        told, found = getattr(predicted, f"{name}_s"), getattr(measured, f"{name}_s")
        bounded = predicted.shares.get(name, {}).get(by, 0.0) >= least
        if bounded and told and found and median(told) > 0 and median(found) > 0:
            seconds |= {f"predicted_{name}_s": median(told), f"measured_{name}_s": median(found)}
    if not seconds:
        return Fitted(why="the host, or other ranks, bound the winner's steps, which say nothing of the card")
    try:
        costs = checked_correction(fit_to_probe(host_costs(device)[0] or HostCosts(), **seconds))
    except FakeGpuError as error:
        return Fitted(why=str(error))
    card = device.removeprefix("sim:")
    save_host_costs(costs, costs_path(card), source=f"fitted to a probe on {measured.device_name or card}")
    return Fitted(costs=costs)
