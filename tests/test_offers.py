"""Which cards, and how many, for a recipe: against cards that hold bytes and take seconds by a law."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import command_line
import psutil
import pytest
import tiny
from recipes import grpo_recipe, trl_facts
from rich.console import Console

from autofit.api.card_advice import CardAdvice
from autofit.errors import ConfigError, EnvironmentFault
from autofit.fakegpu.specs import GPU_SPECS, gpu_spec
from autofit.forecast.offers import Offer, OfferVerdict, Shop, choice, ladders
from autofit.hardware.prices import Price, prices
from autofit.probing.host_memory import host_memory
from autofit.probing.result import ProbeResult, ProbeStatus
from autofit.recipe.keys import QUANT_STORAGE, SYNC_EACH_BATCH
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe, inner_value, spread, with_launch

GB = 10**9
SPACE = Path(__file__).parents[1] / "search_spaces" / "grpo.yaml"
PRICES = {"a100-80gb": Price(usd_per_hour=2.0), "h100": Price(usd_per_hour=4.0)}


@dataclass
class Cards:
    """Simulated cards: weights, gradients and optimizer state are shared by sharding ranks, activations are not."""

    states: int = 40 * GB
    activations_a_sample: int = 5 * GB
    gradients: int = 0  # that FSDP holds between two micro-batches, unless each is synced
    asked: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        with self.lock:
            self.asked.append((device, values))
        spec, launch = gpu_spec(device.removeprefix("sim:")), Launch.of(values)
        micro = int(str(values["per_device_train_batch_size"]))
        samples = micro * int(str(values["gradient_accumulation_steps"]))
        states = 0 if launch.offload == "parameters" else self.states // 10 if values.get("use_peft") else self.states
        if launch.sharding == "fsdp2":
            states //= launch.ranks
            if values["gradient_accumulation_steps"] != 1 and not inner_value(values, SYNC_EACH_BATCH):
                states += self.gradients
        used = spec.context_bytes + states + self.activations_a_sample * micro
        step_s = samples * 1e15 / spec.half_flops_per_s + (0.1 if launch.ranks > 1 else 0.0)
        step_s += 5.0 if launch.offload == "parameters" else 0.0
        fits = used <= capacity_bytes
        host = host_memory(launch, 15 * GB, kept_bytes=self.states // launch.ranks if launch.offload != "none" else 0)
        return ProbeResult(
            status=ProbeStatus.FIT if fits else ProbeStatus.OOM, device=device, device_used_bytes=used,
            least_capacity_bytes=None if fits else used, step_s=(step_s,), host=None if launch.is_plain else host,
        )  # fmt: skip


def recipe(**changes: object) -> Recipe:
    """16 completions a step, all values given."""
    found = grpo_recipe(**{"dtype": "bfloat16", **changes})
    kept = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    return replace(found, values={**found.values, **{key: found.resolved[key] for key in kept}}, space=SPACE)


def offers(cards: Cards, names: list[str], counts: tuple[int, ...] = (1, 2, 4, 8), **changes: object) -> list[Offer]:
    shop = Shop(recipe(**changes), cards, PRICES, workers=2)
    return list(shop.offers([gpu_spec(name) for name in names], counts))


def by_words(found: list[Offer]) -> dict[str, Offer]:
    return {offer.words: offer for offer in found}


def test_a_card_with_room_gets_the_recipe_as_it_is() -> None:
    found = by_words(offers(Cards(), ["a100-80gb", "h100"]))
    assert [o.verdict for o in found.values()] == [OfferVerdict.FITS] * 8
    assert all(o.changes == {} and o.tier == "neutral" for o in found.values())


def test_every_offer_keeps_the_effective_batch() -> None:
    cards = Cards()
    offers(cards, ["a100-80gb", "rtx4090"])
    for _, values in cards.asked:
        ranks = Launch.of(values).ranks
        batch = int(str(values["per_device_train_batch_size"])) * int(str(values["gradient_accumulation_steps"]))
        assert batch * ranks == 16


def test_a_row_has_the_batch_of_its_ranks_and_the_table_shows_another_micro_batch() -> None:
    """5 x 6 samples on one card are 3 x 2 on five; 5 x 3 on two keep the micro-batch."""
    sizes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 6}
    own = recipe(**sizes)
    made = replace(own, **trl_facts("sft", dict(own.resolved)))
    found = tuple(Shop(made, Cards(activations_a_sample=GB), PRICES).offers([gpu_spec("h100")], (1, 2, 5)))
    batches = [tuple(row.to_json()["batch"].values()) for row in found]  # type: ignore[attr-defined]
    assert batches == [(5, 6), (5, 3), (3, 2)]
    assert [dict(row.changes) for row in found] == [{}, {}, {}]
    text = " ".join(str(CardAdvice(recipe=made, offers=found, prices=PRICES)).split())
    assert "prices has your own." in text, "a Python user has no --prices"
    assert "per_device_train_batch_size 5 -> 3, gradient_accumulation_steps 6 -> 2 (neutral)" in text
    assert text.count("the recipe as it is │") == 2


def test_a_card_gets_the_largest_half_of_the_micro_batch_that_fits() -> None:
    """One sample at a time is slow: 8B with LoRA cost twice as much on a 4090, which another card then undercut."""
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    (row,) = offers(Cards(states=20 * GB), ["h100"], (1,), **sizes)
    assert list(row.batch.values())[:2] == [8, 2]
    (row,) = offers(Cards(states=20 * GB, activations_a_sample=20 * GB), ["h100"], (1,), **sizes)
    assert list(row.batch.values())[:2] == [2, 8]


def test_more_than_eight_cards_are_in_machines_of_eight() -> None:
    eight, sixteen = offers(Cards(), ["h100"], counts=(8, 16))
    assert [(row.words, row.machines) for row in (eight, sixteen)] == [("8 x h100", 1), ("2 x 8 x h100", 2)]
    on_two = spread(recipe(), 16)
    on_two = with_launch(on_two, replace(on_two.launch, machines=2))
    assert [spread(on_two, ranks).launch.machines for ranks in (2, 8)] == [1, 1]


def test_a_row_of_a_trainer_that_generates_has_its_rollout() -> None:
    row = offers(Cards(activations_a_sample=30 * GB), ["h100"], counts=(2,))[0]
    micro, accumulation, rollout = row.batch.values()
    assert (micro, accumulation, rollout) == (1, 8, 8)
    assert list(row.batch)[-1] == "steps_per_generation"


def test_a_row_whose_cache_fills_the_card_shows_what_the_recipe_needs() -> None:
    def filled(device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        found = Cards()(device, capacity_bytes, values)
        return replace(found, device_used_bytes=capacity_bytes, least_capacity_bytes=found.device_used_bytes)

    (full,) = Shop(recipe(), filled, PRICES, workers=1).offers([gpu_spec("h100")], (1,))
    (plain,) = offers(Cards(), ["h100"], (1,))
    assert full.verdict is OfferVerdict.FITS
    assert (full.device_used_bytes, full.shown_bytes) == (full.capacity_bytes, plain.device_used_bytes)


def test_more_cards_are_slower_by_communication_at_most_and_never_need_more_memory() -> None:
    found = by_words(offers(Cards(), ["h100"]))
    one, eight = found["h100"], found["8 x h100"]
    assert one.step_s is not None
    assert eight.step_s is not None
    assert eight.step_s <= one.step_s / 8 + 0.1 + 1e-9
    assert (eight.device_used_bytes or 0) <= (one.device_used_bytes or 0)


def test_the_cost_is_price_times_cards_times_time() -> None:
    for offer in offers(Cards(), ["a100-80gb", "h100"]):
        assert offer.step_s is not None
        price = PRICES[offer.card].usd_per_hour
        assert offer.usd_per_1000_steps == pytest.approx(price * offer.count * 1000 * offer.step_s / 3600)


def test_a_card_that_is_too_small_alone_gets_the_mildest_change_that_fits_with_others() -> None:
    """40 GB of states and 20 of activations: on 24 GB cards they must be sharded, and the micro-batch shrink."""
    found = by_words(offers(Cards(), ["rtx4090"]))
    assert found["rtx4090"].verdict is OfferVerdict.OVER
    assert "needs" in found["rtx4090"].reason
    eight = found["8 x rtx4090"]
    assert (eight.verdict, eight.tier) == (OfferVerdict.FITS, "neutral")
    assert eight.changes["sharding"] == "fsdp2"
    assert "offload" not in eight.changes


def test_an_adapter_keeps_the_batch_where_it_has_room() -> None:
    """80 GB of states are over a card of 24 GB with any batch; 8 GB with 4 samples of 3 GB are not."""
    cards = Cards(states=80 * GB, activations_a_sample=3 * GB)
    row = offers(cards, ["rtx4090"], counts=(1,), use_peft=False)[0]
    assert (row.verdict, row.tier, row.changes["use_peft"]) == (OfferVerdict.FITS, "recipe", True)
    assert not set(row.changes) & {"per_device_train_batch_size", "gradient_accumulation_steps"}


def test_of_changes_that_cannot_fit_the_first_and_the_leanest_are_simulated() -> None:
    cards = Cards(states=400 * GB)
    row = offers(cards, ["h100"], counts=(1,), use_peft=True, load_in_4bit=True, optim="adamw_8bit")[0]
    assert row.verdict is OfferVerdict.FITS  # with a tenth of the states
    cards = Cards(states=4000 * GB)
    row = offers(cards, ["h100"], counts=(1,), use_peft=True, load_in_4bit=True, optim="adamw_8bit")[0]
    assert row.verdict is OfferVerdict.OVER
    assert [values["per_device_train_batch_size"] for _, values in cards.asked] == [4, 1]


def test_gradients_that_fsdp_keeps_whole_are_added_up_as_shards() -> None:
    cards = Cards(states=200 * GB, activations_a_sample=2 * GB, gradients=60 * GB)
    found = by_words(offers(cards, ["h100"], counts=(4, 8, 16), gradient_accumulation_steps=16))
    four, eight, sixteen = found["4 x h100"], found["8 x h100"], found["2 x 8 x h100"]
    assert four.fits
    assert (four.changes["sharding"], four.changes[SYNC_EACH_BATCH]) == ("fsdp2", True)
    assert "gradient_accumulation_steps" not in four.changes
    assert eight.changes[SYNC_EACH_BATCH] is True
    assert sixteen.fits  # 64 completions of 4 on 16 cards are one micro-batch: nothing is held in between
    assert SYNC_EACH_BATCH not in sixteen.changes


def test_sharded_4bit_weights_are_stored_as_a_float() -> None:
    keys = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_storage": None}
    found = by_words(offers(Cards(states=1600 * GB), ["h100"], counts=(4,), **keys))["4 x h100"]
    assert (found.changes["sharding"], found.changes[QUANT_STORAGE]) == ("fsdp2", "bfloat16")


@pytest.mark.parametrize(("activations", "undivided"), [(6 * GB, True), (8 * GB, False)])
def test_with_room_for_all_samples_at_once_fsdp_adds_nothing_up(activations: int, undivided: bool) -> None:
    """64 samples on 8 cards: 8 at once reduce gradients once, which is faster than once for each 4."""
    cards = Cards(states=200 * GB, activations_a_sample=activations, gradients=60 * GB)
    made = recipe(gradient_accumulation_steps=16, steps_per_generation=16, generation_batch_size=64)
    changes = Shop(made, cards, {}).offers([gpu_spec("h100")], (8,))[0].changes
    assert changes["sharding"] == "fsdp2"
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", SYNC_EACH_BATCH)
    assert [changes.get(name) for name in sizes] == ([8, 1, None] if undivided else [None, None, True])


def test_gradients_are_reduced_in_each_micro_batch_by_the_trainers_own_key() -> None:
    """verl takes no accelerator_config, and was tried with it."""
    own = recipe()
    keys = replace(own.keys, unreduced="waits")
    ours = replace(own, keys=keys, resolved={**own.resolved, "waits": True})
    sharded = with_launch(ours, Launch(ranks=8, sharding="fsdp1"))
    rungs = [rung for ladder in ladders(sharded, "sim:h100") for rung in ladder]
    assert not any("accelerator_config" in rung.values for rung in rungs)
    assert any(rung.changes.get("waits") is False for rung in rungs)


def test_offloading_is_tried_after_sharding() -> None:
    found = by_words(offers(Cards(states=400 * GB), ["rtx4090"]))
    assert found["8 x rtx4090"].changes.get("offload") == "parameters"
    assert found["8 x rtx4090"].given["launch.offload"] == "parameters"  # as `--set` and a page's button take it


def test_settings_that_fail_together_are_not_simulated() -> None:
    cards = Cards(states=400 * GB)
    row = by_words(offers(cards, ["rtx4090"], use_vllm=False))["8 x rtx4090"]
    assert "offload" not in row.changes
    assert not [values for _, values in cards.asked if Launch.of(values).offload != "none"]
    cards = Cards(states=400 * GB)
    assert by_words(offers(cards, ["rtx4090"], use_vllm=True))["8 x rtx4090"].changes["offload"] == "parameters"


def sft_with_offload(tmp_path: Path, **changes: object) -> Recipe:
    """SFT under FSDP2 with offload, of a model whose LM head is its own."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    found = recipe(**changes)
    facts = trl_facts("sft", dict(found.resolved))
    found = replace(found, trainer="sft", trainer_name="sft", model=str(tmp_path), **facts)
    return with_launch(found, Launch(ranks=1, sharding="fsdp2", offload="parameters"))


def test_an_offload_that_clashes_is_left_out_before_anything_else(tmp_path: Path) -> None:
    cards = Cards()
    found = by_words(list(Shop(sft_with_offload(tmp_path), cards, {}).offers([gpu_spec("h100")], (1, 2))))
    assert all(row.fits for row in found.values())
    assert [row.changes for row in found.values()] == [{"offload": "none"}] * 2
    assert {Launch.of(values).offload for _, values in cards.asked} == {"none"}


def test_an_offload_that_is_over_is_not_simulated_without_it(tmp_path: Path) -> None:
    """Whole weights may be offloaded; what does not fit with that does not fit without."""
    cards = Cards(activations_a_sample=200 * GB)
    made = sft_with_offload(tmp_path, use_peft=False)
    row = Shop(replace(made, space=None), cards, {}).offers([gpu_spec("h100")], (2,))[0]
    assert row.verdict is OfferVerdict.OVER
    neutral = [values for _, values in cards.asked if not values.get("use_peft")]
    assert {Launch.of(values).offload for values in neutral} == {"parameters"}


def test_a_clash_of_the_recipe_itself_is_said_with_its_fix(tmp_path: Path) -> None:
    made = sft_with_offload(tmp_path)
    row = Shop(made, Cards(activations_a_sample=200 * GB), {}).offers([gpu_spec("h100")], (2,))[0]
    assert row.verdict is OfferVerdict.OVER
    assert "set fsdp_offload_params: false, or train all weights" in row.reason
    assert "the smallest change tried needs." in str(CardAdvice(recipe=made, offers=(row,), prices={}))


def test_where_nothing_has_bytes_the_rows_are_said_to_have_reasons() -> None:
    advice = str(CardAdvice(recipe=recipe(), offers=tuple(offers(Cards(), ["h100"], counts=(3,))), prices={}))
    assert "Nothing here fits; the rows say why." in advice


def test_a_batch_that_cannot_be_split_is_said_in_its_row() -> None:
    row = offers(Cards(), ["h100"], counts=(3,))[0]
    assert row.verdict is OfferVerdict.NONE
    assert "16" in row.reason
    assert "1, 2" in row.reason
    assert row.step_s is row.usd_per_1000_steps is None


def test_a_card_without_what_the_recipe_names_is_not_simulated() -> None:
    cards = Cards()
    row = offers(cards, ["t4"], counts=(1,), dtype="bfloat16")[0]
    assert (row.verdict, cards.asked) == (OfferVerdict.NONE, [])
    assert "bfloat16" in row.reason


def test_what_one_card_held_spares_another_of_its_kind_the_trial() -> None:
    """The A100-80GB shows what a change needs, so the A100-40GB is not asked what cannot fit."""
    cards = Cards(states=60 * GB)
    offers(cards, ["a100-80gb", "a100-40gb"], counts=(1,))
    tried = [values for device, values in cards.asked if device == "sim:a100-40gb"]
    assert {"sim:a100-80gb"} == {device for device, _ in cards.asked} or len(tried) < 4


def test_a_failed_simulation_is_said_and_the_next_change_is_tried() -> None:
    def broken(device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        return ProbeResult(status=ProbeStatus.FAILED, device=device, reason="the trainer raised")

    row = Shop(recipe(), broken, {}).offers([gpu_spec("h100")], (1,))[0]
    assert (row.verdict, row.reason) == (OfferVerdict.NONE, "the trainer raised")


def test_why_the_recipe_itself_cannot_train_stands_in_its_row_and_not_why_a_change_of_it_cannot() -> None:
    own = {"fp16": True, "bf16": False, "load_in_4bit": True, "use_peft": True, "optim": "adamw_torch"}
    rows = offers(Cards(), ["a100-80gb"], counts=(1, 2), **own)
    assert all("loss scaling of fp16" in row.reason for row in rows)


def test_ctrl_c_leaves_the_finished_offers_and_ends_the_simulations_at_work() -> None:
    cards, cancelled = Cards(), threading.Event()

    def probe(device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        if device == "sim:h100":
            return cards(device, capacity_bytes, values)
        assert cancelled.wait(timeout=60)
        raise EnvironmentFault("the simulation was cancelled before it answered")

    told: list[str] = []

    def press(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    shop = Shop(recipe(), probe, PRICES, tell=press, cancel=cancelled.set, workers=2)
    found = shop.offers([gpu_spec("rtx4090"), gpu_spec("h100")], (1, 2))
    assert {(o.card, o.fits) for o in found} == {("h100", True)}
    assert len(told) == len(found) == 2


def test_an_interrupted_table_says_how_many_rows_are_missing() -> None:
    made = tuple(offers(Cards(), ["h100"], counts=(1,)))
    advice = CardAdvice(recipe=recipe(), offers=made, prices=PRICES, missing=(("h100", 2), ("h100", 4)))
    assert "Interrupted: 2 of 3 rows are missing. The same command continues" in str(advice)
    kept = advice.to_dict()
    assert (kept["interrupted"], kept["missing"]) == (True, [{"card": "h100", "count": n} for n in (2, 4)])
    nothing = CardAdvice(recipe=recipe(), offers=(), prices=PRICES, missing=(("h100", 1),))
    assert str(nothing).startswith("Interrupted: 1 of 1 rows is missing.")
    assert not CardAdvice(recipe=recipe(), offers=made, prices=PRICES).interrupted


def offer(card: str, count: int, **changes: object) -> Offer:
    spec = gpu_spec(card)
    values: dict[str, object] = {"verdict": OfferVerdict.FITS, "step_s": 1.0, "device_used_bytes": GB, **changes}
    return Offer(card=card, count=count, capacity_bytes=spec.capacity_bytes, **values)  # type: ignore[arg-type]


def test_the_highest_tier_is_chosen_from_and_tight_rows_only_where_nothing_fits() -> None:
    lora = offer("rtx4090", 1, tier="recipe", usd_per_hour=0.1, step_s=0.1)
    whole, tight = offer("h100", 8, usd_per_hour=32.0), offer("h100", 4, verdict=OfferVerdict.TIGHT, usd_per_hour=16.0)
    chosen = choice([lora, whole, tight])
    assert chosen.cheapest is chosen.fastest is chosen.smallest is whole
    assert choice([tight, offer("t4", 1, verdict=OfferVerdict.OVER)]).fastest is tight
    assert choice([]).smallest is None


def shown(*rows: Offer) -> str:
    return str(CardAdvice(recipe=recipe(), offers=rows, prices=PRICES))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tier": "recipe", "usd_per_hour": 0.1}, "rows of a lower tier than neutral."),
        ({"verdict": OfferVerdict.TIGHT, "step_s": 0.5}, 'rows that are "tight".'),
        ({"is_lower_bound": True, "step_s": 0.5}, 'rows with "over" for a step.'),
    ],
)
def test_a_lower_figure_without_a_mark_is_explained(changes: dict[str, object], words: str) -> None:
    marked = offer("h100", 1, usd_per_hour=2.0)
    assert f"Not compared for these, though some have lower figures: {words}" in shown(
        marked, offer("h100", 2, **changes)
    )
    unlike = offer("h100", 2, **{**changes, "step_s": 3.0, "usd_per_hour": 9.0})
    assert "Not compared" not in shown(marked, unlike)


def test_more_cards_that_are_slower_are_explained_where_they_have_no_nvlink() -> None:
    assert "8 x l40s are slower than 4: without NVLink" in shown(offer("l40s", 4), offer("l40s", 8, step_s=2.0))
    assert "are slower than" not in shown(offer("l40s", 4), offer("l40s", 8, step_s=0.6))
    assert "are slower than" not in shown(offer("h100", 4), offer("h100", 8, step_s=2.0))
    assert "are slower than" not in shown(offer("l40s", 4, tier="recipe"), offer("l40s", 8, step_s=2.0))


def test_seconds_without_the_hosts_step_are_a_lower_bound_and_win_nothing_that_is_timed() -> None:
    timed, untimed = (
        Offer(card="h100", count=count, capacity_bytes=80 * GB, verdict=OfferVerdict.FITS, step_s=step_s,
              usd_per_hour=1.0, device_used_bytes=GB, is_lower_bound=step_s < 2)
        for count, step_s in ((1, 2.0), (2, 1.0))
    )  # fmt: skip
    found = choice([timed, untimed])
    assert (found.fastest, found.cheapest) == (timed, timed)
    assert choice([untimed]).fastest is untimed
    assert (timed.step_words, untimed.step_words) == ("2.00 s", "over 1.00 s")


def test_without_a_price_there_is_no_cheapest() -> None:
    chosen = choice([offer("l4", 1), offer("h100", 1, step_s=0.5)])
    assert chosen.cheapest is None
    assert chosen.fastest is not None
    assert (chosen.fastest.card, chosen.smallest and chosen.smallest.card) == ("h100", "l4")


@pytest.mark.parametrize(
    ("rows", "smallest"),
    [
        ((("h100", 1, 4.0, 1.0), ("a100-80gb", 1, 2.0, 1.5)), 1),  # 84.94 and 84.97 GB are the same: the cheaper
        ((("h100", 1, None, 1.5), ("a100-80gb", 1, None, 1.0)), 1),  # and without prices the faster
        ((("a100-40gb", 2, 1.0, 1.0), ("a100-80gb", 1, 4.0, 2.0)), 1),  # 84.57 and 84.97 GB: fewer cards
        ((("a100-80gb", 1, 2.0, 1.0), ("rtx4090", 2, 9.0, 9.0)), 1),
        ((("h100", 1, None, 1.0), ("a100-80gb", 1, 2.0, 1.5)), 1),  # a price that is known
    ],
)
def test_sizes_that_are_sold_as_the_same_are_the_same(
    rows: tuple[tuple[str, int, float | None, float], ...], smallest: int
) -> None:
    found = [offer(card, count, usd_per_hour=usd, step_s=step_s) for card, count, usd, step_s in rows]
    assert choice(found).smallest is choice(found[::-1]).smallest is found[smallest]


def test_the_smallest_card_is_told_with_those_that_are_sold_as_the_same_size() -> None:
    rows = [offer("rtx4090", 1, usd_per_hour=0.3), offer("l4", 1, usd_per_hour=0.8), offer("l4", 2)]
    assert "Smallest: rtx4090, 25.25 GB in all (sold as the same size: l4)." in " ".join(shown(*rows).split())
    assert "Smallest: l4, 23.66 GB in all." in " ".join(shown(rows[1], rows[2]).split())


def test_the_size_that_a_card_is_sold_as_follows_from_what_its_driver_reports() -> None:
    sold = {"t4": 16, "v100-32gb": 32, "l4": 24, "rtx4090": 24, "a100-40gb": 40, "l40s": 48, "a6000": 48, "h100": 80}
    assert {card: offer(card, 1).nominal_bytes >> 30 for card in sold} == sold


def test_the_memory_of_the_machine_is_told_where_several_ranks_share_it() -> None:
    found = by_words(offers(Cards(states=400 * GB), ["rtx4090"], use_peft=False, use_vllm=True))
    offloaded = found["8 x rtx4090"]
    assert offloaded.changes["offload"] == "parameters"
    assert offloaded.host_bytes == 400 * GB + 15 * GB  # and rank 0 gathers the model to save it
    advice = CardAdvice(recipe=recipe(), offers=(offloaded, *offers(Cards(), ["h100"], (1,))), prices=PRICES)
    assert " 415 GB " in str(advice)
    one = advice.offers[1]
    assert one.host_bytes is None


def test_the_table_marks_what_stands_out_and_json_has_every_row() -> None:
    found = tuple(offers(Cards(), ["a100-80gb", "rtx4090"]))
    advice = CardAdvice(recipe=recipe(), offers=found, prices=prices())
    text = str(advice)
    assert "Fastest: 8 x a100-80gb" in text
    assert "cheapest" in text
    assert "Prices: on-demand lists" in text
    fewer = {name: price for name, price in prices().items() if name != "rtx4090"}
    assert ", none for rtx4090;" in " ".join(str(replace(advice, prices=fewer)).split())
    kept = json.loads(json.dumps(advice.to_dict()))
    assert len(kept["offers"]) == 8
    assert kept["fastest"] == {"card": "a100-80gb", "count": 8}
    assert kept["offers"][0]["usd_per_1000_steps"] == pytest.approx(found[0].usd_per_1000_steps)


@pytest.mark.parametrize("width", [80, 100, 120, 130, 140, 150])
def test_no_figure_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    changes = {"per_device_train_batch_size": 1, SYNC_EACH_BATCH: True, "sharding": "fsdp2", "offload": "parameters"}
    rows = (
        offer("h100", 1, usd_per_hour=2.0, step_s=1234.5, samples_per_s=0.02),
        offer("rtx4090", 8, tier="approximate", changes=changes, usd_per_hour=3.0, step_s=9999.5, is_lower_bound=True,
              host_bytes=218 * GB, verdict=OfferVerdict.TIGHT),
        *offers(Cards(), ["a100-80gb"], counts=(3,)),
    )  # fmt: skip
    table, *_ = CardAdvice(recipe=recipe(), offers=rows, prices=PRICES).parts()
    Console(file=(text := io.StringIO()), width=width).print(table)
    assert max(map(len, text.getvalue().splitlines())) <= width
    shown = " ".join(text.getvalue().split())
    for words in ("685.83", "over 8,332.92", "0.02", "20m34s", "over 2h46m", "218 GB", "of 84.94 GB", "completions/s",
                  "8 x rtx4090", "(approximate)", "cheapest", "not possible"):  # fmt: skip
        assert words in shown
    assert ("┃" in text.getvalue()) == (width >= 140)


def test_every_usual_card_is_known_and_wrong_names_and_counts_are_refused() -> None:
    from autofit.api.arguments import USUAL, cards_of, counts_of

    assert set(USUAL) <= set(GPU_SPECS)
    assert len(cards_of("all")) == len(GPU_SPECS)
    with pytest.raises(ConfigError, match="unknown GPU"):
        cards_of(["h101"])
    for wrong in ((0,), (-1,), (), tuple(range(1, 12)), (10**6,)):
        with pytest.raises(ConfigError, match="--counts"):
            counts_of(wrong)


def test_weights_that_are_larger_than_a_card_are_not_simulated_whole() -> None:
    """32B in bfloat16 are 65 GB: on one card of 24 GB only weights of 4 bits are tried."""
    cards = Cards(states=10 * GB)
    shop = Shop(replace(recipe(use_peft=False, load_in_4bit=False), weights_bytes=65 * GB), cards, {})
    row = shop.offers([gpu_spec("rtx4090")], (1,))[0]
    assert row.tier != "neutral" or row.verdict is OfferVerdict.OVER
    assert all(values.get("load_in_4bit") for _, values in cards.asked)


def test_seconds_of_many_micro_batches_follow_from_three() -> None:
    """The simulated steps have 3 and 2 micro-batches; the offer's has all of them, and as many bytes."""
    facts = trl_facts("sft", dict(recipe().resolved))
    cards = Cards()
    made = Shop(replace(recipe(gradient_accumulation_steps=32), **facts), cards, {}).offers([gpu_spec("h100")], (1,))
    assert [values["gradient_accumulation_steps"] for _, values in cards.asked] == [3, 2]
    assert made[0].step_s == pytest.approx(4 * 32 * 1e15 / gpu_spec("h100").half_flops_per_s)


@pytest.mark.thorough  # CI has the offers of real simulations below, and their order by a law above
def test_a_lora_of_7b_fits_one_card_of_80_gb_and_two_are_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import autofit

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lora = {
        "model_name_or_path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16", "max_length": 256, "use_peft": True,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    told: list[str] = []
    found = autofit.advise(
        lora, trainer="sft", cards=["a100-80gb"], counts=(1, 2), prompt_tokens=256, prices={"a100-80gb": 2.0},
        on_event=lambda event: told.append(str(event)),
    )  # fmt: skip
    one, two = found.offers
    assert one.fits
    assert two.fits
    assert one.changes == two.changes == {}
    assert one.step_s is not None
    assert two.step_s is not None
    assert two.step_s < one.step_s < 2.2 * two.step_s
    assert one.usd_per_1000_steps == pytest.approx(2.0 * 1000 * one.step_s / 3600)
    assert any(line.startswith("2 x a100-80gb: fits") for line in told)


@pytest.mark.slow
def test_ctrl_c_prints_the_finished_rows_and_the_same_command_continues(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_offline_recipe("sft", tmp_path, tiny_model)
    words = ["advise", str(path), "--trainer", "sft", "--cards", "a100-80gb,rtx4090", "--counts", "1",
             "--parallel", "1", "--json"]  # fmt: skip
    mark = str(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", mark)
    asking = subprocess.Popen([sys.executable, "-m", "autofit", *words], cwd=tmp_path, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    assert asking.stderr is not None
    told = next(line for line in asking.stderr if ": fits" in line)
    time.sleep(0.5)  # the next simulation is at work
    began = time.monotonic()
    os.killpg(asking.pid, signal.SIGINT)  # as the terminal does
    out, err = asking.communicate(timeout=60)
    assert asking.returncode == 130
    assert time.monotonic() - began < 5
    assert "stopping the simulations at work" in err
    assert not [p.pid for p in psutil.process_iter() if _environment(p).get("XDG_CACHE_HOME") == mark]
    first = json.loads(out)
    assert first["interrupted"]
    assert 1 <= len(first["offers"]) == 2 - len(first["missing"])
    assert first["offers"][0]["card"] == told.split(":")[0].split()[-1]
    again = command_line.run(tmp_path, *words)
    assert again.returncode == 0, again.stderr
    whole = json.loads(again.stdout)
    assert (whole["interrupted"], whole["missing"], len(whole["offers"])) == (False, [], 2)
    assert all(offer in whole["offers"] for offer in first["offers"])


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
