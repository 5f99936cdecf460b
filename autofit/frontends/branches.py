"""The conditions and loops around a statement of a shell script, and the branches that are taken for certain.

A `case` of a word that is known, and an `if` with one comparison of words that are known, choose a branch. A loop over
the script's own arguments is not run: the script is read as it runs without any. Words with marks of what is not known
are not printable.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
UNSURE = "\0"  # in a word whose value is only known where the script runs
# The number of a script's own arguments and the first of them, as words (UNSURE and the name) and without any argument.
OWN_ARGUMENTS = {f"{UNSURE}#": "0", f"{UNSURE}1": ""}
_LEADING = ("then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup")  # before a statement's own words
_WORDS: Mapping[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip


@dataclass(slots=True)
class _Frame:
    """A condition or a loop. While it is `certain`, exactly one of its branches runs, or none."""

    certain: bool = False
    runs: bool = True  # the branch that is read
    chosen: bool = False  # a branch was
    waits: bool = False  # for the `then` behind its test
    subject: str = ""  # of a case
    patterns: list[str] | None = None  # of the branch of a case that begins; None inside of a branch

    def choose(self, holds: bool | None) -> None:
        """Take the next branch if it `holds` and none did before; None: nobody knows."""
        if holds is None and not self.chosen:
            self.certain, self.runs = False, True
        if self.certain:
            self.runs = bool(holds) and not self.chosen
            self.chosen |= self.runs


class Branches:
    """The conditions and loops that are open, the outermost first."""

    def __init__(self) -> None:
        self._frames: list[_Frame] = []
        self.over_arguments = False  # whether there was a loop over the script's own arguments

    @property
    def certain(self) -> bool:
        """Whether the statement is run once, for certain."""
        return all(frame.certain for frame in self._frames)

    def statement(self, words: Sequence[str], after: str) -> list[str]:
        """The words of a command that may be run, of the statement `words` behind the separators `after`; else []."""
        frame = self._frames[-1] if self._frames else _Frame()
        if frame.waits and (words[0] != "then" or "&" in after or "|" in after):
            frame.certain, frame.runs = False, True  # a test of several commands
        frame.waits = False
        if _is_pattern(frame, words, after):
            return []
        rest = list(words)
        while rest and rest[0] in _LEADING:
            if rest[0] in ("elif", "else"):
                frame.choose(True if rest[0] == "else" else _test(rest[1:]))
                frame.waits = rest[0] == "elif" and frame.certain and frame.runs
            rest.pop(0)
        if not rest or words[0] == "elif" or rest[0] in _CLOSES:
            if rest and rest[0] in _CLOSES:
                del self._frames[-1:]
            return []
        runs = all(each.runs for each in self._frames)
        if rest[0] in _OPENS:
            over = rest[0] == "while" and _is_over_arguments(rest[1:])
            self._frames.append(_Frame(certain=True, runs=False) if over else _opened(rest))
            self.over_arguments |= over
        return rest if runs else []


def _opened(words: Sequence[str]) -> _Frame:
    if words[0] == "if":
        frame = _Frame(certain=True, waits=True)
        frame.choose(_test(words[1:]))
        return frame
    if words[0] != "case" or words[2:3] != ["in"] or not words[1].isprintable():
        return _Frame()
    return _Frame(certain=True, runs=False, subject=words[1], patterns=list(words[3:]))


def _is_over_arguments(words: Sequence[str]) -> bool:
    """Whether a loop ends at once where a script has no arguments: `while [ $# -gt 0 ]`, `[[ -n "$1" ]]`, `getopts`."""
    found = [OWN_ARGUMENTS.get(word, word) for word in words]
    if found[:1] not in (["["], ["[["]):  # `test A`, `(( $# ))`
        found = ["[", *(found[1:] if found[:1] == ["test"] else found), "]"]
    is_left = found[1:-1] in (["0"], ["-n", "0"]) and not OWN_ARGUMENTS.keys().isdisjoint(words)
    return words[:1] == ["getopts"] or is_left or _test(found) is False


def _is_pattern(frame: _Frame, words: Sequence[str], after: str) -> bool:
    """Whether the statement is one of the patterns of a case's branch; where a branch begins, it is chosen or not."""
    if not frame.certain or (frame.patterns is None and ";;" not in after):
        return False
    before, ended, _ = after.rpartition(";;")
    if frame.patterns and ")" in (before if ended else after):
        known = all(pattern.isprintable() for pattern in frame.patterns)
        frame.choose(any(fnmatchcase(frame.subject, each) for each in frame.patterns) if known else None)
        frame.patterns = None
    if ended:
        frame.patterns = []
    if not frame.certain or frame.patterns is None or words[0] == "esac":
        return False
    frame.patterns += words
    return True


def _test(words: Sequence[str]) -> bool | None:
    """What `[ A = B ]` and its like come to; None where that is not known."""
    closing = {"[": "]", "[[": "]]"}.get(words[0] if words else "")
    if closing is None or words[-1] != closing or not all(word.isprintable() for word in words):
        return None
    match list(words[1:-1]):
        case [word]:
            return word != ""
        case ["-z" | "-n" as sign, word]:
            return (word == "") == (sign == "-z")
        case [left, sign, right] if sign in _WORDS and (
            closing == "]" or not set(right) & set("*?[") or (not left and right.strip("*"))  # no pattern but * has ""
        ):
            return _WORDS[sign](left, right)
        case [left, sign, right] if sign in _NUMBERS and left.isdecimal() and right.isdecimal():
            return _NUMBERS[sign](int(left), int(right))
    return None
