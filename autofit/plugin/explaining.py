"""What another tool's file or a command trains, and which of its values the trainer does not take. No torch here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autofit.errors import ConfigError, UnknownKeyError, option, told
from autofit.frontends.draft import Explanation
from autofit.frontends.writing import explained as read
from autofit.plugin.registry import check_source_early
from autofit.recipe.yaml_file import PROMPT_TOKENS, Source

_MODEL = "model_name_or_path"


def explained(words: Sequence[str], changes: Mapping[str, object], *, ranks: int | None = None) -> Explanation:
    """What a file of another tool says, or a command, with `changes` in the tool's own keys.

    `words` are the file's path, a command in one text, or its words. Raises ConfigError for what is of none of the
    tools, and for a change that the tool does not take.
    """
    found, source = read(words, changes, ranks=ranks)
    if source is None:
        return found
    try:
        _check(source)
    except ConfigError as error:
        said = error.marked.removeprefix(f"{source.what}: ")
        if isinstance(error, UnknownKeyError) and any(key in changes for key in error.keys):
            raise ConfigError(f"{option('set')}: {said}") from error
        return replace(found, wrong=(*found.wrong, told(said, str)))
    return found


def _check(source: Source) -> None:
    """Raise ConfigError for keys and values that the trainer does not take: not for what lies on another machine."""
    # in the place of the model a path that is there, of which nothing is known
    values = {**source.values, _MODEL: os.devnull} if source.values.get(_MODEL) else source.values
    check_source_early(
        replace(source, values=values), trainer=None, device="sim:", changes={},
        prompt_tokens=source.prompt_tokens or PROMPT_TOKENS,
    )  # fmt: skip
