"""One answer of all ranks of a probe: who decides, and how the failure of one is told."""

import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.probing.job import classified
from autofit.probing.result import Cause, ProbeRequest, ProbeResult, ProbeStatus
from autofit.probing.slots import slots
from autofit.probing.supervise import PORT_IS_TAKEN, ProcessEnding, RanksEnded, joined_answer, keep_rank_probes
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, check_on_cpu
from autofit.trainers.examples.two_rewards import TRAINER

FIT = ProbeResult(
    status=ProbeStatus.FIT, device="cpu", device_used_bytes=100, peak_reserved_bytes=100, peak_allocated_bytes=90,
    step_s=(1.0, 1.0), rollout_s=(0.0, 0.0), update_s=(1.0, 1.0), completions_per_step=8, tokens_per_step=80,
)  # fmt: skip
OOM = ProbeResult(status=ProbeStatus.OOM, device="cpu", reason="too much", oom_phase="update", device_used_bytes=120)
RAISED = ProbeResult(status=ProbeStatus.FAILED, device="cpu", reason="connection closed by peer", cause=Cause.RAISED)
ENDED, KILLED, GIVEN_UP = (
    ProcessEnding(exit_code=0),
    ProcessEnding(exit_code=-signal.SIGKILL),
    ProcessEnding(exit_code=1),
)
ENDED_TOO = ProcessEnding(exit_code=-signal.SIGKILL, abandoned=True)  # by the keeper, as another one had failed


def requests_of(folder: Path, count: int = 2) -> list[ProbeRequest]:
    request = ProbeRequest(
        folder=folder, trainer="sft", values={LAUNCH: Launch(ranks=count).to_values()}, device="cpu", limit_bytes=110,
        worst_case=folder / "worst",
    )  # fmt: skip
    return [replace(request, rank=rank) for rank in range(count)]


def joined(
    folder: Path, answers: list[ProbeResult | None], endings: list[ProcessEnding], first: int | None = None
) -> ProbeResult:
    requests = requests_of(folder, len(answers))
    for request, answer in zip(requests, answers, strict=True):
        request.phase_path.write_text("optimizer")
        if answer is not None:
            write_json(request.answer_path, answer.to_json())
    return joined_answer(requests, RanksEnded(endings=tuple(endings), first=first), classified)


def test_the_largest_rank_decides_and_the_slowest_is_timed(tmp_path: Path) -> None:
    larger = replace(FIT, device_used_bytes=105, step_s=(0.5, 0.5), update_s=(0.5, 0.5))
    found = joined(tmp_path, [FIT, larger], [ENDED, ENDED])
    assert (found.status, found.rank, found.device_used_bytes) == (ProbeStatus.FIT, 1, 105)
    assert (found.step_s, found.update_s) == ((1.0, 1.0), (1.0, 1.0))
    assert (found.completions_per_step, found.tokens_per_step, found.reason) == (16, 160, "")
    assert [(one.rank, one.device_used_bytes, one.peak_allocated_bytes) for one in found.ranks] == [
        (0, 100, 90), (1, 105, 90)]  # fmt: skip


def test_an_oom_of_one_rank_is_the_answer_though_the_others_only_lost_their_connection(tmp_path: Path) -> None:
    found = joined(tmp_path, [RAISED, OOM], [GIVEN_UP, GIVEN_UP], first=1)
    assert (found.status, found.rank, found.oom_phase) == (ProbeStatus.OOM, 1, "update")
    assert found.reason == "rank 1 of 2: too much"
    assert joined(tmp_path, [None, OOM], [ENDED_TOO, GIVEN_UP], first=1).status is ProbeStatus.OOM


def test_ranks_over_the_target_after_a_whole_run_are_an_oom_with_their_seconds(tmp_path: Path) -> None:
    over = replace(FIT, status=ProbeStatus.OOM, device_used_bytes=115, oom_phase="save", reason="over")
    found = joined(tmp_path, [over, FIT], [ENDED, ENDED])
    assert (found.status, found.rank, found.step_s) == (ProbeStatus.OOM, 0, (1.0, 1.0))


@pytest.mark.parametrize("others", [(None, ENDED_TOO), (RAISED, GIVEN_UP)])
def test_a_kill_of_one_rank_is_no_evidence_about_the_candidate(
    others: tuple[ProbeResult | None, ProcessEnding], tmp_path: Path
) -> None:
    found = joined(tmp_path, [others[0], None], [others[1], KILLED], first=1)
    assert (found.status, found.cause, found.rank) == (ProbeStatus.LOST, Cause.KILLED, 1)
    assert found.was_killed
    assert "rank 1 of 2: the probe was killed (SIGKILL) during optimizer" in found.reason


def test_a_crash_is_told_before_what_follows_from_it(tmp_path: Path) -> None:
    crashed = ProcessEnding(exit_code=-signal.SIGSEGV)
    found = joined(tmp_path, [None, RAISED], [crashed, GIVEN_UP], first=0)
    assert (found.status, found.cause, found.rank) == (ProbeStatus.FAILED, Cause.CRASHED, 0)


def test_a_port_that_was_taken_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autofit.probing import supervise

    request = replace(requests_of(tmp_path)[0], rank=None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = iter((taken, 40000, 40001, 40002))  # two for each try: a rank may resume in a process of its own
        monkeypatch.setattr(supervise, "free_port", lambda: next(ports))

        def keep(ranks: Sequence[ProbeRequest]) -> RanksEnded:
            fits = ranks[0].port != taken
            for one in ranks if fits else ():
                write_json(one.answer_path, FIT.to_json())
            return RanksEnded(
                endings=tuple(ProcessEnding(exit_code=0 if fits else PORT_IS_TAKEN) for _ in ranks), first=0
            )

        keep_rank_probes(request, keep, abandoned=lambda: False, classify=classified)
    found = ProbeResult.read(request.answer_path)
    assert found is not None
    assert found.status is ProbeStatus.FIT


def test_who_needs_several_cards_takes_them_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cards = ("cuda-a", "cuda-b", "cuda-c", "cuda-d")
    with slots(cards, 1) as one, slots(cards, 3) as three:
        assert (one, three) == (cards[:1], cards[1:])
        asked = iter((False, False, True))
        with slots(cards, 2, abandoned=lambda: next(asked)) as two:
            assert two is None
    with slots(cards, 4) as four:
        assert four == cards


@pytest.mark.parametrize(
    ("launch", "named"),
    [(Launch(ranks=2, sharding="zero3"), "got zero3"), (Launch(ranks=2, sharding="fsdp1"), "got fsdp1"),
     (Launch(ranks=2, sharding="fsdp2", offload="parameters"), "got offload: parameters")],
)  # fmt: skip
def test_ranks_on_the_cpu_that_cannot_train_are_one_error(launch: Launch, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_on_cpu(launch)
    check_on_cpu(Launch(ranks=4, sharding="fsdp2"))


def test_a_plain_loop_says_that_it_trains_on_one_rank(tmp_path: Path) -> None:
    inspection = Inspection(device="cpu", worst_case=WorstCase(path=tmp_path / "w"), ranks=2)
    with pytest.raises(ConfigError, match="trains on one rank; got num_processes: 2"):
        TRAINER.inspect({}, inspection)
