"""From the arguments of a command to its recipe, device and fork server; and `autofit.explain`, which reads alone.

Imports nothing that only a search needs.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.table import Table

from autofit.api.arguments import named_as_arguments
from autofit.api.events import still_at
from autofit.api.tables import Shown
from autofit.errors import AutofitError, ConfigError, option
from autofit.fakegpu.specs import gpu_spec
from autofit.files import release
from autofit.frontends import writing
from autofit.frontends.draft import Explanation
from autofit.frontends.writing import Changed, on_card
from autofit.hardware.hardware import CardNeeds, Device, card_needs, gpus, has_bfloat16, slices_fault
from autofit.plugin.protocol import MOST_PROMPT_TOKENS
from autofit.plugin.registry import explained, trainer_for
from autofit.probing.fork_server import ForkServer, server_for
from autofit.probing.prepare import prepare
from autofit.recipe.launching import NO_OPTIONS, LaunchOptions
from autofit.recipe.profile import told_by_columns
from autofit.recipe.recipe import Recipe
from autofit.recipe.yaml_file import Source, Stated
from autofit.space.knob import QUANTIZATION, space_knobs
from autofit.units import format_bytes

Given = Stated | Source | Callable[[], Stated]  # a function is called once the other arguments are found to be right


def fork_server(folder: Path) -> ForkServer:
    """A fork server whose log is in `folder`, which is made."""
    try:
        return server_for(folder)
    except FileExistsError as error:
        raise ConfigError(f"{option('dir')} {folder} must be a folder, and is a file") from error


def source_of(given: Given | None, name: str | None = None, launch: LaunchOptions = NO_OPTIONS) -> Source:
    """The recipe as it was given; a function is asked for it, and one that was read before is as it is."""
    if isinstance(given, Source):
        return given
    stated = given() if callable(given) and not isinstance(given, type) else given
    return writing.source_of(cast("Stated | None", stated), name=name, ranks=launch.num_processes)


def suited(
    own: Changed, choose: Callable[[CardNeeds], tuple[Device, int]], *, bfloat16: bool = False
) -> tuple[Changed, Device, int, CardNeeds]:
    """(`own` as it is on its card, the device and the bytes that `choose` gives for its needs, and these needs).

    With `bfloat16` it is known that the card computes so. Raises ConfigError for a card that cannot train it.
    """
    device, nbytes = choose(card_needs({**own.source.values, **own.changes}))
    own = on_card(own, bfloat16=bfloat16 or has_bfloat16(device))
    needs = card_needs({**own.source.values, **own.changes})
    if device.startswith("sim:"):
        needs.check_kernels(device)
    return own, device, nbytes, needs


def read_recipe(
    own: Changed, *, trainer: str | None, device: str, scratch: Path, server: ForkServer,
    prompt_tokens: int | None = None, launch: LaunchOptions = NO_OPTIONS, trains: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Recipe:  # fmt: skip
    """The recipe with its changes; its worst case is in `scratch`, which is dropped on an error.

    A large dataset or model takes a while, of which `say` is called with a word every 20 s.
    Raises ConfigError for what TRL would not take.
    """
    source, changes = own.source, own.changes
    tokens = source.prompt_tokens if prompt_tokens is None else prompt_tokens
    if tokens is not None and tokens > MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"{source.what}: its longest sample must have at most {MOST_PROMPT_TOKENS:,} tokens; got {tokens:,}"
        )
    source = writing.as_long(source, tokens)
    given, asked = {**source.values, **changes}, trainer or source.trainer
    named = trainer_for(given, asked)
    if asked is None and told_by_columns(given):
        note = f"the trainer is {named}, by the columns of {given['dataset_name']}"
        source = replace(source, notes=(*source.notes, note))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        with own.in_its_words(), still_at(f"reading {source.what} with its dataset and model", say):
            return _in_own_keys(prepare(
                source, trainer=named, device=device, folder=scratch, server=server, launch=launch,
                changes=changes, prompt_tokens=tokens, trains=trains,
            ))  # fmt: skip
    except AutofitError:
        drop(scratch)
        raise


def _in_own_keys(recipe: Recipe) -> Recipe:
    """`recipe`; for another tool's file, less the knobs that the tool has no key for."""
    if not recipe.foreign:
        return recipe
    reason = f"{recipe.foreign['tool']} has no key for it"
    lacking = {}
    for knob in space_knobs(recipe):
        head, dot, rest = knob.name.partition(".")
        name = f"{recipe.other_names.get(head, head)}{dot}{rest}"
        values = (True, *(value for value in knob.values if value is not None))
        if not knob.solved and name != QUANTIZATION and not writing.has_key(recipe.foreign, name, values):
            lacking[name] = reason
    return replace(recipe, left_out={**lacking, **recipe.left_out})


def drop(scratch: Path) -> None:
    """Remove `scratch`, and the folder that it is in when that is empty."""
    release(scratch)
    with contextlib.suppress(OSError):
        scratch.parent.rmdir()


def check_cards(recipe: Recipe, device: str) -> None:
    """Refuse a recipe that trains on more cards than the machine has, or on several of which some are slices."""
    cards = recipe.launch.cards
    found = gpus() if device == "cuda" and cards > 1 else ()
    if fault := slices_fault(found, cards):
        raise ConfigError(
            f"the recipe trains on {cards} cards, and on this machine {fault}; give {option('gpus')} 1, which keeps "
            "its effective batch, name whole cards in CUDA_VISIBLE_DEVICES, or turn MIG off (nvidia-smi -mig 0)"
        )
    if found and cards > len(found):
        raise ConfigError(
            f"the recipe trains on {cards} cards, and this machine has {len(found)}; give {option('gpus')} "
            f"{len(found)}, which keeps its effective batch, or {option('gpu')} {cards}xNAME for simulated cards"
        )


def describe_device(device: str, target_bytes: int, cards: int = 1) -> str:
    """Device of the probes and the bytes of each card that they may use, in words."""
    target = format_bytes(target_bytes)
    if not device.startswith("sim:"):
        many = f"{cards} cards, " if cards > 1 and device == "cuda" else ""
        return f"{device}, {many}{target}: measured"
    spec = gpu_spec(device.removeprefix("sim:"))
    many, them = (f"{cards} x ", "each") if cards > 1 else ("", "it")
    whole = format_bytes(spec.capacity_bytes)
    return f"{many}{spec.name} ({spec.full_name}, {whole}) simulated, {target} of {them}: predicted"


def check_prompt_tokens(prompt_tokens: int | None, device: str) -> None:
    """Refuse synthetic prompts that are too long to make, or on a device that trains on real ones."""
    if prompt_tokens is not None and prompt_tokens > MOST_PROMPT_TOKENS:
        raise ConfigError(f"{option('prompt-tokens')} must be at most {MOST_PROMPT_TOKENS:,}; got {prompt_tokens:,}")
    if prompt_tokens is not None and not device.startswith("sim:"):
        raise ConfigError(
            f"{option('prompt-tokens')} is for simulated cards only ({option('gpu', 'NAME')}), and the device is "
            f"{device}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Explained(Shown):
    """Contents of the file, as its tool reads it: `explanation.lines`, `wrong`, `unread` and `notes`."""

    explanation: Explanation

    def parts(self) -> list[Table | str]:
        return [f"{name}: {text}" for name, text in self.explanation.shown()]

    def to_dict(self) -> dict[str, object]:
        return self.explanation.to_json()


def explain(
    file: str | os.PathLike[str], *, changes: Mapping[str, object] | None = None, num_processes: int | None = None,
) -> Explained:  # fmt: skip
    """The training that a file of verl, LLaMA-Factory, Axolotl, ms-swift or open-r1 describes, in under a second.

    `file` is a YAML, a shell script, or a command such as "swift sft --model ...". `changes` are in the tool's own
    keys; `num_processes` ranks (GPUs) count in place of the file's. Reads without torch. Raises ConfigError.
    """
    with named_as_arguments():
        return Explained(explained([os.fspath(file)], changes or {}, ranks=num_processes))
