"""A recipe with the TRL, transformers, peft and accelerate of another environment: `estimate --libraries ENV`.

Its `trl.scripts` run in a process of this Python, on autofit's torch, which the simulated card is made for. TRL's
family comes from the environment, and the rest from here, where it is installed. No torch here.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import Distribution, distributions, version
from pathlib import Path
from typing import Any

from autofit.errors import ConfigError, EnvironmentFault, option, printable, quoted
from autofit.files import write_json
from autofit.recipe.as_of import UPGRADE
from autofit.recipe.launch import is_on
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Recipe
from autofit.units import format_bytes

TOLD = ("trl", "transformers", "peft", "accelerate")
_FAMILY = (*TOLD, "datasets", "tokenizers", "huggingface-hub", "liger-kernel")
_OURS = ("torch", "bitsandbytes", "triton")  # simulated as these versions have them
_START_S = 60.0
_CHILD = "autofit.scripts.their_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakOfPhase:
    """The peaks of a phase of a step."""

    name: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """Memory of the recipe with the installed libraries."""

    trl: str
    device_used_bytes: int | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """Memory of a recipe with other libraries."""

    environment: str
    trainer: str
    versions: Mapping[str, str]  # of TOLD that are there, and of torch: the one that ran
    their_torch: str | None
    phases: tuple[PeakOfPhase, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    least_capacity_bytes: int | None
    fits: bool
    verdict: str
    step_s: float | None
    longest_tokens: int
    unknown_keys: tuple[str, ...]  # of the recipe, which their TRL does not know
    renamed_keys: tuple[str, ...]  # "dtype as torch_dtype"
    notes: tuple[str, ...]

    def lines(self, today: "Today") -> list[str]:
        """Their memory beside that of `today`'s libraries, the peaks by phase, and notes on them."""
        other = ", ".join(f"{name} {self.versions[name]}" for name in TOLD[1:] if name in self.versions)
        rows = ", ".join(f"{phase.name} {format_bytes(phase.peak_allocated_bytes)}" for phase in self.phases)
        torch = self.versions["torch"].partition("+")[0]
        theirs = f", not {self.their_torch.partition('+')[0]} of the environment" if self.their_torch else ""
        found = [
            f"with your trl {self.versions['trl']} ({other}): {format_bytes(self.device_used_bytes)} device-used; with "
            f"today's {today.trl}: {_size(today.device_used_bytes)}",
            f"  it {self.verdict}" + (f"; upgrading alone mends it: {UPGRADE}" if today.fits and not self.fits else ""),
            f"  peak allocated {format_bytes(self.peak_allocated_bytes)} ({rows}), reserved "
            f"{format_bytes(self.peak_reserved_bytes)}",
            f"  as `trl {self.trainer}` of that version trains the recipe, on samples of {self.longest_tokens:,} "
            f"tokens and on torch {torch}, which is simulated{theirs}",
        ]
        if self.renamed_keys:
            found.append(f"  in its keys: {', '.join(self.renamed_keys)}")
        if self.unknown_keys:
            found.append(f"  keys that it does not know, left out: {', '.join(self.unknown_keys)}")
        return [*found, *(f"  note: {note}" for note in self.notes)]

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {name: list(getattr(self, name)) for name in ("unknown_keys", "renamed_keys", "notes")}


class Libraries:
    """The packages of the environment at `path`: a folder of one, its site-packages, or its python.

    Raises ConfigError where there is none, or no TRL in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folders = list(_folders(path))
        self._found: dict[str, Distribution] = {}
        for each in distributions(path=[str(folder) for folder in folders]):
            self._found.setdefault(_plain(each.metadata["Name"] or ""), each)
        if "trl" not in self._found:
            raise ConfigError(
                f"{option('libraries')} must name an environment with TRL in it, and {quoted(str(path), 200)} has "
                f"none; install one there, such as by pip install trl==0.19.1"
            )
        if not self._files(self._found["trl"]):
            raise ConfigError(f"{option('libraries')}: TRL is installed in {quoted(str(path), 200)} as an editable "
                              "checkout; install it there as a package (pip install CHECKOUT)")  # fmt: skip

    def __str__(self) -> str:
        return f"the trl {self.version('trl')} of {self.path}"

    def version(self, name: str) -> str | None:
        """The version of a package there, if it has it."""
        found = self._found.get(name)
        return None if found is None else found.version

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """The names of the packages taken: TRL's family, and those of its dependencies that are missing here."""
        here = {_plain(each.metadata["Name"] or "") for each in distributions()}
        left = here.difference(_FAMILY).union(_OURS)
        return tuple(name for name in self._needed() if name not in left and self._loads(name))

    def link(self, folder: Path) -> None:
        """Make `folder` hold links to the packages taken, to stand before this environment's own packages."""
        for name in self.taken:
            for path in self._files(self._found[name]):
                target = folder / path.name
                if not target.exists():
                    target.symlink_to(path.resolve())

    def _files(self, found: Distribution) -> list[Path]:
        """The modules and folders of a distribution, its metadata among them, below its site-packages."""
        tops = dict.fromkeys(path.parts[0] for path in found.files or ())
        places = [Path(str(found.locate_file(top))) for top in tops if top not in ("..", "__pycache__")]
        packages = [path for path in places if path.suffix != ".pth" and path.exists()]
        return packages if any(path.suffix not in (".dist-info", ".egg-info") for path in packages) else []

    def _needed(self) -> list[str]:
        """The names of TRL's family and of all that it needs there."""
        waiting, seen = list(_FAMILY), dict[str, None]()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self._found or name in _OURS:
                continue
            seen[name] = None
            for line in self._found[name].requires or ():
                if "extra ==" not in line:
                    waiting.append(_plain(re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0]))
        return list(seen)

    def _loads(self, name: str) -> bool:
        """True if any Python loads a package that was built for theirs: by the tags of its wheel."""
        tags = re.findall(r"^Tag: \S+-(\S+)-(\S+)$", self._found[name].read_text("WHEEL") or "", re.MULTILINE)
        return bool(self._files(self._found[name])) and any(abi == "abi3" or on == "any" for abi, on in tags)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _folders(path: Path) -> Iterator[Path]:
    """The folders of packages of the environment at `path`."""
    if path.is_dir():
        inner = sorted(path.glob("lib*/python3*/site-packages"))
        if not inner and not any(path.glob("*.dist-info")):
            raise ConfigError(
                f"{option('libraries')} must name a Python environment (a folder with lib/python3.*/site-packages), or "
                f"its python; got the folder {quoted(str(path), 200)}"
            )
        yield from inner or [path]
        return
    if not path.exists():
        raise ConfigError(f"{option('libraries')}: there is no {quoted(str(path), 200)}; name a Python environment's "
                          "folder, or its python")  # fmt: skip
    asked = [str(path), "-c", "import json, site, sys; print(json.dumps(sys.path))"]
    try:
        run = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, check=True)
        yield from [Path(each) for each in json.loads(run.stdout) if each and Path(each).is_dir()]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{option('libraries')}: {quoted(str(path), 200)} is no python that starts "
            f"({printable(' '.join(str(error).split()), 200)}); name the folder of its environment"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRecipe:
    """A recipe of one of TRL's trainers, and the card."""

    trainer: str  # sft, grpo, ...
    values: Mapping[str, object]  # as the recipe has them
    tokens: int  # of the longest sample; of a trainer that generates, of the longest prompt
    gpu: str
    target_bytes: int


def asked_of(recipe: Recipe, *, gpu: str, target_bytes: int) -> AskedRecipe:
    """The recipe as those libraries get it. Raises ConfigError for one outside TRL's own scripts."""
    name = recipe.trainer_name or recipe.trainer
    why = None
    if not profile(name).of_trl or recipe.foreign:
        why = "takes a recipe of TRL, as `trl NAME --config` does, and this is another tool's"
    elif recipe.launch.cards > 1:
        why = f"takes a recipe on one card, and this one is on {recipe.launch.cards}: give {option('num-processes')} 1"
    elif is_on(recipe.resolved.get("use_vllm")):
        why = f"simulates no vLLM of other versions: give {option('set', 'use_vllm=false')}"
    tokens = recipe.longest_prompt_tokens if recipe.generates else recipe.longest_sample_tokens
    if why is not None or tokens is None:
        raise ConfigError(
            f"{option('libraries')} {why or 'needs the length of the longest sample, which is not known'}"
        )
    return AskedRecipe(trainer=name, values=recipe.stated, tokens=tokens, gpu=gpu, target_bytes=target_bytes)


def run_with(libraries: Libraries, asked: AskedRecipe, folder: Path, *, deadline_s: float) -> Theirs:
    """Memory of the recipe with those libraries. Raises ConfigError for keys and values that they refuse."""
    links = folder / "site-packages"  # by which name dill knows that a module is no code of the user's
    request, answer = folder / "asked.json", folder / "answer.json"
    links.mkdir(parents=True)
    libraries.link(links)
    write_json(request, {**asdict(asked), "values": dict(asked.values), "answer": str(answer)})
    words = [sys.executable, "-P", "-m", _CHILD, str(request)]
    environment = _environment(links)
    with (folder / "log").open("wb") as log:
        try:
            run = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                 timeout=deadline_s or None, check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"the simulation with the libraries of {libraries.path} took more than {option('deadline')} allows"
            ) from error
    try:
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        last = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise EnvironmentFault(
            f"the simulation with {libraries} ended with the exit code {run.returncode}: "
            f"{printable(''.join(last), 300)}"
        ) from error
    if "error" in found:
        raise ConfigError(f"with {libraries}: {found['error']}")
    figures = found["figures"]
    versions = {name: known for name in TOLD if (known := libraries.version(name)) is not None}
    return Theirs(
        environment=str(libraries.path), trainer=asked.trainer, versions=versions | {"torch": version("torch")},
        their_torch=libraries.version("torch"),
        phases=tuple(PeakOfPhase(**phase) for phase in found["phases"]),
        **{name: figures[name] for name in _FIGURES},
        longest_tokens=found["longest_tokens"] or asked.tokens, unknown_keys=tuple(found["unknown"]),
        renamed_keys=tuple(found["renamed"]), notes=tuple(figures["notes"]),
    )  # fmt: skip


_FIGURES = (
    "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "least_capacity_bytes", "fits", "verdict",
    "step_s",
)  # fmt: skip


def _size(nbytes: int | None) -> str:
    return "not known" if nbytes is None else format_bytes(nbytes)


def _environment(links: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(links), *([before] if before else [])])}
