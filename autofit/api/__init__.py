"""The Python API: typed arguments in, frozen results out, silent; the command line is a skin over it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autofit.api.card_advice import CardAdvice, advise
    from autofit.api.estimating import Check, Estimate, check, estimate
    from autofit.api.events import Event, Progress, TrialResult
    from autofit.api.job_list import Job, Jobs, jobs
    from autofit.api.listing import Studies, studies
    from autofit.api.monitoring import Snapshot, monitor
    from autofit.api.pipeline import PipelineResult, StageResult, run
    from autofit.api.promoting import PromotionResult, ProofResult, promote, verify
    from autofit.api.reading import Explained, explain
    from autofit.api.results import SearchResult
    from autofit.api.searching import report, search

__all__ = [
    "CardAdvice", "Check", "Estimate", "Event", "Explained", "Job", "Jobs", "PipelineResult", "Progress",
    "PromotionResult", "ProofResult", "SearchResult", "Snapshot", "StageResult", "Studies", "TrialResult", "advise",
    "check", "estimate", "explain", "jobs", "monitor", "promote", "report", "run", "search", "studies", "verify",
]  # fmt: skip

_FOUND_IN = {  # loaded when first asked for: an estimate needs none of a search's libraries, which take 0.6 s
    "CardAdvice": "card_advice", "advise": "card_advice",
    "Job": "job_list", "Jobs": "job_list", "jobs": "job_list",
    "Explained": "reading", "explain": "reading",
    "Check": "estimating", "Estimate": "estimating", "Event": "events", "Progress": "events",
    "PromotionResult": "promoting", "ProofResult": "promoting", "SearchResult": "results", "TrialResult": "events",
    "Snapshot": "monitoring", "Studies": "listing", "monitor": "monitoring", "studies": "listing",
    "check": "estimating", "estimate": "estimating", "promote": "promoting", "report": "searching",
    "search": "searching", "verify": "promoting", "PipelineResult": "pipeline",
    "StageResult": "pipeline", "run": "pipeline",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FOUND_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
