"""The changes that are tried, mildest first, until a recipe fits a number of cards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from autofit.errors import ConfigError
from autofit.forecast.levers import CHECKPOINTING, MICRO, ROLLOUT, Assignment, Levers
from autofit.hardware.hardware import Device
from autofit.recipe.keys import QUANT_STORAGE, SYNC_EACH_BATCH, TIERS, Tier, weight_bits
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import Recipe, inner_value, merge, with_launch
from autofit.space.space import QUANTIZATION, Value

EIGHT_BIT = "adamw_8bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A change of a recipe: its values with the change, and how they differ from the user's."""

    values: Mapping[str, object]
    changes: Mapping[str, object]
    tier: Tier = TIERS[0]
    shards_weights: bool = False  # whether a rank holds less than all weights
    quantised: bool = False
    offloads: bool = False  # to host memory, which takes longest

    @property
    def key(self) -> str:
        """The same for the same values."""
        return repr(sorted(self.values.items(), key=lambda entry: entry[0]))

    def least_bytes(self, weights_bytes: int | None) -> int:
        """Bytes of the weights alone, where a rank holds them all as they are loaded; else 0."""
        return 0 if self.shards_weights or self.quantised or self.changes.get("dtype") else weights_bytes or 0


Ladder = tuple[Rung, ...]  # of one tier, mostly each with less memory than the one before it, and slower


def ladders(recipe: Recipe, device: Device) -> list[Ladder]:
    """The recipe as it is and with less and less memory for its batch, then so with other changes: the mildest first.

    Neutral ones shard what several ranks hold (with FSDP the gradients too, by one micro-batch a step, else in every
    micro-batch), checkpoint activations, shrink the micro-batch, then the rollout, and at last offload; approximate
    ones load bfloat16 or keep the optimizer in 8 bits; those of the recipe train an adapter, then on weights of 4 bits.
    A recipe that offloads is tried without it too: the offload may be all that fails.
    """
    try:
        levers = Levers.of(recipe, device)
    except ConfigError:  # nothing of this recipe can vary but its launch
        levers = None
    seen: set[str] = set()
    found: list[Ladder] = []
    for at in _bases(levers):
        for launch in _launches(recipe.launch):
            settings = list(_leaner(levers, at))
            mildest = [_rung(recipe, levers, launch, setting) for setting in settings[:1]]
            made = mildest + [
                _rung(recipe, levers, launch, setting, leaner=True)
                for milder in settings
                for setting in (*_undivided(levers, launch, milder), milder)
            ]
            new = {rung.key: rung for rung in made if rung.key not in seen}
            seen |= new.keys()
            found += [tuple(rungs) for _, rungs in groupby(new.values(), lambda rung: rung.tier)]
    return sorted(found, key=lambda ladder: (TIERS.index(ladder[0].tier), ladder[0].offloads))


def _launches(own: Launch) -> list[Launch]:
    """The launch as it is, then without offload, then sharded, then in host memory too."""
    found = [own, replace(own, offload="none")]
    if own.ranks > 1:
        which: Sharding = "zero3" if own.is_deepspeeds else "fsdp2"
        sharded = own if _shards(own) else replace(own, sharding=which, reshard_after_forward=True)
        found += [sharded, replace(sharded, offload="parameters")]
    return _once(found)


def _once(found: list[Launch]) -> list[Launch]:
    return [launch for place, launch in enumerate(found) if launch not in found[:place]]


def _shards(launch: Launch) -> bool:
    """Whether the launch shards the weights."""
    return launch.sharding in ("fsdp1", "fsdp2", "zero3")


def _bases(levers: Levers | None) -> Iterator[Assignment]:
    """Settings besides the launch and the batch, mildest first: each with what makes room before it."""
    yield {}
    if levers is None:
        return
    strongest = {name: values[-1] for name, values in levers.strengths.items()}
    base: dict[str, Value] = {}
    if "dtype" in strongest:
        base = {"dtype": strongest["dtype"]}
        yield base
    if EIGHT_BIT in (levers.strengths.get("optim") or ()):
        yield {**base, "optim": EIGHT_BIT}
    if strongest.get("use_peft") is True:
        base = {**base, "use_peft": True}
        yield base
    if QUANTIZATION in strongest:
        yield {**base, QUANTIZATION: strongest[QUANTIZATION]}


def _leaner(levers: Levers | None, base: Assignment) -> Iterator[Assignment]:
    """The settings `base`, then with less and less memory for the batch, as far as there are such candidates."""
    at: dict[str, Value] = dict(base)
    if levers is None or not at or levers.candidate(at) is not None:
        yield at
    if levers is None:
        return
    for names in (CHECKPOINTING, (MICRO,), (ROLLOUT,), (levers.space.keys.evaluation,)):
        at = {**at, **{name: levers.strengths[name][-1] for name in names if name in levers.strengths}}
        if at and levers.candidate(at) is not None:
            yield at


def _undivided(levers: Levers | None, launch: Launch, at: Assignment) -> Iterator[Assignment]:
    """The settings `at` with all samples of a step in one micro-batch, under FSDP: it gathers and reduces once."""
    if levers is not None and MICRO in levers.own and MICRO not in at and launch.sharding.startswith("fsdp"):
        whole = levers.space.recipe.effective_batch_size // levers.space.recipe.world_size
        if whole in levers.larger(MICRO) and levers.candidate({**at, MICRO: whole}) is not None:
            yield {**at, MICRO: whole}


def _rung(recipe: Recipe, levers: Levers | None, launch: Launch, at: Assignment, *, leaner: bool = False) -> Rung:
    """The rung with these settings; a `leaner` one under FSDP adds up shards of gradients, not whole ones."""
    changed = with_launch(recipe, launch)
    changes: dict[str, object] = {}
    values, tier = changed.values, TIERS[0]
    if levers is not None and at:
        changes = dict(levers.changes(at))
        values, tier = merge(changed.values, levers.changes(at, yaml=True)), levers.tier(at)
    if leaner and launch.sharding.startswith("fsdp") and _keeps_gradients(values, recipe):
        reduced: dict[str, object] = {SYNC_EACH_BATCH: True}
        if recipe.keys.unreduced is not None:
            reduced = {recipe.keys.unreduced: False}
        values, changes = merge(values, reduced), changes | reduced
    if (leaner or launch.sharding != recipe.launch.sharding) and launch.sharding == "fsdp2" and _in_integers(values):
        changes[QUANT_STORAGE] = storage = "float16" if values.get("fp16") else "bfloat16"
        values = merge(values, {QUANT_STORAGE: storage})
    if launch.sharding != recipe.launch.sharding:
        changes["sharding"] = launch.sharding
    if launch.offload != recipe.launch.offload:
        changes["offload"] = launch.offload
    return Rung(
        values=values, changes=changes, tier=tier, shards_weights=_shards(launch),
        offloads=launch.offload not in ("none", recipe.launch.offload),
        quantised=weight_bits(values) is not None,
    )  # fmt: skip


def _in_integers(values: Mapping[str, object]) -> bool:
    """Whether weights of 4 bits are stored as integers, which FSDP2 does not shard."""
    return weight_bits(values) == 4 and values.get(QUANT_STORAGE) in (None, "uint8")


def _keeps_gradients(values: Mapping[str, object], recipe: Recipe) -> bool:
    """Whether whole gradients are held between two micro-batches, and can be kept from it."""
    micro_batches = values.get(recipe.keys.accumulation, recipe.grad_accum_steps)
    if recipe.keys.unreduced is not None:
        return micro_batches != 1 and bool({**recipe.resolved, **values}.get(recipe.keys.unreduced))
    try:
        return micro_batches != 1 and not inner_value(values, SYNC_EACH_BATCH)
    except ConfigError:  # a file has the settings that it belongs to
        return False
