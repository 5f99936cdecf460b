"""One thread's estimate, in a process of its own: `python -m experiments.field.estimating NAME OUT ADVICE_S`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import autofit
from autofit.files import write_json
from autofit.forecast.advice import then_lines
from experiments.field.threads import Thread, read_seeds, read_threads

REWARD = {"reward_funcs": ["think_format_reward"]}  # TRL's own; where a thread has others, they need no memory either
KEPT = (
    "fits", "device_used_bytes", "least_capacity_bytes", "peak_allocated_bytes", "capacity_bytes", "rollout_s",
    "step_s", "fidelity",
)  # fmt: skip


def answer(thread: Thread, *, advice_s: float = 20.0) -> dict[str, object]:
    """The figures of the estimate, the recipe's own values of the keys that accepted fixes change, and the advice."""
    notes: list[str] = []
    verdict_at: list[float] = []
    rewards = REWARD if thread.trainer == "grpo" else {}
    estimate = autofit.estimate(
        {**rewards, **thread.recipe}, gpu=thread.cards, target_vram=thread.target_vram, trainer=thread.trainer,
        prompt_tokens=thread.prompt_tokens, num_processes=thread.ranks if thread.ranks > 1 else None,
        advice_time=advice_s, as_of=thread.as_of,
        on_event=lambda event: notes.append(event.text),
        on_result=lambda _: verdict_at.append(time.monotonic()),
    )  # fmt: skip
    said = json.loads(json.dumps(estimate.to_dict()))
    older = then_lines(estimate.then, estimate.result, estimate.capacity_bytes)
    own = {key: estimate.recipe.resolved.get(key) for fix in thread.accepted for key in fix}
    return {
        **{key: said[key] for key in KEPT},
        "verdict_at_s": verdict_at[0],  # of the machine's monotonic clock
        "advised_at_s": time.monotonic(),
        **({"as_of": older[0]} if older else {}),
        "own": own,
        **({"advice": pieces(said, slow="rollout_share_above" in thread.symptom)} if advice_s else {}),
        "notes": notes[1:],  # the first names the model and the card
    }


def pieces(said: Mapping[str, object], *, slow: bool) -> list[object]:
    """The changes of each piece of advice, best first; where the symptom is a slow step, what makes it faster."""
    kinds = ("faster", "changes") if slow else ("changes", "faster")
    listed = [cast("Sequence[Mapping[str, object]]", said.get(kind) or ()) for kind in kinds]
    return [piece["changes"] for piece in next(filter(None, listed), ())]


def main() -> None:
    name, out, advice_s = sys.argv[1:]
    thread = next(thread for thread in (*read_threads(), *read_seeds()) if thread.name == name)
    write_json(Path(out), answer(thread, advice_s=float(advice_s)))


if __name__ == "__main__":
    main()
