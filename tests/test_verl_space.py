"""The space of a verl config, its search and the advice on cards."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, cast

import numpy as np
import optuna
import pytest
from verl_files import ACTOR, BUDGET, GIB, QWEN, REF, ROLLOUT

from autofit.fakegpu.specs import gpu_spec
from autofit.forecast.advice import cheapest_changes
from autofit.forecast.levers import Bounds, Known
from autofit.forecast.offers import Shop
from autofit.frontends import verl_recipe
from autofit.frontends.verl import KEYS, VerlSettings
from autofit.frontends.writing import in_own_keys
from autofit.probing.result import PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.launch import Launch
from autofit.recipe.recipe import Recipe
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.space.traits import describe_changes
from autofit.trainers.verl import TRAINER
from autofit.tuning.candidates import Grid
from autofit.tuning.sampler import make_sampler

pytestmark = pytest.mark.usefixtures("own_environment")
MICRO, SCORED = "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"


def space_of(**changes: object) -> Space:
    values: dict[str, object] = {
        **asdict(VerlSettings(model_path="Qwen/Qwen2.5-7B-Instruct")), "ppo_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 64, "steps_per_generation": 64, "max_prompt_length": 1024,
        "max_response_length": 2048, "ppo_max_token_len_per_gpu": 24576, "log_prob_max_token_len_per_gpu": 49152,
        "ref_log_prob_max_token_len_per_gpu": 24576, **changes,
    }  # fmt: skip
    recipe = Recipe(
        trainer="verl", values=values, resolved=values, keys=TRAINER.keys, launch=Launch(ranks=8, sharding="fsdp1"),
        model="Qwen/Qwen2.5-7B-Instruct", longest_prompt_tokens=1024,
    )  # fmt: skip
    return Space.of(recipe, load_space("verl", trainer="verl"), device="sim:h100")


def test_packed_micro_batches_vary_by_their_tokens_which_hold_whole_samples() -> None:
    """A search varied the samples of a micro-batch, which verl does not read beside use_dynamic_bsz."""
    packed, budget = space_of(use_dynamic_bsz=True), BUDGET
    assert "packed by tokens" in packed.left_out["ppo_micro_batch_size_per_gpu"]
    values = {packed.params(c)[budget] for c in packed.candidates()}
    assert values == {3072 * n for n in (1, 2, 4, 8, 16, 32)}
    change = packed.changes(packed.settled({**packed.params(packed.baseline), budget: 6144}))
    assert change == {budget: 6144}
    assert "64 samples, packed by tokens, x 8 rank(s)" in dict(packed.recipe.describe())["effective batch"]
    shared = space_of(use_dynamic_bsz=True, ulysses_sequence_parallel_size=4)
    assert min(cast(int, shared.params(c)[budget]) for c in shared.candidates()) == 768  # of each of four ranks


def test_passes_without_gradients_have_sizes_of_their_own_that_divide_a_ranks_rollout() -> None:
    """A search let them follow the update's tokens, and never varied their samples."""
    scored, referred = "log_prob_micro_batch_size_per_gpu", "ref_log_prob_micro_batch_size_per_gpu"
    space = space_of(reference=True, **{scored: 8, referred: 4})
    values = [{space.params(c)[key] for c in space.candidates()} for key in (scored, referred)]
    assert values == [{1, 2, 4, 8, 16, 32}, {1, 2, 4, 8, 16}]
    few = space_of(gradient_accumulation_steps=6, steps_per_generation=6, **{scored: 3})  # of 6 samples a rank
    assert {few.params(c)[scored] for c in few.candidates()} == {1, 3, 6}
    assert "no reference" in few.left_out[referred]
    adapters = space_of(reference=True, lora_rank=8)
    assert referred in adapters.idle
    assert scored in adapters.params(adapters.baseline)
    packed = space_of(use_dynamic_bsz=True, reference=True)
    assert {f"{part}log_prob_max_token_len_per_gpu" for part in ("", "ref_")} <= packed.params(packed.baseline).keys()
    assert not {scored, referred} & packed.params(packed.baseline).keys()


def test_a_size_of_one_pass_frees_nothing_of_the_other() -> None:
    """With the reference as large as old log-probabilities, a change of one alone cannot fit, and was simulated."""
    space = space_of(reference=True, **{SCORED: 8, f"ref_{SCORED}": 8})
    held = {"old log-probs": {"logits": 80 * GIB}, "reference": {"logits": 80 * GIB}}
    known = Known({}, held, outside_bytes=0, context_bytes=0)
    bounds = Bounds(space.recipe, space.params(space.baseline), space.stated)
    assert bounds.least_bytes(known, {SCORED: 1}) == 80 * GIB
    assert bounds.least_bytes(known, {SCORED: 1, f"ref_{SCORED}": 2}) == 20 * GIB
    adapters = space_of(reference=True, lora_rank=8, **{SCORED: 8})  # the actor scores for its reference
    bounds = Bounds(adapters.recipe, adapters.params(adapters.baseline), adapters.stated)
    assert bounds.least_bytes(known, {SCORED: 2}) == 20 * GIB


def test_a_pass_without_gradients_keeps_its_tokens_where_the_updates_change() -> None:
    """verl's own default of them is the update's, so a trial that changes this one alone says them too."""
    foreign = verl_recipe.recipe({**QWEN, f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.{BUDGET}": 8192})
    scored, referred = f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"
    alone = in_own_keys(foreign, {BUDGET: 16384})
    assert alone == {f"{ACTOR}.{BUDGET}": 16384, scored: 8192, referred: 8192}
    both = in_own_keys(foreign, {BUDGET: 16384, "log_prob_max_token_len_per_gpu": 4096})
    assert both == {f"{ACTOR}.{BUDGET}": 16384, scored: 4096, referred: 8192}
    adapters = replace(foreign, values={**foreign.values, "lora_rank": 8})  # the actor scores for its reference
    assert referred not in in_own_keys(adapters, {BUDGET: 16384})


def test_changes_are_told_without_what_verl_works_out_itself() -> None:
    """gradient_accumulation_steps and steps_per_generation stood beside verl's keys, which has neither."""
    names = {"gradient_accumulation_steps": "", **{key: named.path for key, named in KEYS.items()}}
    changes = {"ppo_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    now = {"ppo_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "log_prob_micro_batch_size_per_gpu": 1}
    assert describe_changes(changes, now, names) == "ppo_micro_batch_size_per_gpu 4 -> 8"
    other = describe_changes({"log_prob_micro_batch_size_per_gpu": 2}, now, names)
    assert other == "rollout.log_prob_micro_batch_size_per_gpu 1 -> 2"


def test_a_search_takes_one_sample_of_a_prompt_where_the_recipe_has_one() -> None:
    """PPO needs no group; its scripts had no candidate."""
    assert len(list(islice(space_of(rollout_n=1).candidates(), 2))) == 2
    pairs = space_of(rollout_n=2)
    assert {pairs.params(c).get("rollout_n", 2) for c in pairs.candidates()} == {2}


def test_a_search_steps_each_number_without_an_order_of_memory_before_it_fills_the_card() -> None:
    """It filled the card with ever larger sizes, and never tried a smaller tensor parallel, which was 5 % faster."""
    space = space_of()
    grid = Grid.of(space)
    sampler = make_sampler("autofit", grid, target_bytes=80 * GIB)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    tried = []
    for _ in range(4):
        trial = study.ask(sampler.distributions())
        values = space.params(space.candidate(trial.params))
        tried.append(values)
        trial.set_constraint("bytes_over_target", -1.0)
        study.tell(trial, [50.0 + cast(int, values["tensor_model_parallel_size"]), 40.0 * GIB])
    changed = [{key: value for key, value in row.items() if value != tried[0][key]} for row in tried]
    share, tensor = "gpu_memory_utilization", "tensor_model_parallel_size"
    assert changed[:3] == [{}, {share: 0.6}, {tensor: 1}]
    assert changed[3][tensor] == 1  # then more memory, from the fastest
    assert len(changed[3]) > 1
    free = np.arange(len(grid))
    larger, several = (grid.find({**tried[0], share: 0.6, **more}) for more in ({}, {tensor: 1}))
    assert larger is not None
    assert several is not None
    assert grid.stepped(0, [0], [several], free) == larger  # what waits, or died, with other changes says nothing
    assert grid.stepped(0, [0], [larger], free) == grid.find({**tried[0], tensor: 1})


@dataclass
class Cards:
    """Cards on which bytes and seconds grow with a verl recipe's sizes."""

    asked: list[Mapping[str, object]] = field(default_factory=list)

    def __call__(self, device: str, capacity_bytes: int, values: Mapping[str, object]) -> ProbeResult:
        self.asked.append(values)
        size = cast(int, values[BUDGET]) // 3072 if values["use_dynamic_bsz"] else values[MICRO]
        logits = {"update": 4 * cast(int, size) * GIB, "old log-probs": cast(int, values[SCORED]) * GIB}
        peaks = {phase: 20 * GIB + held for phase, held in logits.items()}
        used = max(peaks.values())
        fits = used <= capacity_bytes
        return ProbeResult(
            status=ProbeStatus.FIT if fits else ProbeStatus.OOM, device=device, device_used_bytes=used,
            least_capacity_bytes=None if fits else used, step_s=(10 + 40 / cast(int, size),),
            phases=tuple(
                PhasePeak(name=name, peak_allocated_bytes=peak, peak_reserved_bytes=peak, device_used_bytes=peak)
                for name, peak in peaks.items()
            ),
            categories={phase: {"logits": held} for phase, held in logits.items()},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "card", "wanted"),
    [
        ({MICRO: 1}, "h100", {MICRO: 8}),  # 20 + 4 x 8 GiB, of 79; 16 do not fit
        ({MICRO: 64, "gradient_accumulation_steps": 1, "steps_per_generation": 1}, "a100-40gb", {MICRO: 4}),
        ({"use_dynamic_bsz": True, BUDGET: 3072}, "h100", {BUDGET: 3072 * 8}),
        ({"use_dynamic_bsz": True, BUDGET: 3072 * 32}, "a100-40gb", {BUDGET: 3072 * 4}),
    ],
)
def test_an_advice_on_cards_has_the_fastest_micro_batches_that_fit(
    own: dict[str, Any], card: str, wanted: dict[str, int]
) -> None:
    """A card with room got the user's own smallest micro-batch, and a token budget was never another one."""
    cards = Cards()
    recipe = space_of(**own).recipe
    offer = Shop(recipe, cards, {}).offers([gpu_spec(card)], (8,))[0]
    assert offer.fits
    assert {key: offer.changes.get(key) for key in wanted} == wanted
    assert len(cards.asked) < 10


def test_a_share_in_which_vllm_does_not_start_rules_no_larger_one_out() -> None:
    space = space_of(gpu_memory_utilization=0.2)
    place = [knob.name for knob in space.knobs].index("gpu_memory_utilization")
    first = next(iter(space.candidates()))
    other = replace(first, values=(*first.values[:place], 0.5, *first.values[place + 1 :]))
    assert first.values[place] != 0.5
    assert not space.needs_no_less(other, first)


def test_micro_batches_of_samples_have_no_budget_to_vary() -> None:
    plain = space_of(use_dynamic_bsz=False)
    assert len({plain.params(c)["ppo_micro_batch_size_per_gpu"] for c in plain.candidates()}) > 1
    assert "ppo_max_token_len_per_gpu" not in plain.params(plain.baseline)


def law(values: Mapping[str, object]) -> ProbeResult:
    """Bytes that grow with the budget, a whole gradient while it waits, an engine that starts in 0.4 of the card."""
    share, tokens = cast(float, values["gpu_memory_utilization"]), cast(int, values["ppo_max_token_len_per_gpu"])
    gradient = 16 if values["use_no_sync_for_gradient_accumulation"] else 2
    weights = 2 if values["param_offload"] else 10
    parts = {
        "rollout": {"vLLM": round(40 * share), "weights": weights, "optimizer": 8},
        "update": {"vLLM": 2, "weights": 10, "optimizer": 8, "logits": tokens // 1024, "gradients": gradient},
    }
    held = {name: {part: GIB * size for part, size in of.items()} for name, of in parts.items()}
    used = max(sum(of.values()) for of in held.values())
    starts = share >= 0.4
    return ProbeResult(
        status=ProbeStatus.FIT if starts and used <= 40 * GIB else ProbeStatus.OOM, device="sim:h100", step_s=(10.0,),
        device_used_bytes=used, least_capacity_bytes=used if starts else None, categories=held if starts else {},
        oom_phase=None if starts else "load",
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_fits_is_found_beside_a_share_in_which_the_engine_does_not_start(share: float) -> None:
    """All settings at once were tried with the least share, which fails, so that no change was said to be enough."""
    recipe = space_of(use_dynamic_bsz=True, gpu_memory_utilization=share).recipe
    base = law(recipe.values)
    found = cheapest_changes(recipe, "sim:h100", law, capacity_bytes=40 * GIB, base=base, workers=1).changes
    assert found
    for change in found:
        assert law({**recipe.values, **change.changes}).status is ProbeStatus.FIT
    assert ("gpu_memory_utilization" in found[0].changes) == (share == 0.8)  # in which the rollout is too large
