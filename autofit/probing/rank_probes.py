"""A probe of several ranks: one worker a rank, all kept together, and one answer of theirs. No torch here.

Each rank writes files of its own beside the request: rank-0.json, rank-0.log and so on. The largest rank decides.
"""

import errno
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

from autofit.files import write_json
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus, RankPeak
from autofit.probing.supervise import ProcessEnding, RanksEnded, free_port
from autofit.recipe.launch import Launch

PORT_IS_TAKEN = errno.EADDRINUSE  # exit code of a rank that found another process listening on the port
PORTS = 5  # that are tried: another program may take one between its choice and its use
Classify = Callable[[ProcessEnding, ProbeRequest], ProbeResult]
Keep = Callable[[Sequence[ProbeRequest]], RanksEnded]  # starts a worker for each request, and waits for all


def has_ranks(request: ProbeRequest) -> bool:
    """Whether `request` is for a probe with a process for each rank; a simulated one has a single process."""
    return request.rank is None and not request.device.startswith("sim:") and not Launch.of(request.values).is_plain


def keep_rank_probes(
    request: ProbeRequest, keep: Keep, *, abandoned: Callable[[], bool], classify: Classify
) -> ProcessEnding:
    """Run the ranks of `request` to their ends and write its answer, unless it was abandoned."""
    for _ in range(PORTS):
        requests = _rank_requests(request)
        ended = keep(requests)
        shutil.rmtree(request.folder / "checkpoints", ignore_errors=True)  # a killed rank 0 leaves them
        if abandoned():
            return ProcessEnding(exit_code=ended.worst.exit_code, abandoned=True)
        if ended.worst.exit_code != PORT_IS_TAKEN:
            break
    write_json(request.answer_path, joined_answer(requests, ended, classify).to_json())
    return ended.worst


def _rank_requests(request: ProbeRequest) -> list[ProbeRequest]:
    """The request of each rank, written; what an earlier attempt left there is removed."""
    port, again = free_port(), free_port()
    ranks = range(Launch.of(request.values).ranks)
    requests = [replace(request, rank=rank, port=port, resume_port=again) for rank in ranks]
    for one in requests:
        for path in (one.answer_path, one.phase_path):
            path.unlink(missing_ok=True)
        write_json(one.request_path, one.to_json())
    return requests


def joined_answer(requests: Sequence[ProbeRequest], ended: RanksEnded, classify: Classify) -> ProbeResult:
    """One result of all ranks: an OOM of any rank first, then the rank that failed first, else the largest rank."""
    answers = [ProbeResult.read(one.answer_path) for one in requests]
    told = {
        rank: answer if answer is not None else classify(ended.endings[rank], requests[rank])
        for rank, answer in enumerate(answers)
        if answer is not None or not ended.endings[rank].abandoned
    }
    peaks = tuple(RankPeak.of(rank, answer) for rank, answer in told.items() if answer.device_used_bytes is not None)
    ooms = [rank for rank, answer in told.items() if answer.status is ProbeStatus.OOM]
    fits = len(told) == len(requests) and all(answer.status is ProbeStatus.FIT for answer in told.values())
    if fits or ooms:
        rank = max(ooms or told, key=lambda rank: told[rank].device_used_bytes or 0)
    else:
        rank = ended.first if ended.first in told else next(r for r, a in told.items() if a.status != ProbeStatus.FIT)
    whole = len(told) == len(requests) and all(answer.step_s for answer in told.values())
    return _of_all(told[rank], rank, told if whole else {rank: told[rank]}, len(requests), peaks)


def _of_all(
    answer: ProbeResult, rank: int, timed: dict[int, ProbeResult], count: int, peaks: tuple[RankPeak, ...]
) -> ProbeResult:
    """`answer` of `rank` as that of all: the seconds of the slowest rank, the samples of all `count`."""
    slowest = max(timed.values(), key=lambda one: sum(one.step_s))
    samples, tokens = answer.completions_per_step, answer.tokens_per_step
    return replace(
        answer, rank=rank, ranks=peaks, step_s=slowest.step_s, rollout_s=slowest.rollout_s, update_s=slowest.update_s,
        completions_per_step=None if samples is None else count * samples,
        tokens_per_step=None if tokens is None else count * tokens,
        reason=f"rank {rank} of {count}: {answer.reason}" if answer.reason else "",
    )  # fmt: skip
