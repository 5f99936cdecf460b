"""The result of a search: its trials, their front, the winner and why, read from the study."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.table import Table

from autofit.api.events import TrialResult
from autofit.api.lower_tiers import Outside, outside_lines, outside_of
from autofit.api.promoted import PromotedRun, promoted_runs
from autofit.api.tables import Shown, front_table, margin_sentence, sensitivity_table, sentence
from autofit.forecast.margin import tight_words
from autofit.forecast.predictions import Cloud
from autofit.frontends.writing import own_words
from autofit.probing.result import Fidelity, ProbeStatus
from autofit.recipe.keys import Tier
from autofit.recipe.recipe import own_names
from autofit.tracking.front_plot import FrontPicture, front_figure, title_of
from autofit.tuning.frontier import Foreseen, Trial, baseline, common_front, winner
from autofit.tuning.record import Stop, StopKind, StudyRecord, kept_proof, record_of
from autofit.tuning.sensitivity import Margin, Neighbour, of_winner
from autofit.tuning.sentences import (
    confirmation_json,
    confirmation_note,
    predicted_note,
    reasons,
    repeat_note,
    rule_json,
)
from autofit.tuning.study import load_study, trials_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(Shown):
    """A study's result. `str` of it is a table and why the winner won; a notebook shows the same."""

    study: str
    folder: Path  # of the studies
    original: Mapping[str, object]  # the recipe as TRL resolved it
    target_bytes: int | None
    device: str | None  # cpu, cuda, or sim: and a card; None before the first probe has ended
    device_name: str
    fidelity: str  # measured, or predicted on a simulated card
    trials: tuple[TrialResult, ...]
    front: tuple[TrialResult, ...]  # the trials that nothing beats in both step time and bytes, fastest first
    winner: TrialResult | None  # None if nothing fits
    baseline: TrialResult | None  # the recipe as it is; None if it was not probed
    reasons: tuple[str, ...]  # sentences: what the winner changes and gives, or what to relax when nothing fits
    confirmation: Mapping[str, object] | None  # the winner's longer probes: figures, comparison, those that gave way
    confirmation_note: str
    counts: Mapping[str, int]  # trials asked for, by status, and candidates screened out by their prediction
    stop: Stop | None = None  # why the search ended; None in a report
    neighbours: tuple[Neighbour, ...] | None = None  # the winner with one knob a step further
    margin: Margin | None = None  # what the winner leaves free
    tight: str = ""  # possible need of a predicted winner, if it exceeds the target, in sentences
    rule: Mapping[str, object] = field(default_factory=dict)  # by which the winner was picked
    relaxed: str = ""  # gain of a lower of the allowed tiers, if it is clearly faster
    repeat_note: str = ""  # the trials whose probe was doubted, and what their second one said
    allow: Tier = "neutral"  # the lowest tier that the search was allowed
    outside: tuple[Outside, ...] = ()  # changes beyond that tier, on top of the winner, or else changes that would fit
    trainer: str = ""
    card: str | None = None  # the kind of card of a search on a cluster
    predicted: Cloud | None = None  # of all candidates, thinned; None if nothing was predicted
    proof: str = ""  # of the winner's gradient, as a sentence; "" before it is made
    promoted: tuple[PromotedRun, ...] = ()  # the full runs of its trials
    foreseen: tuple[Foreseen, ...] = ()  # candidates on the front that were predicted, not probed, fastest first
    own: str = ""  # the winner in the keys of the file that the recipe was, if that was another tool's
    names: Mapping[str, str] = field(default_factory=dict)  # {key of the recipe: its name in that file}
    trains_on_data: bool = True  # False: its samples were synthetic, and a trial is written, not trained
    traits: Mapping[str, object] = field(default_factory=dict)  # {knob: what the searched space itself says of it}

    @classmethod
    def of(
        cls, trials: Sequence[Trial], record: StudyRecord, *, study: str, folder: Path, stop: Stop | None = None,
        reasons: Sequence[str] = (), promoted: tuple[PromotedRun, ...] = (), proof: str = "",
    ) -> "SearchResult":  # fmt: skip
        """The result of the `trials` of a study."""
        rule, base, best = record.rule, baseline(trials), winner(trials, **record.rule)
        kept = of_winner(record.sensitivity, best)
        probed = [t.result for t in trials if t.result is not None]
        told = next((one for one in probed if one.device_name), probed[0] if probed else None)
        rows = {t.number: TrialResult.of(t, base, limit_bytes=rule["target_bytes"]) for t in trials}
        front, ahead = common_front(trials, record.points_ahead)
        by_status = {str(s): sum(t.status is s for t in trials) for s in ProbeStatus}
        return cls(
            study=study, folder=folder, original=record.resolved, target_bytes=record.target_bytes,
            device=None if told is None else told.device,
            device_name=record.card or ("" if told is None else told.device_name),
            fidelity="measured" if told is None else told.fidelity,
            trials=tuple(rows.values()), front=tuple(rows[t.number] for t in _with_winner(front, best)),
            foreseen=tuple(ahead),
            winner=None if best is None else rows[best.number], baseline=None if base is None else rows[base.number],
            reasons=tuple(reasons), confirmation=confirmation_json(trials, rule),
            confirmation_note=confirmation_note(trials, rule),
            repeat_note=repeat_note(trials), rule=rule_json(rule, record.allow), relaxed=record.relaxed,
            counts={"asked": len(trials), **by_status, "screened": record.screened}, stop=stop,
            neighbours=None if kept is None else neighbours_of(kept), margin=None if kept is None else margin_of(kept),
            allow=record.allow, outside=outside_of(record.outside, best, record.allow), promoted=promoted,
            tight=_tight(best, record.target_bytes),
            trainer=record.trainer, predicted=Cloud.from_json(record.predicted), proof=proof, card=record.card,
            own="" if best is None else own_words(record.foreign, best.yaml_changes), traits=record.traits,
            names=own_names(record.foreign), trains_on_data=record.trains_on_data,
        )  # fmt: skip

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the search; the same call goes on with it."""
        return self.stop is not None and self.stop.kind is StopKind.INTERRUPTED

    @property
    def why(self) -> str:
        """Reason why the winner won, or the constraint to relax if nothing fits, in one line less its full stop."""
        return ". ".join(self.reasons)

    @property
    def stopped(self) -> str:
        """Why the search ended, in words; "" in a report."""
        return "" if self.stop is None else self.stop.words

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit search --json` prints: plain values only."""
        return {
            "study": self.study,
            "target_bytes": self.target_bytes,
            "device": self.device,
            "card": self.card,
            "fidelity": self.fidelity,
            "winner": None if self.winner is None else self.winner.to_dict(),
            **({"own": self.own} if self.own else {}),
            "confirmation": self.confirmation,
            "front": [trial.to_dict() for trial in self.front],
            "foreseen": [one.to_json() for one in self.foreseen],
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "counts": dict(self.counts),
            "stopped": self.stopped,
            "why": self.why,
            "rule": dict(self.rule),
            "relaxed": self.relaxed,
            "sensitivity": None if self.neighbours is None else [asdict(row) for row in self.neighbours],
            "margin": None if self.margin is None else asdict(self.margin),
            "tight": bool(self.tight),
            "outside": [asdict(one) for one in self.outside],
            "promoted": [run.to_dict() for run in self.promoted],
        }

    def table(self) -> Table:
        """The front and the baseline, the winner marked."""
        base = self.baseline
        return front_table(
            self.front, original=self.original, winner=None if self.winner is None else self.winner.number,
            target_bytes=self.target_bytes, fidelity=self.fidelity, device_name=self.device_name,
            foreseen=self.foreseen, names=self.names,
            beside=base if base is not None and base.status is not None and base not in self.front else None,
        )  # fmt: skip

    def parts(self) -> list[Table | str]:
        """All of it: what the search found, then the advice."""
        return [*self.verdict_parts(), *self.advice_parts()]

    def verdict_parts(self) -> list[Table | str]:
        """The front, what lies one step from the winner, the sentences, and the full runs."""
        beside = None
        if self.neighbours is not None and self.winner is not None:
            beside = sensitivity_table(self.winner.number, self.neighbours, self.names)
        notes = [sentence(note) for note in (self.confirmation_note, self.repeat_note) if note]
        all_predicted = self.fidelity == Fidelity.PREDICTED  # which is then said once
        sentences = [
            *(sentence(text) for text in self.reasons),
            f"{free}." if (free := self.margin_words(predicted=all_predicted)) else "",
            self.tight,
            f"In your file: {self.own}" if self.own else "",  # no full stop: it is there to be copied
            *notes,
            f"{self.relaxed[:1].upper()}{self.relaxed[1:]}" if self.relaxed else "",
            f"Stopped because {self.stopped}." if self.stopped and not self.interrupted else "",
        ]
        runs = [part for run in self.promoted for part in run.parts()]
        front = self.table()
        tables = [front] * bool(front.row_count) + ([] if beside is None else [beside])
        return [*tables, *filter(None, sentences), *runs]

    def advice_parts(self) -> list[str]:
        """Changes outside the allowed tier; [] if unknown."""
        return outside_lines(self.outside, self.original, self.allow, fits=self.winner is not None, names=self.names)

    def margin_words(self, *, predicted: bool = False) -> str:
        """Memory that the winner leaves free, as a sentence; "" if untargeted. `predicted`: as in `margin_sentence`."""
        if self.margin is None:
            return ""
        key = self.margin.key and self.names.get(self.margin.key, self.margin.key)
        return margin_sentence(replace(self.margin, key=key), predicted=predicted)

    def plot(self) -> "Figure":
        """A matplotlib Figure of device-used (GB) against step time (s): every trial, the front and the target."""
        title = title_of(
            self.study, self.original, trainer=self.trainer, device=self.device_name or self.device or "",
            fidelity=self.fidelity if self.device else "",
        )  # fmt: skip
        return front_figure(
            FrontPicture(trials=self.trials, front=self.front, foreseen=self.foreseen, winner=self.winner,
                    baseline=self.baseline, target_bytes=self.target_bytes, predicted=self.predicted, title=title)
        )  # fmt: skip


def read_result(folder: Path, name: str | None, *, stop: Stop | None = None) -> SearchResult:
    """The result of the study `name` in `folder`, or of the one used last. Raises ConfigError when there is none."""
    study = load_study(folder, name)
    trials, record = trials_of(study), record_of(study)
    best = winner(trials, **record.rule)
    return SearchResult.of(
        trials, record, study=study.study_name, folder=folder, stop=stop, reasons=_reasons(trials, record),
        promoted=promoted_runs(folder, study.study_name),
        proof="" if best is None else str((kept_proof(study, best.number) or {}).get("sentence", "")),
    )  # fmt: skip


def _reasons(trials: Sequence[Trial], record: StudyRecord) -> list[str]:
    """Reasons why the winner won; the skipped candidates end the last sentence."""
    *found, last = reasons(
        trials, record.resolved, record.target_bytes, record.rule, allow=record.allow, names=own_names(record.foreign)
    )
    return [*found, last + predicted_note(trials, record)]


def _tight(best: Trial | None, target_bytes: int | None) -> str:
    result = None if best is None else best.result
    return "" if result is None or target_bytes is None else tight_words(result, target_bytes)


def neighbours_of(kept: Mapping[str, object]) -> tuple[Neighbour, ...]:
    """The rows of the kept sensitivity of a study's winner."""
    return tuple(Neighbour(**row) for row in cast(list[dict[str, Any]], kept["neighbours"]))


def margin_of(kept: Mapping[str, object]) -> Margin:
    """The margin in the kept sensitivity of a study's winner."""
    return Margin(**cast(dict[str, Any], kept["margin"]))


def _with_winner(front: list[Trial], best: Trial | None) -> list[Trial]:
    """The front, and the winner where its confirmation was, within noise, slower than the next trial's probe."""
    if best is None or best in front:
        return front
    return sorted([*front, best], key=lambda t: (t.step_s or 0.0, t.device_used_bytes or 0))
