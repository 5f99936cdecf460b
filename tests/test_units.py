import pytest

from autofit.errors import ConfigError
from autofit.units import format_bytes, format_seconds, parse_bytes, parse_seconds


def test_gb_is_decimal_and_gib_is_binary_as_the_command_line_promises() -> None:
    assert parse_bytes("40GB") == 40 * 10**9
    assert parse_bytes("40 GiB") == 40 * 2**30
    assert parse_bytes("0.5gb") == 5 * 10**8


@pytest.mark.parametrize("text", ["", "40", "GB", "-3GB", "0GB", "40XB", "1e3GB", "forty GB"])
def test_an_amount_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="memory"):
        parse_bytes(text)


def test_durations() -> None:
    assert (parse_seconds("90"), parse_seconds("10m"), parse_seconds("2h")) == (90, 600, 7200)
    with pytest.raises(ConfigError):
        parse_seconds("soon")


def test_formats_read_like_the_flags() -> None:
    assert (format_bytes(40 * 10**9), format_bytes(2_500_000)) == ("40.00 GB", "2.5 MB")
    assert (format_seconds(0.5), format_seconds(12.4), format_seconds(185), format_seconds(7800)) == (
        "0.50 s", "12.4 s", "3m05s", "2h10m",
    )  # fmt: skip
