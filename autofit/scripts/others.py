"""Shapes of models that scripts load besides those of the catalogue, by name; facts of their config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The keys of a model's config.json that differ from its type's defaults, and its published parameter count."""

    config: Mapping[str, object]
    parameters: int


def shape(name: str) -> Shape | None:
    """The shape of the model `name`, in any case, or None."""
    return shapes().get(name.lower())


@cache
def shapes() -> dict[str, Shape]:
    """{name in small letters: shape} of all."""
    text = resources.files("autofit.scripts").joinpath("others.yaml").read_text(encoding="utf-8")
    found: dict[str, Shape] = {}
    for name, entry in yaml.safe_load(text).items():
        own = Shape(config=entry["config"], parameters=entry["parameters"])
        found |= {each.lower(): own for each in (name, *entry.get("also", ()))}
    return found
