"""Where a run that does not fit stops: the phase, the sample and the step."""

from dataclasses import asdict, dataclass

from autofit.fakegpu.ranks import nccl_bytes
from autofit.fakegpu.specs import gpu_spec
from autofit.plugin.protocol import EVALUATION, LOAD, OPTIMIZER, ROLLOUT, SCORING, SYNC, UPDATE, WAKE_UP
from autofit.probing.result import ProbeResult
from autofit.recipe.recipe import Recipe

_IN_ORDER = (LOAD, WAKE_UP, SYNC, ROLLOUT, SCORING, UPDATE, OPTIMIZER, EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The first phase whose bytes exceed the card, with the longest sample; None is "not known"."""

    phase: str
    over_bytes: int  # 0 where only the prediction's error may exceed the card
    sample: int | None = None  # its row in the dataset, counted from 0
    step: int | None = None  # the optimizer step that trains on it, counted from 1: an earlier one may stop too
    tokens: int | None = None  # of the sample, or of the prompt where the trainer generates
    evaluated: int | None = None  # samples at once, where it stops in the evaluation
    completion_tokens: int | None = None  # that follow the prompt, where the trainer generates

    @property
    def where(self) -> str:
        """`update of sample 4,812 (the longest, 1,950 tokens; step 301 at the latest)`."""
        if self.phase == LOAD:
            return "load, before the first step"
        if self.phase == OPTIMIZER:
            return "optimizer, at the first step"
        if self.evaluated is not None:
            of = "" if self.tokens is None else f" ({self.tokens:,} tokens each)"
            return f"evaluation of {self.evaluated:,} samples at once{of}"
        longest = [] if self.sample is None else ["the longest"]
        longest += [] if self.tokens is None else [self._length]
        facts = [", ".join(longest)] if longest else []
        facts += [] if self.step is None else [f"step {self.step:,} at the latest"]
        about = f" ({'; '.join(facts)})" if facts else ""
        return f"{self.phase} of {'the longest sample' if self.sample is None else f'sample {self.sample:,}'}{about}"

    @property
    def _length(self) -> str:
        if self.completion_tokens is None:
            return f"{self.tokens:,} tokens"
        return f"{self.tokens:,} prompt + {self.completion_tokens:,} completion tokens"

    def to_json(self) -> dict[str, object]:
        some = ("evaluated", "completion_tokens")  # that only some crashes have
        return {name: value for name, value in asdict(self).items() if name not in some or value is not None}


def crash_of(result: ProbeResult, recipe: Recipe, capacity_bytes: int) -> Crash:
    """Where the recipe of `result` runs out of memory on a card of `capacity_bytes`, with its longest sample."""
    card = gpu_spec(result.device.removeprefix("sim:"))
    context = card.context_bytes + nccl_bytes(card, recipe.launch.ranks)
    peaks = {p.name: p.peak_allocated_bytes + context for p in result.phases}
    over = [name for name in _IN_ORDER if peaks.get(name, 0) > capacity_bytes]
    phase = over[0] if over else max(peaks, key=lambda name: peaks[name], default=result.oom_phase or UPDATE)
    evaluates = phase == EVALUATION
    return Crash(
        phase=phase, over_bytes=max(0, (result.least_capacity_bytes or 0) - capacity_bytes),
        sample=None if evaluates else recipe.longest_row, step=None if evaluates else step_of_longest(recipe),
        evaluated=recipe.evaluated_samples if evaluates else None,
        tokens=_tokens(recipe, evaluated=evaluates),
        completion_tokens=recipe.max_completion_tokens if recipe.generates and not evaluates else None,
    )  # fmt: skip


def _tokens(recipe: Recipe, *, evaluated: bool) -> int | None:
    if recipe.generates:
        return None if evaluated else recipe.longest_prompt_tokens
    return recipe.longest_sample_tokens


def step_of_longest(recipe: Recipe) -> int | None:
    """The optimizer step of the first epoch, counted from 1, that trains on the longest sample; None: not known."""
    place, count = recipe.longest_place, recipe.num_samples
    if place is None or count is None:
        return None
    if not recipe.generates:
        return place // recipe.effective_batch_size + 1
    prompts = recipe.generation_batch_size // recipe.num_generations
    rollout = place // prompts
    if rollout >= count // prompts:
        return None  # TRL leaves out the last prompts of an epoch that fill no rollout
    passes = recipe.resolved.get(recipe.keys.reuse or "", 1)
    micro_steps = recipe.steps_per_generation * (passes if isinstance(passes, int) else 1)
    return rollout * micro_steps // recipe.grad_accum_steps + 1
