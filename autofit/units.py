"""Bytes and seconds as text: parsing and formatting. 40GB is 40e9 bytes, 40GiB is 40·2^30."""

import re

from autofit.errors import ConfigError, quoted

_FACTORS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Bytes in `text`, such as `40GB` (10^9 each) or `40GiB` (2^30 each). Numbers need a unit."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _FACTORS or unit == "":
        raise ConfigError(
            f"an amount of memory must look like 40GB (40e9 bytes) or 40GiB (40*2^30); got {quoted(text)}"
        )
    value = int(float(match.group(1)) * _FACTORS[unit])
    if value <= 0:
        raise ConfigError(f"an amount of memory must be above zero; got {quoted(text)}")
    return value


def parse_seconds(text: str) -> float:
    """Seconds in `text`, such as `90`, `90s`, `10m` or `2h`."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([smh]?)\s*", text)
    if match is None or float(match.group(1)) <= 0:
        raise ConfigError(f"a duration must look like 90s, 10m or 2h and be above zero; got {quoted(text)}")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def parse_frac(text: str) -> float:
    """The share in `text`, such as `1%` or `0.01`: at least 0 and below 1."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%?)\s*", text)
    value = float(match.group(1)) / (100 if match.group(2) else 1) if match else 1.0
    if value >= 1:
        raise ConfigError(f"a share must look like 1% or 0.01 and be below 100 %; got {quoted(text)}")
    return value


def format_bytes(count: int) -> str:
    """`count` as text in GB (10^9, as in `--target-vram 40GB`), or in MB below 0.1 GB."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 10**8 else f"{count / 1e6:.1f} MB"


def format_seconds(seconds: float) -> str:
    """`seconds` as text: `0.53 s`, `12.4 s`, `3m05s` or `2h10m`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def format_metric(value: object) -> str:
    """A metric with four digits; "-" for any other value."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
