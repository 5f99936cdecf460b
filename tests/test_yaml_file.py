"""YAML that users write: plain values are read as they are, all else is one short line, at once."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofit.errors import ConfigError
from autofit.recipe.keys import divisors
from autofit.recipe.yaml_file import parse_yaml, read_yaml_mapping

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_name: 2026-11-21", "line 1: 2026-11-21 is read as a date; put it in quotes"),
        ("a: !!binary aGVsbG8=", "line 1: a value must be text, .* got !!binary"),
        ("a: !!python/object:os.system {}", "got !!python/object:os.system"),
        ("a: !!set {x, y}", "got !!set"),
        ("a: !!float x", "could not convert"),
        ("a: !!int '_'", "not valid YAML"),
        ("a: 1\n\tb: 2", "not valid YAML: a tab, where YAML takes spaces only"),
        ("a: 1\n  b: 2", r"a ':' where no key may stand: the line is indented too far, .* \(line 2, column 4\)"),
        ("a: b: 2", r"or a text with ': ' has no quotes \(line 1, column 5\)"),
        ("a: 1\nb 2\nc: 3", r"a line without the ':' of key: value \(line 2, column 1\)"),
        ("a: 1\nb: 'x\nc: 3", r"a quotation mark without its end \(line 2, column 4\)"),
        ("a: 1\nb: [x\nc: 3", r"got ':' \(line 3, column 2\), within the \[ of line 2"),
        ("a: !!bool maybe", "not valid YAML"),
        ('a: "\\UD008AA9C"', "not valid YAML"),
        ("b: 1\n? [a]\n: 1", "line 2: a key must be text, and is a list or a mapping"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: &a [*a]", "an alias .* inside itself"),
        ("a: " + "1" * 5000, "at most 40 digits; this one has 5000"),
        (BOMB, "more than 20,000 values, those of aliases"),
        ("a: 1\na: 2", "given twice: a"),
        ("\x1b[31m: 1", "unacceptable character"),
        ("- 1", "is a list"),
        ("", "it is empty"),
        ("1: 2", "every key must be text; got 1"),
        ("a: " + "x" * 200_000, "must have at most 128 KiB"),
    ],
)
def test_a_file_of_anything_but_plain_values_is_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_yaml_mapping(path, what="recipe")
    said = str(raised.value).replace(str(path), "")
    assert len(said) <= 300
    assert said.isprintable()


def test_plain_values_are_read_as_they_are_and_a_mapping_can_be_merged_into_another(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("a: &a {x: 1, y: [1.5, true, null, text, '2026-11-21']}\nb: {<<: *a, x: 2}\nc: *a\n")
    first = {"x": 1, "y": [1.5, True, None, "text", "2026-11-21"]}
    assert read_yaml_mapping(path, what="recipe") == {"a": first, "b": {**first, "x": 2}, "c": first}


def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {tmp_path / "pipe": "is a pipe", Path("/dev/zero"): "is a device", tmp_path: "is a folder",
             tmp_path / "gone": "does not exist", Path("a\0b"): "is no path of a file",
             Path("x" * 5000): "File name too long"}  # fmt: skip
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            read_yaml_mapping(path, what="recipe")


PIECES = ["a", "b: ", "- ", "\n", "  ", "&a ", "*a", "<<: ", "? ", ": ", "[", "]", "{", "}", ",", "!!int ", "!!map ",
          "!!null ", "!!bool ", "!!float ", "!!seq ", "!!str ", "'", '"', "|\n", ">\n", "1", "0x", "1e5", ".nan", "=",
          "2026-11-21", "12:30", "---\n", "...\n", "%YAML 1.2\n", "#", "\t", "~", "\\", "\u2028",
          "\ud7ff", "é"]  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.text(max_size=60)))
def test_no_text_makes_anything_but_a_value_or_one_short_line(text: str) -> None:
    said = ""
    try:
        parse_yaml(text)
    except ConfigError as error:
        said = str(error)
    assert len(said) <= 300
    assert said == "" or said.isprintable()


def test_every_divisor_of_a_large_batch_is_found_at_once() -> None:
    assert divisors(12) == {1, 2, 3, 4, 6, 12}
    assert len(divisors(10**12)) == 13 * 13
