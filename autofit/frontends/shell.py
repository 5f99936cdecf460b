"""The overrides of a shell script that starts verl: `data.train_batch_size=${BATCH:-1024}`. Nothing is run.

What the script sets outside of conditions and loops is certain. A value that hangs on a condition, on the environment
or on a command is not, and its key is named instead.
"""

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from autofit.errors import ConfigError
from autofit.recipe.yaml_file import MOST_BYTES, parse_yaml

_ENTRY = re.compile(r"verl\.trainer\.main_ppo\b")
_ARITHMETIC = r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)"
_VALUE = rf"""("[^"\n]*"|'[^'\n]*'|{_ARITHMETIC.replace("((?:", "(?:(?:", 1)}|\$\{{[^}}\n]*\}}|[^\s"')]*)"""
_KEY = r"(model_engine|[a-z_]+(?:\.[a-z0-9_]+)+)="
_OVERRIDE = re.compile(rf"""(?:^|[\s("'])\+{{0,2}}{_KEY}{_VALUE}""")
_CONFIG_NAME = re.compile(rf"--(config-name)[= ]{_VALUE}")
_ASSIGNED = re.compile(
    rf"(?:^|&&|\|\||;|then|else|do|\))\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)={_VALUE}(?=\s|;|\)|$)"
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_SUM = re.compile(_ARITHMETIC)
_OPENS, _CLOSES = re.compile(r"\s*(?:if|case|for|while|until)\b"), re.compile(r"\s*(?:fi|esac|done)\b")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_UNSURE = "$?"  # a value that hangs on a condition
_ROUNDS = 8  # of variables in the values of variables


def script_text(path: Path) -> str:
    """The text of a file. Raises ConfigError for what is no text, or too long to be of a training."""
    try:
        text = path.read_bytes()[: MOST_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error)[:100]}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{path} must have at most {MOST_BYTES // 1024} KiB")
    return text


def starts_verl(text: str) -> bool:
    return _ENTRY.search(text) is not None


def overrides(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """({dotted key: value} of the overrides that are certain, the keys of those that are not)."""
    found, unread, _ = _read(text)
    return found, unread


def likely_overrides(text: str) -> dict[str, object]:
    """The values of overrides that are not certain, as they would be if conditions that set a variable held.

    The first value stands where several conditions set one, None where it comes from a command. An override that itself
    hangs on a condition is left out.
    """
    return _read(text)[2]


def _read(text: str) -> tuple[dict[str, object], tuple[str, ...], dict[str, object]]:
    """(what is certain, the keys of what is not, the likely values of those)."""
    known: dict[str, str] = {}
    likely: dict[str, str] = {}  # of variables, where what is set inside of conditions counts too
    found: dict[str, object] = {}
    perhaps: dict[str, object] = {}
    unread: dict[str, None] = {}
    lines = list(_lines(text))
    for line, conditional in lines:
        for name, value in _ASSIGNED.findall(line):
            filled = _filled(value.strip("\"'"), known)
            sure = not conditional and line.lstrip().removeprefix("export ").startswith(name)
            if sure or not likely.get(name) or "$" in likely[name]:
                likely[name] = _filled(value.strip("\"'"), likely)
            known[name] = filled if sure or known.get(name) == filled else _UNSURE
    for line, conditional in lines:
        for key, value in (*_OVERRIDE.findall(line), *_CONFIG_NAME.findall(line)):
            filled = _filled(value.strip("\"'"), known)
            given: object = None if "$" in filled or "`" in filled else _parsed(filled)
            if given is None or conditional or (key in found and found[key] != given):
                unread[key] = None
            else:
                found[key] = given
            guess = _filled(value.strip("\"'"), likely)
            if not conditional:
                perhaps.setdefault(key, None if "$" in guess or "`" in guess else _parsed(guess))
    certain = {key: value for key, value in found.items() if key not in unread}
    return certain, tuple(unread), {key: perhaps[key] for key in unread if key in perhaps}


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """(a line without its comment, whether it is inside a condition or a loop), continued lines as one."""
    depth = 0
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        depth += _OPENS.match(line) is not None
        yield re.sub(r"\s#[^\"']*$", "", line), depth > 0
        depth -= _CLOSES.match(line) is not None or re.search(r";\s*(?:fi|done|esac)\b", line) is not None


def _parsed(value: str) -> object:
    """The value as YAML has it; hydra's null is None here as well, and counts as not certain."""
    try:
        return parse_yaml(value)
    except ConfigError:
        return value


def _filled(value: str, known: Mapping[str, str]) -> str:
    """`value` with the variables that the script sets, or their defaults, and with its sums done."""
    for _ in range(_ROUNDS):
        new = _VARIABLE.sub(lambda m: _variable(m, known), value)
        if new == value:
            break
        value = new
    return _SUM.sub(lambda m: _sum(m, known), value)


def _variable(match: re.Match[str], known: Mapping[str, str]) -> str:
    """A variable's value; its default where the script sets it to nothing; else the text itself."""
    braced, usual, bare = match.groups()
    value = known.get(braced or bare)
    if usual is not None and value in (None, "", match[0]):
        return usual.strip("\"'")
    return match[0] if value is None or value == match[0] else value


def _sum(match: re.Match[str], known: Mapping[str, str]) -> str:
    """The value of `$((a * 2))`; the text itself where it holds more than whole numbers, variables and + - * /."""
    text = re.sub(r"[A-Za-z_]\w*", lambda m: known.get(m[0], m[0]), match[1])
    try:
        return str(_number(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no sum of whole numbers")
