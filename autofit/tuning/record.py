"""What is kept with a study in Optuna, typed. The only module that knows the names of a study's attributes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

from autofit.errors import ConfigError
from autofit.probing.result import ProbeResult
from autofit.recipe.keys import BatchKeys, Tier
from autofit.tuning.frontier import Goal, Rule


class Attributed(Protocol):
    """Whatever has the user attributes of a study: Optuna's Study, or the plainer study of its storage."""

    @property
    def user_attrs(self) -> dict[str, Any]: ...


class Keeping(Attributed, Protocol):
    """A study that can be written to."""

    def set_user_attr(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What a study was asked and what its search found besides its trials. Each field is one attribute of the study.

    An older study may lack some: those have their default.
    """

    fingerprint: str = ""  # of everything that a probe's result depends on
    used: str = ""  # when it was last searched, in ISO 8601
    device: str = ""
    target_bytes: int | None = None
    headroom_bytes: int = 0
    trainer: str = ""
    values: Mapping[str, object] = field(default_factory=dict)  # the recipe's YAML
    resolved: Mapping[str, object] = field(default_factory=dict)  # with what TRL makes of it
    keys: BatchKeys | None = None
    compared: tuple[str, ...] = ()  # keys that the trainer's gradient proof trains with
    command: str | None = None  # what runs a tuned recipe without autofit, before its file's name
    trains_on_data: bool = True  # False: the samples were made up
    recipe_name: str = ""
    effective_batch_size: int | None = None
    cwd: Path = Path()
    allow: Tier = "neutral"
    goal: Goal = "speed"
    sampler: str = ""
    baseline_predicted: Mapping[str, float] | None = None  # floor_bytes, device_used_bytes, step_s, where known
    least_floor_bytes: float | None = None  # the fewest that any candidate is predicted to need
    screened: int = 0  # candidates ruled out without a probe
    sensitivity: Mapping[str, object] | None = None  # what lies around the winner, as tuning.sensitivity says it

    @property
    def batch_keys(self) -> BatchKeys:
        """The recipe's keys that batch its samples. Raises ConfigError for a study that does not know them."""
        if self.keys is None:
            raise ConfigError(
                "the study was made by an earlier autofit and lacks what its trainer tells; run its `autofit search` "
                "once more: no trial is repeated"
            )
        return self.keys

    @property
    def limit_bytes(self) -> int | None:
        """The target less the headroom: what a probe may hold."""
        return None if self.target_bytes is None else self.target_bytes - self.headroom_bytes

    @property
    def rule(self) -> Rule:
        """What decides the winner: `winner(trials, **record.rule)`."""
        return {"goal": self.goal, "target_bytes": self.limit_bytes}

    def to_json(self) -> dict[str, object]:
        special = {
            "cwd": str(self.cwd), "compared": list(self.compared),
            "keys": None if self.keys is None else self.keys.to_json(),
        }  # fmt: skip
        return {f.name: getattr(self, f.name) for f in fields(self)} | special

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "StudyRecord":
        found = {f.name: content[f.name] for f in fields(cls) if f.name in content}
        keys = cast("Mapping[str, str | None] | None", found.get("keys"))
        special = {
            "cwd": Path(str(found.get("cwd", ""))), "compared": tuple(cast(list[str], found.get("compared", ()))),
            "keys": None if keys is None else BatchKeys.from_json(keys),
        }  # fmt: skip
        return cls(**found | special)  # type: ignore[arg-type]


def record_of(study: Attributed) -> StudyRecord:
    return StudyRecord.from_json(study.user_attrs)


def keep_record(study: Keeping, record: StudyRecord) -> None:
    """Write what differs from what the study has."""
    known = study.user_attrs
    for name, value in record.to_json().items():
        if name not in known or known[name] != value:
            study.set_user_attr(name, value)


# -- of single trials: with the study, as a finished trial takes no attributes ----------------------------------------


def _confirmation(number: int) -> str:
    return f"confirmation {number}"


def _proof(number: int) -> str:
    return f"proof {number}"


def confirmations(study: Attributed, numbers: Iterable[int]) -> dict[int, ProbeResult]:
    """{trial: what its longer probe said}, of those of `numbers` that had one."""
    known = study.user_attrs
    return {n: ProbeResult.from_json(known[_confirmation(n)]) for n in numbers if _confirmation(n) in known}


def keep_confirmation(study: Keeping, number: int, result: ProbeResult) -> None:
    """Keep what the longer probe of trial `number` said."""
    study.set_user_attr(_confirmation(number), result.to_json())


def kept_proof(study: Attributed, number: int) -> Mapping[str, object] | None:
    """The gradient proof of trial `number` as JSON, or None before it is proven."""
    return cast("Mapping[str, object] | None", study.user_attrs.get(_proof(number)))


def keep_proof(study: Keeping, number: int, content: Mapping[str, object]) -> None:
    study.set_user_attr(_proof(number), dict(content))
