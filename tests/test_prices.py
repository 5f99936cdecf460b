"""Prices of cards: autofit's dated list, and a user's own over it."""

from pathlib import Path

import pytest

from autofit.errors import ConfigError
from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware.prices import prices


def test_every_price_of_the_list_has_a_date_and_a_source() -> None:
    found = prices()
    assert set(found) <= set(GPU_SPECS)
    assert all(price.date[:2] == "20" and len(price.date) == 10 and price.source for price in found.values())
    assert all(0.1 < price.usd_per_hour < 20 for price in found.values())


def test_the_users_own_prices_win_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("NVIDIA H100 80GB HBM3: 2.5\nt4: {usd_per_hour: 0.35, source: mine}\n")
    found = prices(path)
    assert found["h100"].usd_per_hour == 2.5
    assert found["h100"].source == str(path)
    assert found["t4"].source == "mine"
    assert found["a100-80gb"] == prices()["a100-80gb"]
    assert prices({"h100": 1})["h100"].usd_per_hour == 1.0


@pytest.mark.parametrize(("content", "says"), [
    ("h100: free", "above 0"), ("h100: -1", "above 0"), ("h100: .inf", "above 0"), ("h100: true", "above 0"),
    ("h100: 1e9", "10,000"), ("h1000: 2", "unknown GPU"), ("h100: {usd_hour: 2}", "nearest valid one"),
    ("h100: {usd_per_hour: 2, source: 3}", "must be text"), ("h100: 2\nh100-80gb: 3", "one price"),
    ("[1, 2]", "must be a YAML mapping"), ("h100: {}", "above 0"),
])  # fmt: skip
def test_a_wrong_price_list_is_one_clear_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says) as error:
        prices(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) <= 300 + len(str(path))


def test_a_price_list_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("# " + "x" * 200_000)
    with pytest.raises(ConfigError, match="128 KiB"):
        prices(path)
