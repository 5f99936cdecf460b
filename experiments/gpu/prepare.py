"""prepare: all that a machine without a network needs, from autofit's catalogue."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu.configs import OWN_MODELS, Config, chosen
from gpu.folder import Folder

_ROWS = 64  # of each dataset: enough for the steps of a search


def prepare(folder: Folder, configs: Sequence[Config]) -> None:
    """Write models, data, worst cases and recipes; what is there already stays."""
    with tempfile.TemporaryDirectory() as empty:  # without a cache every model is the catalogue's
        os.environ["HF_HUB_CACHE"] = empty
        for config in configs:
            _model(folder, config)
            _data(folder, config)
            _case(folder, config)
            recipe = folder.values(config) | {"max_steps": 4, "output_dir": "out"}
            folder.recipe(config).parent.mkdir(exist_ok=True)
            folder.recipe(config).write_text(json.dumps(recipe, indent=1))
            print(f"{config.name}: {config.why}", flush=True)


def run(argument: str) -> int:
    """In a child: those that `argument` names."""
    asked = json.loads(argument)
    prepare(Folder(home=Path(asked["home"])), chosen(tiny=asked["tiny"], only=tuple(asked["only"])))
    return 0


def _model(folder: Folder, config: Config) -> None:
    from autofit.trainers.offline import stand_in_model

    home = folder.model(config)
    if (home / "stand_in_model").exists():
        return
    home.mkdir(parents=True, exist_ok=True)
    name = config.model
    if name in OWN_MODELS:
        given = home / "given"
        given.mkdir(exist_ok=True)
        (given / "config.json").write_text(json.dumps(OWN_MODELS[name]))
        name = str(given)
    stand_in_model(name, home)


def _data(folder: Folder, config: Config) -> None:
    from transformers import AutoTokenizer

    from autofit.trainers.offline import made_up_dataset

    home = folder.data(config)
    if home.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(folder.model(config) / "stand_in_model")
    made = Path(made_up_dataset(config.samples, config.tokens, tokenizer, home, text_column=None))
    for path in made.glob("*.jsonl"):
        path.write_text(path.read_text() * _ROWS)


def _case(folder: Folder, config: Config) -> None:
    from autofit.plugin.protocol import Inspection, WorstCase
    from autofit.plugin.registry import load

    path = folder.case(config)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # an earlier one may have been killed here
    # As for a CPU: this machine may have no card, and what is written down does not depend on it.
    load(config.trainer).inspect(folder.values(config), Inspection(device="cpu", worst_case=WorstCase(path=path)))
