"""The changes that are tried, mildest first, until a recipe fits a number of cards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autofit.errors import ConfigError
from autofit.forecast.levers import CHECKPOINTING, MICRO, ROLLOUT, Assignment, Levers
from autofit.hardware.hardware import Device
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import Recipe, merge
from autofit.recipe.spread import with_launch
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

    def least_bytes(self, weights_bytes: int | None) -> int:
        """Bytes of the weights alone, where a rank holds them all as they are loaded; else 0."""
        return 0 if self.shards_weights or self.quantised or self.changes.get("dtype") else weights_bytes or 0


def rungs(recipe: Recipe, device: Device) -> list[Rung]:
    """The recipe as it is, then changes of it: the highest tier first, within one the mildest first.

    Neutral ones shard what several ranks hold, checkpoint activations, shrink the micro-batch, and at last offload;
    approximate ones load bfloat16 or keep the optimizer in 8 bits; those of the recipe train an adapter, then on
    weights of 4 bits.
    """
    try:
        levers = Levers.of(recipe, device)
    except ConfigError:  # nothing of this recipe can vary but its launch
        levers = None
    own = recipe.launch
    found: dict[str, Rung] = {}
    for at in _settings(levers):
        for launch in _launches(own, quantised=at.get(QUANTIZATION) == "4bit"):
            rung = _rung(recipe, levers, launch, at)
            found.setdefault(repr(sorted(rung.values.items(), key=lambda e: e[0])), rung)
    return sorted(found.values(), key=lambda rung: (TIERS.index(rung.tier), rung.offloads))


def _launches(own: Launch, *, quantised: bool) -> list[Launch]:
    """The launch as it is, then sharded, then in host memory too. 4-bit weights stay whole."""
    found = [own]
    if own.ranks > 1 and not quantised:
        which: Sharding = "zero3" if own.sharding.startswith("zero") else "fsdp2"
        sharded = own if _shards(own) else replace(own, sharding=which, reshard_after_forward=True)
        found += [sharded, replace(sharded, offload="parameters")]
    return _once(found)


def _once(found: list[Launch]) -> list[Launch]:
    return [launch for place, launch in enumerate(found) if launch not in found[:place]]


def _shards(launch: Launch) -> bool:
    """Whether the launch shards the weights."""
    return launch.sharding in ("fsdp1", "fsdp2", "zero3")


def _settings(levers: Levers | None) -> Iterator[Assignment]:
    """Settings besides the launch, mildest first: each with what makes room before it."""
    yield {}
    if levers is None:
        return
    strongest = {name: values[-1] for name, values in levers.strengths.items()}
    checkpointing = {n: strongest[n] for n in CHECKPOINTING if n in strongest}
    least = {n: strongest[n] for n in (MICRO, ROLLOUT) if n in strongest}
    ladder: list[dict[str, Value]] = [checkpointing, {**checkpointing, **least}]
    room = ladder[-1]
    if "dtype" in strongest:
        ladder += [{**room, "dtype": strongest["dtype"]}]
        room = ladder[-1]
    if EIGHT_BIT in (levers.strengths.get("optim") or ()):
        ladder += [{**room, "optim": EIGHT_BIT}]
    if strongest.get("use_peft") is True:
        ladder += [{**room, "use_peft": True}]
        room = ladder[-1]
    if QUANTIZATION in strongest:
        ladder += [{**room, QUANTIZATION: strongest[QUANTIZATION]}]
    for at in ladder:
        if at and levers.candidate(at) is not None:
            yield at


def _rung(recipe: Recipe, levers: Levers | None, launch: Launch, at: Assignment) -> Rung:
    changed = with_launch(recipe, launch)
    changes: dict[str, object] = {}
    values, tier = changed.values, TIERS[0]
    if levers is not None and at:
        changes = dict(levers.changes(at))
        values, tier = merge(changed.values, levers.changes(at, yaml=True)), levers.tier(at)
    if launch.sharding != recipe.launch.sharding:
        changes["sharding"] = launch.sharding
    if launch.offload != recipe.launch.offload:
        changes["offload"] = launch.offload
    return Rung(
        values=values, changes=changes, tier=tier, shards_weights=_shards(launch),
        offloads=launch.offload != recipe.launch.offload,
        quantised=bool(values.get("load_in_4bit") or values.get("load_in_8bit")),
    )  # fmt: skip
