"""The Python API: typed arguments in, frozen results out. It prints nothing; the command line is a skin over it."""

from autofit.api.estimating import Estimate, estimate
from autofit.api.events import Event, Progress
from autofit.api.promoting import PromotionResult, ProofResult, promote, verify
from autofit.api.results import SearchResult
from autofit.api.searching import report, search
from autofit.api.trials import TrialResult

__all__ = [
    "Estimate", "Event", "Progress", "PromotionResult", "ProofResult", "SearchResult", "TrialResult", "estimate",
    "promote", "report", "search", "verify",
]  # fmt: skip
