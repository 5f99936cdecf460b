"""The winner's neighbours (one step up or down in each knob: bytes and seconds gained or lost), and its free memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from autofit.probing.result import Fidelity, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.space.space import Candidate, Space, Value
from autofit.tuning.frontier import Trial

# (candidate, completion tokens or None for its own) -> (device-used bytes, step seconds), or None if not known
Predict = Callable[[Candidate, int | None], tuple[float, float] | None]
Direction = Literal["down", "up"]
_LONGEST = 4  # the search for a longer sequence ends at this multiple of the current length


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The winner with one knob moved one step, all else equal. None is "unknown"; deltas are against the winner."""

    knob: str
    direction: Direction  # in the order of the knob's values; for a memory-ordered knob, "up" needs more memory
    before: Value
    after: Value
    tier: Tier
    device_used_bytes: int | None
    step_s: float | None
    device_used_delta_bytes: int | None
    step_delta_s: float | None
    at_least: bool  # the bytes are a lower bound: the probe ran out of memory
    fits: bool | None
    fidelity: Fidelity | None  # measured if it was probed, else predicted
    trial: int | None  # the trial that probed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """The winner's free bytes under the target less the headroom. None is "unknown"."""

    bytes_left: int | None
    key: str | None  # name of the sequence-length key that could grow
    tokens: int | None  # tokens by which it could grow
    at_least: bool  # `tokens` is a lower bound: the upper end was not found
    fidelity: Fidelity | None


def neighbours(space: Space, candidate: Candidate) -> Iterator[tuple[str, Direction, Candidate]]:
    """The nearest valid candidate in each direction of each knob.

    A step in the micro-batch keeps the rollout size if possible.
    """
    for place, knob in enumerate(space.knobs):
        choices = space.choices[place]
        if candidate.values[place] not in choices:
            continue
        at = choices.index(candidate.values[place])
        ways: tuple[tuple[Direction, Sequence[Value]], ...] = (("down", choices[:at][::-1]), ("up", choices[at + 1 :]))
        for direction, further in ways:
            tries = (c for value in further for c in _with(space, candidate, knob.name, value))
            found = next((c for c in tries if space.violated(c) is None), None)
            if found is not None and found.values[place] != candidate.values[place]:  # it may be without effect here
                yield knob.name, direction, found


def _with(space: Space, candidate: Candidate, knob: str, value: Value) -> Iterator[Candidate]:
    """`candidate` with `knob` set to `value`; for the micro-batch, first the variant with the same rollout size."""
    params = {**space.params(candidate), knob: value}
    micro, _, chunk, _ = space.split(candidate)
    keys = space.keys
    if knob == keys.micro_batch and keys.rollout in params and isinstance(value, int) and micro * chunk % value == 0:
        yield space.settled({**params, keys.rollout: micro * chunk // value})
    yield space.settled(params)


def sensitivity(
    space: Space, trials: Sequence[Trial], best: Trial, *, limit_bytes: int | None, predict: Predict
) -> dict[str, object]:
    """{trial, neighbours, margin} as JSON. Knobs of `space` that the trials lack have the recipe's value.

    Each prediction is scaled by the ratio of measured to predicted at the winner.
    """
    own = space.params(space.baseline)
    candidate = space.candidate(_known(own, best.params))
    probed = {space.candidate(_known(own, t.params)): t for t in trials}
    corrected = _corrected(predict, candidate, best)
    rows = [
        _neighbour(space, candidate, knob, direction, other, best, probed.get(other), corrected, limit_bytes)
        for knob, direction, other in neighbours(space, candidate)
    ]
    margin = _margin(space, candidate, best, probed, corrected, limit_bytes)
    return {"trial": best.number, "neighbours": [asdict(r) for r in rows], "margin": asdict(margin)}


def _known(own: Mapping[str, Value], params: Mapping[str, object]) -> dict[str, Value]:
    return {knob: params.get(knob, value) for knob, value in own.items()}  # type: ignore[misc]


def _corrected(predict: Predict, candidate: Candidate, best: Trial) -> Predict:
    expected = predict(candidate, None)
    if expected is None or best.device_used_bytes is None or best.step_s is None:
        return lambda _, __: None
    used_ratio, step_ratio = best.device_used_bytes / expected[0], best.step_s / expected[1]

    def corrected(other: Candidate, tokens: int | None) -> tuple[float, float] | None:
        found = predict(other, tokens)
        return None if found is None else (used_ratio * found[0], step_ratio * found[1])

    return corrected


def _neighbour(
    space: Space, candidate: Candidate, knob: str, direction: Direction, other: Candidate, best: Trial,
    trial: Trial | None, predict: Predict, limit_bytes: int | None,
) -> Neighbour:  # fmt: skip
    used, step_s, fits, fidelity = _figures(other, knob, trial, predict, limit_bytes)
    probed = trial if trial is not None and trial.status in (ProbeStatus.FIT, ProbeStatus.OOM) else None
    ours, ours_s = best.device_used_bytes, best.step_s
    return Neighbour(
        knob=knob, direction=direction, before=space.params(candidate)[knob], after=space.params(other)[knob],
        tier=space.tier(other), device_used_bytes=used, step_s=step_s,
        device_used_delta_bytes=None if used is None or ours is None else used - ours,
        step_delta_s=None if step_s is None or ours_s is None else step_s - ours_s,
        at_least=probed is not None and probed.stopped_at_oom,
        fits=fits, fidelity=fidelity, trial=None if probed is None else probed.number,
    )  # fmt: skip


def _figures(
    other: Candidate, knob: str, trial: Trial | None, predict: Predict, limit_bytes: int | None
) -> tuple[int | None, float | None, bool | None, Fidelity | None]:
    """(device-used bytes, step seconds, whether it fits, measured or predicted)."""
    if trial is not None and trial.result is not None and trial.status in (ProbeStatus.FIT, ProbeStatus.OOM):
        return trial.device_used_bytes, trial.step_s, trial.fits, trial.result.fidelity
    found = None if knob.startswith("env.") else predict(other, None)  # the model does not cover allocator settings
    if found is None:
        return None, None, None, None
    return round(found[0]), found[1], limit_bytes is None or found[0] <= limit_bytes, Fidelity.PREDICTED


def _margin(
    space: Space, candidate: Candidate, best: Trial, probed: Mapping[Candidate, Trial], predict: Predict,
    limit_bytes: int | None,
) -> Margin:  # fmt: skip
    key = space.keys.completion or space.keys.length
    now = {**space.recipe.resolved, **space.params(candidate)}.get(key or "")
    used = best.device_used_bytes
    left = None if limit_bytes is None or used is None else limit_bytes - used
    nothing = Margin(bytes_left=left, key=key, tokens=None, at_least=False, fidelity=None)
    if limit_bytes is None or key is None or not isinstance(now, int):
        return nothing
    longer = _longest_probed(space, candidate, key, probed)
    if key == space.keys.completion and predict(candidate, now) is not None:
        tokens, at_least = _most_tokens(lambda n: predict(candidate, n), now, limit_bytes)
        return Margin(bytes_left=left, key=key, tokens=tokens - now, at_least=at_least, fidelity=Fidelity.PREDICTED)
    if longer is not None and longer > now:
        return Margin(bytes_left=left, key=key, tokens=longer - now, at_least=True, fidelity=Fidelity.MEASURED)
    return nothing


def _most_tokens(predict: Callable[[int], tuple[float, float] | None], now: int, limit_bytes: int) -> tuple[int, bool]:
    """(longest completion in tokens that fits, whether a longer one might fit): bisection from `now` to 4 x `now`."""

    def fits(tokens: int) -> bool:
        found = predict(tokens)
        return found is not None and found[0] <= limit_bytes

    low, high = now, _LONGEST * now
    if fits(high):
        return high, True
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, predict(high) is None  # None: the next length belongs to a structure that was not traced


def _longest_probed(space: Space, candidate: Candidate, key: str, probed: Mapping[Candidate, Trial]) -> int | None:
    """The longest sequence (tokens) that fitted in a probe with all other knobs as in `candidate`."""
    params = space.params(candidate)
    lengths = [
        length
        for other, trial in probed.items()
        if trial.fits and isinstance(length := space.params(other).get(key), int)
        if {**space.params(other), key: None} == {**params, key: None}
    ]
    return max(lengths, default=None)


def of_winner(kept: Mapping[str, object] | None, best: Trial | None) -> Mapping[str, object] | None:
    """`kept`, the study's stored sensitivity, if it belongs to the winner."""
    return kept if kept is not None and best is not None and kept.get("trial") == best.number else None
