"""Public threads as recipes: what a user ran, on which card, what went wrong, and what was accepted as its fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import yaml

from autofit.errors import ConfigError

HERE = Path(__file__).parent
SEEDS = HERE.parent / "seeds"
NEEDS = ("A", "B", "C", "D", "E")
SEED = "seed"  # no thread: a field note
CLAIMS = ("fits", "rollout_share_above", "device_used_above", "device_used_near", "peak_allocated_near")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread. `recipe` has TRL's keys; `assumed` says what the thread leaves open."""

    name: str
    need: str  # A engine, B rollout, C late, D levers, E size; or SEED
    url: str
    date: str
    versions: str
    said: str
    solved_by: str
    assumed: str
    trainer: str
    gpu: str
    prompt_tokens: int
    recipe: Mapping[str, object]
    symptom: Mapping[str, object]  # one of CLAIMS, and its bounds; {} of a seed
    accepted: tuple[Mapping[str, object], ...]  # each of them alone is an accepted fix; () where none is known
    older_library: str | None = None  # why the symptom cannot occur with today's libraries; the thread does not count
    as_of: str | None = None  # its libraries, as `--as-of` takes them
    target_vram: str | None = None  # where the card is not in the catalogue, or smaller than the one that stands for it
    ranks: int = 1  # of data parallel training without sharding; each has such a card

    def __post_init__(self) -> None:
        """Raise ConfigError for a thread that cannot be judged."""
        if self.need == SEED:
            return
        if self.need not in NEEDS:
            raise ConfigError(f"{self.name}: need must be one of {', '.join(NEEDS)}; got {self.need!r}")
        if len(self.symptom.keys() & set(CLAIMS)) != 1:
            raise ConfigError(f"{self.name}: symptom must be one of {', '.join(CLAIMS)}; got {dict(self.symptom)}")

    @property
    def cards(self) -> str:
        """The card, and how many train together, as `--gpu` takes them."""
        return self.gpu if self.ranks == 1 else f"{self.ranks}x{self.gpu}"

    @property
    def counts(self) -> bool:
        """Whether the symptom can occur with today's libraries."""
        return self.older_library is None


def read_threads(folder: Path = HERE / "recipes") -> tuple[Thread, ...]:
    """Every thread in `folder`, by need and name. Raises ConfigError for one that cannot be judged."""
    entries = [entry for path in sorted(folder.glob("*.yaml")) for entry in yaml.safe_load(path.read_text("utf-8"))]
    threads = [_thread(entry) for entry in entries]
    names = [thread.name for thread in threads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"each thread needs a name of its own; given twice: {', '.join(twice)}")
    return tuple(sorted(threads, key=lambda thread: (thread.need, thread.name)))


def read_seeds(folder: Path = SEEDS) -> tuple[Thread, ...]:
    """The field notes' recipes on one card, which are timed only: no symptom and no fix is asked of them."""
    seeds = yaml.safe_load((folder / "seeds.yaml").read_text("utf-8"))
    return tuple(_seed(folder, name, seed) for name, seed in seeds.items() if "ranks" not in seed)


def _seed(folder: Path, name: str, seed: Mapping[str, object]) -> Thread:
    recipe = yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8"))
    model = folder / recipe["model_name_or_path"]
    return Thread(
        name=name, need=SEED, url="", date="", versions="", said=str(seed["says"]), solved_by="", assumed="",
        trainer=str(seed.get("trainer", "grpo")), gpu=str(seed["card"]),
        target_vram=cast("str | None", seed.get("target")), prompt_tokens=cast(int, seed["tokens"]), symptom={},
        accepted=(),
        recipe={**recipe, **({"model_name_or_path": str(model)} if model.is_dir() else {})},
    )  # fmt: skip


def _thread(entry: Mapping[str, object]) -> Thread:
    wrong = sorted(entry.keys() - {field.name for field in fields(Thread)})
    if wrong:
        raise ConfigError(f"{entry.get('name')}: a thread has no {', '.join(wrong)}")
    accepted = cast("list[Mapping[str, object]]", entry["accepted"])
    return Thread(**cast("dict[str, object]", {**entry, "accepted": tuple(accepted)}))  # type: ignore[arg-type]
