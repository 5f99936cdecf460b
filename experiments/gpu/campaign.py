"""run: the whole campaign as one command, within so many minutes; the next one goes on where it was ended."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import autofit
from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import write_json
from autofit.probing.fork_server import ForkServer
from gpu.allowance import Allowance
from gpu.bisect import RESULTS as BISECTED
from gpu.bisect import bisect, unfinished
from gpu.card import Card, card_here
from gpu.children import server
from gpu.configs import TWO_RANKS, VLLM, Config, chosen
from gpu.folder import Folder, by_name
from gpu.measure import AGAIN, RESULTS, measure, measured_already
from gpu.predict import not_predicted, predict, predictions
from gpu.ranks import RANKS, Ranks, of_ranks
from gpu.report import report
from gpu.searches import result_path, search, targets

CARD = "card.json"
_PREPARED_S = 600.0
_FIRST_PART = 12  # configurations, after which that of vLLM comes
# The share of all the time until which each stage may begin something new; what one leaves, the next ones have.
_UNTIL = {"measure": 0.55, "ranks": 0.62, "bisect": 0.75, "search": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of a campaign."""

    tiny: bool = False
    only: tuple[str, ...] = ()
    minutes: float = 40
    each_s: float = 120
    trials: int = 12

    def __post_init__(self) -> None:
        if self.minutes <= 0 or self.trials < 1 or self.each_s <= 0:
            raise ConfigError(
                f"a campaign needs --minutes and --each above 0 and --trials of at least 1; got {self.minutes:g}, "
                f"{self.each_s:g} and {self.trials}"
            )

    def configs(self, *, vllm: bool) -> tuple[Config, ...]:
        """In order of value; with vLLM where it is installed."""
        found = chosen(tiny=self.tiny, only=self.only)
        if self.only or self.tiny or not vllm:
            return found
        return (*found[:_FIRST_PART], VLLM, *found[_FIRST_PART:])

    def ranks(self, card: Card) -> tuple[Ranks, ...]:
        """Those of two ranks, where there are two cards that are alike, and a simulated one."""
        can = card.visible > 1 and card.alike and card.simulated is not None
        return RANKS if can and not (self.tiny or self.only) else ()


def run(folder: Folder, plan: Plan) -> None:
    """Measure, search for least capacities, search with two targets, predict; table.md is written after every line."""
    began = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join([*_IMPORTED_FROM, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["HF_HUB_CACHE"] = str(folder.home / "no-models")  # without a cache every model is the catalogue's
    vllm = find_spec("vllm") is not None
    configs = plan.configs(vllm=vllm)
    with server(folder.home) as fork_server:
        card = card_here(fork_server, folder.home)
        print(f"{card.words}; visible: {card.visible}{f'; {card.about}' if card.about else ''}", flush=True)
        ranks = plan.ranks(card)
        _prepare(fork_server, folder, [*configs, *(TWO_RANKS if ranks else ())], tiny=plan.tiny)
        out = folder.home / "results" / card.folder_name
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / CARD, card.to_json())
        campaign = _Campaign(folder, plan, card, configs, ranks, out, fork_server, began, vllm)
        campaign.write_table()
        campaign.run()
    print(f"{out / 'table.md'}; {time.monotonic() - began:.0f} s", *campaign.left_out(), sep="\n", flush=True)


_IMPORTED_FROM = [str(Path(__file__).parents[1]), str(Path(autofit.__file__).parents[1])]


def _prepare(fork_server: ForkServer, folder: Folder, configs: Sequence[Config], *, tiny: bool) -> None:
    """In a child: this process imports no torch."""
    missing = [c.name for c in configs if not (folder.case(c).exists() and folder.recipe(c).exists())]
    if not missing:
        return
    log = folder.home / "prepare.log"
    ending = fork_server.call({
        "entry": "gpu.prepare:run", "argument": json.dumps({"home": str(folder.home), "only": missing, "tiny": tiny}),
        "cwd": str(Path.cwd()), "env": {}, "log": str(log), "deadline_s": _PREPARED_S,
    })  # fmt: skip
    if ending.exit_code:
        raise EnvironmentFault(f"models and data could not be prepared; see {log}")


@dataclass(frozen=True, slots=True)
class _Campaign:
    folder: Folder
    plan: Plan
    card: Card
    configs: tuple[Config, ...]
    ranks: tuple[Ranks, ...]
    out: Path
    fork_server: ForkServer
    began: float
    vllm: bool

    def run(self) -> None:
        self._measure(self.configs, self._until(_UNTIL["measure"]))
        if self.ranks:
            of_ranks(self.fork_server, self.folder, self.ranks, self.out / RESULTS, card=str(self.card.simulated),
                     device="cuda", allowance=self._until(_UNTIL["ranks"]), after_each=self.write_table)  # fmt: skip
        self._bisect(self._until(_UNTIL["bisect"]))
        self._search(self._until(_UNTIL["search"]))
        tried = by_name(self.out / RESULTS)  # what failed is tried again by the next command
        whole = self._until(1.0, reserve_s=self._again_s())
        self._measure([config for config in self.configs if config.name not in tried], whole)
        self._bisect(whole)
        self._search(whole)
        self._measure(self.configs[:1], self._until(1.0), again=True)
        if self.card.simulated is not None:
            self._predict(self.card.simulated, self._until(1.0))
        self.write_table()

    def _measure(self, configs: Sequence[Config], allowance: Allowance, *, again: bool = False) -> None:
        measure(self.fork_server, self.folder, configs, self.out, device="cuda", allowance=allowance, profiles=True,
                again=again, after_each=self.write_table)  # fmt: skip

    def _bisect(self, allowance: Allowance) -> None:
        bisect(self.fork_server, self.folder, self.configs, self.out, device="cuda", allowance=allowance,
               after_each=self.write_table)  # fmt: skip

    def _search(self, allowance: Allowance) -> None:
        for name, nbytes in targets(self.out, self.configs).items():
            for config in (config for config in self.configs if "search" in config.tags):
                if result_path(self.out, name).exists() or not allowance.in_time():
                    continue
                left_s = max(1.0, allowance.ends_by - self._again_s() - time.monotonic())
                search(self.folder, config, self.out, name, nbytes, trials=self.plan.trials,
                       within_s=left_s / 2 if name == "T1" else left_s)  # fmt: skip
                self.write_table()

    def _predict(self, card: str, allowance: Allowance) -> None:
        predict(self.fork_server, self.folder, self.configs, self._told, card=card, allowance=allowance,
                after_each=self.write_table)  # fmt: skip
        of_ranks(self.fork_server, self.folder, self.ranks, predictions(self._told, card), card=card,
                 device=f"sim:{card}", allowance=allowance, after_each=self.write_table)  # fmt: skip

    @property
    def _told(self) -> Path:
        """The folder of predictions: they may have been made before, on a machine without a card."""
        return self.folder.home / "results"

    def _until(self, share: float, *, reserve_s: float = 0.0) -> Allowance:
        whole_s = 60 * self.plan.minutes
        return Allowance(begins_until=self.began + share * whole_s - reserve_s, ends_by=self.began + whole_s,
                         each_s=self.plan.each_s)  # fmt: skip

    def _again_s(self) -> float:
        """Seconds that are kept for the second measurement of the first configuration."""
        took = by_name(self.out / RESULTS).get(self.configs[0].name, {}).get("s")
        return 1.5 * took if isinstance(took, float) else 0.0

    def write_table(self) -> None:
        report(self.out, self._told, self.card, self.configs, tuple(self.left_out()))

    def left_out(self) -> Iterator[str]:
        """A line for each part that this machine, or the time, did not allow."""
        measured, results = measured_already(self.out / RESULTS), by_name(self.out / RESULTS)
        wrong = [c.name for c in self.configs if c.name in results and c.name not in measured]
        missing = [c.name for c in self.configs if c.name not in measured and c.name not in wrong]
        lines = {
            "not measured": missing,
            "failed, and tried again by the next run": wrong,
            "least capacity": [c.name for c in unfinished(self.out / BISECTED, self.configs)],
            "search": [name for name in ("T1", "T2") if not result_path(self.out, name).exists()],
            "measured again for drift": [self.configs[0].name] * (f"{self.configs[0].name}{AGAIN}" not in measured),
        }  # fmt: skip
        yield from (f"LEFT OUT: {what}: {' '.join(names)}" for what, names in lines.items() if names)
        if not self.vllm:
            yield "LEFT OUT: vLLM: it is not installed"
        if not self.ranks:
            yield f"LEFT OUT: ranks: {self._no_ranks()}"
        elif left := [one.name for one in self.ranks if one.name not in measured]:
            yield f"LEFT OUT: ranks: {' '.join(left)}"
        if self.card.simulated is None:
            yield f"LEFT OUT: predictions: {self.card.about}"
        elif left := [c.name for c in not_predicted(predictions(self._told, self.card.simulated), self.configs)]:
            yield f"LEFT OUT: predictions (the step predict needs no card): {' '.join(left)}"

    def _no_ranks(self) -> str:
        if self.plan.tiny or self.plan.only:
            return "not in a part of the campaign"
        if self.card.visible < 2:
            return "one card is visible"
        return "the visible cards are not alike, or are slices" if not self.card.alike else self.card.about
