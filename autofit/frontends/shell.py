"""The overrides of a shell script that starts verl: `data.train_batch_size=${BATCH:-1024}`. Nothing is run."""

import ast
import operator
import re
from collections.abc import Mapping

from autofit.errors import ConfigError
from autofit.recipe.yaml_file import parse_yaml

_ENTRY = re.compile(r"verl\.trainer\.main_ppo\b")
_OVERRIDE = re.compile(
    r"""(?:^|[\s("'])\+{0,2}([a-z_]+(?:\.[a-z0-9_]+)+)=("[^"\n]*"|'[^'\n]*'|\$\(\([^)]*(?:\)[^)]+)*\)\)|\S*)"""
)
_ASSIGNED = re.compile(r"""^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|\$\(\(.*?\)\)|\S*)""", re.M)
_CHOSEN = re.compile(r"""(?:^|\s)(?:--)?(model_engine|config-name)[=\s]([^\s)]+)""", re.M)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}
_ROUNDS = 8  # of variables in the values of variables


def starts_verl(text: str) -> bool:
    return _ENTRY.search(text) is not None


def overrides(text: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """({dotted key: value} of the last override of each key, the keys whose value is not in the script)."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    known: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(code):
        known[name] = _filled(value.strip("\"'"), known)  # as the shell does it: in the order of the lines
    found: dict[str, object] = {key: _filled(value.strip("\"'"), known) for key, value in _CHOSEN.findall(code)}
    unread: dict[str, None] = {}
    for key, value in _OVERRIDE.findall(code):
        filled = _filled(value.strip("\"'").rstrip("\"')"), known) if "$((" not in value else _filled(value, known)
        found.pop(key, None)
        unread.pop(key, None)
        if "$" in filled or "`" in filled:
            unread[key] = None
            continue
        try:
            found[key] = parse_yaml(filled)
        except ConfigError:
            found[key] = filled
    return found, tuple(unread)


def _filled(value: str, known: Mapping[str, str]) -> str:
    """`value` with the variables that the script sets, or their defaults, and with its sums done."""
    for _ in range(_ROUNDS):
        new = _VARIABLE.sub(lambda m: _variable(m, known), value)
        if new == value:
            break
        value = new
    return _SUM.sub(lambda m: _sum(m, known), value)


def _variable(match: re.Match[str], known: Mapping[str, str]) -> str:
    braced, usual, bare = match.groups()
    return known.get(braced or bare, match[0] if usual is None else usual.strip("\"'"))


def _sum(match: re.Match[str], known: Mapping[str, str]) -> str:
    """The value of `$((a * 2))`; the text itself where it holds more than whole numbers, variables and + - * /."""
    text = re.sub(r"[A-Za-z_]\w*", lambda m: known.get(m[0], m[0]), match[1])
    try:
        return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no sum of whole numbers")
