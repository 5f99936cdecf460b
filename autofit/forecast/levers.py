"""The settings of a recipe that change its bytes, as candidates of its space, and how few bytes each may leave."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from typing import cast

from autofit.hardware.hardware import Device
from autofit.plugin.protocol import EVALUATION, UPDATE
from autofit.probing.result import ProbeResult
from autofit.recipe.findings import SHARDING
from autofit.recipe.keys import GROWING, TIERS, Tier
from autofit.recipe.recipe import Recipe
from autofit.space.knob import space_knobs
from autofit.space.space import QUANTIZATION, Candidate, Knob, Space, Value
from autofit.space.traits import Traits, traits_of

MICRO, ROLLOUT = "micro-batch", "rollout"

SHARE, SLEEP = "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing", "enable_gradient_checkpointing")
_AS = {MICRO: "per_device_train_batch_size", ROLLOUT: "steps_per_generation"}  # whose place in the order they have
_MOST_ROWS = 1000  # combinations that are looked at; a set of settings whose strongest all clash is given up

Assignment = Mapping[str, Value]  # {setting: value}, for settings that differ from the recipe's


@dataclass(frozen=True)
class Levers:
    """The settings of a space: the micro-batch, the completions of a rollout, and all other knobs.

    The first two determine the two solved knobs, so that each can change by itself.
    """

    space: Space

    @classmethod
    def of(cls, recipe: Recipe, device: Device) -> "Levers":
        return cls(Space.of(recipe, space_knobs(recipe), allow="recipe", device=device))

    @cached_property
    def own(self) -> dict[str, Value]:
        """{setting: the recipe's value}."""
        keys = self.space.keys
        solved = (keys.micro_batch, keys.rollout)
        return {**self._batch, **{k: v for k, v in self.space.params(self.space.baseline).items() if k not in solved}}

    @property
    def _batch(self) -> dict[str, Value]:
        micro, _, chunk, _ = self.space.split(self.space.baseline)
        knobs, keys = {knob.name for knob in self.space.knobs}, self.space.keys
        sizes = ((MICRO, keys.micro_batch, micro), (ROLLOUT, keys.rollout, micro * chunk))
        return {name: size for name, key, size in sizes if key in knobs}

    def traits(self, name: str) -> Traits:
        """The traits of a setting's knob."""
        return traits_of(_AS[name]) if name in _AS else self._listed[name][0].traits

    def phases(self, name: str) -> tuple[str, ...]:
        """The phases of a step that a setting changes, where its knob says them; else ()."""
        knob = self._listed.get(self.space.keys.micro_batch if name == MICRO else name)
        return () if knob is None else knob[0].traits.phases or ()

    def rank(self, name: str) -> int:
        """The place of a setting in the order in which a practitioner tries them."""
        return self.traits(name).place

    @cached_property
    def strengths(self) -> dict[str, tuple[Value, ...]]:
        """{setting: its values that need less memory than the recipe's own, from the mildest to the strongest}.

        Values that need another setting are among them: a rollout below the recipe's micro-batch needs a smaller
        micro-batch too, and quantised weights an adapter. A setting without a value is left out.
        """
        found = {name: self._less(name) for name in self.own}
        valid = {name: tuple(v for v in values if self._enabled(name, v)) for name, values in found.items()}
        return {name: values for name, values in sorted(valid.items(), key=lambda e: self.rank(e[0])) if values}

    def _enabled(self, name: str, value: Value) -> dict[str, Value]:
        """A candidate's settings with this value of `name`, and its requirements of others; {} if there is none."""
        micro: dict[str, Value] = {MICRO: 1} if name == ROLLOUT and MICRO in self.own else {}
        beside = {k: cast(Value, v) for k, v in (self.traits(name).beside or {}).items() if k in self.own}
        tries: list[dict[str, Value]] = [{name: value}, {**micro, **beside, name: value}]
        return next((at for at in tries if self.candidate(at) is not None), {})

    def tier_of(self, name: str) -> Tier:
        """The lowest tier that a setting touches at its strongest value."""
        return self.tier(self._enabled(name, self.strengths[name][-1]))

    def _less(self, name: str) -> tuple[Value, ...]:
        own = self.own[name]
        if name in (MICRO, ROLLOUT):
            return tuple(range(number(own) - 1, 0, -1))
        if name == self.space.keys.group:
            return ()  # it changes no bytes at the same effective batch
        knob, choices = self._listed[name]
        if knob.traits.less is not None:
            return _fewer(knob.traits, own, choices)
        return choices[: choices.index(own)][::-1] if knob.memory_ascending else ()

    @cached_property
    def _listed(self) -> dict[str, tuple[Knob, tuple[Value, ...]]]:
        return {k.name: (k, c) for k, c in zip(self.space.knobs, self.space.choices, strict=True)}

    def values(self, name: str) -> tuple[Value, ...]:
        """All values of a knob, valid by themselves or only with others; () if the space lacks it."""
        return self._listed[name][1] if name in self._listed else ()

    def others(self, name: str) -> tuple[Value, ...]:
        """The values of a knob besides the recipe's own, valid by themselves."""
        return tuple(v for v in self._listed[name][1] if v != self.own[name] and self.candidate({name: v}))

    @property
    def share(self) -> str:
        """The setting of the card's share for a rollout engine, which may be too small for its start."""
        return self.space.keys.engine_share or SHARE

    def quicker(self, name: str) -> tuple[Value, ...]:
        """The value of a knob to try for its speed: () if there is none.

        Of numbers in the order of their memory, and of a share of the card, the next larger one, as less memory is
        seldom faster; of other whole numbers the nearest below the recipe's own, else above it.
        """
        own, others = self.own[name], self.others(name)
        numbers = [v for v in (own, *others) if isinstance(v, int | float) and not isinstance(v, bool)]
        knob, whole = self._listed[name][0], all(isinstance(number, int) for number in numbers)
        rising = knob.memory_ascending or knob.traits.less == "lower"
        if len(numbers) <= len(others) or not (rising or whole):
            return others[:1]
        above = sorted(number for number in numbers if number > numbers[0])
        below = sorted((number for number in numbers if number < numbers[0]), reverse=True)
        return tuple(above[:1] if rising else (below + above)[:1])

    def larger(self, name: str) -> tuple[int, ...]:
        """The larger values of the micro-batch or the rollout, valid by themselves, in ascending order."""
        whole = self.space.recipe.effective_batch_size // self.space.recipe.world_size
        return tuple(n for n in range(number(self.own[name]) + 1, whole + 1) if whole % n == 0
                     if self.candidate({name: n}))  # fmt: skip

    @property
    def size(self) -> str:
        """The setting of how much a micro-batch holds: its samples, or its tokens where they are packed by these."""
        keys = self.space.keys
        return keys.budget if keys.budget in self.own and MICRO not in self.own else MICRO

    @property
    def passes(self) -> tuple[str, ...]:
        """The settings that bound the bytes of a gradient-free pass."""
        phases = {name: self.phases(name) for name in self.own}
        return tuple(name for name, found in phases.items() if found and UPDATE not in found)

    @property
    def offloads(self) -> tuple[str, ...]:
        """The trainer's own settings of what waits in host memory."""
        return tuple(name for name in self.own if name in self._listed and self.traits(name).offloads)

    def candidate(self, at: Assignment) -> Candidate | None:
        """The candidate with these settings, and the recipe's others, if it exists."""
        space, keys = self.space, self.space.keys
        params = space.params(space.baseline)
        micro, _, chunk, _ = space.split(space.baseline)
        changed_micro = number(at.get(MICRO, micro))
        if ROLLOUT in self.own:
            completions = number(at.get(ROLLOUT, micro * chunk))
            if completions % changed_micro:
                return None
            params[str(keys.rollout)] = completions // changed_micro
        if MICRO in self.own:
            params[keys.micro_batch] = changed_micro
        params |= {name: value for name, value in at.items() if name not in (MICRO, ROLLOUT)}
        found = space.settled(params)
        kept = space.params(found)
        if any(kept[name] != params[name] for name in (keys.micro_batch, keys.rollout, *at) if name in params):
            return None  # it has no effect without another setting, or the batch has no such micro-batch
        return found if space.violated(found) is None else None

    def tier(self, at: Assignment) -> Tier:
        """The lowest tier that these settings touch; `recipe` if they have no candidate."""
        found = self.candidate(at)
        return TIERS[-1] if found is None else self.space.tier(found)

    def changes(self, at: Assignment, *, yaml: bool = False) -> dict[str, object]:
        """{key: value} of the recipe with these settings; with `yaml` also the keys that must go (None)."""
        found = self.candidate(at)
        assert found is not None, at
        return self.space.yaml_changes(found) if yaml else self.space.changes(found)

    def strongest(self, names: Collection[str]) -> dict[str, Value]:
        """{setting: value}: the strongest combination of these settings that exists; {} if none does.

        Expandable segments, which make nothing smaller, are not in it where some of the others rule them out.
        """
        order = sorted(names, key=lambda name: name != MICRO)
        rows: Iterator[dict[str, Value]] = (
            dict(zip(order, row, strict=True)) for row in product(*(self.strengths[n][::-1] for n in order))
        )
        found = next((row for row in islice(rows, _MOST_ROWS) if self.candidate(row) is not None), {})
        return found if found or GROWING not in names else self.strongest([n for n in order if n != GROWING])


def _fewer(traits: Traits, own: Value, choices: tuple[Value, ...]) -> tuple[Value, ...]:
    """The subset of `choices` that may need less memory than the recipe's `own` value, mildest first."""
    if traits.than is not None and own not in traits.than:
        return ()
    if traits.less == "lower":
        lower = (v for v in choices if isinstance(v, float) and isinstance(own, float) and v < own)
        return tuple(sorted(lower, reverse=True))
    wanted = choices if traits.less == "any" else traits.less or ()
    return tuple(v for v in choices if v != own and v in wanted)


def number(value: Value) -> int:
    assert isinstance(value, int)
    return value


# -- lower bounds of the bytes of a changed recipe --------------------------------------------------------------------
# A change scales some categories of some phases. At the moment of a phase's old peak the changed run still holds the
# rest, so its new peak is at least that: a set of changes whose bound exceeds the card is not worth a probe. The
# bounds only choose what to probe; no bound is told to anyone.

MADE = ("activations", "temporaries", "logits", "KV cache")  # categories that a batch makes
_TRAINED = ("gradients", "optimizer")
_ROLLOUT_PHASES = ("rollout", "scoring", "wake-up", "sync")
_ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
# What of a model each sharding splits; gradients may be whole between micro-batches.
_SPLIT = {"zero1": ("optimizer",), "zero2": ("optimizer",), "zero3": ("weights", "optimizer"),
          "fsdp1": ("weights", "optimizer"), "fsdp2": ("weights", "optimizer")}  # fmt: skip
_QUANTISED = {"4bit": 0.5, "8bit": 1.0}  # least bytes of a parameter


@dataclass(frozen=True, slots=True)
class Known:
    """Bytes of one simulated run: by phase and category, and those outside all categories."""

    at: Assignment
    parts: Mapping[str, Mapping[str, int]]
    outside_bytes: int  # the context, and what lies between the allocator's blocks
    context_bytes: int

    @property
    def least_bytes(self) -> int:
        """The bytes of the smallest card on which the run would have its room."""
        return self.outside_bytes + max(sum(held.values()) for held in self.parts.values())

    @classmethod
    def of(cls, at: Assignment, result: ProbeResult, context_bytes: int) -> "Known | None":
        """The known bytes, if the run completed and reports its parts."""
        need = result.least_capacity_bytes or result.device_used_bytes
        if not result.categories or need is None:
            return None
        most = max(sum(held.values()) for held in result.categories.values())
        return cls(at, result.categories, max(context_bytes, need - most), context_bytes)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds for a recipe whose settings are `own`."""

    recipe: Recipe
    own: Assignment
    stated: Mapping[str, object] = field(default_factory=dict)  # traits that the space of the settings states itself

    @cached_property
    def _phases(self) -> Mapping[str, tuple[str, ...]]:
        """{setting: the phases that it changes} where its knob says them, but those that another one changes alone."""
        keys = {name: self.recipe.keys.micro_batch if name == MICRO else name for name in self.own}
        said = {name: traits_of(key, self.stated).phases for name, key in keys.items()}
        found = {name: phases for name, phases in said.items() if phases is not None}
        alone = {phases[0]: name for name, phases in found.items() if len(phases) == 1}
        return {name: tuple(p for p in phases if alone.get(p, name) == name) for name, phases in found.items()}

    def least_bytes(self, known: Known, at: Assignment) -> int:
        """The least device-used bytes with the settings `at`, which are at least as strong as those of `known`."""
        return self._peak(known, at) + known.context_bytes

    def expected_bytes(self, known: Known, at: Assignment) -> int:
        """`least_bytes`, and the gaps between the allocator's blocks that were simulated, where they stay.

        Gaps lie among the blocks that each micro-batch makes, so they shrink as these do. Where all logits are made
        they are gigabytes (3.9 GB, simulated, in LoRA of a 7B on 2 x 4,096 tokens).
        """
        if GROWING in at and GROWING not in known.at:
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
        if name in self._phases and phase not in self._phases[name]:
            return 1.0
        if name in (MICRO, keys.budget, keys.scored, keys.referred):
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
        if name == GROWING:
            return 1.0
        if name == "dtype":
            return (
                _ITEM_BYTES.get(str(after), 1.0) / _ITEM_BYTES.get(str(before), 4.0) if category != "workspace" else 1.0
            )
        if name == QUANTIZATION:
            return self._quantised(str(after)) if category == "weights" else 1.0
        if name == SHARDING and phase in ("update", "optimizer") and category in _SPLIT.get(str(before), ()):
            return 0.0 if category in _SPLIT.get(str(after), ()) else self.recipe.launch.ranks  # whole on each again
        if name == "lora_r" and isinstance(after, int) and isinstance(before, int):
            return after / before if category in _TRAINED else 1.0
        if name in (SHARE, keys.engine_share) and isinstance(after, float) and isinstance(before, float):
            return after / before if category == "vLLM" else 1.0
        return self._unscaled(name, phase, category)

    def _unscaled(self, name: str, phase: str, category: str) -> float:
        """Lower bound of the share that a setting of unknown effect leaves: 0 for anything that it may remove."""
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
