"""The cards of a cluster's nodes, as a search sees them from a machine that may have none. Imports no torch."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.cluster import slurm
from autofit.cluster.executor import Executor
from autofit.errors import ConfigError, EnvironmentFault, one_line
from autofit.fakegpu.specs import UnknownGpuError, gpu_spec
from autofit.files import read_json, write_json
from autofit.hardware.card_kind import kind_of
from autofit.hardware.compiler import compiling_faults
from autofit.hardware.hardware import slices_fault
from autofit.hardware.health import Look, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.owners import private_folder

_LOOK_S = 0.25
_MINUTES = "10"  # of the job: NVML takes seconds, a module system and a cold file system more
_LATE_S = 10.0  # a file of a job that has ended comes later over a network file system
_OF_GRES = ("gres", "gpus", "gpus-per-task", "tres-per-node")  # sbatch's other options that ask for cards
_OF_KIND = ("reservation", "nodelist", "constraint", *_OF_GRES)  # those that lead to another kind of card


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCards:
    """The kind of card that a study is of, and the cards that a job sees."""

    kind: str
    cards: tuple[Gpu, ...]


def asks_for_cards(executor: Executor) -> bool:
    """Whether jobs get cards of their own."""
    return executor.gpus_per_node is not None or any("gpu" in f"{o}={executor.slurm.get(o, '')}" for o in _OF_GRES
                                                     if o in executor.slurm)  # fmt: skip


def named_cards(name: str, executor: Executor) -> NodeCards:
    """The cards of the kind that the user names, as the table knows it: no job is asked. Raises ConfigError."""
    try:
        spec = gpu_spec(name)
    except UnknownGpuError as error:
        raise ConfigError(str(error)) from error
    count = (executor.gpus_per_node or "1").rpartition(":")[2]
    card = Gpu(name=spec.full_name, uuid="", capacity_bytes=spec.capacity_bytes,
               compute_capability=spec.compute_capability)  # fmt: skip
    return NodeCards(kind=spec.name, cards=(card,) * (int(count) if count.isdigit() else 1))


def cards_of_nodes(executor: Executor, folder: Path, *, say: Callable[[str], None]) -> NodeCards:
    """The cards of a node that a job of `executor` gets; asked once by a short job, and kept in `folder`.

    Raises ConfigError where the job sees no card, and EnvironmentFault where it tells nothing.
    """
    path = folder / f"{_key(executor)}.json"
    kept = read_json(path)
    if kept is None:
        private_folder(folder)
        kept = _asked(executor, folder, path, say)
    look = Look.from_json(kept)
    kinds = sorted({kind_of(card) for card in look.cards})
    if len(kinds) != 1:
        path.unlink(missing_ok=True)  # the next search asks again
        node = kept.get("node", "")
        if not kinds:
            why = f" ({one_line(look.faults[0], 200)})" if look.faults else ""
            raise ConfigError(
                f"a job of this search sees no card on the node {node}{why}; ask for cards with --gpus-per-node 1, "
                f"choose nodes that have some with --partition or --constraint, or give --device cpu"
            )
        raise ConfigError(
            f"a study is of one kind of card, and a job sees {' and '.join(kinds)} on the node {node}; ask for one, "
            f"as in --gpus-per-node a100:1"
        )
    if missing := str(kept.get("missing", "")):
        path.unlink(missing_ok=True)  # the next search asks again
        say(f"the node {kept.get('node', '')}: {missing}; load it in setup (executor.yaml)")
    return NodeCards(kind=kinds[0], cards=look.cards)


def _key(executor: Executor) -> str:
    """A name for all that leads to the same kind of card."""
    others = {option: executor.slurm[option] for option in _OF_KIND if option in executor.slurm}
    asked = [executor.partition, executor.constraint, executor.gpus_per_node, others]
    return f"card-{hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:12]}"


def _asked(executor: Executor, folder: Path, path: Path, say: Callable[[str], None]) -> dict[str, object]:
    short = replace(executor, time=_MINUTES)
    (job,) = slurm.submit(short, folder / "logs", tell_cards, [str(path.resolve())], name="autofit-card")
    try:
        return _waited_for(job, path, say)
    except BaseException:
        slurm.cancel([job])
        raise


def _waited_for(job: str, path: Path, say: Callable[[str], None]) -> dict[str, object]:
    """What the job writes to `path`; says why it waits. Raises EnvironmentFault where it ends without."""
    said, ended_at = "", None
    say(f"asks a node for its card (job {job})")
    while (told := read_json(path)) is None:
        state = slurm.queue().state(job)
        if state is not None and state.waits and state.reason not in ("", said):
            said = state.reason
            say(f"asks a node for its card (job {job} waits: {said})")
        if state is not None and not state.is_alive:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _LATE_S:
                raise EnvironmentFault(
                    f"the job {job}, which asks a node for its card, ended as {state.state} and told nothing; see "
                    f"{path.parent / 'logs'}, or name the card with --gpu"
                )
        time.sleep(_LOOK_S)
    return told


def tell_cards(path: str) -> None:
    """The job: write what its node's driver tells, the node's name, and what it cannot compile."""
    node = {"node": os.environ.get("SLURMD_NODENAME", ""), "missing": compiling_faults()}
    write_json(Path(path), {**look_at_cards().to_json(), **node})


def check_count(cards: Sequence[Gpu], needed: int) -> None:
    """Raise ConfigError where a job has fewer cards than a probe `needed`, or slices where it needs several."""
    if fault := slices_fault(cards, needed):
        raise ConfigError(
            f"the recipe trains on {needed} cards, and of a job {fault}; give --gpus 1, which keeps its effective "
            f"batch, or ask for whole cards with --gpus-per-node, --partition or --constraint"
        )
    if needed > len(cards):
        raise ConfigError(
            f"the recipe trains on {needed} cards, and a job sees {len(cards)}; give --gpus-per-node {needed}, or "
            f"--gpus {len(cards)}, which keeps its effective batch"
        )
