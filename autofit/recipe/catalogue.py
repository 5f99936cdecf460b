"""Architectures known without a download: facts from published config.json files, by model name. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import cast

import yaml

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's shape: the keys of its config.json that decide its tensors, and its published parameter count."""

    name: str
    config: Config
    parameters: int


def names() -> tuple[str, ...]:
    """The names of all models in the catalogue, as on the hub."""
    return tuple(_all())


def architecture(name: str) -> Architecture | None:
    """The entry of the model `name`, in any case, or None."""
    found = _all()
    return found.get(name) or {key.lower(): value for key, value in found.items()}.get(name.lower())


@cache
def _all() -> dict[str, Architecture]:
    text = resources.files("autofit.recipe").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (a SafeLoader)
    found: dict[str, Architecture] = {}
    for name, entry in content["models"].items():
        shape = {**content["families"][entry["family"]], **entry["config"]}
        for variant, changes in {name: {}, **entry.get("also", {})}.items():
            config = cast(Config, {**shape, **changes})
            found[variant] = Architecture(name=variant, config=config, parameters=int(entry["parameters"]))
    return found
