"""What people add is one entry, and is found everywhere: a dummy of each is added here, and nothing else is changed."""

from dataclasses import replace
from pathlib import Path

import pytest
from recipes import grpo_recipe
from search_driver import plan

from autofit.errors import ConfigError
from autofit.forecast.bounds import Bounds, Known
from autofit.forecast.faster import _others
from autofit.forecast.levers import Levers
from autofit.promotion.ladder import Ladder
from autofit.promotion.run_folder import Oom
from autofit.proof.reach import reach
from autofit.recipe.recipe import Recipe
from autofit.space.describe import reason_for
from autofit.space.knob import load_space, read_space
from autofit.space.space import Space
from autofit.space.traits import SHARED_FILE, Reach, shared_traits, traits_of
from autofit.tuning.record import StudyRecord
from autofit.tuning.search import _asked

SPACES = Path(__file__).parents[1] / "search_spaces"
KNOB = """
trainer: grpo
knobs:
  per_device_train_batch_size: {tier: neutral, values: solved, memory: ascending}
  spare_moments:
    tier: neutral
    values: [true]
    memory: any
    what: The moments of the optimizer lie elsewhere.
    less: any
    frees: [optimizer]
    place: 5
    speed: first
    proof: harmless
    why: it moves bytes
    restarts: true
    unless: {the optimizer has no moments: {optim: sgd}}
"""


def with_dummy(**changes: object) -> Recipe:
    return grpo_recipe(spare_moments=False, optim="adamw_torch", **changes)


@pytest.fixture
def space_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(KNOB)
    return path


def test_a_knob_of_one_entry_is_searched_and_says_why_it_is_left_out(space_file: Path) -> None:
    knobs = read_space(space_file, trainer="grpo")
    space = Space.of(with_dummy(), knobs)
    assert {c.values[1] for c in space.allowed()} == {True, False}
    left = Space.of(grpo_recipe(spare_moments=False, optim="sgd"), knobs)
    assert left.left_out == {"spare_moments": "the optimizer has no moments"}


def test_a_knob_of_one_entry_is_a_lever_of_the_estimate_in_its_place_and_with_its_bytes(space_file: Path) -> None:
    levers = Levers(Space.of(with_dummy(), read_space(space_file, trainer="grpo"), allow="recipe"))
    assert list(levers.strengths) == ["spare_moments", "micro-batch"]
    assert levers.strengths["spare_moments"] == (True,)
    assert _others(levers) == [{"spare_moments": True}]
    bounds = Bounds(levers.space.recipe, levers.own, levers.space.stated)
    known = Known({}, {"optimizer": {"weights": 10, "optimizer": 20}}, outside_bytes=1, context_bytes=1)
    assert bounds.least_bytes(known, {"spare_moments": True}) == 11


def test_a_knob_of_one_entry_is_kept_with_its_study_for_the_proof_and_the_page(space_file: Path) -> None:
    space = Space.of(with_dummy(), read_space(space_file, trainer="grpo"))
    record = _asked(replace(plan(space_file.parent, None, 10**9), space=space), StudyRecord())
    kept = StudyRecord.from_json(record.to_json()).traits
    assert reach((), "spare_moments", True, False, kept) == (Reach.HARMLESS, "it moves bytes")
    assert reach((), "spare_moments", True, False)[0] is Reach.OTHER
    assert reason_for("spare_moments", kept) == "The moments of the optimizer lie elsewhere."


@pytest.mark.parametrize("resumes_from", [0, 4])
def test_a_rescue_takes_a_knob_that_starts_anew_only_where_there_is_no_checkpoint(
    space_file: Path, resumes_from: int
) -> None:
    space_file.write_text(
        KNOB.replace("memory: any", "memory: ascending").replace("values: [true]", "values: [true, false]")
    )
    recipe = with_dummy()
    ladder = Ladder(
        trial=0, trainer="grpo", device="cpu", keys=recipe.keys, compared=(), values=recipe.values,
        resolved=recipe.resolved, space=str(space_file),
    )  # fmt: skip
    rungs = ladder.rungs([], Oom(message="", phase="update", finished=5, resumes_from=resumes_from))
    assert any("spare_moments" in rung.changes for rung in rungs) == (resumes_from == 0)


def test_every_knob_of_the_default_spaces_says_what_it_does_and_every_trait_is_of_a_key_that_is_used() -> None:
    used = set()
    for path in sorted(SPACES.glob("*.yaml")):
        if path.name != SHARED_FILE:
            for knob in load_space(str(path), trainer=path.stem):
                used.add(knob.name)
                assert knob.traits.what, f"{path.name}: {knob.name}"
    derived = {"gradient_accumulation_steps", "generation_batch_size", "use_liger_loss"}
    assert set(shared_traits()) - used == derived


@pytest.mark.parametrize(
    ("entry", "said"),
    [("less: lowest", "less must be any, lower or a list"), ("place: first", "place must be a whole number"),
     ("speed: fast", "speed must be one of first, early, none"), ("proof: yes", "proof must be one of compared"),
     ("restarts: 1", "restarts must be true or false"), ("unless: never", "unless must be a mapping of reasons"),
     ("frees: most", "frees must be all or a list")],
)  # fmt: skip
def test_a_trait_that_is_not_understood_is_named_with_its_knob(entry: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"trainer: grpo\nknobs:\n  optim: {{tier: neutral, values: [a], {entry}}}\n")
    with pytest.raises(ConfigError, match=f"knob optim: {said}"):
        read_space(path, trainer="grpo")


def test_a_key_is_known_by_its_other_names() -> None:
    assert traits_of("load_in_4bit") == traits_of("quantization")
    assert traits_of("nothing of the kind").what == ""
