"""Run the commands of the pages' console blocks and put their true output behind them.

    python docs/outputs.py [--check] [PAGE ...]

In a block that begins with ```console, a line `$ autofit ...` is a command and the lines up to the next command are its
output, as a terminal of 80 columns shows it: stdout, and the message of an error. Progress is left out. `$ echo $?`
shows the exit code of the command before it, `$ cat FILE` a file. `# the last 12 lines` (or first) behind a command
shows that part only.

The commands of a page run in one empty folder, one after the other. It holds the files of docs/examples/ and each block
of the page that has a title: ```yaml title="run.yaml". The date and the versions stand in the page's last line.

`--check` writes nothing, and fails where an output differs. Durations of this machine (`in 31.9 s`, `samples; 18.8 s`)
are compared as TIME, dates as DATE, hashes as HASH.
"""

import argparse
import datetime
import difflib
import fcntl
import importlib.metadata
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
COLUMNS, ROWS = 80, 50
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r'^```\w+ title="([\w./-]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PART = re.compile(r"\s+# the (first|last) (\d+) lines$")
MADE = re.compile(r"^\*Outputs of .*\*$", re.MULTILINE)
VERSIONS = ("torch", "transformers", "trl")
NOISE = (
    (re.compile(r"\bin (\d+m)?[\d.]+ s\b"), "in TIME"),
    (re.compile(r"; (\d+m)?[\d.]+ s$", re.MULTILINE), "; TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)?)?\b"), "DATE"),
    (re.compile(r"-[0-9a-f]{6}\b"), "-HASH"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a block and the output that stands behind it in the page."""

    line: str
    shown: str

    @property
    def words(self) -> list[str]:
        """The words of the command as a shell splits them."""
        return shlex.split(PART.sub("", self.line).replace("\\\n", " "), comments=True)


def pages() -> list[Path]:
    """The pages that have a console block."""
    found = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists() and BLOCK.search(page.read_text(encoding="utf-8"))]


def commands(block: str) -> Iterator[Command]:
    """The commands of a block's text; ValueError where it does not begin with one."""
    if not block.startswith("$ "):
        raise ValueError(f"a console block must begin with a line `$ COMMAND`, not {block.splitlines()[0]!r}")
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        whole = re.match(r"(?:.*\\\n)*.*\n", part)
        assert whole is not None
        yield Command(whole.group().rstrip("\n"), part[whole.end() :])


def run(words: Sequence[str], folder: Path) -> tuple[str, int]:
    """What a command shows on a terminal of 80 columns, without progress, and its exit code.

    Stdout is a terminal; stderr is a file, for progress goes there. After wrong usage (exit code 2) it has the error.
    """
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(COLUMNS), "HF_HUB_OFFLINE": "1"}
    program = {"autofit": [sys.executable, "-m", "autofit"], "python": [sys.executable], "cat": ["cat"]}[words[0]]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*program, *words[1:]], cwd=folder, stdin=subprocess.DEVNULL, stdout=terminal, stderr=said, env=environment
        )
        os.close(terminal)
        shown = b"".join(_read(reader))
        code = process.wait()
        said.seek(0)
        errors = said.read() if code not in (0, 1) else b""
    text = (shown + errors).decode().replace("\r\n", "\n").replace(f"{folder}/", "")
    return "".join(line.rstrip() + "\n" for line in text.splitlines()), code


def _read(reader: int) -> Iterator[bytes]:
    """The bytes that come out of a terminal until its last process ends."""
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            try:
                part = stream.read(65536)
            except OSError:  # Linux says the end of a terminal so
                return
            if not part:
                return
            yield part


def part_of(line: str, text: str) -> str:
    """The lines of an output that the command's comment asks for, else all."""
    asked = PART.search(line)
    if asked is None:
        return text
    lines, count = text.splitlines(keepends=True), int(asked[2])
    return "".join(lines[:count] if asked[1] == "first" else lines[-count:])


def with_outputs(text: str) -> str:
    """The page with the output of today behind each command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
        for title, content in FILE.findall(text):
            (folder / title).write_text(content, encoding="utf-8")
        code = 0

        def again(block: re.Match[str]) -> str:
            nonlocal code
            found = ""
            for command in commands(block.group(1)):
                if command.words == ["echo", "$?"]:
                    output = f"{code}\n"
                else:
                    output, code = run(command.words, folder)
                found += f"$ {command.line}\n{part_of(command.line, output)}"
            return f"```console\n{found}```"

        return MADE.sub(made(), BLOCK.sub(again, text))


def made() -> str:
    """The line of a page that says when its outputs were made, and with what."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in VERSIONS)
    return f"*Outputs of {datetime.date.today()}, {versions}, on simulated cards: no GPU was used.*"


def compared(text: str) -> list[str]:
    """The lines of a page with the noise of a machine and a day taken out."""
    for pattern, name in NOISE:
        text = pattern.sub(name, text)
    return text.splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the outputs of the pages; the exit code."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: every page with a console block")
    options.add_argument("--check", action="store_true", help="write nothing; exit code 1 where an output differs")
    given = options.parse_args(argv)
    differs = False
    for page in given.pages or pages():
        before = page.read_text(encoding="utf-8")
        after = with_outputs(before)
        if not given.check:
            page.write_text(after, encoding="utf-8")
        difference = list(difflib.unified_diff(compared(before), compared(after), str(page), "today", lineterm=""))
        print("\n".join(difference) or f"{page}: as today")
        differs = differs or bool(difference)
    return int(given.check and differs)


if __name__ == "__main__":
    sys.exit(main())
