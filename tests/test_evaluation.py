"""Evaluation within a training: a phase of a probe, with the bytes that TRL's own evaluation takes."""

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recipes
import tiny
import torch
import yaml
from at_once import probed
from fakegpu.tiny_trainers import profiler_peak_bytes
from matrix import marked
from probed_anew import probed_anew
from rank_peaks import real_peaks
from trl.trainer import dpo_trainer, sft_trainer

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.forecast.estimate import Crash
from autofit.forecast.forecast import Forecaster
from autofit.forecast.levers import MICRO, Bounds, Known
from autofit.forecast.predictions import Predictions, as_evaluated, most_evaluated
from autofit.plugin.protocol import EVALUATION, Control, Report, Task, WorstCase
from autofit.plugin.ranks import simulated_rank
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.keys import LAUNCH
from autofit.recipe.launch import Launch, Sharding
from autofit.space.knob import Knob, space_knobs
from autofit.space.space import Space
from autofit.trainers import hf_training
from autofit.trainers.common import random_weights

MADE_BY = {"sft": sft_trainer, "dpo": dpo_trainer, "hf": hf_training}

WORDS = " ".join(["t1"] * 60)
ROWS: dict[str, dict[str, object]] = {
    "sft": {"text": WORDS}, "hf": {"text": WORDS}, "grpo": {"prompt": WORDS},
    "dpo": {"prompt": WORDS, "chosen": " " + WORDS, "rejected": " " + WORDS},
    "reward": {"chosen": WORDS, "rejected": WORDS},
}  # fmt: skip
LORA: dict[str, object] = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "sft": ("sft", {}),
    "sft, LoRA, checkpointing": ("sft", {**LORA, "gradient_checkpointing": True}),
    "sft, packed": ("sft", {"eval_packing": True, "attn_implementation": "eager"}),
    "dpo, LoRA": ("dpo", LORA),
    "dpo, a reference of its own": ("dpo", {}),
    "dpo, scored before": ("dpo", {"precompute_ref_log_probs": True}),
    "reward": ("reward", {}),
    "grpo": ("grpo", {"beta": 0.04, **LORA}),
    "grpo, fewer completions": ("grpo", {"num_generations_eval": 3}),
    "rloo": ("rloo", {"beta": 0.04}),
    "hf": ("hf", {}),
    "hf, LoRA in bfloat16": ("hf", {**LORA, "dtype": "bfloat16", "bf16": True}),
    "hf dpo": ("hf", {"objective": "dpo", **LORA, "float32_logits": True}),
}
EVALUATED: dict[str, object] = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 24}
SEARCHED = ("per_device_train_batch_size", "steps_per_generation", "per_device_eval_batch_size")
RANDOM_STATE_BYTES = 5056  # of the CPU, which accelerate reads before it evaluates: host memory on a GPU run
DEFAULT = ("sft, LoRA, checkpointing", "reward", "grpo", "hf, LoRA in bfloat16")
# of which another case has the objective, and one the trainer's loop; groups of an evaluation are counted below
THOROUGH = ("sft", "hf", "hf dpo", "dpo, LoRA", "rloo", "grpo, fewer completions")


class Evaluates(Report):
    """Asks for an evaluation after the second step, and notes the peak before it on a simulated card."""

    def __init__(self, gpu: FakeGpu | None) -> None:
        self.at, self._gpu, self.before_bytes = "update", gpu, 0

    def enter(self, phase: str) -> str:
        left, self.at = self.at, phase
        if phase == EVALUATION and self._gpu is not None:
            self.before_bytes = self._gpu.peak_requested_bytes
        return left

    def step_ends(self, step: int) -> Control:
        return Control(evaluate=step == 2)


def recipe_of(trainer: str, folder: Path, model: Path, **changes: object) -> dict[str, object]:
    """A recipe over rows of one length in `folder`, which has a train and a test split."""
    name = "grpo" if trainer == "rloo" else str(changes.get("objective", trainer))
    for split in ("train", "test"):
        path = folder / "data" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((json.dumps(ROWS[name]) + "\n") * 24)
    generates: dict[str, object] = {
        "num_generations": 2, "max_completion_length": 8, "reward_funcs": ["autofit.trainers.offline.no_reward"],
    }  # fmt: skip
    return {
        "model_name_or_path": str(model), "dataset_name": str(folder / "data"), "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 2, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": 1,
        **(generates if name == "grpo" else {"max_length": 128}),
        **({"lora_task_type": "SEQ_CLS"} if trainer == "reward" else {}), **changes,
    }  # fmt: skip


def trained(
    trainer: str, values: Mapping[str, object], folder: Path, device: str = "cpu", gpu: FakeGpu | None = None
) -> Evaluates:
    """The report of a probe's training, which evaluates after its second step."""
    report, worst_case = Evaluates(gpu), WorstCase(path=worst_case_path(folder))
    task = Task(device=device, output=folder / "probe", worst_case=worst_case, steps=2)
    run: Any = load(trainer).build(values, task)
    run.train(report)
    return report


def probe_of(
    trainer: str, values: dict[str, object], folder: Path, server: ForkServer, device: str,
    launch: Launch | None = None, *, least_of_fits: bool = False,
) -> ProbeResult:  # fmt: skip
    folder.mkdir(parents=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if key != "use_cpu"}))
    changes = {} if launch is None else {LAUNCH: launch.to_values()}
    found = prepare(path, trainer=trainer, device=device, folder=folder, server=server, changes=changes)
    request = ProbeRequest(
        folder=folder, trainer=trainer, values=found.values, device=device, limit_bytes=None, cwd=folder,
        worst_case=worst_case_path(folder), server_socket=server.socket_path, least_of_fits=least_of_fits,
    )  # fmt: skip
    result = probed(request)
    assert result.status is ProbeStatus.FIT, result.reason
    return result


def peaks_of_fakes(trainer: str, values: Mapping[str, object], folder: Path, device: str = "cpu") -> tuple[int, int]:
    """(peak bytes before the evaluation, peak bytes) of a simulated training."""
    gc.collect()
    with fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        report = trained(trainer, values, folder, device, gpu)
    return report.before_bytes, gpu.peak_requested_bytes


@pytest.mark.parametrize("name", marked(CASES, default=DEFAULT, thorough=THOROUGH))
def test_the_peak_of_an_evaluation_is_the_real_allocators(name: str, small_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer, changes = CASES[name]
    values = recipe_of(trainer, tmp_path, small_model, **changes)
    recipes.inspect(trainer, values, "cpu", worst_case_path(tmp_path))
    evaluated = values | EVALUATED
    before, fake = peaks_of_fakes(trainer, evaluated, tmp_path)
    if "precompute_ref_log_probs" in changes:  # what is evaluated is scored before the first step
        before = peaks_of_fakes(trainer, values, tmp_path)[1]
    assert fake > 1.1 * before > 0  # so that it is the evaluation that is compared
    gc.collect()
    real = profiler_peak_bytes(lambda: trained(trainer, evaluated, tmp_path))
    assert real == fake + RANDOM_STATE_BYTES


@pytest.mark.parametrize("trainer", ["sft", *(pytest.param(t, marks=pytest.mark.thorough) for t in ("dpo", "hf"))])
def test_a_probe_evaluates_as_the_run_does(trainer: str, small_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    values = recipe_of(trainer, tmp_path, small_model, **EVALUATED, **LORA, bf16=True, dtype="bfloat16")
    recipes.inspect(trainer, values, "cpu", worst_case_path(tmp_path))

    def run() -> None:  # weights from a file are in no allocator
        with random_weights(MADE_BY[trainer]):
            training = load(trainer).build(values, Task(device="cpu", output=tmp_path / "run"))
        training.train(Report())

    run()
    gc.collect()
    probe, real = (profiler_peak_bytes(each) for each in (lambda: trained(trainer, values, tmp_path), run))
    assert real == probe


def test_a_probe_has_the_evaluation_as_a_phase_and_its_seconds_in_no_step(
    tmp_path: Path, small_model: Path, fork_server: ForkServer
) -> None:
    values = recipe_of("sft", tmp_path, small_model, **LORA)
    without, found = (
        probe_of("sft", {**values, **more}, tmp_path / name, fork_server, "sim:a100-80gb", least_of_fits=True)
        for name, more in (("plain", {}), ("evaluates", EVALUATED))
    )
    peaks = {phase.name: phase for phase in found.phases}
    assert [phase for name, phase in peaks.items() if name != EVALUATION] == list(without.phases)
    assert peaks[EVALUATION].peak_allocated_bytes == found.peak_allocated_bytes
    assert (found.peak_allocated_bytes or 0) > (without.peak_allocated_bytes or 0)
    assert (found.step_s, found.phase_s) == (without.step_s, without.phase_s)
    assert (found.least_capacity_bytes or 0) > (without.least_capacity_bytes or 0) > 0


@pytest.mark.parametrize("trainer", ["sft", pytest.param("grpo", marks=pytest.mark.thorough)])
def test_a_probe_of_a_device_evaluates_before_it_saves(
    trainer: str, tmp_path: Path, small_model: Path, fork_server: ForkServer
) -> None:
    values = recipe_of(trainer, tmp_path, small_model, **EVALUATED)
    found = probe_of(trainer, values, tmp_path / "probe", fork_server, "cpu")
    names = [phase.name for phase in found.phases]
    assert names.index(EVALUATION) < names.index("save")
    peaks = {phase.name: phase.peak_allocated_bytes for phase in found.phases}
    assert peaks[EVALUATION] == found.peak_allocated_bytes
    assert peaks[EVALUATION] > 1.1 * (peaks["update"] or 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "launch"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("sft", Launch()),
                ("grpo", Launch()),
                ("hf", Launch(ranks=2)),
            ]
        ),
        ("sft", Launch(ranks=2, sharding="fsdp2")),
    ],
)
def test_few_layers_evaluate_as_all_do(trainer: str, launch: Launch, tmp_path: Path, fork_server: ForkServer) -> None:
    model = tiny.write_model(tmp_path / "model", layers=5)
    values = recipe_of(trainer, tmp_path, model, **EVALUATED, **LORA)
    few = probe_of(trainer, values, tmp_path / "run" / "probe", fork_server, "sim:a100-80gb", launch)
    assert "traced again" not in (tmp_path / "run" / "probe" / "probe.log").read_text()
    every = probed_anew(tmp_path / "run" / "probe", tmp_path / "run" / "deep", "all layers", fork_server)
    assert few.phases == every.phases
    assert EVALUATION in {phase.name for phase in few.phases}


@pytest.mark.parametrize(
    ("trainer", "fewer", "more"),
    [("hf", 6, {}), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("sft", 6, {"gradient_checkpointing": True}), ("dpo", 12, {})])],
)  # fmt: skip
def test_a_forecast_counts_the_evaluation(
    trainer: str, fewer: int, more: dict[str, object], tmp_path: Path, small_model: Path, fork_server: ForkServer
) -> None:
    device, values = "sim:a100-80gb", recipe_of(trainer, tmp_path, small_model, **EVALUATED, **LORA, **more)
    simulated = {
        samples: probe_of(
            trainer, {**values, "per_device_eval_batch_size": samples}, tmp_path / str(samples), fork_server, device
        )
        for samples in (24, fewer)
    }  # fmt: skip
    recipe = prepare(
        tmp_path / "24" / "run.yaml", trainer=trainer, device=device, folder=tmp_path / "24", server=fork_server
    )
    knobs = tuple(
        replace(knob, values=(fewer,)) if knob.name == EVAL else knob  # each value is traced
        for knob in space_knobs(recipe)
        if knob.name in SEARCHED
    )
    space = Space.of(recipe, knobs, device=device)
    forecaster = Forecaster(
        device=device, worst_case=worst_case_path(tmp_path / "24"), server=fork_server, scratch=tmp_path / "scratch",
        kept=tmp_path / "kept",
    )  # fmt: skip
    forecast = forecaster.forecast(space)
    assert not forecast.problems
    used = dict(zip(forecast.predictions.candidates, forecast.predictions.device_used_bytes, strict=True))
    own = space.params(space.baseline)
    for samples, result in simulated.items():
        found = used[space.candidate({**own, "per_device_eval_batch_size": samples})] - forecast.context_bytes
        assert found == pytest.approx(result.peak_allocated_bytes, rel=0.02)  # which rounds nothing


@pytest.mark.thorough  # CI has the bytes of real ranks (fakegpu/test_ranks_exact.py), and those of an evaluation above
@pytest.mark.parametrize(("trainer", "sharding"), [("sft", "fsdp2"), ("hf", "fsdp2")])
def test_each_of_several_ranks_evaluates_a_batch_with_the_bytes_of_real_ones(
    trainer: str, sharding: Sharding, tmp_path: Path, small_model: Path, fork_server: ForkServer
) -> None:
    launch = Launch(ranks=2, sharding=sharding)
    values = recipe_of(trainer, tmp_path, small_model, **LORA)
    values |= {**EVALUATED, "dataset_name": str(tmp_path / "data"), LAUNCH: launch.to_values()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = prepare(tmp_path / "run.yaml", trainer=trainer, device="cpu", folder=tmp_path, server=fork_server)
    real = real_peaks(replace(found, folder=tmp_path), launch, tmp_path / "ranks", fork_server)
    plain = {key: value for key, value in found.values.items() if key not in (LAUNCH, "use_cpu")}
    for rank in real:
        assert -0.0005 <= rank.error_frac <= 0  # what a probe's tracker counts, as in test_rank_probes.py
        with simulated_rank(launch, rank.rank):
            before, fake = peaks_of_fakes(trainer, plain, tmp_path, device="sim:h100")
        print(f"rank {rank.rank}: real {rank.allocator_bytes}, simulated {before} and {fake}")
        assert fake > 1.1 * before > 0
        assert fake == pytest.approx(rank.allocator_bytes, abs=2**16)  # gloo has copies


# -- a smaller batch of it ---------------------------------------------------------------------------------------------

EVAL = "per_device_eval_batch_size"
KNOBS = (
    Knob(name="per_device_train_batch_size", tier="neutral", solved=True, memory_ascending=True),
    Knob(name=EVAL, tier="neutral", values=(1, "x0.25", "x0.5"), memory_ascending=True, needs=("evaluation",)),
)


def space_of(**changes: object) -> Space:
    return Space.of(recipes.grpo_recipe(**{EVAL: 16, "num_generations_eval": 4, **changes}), KNOBS, device="sim:l4")


def test_the_batch_of_an_evaluation_varies_in_whole_groups_and_only_where_there_is_one() -> None:
    assert dict(zip([knob.name for knob in KNOBS], space_of(eval_strategy="steps").choices, strict=True))[EVAL] == (
        4, 8, 16,
    )  # fmt: skip
    for without in ({}, {"eval_strategy": "no"}, {"eval_strategy": False}):
        space = space_of(**without)
        assert EVAL not in [knob.name for knob in space.knobs]
        assert not space.left_out
        assert not space.idle


def test_a_search_takes_the_largest_batch_with_which_something_is_predicted_to_fit() -> None:
    space = space_of(eval_strategy="epoch")
    assert {c.values[1] for c in as_evaluated(space).allowed()} == {16}
    assert {c.values[1] for c in as_evaluated(space, 8).allowed()} == {8, 16}
    assert as_evaluated(as_evaluated(space)) == as_evaluated(space)
    candidates = tuple(space.allowed())
    used = np.array([5e9 + 1e9 * float(c.values[1]) for c in candidates])  # type: ignore[arg-type]
    found = Predictions(candidates=candidates, floor_bytes=0 * used, device_used_bytes=used, step_s=used)
    assert most_evaluated(space, found, int(14e9)) == 8
    assert most_evaluated(space, found, int(13.1e9)) == 4  # the allocator reserves a little more than is live
    assert most_evaluated(space, found, int(9.1e9)) == 4
    assert most_evaluated(space, found, int(8e9)) is None


def test_only_the_batch_of_an_evaluation_is_expected_to_change_it() -> None:
    recipe = recipes.grpo_recipe(eval_strategy="epoch", **{EVAL: 16})
    held = {"weights": 10, "logits": 160}
    known = Known(at={}, parts={"update": held, "evaluation": held}, outside_bytes=0, context_bytes=0)
    bounds = Bounds(recipe, {MICRO: 4, EVAL: 16, "gradient_checkpointing": False, "activation_offloading": False})
    for spared in ({MICRO: 1}, {"gradient_checkpointing": True}, {"activation_offloading": True}):
        assert bounds.least_bytes(known, spared) == 170
    assert bounds.least_bytes(known, {EVAL: 4}) == 170  # the update
    assert bounds.least_bytes(known, {EVAL: 4, MICRO: 1}) == 10 + 40


def test_where_it_stops_is_said_by_the_samples_that_are_evaluated_at_once() -> None:
    crash = Crash(phase="evaluation", over_bytes=1, tokens=2048, evaluated=8)
    assert crash.where == "evaluation of 8 samples at once (2,048 tokens each)"
    assert "evaluated" not in Crash(phase="update", over_bytes=1).to_json()


def test_a_group_that_an_evaluation_would_split_is_no_candidate_as_trl_refuses_it() -> None:
    groups = Knob(name="num_generations", tier="recipe", values=(2, 3, 4))
    space = {
        name: Space.of(recipes.grpo_recipe(
            per_device_train_batch_size=12, gradient_accumulation_steps=1, steps_per_generation=1,
            generation_batch_size=12, num_generations=4, eval_strategy=name, **{EVAL: 8}
        ), (groups,), allow="recipe", device="sim:l4")
        for name in ("no", "epoch")
    }  # fmt: skip
    found = {name: {candidate.values for candidate in each.allowed()} for name, each in space.items()}
    assert found == {"no": {(2,), (3,), (4,)}, "epoch": {(2,), (4,)}}
