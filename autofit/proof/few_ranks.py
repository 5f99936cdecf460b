"""A recipe of many ranks in a gradient proof: at most 4 gloo ranks of one CPU, with DDP or FSDP2. No torch here."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import cast

from autofit.errors import ConfigError
from autofit.proof.proof_keys import Reach
from autofit.recipe.keys import BatchKeys
from autofit.recipe.launch import LAUNCH
from autofit.recipe.recipe import merge
from autofit.recipe.spread import Batch

MOST_RANKS = 4
_MOST_OWN = 8  # ranks of a recipe whose samples no fewer ranks can share in micro-batches of the same size
_RUN_HERE = ("ddp", "fsdp2")
_HARMLESS = {
    "offload": "neutral by construction: it moves tensors between the card and host memory, and a CPU has one memory",
    "machines": "neutral by construction: it changes where the ranks run",
}
_ENGINE = "it changes the engine that generates, and the proof's samples are fixed"


def reach_of_launch(key: str, value: object, own: object) -> tuple[Reach, str]:
    """(reach of a proof for `launch.KEY` changed from `own` to `value`, reason why it is not compared or "")."""
    field = key.partition(".")[2]
    if field == "sharding":
        absent = [v for v in (own or "ddp", value) if v not in _RUN_HERE]
        return (Reach.KERNEL, f"{_absent(str(absent[0]))}; DDP replaces it") if absent else (Reach.COMPARED, "")
    if field in ("ranks", "reshard_after_forward"):
        return Reach.COMPARED, ""
    if field == "server_ranks" and own and value:
        return Reach.HARMLESS, "neutral by construction: the copies of the same engine divide the prompts"
    if field in _HARMLESS:
        return Reach.HARMLESS, _HARMLESS[field]
    return Reach.OTHER, _ENGINE if field == "server_ranks" else "it is a setting of accelerate that the proof lacks"


def _absent(sharding: str) -> str:
    if sharding == "fsdp1":
        return "the proof's ranks on a CPU run no FSDP1"
    return "DeepSpeed is not installed" if find_spec("deepspeed") is None else "the proof's ranks run no DeepSpeed"


def on_few_ranks(values: Mapping[str, object], sizes: Mapping[str, object], keys: BatchKeys) -> dict[str, object]:
    """The recipe `values` on the ranks of a proof, with the same samples in an optimizer step and a rollout.

    `sizes` has the resolved values of its batch keys. Fewer ranks have a larger accumulation. Raises ConfigError if
    there are more ranks than a proof can have.
    """
    launch = cast("Mapping[str, object]", values.get(LAUNCH) or {})
    rest = {key: value for key, value in values.items() if key != LAUNCH}
    if launch.get("ranks", 1) == 1:
        return rest
    batch = Batch.of(sizes, keys, cast(int, launch["ranks"]))
    few = batch.on(_ranks(batch), keys)
    if few.ranks != batch.ranks:
        once = {} if keys.rollout_batch is None else {keys.rollout_batch: None}
        rest = merge(rest, {**few.to_keys(keys), **once})
    own = str(launch.get("sharding", "ddp"))
    sharding = own if own in _RUN_HERE else "ddp"
    reshard = launch.get("reshard_after_forward", True)
    return {**rest, LAUNCH: {"ranks": few.ranks, "sharding": sharding, "reshard_after_forward": reshard}}


def _ranks(batch: Batch) -> int:
    """Ranks of a proof that have the same samples in micro-batches of the same size."""
    whole = (batch.effective, batch.generated or batch.effective)
    fitting = [n for n in range(2, MOST_RANKS + 1) if not any(total % (n * batch.micro) for total in whole)]
    if batch.ranks in fitting or (not fitting and batch.ranks <= _MOST_OWN):
        return batch.ranks
    if not fitting:
        raise ConfigError(f"a proof has at most {_MOST_OWN} ranks, and fewer than {batch.ranks} cannot share the batch")
    return max(fitting)


def launch_unlike(named: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]]) -> tuple[str, ...]:
    """The differences between launches of the recipe and those of the proof, one phrase each.

    `named` has {"trial" or "baseline": (its values, its values in the proof)}.
    """
    found: list[str] = []
    for name, (values, small) in named.items():
        asked, had = (cast("Mapping[str, object]", v.get(LAUNCH) or {}) for v in (values, small))
        own, few = (cast(int, launch.get("ranks", 1)) for launch in (asked, had))
        if own > 1:
            fewer = f", not {own}: the accumulation is larger" if few != own else ""
            found.append(f"{few} gloo ranks of one CPU in the {name}{fewer}")
        sharding = str(asked.get("sharding", "ddp"))
        if own > 1 and sharding not in _RUN_HERE:
            found.append(f"DDP in the {name}, not {sharding}: {_absent(sharding)}")
    return tuple(found)
