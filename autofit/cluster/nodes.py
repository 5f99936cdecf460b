"""The nodes of a cluster: their cards as a search sees them from afar, and what keeps a node from working.

The machine that searches may have no card itself. No torch here.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.cluster.scheduler import FILE, SLURM, Cluster, Executor, cluster_of, own_node, read_executor
from autofit.cluster.slurm import partition_limits_s
from autofit.errors import ConfigError, EnvironmentFault, one_line, option
from autofit.fakegpu.specs import UnknownGpuError, gpu_spec
from autofit.files import is_full, private_folder, read_json, write_json
from autofit.hardware.hardware import is_of_kind, kind_of, slices_fault
from autofit.hardware.health import Look, compiling_faults, look_at_cards
from autofit.hardware.nvml import Gpu
from autofit.recipe.findings import Finding, Severity
from autofit.units import format_seconds

# Words of an error that names a broken or occupied card, not the program: another node may do better. The first seven
# are cudaGetErrorString's, as torch prints them after "CUDA error: " (CUDA runtime API, enum cudaError); "unspecified
# launch failure" and "an illegal memory access" are not among them, since bugs of kernels cause them too.
_BROKEN = (
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable, 214
    "no CUDA-capable device is detected",  # cudaErrorNoDevice, 100
    "CUDA-capable device(s) is/are busy or unavailable",  # cudaErrorDevicesUnavailable, 46
    "all CUDA-capable devices are busy or unavailable",  # the same, before CUDA 11
    "CUDA error: initialization error",  # cudaErrorInitializationError, 3
    "hardware stack error",  # cudaErrorHardwareStackError, 714
    "system not yet initialized",  # cudaErrorSystemNotReady, 802: the fabric manager does not run
    "GPU has fallen off the bus",  # Xid 79, in the driver's log
    "GPU is lost",  # NVML_ERROR_GPU_IS_LOST
    "GPU requires reset",  # NVML_ERROR_RESET_REQUIRED
    "Found no NVIDIA driver on your system",  # torch, torch/csrc/utils/device_lazy_init.cpp and torch/cuda
    "No CUDA GPUs are available",  # torch, c10/cuda/CUDAFunctions.cpp
)


def node_fault(device: str, folder: Path, *, card: str | None = None, cards: int = 1) -> str | None:
    """Reason, in one line, why this node is unfit to run probes on `device` in `folder`, if it is.

    On "cuda" at least `cards` cards must be visible, all of the kind `card` (None: any), unharmed and held by nobody.
    The driver is asked in a child, so this takes a second or so, and a minute at most where the driver hangs.
    """
    return _folder_fault(folder) or (card_fault(card, cards) if device == "cuda" else None)


def card_fault(card: str | None, cards: int = 1) -> str | None:
    """As `node_fault`, of the cards alone: for a run, which has its own words for its folder."""
    try:
        found = look_at_cards()
    except ConfigError as error:
        return str(error)
    if wrong := (*found.faults, *found.held):
        return "; ".join(wrong)
    if not found.cards:
        return f"no card is visible there{_refused(found)}; ask for one with --gpus-per-node"
    if len(found.cards) < cards:
        count = f"{cards} cards are needed, and {len(found.cards)} are visible there{_refused(found)}"
        return f"{count}; see --gpus-per-node"
    if fault := slices_fault(found.cards, cards):
        return fault
    return None if card is None else wrong_kind(found.cards, card)


def _refused(found: Look) -> str:
    return f" ({'; '.join(found.refused)})" if found.refused else ""


def only_cards(count: int) -> dict[str, str]:
    """The variable that leaves a program the first `count` of the cards that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(card) for card in range(count)] if given is None else given.split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[:count])}


def wrong_kind(gpus: tuple[Gpu, ...], card: str) -> str | None:
    """One line if one of the cards is of another kind than `card`."""
    others = sorted({kind_of(gpu) for gpu in gpus if not is_of_kind(gpu, card)})
    return f"its card is {', '.join(others)}, and the study is of {card}" if others else None


def is_card_broken(text: str) -> bool:
    """True if an error's text, or the end of a log, shows that the card itself is broken or unusable."""
    return any(words in text for words in _BROKEN)


def _folder_fault(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"autofit")
        with contextlib.suppress(OSError):  # a file system that does not tell its size
            if is_full(folder):
                return f"no space left in {folder}"
    except OSError as error:
        return f"the node cannot write in {folder}: {error.strerror or error}"
    return None


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
    """True if jobs get cards of their own."""
    return executor.gpus_per_node is not None or any("gpu" in f"{o}={executor.slurm.get(o, '')}" for o in _OF_GRES
                                                     if o in executor.slurm)  # fmt: skip


def named_cards(name: str, executor: Executor) -> NodeCards:
    """The cards of the kind that the user names, by the table alone, before any job. Raises ConfigError."""
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
                f"choose nodes that have some with --partition or --constraint, or give {option('device', 'cpu')}"
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
    others = {key: executor.slurm[key] for key in _OF_KIND if key in executor.slurm}
    asked = [executor.partition, executor.constraint, executor.gpus_per_node, others]
    return f"card-{hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:12]}"


def _asked(executor: Executor, folder: Path, path: Path, say: Callable[[str], None]) -> dict[str, object]:
    short = replace(executor, time=_MINUTES)
    cluster = cluster_of(executor.kind)
    (job,) = cluster.submit(short, folder / "logs", tell_cards, [str(path.resolve())], name="autofit-card")
    try:
        return _waited_for(cluster, job, path, say)
    except BaseException:
        cluster.cancel([job])
        raise


def _waited_for(cluster: Cluster, job: str, path: Path, say: Callable[[str], None]) -> dict[str, object]:
    """The job's answer in `path`; reports why it waits. Raises EnvironmentFault if it ends before writing it."""
    said, ended_at = "", None
    say(f"asks a node for its card (job {job})")
    while (told := read_json(path)) is None:
        state = cluster.queue().state(job)
        if state is not None and state.waits and state.reason not in ("", said):
            said = state.reason
            say(f"asks a node for its card (job {job} waits: {said})")
        if state is not None and not state.is_alive:
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _LATE_S:
                raise EnvironmentFault(
                    f"the job {job}, which asks a node for its card, ended as {state.state} and told nothing; see "
                    f"{path.parent / 'logs'}, or name the card with {option('gpu')}"
                )
        time.sleep(_LOOK_S)
    return told


def tell_cards(path: str) -> None:
    """The job: write the report of its node's driver, the node's name, and its faults of compilation."""
    node = {"node": own_node(), "missing": compiling_faults()}
    write_json(Path(path), {**look_at_cards().to_json(), **node})


def check_count(cards: Sequence[Gpu], needed: int) -> None:
    """Raise ConfigError where a job has fewer cards than a probe `needed`, or slices where it needs several."""
    if fault := slices_fault(cards, needed):
        raise ConfigError(
            f"the recipe trains on {needed} cards, and of a job {fault}; give {option('gpus')} 1, which keeps its "
            "effective batch, or ask for whole cards with --gpus-per-node, --partition or --constraint"
        )
    if needed > len(cards):
        raise ConfigError(
            f"the recipe trains on {needed} cards, and a job sees {len(cards)}; give --gpus-per-node {needed}, or "
            f"{option('gpus')} {len(cards)}, which keeps its effective batch"
        )


def executor_findings(folder: Path, *, cards: int) -> list[Finding]:
    """Findings on executor.yaml in `folder`, for probes of `cards` cards; [] if it is missing. Raises ConfigError."""
    executor = read_executor(None, {}, folder) if (folder / FILE).exists() else Executor()
    return list(_executor_findings(executor, str(folder / FILE), cards)) if executor.kind == SLURM else []


def _executor_findings(executor: Executor, file: str, cards: int) -> Iterator[Finding]:
    count = (executor.gpus_per_node or "").rpartition(":")[2]
    if count.isdigit() and int(count) < cards:
        yield Finding(
            severity=Severity.ERROR, where=f"{file} (gpus_per_node)",
            what=f"a job has {count} cards, and the recipe trains on {cards}", fix=f"ask for {cards}",
        )  # fmt: skip
    if not executor.is_requeued:
        yield Finding(
            severity=Severity.NOTE, where=f"{file} (slurm)",
            what="Slurm puts no job back into its queue, so a full run ends at its time limit",
            fix="run the same promote command again, which goes on from the last checkpoint",
        )  # fmt: skip
    limits = partition_limits_s()
    if limits is None:
        yield Finding(
            severity=Severity.NOTE, where=file, what="sinfo does not answer here, so its partition is not checked",
            fix="run doctor on the cluster's login node",
        )  # fmt: skip
        return
    for name in (executor.partition or "").split(","):
        if name and name not in limits:
            yield Finding(
                severity=Severity.ERROR, where=f"{file} (partition)", what=f"Slurm has no partition {name}",
                fix=f"one of {', '.join(sorted(limits)[:20])}",
            )  # fmt: skip
        elif name and executor.time_s is not None and executor.time_s > limits[name]:
            yield Finding(
                severity=Severity.ERROR, where=f"{file} (time)",
                what=f"the partition {name} allows {format_seconds(limits[name])}, and jobs ask for {executor.time}: "
                f"they would wait for ever, or be refused",
                fix="ask for less; a full run goes on in a next job",
            )  # fmt: skip
