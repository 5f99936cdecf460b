"""Whether an estimate predicts the symptom of a thread, and whether its first pieces of advice hold an accepted fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

from autofit.units import parse_bytes
from experiments.field.threads import Thread

FIRST = 3  # pieces of advice that are read
SAME = {"activation_checkpointing": "gradient_checkpointing"}  # the newer name, which TRL's recipes may use
Answer = Mapping[str, object]  # a kept result: figures of the estimate, `advice`, `own` values


def symptom_predicted(thread: Thread, answer: Answer) -> bool | None:
    """Whether the estimate shows what the thread saw; None where there is no estimate, or nothing to show."""
    if "fits" not in answer or not thread.symptom:
        return None
    symptom = thread.symptom
    if "fits" in symptom:
        return answer["fits"] is symptom["fits"]
    if "rollout_share_above" in symptom:
        share = rollout_share(answer)
        return share is not None and share > cast(float, symptom["rollout_share_above"])
    if "device_used_above" in symptom:
        return device_used_bytes(answer) > parse_bytes(str(symptom["device_used_above"]))
    figure = "device_used" if "device_used_near" in symptom else "peak_allocated"
    stated, found = parse_bytes(str(symptom[f"{figure}_near"])), _number(answer, f"{figure}_bytes")
    return found is not None and abs(found / stated - 1) <= cast(float, symptom["within"])


def rollout_share(answer: Answer) -> float | None:
    """The rollout's share of a step's seconds; None where the step was not finished."""
    rollout_s, step_s = _number(answer, "rollout_s"), _number(answer, "step_s")
    return None if rollout_s is None or not step_s else rollout_s / step_s


def device_used_bytes(answer: Answer) -> float:
    """Bytes used on the card; for a run that does not fit, the smallest card on which it would."""
    return max(_number(answer, "device_used_bytes") or 0, _number(answer, "least_capacity_bytes") or 0)


def fix_found(thread: Thread, answer: Answer) -> Mapping[str, object] | None:
    """The first of the first pieces of advice that holds an accepted fix, by its changes."""
    pieces = cast("Sequence[Mapping[str, object]]", answer.get("advice") or ())[:FIRST]
    own = cast("Mapping[str, object]", answer.get("own") or {})
    return next((piece for piece in pieces if any(holds(piece, fix, own) for fix in thread.accepted)), None)


def holds(changes: Mapping[str, object], fix: Mapping[str, object], own: Mapping[str, object]) -> bool:
    """Whether `changes` make every change of `fix`: a value, a pattern of text, or `lower` and `higher` than `own`."""
    given = {SAME.get(key, key): value for key, value in changes.items()}
    return all(key in given and _matches(given[key], wanted, own.get(key)) for key, wanted in fix.items())


def _matches(value: object, wanted: object, own: object) -> bool:
    if wanted in ("lower", "higher"):
        if not isinstance(value, (int, float)) or not isinstance(own, (int, float)):
            return False
        return value < own if wanted == "lower" else value > own
    if isinstance(wanted, str) and isinstance(value, str):
        return fnmatchcase(value, wanted)
    return value == wanted


def _number(answer: Answer, key: str) -> float | None:
    value = answer.get(key)
    return float(value) if isinstance(value, (int, float)) else None
