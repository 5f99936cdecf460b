"""Commands of a shell script as bash would start them, without running anything. No torch here.

Variables that the script sets, their defaults and sums are filled in. A word that hangs on a condition, on the
environment or on another command is not certain: it holds UNSURE.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

UNSURE = "\0"  # in a word whose value is only known where the script runs
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"\w+|[@*#?$!]")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until", "select"), ("fi", "esac", "done")
_SEPARATORS = ";&|\n"
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Command:
    """Words of a command, the variables that it sees, and whether a condition or a loop decides if it is started."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    conditional: bool = False
    start: int = 0  # of its statement in the text, and where that ends
    end: int = 0


def commands(text: str) -> Iterator[Command]:
    """The commands of a script, in their order."""
    known: dict[str, str] = {}
    depth = 0
    scanner = _Scanner(text, known)
    for words in scanner.statements():
        start, end = scanner.start, scanner.end
        while words and words[0] in ("then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup"):
            words = words[1:]
        if not words:
            continue
        if words[0] in _OPENS:
            depth += 1
        elif words[0] in _CLOSES:
            depth = max(0, depth - 1)
            continue
        exported = words[1:] if words[0] in ("export", "declare", "local", "readonly") else words
        own: dict[str, str] = {}
        rest = list(exported)
        while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
            own[found[1]] = found[2] if depth == 0 else UNSURE
            rest.pop(0)
        if not rest or exported is not words:
            known |= own
        elif rest[0] == "env":
            yield Command(tuple(rest[1:]), {**known, **own}, depth > 0, start, end)
        else:
            yield Command(tuple(rest), {**known, **own}, depth > 0, start, end)


class _Scanner:
    """Splits a script into statements of words, with quotes, continued lines, comments and variables resolved."""

    def __init__(self, text: str, known: Mapping[str, str], level: int = 0) -> None:
        self.text, self.known, self.at, self.level = text, known, 0, level
        self.start, self.end = 0, 0  # of the statement that was yielded last

    def statements(self) -> Iterator[list[str]]:
        words: list[str] = []
        word: str | None = None
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                if self.text.startswith("\r\n", self.at + 1):
                    self.at += 1
                elif self.text[self.at + 1 : self.at + 2] != "\n":
                    word = (word or "") + self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif char == "'":
                end = self._end_of("'")
                word = (word or "") + self.text[self.at + 1 : end]
                self.at = end + 1
            elif char == '"':
                self.at += 1
                word = (word or "") + self._double_quoted()
            elif char in "$`":
                word = (word or "") + self._expanded()
            elif char == "#" and word is None:
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char in _SEPARATORS or char.isspace() or char in "<>()":
                if word is not None:
                    words.append(word)
                    word = None
                if char in "<>":
                    words.append(char)
                if char in _SEPARATORS and words:
                    self.end = self.at
                    yield _without_redirections(words)
                    words = []
                self.at += 1
                if char in _SEPARATORS and not words:
                    self.start = self.at
            else:
                word = (word or "") + char
                self.at += 1
        if word is not None:
            words.append(word)
        self.end = len(self.text)
        if words:
            yield _without_redirections(words)

    def _end_of(self, mark: str) -> int:
        end = self.text.find(mark, self.at + 1)
        return len(self.text) if end < 0 else end

    def _double_quoted(self) -> str:
        found = ""
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                found += self.text[self.at + 1].strip("\n")
                self.at += 2
            elif char in "$`":
                found += self._expanded()
            else:
                found += char
                self.at += 1
        self.at += 1
        return found

    def _expanded(self) -> str:
        """What `$...` or backquotes at this place stand for."""
        text, start = self.text, self.at
        if text[start] == "`":
            end = self._end_of("`")
            self.at = end + 1
            return self._of_command(text[start + 1 : end])
        if text.startswith("$((", start):
            end = text.find("))", start)
            self.at = len(text) if end < 0 else end + 2
            return _sum(self._filled(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", text[start + 3 : end])))
        if text.startswith("$(", start):
            end = self._closing(start + 2, "(", ")")
            self.at = end + 1
            return self._of_command(text[start + 2 : end])
        if text.startswith("${", start):
            end = self._closing(start + 2, "{", "}")
            self.at = end + 1
            name, mark, usual = text[start + 2 : end].partition(":-")
            value = self.known.get(name)
            if mark and value in (None, ""):
                return self._filled(usual)
            return value if value is not None and name.isidentifier() else UNSURE
        found = _NAME.match(text, start + 1)
        if found is None:
            self.at += 1
            return "$"
        self.at = found.end()
        return self.known.get(found[0], UNSURE)

    def _closing(self, start: int, opens: str, closes: str) -> int:
        depth = 1
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opens) - (self.text[place] == closes)
            if depth == 0:
                return place
        return len(self.text)

    def _filled(self, text: str) -> str:
        if self.level > _DEEPEST:
            return UNSURE
        words = [word for words in _Scanner(text, self.known, self.level + 1).statements() for word in words]
        return " ".join(words)

    def _of_command(self, text: str) -> str:
        """What a command prints: the sum of `expr`; of all others it is not known."""
        words = self._filled(text)
        return _sum(words.removeprefix("expr ").replace("\\*", "*")) if words.startswith("expr ") else UNSURE


def _without_redirections(words: list[str]) -> list[str]:
    found: list[str] = []
    skip = False
    for word in words:
        if word in "<>":
            skip = True
        elif skip:
            skip = False
        else:
            found.append(word)
    return found


def _sum(text: str) -> str:
    """The value of whole numbers with + - * / %, from left to right by their rank; UNSURE for anything else."""
    parts = re.findall(r"\d+|[-+*/%]|\S", text)
    if not parts or not all(re.fullmatch(r"\d+", part) for part in parts[::2]) or len(parts) % 2 == 0:
        return UNSURE
    terms = [int(parts[0])]
    for operator, digits in zip(parts[1::2], parts[2::2], strict=True):
        value = int(digits)
        if operator in "/%" and value == 0:
            return UNSURE
        if operator in "+-":
            terms.append(value if operator == "+" else -value)
        elif operator in "*/%":
            last = terms.pop()
            terms.append(last * value if operator == "*" else int(last / value) if operator == "/" else last % value)
        else:
            return UNSURE
    return str(sum(terms))
