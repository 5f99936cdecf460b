"""The parts of the acceptance: which command makes which results again, and what is read from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from experiments.acceptance import figures, standing
from experiments.acceptance.figures import Figure


@dataclass(frozen=True, slots=True)
class Part:
    """An experiment: its command, the file or folder that it writes, its figures, and its minutes on two cores.

    One without a command stands as it was made: a run reads its figures and does not make it again.
    """

    name: str
    says: str
    command: tuple[str, ...]
    results: str  # below experiments/
    figures: Callable[[], list[Figure]]
    minutes: float
    needs: str = ""  # what a machine must have besides this repository


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)


# In the order of their worth: what does not fit into the minutes is left for the next run.
PARTS = (
    Part("search", "README's own search", _python("-m", "experiments.acceptance.first_search"),
         "acceptance/first_search.json", figures.search_figures, 1),
    Part("seeds", "the five seeds' configurations, predicted", _python("experiments/seeds/run.py"),
         "seeds/results.json", figures.seed_figures, 2),
    Part("threads", "users' threads: symptom and accepted fix",
         _python("-m", "experiments.field", "--stale", "--untimed", "--no-notes", "--advice-time", "40"),
         "field/results", figures.thread_figures, 11),
    Part("neutrality", "which settings keep the gradient", _python("experiments/neutrality/run.py"),
         "neutrality/results.json", figures.neutrality_figures, 5),
    Part("ranks", "peaks of real ranks", _python("-m", "experiments.ranks.peaks"), "ranks/peaks.json",
         figures.rank_figures, 8),
    Part("faults", "full runs under faults", _python("-m", "experiments.faults"), "faults/results.json",
         figures.fault_figures, 6),
    Part("search efficiency", "probes that a search needs", _python(
         "experiments/search_efficiency/run.py", "--seeds", "4", "--gp-seeds", "1", "--no-plot",
         "--out", "experiments/search_efficiency/sample"), "search_efficiency/sample/summary.json",
         figures.efficiency_figures, 5),
    Part("peers", "bytes of other estimators and of autofit on measured rows", _python(
         "-m", "experiments.peers", "run", "--peer", "autofit fit-check", "--again", "--minutes", "6"),
         "peers/results.json", figures.peer_figures, 6),
    Part("measured", "peaks and seconds that others measured on cards",
         _python("-m", "experiments.accuracy", "run", figures.MEASURED_AGAIN, "--again"), "accuracy/results",
         figures.measured_figures, 7,
         needs="the projects' own code: the internet, or a clone in $AUTOFIT_CACHE/accuracy/clones"),
    Part("forecasts", "forecasts of drawn candidates beside whole simulations", _python(
         "-m", "experiments.tabular.whole", "--only", "sft-0.5b-rtx4090", "--only", "dpo-0.5b-rtx3090",
         "--only", "reward-1b-rtx4090", "--only", "grpo-1.5b-a100-40gb"), "tabular/whole.json",
         figures.forecast_figures, 5),
    Part("engines", "throughputs of vLLM that others published", _python("-m", "experiments.engines"),
         "engines/table.md", standing.engine_figures, 0.5),
    Part("older", "commands beside the commit on which their goals were set, in turns, on one machine", (),
         "acceptance/older.json", figures.older_figures, 0, needs="half an hour of a machine of its own: "
         "python -m experiments.acceptance.older"),
    Part("cards", "bytes and seconds on H100s and an H200 of ours", (), "gpu", standing.card_figures, 0,
         needs="an H100 and an H200"),
    Part("oracle", "bytes against torch's own CUDA allocator", (), "oracle", standing.oracle_figures, 0,
         needs="the CUDA build of torch"),
)  # fmt: skip


def chosen(names: list[str] | None) -> tuple[Part, ...]:
    """The parts of these names, or all. Raises SystemExit for a name that there is not."""
    known = {part.name: part for part in PARTS}
    for name in names or ():
        if name not in known:
            raise SystemExit(f"--only must be one of {', '.join(known)}; got {name}")
    return tuple(known[name] for name in names) if names else PARTS
