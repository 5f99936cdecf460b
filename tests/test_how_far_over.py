"""A target emulated on a larger card: after an OOM under the cap, the same probe without it says how far over."""

from dataclasses import replace
from pathlib import Path

import pytest

from autofit.api.tables import trial_line
from autofit.files import write_json
from autofit.hardware.nvml import Gpu
from autofit.probing import job
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.supervise import ProcessEnding
from autofit.tuning.frontier import Trial

GB = 10**9
CARD = Gpu(name="card", uuid="GPU-0", capacity_bytes=80 * GB)


def probed(folder: Path, *, needs_bytes: int, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> ProbeResult:
    """The answer of a probe that needs so much on an 80 GB card under a cap of `limit_bytes`."""

    def lawful(request: ProbeRequest, slot_name: str, asked: ProbeRequest) -> ProcessEnding:
        cap = limit_bytes if request.capped else CARD.capacity_bytes
        result = ProbeResult(status=ProbeStatus.OOM, device="cuda", device_used_bytes=cap, oom_phase="update")
        if needs_bytes <= cap:
            status = ProbeStatus.FIT if needs_bytes <= limit_bytes else ProbeStatus.OOM
            result = replace(result, status=status, device_used_bytes=needs_bytes, step_s=(1.0,))
        write_json(request.answer_path, result.to_json())
        return ProcessEnding(exit_code=0)

    monkeypatch.setattr(job, "_keep", lawful)
    monkeypatch.setattr(job, "gpu_of_slot", lambda name: CARD)
    request = ProbeRequest(folder=folder, trainer="grpo", values={}, device="cuda", limit_bytes=limit_bytes,
                           worst_case=folder, slots=("test-how-far-over",))  # fmt: skip
    write_json(request.request_path, request.to_json())
    job.run_probe(str(request.request_path))
    answer = ProbeResult.read(request.answer_path)
    assert answer is not None
    return answer


def test_an_oom_under_the_cap_is_told_with_what_it_holds_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probed(tmp_path, needs_bytes=31 * GB, limit_bytes=24 * GB, monkeypatch=monkeypatch)
    assert (answer.status, answer.uncapped_bytes, answer.oom_phase) == (ProbeStatus.OOM, 31 * GB, "update")
    assert answer.step_s == (1.0,)
    assert "7.00 GB over the target" in answer.reason
    assert answer.wall_s is not None
    trial = Trial(number=1, tier="neutral", changes={}, params={}, result=answer)
    assert "held without the cap 31.00 GB" in trial_line(trial, {})


def test_a_fit_whose_cache_fills_the_card_is_told_with_what_it_needs() -> None:
    result = ProbeResult(
        status=ProbeStatus.FIT, device="sim:a10g", step_s=(1.0, 1.0), device_used_bytes=23 * GB,
        least_capacity_bytes=12 * GB, completions_per_step=4,
    )  # fmt: skip
    trial = Trial(number=1, tier="neutral", changes={}, params={}, result=result)
    assert "fit, 23.00 GB (1.00 GB free; 12.00 GB needed)" in trial_line(trial, {}, limit_bytes=24 * GB)


@pytest.mark.parametrize(
    ("needs_bytes", "limit_bytes"), [(20 * GB, 24 * GB), (90 * GB, 24 * GB), (79 * GB, 78 * GB)],
    ids=["it fits", "more than the card has", "the card is hardly larger"],
)  # fmt: skip
def test_otherwise_the_answer_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_bytes: int, limit_bytes: int
) -> None:
    answer = probed(tmp_path, needs_bytes=needs_bytes, limit_bytes=limit_bytes, monkeypatch=monkeypatch)
    assert answer.uncapped_bytes is None
    assert answer.device_used_bytes == min(needs_bytes, limit_bytes)
