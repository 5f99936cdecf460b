"""YAML as users write it: a mapping of plain values, read so that no file can hang, crash or flood. No torch here."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import yaml

from autofit.errors import ConfigError, printable, quoted
from autofit.files import regular_bytes

MOST_BYTES = 128 * 1024  # of a file; the largest recipe we know of has 6 KB
_MOST_VALUES = 20_000  # of a file, aliases counted as often as they are used
_MOST_LEVELS = 30
_MOST_DIGITS = 40  # of a number
_TAG = "tag:yaml.org,2002:"
_PLAIN = {"str", "int", "float", "bool", "null", "seq", "map", "merge"}


def read_yaml_mapping(path: Path, *, what: str) -> dict[str, object]:
    """The mapping in the YAML file `path`; `what` names it in the errors ("recipe", "search space").

    Raises ConfigError for what is no regular file of at most 128 KiB, no YAML, or holds anything but plain values
    (text, numbers, true, false, null, lists, mappings).
    """
    if what in ("recipe", "file") and path.suffix in (".py", ".ipynb"):
        name = printable(str(path), 200)
        raise ConfigError(f"{name} is a Python script; on a simulated card: autofit fit-check --gpu NAME {name}")
    try:
        text = _text(path)
    except ConfigError as error:
        raise ConfigError(f"the {what} {printable(str(path), 200)} {error}") from error
    try:
        content = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"the {what} {path}: {error}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", type(None): "empty", str: "text"}.get(type(content), f"a {type(content).__name__}")
        raise ConfigError(f"the {what} {path} must be a YAML mapping (key: value lines); it is {kind}")
    wrong = [key for key in content if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"the {what} {path}: every key must be text; got {quoted(wrong[0])}")
    return cast(dict[str, object], content)


def parse_yaml(text: str) -> object:
    """The plain value that the YAML `text` says. Raises ConfigError, in one line."""
    try:
        return _plain_value(text)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        problem = _one_line(error)
    except RecursionError:
        problem = f"nested too deeply; at most {_MOST_LEVELS} levels"
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:  # PyYAML's own, of a value of no such kind
        problem = f"a value is not what its tag says: {error}"
    raise ConfigError(f"not valid YAML: {printable(problem, 200)}")


def _plain_value(text: str) -> object:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _text(path: Path) -> str:
    """What the file holds. Opened without waiting, so that a pipe or a device is refused and not read."""
    try:
        content, _ = regular_bytes(path, most=MOST_BYTES, what="a YAML file")
        return of_notebook(content.decode("utf-8"))
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError("does not exist; give the path of a YAML file") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"must be UTF-8 text; byte {error.start} is not valid") from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"is no path of a file: {error}") from error


def of_notebook(text: str) -> str:
    """`text` with a notebook's mark on its first line (`%%writefile FILE`) as a comment."""
    return f"# {text}" if text.startswith("%%") else text


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    if "'\\t'" in problem:
        problem = "a tab, where YAML takes spaces only"
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


# -- what a plain value is --------------------------------------------------------------------------------------------


def _check(top: yaml.Node) -> None:
    """Raise ConfigError unless `top` is plain values, not too many, and no key stands twice."""
    for values, (node, levels) in enumerate(_nodes(top), start=1):
        if values > _MOST_VALUES:
            raise ConfigError(f"more than {_MOST_VALUES:,} values, those of aliases (*name) counted at each use")
        if levels > _MOST_LEVELS:
            raise ConfigError(f"nested too deeply, or an alias (*name) inside itself; at most {_MOST_LEVELS} levels")
        _check_one(node)


def _nodes(top: yaml.Node) -> Iterator[tuple[yaml.Node, int]]:
    """Every node below `top` with the number of levels above it, each as often as it is used."""
    left = [(top, 0)]
    while left:
        node, levels = left.pop()
        yield node, levels
        if isinstance(node, yaml.SequenceNode):
            left += [(child, levels + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            left += [(child, levels + 1) for pair in node.value for child in pair]


def _check_one(node: yaml.Node) -> None:
    line = node.start_mark.line + 1
    tag = node.tag.removeprefix(_TAG)
    if tag == "timestamp":
        raise ConfigError(f"line {line}: {printable(str(node.value), 40)} is read as a date; put it in quotes")
    if tag not in _PLAIN or (tag == "seq") != isinstance(node, yaml.SequenceNode):
        raise ConfigError(
            f"line {line}: a value must be text, a number, true, false, null, a list or a mapping; got "
            f"{printable(node.tag.replace(_TAG, '!!'), 60)}"
        )
    if tag in ("int", "float") and len(node.value) > _MOST_DIGITS:
        raise ConfigError(
            f"line {line}: a number may have at most {_MOST_DIGITS} digits; this one has {len(node.value)}"
        )
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, line)


def _check_keys(node: yaml.MappingNode, line: int) -> None:
    keys = [key for key, _ in node.value]
    wrong = next((key for key in keys if not isinstance(key, yaml.ScalarNode)), None)
    if wrong is not None:
        raise ConfigError(f"line {wrong.start_mark.line + 1}: a key must be text, and is a list or a mapping")
    twice = sorted(
        name for name, times in Counter(str(key.value) for key in keys).items() if times > 1 and name != "<<"
    )
    if twice:
        raise ConfigError(
            f"each key may appear only once; given twice: {printable(', '.join(twice), 120)}; remove one of them "
            f"(line {line} and below)"
        )
