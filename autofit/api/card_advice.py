"""`autofit.advise`: the card, and the number of them, for a recipe, with the cost."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.box import HORIZONTALS
from rich.markup import escape
from rich.table import Table

from autofit.api.arguments import COUNTS, cards_of, counts_of, named_as_arguments
from autofit.api.estimating import Asked, estimator
from autofit.api.events import Event, OnEvent, silent
from autofit.api.reading import Given
from autofit.api.tables import Shown
from autofit.errors import at_least_one, option
from autofit.fakegpu.specs import gpu_spec
from autofit.folding import Folding
from autofit.forecast.offers import STEPS, Choice, Offer, OfferVerdict, Shop, choice
from autofit.frontends.writing import own_words, wrong_with
from autofit.hardware.hardware import card_needs
from autofit.hardware.prices import Price, StatedPrices
from autofit.hardware.prices import prices as price_list
from autofit.recipe.launch import Launch
from autofit.recipe.launching import launch_options
from autofit.recipe.profile import profile
from autofit.recipe.recipe import Recipe, own_names
from autofit.space.traits import describe_changes, samples_word
from autofit.units import format_bytes, format_seconds

_NVLINK = 50e9  # bytes/s between cards, which PCIe does not reach and every NVLink here does
_IN_YOUR_FILE = ", in your file: "


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CardAdvice(Shown):
    """The offers for one recipe. `str` of it is a table, and a sentence for each that stands out."""

    recipe: Recipe
    offers: tuple[Offer, ...]
    prices: Mapping[str, Price]  # of the cards in the table, by name
    missing: tuple[tuple[str, int], ...] = ()  # (card, count) of the offers that Ctrl-C left unmade

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended it before all offers were made; the same call goes on."""
        return bool(self.missing)

    @property
    def choice(self) -> Choice:
        """The cheapest, the fastest and the smallest offer."""
        return choice(self.offers)

    @property
    def fits(self) -> bool:
        """True if any offer fits."""
        return any(offer.fits for offer in self.offers)

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit advise --json` prints: plain values only."""
        chosen = self.choice
        named = {name: getattr(chosen, name) for name in ("cheapest", "fastest", "smallest")}
        return {
            "model": self.recipe.model,
            "effective_batch": self.recipe.effective_batch_size,
            "offers": [offer.to_json() for offer in self.offers],
            **{name: None if offer is None else _name(offer.card, offer.count) for name, offer in named.items()},
            "prices": {card: asdict(price) for card, price in self.prices.items()},
            "interrupted": self.interrupted,
            "missing": [_name(card, count) for card, count in self.missing],
        }

    def parts(self) -> list[Table | str]:
        """The table, and what stands out."""
        made: list[Table | str] = [self._table(), *self._sentences(), self._about()] if self.offers else []
        return [*made, self._interruption] if self.interrupted else made

    @property
    def _interruption(self) -> str:
        missing, rows = len(self.missing), len(self.missing) + len(self.offers)
        return (
            f"Interrupted: {missing} of {rows} rows {'is' if missing == 1 else 'are'} missing. The same command "
            "continues; finished simulations are kept."
        )

    def _table(self) -> Table:
        word = samples_word(self.recipe.resolved)
        title = f"{self.recipe.model}, effective batch {self.recipe.effective_batch_size}, predicted"
        table = Folding(title=title, narrow=self._narrow_table(title))
        for name in ("cards", "", "with"):
            table.add_column(name, overflow="fold", min_width={"cards": 10, "with": 24}.get(name))
        figures = zip(*(self._row(offer)[3:] for offer in self.offers), strict=True)
        names = ("device-used", "host RAM", "step", f"{word}/s", "$/1,000 steps")
        for name, cells in zip(names, figures, strict=True):
            table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *cells))))
        marks = self._marks()
        last = self.offers[0].card if self.offers else ""
        for offer in self.offers:
            if offer.card != last:
                table.add_section()
                last = offer.card
            words, *others = self._row(offer)
            table.add_row("\n".join((words, *marks.get(id(offer), ()))), *others)
        return table

    def _narrow_table(self, title: str) -> Folding:
        """The same in five columns, some with two figures."""
        word, marks = samples_word(self.recipe.resolved), self._marks()
        table = Folding(title=title, box=HORIZONTALS, show_lines=True, padding=(0, 1, 0, 0))
        for name in ("cards", "with"):
            table.add_column(name, overflow="fold", min_width={"cards": 14}.get(name))
        for name in ("device-used\nhost RAM", f"step\n{word}/s", "$/1,000\nsteps"):
            table.add_column(name, justify="right", no_wrap=True)
        for offer in self.offers:
            words, verdict, what, used, host, step, rate, usd = self._row(offer)
            head = "\n".join((words, verdict, *marks.get(id(offer), ())))
            table.add_row(head, what, *(f"{one}\n{two}" for one, two in ((used, host), (step, rate))), usd)
        return table

    def _row(self, offer: Offer) -> list[str]:
        done = offer.verdict in (OfferVerdict.FITS, OfferVerdict.TIGHT)
        what = self._changes(offer) if done else offer.reason
        used = "-" if offer.shown_bytes is None else f"{offer.shown_bytes / 1e9:.1f}"
        return [
            offer.words,
            f"{offer.verdict} ({offer.tier})" if self._changed(offer) and done else str(offer.verdict),
            escape(what),
            f"{used} of {format_bytes(offer.capacity_bytes)}",
            "-" if offer.host_bytes is None else f"{offer.host_bytes / 1e9:.0f} GB",
            offer.step_words,
            "-" if offer.samples_per_s is None or offer.is_lower_bound else f"{offer.samples_per_s:.2f}",
            f"{'over ' if offer.is_lower_bound else ''}{_usd(offer.usd_per_1000_steps)}",
        ]

    def _marks(self) -> dict[int, list[str]]:
        chosen, found = self.choice, dict[int, list[str]]()
        for name in ("cheapest", "fastest", "smallest"):
            if (offer := getattr(chosen, name)) is not None:
                found.setdefault(id(offer), []).append(name)
        return found

    def _sentences(self) -> list[str]:
        chosen = self.choice
        if chosen.smallest is None:
            known = any(offer.device_used_bytes is not None for offer in self.offers)
            return [f"Nothing here fits; the rows say {'what the smallest change tried needs' if known else 'why'}."]
        found = []
        if (offer := chosen.cheapest) is not None:
            steps = f"{STEPS:,} steps of {format_seconds(offer.step_s or 0)}"
            found.append(
                _ended(f"Cheapest: {offer.words}, ${_usd(offer.usd_per_1000_steps)} for {steps}", self._how(offer))
            )
        if (offer := chosen.fastest) is not None:
            how = "" if offer is chosen.cheapest else self._how(offer)
            found.append(_ended(f"Fastest: {offer.words}, {format_seconds(offer.step_s or 0)} a step", how))
        found.append(self._smallest(chosen.smallest, is_told=chosen.smallest in (chosen.cheapest, chosen.fastest)))
        return [*found, *self._not_compared(chosen.smallest), *self._slower()]

    def _smallest(self, offer: Offer, *, is_told: bool) -> str:
        """The smallest offer in a sentence, with the others whose cards are sold as the same size."""
        same = [
            o.words
            for o in self.offers
            if (o.verdict, o.tier, o.nominal_bytes) == (offer.verdict, offer.tier, offer.nominal_bytes)
            and o is not offer
        ]
        tie = f" (sold as the same size: {', '.join(same)})" if same else ""
        how = "" if is_told else self._how(offer)
        return _ended(f"Smallest: {offer.words}, {format_bytes(offer.memory_bytes)} in all{tie}", how)

    def _not_compared(self, best: Offer) -> list[str]:
        """Sentence on the rows left out of the marks, if one of them has a lower figure than a marked row."""
        lower = [offer for offer in self.offers if offer.step_s is not None and self._is_lower(offer)]
        fitting = [offer for offer in lower if offer.verdict is best.verdict]
        of_tier = [offer for offer in fitting if offer.tier == best.tier]
        kinds = (
            (len(fitting) > len(of_tier), f"of a lower tier than {best.tier}"),
            (bool(of_tier), 'with "over" for a step'),
            (len(lower) > len(fitting), f'that are "{OfferVerdict.TIGHT}"'),
        )
        rows = [f"rows {words}" for left_out, words in kinds if left_out]
        return [f"Not compared for these, though some have lower figures: {', '.join(rows)}."] if rows else []

    def _is_lower(self, offer: Offer) -> bool:
        """True if a figure of this row is lower than that of the row marked for it."""
        chosen = self.choice
        figures = (
            (None if chosen.cheapest is None else chosen.cheapest.usd_per_1000_steps, offer.usd_per_1000_steps),
            (None if chosen.fastest is None else chosen.fastest.step_s, offer.step_s),
            (None if chosen.smallest is None else chosen.smallest.nominal_bytes, offer.nominal_bytes),
        )
        return any(best is not None and own is not None and own < best for best, own in figures)

    def _slower(self) -> list[str]:
        """A sentence on cards without NVLink that are slower than half as many of them, in the same tier."""
        known = {(o.card, o.count): o for o in self.offers if o.step_s is not None and not o.is_lower_bound}
        slower = [
            f"{offer.words} are slower than {half.count}"
            for (card, count), offer in known.items()
            if (half := known.get((card, count // 2))) is not None
            and (count % 2, half.tier) == (0, offer.tier)
            and (offer.step_s or 0) > (half.step_s or 0)
            and gpu_spec(card).peer_bytes_per_s < _NVLINK
        ]
        if not slower:
            return []
        return [
            f"{', '.join(slower)}: without NVLink collectives take long, and machines of such cards differ several "
            "times (`autofit estimate` prints the interval of a step)."
        ]

    def _how(self, offer: Offer) -> str:
        changed = self._changed(offer)
        launched = {f"launch.{key}" if key in Launch.__slots__ else key: value for key, value in changed.items()}
        cards, foreign = self._cards(offer), self.recipe.foreign
        own = own_words(foreign, {**cards, **launched})
        words = f", with {self._changes(offer)} ({offer.tier})" if changed else ""
        refused = next(iter(wrong_with(foreign, {**cards, **launched})), "") if cards else ""
        return words + (f"{_IN_YOUR_FILE}{own}" if own else "") + (f" (error: {refused})" if refused else "")

    def _cards(self, offer: Offer) -> dict[str, object]:
        """The number of cards as a change, where it is another one and the recipe's tool reads it from the file."""
        says = profile(self.recipe.trainer).own_launch
        return self.recipe.launch.changed_to(offer.count, offer.machines) if says else {}

    def _changes(self, offer: Offer) -> str:
        launch = self.recipe.launch
        return describe_changes(
            self._changed(offer),
            {**self.recipe.resolved, "sharding": launch.sharding, "offload": launch.offload},
            own_names(self.recipe.foreign),
        )

    def _changed(self, offer: Offer) -> Mapping[str, object]:
        """The changes, and the batch of a rank if its number of ranks needs another micro-batch than the recipe's."""
        own, keys = self.recipe.resolved, self.recipe.keys
        beside = keys.scored, keys.referred, keys.engine_ranks
        differs = {key: value for key, value in offer.batch.items() if value != own.get(key)}
        if keys.micro_batch in offer.changes or keys.micro_batch not in differs:
            differs = {key: value for key, value in differs.items() if key in beside}
        return {**{key: value for key, value in differs.items() if key not in offer.changes}, **offer.changes}

    def _about(self) -> str:
        cards = dict.fromkeys(offer.card for offer in self.offers)
        dates = sorted({p.date for name in cards if (p := self.prices.get(name)) is not None and p.date})
        span = "" if not dates else f" of {dates[0]}" if len(dates) == 1 else f" of {dates[0]} to {dates[-1]}"
        without = [name for name in cards if name not in self.prices]
        span += f", none for {', '.join(without)}" if without else ""
        untimed = any(offer.is_lower_bound for offer in self.offers)
        host = "Over: with offload, the optimizer's step on the host comes on top and is not timed. " if untimed else ""
        full = any(offer.cached_bytes for offer in self.offers)
        host += "Blocks that PyTorch only keeps are left out of device-used where they fill the card. " if full else ""
        sized = profile(self.recipe.trainer).own_launch
        larger = ", then with the largest micro-batches that fit, where they are faster" if sized else ""
        one = "one number of cards" if sized else "one card"
        return host + (
            f"Every row is the recipe as it is, or with the mildest change that fits{larger}; host RAM is what the "
            "tensors of all ranks of a machine need to load, train and save, without Python and its libraries; "
            f"`autofit search` finds the fastest config of {one}. Prices: on-demand lists{span}; "
            f"{option('prices', 'FILE')} has your own."
        )


@named_as_arguments()
def advise(
    recipe: Given | None = None, *,
    cards: Sequence[str] | str | None = None,
    counts: Sequence[int] = COUNTS,
    prices: StatedPrices | None = None,
    trainer: str | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    deadline: str | float = "15m",
    parallel: int | None = None,
    on_event: OnEvent | None = None,
) -> CardAdvice:  # fmt: skip
    """Which card, and how many of them, run a recipe at exactly its effective batch: all are simulated.

    `cards` are names of cards (a list, or "l4,h100"), or "all" (default: those that are rented most); `counts` are
    numbers of cards. `prices` is a YAML file or a mapping {card: dollars an hour} over autofit's dated list. `recipe`,
    `trainer`, `changes`, `prompt_tokens`, `accelerate_config`, `num_processes` (which the recipe is written for) and
    `deadline` are as `autofit.estimate` takes them. `parallel` bounds the simulations at once. Simulated answers are
    kept, so that asking again takes seconds. Ctrl-C ends the simulations at work and returns the offers that are
    finished, with `interrupted` set; a KeyboardInterrupt is raised only while the recipe is read.

    Raises ConfigError for a recipe, a card, a count or a price that cannot be.
    """
    tell = on_event or silent
    chosen, numbers = cards_of(cards), counts_of(counts)
    at_least_one("parallel", parallel)
    listed = price_list(prices)
    _, launch = launch_options(gpu=None, accelerate_config=accelerate_config, num_processes=num_processes, gpus=None)
    able = [spec for spec in chosen if card_needs(changes or {}).met_by(spec)] or chosen
    first = max(able, key=lambda spec: (spec.compute_capability, spec.capacity_bytes))
    asked = Asked(
        recipe=recipe, gpu=first.name, target_vram=None, trainer=trainer, changes=changes,
        prompt_tokens=prompt_tokens, deadline=deadline, launch=launch,
    )  # fmt: skip
    with estimator(asked, silent) as made:
        batch = made.recipe.effective_batch_size
        kinds = f"{len(chosen)} kind{'s' if len(chosen) > 1 else ''} of card"
        tell(Event(text=f"{made.recipe.model} on {kinds} x {', '.join(map(str, numbers))}, "
                        f"effective batch {batch}"))  # fmt: skip
        for note in made.recipe.notes:
            tell(Event(label="note", text=note))

        def cancel() -> None:
            tell(Event(text="stopping the simulations at work", interrupted=True))
            made.cancel()

        shop = Shop(
            made.recipe, replace(made, least_of_fits=False).probe_on, listed, tell=lambda text: tell(Event(text=text)),
            cancel=cancel, workers=parallel or min(len(numbers), os.cpu_count() or 1),
        )  # fmt: skip
        found = shop.offers(chosen, numbers)
    done = {(offer.card, offer.count) for offer in found}
    return CardAdvice(
        recipe=made.recipe, offers=found, prices={s.name: listed[s.name] for s in chosen if s.name in listed},
        missing=tuple(row for s in chosen for count in numbers if (row := (s.name, count)) not in done),
    )  # fmt: skip


def _ended(words: str, how: str) -> str:
    """A sentence; the full stop is left out after keys of the user's file, which are pasted."""
    return f"{words}{how}" if _IN_YOUR_FILE in how and not how.endswith(")") else f"{words}{how}."


def _name(card: str, count: int) -> dict[str, object]:
    return {"card": card, "count": count}


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
