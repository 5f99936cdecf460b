"""Where a promoted run trains: on the device of its study, or where the user says."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autofit.cluster.executor import LOCAL, Executor
from autofit.errors import ConfigError
from autofit.fakegpu.specs import gpu_spec
from autofit.hardware.driver_names import card_of
from autofit.hardware.hardware import Device, choose_device, gpus, slices_fault
from autofit.hardware.visible import why_none
from autofit.recipe.keys import divisors
from autofit.recipe.launch import Launch
from autofit.recipe.server import Server, needs_server

_LONGEST_SIGNAL_S = 600.0


def training_device(
    studied: Device, asked: str, *, begun: Mapping[str, object] | None = None, executor: Executor = LOCAL
) -> Device:
    """`cpu` or `cuda`: what was asked, what the run has `begun` on, or the device of the study, `studied`.

    Raises ConfigError where the study is of a card that this machine lacks and nobody said where to train. On Slurm
    the job looks at the cards of its nodes.
    """
    if executor.is_slurm and "cuda" in (asked, studied) and asked != "cpu":
        return "cuda"
    if asked != "auto":
        return _given(asked)
    if begun is not None:
        return str(begun["device"])
    if studied.startswith("sim:"):
        return _of_simulated(studied.removeprefix("sim:"))
    if studied == "cuda" and not gpus():
        raise ConfigError(f"the study measured a CUDA card, and {why_none()} here; {_SAY_WHERE}")
    return studied


_SAY_WHERE = "say where the run trains with --device cpu or --device cuda, or write its YAML only with --write-only"


def machines_of(launch: Launch, executor: Executor) -> int:
    """The machines on which `launch` trains with `executor`. Raises ConfigError where its ranks cannot be so divided.

    Its ranks stay as many as they are, and so does the effective batch.
    """
    if not executor.is_slurm or executor.nodes is None or executor.nodes == launch.machines:
        return launch.machines
    asked = executor.nodes
    if launch.machines > 1:
        raise ConfigError(
            f"the recipe trains on {launch.machines} machines (num_machines), and --nodes is {asked}; leave --nodes out"
        )
    if launch.ranks % asked:
        works = ", ".join(str(n) for n in sorted(divisors(launch.ranks)))
        raise ConfigError(
            f"the {launch.ranks} rank(s) of the run cannot be divided by --nodes {asked}; give --nodes {works}, or "
            f"search on a multiple of {asked} ranks (--num_processes)"
        )
    return asked


def check_ranks(launch: Launch, device: Device, executor: Executor = LOCAL) -> None:
    """Raise ConfigError for a launch whose ranks cannot be started on `device` of this machine, or of Slurm's."""
    write = "write its files with --write-only, and start it with the command that they name"
    if launch.machines > 1 and not executor.is_slurm:
        raise ConfigError(
            f"the run trains on {launch.machines} machines, and autofit starts it on one; give --executor slurm, or "
            f"{write}"
        )
    if device == "cpu" and launch.sharding not in ("ddp", "fsdp2"):
        raise ConfigError(f"ranks on the CPU train with ddp or fsdp2, and the run has {launch.sharding}; {write}")
    if device != "cuda" or executor.is_slurm:
        return
    if launch.cards > len(gpus()):
        raise ConfigError(f"the run trains on {launch.cards} cards, and this machine has {len(gpus())}; {write}")
    if fault := slices_fault(gpus(), launch.cards):
        raise ConfigError(f"the run trains on {launch.cards} cards, and on this machine {fault}; {write}")


def server_of(
    resolved: Mapping[str, object], values: Mapping[str, object], device: Device, executor: Executor, *,
    say: Callable[[str], None] = lambda _: None,
) -> Server | None:  # fmt: skip
    """The vLLM server that the job of the run starts, and where; None where the recipe has none, or the user starts it.

    On this machine a recipe says that it has cards for its server (`launch.server_ranks`). Raises ConfigError for one
    that cannot be started.
    """
    launch = Launch.of(values)
    if not needs_server(resolved, values) or not (executor.is_slurm or (device == "cuda" and launch.server_ranks)):
        return None
    server = Server.of(values)
    cards = f"{server.cards} card{'s' if server.cards > 1 else ''}"
    place = f"{cards} of this machine"
    if executor.is_slurm:
        on = f" with {cards}" if device == "cuda" else ""
        place = f"a node of its own{on}, so the job asks for {launch.machines + 1} nodes"
    say(f"its vLLM server gets {place}; it logs to server.log in the folder of the run")
    return server


def for_slurm(executor: Executor, launch: Launch, device: Device, server: Server | None = None) -> Executor:
    """`executor` with what the run needs and nobody asked for: its nodes, and a card for each rank.

    A server has a node of its own. Slurm gives all nodes of a job as many cards as the one that needs most.
    """
    options = ("gres", "gpus", "gpus-per-task", "gpus-per-node")
    given = executor.gpus_per_node or any(option in executor.slurm for option in options)
    needed = max(launch.ranks // launch.machines, 0 if server is None else server.cards)
    cards = executor.gpus_per_node if given or device != "cuda" else str(needed)
    return replace(executor, nodes=launch.machines + (server is not None), gpus_per_node=cards)


def signal_s(executor: Executor) -> int:
    """Seconds before the time limit at which the run is told to save: a step and a checkpoint must fit."""
    return int(min(_LONGEST_SIGNAL_S, max(60, (executor.time_s or math.inf) / 10)))


def _given(asked: str) -> Device:
    if asked == "cuda" and not gpus():
        raise ConfigError(
            f"--device cuda needs a CUDA card, but {why_none()}; give --device cpu, or run it on a machine with a card"
        )
    return choose_device(asked)


def _of_simulated(name: str) -> Device:
    if any(card is not None and card.name == name for card, _ in (card_of(gpu.name) for gpu in gpus())):
        return "cuda"
    found = ", ".join(sorted({gpu.name for gpu in gpus()}))
    here = f"this machine has another card ({found})" if found else "this machine has no CUDA card"
    raise ConfigError(f"the study simulated an {gpu_spec(name).full_name}, and {here}; {_SAY_WHERE}")
