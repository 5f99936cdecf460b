"""Whether a config fits, in one line: the verdict with the prediction's error, the sample and the step that stop it."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import command_line
import pytest
import tiny
import torch
from recipes import grpo_recipe, inspect
from trl import SFTTrainer

from autofit.api import estimating
from autofit.api.arguments import named_as_arguments
from autofit.api.estimating import Check
from autofit.api.events import Event
from autofit.cli import main
from autofit.commands.common import DONE, NOTHING_FITS, ended
from autofit.errors import ConfigError, Interrupted, told
from autofit.fakegpu.specs import gpu_spec
from autofit.files import write_json
from autofit.forecast import estimate, step_picture
from autofit.forecast.advice import Advice, Ending, advice_lines
from autofit.forecast.change import Change
from autofit.forecast.estimate import Estimator, crash_of, step_of_longest
from autofit.forecast.margin import is_tight, most_used_bytes, roomy_bytes, tight_words
from autofit.probing.result import Cause, Fidelity, PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.yaml_file import read_yaml_mapping
from autofit.trainers.common import real
from autofit.trainers.sft import TRAINER as SFT

CARD = gpu_spec("a10g")
GB = 10**9


def result(used_bytes: int, *, update_bytes: int | None = None) -> ProbeResult:
    """A simulated run that peaks in the update."""
    fits = used_bytes <= CARD.capacity_bytes
    peaks = {"load": 2 * GB, "rollout": 3 * GB, "update": update_bytes or used_bytes - CARD.context_bytes}
    return ProbeResult(
        status=ProbeStatus.FIT if fits else ProbeStatus.OOM, device="sim:a10g", device_used_bytes=used_bytes,
        least_capacity_bytes=used_bytes, step_s=(3.0,),
        phases=tuple(PhasePeak(name=n, peak_allocated_bytes=b, peak_reserved_bytes=b,
                               device_used_bytes=b + CARD.context_bytes)
                     for n, b in peaks.items()),
    )  # fmt: skip


MEND = Change(
    changes={"gradient_checkpointing": True}, given={"gradient_checkpointing": True}, tier="neutral", settings=1,
    device_used_bytes=18 * GB + 2 * GB // 10, shown_bytes=18 * GB + 2 * GB // 10, least_capacity_bytes=18 * GB,
    step_s=4.0, fits=True,
)  # fmt: skip


def check(
    found: ProbeResult, advice: Advice | None = None, *, weights_bytes: int = 16 * GB, parameters: int = 8 * GB
) -> Check:
    recipe = replace(grpo_recipe(), longest_row=4812, longest_place=1201, num_samples=9000, longest_prompt_tokens=1950)
    recipe = replace(
        recipe, model_parameters=parameters, weights_bytes=weights_bytes, resolved={**recipe.resolved, "dtype": None}
    )
    stops = crash_of(found, recipe, CARD.capacity_bytes) if found.device_used_bytes != 10 * GB else None
    return Check(
        recipe=recipe, device="sim:a10g", capacity_bytes=CARD.capacity_bytes, result=found, crash=stops, advice=advice
    )


def test_the_line_names_the_phase_the_sample_the_step_and_the_change() -> None:
    """4 x 4 completions in groups of 4 are 4 prompts a step, and place 1,201 is in step 301."""
    found = check(result(CARD.capacity_bytes + 13 * GB // 10), Advice(changes=(MEND,)))
    assert (found.verdict, found.fits) == ("does not fit", False)
    assert found.line == (
        "does not fit: update of sample 4,812 (the longest, 1,950 prompt + 64 completion tokens; step 301 at the "
        "latest), 1.30 GB over"
    )
    assert found.advised == ["set gradient_checkpointing=true (neutral): 18.20 GB, 4.00 s a step"]
    assert str(found).splitlines() == [found.line, *found.advised]
    kept = found.to_dict()
    assert kept["crash"] == {
        "phase": "update",
        "over_bytes": 13 * GB // 10,
        "sample": 4812,
        "step": 301,
        "tokens": 1950,
        "completion_tokens": 64,
    }
    assert json.loads(json.dumps(kept))["change"]["options"] == "--set gradient_checkpointing=true"


def test_bytes_of_a_later_peak_are_not_told_of_the_phase_that_stops() -> None:
    """It stops while it loads; by how much the update would not fit is said of the update."""
    later = "; 1.30 GB over at the peak, in update"
    for update_bytes, end in ((GB, ", 1.30 GB over"), (2 * CARD.capacity_bytes, later)):
        found = result(CARD.capacity_bytes + 13 * GB // 10, update_bytes=update_bytes)
        load = replace(found.phases[0], peak_allocated_bytes=CARD.capacity_bytes)
        line = check(replace(found, phases=(load, *found.phases[1:]))).line
        assert line == f"does not fit: load, before the first step{end}"


def test_a_fit_with_less_to_spare_than_the_error_is_tight_and_says_what_decides_and_what_makes_it_safe() -> None:
    roomy = check(result(10 * GB))
    assert roomy.line.startswith("fits: 10.00 GB of 23.68 GB used. Up to 10.6")
    assert (roomy.tight, len(roomy.parts())) == (False, 1)
    edge = check(result(CARD.capacity_bytes * 97 // 100))
    assert (edge.verdict, edge.fits, edge.tight, edge.to_dict()["tight"]) == ("tight", True, True, True)
    assert " used, in update of sample 4,812" in edge.line
    assert edge.line.endswith("allowing for the largest error seen so far. A step takes 3.00 s.")
    _, decides, safe = map(str, edge.parts())
    assert decides == "What decides: the live tensors of the update, 22.97 GB with the CUDA context."
    assert safe.startswith("It is safe with 0.74 GB less, or where 24.4")
    assert safe.endswith("If the prediction is exact, 0.71 GB of the card stays free.")
    assert check(result(CARD.capacity_bytes * 94 // 100)).verdict == "tight"
    assert ended(edge, as_json=False) == DONE


def test_a_predicted_winner_of_a_search_that_is_tight_says_so_and_how_to_search_for_what_is_safe() -> None:
    roomy, edge = (
        replace(result(nbytes), fidelity=Fidelity.PREDICTED) for nbytes in (10 * GB, CARD.capacity_bytes * 97 // 100)
    )
    assert tight_words(roomy, CARD.capacity_bytes) == ""
    assert tight_words(replace(edge, fidelity=Fidelity.MEASURED), CARD.capacity_bytes) == ""
    words = told(tight_words(edge, CARD.capacity_bytes), lambda found: f"--{found.name} {found.value}")
    assert words.startswith("That is tight: up to 24.4")
    assert words.endswith("--headroom 1.5GB searches for what is safe.")


def test_the_picture_is_in_the_order_of_a_step_in_the_pages_colours_and_names_stand_in_its_bars() -> None:
    page = (Path(estimate.__file__).parents[1] / "web/page/page.css").read_text("utf-8")
    assert all(colour in page for colour in step_picture._COLOURS.values())
    held = {"load": {"weights": 16 * GB}, "update": {"weights": 16 * GB, "gradients": 1}, "rollout": {"KV cache": GB}}
    phases = tuple(replace(result(GB).phases[0], name=name) for name in held)
    of_all = replace(result(GB), phases=phases, categories=held, rollout_s=(0.0,))
    assert list(estimate.estimate_table(of_all, 20 * GB)[0].columns[0].cells) == ["load", "rollout", "update"]
    axes = step_picture.memory_figure(of_all, 20 * GB).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["load", "rollout", "update"]
    words = [text.get_text().strip() for text in axes.texts]
    assert words == ["weights", "weights", "KV cache", "16.0", "1.0", "16.0", "limit 20.00 GB"]
    assert axes.figure.legends == []


def test_the_picture_of_a_step_names_its_areas_and_phases_and_its_peak() -> None:
    live = {"weights": [16 * 953.7] * 100, "activations": [0.0] * 40 + [8 * 953.7] * 60, "gradients": [1.0] * 100}
    course = {"live": live, "phases": [["rollout", 0, 2.0], ["update", 40, 1.0], ["update", 70, 1.0]]}
    held = {"update": {"weights": 16 * GB, "activations": 8 * GB, "gradients": GB // 1000}}
    axes = step_picture.memory_figure(replace(result(GB), categories=held, course=course), 20 * GB).axes[0]
    words = [text.get_text().strip() for text in axes.texts]
    assert words == ["weights", "activations", "24.0 GB", "rollout\n2.00 s", "update\n2.00 s", "limit 20.00 GB"]
    x, y = axes.texts[1].get_position()
    assert 40 < x < 100
    assert y == pytest.approx(20, rel=0.01)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["gradients"]  # too thin for its name


def test_gaps_between_blocks_decide_where_the_live_tensors_alone_would_be_safe() -> None:
    used = CARD.capacity_bytes * 97 // 100
    gappy = [replace(p, peak_allocated_bytes=p.peak_allocated_bytes * 9 // 10) for p in result(used).phases]
    found = replace(result(used), phases=tuple(gappy), growing_capacity_bytes=21 * GB)
    line = str(check(found).parts()[1])
    assert line.startswith("What decides: fragmentation. 20.7")
    assert line.endswith("; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it needs 21.00 GB.")
    line = str(check(replace(found, growing_capacity_bytes=CARD.capacity_bytes + GB)).parts()[1])
    assert line.endswith("expandable_segments:True would leave 1.00 GB too much.")


def test_a_card_that_the_allocators_cache_fills_is_not_told_as_nearly_full() -> None:
    """The rollout's freed blocks are returned when they are needed: the least capacity counts."""
    full = replace(result(CARD.capacity_bytes), least_capacity_bytes=CARD.capacity_bytes * 9 // 10)
    found = check(full)
    assert (found.verdict, found.fits) == ("fits", True)
    assert found.line.startswith("fits: 21.32 GB of 23.68 GB needed, in update of sample 4,812")
    assert ". Up to 22.70 GB, allowing" in found.line
    assert str(found.parts()[1]).startswith(
        "The card will look full, with 23.68 GB: PyTorch keeps blocks that the update"
    )
    assert check(replace(full, least_capacity_bytes=CARD.capacity_bytes * 97 // 100)).tight
    roomy = check(replace(result(20 * GB), least_capacity_bytes=10 * GB))
    assert roomy.line.startswith("fits: 20.00 GB of 23.68 GB used")
    assert str(roomy.parts()[1]).startswith("10.00 GB would do: PyTorch keeps blocks that the update has freed")
    assert len(check(replace(result(20 * GB), least_capacity_bytes=19 * GB)).parts()) == 1


def test_the_margin_is_the_error_of_the_worst_compared_peak() -> None:
    roomy = roomy_bytes(CARD.capacity_bytes, "sim:a10g")
    assert abs(most_used_bytes(roomy, "sim:a10g") - CARD.capacity_bytes) <= 1
    assert not is_tight(result(roomy), CARD.capacity_bytes)
    assert is_tight(result(roomy + 10), CARD.capacity_bytes)
    assert not is_tight(result(CARD.capacity_bytes + 1), CARD.capacity_bytes)


def test_what_no_sample_decides_is_said_without_one() -> None:
    load = replace(result(30 * GB), phases=(PhasePeak(name="load", peak_allocated_bytes=30 * GB, peak_reserved_bytes=0,
                                                      device_used_bytes=0),))  # fmt: skip
    assert "load, before the first step" in check(load).line
    assert check(load, Advice()).advised == ["no change that was tried makes it fit with room to spare"]
    assert check(load).advised == []


def test_an_end_before_the_last_change_is_told_with_what_was_found() -> None:
    over = result(CARD.capacity_bytes + GB)
    late, stopped = (check(over, Advice(changes=(MEND,), ending=ending)) for ending in Ending)
    assert late.advised[0] == stopped.advised[0] == "set gradient_checkpointing=true (neutral): 18.20 GB, 4.00 s a step"
    assert "such as advice_time=" in late.advised[1]
    assert not late.interrupted
    assert stopped.interrupted
    assert stopped.to_dict()["advice_ended_by"] == "interrupt"


def test_gaps_are_named_where_the_live_tensors_alone_would_fit() -> None:
    over = result(CARD.capacity_bytes + 2 * GB, update_bytes=20 * GB)
    (line,) = check(over).parts()[1:]
    assert str(line).startswith("What decides: fragmentation. 20.")
    assert "5." in str(line).partition("update, ")[2]
    assert len(check(result(CARD.capacity_bytes + 2 * GB)).parts()) == 1  # live tensors
    assert len(check(replace(over, least_capacity_bytes=None)).parts()) == 1


def test_where_no_change_was_simulated_in_time_none_is_said_to_be_too_little(
    capsys: pytest.CaptureFixture[str],
) -> None:
    none = Advice(ending=Ending.TIME)
    said = "no change was simulated to its end in the time for advice; give more, such as advice_time='2m'"
    over = result(CARD.capacity_bytes + GB)
    assert check(over, none).advised == [said]
    assert ended(check(over, none), as_json=False) == 1
    typed = said.replace("advice_time='2m'", "--advice-time 2m")
    assert capsys.readouterr().out == f"{typed}\n", "a command has its own names"
    (line,) = advice_lines(none, grpo_recipe(), over, CARD.capacity_bytes)
    assert told(line, str) == f"{typed}."
    tried = [str(line) for line in check(over, replace(none, misses=2)).advised]  # none says by how much it misses
    assert tried[0] == "no change was found"
    assert tried[1].startswith("not every change was tried in the time for advice")
    late = check(over, replace(none, closest=MEND)).advised
    more = "not every change was tried in the time for advice; give more, such as advice_time='2m'"
    closest = "the closest: set gradient_checkpointing=true (neutral) fits: 18.20 GB, 4.00 s a step"
    assert [str(line) for line in late] == [f"no change was found; {closest}", more]


def test_weights_of_float32_are_named_where_a_recipe_does_not_fit() -> None:
    over = check(result(CARD.capacity_bytes + GB), weights_bytes=32 * GB)
    assert str(over).splitlines()[1] == (
        "`dtype` is not set, so the weights are loaded in float32: 32.00 GB for 8.00 B parameters; "
        "dtype: bfloat16 takes half of that"
    )
    assert over.to_dict()["float32_weights_bytes"] == 32 * GB
    assert "float32" not in str(check(result(10 * GB), weights_bytes=32 * GB))
    assert "float32" not in str(check(result(CARD.capacity_bytes + GB), parameters=100_000, weights_bytes=400_000))
    assert "float32" not in str(check(result(CARD.capacity_bytes + GB)))


def test_the_step_follows_the_rollouts() -> None:
    recipe = replace(grpo_recipe(), longest_place=7, num_samples=24)
    assert step_of_longest(recipe) == 2  # 4 prompts a rollout, one rollout a step
    twice = replace(recipe, resolved={**recipe.resolved, "num_iterations": 2})
    assert step_of_longest(twice) == 3  # each rollout serves two steps
    assert step_of_longest(replace(recipe, num_samples=7)) is None  # the epoch's last rollout would not be full
    assert step_of_longest(replace(recipe, longest_place=None)) is None


def test_the_place_of_the_longest_sample_is_where_the_trainer_trains_on_it(tmp_path: Path) -> None:
    path = tiny.write_offline_recipe("sft", tmp_path, tiny.write_model(tmp_path / "model"), use_peft=None, lora_r=None)
    values = read_yaml_mapping(path, what="recipe")
    told = inspect("sft", values, "cpu", tmp_path / "worst.json")
    config = SFT.parse(values, overrides={"use_cpu": True})
    trainer = real(SFTTrainer, config)
    trainer.create_optimizer_and_scheduler(4)
    torch.manual_seed(config.training.seed)
    lengths = [int(mask.sum()) for batch in trainer.get_train_dataloader() for mask in batch["attention_mask"]]
    assert lengths[int(str(told["longest_place"]))] == max(lengths) == told["longest_sample_tokens"]
    assert told["num_samples"] == len(lengths) == 24
    assert told["longest_row"] == 6


@pytest.mark.slow
def test_the_command_ends_with_an_exit_code_for_a_users_tests(tiny_recipe: Path) -> None:
    command = ["check", "run.yaml", "--gpu", "a10g", "--advice-time", "0"]
    done = command_line.run(tiny_recipe.parent, *command, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fits"
    command += ["--target-vram", "430MB"]
    done = command_line.run(tiny_recipe.parent, *command)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("does not fit: ")
    assert "of sample 6 (the longest, 7 prompt + " in done.stdout


def test_the_verdict_is_heard_before_any_change_is_tried_and_no_time_means_no_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[str] = []

    def mends(*_: object, **__: object) -> Advice:
        happened.append("advice")
        return Advice(changes=(MEND,))

    def within(limit_s: float, look: Callable[[], Advice], *, interrupted: object) -> Advice:
        assert limit_s == 90
        return look()

    made = SimpleNamespace(
        recipe=grpo_recipe(), device="sim:a10g", capacity_bytes=CARD.capacity_bytes, mends=mends, within=within,
        advice=mends, estimate=lambda: result(CARD.capacity_bytes + GB),
    )  # fmt: skip
    monkeypatch.setattr(estimating, "estimator", lambda *_: nullcontext(made))
    monkeypatch.setattr(estimating, "tell_left_out", lambda *_: happened.append("left out"))
    for call in (estimating.check, estimating.estimate):
        happened.clear()
        found = call(None, advice_time="90s", on_result=lambda one: happened.append(f"{one.fits} {one.advice}"))
        assert happened == ["False None", "advice"]
        assert found.advice == Advice(changes=(MEND,))
        happened.clear()
        monkeypatch.setattr(made, "within", lambda *_, **__: Advice())
        assert call(None, advice_time="90s", on_result=lambda _: happened.append("verdict")).advice == Advice()
        assert happened == ["verdict", "left out"]  # of changes: only where none was found
        happened.clear()
        late = Advice(ending=Ending.TIME)
        monkeypatch.setattr(made, "within", lambda *_, late=late, **__: late)
        assert call(None, advice_time="90s", on_result=lambda _: happened.append("verdict")).advice == late
        assert happened == ["verdict"]  # not every change was tried: nothing of it is why
        monkeypatch.setattr(made, "within", within)
        happened.clear()
        assert call(None, advice_time=0, on_result=lambda _: happened.append("verdict")).advice is None
        assert happened == ["verdict"]
        with pytest.raises(ConfigError, match="advice_time"):
            call(None, advice_time="soon")


def test_ctrl_c_keeps_the_verdict_and_is_one_line_in_a_notebook_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    cancelled: list[bool] = []
    made = SimpleNamespace(
        recipe=grpo_recipe(), device="sim:a10g", capacity_bytes=CARD.capacity_bytes,
        cancel=lambda: cancelled.append(True), estimate=lambda: result(CARD.capacity_bytes + GB),
    )  # fmt: skip
    monkeypatch.setattr(estimating, "estimator", lambda *_: nullcontext(made))
    monkeypatch.setattr(estimating.Asked, "typical", pressed)
    for call in (estimating.check, estimating.estimate):
        found = call(None)
        assert (found.interrupted, found.fits, cancelled.pop()) == (True, False, True)
    with pytest.raises(Interrupted) as stopped, named_as_arguments():
        pressed()
    assert stopped.value._render_traceback_() == [
        "interrupted before there was a result; the same call goes on with what is kept"
    ]


def test_notes_that_nobody_hears_stand_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        recipe=grpo_recipe(), device="sim:a10g", capacity_bytes=CARD.capacity_bytes, estimate=lambda: result(10 * GB)
    )

    def estimator(_: object, tell: Callable[[Event], None]) -> nullcontext[SimpleNamespace]:
        tell(Event(label="note", text="the loss is not simulated"))
        tell(Event(text="a model on a card"))
        return nullcontext(made)

    monkeypatch.setattr(estimating, "estimator", estimator)
    heard: list[Event] = []
    for call in (estimating.check, estimating.estimate):
        assert call(None, advice_time=0).noted == ["note: the loss is not simulated"]
        assert call(None, advice_time=0, on_event=heard.append).notes == ()
    assert len(heard) == 4


def test_a_stream_has_an_object_a_line_the_verdict_before_advice_and_the_whole_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = check(result(CARD.capacity_bytes + GB))
    whole = replace(verdict, advice=Advice(changes=(MEND,)))

    def answers(
        *_: object, on_event: Callable[[Event], None], on_result: Callable[[Check], None], **__: object
    ) -> Check:
        on_event(Event(text="a100 simulated", label="card"))
        on_result(verdict)
        on_event(Event(text="trying gradient_checkpointing"))
        return whole

    monkeypatch.setattr("autofit.api.check", answers)
    assert main(["check", "--gpu", "a10g", "--stream"]) == NOTHING_FITS
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("is") for line in lines] == ["note", "verdict", "note", None]
    assert lines[0] == {"is": "note", "label": "card", "text": "a100 simulated"}
    assert (lines[1]["verdict"], lines[1]["change"]) == ("does not fit", None)
    assert lines[-1] == json.loads(json.dumps(whole.to_dict()))


def test_a_simulation_that_ends_early_says_what_it_printed_last_and_names_no_log_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {Cause.EXITED: "exited with code 3 during scoring; see {}", Cause.RAISED: "No (during scoring; see {})"}
    cause = Cause.EXITED

    def ends(request_path: str) -> None:
        log = Path(request_path).with_name("probe.log")
        log.write_text("no licence\n")
        failed = ProbeResult(
            status=ProbeStatus.FAILED, device="sim:a10g", reason=reasons[cause].format(log), cause=cause
        )
        write_json(log.with_name("answer.json"), failed.to_json())

    monkeypatch.setattr("autofit.forecast.estimate.run_probe", ends)
    recipe: Any = SimpleNamespace(trainer="sft", values={}, named_hash=None)
    server: Any = SimpleNamespace(socket_path=None)
    estimator = Estimator(
        recipe=recipe, device="sim:a10g", capacity_bytes=GB, folder=tmp_path, worst_case=tmp_path, server=server,
        deadline_s=1.0,
    )  # fmt: skip
    assert estimator.probe({}).reason == "exited with code 3 during scoring; it printed last: no licence"
    cause = Cause.RAISED
    assert estimator.probe({}).reason == "No (during scoring)"
