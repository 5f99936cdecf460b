"""The typed record of a study in Optuna, and why its search ended. The attributes' names are known only here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

from autofit.errors import ConfigError
from autofit.probing.result import ProbeResult
from autofit.recipe.keys import BatchKeys, Tier
from autofit.recipe.secrets import sealed_text
from autofit.tuning.comparison import Comparison
from autofit.tuning.frontier import Foreseen, Goal, Rule


class StopKind(StrEnum):
    TRIALS = "trials"  # the requested number of trials is done
    BUDGET = "budget"  # the time budget is spent
    PLATEAU = "plateau"  # the last trials did not improve on the winner
    GAIN = "gain"  # the best candidate left has a small expected gain
    HOPELESS = "hopeless"  # nothing fits, and no candidate left is likely to fit
    EXHAUSTED = "exhausted"  # every candidate is tried or ruled out
    BROKEN = "broken"  # every probe failed: the recipe or the machine is broken
    INTERRUPTED = "interrupted"  # by the user


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a search ended: `kind` for decisions, `words` for people."""

    kind: StopKind
    words: str


class Attributed(Protocol):
    """An object with the user attributes of a study: Optuna's Study, or the simpler study of its storage."""

    @property
    def user_attrs(self) -> dict[str, Any]: ...


class Keeping(Attributed, Protocol):
    """A study that can be written to."""

    def set_user_attr(self, key: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """The request of a study and the results of its search besides its trials. Each field is one study attribute.

    Attributes that an older study lacks have their default.
    """

    fingerprint: str = ""  # hash of every input that a probe's result depends on
    owner: str = ""  # user@host of the first search
    used: str = ""  # time of the last search, in ISO 8601
    device: str = ""
    card: str | None = None  # the kind of card of a study on a cluster: figures of another are another study's
    target_bytes: int | None = None
    headroom_bytes: int = 0
    trainer: str = ""
    values: Mapping[str, object] = field(default_factory=dict)  # the recipe's YAML
    resolved: Mapping[str, object] = field(default_factory=dict)  # the recipe with TRL's defaults filled in
    keys: BatchKeys | None = None
    compared: tuple[str, ...] = ()  # keys that the trainer's gradient proof trains with
    tiers: Mapping[str, Tier] = field(default_factory=dict)  # knobs that change more than their space declares
    left_out: Mapping[str, str] = field(default_factory=dict)  # {knob that this recipe cannot change: why}
    other_names: Mapping[str, str] = field(default_factory=dict)  # {another name of a key: the recipe's name of it}
    spelling: str = ""  # how the keys of a recipe of older libraries are written, in half a sentence
    space: str = ""  # path of the trainer's own search space
    traits: Mapping[str, object] = field(default_factory=dict)  # {knob: what the searched space itself says of it}
    command: str | None = None  # command that runs a tuned recipe without autofit; the file name is appended
    trains_on_data: bool = True  # False: the samples were synthetic
    foreign: Mapping[str, object] = field(default_factory=dict)  # the file of another tool that the recipe is
    recipe_name: str = ""
    effective_batch_size: int | None = None
    cwd: Path = Path()
    allow: Tier = "neutral"
    goal: Goal = "speed"
    sampler: str = ""
    baseline_predicted: Mapping[str, float] | None = None  # floor_bytes, device_used_bytes, step_s, where known
    least_floor_bytes: float | None = None  # smallest predicted floor of all candidates
    screened: int = 0  # candidates ruled out without a probe
    predicted: Mapping[str, object] | None = None  # bytes and seconds of all candidates, as JSON of forecast.cloud
    foreseen: Sequence[Mapping[str, object]] = ()  # candidates on the front without a probe, JSON of tuning.foreseen
    relaxed: str = ""  # gain of a lower tier, in words; of the last search
    outside: Mapping[str, object] | None = None  # changes beyond the allowed tier, as JSON of api.lower_tiers
    sensitivity: Mapping[str, object] | None = None  # the winner's neighbours and margin, as JSON of tuning.sensitivity

    @property
    def batch_keys(self) -> BatchKeys:
        """The recipe's keys that batch its samples. Raises ConfigError for a study that lacks them."""
        if self.keys is None:
            raise ConfigError(
                "the study must contain its trainer's batch keys, but an earlier autofit made it without them; run its "
                "`autofit search` command again to add them: no trial is repeated"
            )
        return self.keys

    @property
    def limit_bytes(self) -> int | None:
        """The limit of a probe in bytes: the target less the headroom."""
        return None if self.target_bytes is None else self.target_bytes - self.headroom_bytes

    @property
    def rule(self) -> Rule:
        """The rule that picks the winner: `winner(trials, **record.rule)`."""
        return {"goal": self.goal, "target_bytes": self.limit_bytes}

    @property
    def points_ahead(self) -> list[Foreseen]:
        """The unprobed candidates on the front."""
        return [Foreseen.from_json(one) for one in self.foreseen]

    def to_json(self) -> dict[str, object]:
        special = {
            "cwd": str(self.cwd), "compared": list(self.compared),
            "foreseen": [dict(one) for one in self.foreseen],
            "keys": None if self.keys is None else self.keys.to_json(),
        }  # fmt: skip
        return {f.name: getattr(self, f.name) for f in fields(self)} | special

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "StudyRecord":
        found = {f.name: content[f.name] for f in fields(cls) if f.name in content}
        keys = cast("Mapping[str, str | None] | None", found.get("keys"))
        special = {
            "cwd": Path(str(found.get("cwd", ""))), "compared": tuple(cast(list[str], found.get("compared", ()))),
            "foreseen": tuple(cast("list[Mapping[str, object]]", found.get("foreseen", ()))),
            "keys": None if keys is None else BatchKeys.from_json(keys),
        }  # fmt: skip
        return cls(**found | special)  # type: ignore[arg-type]


def record_of(study: Attributed) -> StudyRecord:
    return StudyRecord.from_json(study.user_attrs)


def sealed_file(origin: Mapping[str, object]) -> dict[str, object]:
    """The file of another tool that a recipe was, as a study keeps it: with the secrets in its text sealed."""
    return {**origin, "text": sealed_text(str(origin["text"]))} if "text" in origin else {**origin}


def forget_foreseen(study: Keeping, name: str) -> None:
    """Take the predicted point `name` off the study's record, as it is a trial now; the others keep their names."""
    record = record_of(study)
    keep_record(study, replace(record, foreseen=[one for one in record.foreseen if one.get("name") != name]))


def is_own(study: Attributed) -> bool:
    """True if autofit made the study: its record is written before the first trial."""
    known = study.user_attrs
    return bool(known.get("fingerprint") or known.get("trainer"))


def keep_record(study: Keeping, record: StudyRecord) -> None:
    """Write the fields of `record` that differ from the study's attributes."""
    known = study.user_attrs
    for name, value in record.to_json().items():
        if name not in known or known[name] != value:
            study.set_user_attr(name, value)


# -- records of single trials, kept with the study because a finished Optuna trial accepts no attributes ---------------


def confirmations(study: Attributed, numbers: Iterable[int]) -> dict[int, ProbeResult]:
    """{trial: result of its confirmation run}, for the trials of `numbers` that have one."""
    known = study.user_attrs
    return {n: ProbeResult.from_json(known[f"confirmation {n}"]) for n in numbers if f"confirmation {n}" in known}


def keep_confirmation(study: Keeping, number: int, result: ProbeResult) -> None:
    """Keep the result of the confirmation run of trial `number`."""
    study.set_user_attr(f"confirmation {number}", result.to_json())


def repeats(study: Attributed) -> dict[int, ProbeResult]:
    """{trial: result of its second probe}, for the trials whose first one was doubted."""
    told = {name: content for name, content in study.user_attrs.items() if name.startswith("repeat ")}
    return {int(name.removeprefix("repeat ")): ProbeResult.from_json(content) for name, content in told.items()}


def keep_repeat(study: Keeping, number: int, result: ProbeResult) -> None:
    """Keep the result of the second probe of trial `number`."""
    study.set_user_attr(f"repeat {number}", result.to_json())


def comparisons(study: Attributed, numbers: Iterable[int]) -> dict[int, Comparison]:
    """{trial: its comparison with the baseline in turns}, for the trials of `numbers` that have one."""
    known = study.user_attrs
    return {n: Comparison.from_json(known[f"comparison {n}"]) for n in numbers if f"comparison {n}" in known}


def keep_comparison(study: Keeping, number: int, comparison: Comparison) -> None:
    """Keep the times of trial `number` in turns with the baseline."""
    study.set_user_attr(f"comparison {number}", comparison.to_json())


def kept_proof(study: Attributed, number: int) -> Mapping[str, object] | None:
    """The gradient proof of trial `number` as JSON, once it is proven."""
    return cast("Mapping[str, object] | None", study.user_attrs.get(f"proof {number}"))


def keep_proof(study: Keeping, number: int, content: Mapping[str, object]) -> None:
    study.set_user_attr(f"proof {number}", dict(content))
