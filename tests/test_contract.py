"""The contract that every trainer keeps: TRL's own, RLOO and a loop of one's own. A new trainer is one line here."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import command_line
import pytest
import tiny
import yaml
from at_once import probed

from autofit.errors import ConfigError
from autofit.plugin.protocol import Facts, Report, Task, WorstCase
from autofit.plugin.registry import load
from autofit.probing.fork_server import ForkServer
from autofit.probing.prepare import prepare, worst_case_path
from autofit.probing.result import ProbeRequest, ProbeResult, ProbeStatus
from autofit.recipe.recipe import Recipe, merge
from autofit.space.knob import space_knobs
from autofit.space.space import Space
from autofit.trainers.keys import rloo_tiers

EXAMPLES = Path(__file__).parents[1] / "trainers" / "examples"
Write = Callable[[Path, Path], Path]


def rloo(folder: Path, model: Path) -> Path:
    return tiny.write_recipe(folder, model, gradient_accumulation_steps=4)


def two_rewards(folder: Path, model: Path) -> Path:
    """The example as its README says: module and space in the folder of the recipe."""
    for name in ("two_rewards.py", "two_rewards.yaml"):
        shutil.copy(EXAMPLES / name, folder)
    rows = [{"prompt": "t1 t2", "chosen": " " + " ".join(["t3"] * (1 + i % 7)), "rejected": " t4"} for i in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "policy": str(model), "reward_models": [str(model)] * 2, "pairs": "pairs.jsonl", "batch_size": 2,
        "accumulation": 4, "max_length": 32, "dtype": "float32", "max_steps": 6, "learning_rate": 1e-3,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def safe_dpo(folder: Path, model: Path) -> Path:
    """The pipeline's last stage, with a reward model as good as any in a probe."""
    shutil.copy(EXAMPLES / "safe_dpo" / "safe_dpo.py", folder)
    more = {"use_peft": None, "lora_r": None, "lora_alpha": None, "dtype": "float32"}
    scorers = {"helpful_model": str(model), "safety_model": str(model)}
    return tiny.write_offline_recipe("dpo", folder, model, **more, **scorers)


def two_roles(folder: Path, model: Path) -> Path:
    shutil.copy(EXAMPLES / "two_roles" / "two_roles.py", folder)
    talk = {"max_completion_length": 48, "turns": 2, "user_tokens": 4}
    return tiny.write_recipe(folder, model, **talk)


def of_trl(trainer: str) -> Write:
    return lambda folder, model: tiny.write_offline_recipe(trainer, folder, model)


TRAINERS: dict[str, Write] = {
    "grpo": tiny.write_recipe,
    "sft": of_trl("sft"),
    "dpo": of_trl("dpo"),
    "reward": of_trl("reward"),
    "rloo": rloo,
    "hf": of_trl("hf"),
    "two_rewards:TRAINER": two_rewards,
    "safe_dpo:TRAINER": safe_dpo,
    "two_roles:TRAINER": two_roles,
}
NEW = ["rloo", "two_rewards:TRAINER"]  # the others have tests of their own for searches, proofs and runs


@pytest.fixture(scope="module")
def inspected(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, fork_server: ForkServer
) -> Callable[[str], tuple[Path, Recipe]]:
    """The folder of a trainer's recipe and the recipe, inspected once for all tests."""

    @functools.cache
    def made(trainer: str) -> tuple[Path, Recipe]:
        folder = tmp_path_factory.mktemp("recipe")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            patch.delitem(sys.modules, trainer.partition(":")[0], raising=False)
            path = TRAINERS[trainer](folder, tiny_model)
            return folder, prepare(path, trainer=trainer, device="cpu", folder=folder / "i", server=fork_server)

    return made


@pytest.fixture(params=TRAINERS)
def recipe(
    request: pytest.FixtureRequest, inspected: Callable[[str], tuple[Path, Recipe]], monkeypatch: pytest.MonkeyPatch
) -> Recipe:
    """The recipe of a trainer, whose folder is the working directory."""
    folder, found = inspected(request.param)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, request.param.partition(":")[0], raising=False)
    return found


def probe(recipe: Recipe, server: ForkServer, device: str, changes: dict[str, object]) -> ProbeResult:
    request = ProbeRequest(
        folder=Path.cwd() / f"probe-{device[:3]}", trainer=recipe.trainer, values=merge(recipe.values, changes),
        device=device, limit_bytes=None if device == "cpu" else 10**9, worst_case=worst_case_path(Path.cwd() / "i"),
        deadline_s=300, server_socket=server.socket_path,
    )  # fmt: skip
    return probed(request)


def test_what_a_trainer_tells_is_whole(recipe: Recipe) -> None:
    keys = {key for key in recipe.keys.to_json().values() if key is not None}
    assert keys <= set(recipe.resolved)
    assert {recipe.keys.micro_batch, recipe.keys.accumulation} <= set(recipe.compared)
    assert set(recipe.tiers) <= set(recipe.resolved)
    assert (recipe.longest_prompt_tokens is None) is not recipe.generates
    assert (recipe.longest_sample_tokens is None) is recipe.generates
    if recipe.forecasts:  # which reads the lengths there
        worst_case = WorstCase(path=worst_case_path(Path.cwd() / "i")).facts
        longest = recipe.longest_prompt_tokens, recipe.longest_sample_tokens
        assert (worst_case.get("prompt_tokens"), worst_case.get("longest_tokens")) == longest
    recipe.check()
    space = Space.of(recipe, space_knobs(recipe), allow="recipe")
    assert not [knob for knob, reason in space.left_out.items() if "no such key" in reason]
    batches = {micro * accumulation for micro, accumulation, *_ in map(space.split, space.candidates())}
    assert batches == {recipe.effective_batch_size}
    assert len(space.allowed()) > 4


def test_what_a_trainer_tells_survives_json(recipe: Recipe) -> None:
    answer = json.loads((Path.cwd() / "i" / "inspection.json").read_text())
    assert Facts.from_json(answer).to_json() == answer | {key: tuple(answer[key]) for key in ("compared", "notes")}


def test_a_wrong_key_is_named_with_the_nearest_right_one(recipe: Recipe, fork_server: ForkServer) -> None:
    wrong = f"{recipe.keys.micro_batch}s"
    path = Path.cwd() / "wrong.yaml"
    path.write_text(yaml.safe_dump({**recipe.values, wrong: 2}))
    message = f"unknown key '{wrong}'; the nearest valid one is '{recipe.keys.micro_batch}'"
    with pytest.raises(ConfigError, match=message):
        prepare(path, trainer=recipe.trainer, device="cpu", folder=Path.cwd() / "w", server=fork_server)


WHOLE = NEW[1]  # searched, proven and trained below
# Simulated in test_simulated.py and test_hf.py, probed in test_probe.py; of the others each is either in CI.
SIMULATED_ELSEWHERE = ("grpo", "sft", "dpo", "reward", "hf", WHOLE, "safe_dpo:TRAINER")
PROBED_ELSEWHERE = ("grpo", "sft", "dpo", WHOLE, "rloo", "two_roles:TRAINER")


def these(elsewhere: Sequence[str]) -> list[object]:
    """All trainers; with the mark of the thorough run those `elsewhere`, of which CI has another test."""
    return [pytest.param(name, marks=pytest.mark.thorough) if name in elsewhere else name for name in TRAINERS]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", these(PROBED_ELSEWHERE), indirect=True)
def test_a_probe_runs_through_every_phase(recipe: Recipe, fork_server: ForkServer) -> None:
    runs_through_every_phase(recipe, fork_server, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", these(SIMULATED_ELSEWHERE), indirect=True)
def test_a_simulated_probe_runs_through_every_phase(recipe: Recipe, fork_server: ForkServer) -> None:
    runs_through_every_phase(recipe, fork_server, "sim:t4")


def runs_through_every_phase(recipe: Recipe, fork_server: ForkServer, device: str) -> None:
    micro = recipe.micro_batch_size
    split: dict[str, object] = {
        recipe.keys.micro_batch: 2 * micro,
        recipe.keys.accumulation: recipe.grad_accum_steps // 2,
    }
    result = probe(recipe, fork_server, device, split)
    assert result.status is ProbeStatus.FIT, result.reason
    phases = {p.name for p in result.phases}
    assert phases >= {"load", "update", "optimizer", *(("save", "resume") if device == "cpu" else ())}
    assert ("rollout" in phases) is recipe.generates
    assert result.completions_per_step == recipe.effective_batch_size
    assert result.tokens_per_step is not None
    assert result.tokens_per_step >= recipe.effective_batch_size * (recipe.longest_sample_tokens or 1)
    for step, rollout, update in zip(result.step_s, result.rollout_s, result.update_s, strict=True):
        assert step == pytest.approx(rollout + update, rel=0.2)


def test_a_run_reports_its_steps_in_order(recipe: Recipe) -> None:
    heard: list[str] = []

    class Listener(Report):
        def step_begins(self, step: int) -> None:
            heard.append(f"begin {step}")

        def micro_step_ends(self) -> None:
            heard.append("micro")

        def gradient_is_whole(self, model: object, optimizer: object) -> None:
            heard.append("gradient")

        def optimizer_ends(self) -> None:
            heard.append("optimizer")

    task = Task(device="cpu", output=Path.cwd() / "o", worst_case=WorstCase(path=worst_case_path(Path.cwd() / "i")),
                steps=2)  # fmt: skip
    load(recipe.trainer).build(recipe.values, task).train(Listener())
    one = ["micro"] * (recipe.grad_accum_steps - 1) + ["gradient", "optimizer"]
    assert heard == ["begin 0", *one, "begin 1", *one]


# -- the whole way, of the two that are shipped as examples ------------------------------------------------------------


def autofit(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return command_line.run(Path.cwd(), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [pytest.param(NEW[0], marks=pytest.mark.thorough), NEW[1]])
def test_search_estimate_verify_and_promote_work_on_a_trainer_of_ones_own(
    trainer: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TRAINERS[trainer](tmp_path, tiny_model)
    asked = ("run.yaml", "--trainer", trainer)
    estimate = autofit("estimate", *asked, "--gpu", "t4", "--no-advice", "--json")
    assert estimate.returncode == 0, estimate.stderr
    assert json.loads(estimate.stdout)["fits"] is True
    search = autofit("search", *asked, "--device", "cpu", "--target-vram", "1GB", "--trials", "2",
                     "--no-advice", "--no-confirm", "--json")  # fmt: skip
    assert search.returncode == 0, search.stderr
    found = json.loads(search.stdout)
    assert found["counts"]["fit"] == 2
    verify = autofit("verify", "1", "--json")
    assert verify.returncode == 0, verify.stderr
    assert json.loads(verify.stdout)["verdict"] == "proven"
    promote = autofit("promote", "1", "--json")
    assert promote.returncode == 0, promote.stderr
    final = json.loads(promote.stdout.splitlines()[-1])
    assert final["steps"] == yaml.safe_load(Path("run.yaml").read_text())["max_steps"]
    assert any(Path(final["output_dir"]).glob("*model*.safetensors"))


@pytest.mark.slow
def test_a_loop_stopped_after_a_step_ends_as_if_it_never_was(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two_rewards(tmp_path, tiny_model)
    values = yaml.safe_load(Path("run.yaml").read_text())

    def trained(folder: Path) -> list[dict[str, object]]:
        folder.mkdir(exist_ok=True)
        request = {"folder": str(folder), "device": "cpu", "trainer": "two_rewards:TRAINER", "values": values,
                   "output_dir": str(folder / "out"), "generates": False}  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        ending = fork_server.call({"entry": "offline_training:run", "argument": str(folder / "request.json"),
                                   "cwd": str(tmp_path), "log": str(folder / "log"), "env": {},
                                   "deadline_s": 300})  # fmt: skip
        assert ending.exit_code == 0, (folder / "log").read_text()
        lines = (json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines())
        return [{key: line[key] for key in ("step", "loss")} for line in lines]

    whole = trained(tmp_path / "whole")
    (halves := tmp_path / "halves").mkdir()
    (halves / "stop").touch()
    assert trained(halves) == whole[:1]
    (halves / "stop").unlink()
    assert trained(halves) == whole
    assert [line["step"] for line in whole] == list(range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize(("normalised", "tier"), [(False, "neutral"), (True, "approximate")])
def test_rloos_rollout_is_claimed_neutral_where_its_gradient_is(
    normalised: bool, tier: str, tmp_path: Path, tiny_model: Path
) -> None:
    from autofit.proof.proof import ROUNDING
    from autofit.proof.worker import GradientProof

    values = {"model_name_or_path": str(tiny_model), "dataset_name": "none", "reward_funcs": ["a.b"],
              "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
              "num_generations": 4, "normalize_advantages": normalised}  # fmt: skip
    smaller = {**values, "steps_per_generation": 1}
    split = {**values, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 8}
    proof = GradientProof("rloo", {"baseline": values, "candidate": smaller, "split": split}, tmp_path)
    assert proof.difference("split").relative < ROUNDING
    assert (proof.difference("candidate").relative < ROUNDING) is (tier == "neutral")
    assert rloo_tiers(values).get("steps_per_generation", "neutral") == tier


# -- what a trainer of one's own gets wrong ----------------------------------------------------------------------------

LOOP = (EXAMPLES / "two_rewards.py").read_text()


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        (
            'BatchKeys(micro_batch="batch_size"',
            'BatchKeys(micro_batch="batchsize"',
            "no such key; the nearest valid one is",
        ),
        ("max_steps: int = 100\n", "steps_: int = 100\n", "give its settings a key max_steps, or define"),
        ('{"tokens": min', '{"token": min', "must return a whole number of `tokens`"),
        ("    space = Path", "    spaces = Path", "must have the attributes name, keys, space; it lacks space"),
        ("longest = max(", "longest = max(1) + max(", r"failed on it: TypeError: .* \(two_rewards.py:\d+\)"),
        ("TRAINER = TwoRewards()", "TRAINER = TwoRewards", r"is a class; name an instance: TRAINER = TRAINER\(\)"),
        ("TRAINER = TwoRewards()", "TRAINERS = TwoRewards()", "no 'TRAINER'; the nearest valid one is 'TRAINERS'"),
        ("import json", "import jsn", "importing two_rewards gave ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_a_trainer_is_one_clear_error(
    wrong: str, right: str, message: str, tmp_path: Path, tiny_model: Path, fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = two_rewards(tmp_path, tiny_model)
    assert wrong in LOOP
    (tmp_path / "two_rewards.py").write_text(LOOP.replace(wrong, right))
    values = yaml.safe_load(path.read_text())
    if "steps_" in right:
        del values["max_steps"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message) as error:
        prepare(path, trainer="two_rewards:TRAINER", device="cpu", folder=tmp_path / "i", server=fork_server)
    assert len(str(error.value).splitlines()) == 1


def test_an_edited_trainer_begins_a_new_study(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = two_rewards(tmp_path, tiny_model)

    def content() -> str:
        return prepare(path, trainer="two_rewards:TRAINER", device="cpu", folder=tmp_path / "i",
                       server=fork_server).content_hash  # fmt: skip

    before = content()
    assert content() == before
    (tmp_path / "two_rewards.py").write_text(LOOP.replace(".sum() / pairs_of_the_step", ".mean()"))
    assert content() != before
