"""Sentences on a narrow terminal, with words kept whole."""

import re
import shutil
import textwrap

_COMMANDS = ("   --set ", "   --gpu ", "   then: ")  # what follows is for a shell
_FILE = "   in your file: "  # what follows is for the user's own file
_RUN = "run it with: "  # what follows is a command
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # of a command
_UNIT = re.compile(r"(?<=\d) (?=(?:GB|MB|B|s)\b)")  # the blank before it
_HELD = "\xa0"  # a blank that no line ends with


def wrapped(line: str, width: int, *, label: int = 0) -> list[str]:
    """`line` in lines of at most `width` columns; a word that is longer stays whole.

    Options for a shell come last, on lines of their own, which a shell joins again. With a `label` of so many columns
    the lines after the first stand under what follows it.
    """
    if len(line) <= width:
        return [line]
    if label:
        return _folded(line, width, " " * label)
    indent = line[: len(line) - len(line.lstrip())]
    if _FILE in line:
        said, _, change = line.partition(_FILE)
        return [*wrapped(said, width), *_folded(f"{indent}  {_FILE.strip()} {change}", width, indent + "    ")]
    if _RUN in line:
        said, _, command = line.partition(_RUN)
        return [
            *_folded(said + _RUN.strip(), width, indent + "  "),
            *_joined(_WORD.findall(command), width, indent + "  "),
        ]
    place = next((line.index(mark) for mark in _COMMANDS if mark in line), None)
    if place is None:
        return _folded(line, width, indent + "  ")
    options = line[place:].strip().replace(" --", "\n--").split("\n")
    return [*_folded(line[:place], width, indent + "  "), *_joined(options, width, indent + "  ")]


def _folded(line: str, width: int, indent: str) -> list[str]:
    """`line` in lines of at most `width` columns; a number stays with its unit, and a change is one word."""
    held = _UNIT.sub(_HELD, line).replace(" -> ", f"{_HELD}->{_HELD}")
    wide = max(width, 20)
    found = textwrap.wrap(held, wide, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace(_HELD, " ") for part in found]


def _joined(options: list[str], width: int, indent: str) -> list[str]:
    """Options in lines that end with a backslash, but the last."""
    found = [indent + options[0]]
    for option in options[1:]:
        if len(found[-1]) + len(option) + 3 <= width:
            found[-1] += f" {option}"
        else:
            found[-1] += " \\"
            found.append(indent + option)
    return found


def on_terminal(text: str, *, is_terminal: bool, label: int = 0) -> str:
    """`text` for a terminal of any width; as it is where a program reads it."""
    if not is_terminal:
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.splitlines() for part in wrapped(line, width, label=label))
