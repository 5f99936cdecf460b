"""The shipped pipelines: SFT then GRPO, Safe-DPO with two reward models, an agent whose user is the same model."""

import importlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from autofit.errors import ConfigError
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.proof.proof import ROUNDING
from autofit.proof.worker import GradientProof
from autofit.recipe.pipeline import read_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).parents[1] / "trainers" / "examples"
TINY: dict[str, object] = {
    "dtype": "float32", "bf16": False, "max_steps": 2, "report_to": "none", "learning_rate": 1e-3, "use_cpu": True,
}  # fmt: skip


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Copies an example and makes its folder the working directory; called with both names, it gives the module."""

    def copied(name: str, module: str) -> Any:
        folder = shutil.copytree(EXAMPLES / name, tmp_path / name)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return importlib.import_module(module)

    return copied


# -- SFT, then GRPO ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/pipeline.yaml")), ids=lambda path: path.parent.name)
def test_a_shipped_pipeline_reads_and_its_sample_data_is_there(path: Path) -> None:
    found = read_pipeline(path)
    data = [value for key, value in yaml.safe_load(path.read_text())["vars"].items() if "data" in key or key == "pairs"]
    assert data
    assert all((path.parent / str(name)).is_file() for name in data)
    assert all(name in [stage.name for stage in found.stages] for stage in found.stages for name in stage.uses)


@pytest.fixture
def judge() -> Iterator[str]:
    """A server with OpenAI's chat completions, which likes answers with the word "good"; it breaks on "crash"."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            said = asked.rpartition("Answer:")[2]
            body = json.dumps({"choices": [{"message": {"content": "8 / 10" if "good" in said else "1"}}]}).encode()
            self.send_response(500 if "crash" in said else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_the_judge_is_asked_and_one_without_an_answer_has_no_opinion(
    example: Callable[..., Any], judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = example("sft_then_grpo", "rewards")
    said = ["a good one", "bad", "crash"]
    monkeypatch.setenv("JUDGE_URL", judge)
    assert rewards.judged(["q"] * 3, said) == [0.8, 0.1, None]
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:9")
    assert rewards.judged(["q"], ["good"]) == [None]
    monkeypatch.delenv("JUDGE_URL")
    assert rewards.judged(["q"] * 2, ["one two", "one one"]) == [1.0, 0.5]
    assert rewards.right(["it is 7", "17", [{"content": "7"}]], answer=["7", "7", "7"]) == [1.0, 0.0, 1.0]
    assert rewards.brief(["word " * 60, "word"]) == [0.5, 1.0]


# -- Safe-DPO ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scorer(tmp_path: Path, tiny_model: Path) -> Path:
    """A reward model with the tokenizer of the tiny model."""
    folder = shutil.copytree(tiny_model, tmp_path / "scorer")
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(folder)
    return folder


def safe_dpo_values(model: Path, scorer: Path, **changes: object) -> dict[str, object]:
    return {
        **TINY, "model_name_or_path": str(model), "helpful_model": str(scorer), "safety_model": str(scorer),
        "dataset_name": "data/helpful.jsonl", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_length": 32, "beta": 0.1, **changes,
    }  # fmt: skip


def inspected(module: Any, values: Mapping[str, object], folder: Path) -> tuple[dict[str, object], WorstCase]:
    worst_case = WorstCase(path=folder / "worst_case.json")
    facts = module.TRAINER.inspect(values, Inspection(device="cpu", worst_case=worst_case))
    assert facts.command is None
    return dict(facts.values), worst_case


def test_both_reward_models_are_in_the_probe_beside_policy_and_reference(
    example: Callable[..., Any], tiny_model: Path, scorer: Path, tmp_path: Path
) -> None:
    module = example("safe_dpo", "safe_dpo")
    values, worst_case = inspected(module, safe_dpo_values(tiny_model, scorer), tmp_path / "i")
    assert values["helpful_model"] == str(scorer)
    task = Task(device="cpu", output=tmp_path / "out", worst_case=worst_case, steps=1)
    run = module.TRAINER.build(values, task)
    frozen = run.trainer.score_safety.models
    assert [type(model).__name__ for model in frozen] == ["LlamaForSequenceClassification"] * 2
    weights = [p for model in frozen for p in model.parameters()]
    assert {(p.requires_grad, p.device) for p in weights} == {(False, run.trainer.accelerator.device)}
    assert run.trainer.ref_model is not None
    run.train(Report())


def test_a_pair_is_ordered_by_help_less_cost_and_its_margin_is_in_the_loss(
    example: Callable[..., Any], tiny_model: Path, scorer: Path, tmp_path: Path
) -> None:
    module = example("safe_dpo", "safe_dpo")
    values, _ = inspected(module, safe_dpo_values(tiny_model, scorer, margin_scale=0.5), tmp_path / "i")
    trainer = module.TRAINER.build(values, Task(device="cpu", output=tmp_path / "out")).trainer
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    pairs = len(batch["input_ids"]) // 2

    def loss(chosen: float, rejected: float) -> float:
        trainer.score_safety = lambda _: torch.tensor([chosen] * pairs + [rejected] * pairs)
        with torch.no_grad():
            return float(trainer._compute_loss(trainer.model, dict(batch), False))

    def expected(margin: float) -> float:
        """Of a policy that is still its reference: the margin alone is in the sigmoid."""
        return float(-torch.nn.functional.logsigmoid(torch.tensor(-margin)))

    assert loss(2.0, 2.0) == pytest.approx(expected(0.0), rel=1e-4)
    assert loss(3.0, 1.0) == pytest.approx(expected(0.5 * 2.0), rel=1e-4)
    assert loss(1.0, 3.0) == pytest.approx(expected(0.5 * 2.0), rel=1e-4)  # the other answer is the preferred one
    assert trainer._metrics["train"]["safety/relabelled"] == [0.0, 0.0, 1.0]


def test_swapped_rows_are_those_of_the_same_pair(example: Callable[..., Any]) -> None:
    module = example("safe_dpo", "safe_dpo")
    rows = torch.tensor([10, 11, 12, 20, 21, 22])
    assert module._swapped(rows, torch.tensor([False, True, False])).tolist() == [10, 21, 12, 20, 11, 22]


def test_a_missing_reward_model_is_named(
    example: Callable[..., Any], tiny_model: Path, scorer: Path, tmp_path: Path
) -> None:
    module = example("safe_dpo", "safe_dpo")
    values = safe_dpo_values(tiny_model, scorer, margin_scale="much")
    del values["safety_model"]
    with pytest.raises(ConfigError, match="margin_scale must be a number; got 'much'; safety_model is missing"):
        inspected(module, values, tmp_path / "i")


def test_a_language_model_is_no_reward_model(
    example: Callable[..., Any], tiny_model: Path, scorer: Path, tmp_path: Path
) -> None:
    module = example("safe_dpo", "safe_dpo")
    values, _ = inspected(module, safe_dpo_values(tiny_model, tiny_model), tmp_path / "i")  # a stage is yet to train it
    with pytest.raises(ConfigError, match=r"helpful_model .* has no trained score"):
        module.TRAINER.build(values, Task(device="cpu", output=tmp_path / "out"))


@pytest.mark.slow
def test_the_split_keeps_the_gradient_with_its_margins_and_leaving_them_out_does_not(
    example: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    example("safe_dpo", "safe_dpo")
    values = safe_dpo_values(tiny_model, tiny_model, margin_scale=0.5)
    recipes = {
        "baseline": values,
        "split": {**values, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        "before": {**values, "precompute_ref_log_probs": True},
        "plain": {**values, "margin_scale": 0.0, "relabel": False},
    }
    proof = GradientProof("safe_dpo:TRAINER", recipes, tmp_path / "proof")
    assert proof.difference("split").relative < ROUNDING
    assert proof.difference("before").relative < ROUNDING
    assert proof.difference("plain").relative > 0.1


# -- one model in two roles -------------------------------------------------------------------------------------------


def two_roles_values(model: Path, **changes: object) -> dict[str, object]:
    return {
        **TINY, "model_name_or_path": str(model), "dataset_name": "data/goals.jsonl", "use_peft": True, "lora_r": 4,
        "reward_funcs": ["two_roles.names_the_goal"], "per_device_train_batch_size": 4, "num_generations": 4,
        "gradient_accumulation_steps": 1, "max_completion_length": 40, "turns": 2, "user_tokens": 6, **changes,
    }  # fmt: skip


def test_the_user_is_the_same_model_without_its_adapter_and_its_tokens_are_masked(
    example: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    module = example("two_roles", "two_roles")
    values, _ = inspected(module, two_roles_values(tiny_model), tmp_path / "i")
    run = module.TRAINER.build(values, Task(device="cpu", output=tmp_path / "out"))
    trainer, model = run.trainer, run.trainer.model
    assert {p.device for p in model.parameters()} == {trainer.accelerator.device}
    roles: list[bool] = []
    original = trainer._generate_single_turn

    def noting(*args: Any) -> Any:
        off = [m.disable_adapters for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "disable_adapters")]
        assert len(set(off)) == 1
        roles.append(off[0])
        return original(*args)

    trainer._generate_single_turn = noting
    told = trainer.rollout_func([row["prompt"] for row in trainer.train_dataset.select(range(4))], trainer)
    assert roles == [False, True, False]  # agent, user, agent
    for ids, mask in zip(told["completion_ids"], told["env_mask"], strict=True):
        assert len(ids) == len(mask) <= 40
        assert mask[0] == mask[-1] == 1
        assert 0 in mask
    run.train(Report())
    assert run.last_step == 2


def test_a_probe_of_a_talk_fills_its_whole_length(
    example: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    module = example("two_roles", "two_roles")
    values, worst_case = inspected(module, two_roles_values(tiny_model), tmp_path / "i")
    task = Task(device="cpu", output=tmp_path / "out", worst_case=worst_case, steps=1)
    trainer = module.TRAINER.build(values, task).trainer
    told = trainer.rollout_func([row["prompt"] for row in trainer.train_dataset.select([0, 0])], trainer)
    assert [len(ids) for ids in told["completion_ids"]] == [40, 40]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_peft": False}, "use_peft must be true"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "no device_map"),
        ({"turns": 9}, "max_completion_length must hold the whole talk"),
        ({"turns": 0}, "turns and user_tokens must be 1 or more"),
    ],
)
def test_what_cannot_share_one_model_is_refused(
    example: Callable[..., Any], tiny_model: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    module = example("two_roles", "two_roles")
    with pytest.raises(ConfigError, match=words):
        inspected(module, two_roles_values(tiny_model, **changes), tmp_path / "i")
