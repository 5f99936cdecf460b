"""Pipelines: what is wrong is said before anything trains, done stages are kept, and killed ones go on."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import command_line
import pytest
import tiny

import autofit
from autofit import api
from autofit.api.pipeline import Knowledge, PipelineResult, StageResult
from autofit.cli import main
from autofit.errors import ConfigError, EnvironmentFault, option
from autofit.files import write_json
from autofit.promotion.stages import KnownStage, State, content_of, inputs_of
from autofit.recipe.pipeline import Pipeline, Stage, read_pipeline
from autofit.watching.events import read_progress

pytestmark = pytest.mark.filterwarnings("ignore")


def of(**stages: object) -> Pipeline:
    return read_pipeline({"stages": stages})


@pytest.mark.parametrize(("option", "said"), [([], "; its runs are in MLflow: autofit ui"), (["--no-mlflow"], "")])
def test_the_end_of_a_run_names_mlflow_only_where_it_has_the_runs(
    option: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = StageResult(name="sft", trainer="sft", status="done", what="trained", final={"output_dir": "out"})
    monkeypatch.setattr(api, "run", lambda *_, **__: PipelineResult(name="p", stages=(stage,)))
    values = "{model_name_or_path: Qwen/Qwen3-0.6B, dataset_name: d, packing: true}"
    Path("p.yaml").write_text(f"stages: {{sft: {{values: {values}}}}}")
    assert main(["run", "p.yaml", "--device", "cpu", *option]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"the model is in {stage.model_path}{said}"


# -- the file ---------------------------------------------------------------------------------------------------------


def test_stages_are_in_the_order_of_their_use_and_else_as_in_the_file() -> None:
    found = of(
        last={"values": {"model_name_or_path": "${middle}"}},
        free={"values": {}},
        middle={"values": {"env": {"A": "x=${first}/y"}, "more": ["${free}"]}},
        first={"values": {}},
    )
    assert [stage.name for stage in found.stages] == ["free", "first", "middle", "last"]
    assert found.stage("middle").uses == ("first", "free")
    values = found.stage("middle").resolved({"first": "/m", "free": "/f"})
    assert values == {"env": {"A": "x=/m/y"}, "more": ["/f"]}


def test_a_variable_keeps_its_type_and_changes_are_laid_over_the_file() -> None:
    content = {
        "vars": {"steps": 3, "model": "m"},
        "stages": {"sft": {"values": {"max_steps": "${steps}", "a": "$$${model}", "seed": 1}, "set": {"seed": 2}}},
    }
    found = read_pipeline(content, changes={"steps": 5, "sft.lora_r": 8}).stage("sft")
    assert found.resolved({}) == {"max_steps": 5, "a": "$m", "seed": 2, "lora_r": 8}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "stages must be a mapping"),
        ({"stage": {"a": {"values": {}}}}, "the file has no key 'stage'; the nearest valid one is 'stages'"),
        ({"stages": {"a": {}}}, "stage a needs either recipe .* or values .* neither"),
        ({"stages": {"a": {"values": {}, "recipe": "b.yaml"}}}, "it has recipe and values"),
        ({"stages": {"a": {"recipe": "nowhere.yaml"}}}, "stage a: the recipe nowhere.yaml does not exist"),
        ({"stages": {"a": {"values": {}, "trainner": "sft"}}}, "no key 'trainner'; the nearest valid one is 'trainer'"),
        ({"stages": {"a": {"values": {}}}, "target_varm": 1}, "no key 'target_varm'; the nearest .* 'target_vram'"),
        ({"stages": {"sft": {"values": {"m": "${stf}"}}}}, r"uses \$\{stf\}.*the nearest valid one is 'sft'"),
        ({"stages": {"a": {"values": {"m": "${b}"}}, "b": {"values": {"m": "${a}"}}}}, "a circle: a -> b -> a|b -> a"),
        ({"stages": {"a": {"values": {"m": "${a}"}}}}, "in a circle: a -> a"),
        ({"stages": {"a": {"values": {}}}, "trials": "many"}, "trials must be a number; got 'many'"),
        ({"stages": {"a": {"values": {}, "search": "no"}}}, "search must be true or false"),
        ({"stages": {"a": {"values": {}}}, "vars": {"a": 1}}, "the name of a stage and of a variable"),
        ({"stages": {"a": {"values": []}}}, "values must be a mapping"),
        ({"stages": {"a": 3}}, "stage a must be a mapping"),
        ({"stages": {"a": {"values": {}, "trainer": 3}}}, "trainer must be text"),
        ({"stages": {"a b": {"values": {}}}}, "the name of a stage"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_clear_error(content: Mapping[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_pipeline(content)


def test_a_wrong_key_is_told_with_the_valid_ones_and_an_example() -> None:
    with pytest.raises(ConfigError, match=r"no key 'zzz'; it takes trainer, recipe, .*; for example stages: \{sft: "):
        of(a={"values": {}, "zzz": 1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "a pipeline trains on a CUDA card"),
        (["--plan", "--gpu", "h100"], "stage a: the recipe.*unknown key 'packin'.*; stage b: .*unknown key 'beat'"),
    ],
)
def test_a_wrong_recipe_or_device_is_told_before_the_imports_of_seconds(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autofit.hardware.hardware.gpus", lambda: ())
    monkeypatch.setattr(api, "run", None)
    stages = {"a": {"values": {"model_name_or_path": "m", "packin": True}, "trainer": "sft"},
              "b": {"values": {"model_name_or_path": "m", "beat": True}, "trainer": "dpo"}}  # fmt: skip
    Path("p.yaml").write_text(json.dumps({"stages": stages}))
    assert main(["run", "p.yaml", *given]) == 2
    assert re.search(said, capsys.readouterr().err)
    begun = tmp_path / "autofit-studies" / "pipelines" / "p.json"
    begun.parent.mkdir(parents=True)
    begun.write_text("{}")
    with pytest.raises(TypeError):  # what is begun may be done: the API looks
        main(["run", "p.yaml", *given])


def test_a_stage_says_the_length_of_made_up_samples_for_a_plan_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of(a={"values": {}, "trainer": "grpo", "prompt_tokens": 300})
    for given, tokens in (({"gpu": "h100"}, 300), ({"device": "cpu"}, None)):
        about = Knowledge.of(found, tmp_path, given, search=True)
        assert about.options(found.stage("a")).get("prompt_tokens") == tokens


def test_everything_wrong_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as error:
        read_pipeline({"stages": {"a": {"recipe": "no.yaml"}, "b": {"values": {"m": "${c}"}}}, "trial": 1})
    assert all(word in str(error.value) for word in ("no.yaml", "${c}", "'trial'"))


def test_a_reward_model_among_reward_functions_goes_where_trl_takes_it_with_its_weight() -> None:
    rewards = {"reward_funcs": ["m.f", "${rm}"], "reward_weights": [0.25, 1.0]}
    found = of(rm={"values": {}}, grpo={"values": rewards}).stage("grpo")
    moved = {"reward_funcs": ["m.f"], "reward_weights": [1.0, 0.25], "reward_model_name_or_path": "${rm}"}
    assert found.values == moved
    with pytest.raises(ConfigError, match="TRL takes one reward model"):
        of(rm={"values": {}}, s={"values": {}}, grpo={"values": {"reward_funcs": ["${rm}", "${s}"]}})


# -- what is known of its stages --------------------------------------------------------------------------------------


def test_a_stage_is_done_until_its_recipe_its_data_or_an_earlier_run_changes(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("1")
    stage = Stage(name="sft", values={"dataset_name": str(data), "max_steps": 3}, uses=("rm",))
    first = inputs_of(stage, "sft", {"rm": "one"})
    assert inputs_of(stage, "sft", {"rm": "one"}).changed_from(first) == []
    longer = Stage(name="sft", values={**stage.values, "max_steps": 4}, uses=("rm",))
    assert inputs_of(longer, "sft", {"rm": "one"}).changed_from(first) == ["max_steps 3 -> 4"]
    assert inputs_of(stage, "sft", {"rm": "two"}).changed_from(first) == ["rm was trained again"]
    data.write_text("2")
    assert inputs_of(stage, "sft", {"rm": "one"}).changed_from(first) == [f"{data} has other content"]


def test_an_edited_reward_function_counts_as_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_rewards.py").write_text("def f(): ...")
    before = content_of("some_rewards.f")
    (tmp_path / "some_rewards.py").write_text("def f(): return 1")
    assert before != content_of("some_rewards.f") != ""
    assert content_of("no_such_module.f") == content_of("a sentence. of words") == content_of("x" * 5000) == ""


def test_a_stage_whose_trained_model_was_deleted_is_not_done(tmp_path: Path) -> None:
    state = State.read(tmp_path, "p")
    known = KnownStage(inputs=inputs_of(Stage(name="a", values={}), "sft", {}), study="s", trial=2)
    state.keep("a", known)
    again = State.read(tmp_path, "p")
    assert again.stages == {"a": known}
    assert again.run("a") is None
    home, model = again.home("a"), tmp_path / "model"
    model.mkdir()
    write_json(home / "final.json", {"output_dir": str(model), "steps": 3})
    assert (found := again.run("a")) is not None
    assert found.model == model
    model.rmdir()
    assert again.run("a") is None
    (tmp_path / "pipelines" / "p.json").write_text('{"stages": {"a": {"torn')
    with pytest.raises(EnvironmentFault, match=r"p\.json cannot be read; delete it"):
        State.read(tmp_path, "p")


def test_a_moved_or_copied_pipeline_finds_its_models_where_they_are_and_trains_nothing_again(tmp_path: Path) -> None:
    state = State.read(tmp_path / "old", "p")
    state.keep("a", KnownStage(inputs=inputs_of(Stage(name="a", values={}), "sft", {}), study="s", trial=2))
    home = state.home("a")
    (home / "output").mkdir(parents=True)
    write_json(home / "request.json", {"folder": str(home)})
    write_json(home / "final.json", {"output_dir": str(home / "output"), "steps": 3})
    made = state.run("a")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    copied = State.read(tmp_path / "copy", "p").run("a")
    assert made is not None
    assert copied is not None
    assert (made.model, copied.model) == (
        home / "output",
        tmp_path / "copy" / (home / "output").relative_to(tmp_path / "old"),
    )
    assert made.number == copied.number


def two_stages(rate: float) -> Pipeline:
    grpo = {"model_name_or_path": "${sft}", "reward_funcs": ["a.b"]}
    return of(sft={"trainer": "sft", "values": {"learning_rate": rate}}, grpo={"values": grpo})


def trained(folder: Path, about: Knowledge, name: str, *, seconds: float = 1.0) -> None:
    """Leave what a finished training of the stage `name` leaves."""
    stage = about.pipeline.stage(name)
    about.state.keep(name, KnownStage(inputs=about.inputs(stage), study=f"{name}-study", trial=2))
    (output := folder / f"{name}-output").mkdir(exist_ok=True)
    write_json(about.state.home(name) / "final.json", {"output_dir": str(output), "seconds": seconds})


def test_what_a_run_would_do_follows_from_what_changed(tmp_path: Path) -> None:
    def told(rate: float = 1.0, **more: bool) -> list[str]:
        about = Knowledge.of(two_stages(rate), tmp_path, {}, search=True)
        return [about.next(stage, **more) for stage in about.pipeline.stages]

    assert told() == ["search, then train", "search, then train, after sft"]
    about = Knowledge.of(two_stages(1.0), tmp_path, {}, search=True)
    trained(tmp_path, about, "sft")
    assert told() == ["done, kept as it is", "search, then train"]
    trained(tmp_path, about, "grpo")
    assert told() == ["done, kept as it is"] * 2
    assert told(restart=True) == [f"train again from step 0: trial 2 of {name}-study" for name in ("sft", "grpo")]
    assert told(2.0) == ["search, then train again, as learning_rate 1.0 -> 2.0", "search, then train again, after sft"]
    trained(tmp_path, about, "sft", seconds=2.0)  # by hand, with another result
    assert told() == ["done, kept as it is", "search, then train again, as sft was trained again"]
    (about.state.home("sft") / "final.json").unlink()  # a restarted training that is at work
    assert told()[0] == "go on with its training: trial 2 of sft-study"
    (about.state.home("grpo") / "final.json").unlink()
    trained(tmp_path, about, "sft")
    trained(tmp_path, about, "grpo")
    (tmp_path / "grpo-output").rmdir()
    assert told() == ["done, kept as it is", "train again from step 0: trial 2 of grpo-study"]


# -- with trainings ---------------------------------------------------------------------------------------------------


Row = Callable[[int], object]
EXAMPLES = Path(__file__).parents[1] / "trainers" / "examples"
TINY = {"dtype": "float32", "bf16": False, "report_to": "none", "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "learning_rate": 1e-3, "max_steps": 2, "max_length": 32}  # fmt: skip


def write_example(
    name: str, folder: Path, model: Path, rows: Mapping[str, Callable[[int], object]]
) -> dict[str, object]:
    """Copy a shipped pipeline to `folder`, with data of 24 rows; what to change for the tiny model, every stage too."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    for file, row in rows.items():
        (folder / "data" / file).write_text("".join(json.dumps(row(i)) + "\n" for i in range(24)))
    return {"model": str(model), "dtype": "float32"}


def tiny_stage(stage: str, **more: object) -> dict[str, object]:
    """The changes of a stage's recipe for the tiny model; None leaves one out."""
    return {f"{stage}.{key}": value for key, value in {**TINY, **more}.items() if value is not None}


def sft_then_grpo(folder: Path, model: Path, *, grpo_steps: int = 3) -> dict[str, object]:
    """The shipped example with the tiny model; both stages train an adapter."""
    rows = {"sft.jsonl": tiny.ROWS["sft"], "grpo.jsonl": lambda i: {"prompt": f"t{i % 9} t1", "answer": "t1"}}
    changes = write_example("sft_then_grpo", folder, model, rows)
    talk = {"max_completion_length": 8, "num_generations": 4, "max_length": None, "max_steps": grpo_steps}
    return {**changes, **tiny_stage("sft"), **tiny_stage("grpo", **talk)}


def command(changes: Mapping[str, object], *arguments: str) -> list[str]:
    given = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return ["run", "pipeline.yaml", "--no-search", "--no-mlflow", "--json",
            "--device", "cpu", "--target-vram", "1GB", *given, *arguments]  # fmt: skip


def finish(folder: Path, changes: Mapping[str, object], *arguments: str) -> dict[str, Any]:
    done = command_line.run(folder, *command(changes, *arguments))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_a_stage_lacks_is_said_in_the_keys_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`autofit run` has no option --prompt-tokens: each stage has a key of its own."""

    def unreachable(*_: object) -> None:
        stated = option("prompt-tokens", "N")
        raise ConfigError(f"the tokenizer must be reachable; connect to it, or give {stated}: a sample")

    monkeypatch.chdir(tmp_path)
    stage = {"values": {"model_name_or_path": "Qwen/Qwen3-4B"}, "trainer": "sft"}
    Path("p.yaml").write_text(json.dumps({"stages": {"a": stage}}))
    assert main(["run", "p.yaml", "--plan", "--gpu", "rtx4090"]) == 2  # before the imports
    assert capsys.readouterr().err.endswith("a folder or a name) or datasets\n")  # made-up samples train nothing
    monkeypatch.setattr("autofit.api.pipeline.make_plan", unreachable)
    stage = {"values": {"model_name_or_path": "m", "dataset_name": "d"}, "trainer": "sft"}
    with pytest.raises(ConfigError, match="or give prompt_tokens: N in the stage: a sample"):
        autofit.run({"stages": {"a": stage}}, plan=True, gpu="rtx4090")


@pytest.mark.usefixtures("warm")
def test_a_wrong_key_of_a_later_stage_is_said_before_the_first_one_trains(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right = sft_then_grpo(tmp_path, tiny_model)
    path = Path("pipeline.yaml")
    wrong = {**right, "grpo.learning_rat": 1, "sft.dataset_name": str(tmp_path / "nowhere")}
    with pytest.raises(ConfigError) as error:
        autofit.run(path, changes=wrong, search=False, device="cpu", target_vram="1GB")
    assert "stage grpo" in str(error.value)
    assert "'learning_rat'" in str(error.value)
    assert "nowhere" in str(error.value)
    assert not list(tmp_path.glob("autofit-studies/promoted/*"))
    with pytest.raises(ConfigError, match="only must name a stage: sft, grpo; got 'gpro'"):
        autofit.run(path, only="gpro")
    with pytest.raises(ConfigError, match=r"must be cpu or cuda; got sim"):
        autofit.run({"stages": {"a": {"values": {"dataset_name": "d"}}}, "device": "sim"})
    with pytest.raises(ConfigError, match="grpo uses what sft trained, and sft is not done"):
        autofit.run(path, only="grpo")
    with pytest.raises(ConfigError, match="gpu names a simulated card, on which nothing trains; it goes with plan"):
        autofit.run(path, changes=right, gpu="rtx4090")
    elsewhere = autofit.run(path, changes=right, plan=True, gpu="rtx4090")
    planned = autofit.run(path, changes=right, plan=True, device="cpu", target_vram="1GB")
    assert [stage.what for stage in elsewhere.stages] == [stage.what for stage in planned.stages]
    assert [(s.name, s.status, s.what) for s in planned.stages] == [
        ("sft", "planned", "search, then train"),
        ("grpo", "planned", "search, then train, after sft"),
    ]


STEPS = 10  # enough to be killed among them


@pytest.mark.slow
def test_killed_within_its_second_stage_it_goes_on_where_it_was(tmp_path: Path, tiny_model: Path) -> None:
    changes = sft_then_grpo(tmp_path, tiny_model, grpo_steps=STEPS)
    first = start(tmp_path, changes)
    wait_for(lambda: steps(tmp_path), first, tmp_path)
    for path in tmp_path.glob("autofit-studies/promoted/sft-then-grpo-grpo-*/started.json"):
        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    first.kill()
    first.wait()
    assert 0 < len(steps(tmp_path)) < STEPS
    found = finish(tmp_path, changes)
    assert [stage["status"] for stage in found["stages"]] == ["kept", "done"]
    assert [stage["final"]["steps"] for stage in found["stages"]] == [2, STEPS]
    assert steps(tmp_path) == list(range(1, STEPS + 1))
    whole = next(tmp_path.glob("autofit-studies/promoted/sft-then-grpo-sft-*/merged"))
    assert (whole / "config.json").exists()


@pytest.mark.thorough
def test_two_reward_models_then_safe_dpo_with_all_four_models(tmp_path: Path, tiny_model: Path) -> None:
    rows = {f"{name}.jsonl": tiny.ROWS["dpo"] for name in ("helpful", "safety")}
    changes = write_example("safe_dpo", tmp_path, tiny_model, rows)
    for stage in ("helpful", "safety", "policy"):
        changes |= tiny_stage(stage)
    found = finish(tmp_path, changes)
    assert [(stage["stage"], stage["status"]) for stage in found["stages"]] == [
        ("helpful", "done"), ("safety", "done"), ("policy", "done"),
    ]  # fmt: skip
    home = next(tmp_path.glob("autofit-studies/promoted/safe-dpo-policy-*"))
    assert all("safety/score_difference" in line for line in read_progress(home))
    assert (Path(found["stages"][2]["final"]["output_dir"]) / "model.safetensors").exists()


@pytest.mark.thorough
def test_an_agent_trains_with_a_user_that_is_the_same_model(tmp_path: Path, tiny_model: Path) -> None:
    rows = {"goals.jsonl": lambda i: {"prompt": f"t{i % 9} t1", "goal": "t2"}}
    changes = write_example("two_roles", tmp_path, tiny_model, rows)
    talk = {"max_completion_length": 48, "num_generations": 4, "max_length": None, "turns": 2, "user_tokens": 4}
    found = finish(tmp_path, {**changes, **tiny_stage("agent", **talk)})
    assert [(stage["status"], stage["final"]["steps"]) for stage in found["stages"]] == [("done", 2)]


def start(folder: Path, changes: Mapping[str, object]) -> command_line.Started:
    with (folder / "log").open("ab") as log:
        return command_line.start(folder, *command(changes), stdout=log, stderr=log)


def steps(folder: Path) -> list[object]:
    """The steps that the GRPO stage has logged."""
    return [
        line["step"]
        for home in folder.glob("autofit-studies/promoted/sft-then-grpo-grpo-*")
        for line in read_progress(home)
    ]


def wait_for(happened: Callable[[], object], driver: command_line.Started, folder: Path) -> None:
    deadline = time.monotonic() + 500
    while not happened():
        assert driver.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
