"""One structure traced once, any configuration evaluated: against tracing that configuration."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from recipes import inspect
from tiny import write_model, write_recipe

from autofit.fakegpu.formula.formula import MassModel
from autofit.forecast.worker import Point, Structure, trace
from autofit.plugin.registry import load
from autofit.trainers.keys import ROLLOUTS, TILE_TOKENS

pytestmark = pytest.mark.slow
GRPO_SPACE = {"B": (1, 64), "G": (1, 256), "C": (8, 200), "r": (2, 32)}
HOLD_OUT = {"B": 3, "accumulation": 4, "chunk": 2, "C": 20, "r": 5}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, object], Path]]:
    folder = tmp_path_factory.mktemp("mass")
    path = write_recipe(folder, write_model(folder / "model", layers=5), lora_target_modules="all-linear")
    before = Path.cwd()
    os.chdir(folder)
    worst_case = folder / "worst_case.json"
    answer = inspect("grpo", yaml.safe_load(path.read_text()), "sim:l4", worst_case)
    yield dict(answer["values"]), worst_case  # type: ignore[call-overload]
    os.chdir(before)
    gc.collect()


@pytest.fixture(scope="module")
def model(recipe: tuple[dict[str, object], Path], tmp_path_factory: pytest.TempPathFactory) -> MassModel:
    values, worst_case = recipe
    structure = Structure(
        trainer="grpo", keys=ROLLOUTS, tile_tokens=TILE_TOKENS, values=values, device="sim:l4",
        worst_case=str(worst_case), large=False, reused=False,
        varies_rank=True, ranges=GRPO_SPACE, hold_out=HOLD_OUT,
    )  # fmt: skip
    made, mismatch = structure.model()
    assert mismatch < 1e-6  # of a configuration that no trace of the model has, at another depth
    made.save(path := tmp_path_factory.mktemp("model") / "model.npz")
    return MassModel.load(path)


def test_a_configuration_is_evaluated_as_it_would_be_traced(
    recipe: tuple[dict[str, object], Path], model: MassModel
) -> None:
    values, worst_case = recipe
    point = Point(micro_batch=5, completion=33, rank=7, accumulation=2, chunk=2, layers=5)
    traced = trace(
        point, trainer=load("grpo"), keys=ROLLOUTS, values=values, device="sim:l4", worst_case=worst_case
    ).peaks
    x = {name: np.array([float(v)]) for name, v in {"B": 5, "G": 10, "C": 33, "r": 7}.items()}
    peaks = model.peaks(x, 5)
    for phase in ("load", "rollout", "update", "update+", "optimizer"):
        assert peaks[phase][0] == pytest.approx(traced[phase], rel=1e-4), phase


def test_seconds_grow_with_what_is_computed(model: MassModel) -> None:
    many = {"B": np.array([2.0, 2.0, 64.0]), "G": np.array([4.0, 4.0, 64.0]), "C": np.array([16.0, 64.0, 64.0]),
            "r": np.array([4.0, 4.0, 4.0])}  # fmt: skip
    seconds = model.seconds(many, 5, many["C"])
    assert seconds["decode"][1] == pytest.approx(4 * seconds["decode"][0], rel=0.05)  # bound by launches: four times
    assert seconds["update"][2] >= seconds["update"][1] > 0
