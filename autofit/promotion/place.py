"""The place of a promoted run: its folder with the tuned recipe, its device, its machines and its server."""

import importlib.machinery
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from autofit.cluster.scheduler import LOCAL, Executor
from autofit.errors import ConfigError, option
from autofit.fakegpu.specs import gpu_spec
from autofit.files import write_atomically
from autofit.hardware.hardware import Device, card_of, choose_device, gpus, slices_fault
from autofit.hardware.nvml import why_none
from autofit.recipe.keys import divisors
from autofit.recipe.launch import Launch, split
from autofit.recipe.launching import RolloutServer, needs_server
from autofit.recipe.recipe import tuned_yaml

_NAMES_FILES = re.compile(r"dataset|data_files|data_dir|model_name_or_path|reward|teacher|tokenizer|chat_template_path")
_IS_A_PATH = re.compile(r"(/|\./|\.\./|~/).*|.*\.(jsonl?|csv|tsv|parquet|arrow|txt|ya?ml|jinja)")
_MODULE = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)+")


def working_folder(searched_from: Path, studies: Path, values: Mapping[str, object]) -> Path:
    """The folder that a full run works in: the search's, or where that is gone the one that has most of the recipe.

    Looked at are the folder beside the studies and the working directory.
    """
    if searched_from.is_dir():
        return searched_from
    places = (studies.absolute().parent, Path.cwd())
    return max(places, key=lambda place: sum(_is_there(key, text, place) for key, text in _named(values)))


def check_found(values: Mapping[str, object], place: Path, *, searched_from: Path) -> None:
    """Raise ConfigError for data, a model or a reward module of the recipe that is missing when seen from `place`."""
    lost = missing(values, place)
    if not lost:
        return
    gone = "" if place == searched_from else f" (the search's folder {searched_from} is gone)"
    raise ConfigError(
        f"the recipe needs {', '.join(lost)}, not found from {place}{gone}; put it back there, or run `autofit search` "
        f"again with paths that are there"
    )


def missing(values: Mapping[str, object], place: Path) -> list[str]:
    """The missing files and modules that the recipe names, seen from `place`: `data.jsonl (key)`."""
    lost = [(key, text) for key, text in _named(values) if _must_be_there(key, text)]
    return [f"{text} ({key})" for key, text in lost if not _is_there(key, text, place)]


def _named(values: Mapping[str, object]) -> list[tuple[str, str]]:
    """(key, text) of all that may name a file or a module."""
    found = ((key, text) for key, value in values.items() if _NAMES_FILES.search(key) for text in texts_in(value))
    return [*dict.fromkeys(found)]


def _must_be_there(key: str, text: str) -> bool:
    """True if `text` can only be a file or a module; `data` may also be a dataset of the Hub."""
    path = _IS_A_PATH.fullmatch(text) and "://" not in text and "*" not in text
    return bool(path) or _module(key, text) is not None


def _is_there(key: str, text: str, place: Path) -> bool:
    module = _module(key, text)
    if module is not None and not _IS_A_PATH.fullmatch(text):
        return importlib.machinery.PathFinder.find_spec(module, [str(place), *filter(None, sys.path)]) is not None
    try:
        return bool(text) and (place / Path(text).expanduser()).exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False


def _module(key: str, text: str) -> str | None:
    """The outermost package of a reward function's dotted path."""
    found = _MODULE.fullmatch(text) if "reward_func" in key else None
    return None if found is None else found[1]


def texts_in(value: object, *, without: Callable[[str], object] = lambda key: None) -> Iterator[str]:
    """Every text inside `value`, except those below keys for which `without` is true."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        kept = value if isinstance(value, list) else [one for key, one in value.items() if not without(str(key))]
        for inner in kept:
            yield from texts_in(inner, without=without)


_LONGEST_SIGNAL_S = 600.0


def training_device(
    studied: Device, asked: str, *, begun: Mapping[str, object] | None = None, executor: Executor = LOCAL
) -> Device:
    """`cpu` or `cuda`: the requested device, the one the run has `begun` on, or that of the study, `studied`.

    Raises ConfigError if the study is of a card that this machine lacks and no device was requested. On Slurm
    the job looks at the cards of its nodes.
    """
    if executor.is_cluster and "cuda" in (asked, studied) and asked != "cpu":
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


_SAY_WHERE = (
    f"say where the run trains with {option('device', 'cpu')} or {option('device', 'cuda')}, or write its YAML only "
    f"with {option('write-only')}"
)


def machines_of(launch: Launch, executor: Executor) -> int:
    """The machines on which `launch` trains with `executor`. Raises ConfigError if its ranks fail to divide so.

    Its ranks stay as many as they are, and so does the effective batch.
    """
    if not executor.is_cluster or executor.nodes is None or executor.nodes == launch.machines:
        return launch.machines
    asked = executor.nodes
    if launch.machines > 1:
        raise ConfigError(
            f"the recipe trains on {launch.machines} machines (num_machines), and {option('nodes')} is {asked}; leave "
            "it out"
        )
    if launch.ranks % asked:
        works = ", ".join(str(n) for n in sorted(divisors(launch.ranks)))
        raise ConfigError(
            f"the {launch.ranks} rank(s) of the run cannot be divided by {option('nodes')} {asked}; give {works}, or "
            f"search on a multiple of {asked} ranks ({option('num_processes')})"
        )
    return asked


def check_ranks(launch: Launch, device: Device, executor: Executor = LOCAL) -> None:
    """Raise ConfigError for a launch whose ranks `device` of this machine, or of Slurm's, is unable to start."""
    write = f"write its files with {option('write-only')}, and start it with the command that they name"
    if launch.machines > 1 and not executor.is_cluster:
        raise ConfigError(
            f"the run trains on {launch.machines} machines, and autofit starts it on one; give "
            f"{option('executor', 'slurm')}, or {write}"
        )
    if device == "cpu" and launch.sharding not in ("ddp", "fsdp2"):
        raise ConfigError(f"ranks on the CPU train with ddp or fsdp2, and the run has {launch.sharding}; {write}")
    if device != "cuda" or executor.is_cluster:
        return
    if launch.cards > len(gpus()):
        raise ConfigError(f"the run trains on {launch.cards} cards, and this machine has {len(gpus())}; {write}")
    if fault := slices_fault(gpus(), launch.cards):
        raise ConfigError(f"the run trains on {launch.cards} cards, and on this machine {fault}; {write}")


def server_of(
    resolved: Mapping[str, object], values: Mapping[str, object], device: Device, executor: Executor, *,
    say: Callable[[str], None] = lambda _: None,
) -> RolloutServer | None:  # fmt: skip
    """The vLLM server that the job of the run starts, and where; None if the recipe has none, or the user starts it.

    On this machine a recipe says that it has cards for its server (`launch.server_ranks`). Raises ConfigError for one
    that cannot be started.
    """
    launch = Launch.of(values)
    if not needs_server(resolved, values) or not (executor.is_cluster or (device == "cuda" and launch.server_ranks)):
        return None
    server = RolloutServer.of(values)
    cards = f"{server.cards} card{'s' if server.cards > 1 else ''}"
    place = f"{cards} of this machine"
    if executor.is_cluster:
        on = f" with {cards}" if device == "cuda" else ""
        place = f"a node of its own{on}, so the job asks for {launch.machines + 1} nodes"
    say(f"its vLLM server gets {place}; it logs to server.log in the folder of the run")
    return server


def for_slurm(executor: Executor, launch: Launch, device: Device, server: RolloutServer | None = None) -> Executor:
    """`executor` with the run's needs that the user left open: its nodes, and a card for each rank.

    A server has a node of its own. Slurm gives all nodes of a job as many cards as the one that needs most.
    """
    options = ("gres", "gpus", "gpus-per-task", "gpus-per-node")
    given = executor.gpus_per_node or any(key in executor.slurm for key in options)
    needed = max(launch.ranks // launch.machines, 0 if server is None else server.cards)
    cards = executor.gpus_per_node if given or device != "cuda" else str(needed)
    return replace(executor, nodes=launch.machines + (server is not None), gpus_per_node=cards)


def signal_s(executor: Executor) -> int:
    """Seconds before the time limit at which the run is told to save: a step and a checkpoint must fit."""
    return int(min(_LONGEST_SIGNAL_S, max(60, (executor.time_s or math.inf) / 10)))


def _given(asked: str) -> Device:
    if asked == "cuda" and not gpus():
        raise ConfigError(
            f"{option('device', 'cuda')} needs a CUDA card, but {why_none()}; give {option('device', 'cpu')}, or run "
            "it on a machine with a card"
        )
    return choose_device(asked)


def _of_simulated(name: str) -> Device:
    if any(card is not None and card.name == name for card, _ in (card_of(gpu.name) for gpu in gpus())):
        return "cuda"
    found = ", ".join(sorted({gpu.name for gpu in gpus()}))
    here = f"this machine has another card ({found})" if found else "this machine has no CUDA card"
    raise ConfigError(f"the study simulated an {gpu_spec(name).full_name}, and {here}; {_SAY_WHERE}")


# -- the files of a tuned recipe, as TRL and accelerate take them -----------------------------------------------------

_ACCELERATE = ".accelerate.yaml"  # after the stem of the YAML
_EACH_MACHINE = "# on each machine add: --machine_rank NUMBER_FROM_0 --main_process_ip ADDRESS_OF_THE_FIRST\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A tuned recipe. `values` may have a `launch`, which goes to the accelerate config instead of the trainer."""

    values: Mapping[str, object]
    comment: str
    command: str | None = None  # what runs the YAML without autofit, up to the file's name
    remark: str = ""  # work left to the user before it runs

    @property
    def launch(self) -> Launch:
        """The ranks that train it."""
        return split(self.values)[0]

    def write(self, path: Path, *, accelerate: Path | None = None) -> tuple[Path, ...]:
        """Write the YAML to `path`, and for ranks the accelerate config to `accelerate`. Returns the written paths.

        The latter's default is beside the YAML, as its stem and `.accelerate.yaml`.
        """
        launch, values = split(self.values)
        values = {**values, **launch.flags}
        if launch.is_plain:
            write_atomically(path, tuned_yaml(values, {}, comment=self._comment("THIS_FILE")))
            return (path,)
        beside = path.with_name(f"{path.stem}{_ACCELERATE}") if accelerate is None else accelerate
        config = yaml.safe_dump(launch.to_accelerate(), sort_keys=False, allow_unicode=True)
        note = _EACH_MACHINE if launch.machines > 1 else ""
        write_atomically(beside, f"# autofit: {launch.words}\n{note}{config}")
        comment = self._comment(f"{path.name} --accelerate_config {beside.name}")
        write_atomically(path, tuned_yaml(values, {}, comment=comment))
        return (path, beside)

    def command_line(self, written: Sequence[Path]) -> str | None:
        """The command that trains the files that `write` returned, if the trainer has one."""
        if self.command is None:
            return None
        path, *others = written
        return f"{self.command} {path}" + (f" --accelerate_config {others[0]}" if others else "")

    def _comment(self, files: str) -> str:
        lines = [self.comment, "" if self.command is None else f"run it with: {self.command} {files}", self.remark]
        return "\n".join(line for line in lines if line)
