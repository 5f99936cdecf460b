"""What a file of another tool says, in lines for a reader. No torch here."""

from dataclasses import dataclass
from typing import NamedTuple


class Line(NamedTuple):
    """A fact and its name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Facts of a file, and the rules of its tool that it breaks. `unread` are keys whose value is not in the file.

    `notes` say what a simulation of it leaves out or takes in its place.
    """

    tool: str
    lines: tuple[Line, ...]
    wrong: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "tool": self.tool, "facts": dict(self.lines), "wrong": list(self.wrong), "unread": list(self.unread),
            "notes": list(self.notes),
        }  # fmt: skip
