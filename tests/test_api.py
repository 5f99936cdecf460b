"""The Python API: what a notebook calls. The command line's own tests cover what lies beneath."""

import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, cast

import command_line
import lawful
import pytest
import yaml

import autofit
from autofit.api import Event, Progress, SearchResult
from autofit.api.arguments import as_argument
from autofit.cli import main
from autofit.errors import AutofitError, ConfigError, Option, option
from autofit.files import write_json
from autofit.probing.fork_server import ForkServer
from autofit.probing.launch import Launcher
from autofit.probing.result import Fidelity, ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.yaml_file import read_source
from autofit.space.space import Knob
from autofit.tuning.frontier import Trial
from autofit.tuning.record import StudyRecord

NAMES = ("check", "estimate", "monitor", "promote", "report", "run", "search", "studies", "verify")
QUICK: dict[str, Any] = {"target_vram": "2GB", "device": "cpu", "measured_steps": 1, "confirm": False, "mlflow": False}


class Kept:
    """A fork server that outlives the call it is lent to: importing torch for each would take longer than the test."""

    def __init__(self, server: ForkServer) -> None:
        self.call, self.socket_path = server.call, server.socket_path

    def close(self) -> None:
        """Stays open."""


class AtOnce(Launcher):
    """Answers within the call by the law of tests/lawful.py: no job, no process."""

    def submit(self, request: ProbeRequest) -> None:
        write_json(request.request_path, request.to_json())
        lawful.at_once(str(request.request_path))


@pytest.fixture
def lawful_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.probing.cluster_launch.Launcher", AtOnce)


@pytest.fixture
def lent_server(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("searching", "estimating"):
        monkeypatch.setattr(f"autofit.api.{module}.fork_server", lambda _: Kept(fork_server))


# -- the names --------------------------------------------------------------------------------------------------------


def test_the_names_are_listed_and_load_nothing_before_they_are_used() -> None:
    code = (
        "import sys, time; began = time.perf_counter(); import autofit; took = time.perf_counter() - began\n"
        f"assert set({NAMES!r}) <= set(dir(autofit)), dir(autofit)\n"
        "heavy = {'torch', 'optuna', 'mlflow', 'numpy', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy and took < 0.3, (heavy, took)\n"
        "autofit.search; assert not {'torch', 'mlflow', 'matplotlib', 'trl'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        autofit.__getattr__("serach")


@pytest.mark.slow
def test_a_search_in_a_notebook_without_widgets_warns_of_no_progress_bar() -> None:
    code = """
import sys, types
sys.modules["ipywidgets"] = None
sys.modules["ipykernel.zmqshell"] = shell = types.ModuleType("IPython")
sys.modules["IPython"] = shell
shell.get_ipython = lambda: None
import autofit
autofit.search
assert "tqdm.auto" in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "IProgress" not in done.stderr


@pytest.mark.parametrize("name", autofit.api.__all__)
def test_every_name_that_the_api_lists_is_there(name: str) -> None:
    assert getattr(autofit.api, name).__name__ == name


@pytest.mark.parametrize("name", NAMES)
def test_all_but_the_first_argument_go_by_keyword_and_have_types(name: str) -> None:
    function = getattr(autofit, name)
    first, *others = inspect.signature(function).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {p.kind for p in others} <= {inspect.Parameter.KEYWORD_ONLY}
    assert set(inspect.signature(function).parameters) | {"return"} == set(function.__annotations__)
    assert function.__doc__


# -- what a recipe may be ---------------------------------------------------------------------------------------------


def trl_objects(values: dict[str, object]) -> tuple[object, ...]:
    """The objects that TRL's own parser makes of a recipe's values."""
    from autofit.trainers.trl_config import parse

    config = parse("grpo", values, overrides={})
    return config.script, config.training, config.model, config.datasets


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": False, "steps_per_generation": 8, "gradient_accumulation_steps": 4},
        {"generation_batch_size": 8, "lr_scheduler_type": "cosine", "use_cpu": True, "bf16": True},
        {"datasets": [{"path": "json", "data_files": "x.jsonl"}], "lora_target_modules": ["q_proj"]},
        {"generation_kwargs": {"top_k": 5}, "save_strategy": "no", "beta": 0.04, "dtype": "bfloat16"},
    ],
)
def test_trls_objects_are_said_in_values_from_which_its_parser_makes_them_again(changes: dict[str, object]) -> None:
    given = trl_objects({"model_name_or_path": "m", "bf16": False, "num_generations": 4, **changes})
    source = read_source(given)  # type: ignore[arg-type]
    assert source.trainer == "grpo"
    assert [repr(part) for part in trl_objects(dict(source.values))] == [repr(part) for part in given]
    assert json.loads(json.dumps(source.values)) == source.values
    assert "activation_checkpointing" not in source.values
    assert len(source.values) <= 4 + len(changes)


def test_one_config_object_tells_its_trainer_and_leaves_the_rest_to_a_mapping() -> None:
    from trl import SFTConfig

    source = read_source([SFTConfig(bf16=False, max_length=32), {"model_name_or_path": Path("m"), "seed": None}])
    assert source.values == {"bf16": False, "max_length": 32, "model_name_or_path": "m", "seed": None}
    assert (source.trainer, source.name) == ("sft", "recipe")


def test_an_object_that_cannot_be_said_in_yaml_is_refused_with_the_field() -> None:
    from peft import LoraConfig
    from trl import GRPOConfig

    changed = GRPOConfig(bf16=False, gradient_accumulation_steps=2)
    changed.activation_checkpointing = False
    with pytest.raises(ConfigError, match=r"the same GRPOConfig again .* differs in gradient_checkpointing: set"):
        read_source(changed)
    with pytest.raises(ConfigError, match=r"or TRL's config objects .* got LoraConfig"):
        read_source(LoraConfig())
    with pytest.raises(ConfigError, match=r"reward_funcs must be a plain value .* by its dotted path"):
        read_source({"reward_funcs": [len]})


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autofit.search({}, target_vram="3"), "^target_vram: an amount of memory must look like 40GB"),
        (lambda: autofit.search({}, target_vram=-1), "^target_vram: .* above zero; got -1"),
        (lambda: autofit.search({}, target_vram=40), "^target_vram: a number is of bytes; got 40; write .40GB. for"),
        (lambda: autofit.search({}, target_vram="1GB", device="cpu", headroom=2e9), "^headroom must be below"),
        (lambda: autofit.search(device="cpu"), "give a recipe or leave device='cpu' out"),
        (lambda: autofit.search({}, trials=0), "^trials must be 1 or more"),
        (lambda: autofit.estimate({}, gpu="t4", gpus=cast(Any, "two")), "^gpus must be 1 or more; got 'two'"),
        (lambda: autofit.estimate({}, gpu="t4", prompt_tokens=cast(Any, "2k")), "^prompt_tokens must be .* got '2k'"),
        (lambda: autofit.search({}, measured_steps=0), "^measured_steps must be 1 or more"),
        (lambda: autofit.search({}, goal=cast(Any, "sped")), "^goal must be one of .* nearest valid one is 'speed'"),
        (lambda: autofit.search({}, device="cpu", target_vram="900TB"), "^target_vram must be at most the machine's"),
        (lambda: autofit.search({"packing": True}, trainer="dpo", gpu="t4"), "trainer='dpo' does not take packing"),
        (lambda: autofit.search({}, gpu="t4", space={"lora_r": {"tier": "recipe"}}), "the search space, knob lora_r"),
        (lambda: autofit.search({}, gpu="t4", space=[]), "^space must be a file, a mapping of knobs, or at least one"),
        (lambda: autofit.search(cast(Any, 5), gpu="t4"), "a recipe is the path of a YAML file, .* got int"),
        (lambda: autofit.estimate(), "give target_vram .* or gpu, for example gpu='a100-40gb'"),
        (lambda: autofit.report(folder="gone"), "there are no studies in .*gone; .* point folder at its folder"),
        (lambda: autofit.verify("best", folder="gone"), "there are no studies in .*gone"),
        (lambda: autofit.promote(3, folder=Path("gone")), "there are no studies in .*gone"),
        (lambda: autofit.advise({}, cards="l4, rtx409"), "^cards: unknown GPU 'rtx409'; did you mean rtx4090"),
        (lambda: autofit.advise({}, cards=""), "^cards must name at least one card"),
        (lambda: autofit.advise({}, counts=(0,)), "^counts must be 1 to"),
    ],
)  # fmt: skip
def test_an_error_names_the_argument_as_python_has_it(
    call: Callable[[], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autofit.api.searching.fork_server", lambda _: FakeServer())
    with pytest.raises(AutofitError, match=message) as raised:
        call()
    assert "--" not in str(raised.value)


class FakeServer:
    def close(self) -> None:
        """Was never started."""


def test_an_error_carries_its_options_for_whoever_reads_it() -> None:
    inner = ConfigError(f"give {option('gpu', 'h100')}, {option('prompt-tokens', 'N')} or another {option('dir')}")
    error = ConfigError(f"stage a: {inner.marked}; `trl grpo --config x`")
    assert error.options == (Option("gpu", "h100"), Option("prompt-tokens", "N"), Option("dir", ""))
    assert "\x02" not in repr(error)
    assert str(error) == "stage a: give --gpu h100, --prompt-tokens N or another --dir; `trl grpo --config x`"
    assert error.told(as_argument) == "stage a: give gpu='h100', prompt_tokens or another folder; `trl grpo --config x`"


def test_a_command_reads_the_options_of_an_error_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^target_vram: "):
        autofit.estimate({}, target_vram="3")
    assert main(["estimate", "--target-vram", "3"]) == 2
    assert "autofit: --target-vram: an amount of memory" in capsys.readouterr().err


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_front_is_of_the_card_that_a_later_probe_tells_where_the_first_one_ended_early() -> None:
    early = ProbeResult(status=ProbeStatus.OOM, device="sim:h100")
    late = ProbeResult(status=ProbeStatus.OOM, device="sim:h100", device_name="H100", fidelity=Fidelity.PREDICTED)
    trials = [Trial(number=number, tier="neutral", changes={}, params={}, result=result)
              for number, result in enumerate((early, late))]  # fmt: skip
    found = SearchResult.of(trials, StudyRecord(), study="s", folder=Path())
    assert (found.fidelity, found.device_name) == (Fidelity.PREDICTED, "H100")


def a_result() -> SearchResult:
    def trial(number: int, *, step_s: float, changes: dict[str, object]) -> Trial:
        result = ProbeResult(status=ProbeStatus.FIT, device="cpu", device_used_bytes=lawful.MB * (9 - number),
                             step_s=(step_s,), completions_per_step=8, device_name="<b>card</b>")  # fmt: skip
        return Trial(number=number, tier="neutral", changes=changes, params={}, result=result)

    trials = [trial(0, step_s=2.0, changes={}), trial(1, step_s=1.0, changes={"run_name": "<script>&[red]"})]
    found = SearchResult.of(trials, StudyRecord(), study="s", folder=Path(), reasons=("1 < 2 [b]",))
    return replace(found, target_bytes=10**8)


def test_a_result_is_frozen_and_shows_itself_as_text_html_and_figure() -> None:
    from matplotlib.figure import Figure

    found = a_result()
    with pytest.raises(FrozenInstanceError):
        found.study = ""  # type: ignore[misc]
    assert found.winner is not None
    with pytest.raises(FrozenInstanceError):
        found.winner.number = 5  # type: ignore[misc]
    assert (found.winner.number, found.winner.speedup, found.winner.fits) == (1, 2.0, True)
    said = "trial 1 [neutral] run_name=<script>&[red]: fit, 8.0 MB, 1.00 s a step, 2.00x"
    assert str(found.winner) == repr(found.winner) == said
    assert "1 *" in str(found)
    assert "<script>&[red]" in str(found)
    assert "1 < 2 [b]." in str(found)
    shown = found._repr_html_()
    assert "&lt;script&gt;&amp;[red]" in shown
    assert "&lt;b&gt;card&lt;/b&gt;" in shown
    assert "1 &lt; 2 [b]." in shown
    assert '<td style="text-align:right;white-space:nowrap">2.00x</td>' in shown  # no number apart from its unit
    assert "<script>" not in shown
    assert isinstance(found.plot(), Figure)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_progress_is_a_line_of_text() -> None:
    best = a_result().winner
    assert str(Progress(done=3, probing=("trial 3: lora_r 4 -> 2",), best=best, elapsed_s=62.0, left_s=5.0)) == (
        "3 done, probing trial 3 | best trial 1 [neutral] at 1.00 s a step, 2.00x | 1m02s, about 5.00 s left"
    )
    assert str(Progress(done=0, probing=(), best=None, elapsed_s=1.0, left_s=None)) == (
        "0 done, probing ... | best none yet | 1.00 s"
    )


# -- searches ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server", "lawful_probes")
def test_a_file_a_mapping_and_trls_objects_are_one_study_in_any_thread(
    tiny_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {k: v for k, v in yaml.safe_load(tiny_recipe.read_text()).items() if k not in ("report_to",)}
    tiny_recipe.write_text(yaml.safe_dump(values))
    knobs = [Knob(name="per_device_train_batch_size", tier="neutral", solved=True, memory_ascending=True)]
    told: list[Event] = []
    first = autofit.search(tiny_recipe, space=knobs, trials=2, folder=tmp_path / "s", on_event=told.append,
                           **QUICK)  # fmt: skip
    assert [e.trial.number for e in told if e.trial is not None] == [0, 1]
    assert {"model", "effective batch", "device", "study"} <= {e.label for e in told}
    assert first.winner is not None
    assert (len(first.trials), first.counts["fit"], first.fidelity, first.device) == (2, 2, "measured", "cpu")

    found: list[SearchResult] = []

    def by_mapping() -> None:
        entry = {"tier": "neutral", "values": "solved", "memory": "ascending"}
        found.append(autofit.search(values, name="run", space={"per_device_train_batch_size": entry}, trials=2,
                                    folder=str(tmp_path / "s"), **QUICK))  # fmt: skip

    thread = threading.Thread(target=by_mapping)
    thread.start()
    thread.join()
    found.append(autofit.search(trl_objects(values), name="run", space=knobs, trials=2,  # type: ignore[arg-type]
                                folder=tmp_path / "s", **QUICK))  # fmt: skip
    for again in found:
        assert (again.study, again.trials) == (first.study, first.trials)
    reported = autofit.report(folder=tmp_path / "s")
    assert reported.to_dict() == {**first.to_dict(), "stopped": ""}
    assert capsys.readouterr().out == ""
    report = ["report", "--dir", str(tmp_path / "s")]
    assert json.loads(command_line.run(tmp_path, *report, "--json").stdout) == reported.to_dict()
    shown = command_line.run(tmp_path, *report).stdout
    assert shown.startswith(str(reported) + "\nNext: autofit promote best")


@pytest.mark.usefixtures("lent_server", "lawful_probes")
def test_ctrl_c_returns_what_was_found_and_the_same_call_goes_on(tiny_recipe: Path, tmp_path: Path) -> None:
    heard: list[SearchResult] = []

    def press(event: Event) -> None:
        if event.trial is not None:
            raise KeyboardInterrupt

    found = autofit.search(tiny_recipe, trials=2, folder=tmp_path / "s", on_event=press, on_result=heard.append,
                           **QUICK)  # fmt: skip
    assert (found.interrupted, heard) == (True, [])
    assert [t.status for t in found.trials] == [ProbeStatus.FIT]
    again = autofit.search(tiny_recipe, trials=2, folder=tmp_path / "s", on_result=heard.append, **QUICK)
    assert [one.to_dict() for one in heard] == [again.to_dict()] * 2  # no advice comes between the two
    assert (again.interrupted, len(again.trials)) == (False, 2)
    assert again.trials[0] == found.trials[0]


@pytest.mark.usefixtures("lent_server")
def test_a_search_that_ends_with_its_recipe_leaves_no_folder_that_was_not_there(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrong: dict[str, Any] = {**QUICK, "changes": {"model_name_or_path": "nobody/has-this"}}
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (tmp_path / "s", kept):
        with pytest.raises(ConfigError, match="model_name_or_path"):
            autofit.search(tiny_recipe, folder=folder, **wrong)
    assert not (tmp_path / "s").exists()
    assert kept.exists()


@pytest.mark.usefixtures("lent_server")
def test_an_estimate_is_the_object_that_the_command_prints(tiny_recipe: Path) -> None:
    from matplotlib.figure import Figure

    found = autofit.estimate(tiny_recipe, gpu="rtx4090", changes={"lora_r": 2}, advice=False)
    assert found.fits
    assert found.to_dict()["device_used_bytes"] == found.device_used_bytes
    assert {f.name for f in fields(found.phases[0])} >= {"name", "peak_allocated_bytes"}
    assert "It fits" in str(found)
    assert "<table>" in found._repr_html_()
    assert isinstance(found.plot(), Figure)
    with pytest.raises(FrozenInstanceError):
        found.capacity_bytes = 5  # type: ignore[misc]


NOTEBOOK = """
import autofit
from trl import GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

recipe = [
    GRPOConfig(output_dir="out", bf16=False, per_device_train_batch_size=4, gradient_accumulation_steps=2,
               num_generations=4, max_completion_length=8, max_steps=2, logging_steps=1, learning_rate=1e-3),
    ModelConfig(model_name_or_path={model!r}, use_peft=True, lora_r=4),
    GRPOScriptArguments(dataset_name="data", reward_funcs=["tiny_rewards.share_of_t1"]),
]
# %%
found = autofit.search(recipe, target_vram="2GB", device="cpu", trials=2, measured_steps=1, on_event=print,
                       on_progress=print)
display(found)
found.plot()
# %%
proof = autofit.verify(found.winner.number)
display(proof)
proof.plot()
assert not proof.refused
# %%
written = autofit.promote(launch=False, out="tuned.yaml")
assert (written.status, written.model_path) == ("written", None)
ran = autofit.promote(found.winner.number, on_step=lambda step: print(step["step"], step["loss"]))
display(ran)
ran.plot()
assert (ran.status, len(ran.steps), ran.final["steps"]) == ("done", 2, 2)
# %%
display(autofit.report())
"""


@pytest.mark.thorough
def test_a_notebook_runs_from_a_search_to_a_trained_model(tiny_recipe: Path, tiny_model: Path) -> None:
    shown = "def display(result):\n    print(result._repr_html_())\n"
    Path("notebook.py").write_text(shown + NOTEBOOK.format(model=str(tiny_model)))
    done = subprocess.run([sys.executable, "notebook.py"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<table>") >= 2
    assert "0 done, probing trial 0 | best none yet" in done.stdout
    assert "the model is in" in done.stdout
    assert yaml.safe_load(Path("tuned.yaml").read_text())["lora_r"] == 4
