"""A full run that is out of memory goes on: the same steps, samples and weights, with another micro-batch."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.loop import Loop, LoopRun
from autofit.plugin.protocol import LOAD, ROLLOUT, UPDATE, Report, SampleFacts
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.supervise import ProcessEnding
from autofit.promotion import job, promotion
from autofit.promotion.checkpoints import checkpoints, step_of
from autofit.promotion.ladder import RescueLadder, Speed
from autofit.promotion.run_folder import Oom, keep_oom, read_oom
from autofit.proof.proof import Verdict
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch import Launch
from autofit.watching.events import (
    EventKind,
    RunEvent,
    events_of,
    forget_progress_after,
    keep_event,
    keep_progress,
    read_progress,
)

SAMPLES = BatchKeys(length="max_length")
ROLLOUTS = BatchKeys(
    rollout="steps_per_generation", rollout_batch="generation_batch_size", group="num_generations",
    reuse="num_iterations", completion="max_completion_length",
)  # fmt: skip
ROUNDING = 1e-5
SPLIT, ACCUMULATION, CHUNK = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"
GENERATED = {CHUNK: 2, "generation_batch_size": 16, "num_generations": 4, "num_iterations": 1}
SPACES = Path(__file__).parents[1] / "search_spaces"


def ladder_of(
    changed: Mapping[str, object] | None = None, *, name: str = "sft", keys: BatchKeys = SAMPLES
) -> RescueLadder:
    """The ladder of a recipe with micro-batch 8 x accumulation 2, and `changed`."""
    own: dict[str, object] = {SPLIT: 8, ACCUMULATION: 2, "gradient_checkpointing": False, **(changed or {})}
    return RescueLadder(
        trial=3, trainer=name, device="cpu", keys=keys, compared=(SPLIT, ACCUMULATION), values=own, resolved=own,
        space=str(SPACES / f"{name}.yaml"),
    )  # fmt: skip


def grpo_ladder(changed: Mapping[str, object] | None = None) -> RescueLadder:
    found = ladder_of({**GENERATED, "loss_type": "grpo", **(changed or {})}, name="grpo", keys=ROLLOUTS)
    given = {key: value for key, value in found.values.items() if key != "generation_batch_size"}  # TRL derives it
    return replace(found, values=given)


def oom_in(phase: str = UPDATE, *, finished: int = 36, **more: object) -> Oom:
    return Oom(message="CUDA out of memory", phase=phase, finished=finished, resumes_from=finished, **more)  # type: ignore[arg-type]


def climbed(ladder: RescueLadder, oom: Oom) -> list[dict[str, object]]:
    """The changes of every rung, taken one after the other until none is left."""
    taken: list[Mapping[str, object]] = []
    while rungs := ladder.rungs(taken, oom):
        taken.append(rungs[0].changes)
        assert len(taken) < 20
    return [dict(changes) for changes in taken]


# -- the ladder -------------------------------------------------------------------------------------------------------


def test_the_micro_batch_is_halved_before_checkpointing_and_the_effective_batch_is_held() -> None:
    ladder, micro = ladder_of(), 8
    *splits, last = climbed(ladder, oom_in())
    assert splits == [{SPLIT: 4, ACCUMULATION: 4}, {SPLIT: 2, ACCUMULATION: 8}, {SPLIT: 1, ACCUMULATION: 16}]
    assert last == {"gradient_checkpointing": True}
    for number in range(1, 5):
        assert ladder.running([*splits, last][:number]).effective_batch_size == 2 * micro


def test_the_ranks_of_a_launch_are_held() -> None:
    launch = Launch(ranks=4, sharding="fsdp2")
    ladder = ladder_of({LAUNCH: launch.to_values()})
    ladder = RescueLadder.from_json(json.loads(json.dumps(ladder.to_json())))
    assert ladder.running([]).effective_batch_size == 64
    rungs = ladder.rungs([], oom_in())
    assert rungs[0].changes == {SPLIT: 4, ACCUMULATION: 4}
    changed = {key for rung in rungs for key in rung.changes}
    assert not {"launch.ranks", "launch.server_ranks", "launch.sharding"} & changed
    running = ladder.running([rungs[0].changes])
    assert (running.effective_batch_size, running.launch) == (64, launch)


def test_an_odd_micro_batch_is_divided_by_its_smallest_divisor() -> None:
    assert ladder_of({SPLIT: 9}).rungs([], oom_in())[0].changes == {SPLIT: 3, ACCUMULATION: 6}
    assert ladder_of({SPLIT: 7}).rungs([], oom_in())[0].changes == {SPLIT: 1, ACCUMULATION: 14}


def test_a_smaller_micro_batch_generates_as_many_completions_at_once() -> None:
    ladder = grpo_ladder()
    assert ladder.rungs([], oom_in())[0].changes == {SPLIT: 4, ACCUMULATION: 4, CHUNK: 4}
    taken = climbed(ladder, oom_in())
    assert {ladder.running(taken[:n]).generation_batch_size for n in range(len(taken))} == {16}
    batch_given = replace(ladder, values={**ladder.values, "generation_batch_size": 16})
    first = batch_given.rungs([], oom_in())[0].changes
    assert first == {SPLIT: 4, ACCUMULATION: 4, CHUNK: 4, "generation_batch_size": None}  # TRL takes one of the two


def test_a_rollout_in_reuse_keeps_its_size_and_its_staleness() -> None:
    reused = grpo_ladder({CHUNK: 8, "generation_batch_size": 64})
    assert reused.rungs([], oom_in(ROLLOUT))[0].changes == {SPLIT: 4, ACCUMULATION: 4, CHUNK: 16}


def test_a_second_oom_in_the_rollout_of_one_step_makes_the_rollout_smaller() -> None:
    oom = oom_in(ROLLOUT, samples=SampleFacts(rows=24))
    first, second = grpo_ladder().rungs([], oom), grpo_ladder().rungs([], oom, again=True)
    assert first[0].changes == {SPLIT: 4, ACCUMULATION: 4, CHUNK: 4}
    assert second[0].changes == {CHUNK: 1}
    assert "drawn anew" in second[0].remark
    assert all(CHUNK not in r.changes or ACCUMULATION in r.changes for r in grpo_ladder().rungs([], oom_in()))


def test_a_smaller_rollout_is_not_taken_where_an_epoch_would_end_elsewhere() -> None:
    oom = oom_in(ROLLOUT, samples=SampleFacts(rows=26))  # 6 rollouts of 4 prompts leave 2, 13 of 2 prompts leave none
    assert not [r for r in grpo_ladder().rungs([], oom, again=True) if r.changes == {CHUNK: 1}]


def test_a_loss_that_weighs_micro_batches_by_themselves_keeps_its_split_without_leave() -> None:
    ladder = replace(grpo_ladder(), tiers={SPLIT: "approximate", CHUNK: "approximate"})
    assert climbed(ladder, oom_in()) == [{"gradient_checkpointing": True}]
    allowed = replace(ladder, allow="approximate").rungs([], oom_in())
    assert [rung.tier for rung in allowed] == ["neutral", "approximate"]
    assert allowed[1].changes == {SPLIT: 4, ACCUMULATION: 4, CHUNK: 4}


def test_what_the_study_measured_as_fastest_comes_first() -> None:
    speeds = (
        Speed(changes={SPLIT: 4, ACCUMULATION: 4}, step_s=3.0, device_used_bytes=80),
        Speed(changes={"gradient_checkpointing": True}, step_s=2.0, device_used_bytes=60),
    )
    ladder = replace(ladder_of(), speeds=speeds, device_used_bytes=100)
    assert ladder.rungs([], oom_in())[0].changes == {"gradient_checkpointing": True}
    no_less = replace(ladder, device_used_bytes=50)
    assert no_less.rungs([], oom_in())[0].changes == {SPLIT: 4, ACCUMULATION: 4}


def test_what_a_checkpoint_cannot_continue_is_only_changed_before_there_is_one() -> None:
    ladder = replace(ladder_of({"use_peft": True, "lora_r": 8, "lora_alpha": 16}), allow="recipe")
    keys = {key for rung in ladder.rungs([], oom_in()) for key in rung.changes}
    from_start = {key for rung in ladder.rungs([], oom_in(LOAD, finished=0)) for key in rung.changes}
    assert "lora_r" not in keys
    assert "lora_r" in from_start


@pytest.mark.parametrize(
    ("facts", "first", "remark"),
    [
        (SampleFacts(rows=32, weighs_alike=False), SPLIT, ""),
        (SampleFacts(rows=35, weighs_alike=True), SPLIT, ""),
        (SampleFacts(rows=35, weighs_alike=False, last_step=2), SPLIT, ""),  # ends before the incomplete step
        (SampleFacts(rows=35, weighs_alike=False), "gradient_checkpointing", "the last step of an epoch, of 3"),
    ],
)
def test_an_epoch_whose_last_step_is_incomplete_is_not_weighed_otherwise_in_silence(
    facts: SampleFacts, first: str, remark: str
) -> None:
    rungs = ladder_of().rungs([], oom_in(samples=facts))
    assert first in rungs[0].changes
    assert next(r.remark for r in rungs if SPLIT in r.changes).startswith(remark)


def test_samples_that_an_epoch_drops_stay_dropped() -> None:
    dropped = oom_in(samples=SampleFacts(rows=36, drops_last=True))  # 4 dropped at micro-batch 8, none at 4
    assert all(SPLIT not in rung.changes for rung in ladder_of().rungs([], dropped))


def test_an_oom_in_the_evaluation_makes_the_evaluation_smaller_only() -> None:
    oom = oom_in(evaluating=True)
    assert ladder_of({"per_device_eval_batch_size": 8}).rungs([], oom)[0].changes == {"per_device_eval_batch_size": 4}
    assert "in the evaluation" in oom.where


def test_fragments_are_met_by_the_allocators_setting_first() -> None:
    ladder = replace(ladder_of(), device="cuda")
    wanted = {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    assert ladder.rungs([], oom_in(unused_frac=0.3))[0].changes == wanted
    assert ladder.rungs([], oom_in(unused_frac=0.02))[0].changes == {SPLIT: 4, ACCUMULATION: 4}
    assert ladder.rungs([wanted], oom_in(unused_frac=0.3))[0].changes == {SPLIT: 4, ACCUMULATION: 4}


def test_a_trainer_without_a_search_space_still_splits() -> None:
    ladder = replace(ladder_of(), space="", trainer="my_loop:TRAINER")
    assert climbed(ladder, oom_in())[0] == {SPLIT: 4, ACCUMULATION: 4}


def test_a_ladder_and_an_oom_are_the_same_after_json(tmp_path: Path) -> None:
    speeds = (Speed(changes={SPLIT: 4}, step_s=1.5, device_used_bytes=10),)
    ladder = replace(grpo_ladder(), speeds=speeds, tiers={CHUNK: "approximate"})
    assert RescueLadder.from_json(json.loads(json.dumps(ladder.to_json()))) == ladder
    oom = oom_in(samples=SampleFacts(rows=3, drops_last=True))
    keep_oom(tmp_path, oom)
    assert read_oom(tmp_path) == oom


# -- the job's decision -----------------------------------------------------------------------------------------------


@pytest.fixture
def request_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The request of a run whose rungs all count as proven."""
    monkeypatch.setattr(job, "prove_changes", lambda *_, **__: _Proven(Verdict.PROVEN))
    return requested(tmp_path, ladder_of())


class _Proven:
    sentence = "gradient proven neutral"

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def requested(folder: Path, ladder: RescueLadder) -> Path:
    """The path of a request for a run of `ladder` in `folder`, as `launch` writes it."""
    folder.mkdir(exist_ok=True)
    request = {
        "folder": str(folder), "device": "cpu", "trainer": ladder.trainer, "output_dir": str(folder / "out"),
        "generates": ladder.keys.rollout is not None, "cwd": str(folder.parent), "ladder": ladder.to_json(),
        **job.carried(folder, ladder),
    }  # fmt: skip
    write_json(folder / "request.json", request)
    return folder / "request.json"


def test_a_rescue_is_in_the_request_the_events_and_a_yaml(request_path: Path) -> None:
    folder = request_path.parent
    keep_oom(folder, oom_in())
    assert job.goes_on(request_path, ProcessEnding(exit_code=1))
    request = read_json(request_path)
    assert request is not None
    assert (request["values"][SPLIT], request["values"][ACCUMULATION]) == (4, 4)  # type: ignore[index]
    assert request["rescues"] == job.rescues(folder)
    [event] = events_of(folder)
    assert (event.kind, event.step, event.data["resumed_from"]) == (EventKind.RESCUE, 36, 36)
    assert event.text == (
        "step 37: out of memory in the update (CUDA out of memory); the run goes on from step 36 with "
        "per_device_train_batch_size 8 -> 4, gradient_accumulation_steps 2 -> 4; the effective batch stays 16; "
        "gradient proven neutral"
    )
    assert yaml.safe_load((folder / "rescued.yaml").read_text())[SPLIT] == 4
    assert read_oom(folder) is None
    assert read_json(requested(folder, ladder_of()))["values"][SPLIT] == 4  # type: ignore[index]  # launched again


def test_a_run_that_ended_otherwise_does_not_start_again(request_path: Path) -> None:
    assert not job.goes_on(request_path, ProcessEnding(exit_code=1))
    assert not job.goes_on(request_path, ProcessEnding(exit_code=-9))
    keep_oom(request_path.parent, oom_in())
    (request_path.parent / "stop").touch()
    assert not job.goes_on(request_path, ProcessEnding(exit_code=1))
    assert not events_of(request_path.parent)


def test_a_process_that_the_system_ended_for_memory_goes_on_from_its_checkpoint(request_path: Path) -> None:
    folder = request_path.parent
    for step in range(1, 8):
        keep_progress(folder, {"step": step})
    (folder / "out" / "checkpoint-5").mkdir(parents=True)
    assert job.goes_on(request_path, ProcessEnding(exit_code=-9, kernel_oom=True))
    [event] = events_of(folder)
    assert (event.step, event.data["resumed_from"]) == (7, 5)
    assert "(2 step(s) are trained again)" in event.text


@pytest.mark.parametrize("verdict", [Verdict.REFUSED, None])
def test_a_rung_that_is_not_proven_is_not_taken(
    request_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict | None
) -> None:
    def proven(changes: Mapping[str, object], *_: object, **__: object) -> _Proven:
        if SPLIT not in changes:
            return _Proven(Verdict.PROVEN)
        if verdict is None:
            raise EnvironmentFault("the gradient proof took too long")
        return _Proven(verdict)

    monkeypatch.setattr(job, "prove_changes", proven)
    keep_oom(request_path.parent, oom_in())
    assert job.goes_on(request_path, ProcessEnding(exit_code=1))
    assert job.taken(request_path.parent) == [{"gradient_checkpointing": True}]


def test_without_a_rung_it_starts_once_more_and_then_ends_with_what_could_be_allowed(
    tmp_path: Path, request_path: Path
) -> None:
    own = {SPLIT: 1, "gradient_checkpointing": True, "dtype": "float32", "max_length": 64}
    path = requested(tmp_path, ladder_of(own))
    keep_oom(tmp_path, oom_in())
    assert job.goes_on(path, ProcessEnding(exit_code=1))
    assert "with the same settings" in events_of(tmp_path)[-1].text
    keep_oom(tmp_path, oom_in())  # at the same step
    assert not job.goes_on(path, ProcessEnding(exit_code=1))
    failed = read_json(tmp_path / "failed.json")
    assert failed is not None
    assert "no neutral change that needs less memory is left" in str(failed["reason"])
    assert "max_length 64 -> 48 (--allow recipe)" in str(failed["reason"])


def test_leave_for_a_lower_tier_is_needed_and_told(tmp_path: Path, request_path: Path) -> None:
    own = {SPLIT: 1, "gradient_checkpointing": True, "max_length": 64}
    path = requested(tmp_path, replace(ladder_of(own), allow="recipe"))
    keep_oom(tmp_path, oom_in())
    assert job.goes_on(path, ProcessEnding(exit_code=1))
    assert job.rescues(tmp_path)[0]["tier"] == "recipe"
    assert "recipe, as allowed" in events_of(tmp_path)[0].text


def test_steps_that_a_rescue_takes_back_are_shown_again_and_its_event_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains() -> None:
        for step in (1, 2, 3):
            keep_progress(tmp_path, {"step": step, "time": float(step)})

    def is_rescued() -> None:
        forget_progress_after(tmp_path, 1)
        keep_event(tmp_path, RunEvent(step=3, kind=EventKind.RESCUE, text="goes on from step 1", time=4.0))
        keep_progress(tmp_path, {"step": 2, "time": 5.0})
        write_json(tmp_path / "final.json", {"steps": 2})

    def is_done() -> None:
        pass

    acts = chain((trains, is_rescued), repeat(is_done))
    monkeypatch.setattr(promotion, "is_alive", lambda _: next(acts)() is None)
    said: list[object] = []
    run: Any = SimpleNamespace(folder=tmp_path)
    promotion.follow(run, lambda line: said.append(line["step"]), lambda event: said.append(event.text))
    assert said == [1, 2, 3, "goes on from step 1", 2]
    said.clear()
    known = promotion.logged(tmp_path)
    keep_progress(tmp_path, {"step": 3, "time": 6.0})
    promotion.follow(run, lambda line: said.append(line["step"]), said.append, known=known)
    assert said == [3]  # a run that is looked at again tells nothing twice


# -- real trainings ---------------------------------------------------------------------------------------------------


def real_ladder(trainer: str, values: Mapping[str, object], keys: BatchKeys) -> RescueLadder:
    plugin = load(trainer)
    resolved = plugin.parse(values, overrides={"use_cpu": True}).resolved  # type: ignore[attr-defined]
    return RescueLadder(
        trial=0, trainer=trainer, device="cpu", keys=keys, compared=plugin.compared, values=values,  # type: ignore[attr-defined]
        resolved=resolved, space=str(plugin.space),
    )  # fmt: skip


def trained(folder: Path, ladder: RescueLadder, server: ForkServer) -> dict[str, object]:
    """The final summary of a run in `folder`, whose training is started again as its job does it."""
    path = requested(folder, ladder)
    again = True
    while again:
        ending = server.call(
            {"entry": "offline_training:run", "argument": str(path), "cwd": str(folder.parent),
             "log": str(folder / "run.log"), "env": {}, "deadline_s": 500}
        )  # fmt: skip
        again = job.goes_on(path, ProcessEnding(exit_code=ending.exit_code))
    final = read_json(folder / "final.json")
    assert final is not None, (folder / "run.log").read_text()[-3000:]
    return final


def samples_of(folder: Path, per_step: int) -> dict[int, list[list[int]]]:
    """{optimizer step: the samples that its update was made of}; those of a failed step are left out."""
    found: dict[int, list[list[int]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], []).extend(entry["rows"])
    return {step: sorted(rows[-per_step:]) for step, rows in found.items()}


def difference(one: Path, other: Path) -> float:
    """The relative difference of the trained weights."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(str(folder / "out" / "adapter_model.safetensors")) for folder in (one, other))
    assert set(ours) == set(theirs)
    apart = sum(float((ours[name] - theirs[name]).norm()) ** 2 for name in ours)
    whole = sum(float(theirs[name].norm()) ** 2 for name in theirs)
    return float((apart / whole) ** 0.5)


def a_recipe(trainer: str, folder: Path, model: Path) -> dict[str, object]:
    """A recipe without dropout, whose masks would be others for another micro-batch."""
    common = {"num_train_epochs": 2, "output_dir": None, "lora_dropout": 0.0}
    if trainer == "grpo":
        path = tiny.write_recipe(folder, model, max_steps=None, temperature=1.0, **common)
    else:
        path = tiny.write_offline_recipe(trainer, folder, model, max_steps=-1, **common)
    return {**yaml.safe_load(path.read_text()), "use_cpu": True}


class _Line(Loop):
    """Fits a line to samples that only their number decides; fails once where `fails_at` says."""

    def __init__(self, micro: int, fails_at: tuple[int, int] | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self._micro, self._fails_at, self._done = micro, fails_at, (0, 0)

    def micro_batches(self, step: int, report: Report) -> list[torch.Tensor]:
        self._done = (step, 0)
        noise = torch.rand(8, 3)  # of the random state that a checkpoint continues
        return list((torch.arange(24.0).view(8, 3).sin() + step + noise).split(self._micro))

    def loss(self, micro_batch: torch.Tensor) -> torch.Tensor:
        if self._done == self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._done = (self._done[0], self._done[1] + 1)
        loss: torch.Tensor = ((self.model(micro_batch) - 1) ** 2).sum() / 8
        return loss


def test_a_plain_loop_is_saved_on_the_spot_and_ends_as_if_nothing_was(tmp_path: Path) -> None:
    def run(loop: Loop) -> LoopRun:
        return LoopRun(loop, steps=6, output=tmp_path, samples_per_step=8)

    whole, failing = run(_Line(4)), run(_Line(4, fails_at=(3, 1)))
    torch.manual_seed(1)
    whole.train(Report())
    torch.manual_seed(1)
    with pytest.raises(torch.OutOfMemoryError):
        failing.train(Report())
    assert failing.save_on_the_spot()
    [checkpoint] = checkpoints(tmp_path)
    assert step_of(checkpoint) == 3
    again = run(_Line(2))
    again.train(Report(), resume_from=checkpoint)
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trainer", "where", "proves"),
    [
        ("grpo", "backward", True),
        *(pytest.param(trainer, "backward", False, marks=pytest.mark.thorough) for trainer in ("sft", "dpo")),
        ("reward", "optimizer", False),
    ],
)
def test_after_an_oom_at_any_step_it_ends_with_the_weights_of_a_run_without(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, trainer: str,
    where: str, proves: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if not proves:  # it takes seconds, and is the same for every trainer
        monkeypatch.setattr(job, "prove_changes", lambda *_, **__: _Proven(Verdict.PROVEN))
    values = a_recipe(trainer, tmp_path, tiny_model)
    ladder = real_ladder(f"failing:{trainer.upper()}", values, ROLLOUTS if trainer == "grpo" else SAMPLES)
    whole, rescued = tmp_path / "whole", tmp_path / "rescued"
    steps = int(str(trained(whole, ladder, fork_server)["steps"]))
    step, micro = random.randrange(1, steps), random.randrange(2)  # any must do; the message says which did not
    rescued.mkdir()
    at = {"step": step, "where": where} | ({"micro": micro} if where == "backward" else {})
    (rescued / "inject.json").write_text(json.dumps([at]))
    assert trained(rescued, ladder, fork_server)["steps"] == steps, at
    [event] = [event for event in events_of(rescued) if event.kind is EventKind.RESCUE]
    assert event.step == step
    resumed_from = step if where == "backward" else 0  # the optimizer had begun: only an older checkpoint is exact
    assert event.data["resumed_from"] == resumed_from, at
    assert [line["step"] for line in read_progress(rescued)] == list(range(1, steps + 1))
    per_step = 16 if trainer in ("dpo", "reward") else 8  # two answers a pair
    assert samples_of(rescued, per_step) == samples_of(whole, per_step), at
    assert difference(rescued, whole) < ROUNDING, at
    if trainer == "grpo":
        assert [line["reward"] for line in read_progress(rescued)] == [line["reward"] for line in read_progress(whole)]
        assert "gradient proven neutral" in event.text
