"""The accuracy gate of several ranks: a simulated rank against the bytes that real gloo ranks held."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.probing.fork_server import ForkServer

from .rank_training import Ranks, real_peaks_bytes, simulated_peak_bytes

pytestmark = pytest.mark.slow
CASES = [
    Ranks(count=2, sharding="ddp", lora_rank=8, bucket_view=True),
    Ranks(count=2, sharding="fsdp2", mixed=True),
]
MORE = [
    Ranks(count=2, sharding="fsdp2"),
    Ranks(count=4, sharding="fsdp2", mixed=True),
    Ranks(count=4, sharding="ddp"),
    Ranks(count=4, sharding="fsdp2", lora_rank=8, reshard=False, checkpointing=True),
]


def host_random_state_bytes(case: Ranks) -> int:
    """Checkpointing keeps the CPU's random state (5056 B) for each of the four layers: host memory on a GPU run."""
    return 4 * 5056 if case.checkpointing else 0


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE)], ids=str)
def test_first_and_last_simulated_rank_peak_at_the_byte_count_of_real_ranks(
    case: Ranks, fork_server: ForkServer, tmp_path: Path
) -> None:
    real = real_peaks_bytes(case, fork_server, tmp_path)
    for rank in (0, case.count - 1):
        error = (simulated_peak_bytes(case, rank) + host_random_state_bytes(case)) / real[rank] - 1
        print(f"{case}: rank {rank}: real {real[rank] / 2**20:.3f} MiB, error {error:+.4%}")
        assert abs(error) <= 5e-3
