"""Evaluation within a training: how many samples at once, by a tool's own key. No torch here."""

from __future__ import annotations

from autofit.frontends.draft import Draft
from autofit.recipe.keys import evaluates

_SAMPLES = "per_device_eval_batch_size"


def is_asked_for(draft: Draft) -> bool:
    """Whether the file has a strategy of evaluation, by transformers' key of today or of before 2024."""
    given = draft.given
    return evaluates({"eval_strategy": given.get("eval_strategy", given.get("evaluation_strategy"))})


def take(draft: Draft, trainer: str, *, key: str = _SAMPLES, usual: int) -> None:
    """Let the recipe evaluate as many samples at once as `key` says; `usual` ones where the file has none.

    A trainer that generates evaluates whole groups, which the tools make in ways of their own: a note.
    """
    samples = draft.whole(key, usual)
    if trainer in ("grpo", "rloo"):
        draft.note(f"evaluation is not simulated: {samples} completions at once ({key})")
        return
    draft.values["eval_strategy"] = "epoch"  # whenever it is, it takes the same
    draft.put(_SAMPLES, samples, key)
