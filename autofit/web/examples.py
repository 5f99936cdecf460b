"""The questions that the page offers to begin with."""

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from autofit.web.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question, and the words of its button."""

    words: str
    question: Question


@cache
def examples() -> tuple[Example, ...]:
    """The examples, in the order of the page."""
    content = yaml.safe_load((resources.files("autofit.web") / "examples.yaml").read_text(encoding="utf-8"))
    return tuple(Example(words=one.pop("words"), question=Question.from_json(one)) for one in content)
