"""The ladder of a full run: the next settings that need less memory and train the same recipe. Free of torch.

A rung changes one thing: the micro-batch is made smaller and the accumulation larger, or one knob of the trainer's
search space that is listed from least to most memory takes one step down. The effective batch is always kept, and so
are the completions generated at once, unless memory ran out while they were generated.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from autofit.errors import ConfigError
from autofit.plugin.protocol import ROLLOUT
from autofit.promotion.run_folder import Oom
from autofit.recipe.keys import LAUNCH, TIERS, BatchKeys, Tier
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, merge
from autofit.space.knob import ENV, SERVER_RANKS, Knob, Value, load_space, space_knobs
from autofit.space.space import Space
from autofit.space.traits import traits_of
from autofit.tuning.frontier import Trial, measured
from autofit.tuning.record import StudyRecord


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
    """True if fewer samples would be dropped at the end of an epoch (dataloader_drop_last): others are trained on."""
    rest, ranks = _left_over(recipe, oom), recipe.world_size
    drops = oom.samples is not None and oom.samples.drops_last
    return drops and rest % (recipe.micro_batch_size * ranks) != rest % (smaller * ranks)


def last_step_differs(recipe: Recipe, oom: Oom) -> str:
    """Effect of a smaller micro-batch on the last step of an epoch, in words; "" if it has none."""
    facts, rest = oom.samples, _left_over(recipe, oom)
    if facts is None or facts.drops_last or facts.weighs_alike or not rest % recipe.micro_batch_size:
        return ""
    return (
        f"the last step of an epoch, of {rest} sample(s), is a mean over micro-batches of unequal size, so it weighs "
        f"its samples otherwise"
    )


def _left_over(recipe: Recipe, oom: Oom) -> int:
    """Samples of the incomplete step at the end of an epoch; 0 if the training has none, or it is unknown."""
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
    """True if an epoch would leave out other prompts at its end, or if that is unknown."""
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
    """The largest divisor of `number` below it, for numbers above 1."""
    return next((number // n for n in range(2, number + 1) if number % n == 0), None)


def _is_free(space: Space, name: str) -> bool:
    return any(knob.name == name for knob in space.knobs)


_OTHER_RANKS = (f"{LAUNCH}.ranks", SERVER_RANKS)  # the run keeps its ranks: each has a share of the checkpoint
_EVALUATION = "per_device_eval_batch_size"
# A choice: torch advises expandable segments where the unused share of its memory "is large", without a number.
_FRAGMENTED_FRAC = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueStep:
    """One step down the ladder: `changes` of the running recipe's YAML, where None removes a key."""

    changes: Mapping[str, object]
    tier: Tier = "neutral"
    remark: str = ""  # what differs all the same, and no gradient shows
    restarts: bool = False  # the run starts anew: a checkpoint is of no use to it

    @property
    def compared(self) -> dict[str, object]:
        """The changes whose gradients are compared: those that set a key."""
        return {key: value for key, value in self.changes.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A trial of the study: its changes against the promoted one, and its measured figures."""

    changes: Mapping[str, object]
    step_s: float
    device_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueLadder:
    """Facts of a promoted run's study from which its rungs follow, as plain values."""

    trial: int
    trainer: str
    device: str
    keys: BatchKeys
    compared: tuple[str, ...]  # keys that the trainer's gradient proof trains with
    values: Mapping[str, object]  # the promoted recipe's YAML
    resolved: Mapping[str, object]  # the same with defaults
    allow: Tier = "neutral"
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    other_names: Mapping[str, str] = field(default_factory=dict)
    space: str = ""  # path of the trainer's own search space
    traits: Mapping[str, object] = field(default_factory=dict)  # {knob: what the searched space itself says of it}
    device_used_bytes: int | None = None
    speeds: tuple[Speed, ...] = ()

    @classmethod
    def of(
        cls, record: StudyRecord, chosen: Trial, trials: Iterable[Trial], *, values: Mapping[str, object], device: str,
        allow: Tier,
    ) -> "RescueLadder":  # fmt: skip
        """The ladder of the trial `chosen`, whose YAML is `values`, on `device`."""
        keys, resolved = record.batch_keys, merge(record.resolved, chosen.yaml_changes)
        return cls(
            trial=chosen.number, trainer=record.trainer, device=device, keys=keys, compared=record.compared,
            values=dict(values), resolved=resolved,
            allow=allow, tiers=record.tiers, left_out=record.left_out, other_names=record.other_names,
            space=record.space, traits=record.traits, device_used_bytes=chosen.device_used_bytes,
            speeds=tuple(_speeds(record.resolved, resolved, trials)),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        speeds = [[dict(s.changes), s.step_s, s.device_used_bytes] for s in self.speeds]
        special = {"keys": self.keys.to_json(), "compared": list(self.compared), "speeds": speeds}
        return {f.name: getattr(self, f.name) for f in fields(self)} | special

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "RescueLadder":
        rows = cast("list[tuple[dict[str, object], float, int]]", content["speeds"])
        special = {
            "keys": BatchKeys.from_json(cast("Mapping[str, str | None]", content["keys"])),
            "compared": tuple(cast("list[str]", content["compared"])),
            "speeds": tuple(Speed(changes=c, step_s=s, device_used_bytes=b) for c, s, b in rows),
        }
        return cls(**{**content, **special})  # type: ignore[arg-type]

    def running(self, taken: Iterable[Mapping[str, object]]) -> Recipe:
        """The recipe that runs once the changes `taken` are made."""
        values, resolved = dict(self.values), dict(self.resolved)
        for changes in taken:
            values, resolved = merge(values, changes), merge(resolved, changes)
        return Recipe(
            trainer=self.trainer, values=values, resolved=resolved, keys=self.keys, tiers=self.tiers,
            space=Path(self.space) if self.space else None, launch=Launch.of(resolved),
            compared=self.compared, left_out=self.left_out, other_names=self.other_names,
        )  # fmt: skip

    def rungs(self, taken: Sequence[Mapping[str, object]], oom: Oom, *, again: bool = False) -> list[RescueStep]:
        """The next rungs after the changes `taken` for this OOM: higher tiers first, then what loses least speed.

        `again` says that the last rescue was at the same step. An OOM in the rollout is first met by what leaves every
        completion as it is: a new process has no fragments of memory. Again there, it takes a smaller rollout.
        """
        recipe = self.running(taken)
        found = _evaluation(recipe) if oom.evaluating else []
        found += [r for r in self._of_space(recipe, oom) if r.changes]
        found = [r for r in found if not set(r.changes) & set(_OTHER_RANKS)]
        at_start = oom.resumes_from == 0
        found = self._in_order(found, recipe)
        if oom.unused_frac > _FRAGMENTED_FRAC:
            found.sort(key=lambda rung: "env" not in rung.changes)
        if again and oom.phase == ROLLOUT:
            found.sort(key=lambda rung: self.keys.accumulation in rung.changes or self.keys.rollout not in rung.changes)
        return [r for r in found if at_start or not r.restarts]

    def _of_space(self, recipe: Recipe, oom: Oom) -> list[RescueStep]:
        space = self._space(recipe)
        if space is None:
            return []
        params = [*smaller_micro_batch(space, recipe, oom), *smaller_rollout(space, recipe, oom), *one_down(space)]
        candidates = [space.candidate({**space.params(space.baseline), **changed}) for changed in params]
        return [
            RescueStep(
                changes=(changes := space.yaml_changes(c)),
                tier=space.tier(c),
                remark=self._remark(space.changes(c), recipe, oom),
                restarts=any(traits_of(key, {**self.traits, **space.stated}).restarts for key in changes),
            )
            for c in candidates
            if space.violated(c) is None and TIERS.index(space.tier(c)) <= TIERS.index(self.allow)
        ]

    def _remark(self, changes: Mapping[str, object], recipe: Recipe, oom: Oom) -> str:
        """Differences under `changes` that the equal gradient of a whole step hides."""
        if self.keys.accumulation in changes:
            return last_step_differs(recipe, oom)
        if self.keys.rollout in changes:
            return "the prompts are the same, their completions are drawn anew"
        return ""

    def _space(self, recipe: Recipe) -> Space | None:
        """The space around the running recipe: by the trainer's own file, else of its micro-batch alone."""
        alone = Knob(name=self.keys.micro_batch, tier="neutral", solved=True, memory_ascending=True)
        with suppress(ConfigError):  # the file of another version, or of a trainer that has none
            knobs = load_space(self.space, trainer=None) if self.space else space_knobs(recipe)
            optional = tuple(replace(knob, optional=True) for knob in knobs)
            return Space.of(recipe, optional, allow=self.allow, device=self.device)
        with suppress(ConfigError):
            return Space.of(recipe, (alone,), allow=self.allow, device=self.device)
        return None

    def _in_order(self, rungs: list[RescueStep], recipe: Recipe) -> list[RescueStep]:
        """Higher tiers first, then rungs with identical training, then the fastest that the study measured."""
        return sorted(rungs, key=lambda r: (TIERS.index(r.tier), bool(r.remark), self._step_s(r, recipe)))

    def _step_s(self, rung: RescueStep, recipe: Recipe) -> float:
        """The step time that the study measured with this rung, where it needed less memory; else infinite."""
        changes = _difference(self.resolved, merge(recipe.resolved, rung.changes))
        less = [
            s.step_s for s in self.speeds
            if s.changes == changes and s.device_used_bytes < (self.device_used_bytes or float("inf"))
        ]  # fmt: skip
        return min(less, default=float("inf"))


def _speeds(original: Mapping[str, object], promoted: Mapping[str, object], trials: Iterable[Trial]) -> Iterable[Speed]:
    for trial in measured(trials):
        changes = _difference(promoted, merge(original, trial.yaml_changes))
        step_s, used = trial.step_s, trial.device_used_bytes
        if changes and step_s is not None and used is not None:
            yield Speed(changes=changes, step_s=step_s, device_used_bytes=used)


def _difference(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    """{key: value of `other`}, where it has one and it differs."""
    return {key: value for key, value in other.items() if value is not None and one.get(key) != value}


def _evaluation(recipe: Recipe) -> list[RescueStep]:
    """A smaller micro-batch of the evaluation, which leaves the training as it is."""
    smaller = None if recipe.generates else largest_part(cast(int, recipe.resolved.get(_EVALUATION) or 1))
    return [] if smaller is None else [RescueStep(changes={_EVALUATION: smaller})]
