"""The recipe that a search or an estimate takes when none is given."""

from importlib import resources
from pathlib import Path

PROMPT_TOKENS = 1024  # baseline.yaml says where it is from


def baseline_path() -> Path:
    """The packaged recipe, a YAML file like any other."""
    return Path(str(resources.files("autofit.recipe").joinpath("baseline.yaml")))
