"""The claims of the spaces against the measured table in experiments/neutrality; some of its cells measured anew."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from recipes import grpo_recipe, trl_facts
from trl import DPOTrainer, GRPOTrainer

from autofit.plugin.registry import load
from autofit.proof.proof import ROUNDING, reach
from autofit.recipe.recipe import Recipe, TrainerName
from autofit.space.knob import load_space
from autofit.space.space import Space, Value
from autofit.space.traits import SHARED_FILE, Reach
from autofit.trainers.key_table import LOSS_TYPES
from autofit.trainers.keys import ROLLOUT as CHUNK
from autofit.trainers.keys import SPLIT
from autofit.trainers.trl_config import parse

FOLDER = Path(__file__).parents[1] / "experiments" / "neutrality"
TABLE: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
RANKS_TABLE: dict[str, Any] = json.loads((FOLDER / "ranks.json").read_text())
ROWS: list[dict[str, Any]] = TABLE["rows"]
SIMULATED_ONLY = {"verl"}  # nothing trains, so nothing is proven
SPACES = sorted(
    path.stem for path in Path(str(resources.files("autofit.search_spaces"))).glob("*.yaml")
    if path.stem not in SIMULATED_ONLY and path.name != SHARED_FILE
)  # fmt: skip
OPTIONS = "activation_checkpointing_kwargs"
KNOBS = {trainer: load_space(None, trainer=trainer) for trainer in SPACES}
CELLS = [pytest.param(row, knob, id=f"{row['name']}: {knob}") for row in ROWS for knob in row["cells"]]


def experiment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("neutrality_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_of(row: dict[str, Any]) -> Recipe:
    settings = dict(row["settings"])
    trainer: TrainerName = row["trainer"]
    balanced = row["name"].endswith("experts, balanced")
    if trainer == "grpo":
        generated = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
        counts = row.get("model") == "gpt2"
        settings["generation_batch_size"] = generated
        return grpo_recipe(balances_experts=balanced, counts_padding=counts, **settings)
    resolved: dict[str, object] = {
        "gradient_checkpointing": True,
        "attn_implementation": None,
        "precompute_ref_log_probs": False,
        "activation_checkpointing_kwargs": None,
        "padding_free": False,
        "use_peft": False,
    }
    resolved |= settings
    facts = trl_facts(trainer, resolved, balances_experts=balanced, counts_padding=row.get("model") == "gpt2")
    return Recipe(trainer=trainer, values=settings, resolved=resolved, **facts)


def changed(knob: str, space: Space) -> dict[str, Value]:
    """The baseline's values with `knob` changed as in the table, the generation batch kept where it may be."""
    base = space.params(space.baseline)
    micro, _, chunk, _ = space.split(space.baseline)
    if knob == SPLIT:
        return base | {SPLIT: micro // 2} | ({CHUNK: chunk * 2} if CHUNK in base else {})
    values: dict[str, Value] = {CHUNK: 2, "gradient_checkpointing": False, "attn_implementation": "eager",
                                "precompute_ref_log_probs": True, f"{OPTIONS}.every_n_layers": 2,
                                f"{OPTIONS}.selective": True, "padding_free": True}  # fmt: skip
    needed = {key: wanted[0] for k in space.knobs if k.name == knob for key, wanted in k.when}
    return base | needed | {knob: values[knob]}


@pytest.mark.parametrize(("row", "knob"), CELLS)
def test_a_knob_is_claimed_neutral_where_the_gradient_says_so_and_nowhere_else(row: dict[str, Any], knob: str) -> None:
    recipe = recipe_of(row)
    conditions = {key for k in KNOBS[recipe.trainer] if k.name == knob for key, _ in k.when}
    knobs = tuple(k for k in KNOBS[recipe.trainer] if k.name in (SPLIT, CHUNK, knob, *conditions))
    space = Space.of(recipe, knobs, allow="recipe", device="cpu")  # a knob claimed lower still would not be in it
    candidate = space.candidate(changed(knob, space))
    assert knob in space.changes(candidate)
    tier = space.tier(candidate)
    assert tier == ("neutral" if row["cells"][knob] <= ROUNDING else "approximate"), row["cells"][knob]


def test_the_bound_lies_well_between_rounding_and_every_real_difference() -> None:
    values = [value for row in ROWS for value in row["cells"].values()]
    rounding, real = ([v for v in values if (v <= ROUNDING) is below] for below in (True, False))
    assert max(rounding) * 1.5 < ROUNDING < min(real) / 5
    assert min(real) > 10 * max(rounding)


def test_every_loss_of_trl_and_every_knob_that_claims_a_gradient_is_in_the_table() -> None:
    assert {row["settings"]["loss_type"] for row in ROWS if row["trainer"] == "grpo"} == set(LOSS_TYPES)
    for trainer, source in {"grpo": GRPOTrainer, "dpo": DPOTrainer}.items():
        compared = re.findall(r"loss_type (?:==|in) (.+):\n", inspect.getsource(source._compute_loss))
        known = {name for text in compared for name in re.findall(r'"(\w+)"', text)}
        losses = [row["settings"].get("loss_type", []) for row in ROWS if row["trainer"] == trainer]
        assert known
        assert known == {name for loss in losses for name in ([loss] if isinstance(loss, str) else loss)}
    for trainer, knobs in KNOBS.items():
        measured = {knob for row in ROWS if row["trainer"] == trainer for knob in row["cells"]}
        for knob in knobs:
            key = "env" if knob.name.startswith("env.") else knob.name
            if (
                knob.tier == "neutral"
                and "ranks" not in knob.needs  # tests/test_proof_ranks.py has these
                and reach(cast(Any, load(trainer)).compared, key, None, None)[0] is Reach.COMPARED
            ):
                assert knob.name in measured


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in RANKS_TABLE["rows"]])
def test_another_number_of_ranks_is_neutral_where_the_gradient_says_so_and_nowhere_else(row: dict[str, Any]) -> None:
    found = list(row["cells"].values())
    assert len(found) == 4
    tier = recipe_of(row).tiers.get("launch.ranks", "neutral")
    assert tier == ("neutral" if max(found) <= ROUNDING else "approximate"), row["cells"]
    assert tier == "neutral" or min(found) > 5 * ROUNDING


def test_every_loss_is_measured_on_ranks() -> None:
    rows = RANKS_TABLE["rows"]
    assert {row["settings"].get("loss_type") for row in rows if row["trainer"] == "grpo"} == set(LOSS_TYPES)
    losses = {name for row in ROWS if row["trainer"] == "dpo" for name in row["settings"].get("loss_type", [])}
    assert {name for row in rows if row["trainer"] == "dpo" for name in row["settings"].get("loss_type", [])} == losses
    assert {row["trainer"] for row in rows} == set(SPACES)


@pytest.mark.thorough  # CI has the gradient of two ranks in test_proof_ranks.py
def test_measured_anew_on_ranks_a_row_is_what_the_table_says() -> None:
    row = next(row for row in RANKS_TABLE["rows"] if row["name"] == "bnpo")
    command = [sys.executable, "ranks.py", "--only", "bnpo"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
    said = next(line for line in done.stderr.splitlines() if line.startswith("bnpo {"))
    assert ast.literal_eval(said.removeprefix("bnpo ")) == pytest.approx(row["cells"], rel=0.2)


@pytest.mark.parametrize(("name", "counts"), [("GPT2", True), ("OPT", False), ("Llama", False), ("Bloom", False)])
def test_a_model_whose_positions_count_padding_is_known_from_its_layers(name: str, counts: bool) -> None:
    import torch
    import transformers

    from autofit.trainers.inspection import _counts_padding

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=1, vocab_size=8)
    with torch.device("meta"):
        assert _counts_padding(transformers.AutoModelForCausalLM.from_config(config)) is counts


@pytest.mark.parametrize(("given", "read"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_rewards_are_scaled_as_trl_reads_it(given: object, read: str, tmp_path: Path) -> None:
    values = {"model_name_or_path": "m", "dataset_name": "none", "output_dir": str(tmp_path), "use_cpu": True}
    assert parse("grpo", values | {"scale_rewards": given}, overrides={}).resolved["scale_rewards"] == read


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("bnpo", (SPLIT,)), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("grpo", ()), ("dapo", (SPLIT, CHUNK)), ("sft, nll", (SPLIT,)),
        ("hf, dpo", (SPLIT,)), ("hf, mixture of experts, balanced", (SPLIT,)),
        ("grpo, 2 rewards normalised, then summed", (CHUNK,)), ("dapo, top entropy 0.5", (SPLIT,))])],
)  # fmt: skip
def test_measured_anew_a_cell_is_what_the_table_says(name: str, knobs: tuple[str, ...], tmp_path: Path) -> None:
    run = experiment()
    row = next(r for r in ROWS if r["name"] == name)
    cells = run.measure(row, run.write_models(tmp_path), knobs)
    assert cells.keys() == set(knobs or row["cells"])
    for knob, value in cells.items():
        if row["cells"][knob] <= ROUNDING:
            assert value <= ROUNDING, knob
        else:
            assert value == pytest.approx(row["cells"][knob], rel=0.2), knob
