"""The single changes of a running recipe that need less memory, as {knob: value}. No torch here."""

from autofit.plugin.protocol import ROLLOUT
from autofit.promotion.oom import Oom
from autofit.recipe.recipe import Recipe
from autofit.space.knob import ENV, Value
from autofit.space.space import Space


def smaller_micro_batch(space: Space, recipe: Recipe, oom: Oom) -> list[dict[str, Value]]:
    """The micro-batch divided, with as much more accumulation and as many completions generated at once."""
    micro, keys = recipe.micro_batch_size, recipe.keys
    smaller = largest_part(micro)
    if smaller is None or not _is_free(space, keys.micro_batch) or _drops_fewer(recipe, smaller, oom):
        return []
    changed: dict[str, Value] = {keys.micro_batch: smaller}
    if keys.rollout is not None and _is_free(space, keys.rollout):
        changed[keys.rollout] = recipe.steps_per_generation * (micro // smaller)
    return [changed]


def _drops_fewer(recipe: Recipe, smaller: int, oom: Oom) -> bool:
    """Whether fewer samples would be dropped at the end of an epoch (dataloader_drop_last): others are trained on."""
    rest, ranks = _left_over(recipe, oom), recipe.world_size
    drops = oom.samples is not None and oom.samples.drops_last
    return drops and rest % (recipe.micro_batch_size * ranks) != rest % (smaller * ranks)


def last_step_differs(recipe: Recipe, oom: Oom) -> str:
    """How a smaller micro-batch changes the last step of an epoch; "" if it does not."""
    facts, rest = oom.samples, _left_over(recipe, oom)
    if facts is None or facts.drops_last or facts.weighs_alike or not rest % recipe.micro_batch_size:
        return ""
    return (
        f"the last step of an epoch, of {rest} sample(s), is a mean over micro-batches of unequal size, so it weighs "
        f"its samples otherwise"
    )


def _left_over(recipe: Recipe, oom: Oom) -> int:
    """Samples of the incomplete step at the end of an epoch; 0 where the training has none, or it is not known."""
    facts, batch = oom.samples, recipe.effective_batch_size
    if facts is None or facts.rows is None or recipe.generates:
        return 0
    ends_before = facts.last_step is not None and facts.last_step <= facts.rows // batch
    return 0 if ends_before else facts.rows % batch


def smaller_rollout(space: Space, recipe: Recipe, oom: Oom) -> list[dict[str, Value]]:
    """Fewer completions generated at once, after an OOM in the rollout: the prompts stay in the same order."""
    key = recipe.keys.rollout
    if key is None or oom.phase != ROLLOUT or recipe.reuses_rollouts or not _is_free(space, key):
        return []
    smaller = largest_part(recipe.steps_per_generation)
    if smaller is None or _ends_elsewhere(recipe, smaller, oom):
        return []
    return [{key: smaller}]


def _ends_elsewhere(recipe: Recipe, smaller: int, oom: Oom) -> bool:
    """Whether an epoch would leave out other prompts at its end, or it is not known."""
    if oom.samples is None or oom.samples.rows is None:
        return True
    prompts = recipe.generation_batch_size // recipe.num_generations
    fewer = prompts * smaller // recipe.steps_per_generation
    return not fewer or oom.samples.rows // prompts * prompts != oom.samples.rows // fewer * fewer


def one_down(space: Space) -> list[dict[str, Value]]:
    """One step down for each knob whose values are listed from least to most memory."""
    own, batch = space.params(space.baseline), (space.keys.micro_batch, space.keys.rollout, space.keys.group)
    found: list[dict[str, Value]] = []
    for knob, choices in zip(space.knobs, space.choices, strict=True):
        place = choices.index(own[knob.name])
        if knob.name.startswith(ENV) and own[knob.name] is None:  # a setting of the allocator against fragments
            found.append({knob.name: choices[0]})
        if knob.memory_ascending and place > 0 and knob.name not in batch:
            found.append({knob.name: choices[place - 1]})
    return found


def largest_part(number: int) -> int | None:
    """The largest divisor of `number` below it; None for 1."""
    return next((number // n for n in range(2, number + 1) if number % n == 0), None)


def _is_free(space: Space, name: str) -> bool:
    return any(knob.name == name for knob in space.knobs)
