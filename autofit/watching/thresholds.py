"""The thresholds of a run's guards: autofit's own in guards.yaml, with a user's file laid over them."""

import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path

from autofit.errors import ConfigError, nearest
from autofit.recipe.yaml_file import read_yaml_mapping

StatedGuards = str | os.PathLike[str] | Mapping[str, object]
MOST_STEPS = 1000  # of a window, which is kept in memory
_SAID: Mapping[str, str | float] = {"metric": "m", "part": "p", "value": 0.5, "seconds": 1.0, "of_seconds": 2.0}
_FLOODS = re.compile(r"\d{3}|[{}]")  # a format of a hundred characters and more, or one that names a value in turn


class GuardCheck(StrEnum):
    """Property that a guard checks; guards.yaml explains each."""

    BAND = "band"
    FINITE = "finite"
    FALLS = "falls"
    SPIKES = "spikes"
    STUCK = "stuck"
    DRIFTS = "drifts"


# The keys that a check cannot do without: one of each group.
_NEEDS: Mapping[GuardCheck, tuple[str, ...]] = {
    GuardCheck.BAND: ("min", "max"), GuardCheck.FINITE: (), GuardCheck.FALLS: ("share",), GuardCheck.SPIKES: ("times",),
    GuardCheck.STUCK: (), GuardCheck.DRIFTS: ("min", "max"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One thing that a run is watched for. The names are the keys of guards.yaml."""

    name: str
    metric: tuple[str, ...]  # names of logged metrics, with * and ?
    check: GuardCheck = GuardCheck.BAND
    min: float | None = None
    max: float | None = None
    share: float | None = None
    times: float | None = None
    direction: str = "up"
    ahead: int = 100  # steps
    window: int = 1  # logged steps
    patience: int = 1  # logged steps
    warmup: int = 0  # steps
    action: str = "alert"
    objective: str | None = None
    generates: bool | None = None
    says: str | None = None
    advice: str = ""

    @property
    def stops(self) -> bool:
        return self.action == "stop"

    def looks_at(self, metric: str) -> bool:
        return any(fnmatchcase(metric, pattern) for pattern in self.metric)

    def part(self, metric: str) -> str:
        """The text in place of the first * of the pattern; the whole metric if it has no *."""
        for pattern in self.metric:
            head, star, tail = pattern.partition("*")
            if star and fnmatchcase(metric, pattern):
                return metric[len(head) : len(metric) - len(tail)]
        return metric

    def words(self, metric: str, value: float, *, seconds: float = 0.0, of_seconds: float = 0.0) -> str | None:
        """The alarm in the words of `says`, if it is set."""
        if self.says is None:
            return None
        return self.says.format(
            metric=metric, part=self.part(metric), value=value, seconds=seconds, of_seconds=of_seconds
        )

    def to_json(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Guard":
        listed = {
            "metric": tuple(_names(content["metric"])),
            "check": GuardCheck(str(content.get("check", GuardCheck.BAND))),
        }
        return cls(**{**content, **listed})  # type: ignore[arg-type]


def read_guards(given: StatedGuards | None = None) -> tuple[Guard, ...]:
    """autofit's guards with `given` laid over them: a file, or its content. "off" clears them.

    Raises ConfigError that names everything wrong in it.
    """
    with resources.as_file(resources.files("autofit.watching") / "guards.yaml") as own:
        ours = read_yaml_mapping(own, what="guards file")
    if given is None:
        return _guards(ours, ours, "autofit's own guards")
    if given == "off":
        return ()
    if isinstance(given, Mapping):
        content, what = dict(given), "the guards"
    else:
        path = Path(given)
        content, what = read_yaml_mapping(path, what="guards file"), f"the guards file {path}"
    return _guards(_laid_over(ours, content), ours, what)


def guards_of(recorded: object) -> tuple[Guard, ...]:
    """The guards that a request recorded, in the form of `Guard.to_json`; autofit's own by default."""
    if not isinstance(recorded, list):
        return read_guards()
    return tuple(Guard.from_json(content) for content in recorded)


def _laid_over(ours: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    found = dict(ours)
    for name, entry in given.items():
        before = ours.get(name)
        changed = {**(before if isinstance(before, dict) else {}), **entry} if isinstance(entry, dict) else entry
        found[name] = {k: v for k, v in changed.items() if v is not None} if isinstance(changed, dict) else changed
    return found


def _guards(content: Mapping[str, object], ours: Mapping[str, object], what: str) -> tuple[Guard, ...]:
    wrong = [f"{name}: {fault}" for name, entry in content.items() for fault in _faults(name, entry, ours)]
    if wrong:
        raise ConfigError(f"{what}: {'; '.join(wrong)}")
    on = {name: entry for name, entry in content.items() if isinstance(entry, dict)}
    return tuple(Guard.from_json({"name": name, **entry}) for name, entry in on.items())


def _faults(name: str, entry: object, ours: Mapping[str, object]) -> list[str]:
    """Faults in the entry of one guard, a phrase each."""
    if entry in (False, "off"):  # YAML reads `off` as false
        return [] if name in ours else [f"there is no such guard to turn off{nearest(name, ours)}"]
    if not isinstance(entry, dict):
        return [f"must be `off`, or a mapping such as {{metric: kl, max: 0.15}}; got {entry!r}"]
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
        return ["a guard's name may have letters, digits, _, - and . only, as it names a tag"]
    if "metric" not in entry:
        return [f"a guard of one's own needs a metric; autofit has none of this name{nearest(name, ours)}"]
    unknown = [f"unknown key {key!r}{nearest(str(key), _KINDS)}" for key in entry if key not in _KINDS]
    return unknown + [fault for key, value in entry.items() if key in _KINDS for fault in _fault(key, value)] or (
        _missing(entry)
    )


def _missing(entry: Mapping[str, object]) -> list[str]:
    check = GuardCheck(str(entry.get("check", GuardCheck.BAND)))
    needs = _NEEDS[check]
    if needs and not any(entry.get(key) is not None for key in needs):
        return [f"check {check} needs {' or '.join(needs)}"]
    low, high = entry.get("min"), entry.get("max")
    if isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
        return [f"min must be below max; got {low} and {high}"]
    return []


def _fault(key: str, value: object) -> list[str]:
    """Faults in the value of `key`."""
    kind = _KINDS[key]
    if isinstance(kind, tuple):
        return [] if value in kind else [f"{key} must be {' or '.join(kind)}; got {value!r}{nearest(str(value), kind)}"]
    if key == "metric":
        return [] if _names(value) else [f"metric must be a name or a list of names; got {value!r}"]
    if kind is bool:
        return [] if isinstance(value, bool) else [f"{key} must be true or false; got {value!r}"]
    if kind is str:
        return _text_fault(key, value)
    return _number_fault(key, value, whole=kind is int)


def _number_fault(key: str, value: object, *, whole: bool) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value != value:
        return [f"{key} must be a {'whole ' if whole else ''}number; got {value!r}"]
    least = {"window": 1, "patience": 1, "ahead": 1, "warmup": 0}.get(key)
    if least is not None and value < least:
        return [f"{key} must be {least} or more; got {value}"]
    if key in ("window", "patience") and value > MOST_STEPS:
        return [f"{key} must be at most {MOST_STEPS}; got {value}"]
    return [f"{key} must be above 0; got {value}"] if key in ("share", "times") and value <= 0 else []


def _text_fault(key: str, value: object) -> list[str]:
    if not isinstance(value, str):
        return [f"{key} must be text; got {value!r}"]
    if key != "says":
        return []
    try:
        named = [(name, how or "") for _, name, how, _ in string.Formatter().parse(value) if name is not None]
        if all(name in _SAID and not _FLOODS.search(how) for name, how in named):
            value.format(**_SAID)
            return []
    except ValueError:
        pass
    names = ", ".join(f"{{{name}}}" for name in _SAID)
    return [f"says may name {names}, with formats as in {{value:.3g}}; got {value!r}"]


def _names(value: object) -> Sequence[str]:
    listed = [value] if isinstance(value, str) else value
    good = isinstance(listed, list | tuple) and all(isinstance(name, str) and name for name in listed)
    return [str(name) for name in listed] if good and isinstance(listed, list | tuple) else []


_KINDS: Mapping[str, type | tuple[str, ...]] = {
    "metric": str, "check": tuple(str(check) for check in GuardCheck), "min": float, "max": float, "share": float,
    "times": float, "direction": ("up", "down"), "ahead": int, "window": int, "patience": int, "warmup": int,
    "action": ("alert", "stop"), "objective": str, "generates": bool, "says": str, "advice": str,
}  # fmt: skip
assert {"name", *_KINDS} == {field.name for field in fields(Guard)}
