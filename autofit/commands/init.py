"""`autofit init`: a commented recipe to start from."""

import argparse
from pathlib import Path

from autofit.commands.common import DONE, say, show_line
from autofit.errors import ConfigError
from autofit.files import write_atomically
from autofit.recipe.starting import recipe_text, trainer_of_data


def init(options: argparse.Namespace) -> int:
    trainer = options.trainer or "grpo"
    if options.trainer is None and options.dataset is not None and Path(options.dataset).suffix:
        trainer = trainer_of_data(options.dataset)
        say(f"{trainer}: by the columns of {options.dataset}")
    path = options.out or Path(f"{trainer}.yaml")
    if path.exists():
        raise ConfigError(f"{path} exists, and init does not overwrite it; give another name with --out FILE")
    write_atomically(path, recipe_text(trainer, model=options.model, dataset=options.dataset))
    show_line(f"wrote {path}; next: autofit check {path} --gpu rtx4090, then autofit search {path} --target-vram 24GB")
    return DONE
