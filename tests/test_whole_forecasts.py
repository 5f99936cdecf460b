"""Forecasts of candidates, from few traces, beside whole simulations of the same candidates."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from test_evaluation import probe_of, recipe_of

from autofit.forecast.forecast import Forecaster
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.space.knob import Knob
from autofit.space.space import Space

DEVICE = "sim:a100-80gb"
MICRO = Knob(name="per_device_train_batch_size", tier="neutral", solved=True)
CHECKPOINTS = Knob(name="gradient_checkpointing", tier="neutral", values=(True, False))
BEFORE = Knob(name="precompute_ref_log_probs", tier="neutral", values=(True, False))
HALF = Knob(name="dtype", tier="recipe", values=("float32", "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "more", "knobs"),
    [
        ("reward", {}, (MICRO, CHECKPOINTS, HALF)),
        ("dpo", {}, (MICRO, CHECKPOINTS, BEFORE)),
        pytest.param("grpo", {"beta": 0.04}, (MICRO, CHECKPOINTS, HALF), marks=pytest.mark.thorough),
        ("grpo", {"steps_per_generation": 8}, (MICRO, CHECKPOINTS)),  # old log-probabilities of two steps at once
        pytest.param("grpo", {"num_iterations": 2}, (MICRO, CHECKPOINTS), marks=pytest.mark.thorough),
        ("sft", {"launch": {"ranks": 4, "sharding": "fsdp2"}}, (MICRO, CHECKPOINTS)),  # the last one communicates
        pytest.param("sft", {"launch": {"ranks": 4}}, (MICRO, CHECKPOINTS), marks=pytest.mark.thorough),
    ],
)
def test_settings_that_are_sketched_alone_hold_and_take_together_what_a_whole_simulation_does(
    trainer: str, more: dict[str, object], knobs: tuple[Knob, ...], tmp_path: Path, fork_server: ForkServer
) -> None:
    """A sketch had one micro-batch: gradients that an earlier one left were missing where no checkpoints are. What DPO
    scores before the training took no time, and what a rollout of several steps scores four times as much as it does.
    The collectives of several ranks were taken to overlap with all kernels, and the last micro-batch for one of many.
    """
    model = tiny.write_model(tmp_path / "model", hidden=256, layers=5)  # gradients count beside activations
    values = recipe_of(trainer, tmp_path, model, **more, gradient_checkpointing=True, dtype="float32")
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    whole = probe_of(trainer, values, tmp_path / "own", fork_server, DEVICE)
    path = tmp_path / "own" / "run.yaml"
    recipe = prepare(path, trainer=trainer, device=DEVICE, folder=tmp_path / "own", server=fork_server)
    space = Space.of(recipe, knobs, allow="recipe", device=DEVICE)
    forecast = Forecaster(
        device=DEVICE, worst_case=worst_case_path(tmp_path / "own"), server=fork_server, scratch=tmp_path / "scratch",
        kept=tmp_path / "kept",
    ).forecast(space)  # fmt: skip
    if "launch" not in more:  # each micro-batch of several ranks leaves small tensors, which count in so small a model
        assert not forecast.problems
    own = space.params(space.baseline)
    without: dict[str, Any] = {"gradient_checkpointing": False}
    beside = [{knob.name: value} for knob in knobs[2:] for value in knob.values if value != own[knob.name]]
    tried: list[dict[str, Any]] = [{}, without, *({**without, **other} for other in beside)]
    if "launch" in more:
        tried.append({MICRO.name: 8, "gradient_accumulation_steps": 1})  # the only micro-batch is also the last
    for changes in tried:
        place = forecast.predictions.candidates.index(space.candidate({**own, **changes}))
        if changes:
            whole = probe_of(trainer, {**values, **changes}, tmp_path / str(place), fork_server, DEVICE)
        live = forecast.predictions.device_used_bytes[place] - forecast.context_bytes
        assert live == pytest.approx(whole.peak_allocated_bytes, rel=0.02), changes
        assert forecast.predictions.step_s[place] == pytest.approx(whole.median_step_s, rel=0.1), changes  # the host's
