"""A recipe: the YAML that `trl grpo --config` takes, and the quantities derived from it. Free of torch."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import yaml

from autofit.errors import ConfigError, printable
from autofit.recipe.keys import LAUNCH, BatchKeys, Tier, divisors, evaluates
from autofit.recipe.launch import Launch
from autofit.recipe.profile import profile
from autofit.recipe.secrets import opened
from autofit.units import format_bytes

_MOST_SAMPLES = 10**6  # of one optimizer step or rollout; pre-training on thousands of cards takes 10^4 sequences

_NO_LIMIT = ("max_length", "max_completion_length")  # TRL's defaults of these are limits, and null is none

TrainerName = str  # an installed trainer's name, or module:object


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The user's recipe: the YAML as given (`values`), and the facts that its trainer reports.

    `resolved` has every key and its value, defaults included. `keys` names the keys that batch the samples. `tiers` has
    the knobs whose tier under this recipe is lower than their space declares (autofit.plugin.protocol.Facts).
    """

    trainer: TrainerName
    values: Mapping[str, object]
    resolved: Mapping[str, object]
    keys: BatchKeys
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    trainer_name: str = ""  # name of the trainer in search spaces
    space: Path | None = None  # the trainer's default search space
    name: str = "recipe"
    folder: Path = field(default_factory=Path.cwd)
    launch: Launch = field(default_factory=Launch)
    model: str = ""
    command: str | None = None  # command that runs a tuned recipe without autofit; the file name is appended
    trains_on_data: bool = True
    compared: tuple[str, ...] = ()  # keys that the trainer's gradient proof trains with
    longest_prompt_tokens: int | None = None
    longest_sample_tokens: int | None = None  # for trainers that do not generate
    longest_row: int | None = None  # the longest sample's or prompt's row in the dataset, counted from 0
    longest_place: int | None = None  # its place in the order of the first epoch
    num_samples: int | None = None  # of an epoch
    num_prompts: int | None = None
    model_parameters: int | None = None
    weights_bytes: int | None = None
    vocab_size: int | None = None
    embedding_parameters: int | None = None  # of the input embeddings, and of the head where it has its own
    tile_tokens: int | None = None
    forecasts: bool = True
    read_by: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)  # {phase: keys}: Visits
    other_names: Mapping[str, str] = field(default_factory=dict)  # {another name of a key: the recipe's name of it}
    notes: tuple[str, ...] = ()
    stated: Mapping[str, object] = field(default_factory=dict)  # `values` as they stand there, in older keys too
    foreign: Mapping[str, object] = field(default_factory=dict)  # the file of another tool that it is: Source.foreign
    left_out: Mapping[str, str] = field(default_factory=dict)  # {knob that this recipe cannot change: why}
    version: str = ""  # of the library whose keys these are
    spelling: str = ""  # how the keys of a recipe of older libraries are written, in half a sentence
    content_hash: str = ""
    architecture_hash: str = ""

    @property
    def sharers(self) -> int:
        """Ranks that compute parts of the same samples; 1 unless sequences are parallel."""
        return 1 if self.keys.sharers is None else self.integer(self.keys.sharers)

    @property
    def world_size(self) -> int:
        """Ranks over which the samples are split; those that share samples count as one."""
        return self.launch.ranks // self.sharers

    @property
    def named_hash(self) -> str:
        """Of what the values only name: the data, the code and the architecture."""
        return f"{self.content_hash} {self.architecture_hash} {self.model_parameters}"

    def integer(self, key: str) -> int:
        """The resolved value of `key`, an integer after TRL's parser."""
        value = self.resolved[key]
        assert isinstance(value, int), (key, value)
        return value

    @property
    def micro_batch_size(self) -> int:
        return self.integer(self.keys.micro_batch)

    @property
    def grad_accum_steps(self) -> int:
        return self.integer(self.keys.accumulation)

    @property
    def effective_batch_size(self) -> int:
        """Samples (completions, where the trainer generates) per optimizer step, over all ranks."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    @property
    def generates(self) -> bool:
        """True if the trainer generates its samples (completions)."""
        return self.keys.rollout is not None

    @property
    def num_generations(self) -> int:
        """Completions in a group; 1 for a trainer that has no groups."""
        return self.integer(self.keys.group) if self.keys.group is not None else 1

    @property
    def prompts_per_step(self) -> int:
        return self.effective_batch_size // self.num_generations

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches whose completions are generated at once."""
        return self.integer(self.keys.rollout) if self.keys.rollout is not None else self.grad_accum_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions of one rollout, over all ranks."""
        return self.micro_batch_size * self.world_size * self.steps_per_generation

    def passed_samples(self, key: str) -> int:
        """Samples of a rollout on a rank, in the gradient-free pass whose size is `key`, which divides them."""
        keys = self.keys
        sharers = self.integer(keys.referrers) if keys.referrers and key == keys.referred else self.sharers
        return self.generation_batch_size * sharers // self.launch.ranks

    @property
    def reuses_rollouts(self) -> bool:
        """True if one rollout serves several optimizer steps, or is trained on more than once."""
        again = self.keys.reuse is not None and self.resolved.get(self.keys.reuse, 1) != 1
        return again or self.generation_batch_size > self.effective_batch_size

    @property
    def evaluated_samples(self) -> int:
        """Samples in one batch of the evaluation within the training; 0 if there is none."""
        key = self.keys.evaluation
        return 0 if key is None or not evaluates(self.resolved) else self.integer(key)

    @property
    def evaluated_group(self) -> int:
        """Completions of one prompt in an evaluation."""
        key = self.keys.evaluation_group
        return self.integer(key) if key is not None and self.resolved.get(key) else self.num_generations

    @property
    def max_completion_tokens(self) -> int | None:
        return None if self.keys.completion is None else self.integer(self.keys.completion)

    @property
    def loss_type(self) -> str:
        return str(self.resolved.get("loss_type", self.trainer))

    @property
    def uses_lora(self) -> bool:
        return bool(self.resolved.get("use_peft"))

    def check(self) -> None:
        """Raise ConfigError unless every optimizer step holds whole groups of whole prompts, and believably many."""
        keys = self.keys
        most = max(self.effective_batch_size, self.generation_batch_size)
        if most > _MOST_SAMPLES:
            asked = (keys.micro_batch, keys.accumulation, keys.rollout)
            given = ", ".join(f"{key}={printable(str(self.resolved[key]), 40)}" for key in asked if key is not None)
            raise ConfigError(f"an optimizer step may have at most {_MOST_SAMPLES:,} samples; got {given}; lower them")
        if not self.generates:
            return
        if self.effective_batch_size % self.num_generations:
            raise ConfigError(
                f"the effective batch {self.effective_batch_size} ({keys.micro_batch}={self.micro_batch_size} x "
                f"{keys.accumulation}={self.grad_accum_steps} x world size {self.world_size}) must be a multiple of "
                f"{keys.group}={self.num_generations}, or a group is split over optimizer steps; change "
                f"{keys.accumulation} or {keys.group}"
            )
        whole, part = (
            max(self.generation_batch_size, self.effective_batch_size),
            min(self.generation_batch_size, self.effective_batch_size),
        )
        if whole % part:
            raise ConfigError(
                f"{keys.rollout}={self.steps_per_generation} must divide or be a multiple of "
                f"{keys.accumulation}={self.grad_accum_steps}, or rollouts straddle optimizer steps"
            )

    def describe(self) -> list[tuple[str, str]]:
        """(name, text) rows that describe the recipe to the user."""
        packed = self.keys.packed is not None and self.resolved.get(self.keys.packed) is True
        each = (
            f"{self.micro_batch_size * self.grad_accum_steps} samples, packed by tokens,"
            if packed
            else f"{self.micro_batch_size} micro-batch x {self.grad_accum_steps} accumulation"
        )
        rows = [
            ("model", self.model or "?"),
            (
                "trainer",
                f"{self.trainer}, loss {self.loss_type}"
                if "loss_type" in self.resolved and self.generates
                else self.trainer,
            ),
            (
                "effective batch",
                f"{self.effective_batch_size} = {each} x {self.world_size} "
                + ("rank(s)" if self.sharers == 1 else f"group(s) of {self.sharers} ranks that share their samples"),
            ),
        ]
        if not self.launch.is_plain:
            rows.append(("launch", self.launch.words))
        if self.generates:
            prompts = f"{self.prompts_per_step} prompt{'' if self.prompts_per_step == 1 else 's'}"
            rows.append(("groups", f"{prompts} x {self.num_generations} completions per optimizer step"))
            longest = "?" if self.longest_prompt_tokens is None else str(self.longest_prompt_tokens)
            rows.append(("worst case", f"{longest} prompt + {self.max_completion_tokens} completion tokens"))
        elif self.longest_sample_tokens is not None:
            key = self.keys.length
            limit = None if key is None else self.resolved.get(key)
            name = own_names(self.foreign).get(key, key) if key else "limit"
            of = f"no {name}" if limit is None else f"{name} {limit}"
            rows.append(("worst case", f"{self.longest_sample_tokens} tokens in the longest sample ({of})"))
        other = self.resolved.get("peft_adapter")
        if self.uses_lora and isinstance(other, Mapping):
            options = (f"{key}={value}" for key, value in other.items() if key != "peft_type")
            rows.append(("adapter", f"{other.get('peft_type')} {' '.join(options)}".rstrip()))
        elif self.uses_lora:
            rows.append(("adapter", f"LoRA r={self.resolved.get('lora_r')} alpha={self.resolved.get('lora_alpha')}"))
        if self.model_parameters is not None and self.weights_bytes is not None:
            rows.append(("weights", f"{_count(self.model_parameters)} parameters, {format_bytes(self.weights_bytes)}"))
        return [*rows, *(("note", note) for note in self.notes)]


def own_names(origin: Mapping[str, object]) -> Mapping[str, str]:
    """{key of the recipe: its name in the file that the recipe was} where that has another name of it.

    "" stands for the name of a key that its tool works out itself. Where the file says a value in another way too,
    `KEY=VALUE` has its words: LLaMA-Factory's `disable_gradient_checkpointing` is the opposite.
    """
    return cast("Mapping[str, str]", origin.get("names", {}))


def own_value(names: Mapping[str, str] | None, key: str, value: object) -> object:
    """`value` of the recipe's `key` as the user's own file has it."""
    return (names or {}).get(f"{key}={value}", value)


def _count(number: int) -> str:
    """`4.02 B`, or `135 M` below 10^9."""
    return f"{number / 1e9:.3g} B" if number >= 999_500_000 else f"{number / 1e6:.3g} M"


def tuned_yaml(values: Mapping[str, object], changes: Mapping[str, object], *, comment: str) -> str:
    """YAML text of `values` with `changes` applied (None removes a key) and its secrets, after a comment."""
    tuned = opened(merge(values, changes))
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(tuned, sort_keys=False, allow_unicode=True)


def merge(values: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """`values` with `changes` applied; None removes a key or a limit, and `env` is merged key by key.

    A change of `activation_checkpointing_kwargs.offload` changes that key inside the mapping, and no other.
    """
    tuned = dict(values)
    for key, value in changes.items():
        outer, dot, inner = key.partition(".")
        if dot and key not in tuned:
            tuned[outer] = merge(_inside(tuned.get(outer), key), {inner: value})
            if value is None and not tuned[outer]:
                del tuned[outer]
            continue
        old = tuned.get(key)
        if key == "env" and isinstance(value, Mapping) and isinstance(old, Mapping):
            value = {**old, **value}
        if value is None and key not in _NO_LIMIT:
            tuned.pop(key, None)
        else:
            tuned[key] = value
    return tuned


def inner_value(values: Mapping[str, object], key: str) -> object:
    """The value of `outer.inner` inside the mapping `outer`, or of a key further inside, if it is given."""
    outer, _, inner = key.partition(".")
    found = _inside(values.get(outer), key)
    return inner_value(found, inner) if "." in inner and inner not in found else found.get(inner)


def _inside(value: object, key: str) -> dict[str, object]:
    """The mapping that `key` ("outer.inner") lies in; TRL takes it as JSON text too. Raises ConfigError."""
    if value is None:
        return {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key.partition('.')[0]} must be a mapping, or {key} cannot be set; got {value!r}")
    return dict(value)


# -- a recipe on other ranks than it was written for, at the same effective batch -------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batches of a recipe over `ranks`; `rollout` is None unless the trainer generates."""

    micro: int
    accumulation: int
    rollout: int | None
    ranks: int

    @property
    def effective(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.micro * self.accumulation * self.ranks

    @property
    def generated(self) -> int | None:
        """Completions of one rollout, over all ranks."""
        return None if self.rollout is None else self.micro * self.rollout * self.ranks

    @classmethod
    def of(cls, resolved: Mapping[str, object], keys: BatchKeys, ranks: int) -> "Batch":
        """The batch of a recipe whose keys have been resolved."""
        rollout = None if keys.rollout is None else _integer(resolved, keys.rollout)
        micro, accumulation = (_integer(resolved, key) for key in (keys.micro_batch, keys.accumulation))
        return cls(micro=micro, accumulation=accumulation, rollout=rollout, ranks=ranks)

    def on(self, ranks: int, keys: BatchKeys, names: Mapping[str, str] | None = None) -> "Batch":
        """The same samples over `ranks`: the largest micro-batch, up to this one, that divides them.

        The effective batch and the generation batch stay exactly as they are, so groups stay whole over all ranks.
        Raises ConfigError, with the numbers of ranks that work, where the samples cannot be divided.
        """
        whole = self.effective if self.generated is None else math.gcd(self.effective, self.generated)
        if whole % ranks:
            raise ConfigError(self._cannot(ranks, whole, keys, names or {}))
        each = whole // ranks
        micro = max(size for size in divisors(each) if size <= self.micro)
        rollout = None if self.generated is None else self.generated // (micro * ranks)
        return Batch(micro=micro, accumulation=self.effective // (micro * ranks), rollout=rollout, ranks=ranks)

    def to_keys(self, keys: BatchKeys) -> dict[str, object]:
        """{key of the recipe: value}."""
        found: dict[str, object] = {keys.micro_batch: self.micro, keys.accumulation: self.accumulation}
        return found if keys.rollout is None else {**found, keys.rollout: self.rollout}

    def _cannot(self, ranks: int, whole: int, keys: BatchKeys, names: Mapping[str, str]) -> str:
        batch = f"the effective batch {self.effective}"
        if self.generated not in (None, self.effective):
            batch += f" and the {self.generated} completions of a rollout"
        works = sorted(divisors(whole))
        near = ", ".join(map(str, [n for n in works if n < ranks][-6:] + [n for n in works if n > ranks][:3]))
        if names.get(keys.accumulation) != "":  # else the tool's user gives no such number
            steps = f"{keys.accumulation}={self.accumulation}"
            batch += f" ({keys.micro_batch}={self.micro} x {steps} x {self.ranks} rank(s))"
        return f"{batch} cannot be divided by {ranks} ranks; numbers that work: {near}"


def spread(recipe: Recipe, ranks: int) -> Recipe:
    """`recipe` on `ranks` ranks, at exactly the same effective batch and rollout; a note says how it is split.

    Raises ConfigError where it cannot be, with the numbers of ranks that work.
    """
    if ranks == recipe.launch.ranks:
        return recipe
    keys = recipe.keys
    if ranks % recipe.sharers:
        raise ConfigError(
            f"{keys.sharers} {recipe.sharers} must divide the ranks; got {ranks}; numbers that work: "
            f"{', '.join(str(n * recipe.sharers) for n in range(1, 5))}"
        )
    old = Batch.of(recipe.resolved, keys, recipe.world_size)
    names = own_names(recipe.foreign)
    new = old.on(ranks // recipe.sharers, keys, names)
    changes: dict[str, object] = {k: v for k, v in new.to_keys(keys).items() if v != recipe.resolved.get(k)}
    scored, engine = _scored(recipe, new), _engine_ranks(recipe, ranks)
    changes |= scored | engine
    resolved = {**recipe.resolved, **changes}
    if keys.rollout is not None and keys.rollout_batch is not None:  # a recipe has one of the two
        changes |= {keys.rollout: new.rollout, keys.rollout_batch: None}
    splits = _split(new, keys, recipe.sharers, names), _split(old, keys, recipe.sharers, names)
    note = f"{splits[0]}: the effective batch {old.effective}, as {splits[1]} in the recipe"
    note += "".join(f"; {names.get(key, key)} {value}, to divide a rank's samples" for key, value in scored.items())
    note += "".join(f"; {names.get(key, key)} {value}, to divide the ranks" for key, value in engine.items())
    spread_out = replace(recipe, values=merge(recipe.values, changes), resolved=resolved, notes=(*recipe.notes, note))
    return with_launch(spread_out, _on(recipe.launch, ranks, shards_alone=profile(recipe.trainer).own_launch))


def _engine_ranks(recipe: Recipe, ranks: int) -> dict[str, object]:
    """{key: the most of the ranks that hold one copy of the rollout's engine which divide `ranks`}, if it changes."""
    key = recipe.keys.engine_ranks
    size = recipe.resolved.get(key or "")
    return {key: math.gcd(size, ranks)} if key is not None and isinstance(size, int) and size > 0 < ranks % size else {}


def sizes_of_ranks(recipe: Recipe, before: Recipe) -> dict[str, object]:
    """{key: value} of the sizes that another number of ranks changed since `before`, but for what follows from them."""
    keys = recipe.keys
    packed = keys.packed is not None and recipe.resolved.get(keys.packed)
    names = (None if packed else keys.micro_batch, keys.scored, keys.referred, keys.engine_ranks)
    found = {key: recipe.resolved[key] for key in names if key is not None and key in recipe.resolved}
    return {key: value for key, value in found.items() if value != before.resolved.get(key)}


def _scored(recipe: Recipe, batch: Batch) -> dict[str, object]:
    """{key: its value} of gradient-free passes whose samples fail to divide a rank's rollout in `batch`."""
    keys, found = recipe.keys, dict[str, object]()
    if batch.rollout is None or (keys.packed is not None and recipe.resolved.get(keys.packed)):
        return {}
    for key in filter(None, (keys.scored, keys.referred)):
        rows, each = recipe.resolved.get(key), recipe.passed_samples(key) * recipe.world_size // batch.ranks
        if isinstance(rows, int) and rows > 0 and each % rows:
            found[key] = max(size for size in divisors(each) if size <= rows)
    return found


def with_launch(recipe: Recipe, launch: Launch) -> Recipe:
    """`recipe` with another launch of as many ranks as its batch is split over."""
    given = {} if launch.is_plain else {LAUNCH: launch.to_values()}
    values, resolved = ({k: v for k, v in m.items() if k != LAUNCH} for m in (recipe.values, recipe.resolved))
    return replace(recipe, values={**values, **given}, resolved={**resolved, **given}, launch=launch)


def _on(launch: Launch, ranks: int, *, shards_alone: bool) -> Launch:
    """The launch on `ranks` cards; a single one is unsharded, unless the tool shards that too."""
    if ranks == 1 and not shards_alone and launch.offload == "none" and launch.server_ranks == 0:
        return Launch()
    each = launch.ranks // launch.machines
    machines = max(1, ranks // each) if launch.machines > 1 and (ranks % each == 0 or ranks < each) else 1
    return replace(launch, ranks=ranks, machines=machines)


def _split(batch: Batch, keys: BatchKeys, sharers: int, names: Mapping[str, str]) -> str:
    own = {names.get(key, key): value for key, value in batch.to_keys(keys).items()}
    said = ", ".join(f"{name} {value}" for name, value in own.items() if name)
    ranks = batch.ranks * sharers
    return f"{said} on {ranks} rank{'s' if ranks > 1 else ''}"


def _integer(resolved: Mapping[str, object], key: str) -> int:
    value = resolved[key]
    assert isinstance(value, int), (key, value)
    return value
