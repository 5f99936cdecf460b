"""A script's command line for older releases of transformers, whose HfArgumentParser reads it."""

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from transformers import HfArgumentParser
from trl import TrlParser

from autofit.scripts.older import in_words_of_today


@contextmanager
def understood(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which options that are gone are read by their names of today, and two dataclasses may share a field.

    transformers adds fields to TrainingArguments that a script's own dataclass may have had before; both get the value.
    """
    original, reading = HfArgumentParser.__init__, HfArgumentParser.parse_known_args

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **{"conflict_handler": "resolve", **named})

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        found, rest = reading(self, words, namespace)
        instead = _modern(rest, _fields(self), note)
        if instead is not None:
            words = [*_without(words, rest), *instead]
            found, rest = reading(self, words, namespace)
        return _shared(found, self), rest

    file_read = TrlParser.set_defaults_with_config

    def set_defaults_with_config(self: Any, **values: Any) -> Any:
        return file_read(self, **in_words_of_today(values, list(_fields(self)), note))

    with (
        mock.patch.object(TrlParser, "set_defaults_with_config", set_defaults_with_config),
        mock.patch.object(HfArgumentParser, "__init__", __init__),
        mock.patch.object(HfArgumentParser, "parse_known_args", parse_known_args),
    ):
        yield


def _fields(parser: Any) -> Counter[str]:
    """How many of a parser's dataclasses have each field."""
    kinds = parser.dataclass_types
    return Counter(field.name for kind in kinds for field in dataclasses.fields(kind) if field.init)


def _modern(rest: Sequence[str], known: Counter[str], note: Callable[[str], None]) -> list[str] | None:
    """Options of today for the unknown ones in `rest`, with what is not known then either; None: all stay."""
    named: dict[str, object] = {}
    for word in rest:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            named[key] = value or None
        elif named and (last := next(reversed(named))) and named[last] is None:
            named[last] = word
        else:
            return None
    values = {key: _value(value) for key, value in named.items()}
    found = in_words_of_today(values, known, note)
    if found == values:
        return None
    return [f"--{key}={value}" for key, value in found.items()]


def _value(word: object) -> object:
    """What an option of the command line says; one without a word is true."""
    if word is None or str(word).lower() == "true":
        return True
    return False if str(word).lower() == "false" else word


def _without(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """`words` without those in `rest`, which stand there in the same order."""
    left, kept = list(rest), []
    for word in words:
        if left and word == left[0]:
            del left[0]
        else:
            kept.append(word)
    return kept


def _shared(found: argparse.Namespace, parser: Any) -> argparse.Namespace:
    """The namespace `found`, of which each dataclass takes out its fields, and the last one a shared field."""
    times = _fields(parser)

    class Shared(argparse.Namespace):
        def __delattr__(self, name: str) -> None:
            times[name] -= 1
            if not times[name]:
                super().__delattr__(name)

    return Shared(**vars(found))
