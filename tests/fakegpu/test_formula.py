"""One structure traced once, any configuration evaluated: against tracing that configuration."""

import gc
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml
from architectures import PlainTrainer, random_config
from architectures import write_model as write_architecture
from recipes import inspect
from tiny import write_model, write_offline_recipe, write_recipe

from autofit.fakegpu.formula.formula import MassModel, Trace, _bytes
from autofit.fakegpu.formula.polynomials import Basis, Symbols, with_steps
from autofit.fakegpu.patches import same_calls
from autofit.files import write_json
from autofit.forecast.composed import Made
from autofit.forecast.worker import Point, Seen, Structure
from autofit.probing.fork_server import ForkServer
from autofit.trainers.keys import ROLLOUTS, SAMPLES, TILE_TOKENS

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
def structure(recipe: tuple[dict[str, object], Path]) -> Structure:
    values, worst_case = recipe
    return Structure(
        trainer="grpo", keys=ROLLOUTS, tile_tokens=TILE_TOKENS, values=values, device="sim:l4",
        worst_case=str(worst_case), large=False, reused=False,
        varies_rank=True, ranges=GRPO_SPACE, hold_out=HOLD_OUT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def seen(structure: Structure) -> Seen:
    """What a training at the hold-out takes, which is traced once for all tests."""
    return structure._seen_at_hold_out()


@pytest.fixture(scope="module")
def model(structure: Structure, seen: Seen, tmp_path_factory: pytest.TempPathFactory) -> MassModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Structure, "_seen_at_hold_out", lambda _: seen)
        made, mismatch, _ = structure.model()
    assert abs(mismatch.seconds_frac) < 0.02
    assert mismatch.bytes_frac == 0.0  # of a configuration that no trace of the model has, with all layers
    made.save(path := tmp_path_factory.mktemp("model") / "model.npz")
    return MassModel.load(path)


def test_a_configuration_is_evaluated_as_it_would_be_traced(structure: Structure, model: MassModel) -> None:
    point = Point(micro_batch=5, completion=33, rank=9, accumulation=2, chunk=2)
    traced = structure.recording.trace(point).peaks
    x = {name: np.array([float(v)]) for name, v in {"B": 5, "G": 10, "C": 33, "r": 9}.items()}
    told = model.peaks(x, 5)
    assert {phase: round(float(told[phase][0])) for phase in traced} == traced


@pytest.mark.slow
def test_micro_batches_that_a_trace_plays_count_like_traced_ones(
    structure: Structure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the second step, whose rollout is for both: its decode steps are not those of the first step."""
    point, stack = Point(micro_batch=4, completion=20, rank=5, accumulation=2, chunk=2), structure.stack
    played = structure.recording.trace(point, stack)
    monkeypatch.setattr(same_calls, "_may_play", lambda *_: False)
    traced = structure.recording.trace(point, stack)
    assert played.peaks == traced.peaks
    assert played.kernels.counts == traced.kernels.counts
    for segment, counts in traced.kernels.host_counts.items():
        assert played.kernels.host_counts[segment] == pytest.approx(counts, rel=1e-9)
    assert played.kernels.repeats == traced.kernels.repeats


def test_a_model_that_several_processes_traced_is_that_of_one(tmp_path: Path, fork_server: ForkServer) -> None:
    """Of a plain loop: which trainer is traced is nothing to the processes that share its traces."""
    path = write_architecture(tmp_path, random_config("llama", random.Random(0), layers=5))
    values = {"model": str(path), "checkpointing": False, "tokens": 24, "lora_r": 0, "dtype": "float32"}
    structure = Structure(
        trainer="architectures:SAMPLES", keys=PlainTrainer(generates=False).keys, tile_tokens=None, values=values,
        device="sim:l4", worst_case=str(tmp_path / "worst_case.json"), large=False, reused=False, varies_rank=False,
        ranges={"B": (1, 64)}, hold_out={"B": 4, "C": 0, "accumulation": 2, "chunk": 1},
    )  # fmt: skip
    asked = {field.name: getattr(structure, field.name) for field in fields(structure)}
    request = {**asked, "keys": asdict(structure.keys), "processes": 3, "answer": str(tmp_path / "shared.json")}
    write_json(tmp_path / "request.json", request)
    fork_server.call({
        "entry": "autofit.forecast.worker:run", "argument": str(tmp_path / "request.json"), "cwd": str(Path.cwd()),
        "log": str(tmp_path / "log"), "env": {}, "deadline_s": 300.0,
    })  # fmt: skip
    structure.model()[0].save(tmp_path / "alone.npz")
    shared, alone = (np.load(tmp_path / f"{name}.npz", allow_pickle=True) for name in ("shared", "alone"))
    rest = "rest"  # a JSON text, whose names are in the order in which they were met
    assert json.loads(str(shared[rest])) == json.loads(str(alone[rest]))
    assert set(shared) == set(alone)
    assert all(np.array_equal(shared[name], alone[name]) for name in set(alone) - {rest})


def test_seconds_that_are_forecast_a_quarter_too_short_rule_nothing_out(
    structure: Structure, model: MassModel, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MassModel.seconds

    def too_short(*args: Any) -> dict[str, np.ndarray]:
        return {segment: 0.77 * each for segment, each in original(*args).items()}

    monkeypatch.setattr(MassModel, "seconds", too_short)
    found, _ = structure._held_out(model, seen)
    assert (found.bytes_frac, round(found.seconds_frac, 1)) == (0.0, -0.2)
    made = Made(model=model, mismatch=found.bytes_frac, seconds_mismatch=found.seconds_frac)
    assert re.search("forecast 2[2-5]% too short", made.problem)


def _tiles(structure: Structure, point: Point) -> dict[object, float]:
    """Kernels of the loss over whole tiles, in the second step; layers have none."""
    counts = structure.recording.trace(point, structure.stack).kernels.counts
    return {kind: n for kind, n in counts.items() if any(TILE_TOKENS in shape for shape in kind.shapes)}


def test_the_tiles_of_a_loss_are_in_proportion_to_its_tokens(structure: Structure) -> None:
    """Where their number jumped, a micro-batch of 8 was forecast to take no time, by one of 62 and one of 66."""
    large = replace(structure, large=True)
    base = large._base()
    few = _tiles(large, base)
    assert few
    for point in (replace(base, micro_batch=base.micro_batch + 4), replace(base, completion=base.completion + 181)):
        more = point.micro_batch * point.completion / base.micro_batch / base.completion
        assert _tiles(large, point) == pytest.approx({kind: n * more for kind, n in few.items()})


@pytest.mark.thorough  # CI has those of rollouts, above
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_so_are_those_of_samples(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_offline_recipe(trainer, tmp_path, write_model(tmp_path / "model", layers=5), max_length=1100)
    worst_case = tmp_path / "worst_case.json"
    answer = inspect(trainer, yaml.safe_load(path.read_text()), "sim:l4", worst_case, prompt_tokens=1000)
    structure = Structure(
        trainer=trainer, keys=SAMPLES, tile_tokens=TILE_TOKENS, values=dict(answer["values"]),  # type: ignore[call-overload]
        device="sim:l4", worst_case=str(worst_case), large=True, reused=False, varies_rank=False,
        ranges={"B": (1, 16)}, hold_out={"B": 5, "accumulation": 3, "chunk": 1},
    )  # fmt: skip
    base = structure._base()
    few = _tiles(structure, base)
    assert few
    more = _tiles(structure, replace(base, micro_batch=base.micro_batch + 2))
    share = 1 + 2 / base.micro_batch
    assert more == pytest.approx({kind: n * share for kind, n in few.items()})


def _scratch_of_embedding(trace: Trace) -> list[int]:
    """Numbers of the allocations of the kernel's buffers that grow with its rows."""
    found = ((place, cast(Any, kind.origin)) for place, kind in enumerate(trace.kinds))
    return [place for place, origin in found if "embedding_dense_backward" in origin and origin[-1]]


def test_a_full_training_of_many_micro_batches_is_evaluated_as_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of five micro-batches are on the card at once, and the embedding's scratch begins above 3,072 tokens."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", layers=5)
    path = write_offline_recipe("sft", tmp_path, model, max_length=700, use_peft=False)
    worst_case = tmp_path / "worst_case.json"
    answer = inspect("sft", yaml.safe_load(path.read_text()), "sim:l4", worst_case, prompt_tokens=600)
    structure = Structure(
        trainer="sft", keys=SAMPLES, tile_tokens=None, values=dict(answer["values"]),  # type: ignore[call-overload]
        device="sim:l4", worst_case=str(worst_case), large=False, reused=False, varies_rank=False,
        ranges={"B": (1, 16)}, hold_out={"B": 6, "accumulation": 5, "chunk": 1},
    )  # fmt: skip
    told, mismatch, _ = structure.model()
    assert mismatch.bytes_frac < 1e-5
    assert told.sample_bytes > 0
    base = structure._base()
    few, more, most = (structure.recording.trace(replace(base, micro_batch=n), structure.stack) for n in (3, 4, 6))
    symbols = Symbols(("B",), (3.0,))
    symbols.start(few.counts)
    symbols.vary("B", 4.0, few.counts, more.counts)
    laws = [_bytes(few.kinds[place], 1, symbols) for place in _scratch_of_embedding(few)]
    point, basis = with_steps(np.array([[6.0]]), symbols.base, symbols.steps), Basis.of(laws)
    scratch = [most.sizes[place] for place in _scratch_of_embedding(most)]
    assert (basis.rows(laws) @ basis.at(point)[0]).round().tolist() == scratch
    assert min(scratch) > 0


def test_seconds_grow_with_what_is_computed(model: MassModel) -> None:
    many = {"B": np.array([2.0, 2.0, 64.0]), "G": np.array([4.0, 4.0, 64.0]), "C": np.array([16.0, 64.0, 64.0]),
            "r": np.array([4.0, 4.0, 4.0])}  # fmt: skip
    seconds = model.seconds(many, 5, many["C"])
    assert seconds["decode"][1] == pytest.approx(4 * seconds["decode"][0], rel=0.05)  # bound by launches: four times
    assert seconds["update"][2] >= seconds["update"][1] > 0


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        pytest.param(
            {"activation_offloading": True, "activation_checkpointing": False},
            0.005,  # which wait to leave may differ
            marks=pytest.mark.thorough,
        ),
        (
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"every_n_layers": 3, "offload": True},
            },
            0.0,
        ),
    ],
    ids=["offloading", "every-n-layers"],
)
def test_what_moves_to_the_host_or_differs_by_layer_is_evaluated_as_traced(
    changes: dict[str, object], over: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_offline_recipe("sft", tmp_path, write_model(tmp_path / "model", layers=11), max_length=300, **changes)
    worst_case = tmp_path / "worst_case.json"
    answer = inspect("sft", yaml.safe_load(path.read_text()), "sim:a100-80gb", worst_case, prompt_tokens=200)
    structure = Structure(
        trainer="sft", keys=SAMPLES, tile_tokens=TILE_TOKENS, values=dict(answer["values"]),  # type: ignore[call-overload]
        device="sim:a100-80gb", worst_case=str(worst_case), large=False, reused=False, varies_rank=False,
        ranges={"B": (1, 16)}, hold_out={"B": 5, "accumulation": 3, "chunk": 1},
    )  # fmt: skip
    stack = structure.stack
    assert stack is not None
    assert stack.period == (3 if "activation_checkpointing_kwargs" in changes else 1)
    model, mismatch, _ = structure.model()
    assert mismatch.bytes_frac < 5e-4
    point = Point(micro_batch=7, completion=0, rank=None, accumulation=2, chunk=1)
    traced = structure.recording.trace(point).peaks
    told = model.peaks({"B": np.array([7.0])}, 11)
    for phase, peak in traced.items():
        assert peak <= round(float(told[phase][0])) <= peak * (1 + over)
