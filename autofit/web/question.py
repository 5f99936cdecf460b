"""One question to the page's server, and how many of them one address and all may ask."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from autofit.errors import ConfigError, nearest, quoted

_MOST_ADDRESSES = 4096  # that are remembered; the one heard of longest ago is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server. The seconds are of one answer, from its start."""

    at_once: int = 1  # answers that are computed at the same time
    waiting: int = 16  # that wait in line
    of_address: int = 2  # computed or in line for one address
    a_minute: int = 20  # questions of one address
    verdict_s: float = 60.0
    advice_s: float = 30.0
    cards_s: float = 180.0
    memory_bytes: int = 6 << 30  # data of one process of the simulation
    body_bytes: int = 256 << 10
    connections: int = 64
    request_s: float = 10.0  # for a whole request to arrive


ALONE = Limits(
    memory_bytes=12 << 30, of_address=4, a_minute=120, verdict_s=300.0, advice_s=60.0, cards_s=900.0
)  # on 127.0.0.1
PUBLIC = Limits()


@dataclass(slots=True)
class Rate:
    """Questions of each address in a minute: a bucket that fills up again at an even pace."""

    a_minute: int
    clock: Callable[[], float] = time.monotonic
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # {address: (questions, when)}
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_s(self, address: str) -> float:
        """0 and one question less for `address`; or the seconds after which it may ask again."""
        now, a_second = self.clock(), self.a_minute / 60
        with self._lock:
            left, when = self._left.pop(address, (float(self.a_minute), now))
            left = min(float(self.a_minute), left + (now - when) * a_second)
            allowed = left >= 1
            self._left[address] = (left - 1 if allowed else left, now)
            while len(self._left) > _MOST_ADDRESSES:
                self._left.popitem(last=False)
        return 0.0 if allowed else (1 - left) / a_second


KINDS = ("check", "cards")
SHARINGS = ("", "multi_gpu", "fsdp2", "zero2", "zero3")  # how several cards share; "": as the recipe says
COUNTS = (1, 2, 4, 8)
MOST_TOKENS = 131_072
_MOST_TEXT = 64 << 10  # characters
_MOST_CHANGES = 40
_KEYS = ("kind", "text", "config", "trainer", "card", "count", "sharing", "tokens", "changes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. Its changes are settings of the recipe, of which None removes one."""

    text: str  # a YAML, or a command
    kind: str = "check"  # whether it runs on the card, or on which of the usual cards
    config: str = ""  # config.json of a model that the catalogue lacks
    trainer: str | None = None  # None: found by the recipe's keys
    card: str = "a100-80gb"
    count: int | None = None  # of cards; None: as many as the recipe says
    sharing: str = ""
    tokens: int | None = None  # of the longest prompt or sample; None: as many as the recipe has room for
    changes: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {key: getattr(self, key) for key in _KEYS}

    @classmethod
    def from_json(cls, given: object) -> "Question":
        """The question that a browser sent. Raises ConfigError for what is none."""
        if not isinstance(given, dict) or not isinstance(given.get("text"), str):
            raise ConfigError("a question must be a JSON object with a text")
        unknown = [str(key) for key in given if key not in _KEYS]
        if unknown:
            raise ConfigError(
                f"a question has {', '.join(_KEYS)}; got {quoted(unknown[0])}{nearest(unknown[0], _KEYS)}"
            )
        found = cast("dict[str, object]", given)
        for key in ("text", "config"):
            _check(len(_text(found, key)) <= _MOST_TEXT, f"{key} must have at most {_MOST_TEXT:,} characters")
        changes = found.get("changes", {})
        known = isinstance(changes, dict) and len(changes) <= _MOST_CHANGES
        _check(known, f"changes must be at most {_MOST_CHANGES} settings")
        count, tokens = found.get("count"), found.get("tokens")
        _check(count is None or (type(count) is int and count in COUNTS),
               f"count must be one of {', '.join(map(str, COUNTS))}, or null")  # fmt: skip
        whole = tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool))
        _check(whole and (tokens is None or 1 <= cast(int, tokens) <= MOST_TOKENS),
               f"tokens must be a whole number from 1 to {MOST_TOKENS:,}")  # fmt: skip
        kind, sharing = _text(found, "kind") or "check", _text(found, "sharing")
        _check(kind in KINDS, f"kind must be one of {', '.join(KINDS)}")
        _check(sharing in SHARINGS, f"sharing must be one of {', '.join(filter(None, SHARINGS))}")
        return cls(
            text=_text(found, "text"), kind=kind, config=_text(found, "config"), sharing=sharing,
            trainer=_text(found, "trainer") or None, card=_text(found, "card") or "a100-80gb",
            count=cast("int | None", count), tokens=cast("int | None", tokens),
            changes=cast("dict[str, object]", changes),
        )  # fmt: skip


def _text(given: Mapping[str, object], key: str) -> str:
    value = given.get(key)
    _check(value is None or isinstance(value, str), f"{key} must be text")
    return cast("str | None", value) or ""


def _check(holds: bool, must: str) -> None:
    if not holds:
        raise ConfigError(must)
