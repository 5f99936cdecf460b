"""Lower bounds of the bytes of a changed recipe, from the parts of one that was simulated.

A change scales some categories of some phases. At the moment of a phase's old peak the changed run still holds the
rest, so its new peak is at least that: a set of changes whose bound exceeds the card is not worth a probe. The bounds
only choose what to probe; no bound is told to anyone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.forecast.levers import ALLOCATOR, CHECKPOINTING, MICRO, ROLLOUT, SHARE, SLEEP, Assignment, number
from autofit.plugin.protocol import EVALUATION
from autofit.probing.result import ProbeResult
from autofit.recipe.recipe import Recipe
from autofit.space.space import QUANTIZATION, Value
from autofit.space.traits import traits_of

MADE = ("activations", "temporaries", "logits", "KV cache")  # categories that a batch makes
_TRAINED = ("gradients", "optimizer")
_ROLLOUT_PHASES = ("rollout", "scoring", "wake-up", "sync")
_ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_QUANTISED = {"4bit": 0.5, "8bit": 1.0}  # least bytes of a parameter


@dataclass(frozen=True, slots=True)
class Known:
    """What one simulated run held: bytes by phase and category, and the bytes that no category explains."""

    at: Assignment
    parts: Mapping[str, Mapping[str, int]]
    outside_bytes: int  # the context, and what lies between the allocator's blocks
    context_bytes: int

    @classmethod
    def of(cls, at: Assignment, result: ProbeResult, context_bytes: int) -> "Known | None":
        """None where the run did not complete or says nothing of its parts."""
        need = result.least_capacity_bytes or result.device_used_bytes
        if not result.categories or need is None:
            return None
        most = max(sum(held.values()) for held in result.categories.values())
        return cls(at, result.categories, max(context_bytes, need - most), context_bytes)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds for a recipe whose settings are `own`."""

    recipe: Recipe
    own: Assignment
    stated: Mapping[str, object] = field(default_factory=dict)  # traits that the space of the settings states itself

    def least_bytes(self, known: Known, at: Assignment) -> int:
        """The least device-used bytes with the settings `at`, which are at least as strong as those of `known`."""
        return self._peak(known, at) + known.context_bytes

    def expected_bytes(self, known: Known, at: Assignment) -> int:
        """`least_bytes`, and the gaps between the allocator's blocks that were simulated, where they stay.

        Gaps lie among the blocks that each micro-batch makes, so they shrink as these do. Where all logits are made
        they are gigabytes (3.9 GB, simulated, in LoRA of a 7B on 2 x 4,096 tokens).
        """
        if ALLOCATOR in at and ALLOCATOR not in known.at:
            return self.least_bytes(known, at)
        gaps = max(0, known.outside_bytes - known.context_bytes)
        return self.least_bytes(known, at) + round(gaps * self._made_left(known, at))

    def _made_left(self, known: Known, at: Assignment) -> float:
        """The share that is left of what micro-batches make, in the phase that holds the most of it."""
        made = [
            {category: nbytes for category, nbytes in held.items() if category in MADE} for held in known.parts.values()
        ]
        before = max((sum(held.values()) for held in made), default=0)
        changed = {k: v for k, v in at.items() if known.at.get(k, self.own[k]) != v}
        left = max(
            (
                sum(nbytes * self._left(known, changed, phase, category) for category, nbytes in held.items())
                for phase, held in zip(known.parts, made, strict=True)
            ),
            default=0.0,
        )
        return min(1.0, left / before) if before else 1.0

    def _peak(self, known: Known, at: Assignment) -> int:
        changed = {k: v for k, v in at.items() if known.at.get(k, self.own[k]) != v}
        return max(
            sum(round(nbytes * self._left(known, changed, phase, category)) for category, nbytes in held.items())
            for phase, held in known.parts.items()
        )

    def _left(self, known: Known, changed: Assignment, phase: str, category: str) -> float:
        left = 1.0
        for name, value in changed.items():
            left *= self._share(name, known.at.get(name, self.own[name]), value, phase, category)
        return left

    def _share(self, name: str, before: Value, after: Value, phase: str, category: str) -> float:
        """The share of a category's bytes in a phase that a change of one setting leaves at least."""
        keys = self.recipe.keys
        if name in (MICRO, keys.budget):
            scales = category in MADE and phase not in ("rollout", "wake-up", "sync", "optimizer", EVALUATION)
            return number(after) / number(before) if scales else 1.0
        if name == keys.evaluation:
            return number(after) / number(before) if category in MADE and phase == EVALUATION else 1.0
        if name == ROLLOUT:
            scales = category in MADE and phase in _ROLLOUT_PHASES
            return number(after) / number(before) if scales else 1.0
        if name in (keys.completion, keys.length) and isinstance(after, int) and isinstance(before, int):
            prompt = self.recipe.longest_prompt_tokens or 0 if name == keys.completion and category != "logits" else 0
            return (prompt + after) / (prompt + before) if category in MADE else 1.0
        if name in CHECKPOINTING:
            return 0.0 if phase == "update" and category in ("activations", "temporaries") else 1.0
        if name == ALLOCATOR:
            return 1.0
        if name == "dtype":
            return (
                _ITEM_BYTES.get(str(after), 1.0) / _ITEM_BYTES.get(str(before), 4.0) if category != "workspace" else 1.0
            )
        if name == QUANTIZATION:
            return self._quantised(str(after)) if category == "weights" else 1.0
        if name == "lora_r" and isinstance(after, int) and isinstance(before, int):
            return after / before if category in _TRAINED else 1.0
        if name in (SHARE, keys.engine_share) and isinstance(after, float) and isinstance(before, float):
            return after / before if category == "vLLM" else 1.0
        return self._unscaled(name, phase, category)

    def _unscaled(self, name: str, phase: str, category: str) -> float:
        """The share that a setting leaves at least whose size is not known: none of what it may remove."""
        if phase == EVALUATION and name.startswith("activation_"):  # nothing is kept for a backward
            return 1.0
        if name == SLEEP:
            return 0.0 if category == "vLLM" and phase not in _ROLLOUT_PHASES else 1.0
        if name == "precompute_ref_log_probs":
            return 0.5 if category == "weights" else 1.0
        if name == "optim":
            return 0.0 if category == "optimizer" or (phase == "optimizer" and category in MADE) else 1.0
        frees = traits_of(name, self.stated).frees
        if frees == "all":
            return 0.0
        return 0.0 if category in (MADE if frees is None else frees) else 1.0

    def _quantised(self, kind: str) -> float:
        recipe = self.recipe
        if not recipe.weights_bytes or not recipe.model_parameters:
            return 0.0
        return min(1.0, _QUANTISED.get(kind, 4.0) * recipe.model_parameters / recipe.weights_bytes)
