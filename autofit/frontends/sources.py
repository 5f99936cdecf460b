"""What a recipe may be given as, another tool's file among it. No torch here."""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from autofit.frontends import words
from autofit.frontends.command import script_text
from autofit.frontends.foreign import Foreign
from autofit.frontends.reading import SCRIPTS, read_script, read_values
from autofit.frontends.writing import can_write
from autofit.recipe.source import Source, Stated, read_source


def source_of(given: Stated | None, *, name: str | None = None, ranks: int | None = None) -> Source:
    """The recipe that was `given`; of another tool's file, or of its keys, the recipe that trains as that tool would.

    `ranks` are those of the training, where they are told beside the file. Raises ConfigError.
    """
    if isinstance(given, str | os.PathLike) and Path(given).suffix in SCRIPTS:
        path = Path(given)
        text = script_text(path)
        script = read_script(path, text=text, ranks=ranks)
        return _source(script, name or path.stem, f"the recipe {path}", _origin(script, path, text, ranks))
    source = read_source(given, name=name)
    if source.trainer is not None or not isinstance(given, str | os.PathLike | Mapping):
        return source
    path = Path.cwd() / "recipe" if isinstance(given, Mapping) else Path(given)
    foreign = read_values(source.values, path, ranks=ranks)
    if foreign is None:
        return source
    text = yaml.safe_dump(dict(source.values)) if isinstance(given, Mapping) else script_text(path)
    return _source(foreign, source.name, source.what, _origin(foreign, path, text, ranks))


def _origin(foreign: Foreign, path: Path, text: str, ranks: int | None) -> dict[str, object]:
    if not can_write(foreign.tool):
        return {}
    return {"tool": foreign.tool, "path": str(path.resolve()), "text": text, "ranks": ranks}


def _source(foreign: Foreign, name: str, what: str, origin: Mapping[str, object]) -> Source:
    launch = dict(foreign.launch)
    if foreign.ranks is not None:
        launch["num_processes"] = foreign.ranks
    return Source(
        values=foreign.values, name=name, what=what, prompt_tokens=foreign.prompt_tokens, trainer=foreign.trainer,
        launch=launch, foreign=origin, notes=(f"a file of {foreign.tool}: {words.summary(foreign)}", *foreign.notes),
    )  # fmt: skip
