"""Commands of a shell script as bash would start them, found by reading alone. Free of torch.

Variables and arrays that the script sets, their defaults and sums are filled in. A word that hangs on a condition, on
the environment or on another command is not certain: it holds UNSURE. A `case` of a word that is known, and an `if`
with one comparison of words that are known, choose a branch. A loop over the script's own arguments is not run: the
script is read as it runs without any.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from autofit.errors import ConfigError, quoted
from autofit.files import regular_bytes
from autofit.frontends.sharing import OTHERWISE, near
from autofit.recipe.yaml_file import MOST_BYTES, of_notebook, parse_yaml, read_yaml_mapping

# -- conditions and loops around a statement --------------------------------------------------------------------------

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
    """A condition or a loop. While it is `certain`, at most one of its branches runs."""

    certain: bool = False
    runs: bool = True  # the branch that is read
    chosen: bool = False  # a branch was
    waits: bool = False  # for the `then` behind its test
    subject: str = ""  # of a case
    patterns: list[str] | None = None  # of the branch of a case that begins; None inside of a branch

    def choose(self, holds: bool | None) -> None:
        """Take the next branch if it `holds` and is the first that does; None: unknown."""
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
        """True if the statement surely runs once."""
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
    """True if a loop ends at once in a script without arguments: `while [ $# -gt 0 ]`, `[[ -n "$1" ]]`, `getopts`."""
    found = [OWN_ARGUMENTS.get(word, word) for word in words]
    if found[:1] not in (["["], ["[["]):  # `test A`, `(( $# ))`
        found = ["[", *(found[1:] if found[:1] == ["test"] else found), "]"]
    is_left = found[1:-1] in (["0"], ["-n", "0"]) and not OWN_ARGUMENTS.keys().isdisjoint(words)
    return words[:1] == ["getopts"] or is_left or _test(found) is False


def _is_pattern(frame: _Frame, words: Sequence[str], after: str) -> bool:
    """True if the statement is one of the patterns of a case's branch; at its begin the branch is chosen or skipped."""
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
    """Result of `[ A = B ]` and its like, if known."""
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


# -- commands ---------------------------------------------------------------------------------------------------------

_ARRAY, _BETWEEN = "\x1e", "\x1f"  # before the first element of an array, and between its elements
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"\w+|[@*#?$!]")
_OWN = re.compile(r'"\$[@*]"|"\$\{[@*]\}"|\$[@*]|\$\{[@*]\}')  # a script's own arguments, all of them
_ELEMENTS = re.compile(r'"\$\{(\w+)\[@\]\}"')
_OTHER_ARGUMENTS = re.compile(r"(?m)^\s*(?:function\s+\w|\w+\s*\(\s*\)|set\s+--)")  # of a function, or set there
_VARIABLE = re.compile(r"(\w+)(\[[@*]\])?(?:(:?)([-=+])(.*))?", re.DOTALL)
# What a script asks to learn whether its machine has Ascend's NPUs, and what it prints with them and without.
ASKS_FOR_NPUS = re.compile(
    r"""python3?\s+-c\s+(['"])import torch_npu\1(?:\s*[2&]?>\s*[\w/]+)*\s*&&\s*echo\s+(\w+)\s*\|\|\s*echo\s+(\w+)"""
)
_OF_NOTEBOOK = re.compile(r"(?m)^%%\w+[^\n]*$|^[ \t]*(?:!|\$ )[ \t]*(?=[\w/.])")  # and a terminal's prompt
_LOST = re.compile(r"(?m)^((?![ \t]*#)(?:(?!\s#)[^\n])*[^\s\\][ \t]*)\n(?=[ \t]*--[A-Za-z])")
_HERE = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")  # a here-document, by its last line
_SEPARATORS = ";&|\n)"
_RUNNERS = {
    (tool, "run") for tool in ("uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba")
}
_LAUNCHERS, _PYTHON = ("accelerate", "torchrun", "deepspeed"), re.compile(r"(?:.*/)?python[\d.]*")
_MODULE = ("-m", "--module")
_OF_RUNNERS = {  # options with a value in the next word
    "--with", "--with-editable", "--with-requirements", "-p", "--python", "--extra", "--group", "--only-group",
    "--env-file", "--project", "--directory", "--package", "--index", "--default-index", "--index-url", "-n", "--name",
    "--prefix", "-e", "--environment", "--cwd",
}  # fmt: skip
Told = tuple[object, object]  # ranks of a machine and machines, as they are written
_DEEPEST = 20
_MOST_ADDED = 16 * MOST_BYTES  # a variable that doubles itself fills the memory in forty lines


@dataclass(frozen=True, slots=True)
class Command:
    """Words of a command, the variables that it sees, and whether a condition or a loop decides if it is started."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    conditional: bool = False
    start: int = 0  # of its statement in the text, and where the last word of that ends
    end: int = 0


def script_text(path: Path) -> str:
    """The text of a file. Raises ConfigError for binary files, and for texts too long to be of a training."""
    try:
        text = regular_bytes(path, most=MOST_BYTES)[0].decode()
    except ConfigError as error:
        raise ConfigError(f"{path} {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error)[:100]}") from error
    return of_notebook(text)


def takes_arguments(text: str) -> bool:
    """True if a script has a loop over arguments of its own."""
    branches = Branches()
    for _ in commands(text, branches=branches):
        pass
    return branches.over_arguments


def hands_on_arguments(text: str) -> bool:
    """True if a script hands all arguments of its own on to the programs that it starts."""
    return bool(_OWN.search(text)) and not _OTHER_ARGUMENTS.search(text)


def commands(text: str, *, likely: bool = False, branches: Branches | None = None) -> Iterator[Command]:
    """The commands of a script, in their order. The `branches` may be asked afterwards.

    With `likely`, a variable that conditions set has the first value that one of them gives it.
    """
    text = _with_lost_backslashes(text)
    known: dict[str, str] = {}
    branches = Branches() if branches is None else branches
    sure = True  # whether the statement before this one was an assignment that is certain
    scanner = _Scanner(text, known)
    for words in scanner.statements():
        start, end = scanner.start, scanner.end
        if not (words := branches.statement(words, scanner.after)):
            continue
        declares = words[0] in ("export", "declare", "local", "readonly")
        rest = [word for word in words[1:] if not word.startswith("-")] if declares else list(words)
        sure = branches.certain and "||" not in scanner.after and (sure or "&&" not in scanner.after)
        own: dict[str, str] = {}
        while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
            name, before = found[1], known.get(found[1])
            own[name] = _assigned(before, found[3], more=bool(found[2]), sure=sure, likely=likely)
            rest.pop(0)
        if not rest or declares:
            known |= own
            continue
        sure = False
        rest = [part for word in rest for part in word.replace(_ARRAY, "").split(_BETWEEN)]
        variables = {**known, **own}
        rest = _behind_launcher(_without_runner(rest[1:] if rest[0] == "env" else rest))
        yield Command(tuple(rest), variables, not branches.certain, start, end)


def _without_runner(words: list[str]) -> list[str]:
    """The command that `uv run`, `poetry run`, ... starts in an environment of its own; `words` of any other."""
    if tuple(words[:2]) not in _RUNNERS:
        return words
    rest = words[2:]
    while rest and rest[0].startswith("-") and rest[0] not in _MODULE:
        del rest[: 2 if rest[0] in _OF_RUNNERS else 1]
    if not rest:
        return words
    if rest[0] in _MODULE:
        return ["python", "-m", *rest[1:]]
    return ["python", *rest] if rest[0].endswith(".py") else rest


def _behind_launcher(words: list[str]) -> list[str]:
    """The command that another one starts on a cluster, behind a `--`; `words` unless one follows that trains."""
    if "--" not in words:
        return words
    behind = words[words.index("--") + 1 :]
    for place in range(len(behind) - 1, -1, -1):  # `-- source setup.sh \&\& python train.py`
        first = place == 0 or behind[place - 1] == "&&"
        if first and (behind[place] in _LAUNCHERS or _PYTHON.fullmatch(behind[place])):
            return behind[place:]
    return words


def _with_lost_backslashes(text: str) -> str:
    """`text`, as long, with a space for a newline before `--name`, which begins no command: a log's copy lost the \\.

    Marks of a shell in a notebook (`!`, `%%bash`) or a terminal (`$ `) are spaces too.
    """
    text = _OF_NOTEBOOK.sub(lambda found: " " * len(found[0]), text)
    return _LOST.sub(lambda found: f"{found[1]} ", text)


def _assigned(before: str | None, value: str, *, more: bool, sure: bool, likely: bool) -> str:
    """A variable's value after `name=value`, or after `name+=value` with `more`."""
    array = value.startswith(_ARRAY)
    value = value if array else value.replace(_BETWEEN, " ")
    if more and before:
        added = before + (_BETWEEN + value.removeprefix(_ARRAY) if array and before != _ARRAY else value)
        added = value if before == _ARRAY else added
    else:
        added = value
    if sure or before == added:
        return added
    if likely:
        return added if before in (None, "", _ARRAY) or UNSURE in str(before) else str(before)
    if not array:
        return UNSURE
    elements = value.removeprefix(_ARRAY).split(_BETWEEN)
    doubted = [f"{name}={UNSURE}" if mark else UNSURE for name, mark, _ in (e.partition("=") for e in elements)]
    return _ARRAY + _BETWEEN.join(filter(None, [(before or "").removeprefix(_ARRAY), *doubted]))


def arguments(words: Sequence[str], folder: Path, *, tool: str) -> dict[str, object]:
    """{name: value} of a tool's arguments, as argparse takes them; a YAML or JSON may stand for the first ones."""
    found: dict[str, object] = {}
    rest = list(words)
    if rest and rest[0].endswith((".yaml", ".yml", ".json")):
        found |= read_yaml_mapping(near(rest.pop(0), folder), what=f"config of {tool}")
    name: str | None = None
    listed: dict[str, list[str]] = {}
    for word in rest:
        if word.startswith("--") and len(word) > 2:
            name, mark, value = word[2:].partition("=")
            name = name.replace("-", "_")
            listed[name] = [value] if mark else []
        elif name is None:
            raise ConfigError(f"arguments must begin with --name; got {quoted(word)}")
        else:
            listed[name].append(word)
    for key, values in listed.items():
        plain = [_plain(value) for value in values]
        found[key] = True if not plain else plain[0] if len(plain) == 1 else plain
    return found


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each `--name value` and `--name=value` of a launcher; "" for a missing value."""
    for word, following in pairwise((*words, "")):
        if word.startswith("--") and len(word) > 2:
            name, mark, value = word[2:].partition("=")
            yield name.replace("-", "_"), value if mark else "" if following.startswith("-") else following


def check_certain(unsure: Collection[str]) -> None:
    """Raise ConfigError if values of a script hang on unknown ones."""
    if unsure:
        raise ConfigError(f"the script does not say {', '.join(unsure)} for certain; write the value there")


def certain(what: str, value: object) -> str:
    """A file's name as a script says it. Raises ConfigError for one that is only known where the script runs."""
    if not isinstance(value, str) or UNSURE in value:
        got = "" if isinstance(value, str) else f"; got {quoted(value)}"
        raise ConfigError(f"the script does not say {what} for certain; write the file there{got}")
    return value


def accelerate_config(before: Sequence[str], folder: Path) -> dict[str, object]:
    """The config file of `accelerate launch`, from the words `before` the program; {} by default."""
    given = dict(options(before)).get("config_file") if before[0] == "accelerate" else None
    if given is None:
        return {}
    path = near(certain("config_file", given), folder, otherwise=OTHERWISE)
    return read_yaml_mapping(path, what="accelerate config")


def visible_cards(variables: Mapping[str, str]) -> int | None:
    """Cards that CUDA_VISIBLE_DEVICES names, if it is set and known here."""
    shown = variables.get("CUDA_VISIBLE_DEVICES", "")
    return len(shown.split(",")) if shown and UNSURE not in shown else None


def told_ranks(words: Sequence[str], shared: Mapping[str, object], variables: Mapping[str, str]) -> Told | None:
    """Ranks by a launcher's options, its config or the environment: (those of a machine, machines), or (all, 1).

    The options are among `words`, `shared` is the accelerate config, and `variables` has NPROC_PER_NODE and NNODES
    if the program reads them. None if all of these leave it open.
    """
    said = dict(options(words))
    if "include" in said:  # deepspeed's `--include localhost:0,1`
        return sum(len(host.partition(":")[2].split(",")) for host in said["include"].split("@")), 1
    if (total := said.get("num_processes") or shared.get("num_processes")) is not None:
        return total, 1
    machines = next((said[key] for key in ("nnodes", "num_nodes", "num_node") if key in said), None)
    each = said.get("nproc_per_node") or said.get("num_gpus") or variables.get("NPROC_PER_NODE")
    return None if each is None else (each, machines or variables.get("NNODES") or 1)


def ranks_in(told: Told) -> int | None:
    """All ranks, by `told_ranks`, if these are numbers."""
    counts = [int(text) for text in map(str, told) if text.isdecimal() and len(text) < 7]
    return counts[0] * counts[1] or None if len(counts) == 2 else None


def started_ranks(before: Sequence[str], told: Told | None, variables: Mapping[str, str]) -> int | None:
    """Ranks that the words `before` a program start: those told, one of a plain Python, or one a visible card."""
    if told is not None:
        return ranks_in(told)
    plain = before[0].rpartition("/")[2].startswith("python")
    return 1 if plain and "torch.distributed.run" not in before else visible_cards(variables)


def _plain(word: str) -> object:
    """The value of a word: a number, true or false, JSON, or text."""
    if UNSURE in word:
        return UNSURE
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word[:1] in "{[":
        try:
            return json.loads(word)
        except ValueError:
            return word
    try:
        value = parse_yaml(word) if word[:1].isdigit() or word[:1] in "-+." else word
    except ConfigError:
        return word
    return value if isinstance(value, int | float) else word


class _Scanner:
    """Splits a script into statements of words, with quotes, continued lines, comments and variables resolved."""

    def __init__(self, text: str, known: Mapping[str, str], level: int = 0) -> None:
        self.text, self.known, self.at, self.level = text, known, 0, level
        self.start, self.end = 0, 0  # of the statement that was yielded last; a comment may follow its last word
        self.after = ""  # the separators before it
        self.added = 0  # characters of variables that were filled in
        self.stood = False  # whether something without a word stood there last, behind which a statement may end
        self.has_none = level == 0 and not _OTHER_ARGUMENTS.search(text)  # of its own: "$@" is no word

    def statements(self) -> Iterator[list[str]]:
        words: list[str] = []
        word: str | None = None
        separators, end = "", 0
        here: str | None = None  # the last line of a here-document that begins on the next line
        while self.at < len(self.text):
            char = self.text[self.at]
            if (new := self._longer(word)) is not None:
                word = new[0]
                if self.stood:
                    end, self.stood = self.at, False
            elif char == "(" and word is not None and _ASSIGNMENT.fullmatch(word) and word.endswith("="):
                self.at += 1
                word += _ARRAY + _BETWEEN.join(self._elements())
            else:
                if word is not None:
                    words.append(word)
                    word, end = None, self.at
                if char in "<>":
                    words.append(char)
                    if not self.text.startswith("<<<", self.at) and (found := _HERE.match(self.text, self.at)):
                        here, self.at = found[2], found.end() - 1
                    self.at += self.text.startswith("&", self.at + 1)  # 2>&1: no end of the statement
                if char in _SEPARATORS and words:
                    self.end, self.after, separators = end, separators, ""
                    yield _without_redirections(words)
                    words = []
                self.at += 1
                if char == "\n" and here is not None:
                    self.at, here = self._behind_document(here), None
                if char in _SEPARATORS:
                    separators += char
                    self.start = self.at
        if word is not None:
            words.append(word)
            end = len(self.text)
        self.end, self.after = end, separators
        if words:
            yield _without_redirections(words)

    def _behind_document(self, last_line: str) -> int:
        """End of a here-document that begins here; this place if it has none."""
        found = re.compile(rf"(?m)^[ \t]*{last_line}[ \t]*$").search(self.text, self.at)
        return self.at if found is None else found.end()

    def _longer(self, word: str | None) -> tuple[str | None] | None:
        """(the word with its next part,), to which comments and continued lines add none; None at its end."""
        text, char = self.text, self.text[self.at]
        if char == "\\":
            if text.startswith("\r\n", self.at + 1):
                self.at += 1
            elif text[self.at + 1 : self.at + 2] != "\n":
                word = (word or "") + text[self.at + 1 : self.at + 2]
            self.at += 2
        elif char == "'":
            end = self._end_of("'")
            word = (word or "") + text[self.at + 1 : end]
            self.at = end + 1
        elif word is None and (behind := self._behind_nothing()):
            self.at, self.stood = behind, True
        elif char == '"':
            self.at += 1
            word = (word or "") + self._double_quoted()
        elif char in "$`":
            found = _BETWEEN.join(self._filled_in().split(" "))  # bash splits what is not quoted
            word = word if found == "" else (word or "") + found
        elif char == "#" and word is None:
            end = text.find("\n", self.at)
            self.at = len(text) if end < 0 else end
        elif char in _SEPARATORS or char.isspace() or char in "<>(":
            return None
        else:
            word = (word or "") + char
            self.at += 1
        return (word,)

    def _behind_nothing(self) -> int | None:
        """The end of all elements of an empty array, or of all arguments of a script that gets none; None elsewhere."""
        if self.has_none and (own := _OWN.match(self.text, self.at)):
            return own.end()
        found = _ELEMENTS.match(self.text, self.at)
        return found.end() if found and self.known.get(found[1]) == _ARRAY else None

    def _elements(self) -> Iterator[str]:
        """The elements of an array, up to its closing parenthesis."""
        word: str | None = None
        while self.at < len(self.text):
            if (new := self._longer(word)) is not None:
                word = new[0]
                continue
            if word is not None:
                yield word
                word = None
            self.at += 1
            if self.text[self.at - 1] == ")":
                return

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
                found += self._filled_in()
            else:
                found += char
                self.at += 1
        self.at += 1
        return found

    def _filled_in(self) -> str:
        """Value of `$...` or backquotes here. Raises ConfigError if all of them are far longer than a file."""
        found = self._expanded()
        self.added += len(found)
        if self.added > _MOST_ADDED:
            raise ConfigError(f"the script has more than {_MOST_ADDED >> 20} MiB with its variables filled in")
        return found

    def _expanded(self) -> str:
        """Value of `$...` or backquotes at this place."""
        text, start = self.text, self.at
        if text[start] == "`":
            end = self._end_of("`")
            self.at = end + 1
            return self._of_command(text[start + 1 : end])
        if text.startswith("$((", start):
            end = self._closing(start + 3, "(", ")")
            self.at = end + 2
            sum_ = re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", text[start + 3 : end])
            return _sum(_Scanner(f'{sum_}"', self.known, self.level + 1)._double_quoted())
        if text.startswith("$(", start):
            end = self._closing(start + 2, "(", ")")
            self.at = end + 1
            return self._of_command(text[start + 2 : end])
        if text.startswith("${", start):
            end = self._closing(start + 2, "{", "}")
            self.at = end + 1
            return self._variable(text[start + 2 : end])
        found = _NAME.match(text, start + 1)
        if found is None:
            self.at += 1
            return "$"
        self.at = found.end()
        return self.known.get(found[0], mark if (mark := UNSURE + found[0]) in OWN_ARGUMENTS else UNSURE)

    def _variable(self, text: str) -> str:
        """Value of `${text}`."""
        if UNSURE + text in OWN_ARGUMENTS:
            return UNSURE + text
        found = _VARIABLE.fullmatch(text)
        if found is None:
            return UNSURE
        name, elements, colon, mark, other = found.groups()
        value = self.known.get(name)
        if elements and value is not None:
            return value.removeprefix(_ARRAY)
        missing = value is None or (bool(colon) and value == "")
        if mark is not None and (missing if mark in "-=" else not missing):
            return self._filled(other)
        return ("" if mark == "+" else UNSURE) if value is None else value

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
        return " ".join(words).replace(_BETWEEN, " ")

    def _of_command(self, text: str) -> str:
        """Output of a command: the sum of `expr`; of all others it is unknown.

        The cards are NVIDIA's, so a question for NPUs has no for its answer. Within a command a comment stands so.
        """
        if text.lstrip().startswith("#"):
            return ""
        if asked := ASKS_FOR_NPUS.fullmatch(text.strip()):
            return asked[3]
        words = self._filled(text)
        return _sum(words.removeprefix("expr ").replace("\\*", "*")) if words.startswith("expr ") else UNSURE


def _without_redirections(words: list[str]) -> list[str]:
    found: list[str] = []
    skip = False
    for word in words:
        if word in ("<", ">"):
            skip = True
        elif skip:
            skip = False
        else:
            found.append(word)
    return found


def _sum(text: str) -> str:
    """The value of whole numbers with + - * / % and parentheses; UNSURE for anything else, and beyond 64 bits."""
    try:
        found = _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
        return str(found) if abs(found) < 2**63 else UNSURE
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return UNSURE


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no sum of whole numbers")
    left, right = _number(node.left), _number(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():  # bash rounds towards zero
            return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        case ast.Mod():
            return (abs(left) % abs(right)) * (-1 if left < 0 else 1)
    raise ValueError("no sum of whole numbers")
