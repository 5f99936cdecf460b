"""The built-in recipe of a search or an estimate without a recipe argument."""

from importlib import resources
from pathlib import Path

PROMPT_TOKENS = 1024  # baseline.yaml names the source


def baseline_path() -> Path:
    """The packaged recipe, a YAML file like any other."""
    return Path(str(resources.files("autofit.recipe").joinpath("baseline.yaml")))
