from __future__ import annotations

import pytest

from autofit.fakegpu.errors import UnknownGpuError
from autofit.fakegpu.specs import GPU_SPECS, gpu_spec


def test_every_card_leaves_room_and_names_its_sources() -> None:
    for spec in GPU_SPECS.values():
        assert 0 < spec.context_bytes < spec.capacity_bytes / 10
        assert spec.capacity_source
        assert spec.context_source
        assert spec.rates_source


def test_names_are_forgiving() -> None:
    assert gpu_spec("NVIDIA RTX 4090") is gpu_spec("rtx-4090") is gpu_spec("4090")
    assert gpu_spec("A100 80GB").name == "a100-80gb"


def test_an_unknown_name_gets_one_message_with_the_near_ones() -> None:
    with pytest.raises(UnknownGpuError, match=r"unknown GPU 'rtx4080'; did you mean rtx.*\?"):
        gpu_spec("rtx4080")
