"""Cost of an hour of a card: autofit's dated list of public prices, with a user's own file laid over it."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError, nearest, printable, quoted
from autofit.fakegpu.specs import UnknownGpuError, gpu_spec
from autofit.recipe.yaml_file import read_yaml_mapping

MOST_USD_PER_HOUR = 10_000.0
_KEYS = ("usd_per_hour", "date", "source")
StatedPrices = str | os.PathLike[str] | Mapping[str, object]  # a file, or {card: dollars an hour}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """US dollars for one hour of one card."""

    usd_per_hour: float
    date: str = ""  # of the list that has it
    source: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def prices(given: StatedPrices | None = None) -> dict[str, Price]:
    """{name of a card: its price}: autofit's list, overlaid by the `given` one. Raises ConfigError."""
    shipped = resources.files("autofit.hardware") / "prices.yaml"
    with resources.as_file(shipped) as path:
        found = _read(read_yaml_mapping(path, what="price list"), "autofit's price list", "")
    if given is None:
        return found
    if isinstance(given, Mapping):
        return found | _read(given, "the price list", "given")
    path = Path(given)
    return found | _read(read_yaml_mapping(path, what="price list"), f"the price list {printable(str(path), 80)}",
                         str(path))  # fmt: skip


def _read(content: Mapping[str, object], what: str, source: str) -> dict[str, Price]:
    found: dict[str, Price] = {}
    for name, stated in content.items():
        try:
            card = gpu_spec(str(name)).name
        except UnknownGpuError as error:
            raise ConfigError(f"{what}: {printable(str(error), 180)}") from error
        if card in found:
            raise ConfigError(f"{what}: {card} must have one price; it has several; remove one of them")
        found[card] = _price(stated, f"{what}: {card}", source)
    return found


def _price(stated: object, what: str, source: str) -> Price:
    rows = cast("Mapping[str, object]", stated if isinstance(stated, Mapping) else {"usd_per_hour": stated})
    unknown = [str(key) for key in rows if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{what} takes {', '.join(_KEYS)}; got {quoted(unknown[0])}{nearest(unknown[0], _KEYS)}")
    usd = rows.get("usd_per_hour")
    is_number = isinstance(usd, int | float) and not isinstance(usd, bool) and math.isfinite(usd)
    if not is_number or not 0 < cast(float, usd) <= MOST_USD_PER_HOUR:
        raise ConfigError(
            f"{what} must cost a number of US dollars an hour, above 0 and at most {MOST_USD_PER_HOUR:,.0f}; got "
            f"{quoted(usd)}; write for example `h100: 2.99`"
        )
    date, told = (rows.get(key, "") for key in ("date", "source"))
    if not isinstance(date, str) or not isinstance(told, str):
        raise ConfigError(f"{what}: date and source must be text; put them in quotes")
    return Price(usd_per_hour=float(cast(float, usd)), date=date, source=told or source)
