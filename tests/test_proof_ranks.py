"""The gradient proof across ranks: real gloo processes with DDP and FSDP2 against the baseline's own ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autofit.proof.proof
from autofit.errors import ConfigError, EnvironmentFault
from autofit.probing.fork_server import ForkServer
from autofit.proof.proof import ROUNDING, Proof, Verdict, lines, on_few_ranks, prove_changes, reach_of_launch
from autofit.recipe.keys import SYNC_EACH_BATCH, BatchKeys
from autofit.space.traits import Reach
from autofit.trainers.keys import ROLLOUTS, SAMPLES

BATCH: dict[str, object] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ROLLOUT: dict[str, object] = {**BATCH, "steps_per_generation": 4, "num_generations": 4}
TWO: dict[str, object] = {"launch.ranks": 2, "gradient_accumulation_steps": 2}
COMPARED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "accelerator_config",
)  # fmt: skip
RECIPES: dict[str, dict[str, object]] = {
    "sft": BATCH, "dpo": BATCH, "reward": BATCH,
    "grpo": {**ROLLOUT, "loss_type": "dapo", "reward_funcs": ["a.b"]}, "rloo": {**ROLLOUT, "reward_funcs": ["a.b"]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _worker_without_its_imports(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The worker as a child of the fork server, which has imported torch, transformers and TRL."""

    def run(request: Path, cwd: Path) -> tuple[int, str]:
        log = tmp_path / "worker.log"
        message = {"entry": "autofit.proof.worker:run", "argument": str(request), "cwd": str(cwd), "log": str(log),
                   "env": {"CUDA_VISIBLE_DEVICES": ""}, "deadline_s": 300.0}  # fmt: skip
        return fork_server.call(message).exit_code, log.read_text()

    monkeypatch.setattr(autofit.proof.proof, "_run_worker", run)


def proof_of(
    model: Path, changes: Mapping[str, object], *, recipe: str = "sft", trainer: str = "", **more: object
) -> Proof:
    """The proof that `changes` of the small recipe are neutral."""
    values: dict[str, object] = {"model_name_or_path": str(model), "dataset_name": "none", **RECIPES[recipe], **more}
    keys = ROLLOUTS if "steps_per_generation" in values else SAMPLES
    if keys is ROLLOUTS and "launch.ranks" in changes:
        changes = {**changes, "steps_per_generation": changes["gradient_accumulation_steps"]}
    return prove_changes(
        changes, changes, trial=1, trainer=trainer or recipe, keys=keys, compared=COMPARED, values=values,
        resolved=values, cwd=Path.cwd(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    [
        "sft",
        "grpo",
        pytest.param("dpo", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("reward", "rloo")),
    ],
)
def test_two_sharded_ranks_have_the_gradient_of_one_rank(recipe: str, tiny_model: Path) -> None:
    proof = proof_of(tiny_model, {**TWO, "launch.sharding": "fsdp2"}, recipe=recipe)
    assert proof.verdict is Verdict.PROVEN, proof.sentence
    assert proof.relative_difference is not None
    assert proof.relative_difference < ROUNDING
    assert proof.samples_per_step == 8
    assert {"launch.ranks", "launch.sharding", "gradient_accumulation_steps"} <= proof.compared.keys()
    assert not proof.not_compared


def test_sharding_on_the_recipes_own_ranks_is_proven_and_told(tiny_model: Path) -> None:
    own = {"ranks": 8, "sharding": "ddp"}
    changes = {"launch.sharding": "fsdp2", "launch.reshard_after_forward": False, "launch.offload": "parameters"}
    proof = proof_of(tiny_model, changes, launch=own, gradient_accumulation_steps=1)
    assert proof.verdict is Verdict.PROVEN, proof.sentence
    assert list(proof.not_compared) == ["launch.offload"]
    assert proof.samples_per_step == 16
    text = "\n".join(lines(proof, {"launch": own}))
    assert "compared: launch.sharding ddp -> fsdp2" in text
    assert "4 gloo ranks of one CPU in the trial, not 8: the accumulation is larger" in text
    assert "not compared: launch.offload: neutral by construction" in text


@pytest.mark.parametrize(
    "recipe", ["grpo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("sft", "dpo", "reward", "rloo"))],
)  # fmt: skip
def test_a_sync_in_every_micro_batch_is_proven_on_sharded_ranks(recipe: str, tiny_model: Path) -> None:
    proof = proof_of(tiny_model, {**TWO, "launch.sharding": "fsdp2", SYNC_EACH_BATCH: True}, recipe=recipe)
    assert proof.verdict is Verdict.PROVEN, proof.sentence
    assert proof.compared[SYNC_EACH_BATCH] is True
    assert proof.relative_difference is not None
    assert 0 < proof.relative_difference < ROUNDING


@pytest.mark.parametrize("wrong", ["wrong_ranks:SCALED", pytest.param("wrong_ranks:SAME", marks=pytest.mark.slow)])
def test_ranks_that_weigh_samples_apart_or_share_them_are_refused(wrong: str, tiny_model: Path) -> None:
    proof = proof_of(tiny_model, TWO, trainer=wrong)
    assert proof.verdict is Verdict.REFUSED
    assert proof.relative_difference is not None
    assert proof.relative_difference > 0.01
    assert list(proof.because_of) == ["micro-batch x accumulation x ranks"]


def test_zero_is_not_compared_and_its_ranks_are(tiny_model: Path) -> None:
    proof = proof_of(tiny_model, {**TWO, "launch.sharding": "zero3"})
    assert proof.verdict is Verdict.PROVEN, proof.sentence
    assert "DDP replaces it" in proof.not_compared["launch.sharding"]
    alone = proof_of(tiny_model, {"launch.sharding": "zero2"}, launch={"ranks": 2, "sharding": "ddp"})
    assert (alone.verdict, list(alone.not_compared)) == (Verdict.NOT_COMPARED, ["launch.sharding"])


def test_an_error_of_one_rank_ends_all_and_is_told(tiny_model: Path) -> None:
    with pytest.raises(EnvironmentFault, match="could not be compared: rank 1: ValueError: this rank has a fault"):
        proof_of(tiny_model, TWO, trainer="wrong_ranks:FAULTY")


# -- without a training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "accumulation", "ranks", "few"),
    [(2, 4, 1, (1, 4)), (2, 4, 2, (2, 4)), (2, 1, 8, (4, 2)), (2, 2, 6, (4, 3)), (2, 1, 6, (3, 2)), (1, 1, 5, (5, 1)),
     (1, 4, 5, (4, 5)), (1, 2, 11, (2, 11))],
)  # fmt: skip
def test_a_proof_has_few_ranks_and_the_samples_of_all(
    micro: int, accumulation: int, ranks: int, few: tuple[int, int]
) -> None:
    sizes: dict[str, object] = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    small = on_few_ranks({**sizes, "launch": {"ranks": ranks}}, sizes, SAMPLES)
    launch: Any = small.get("launch", {"ranks": 1})
    assert (launch["ranks"], small["gradient_accumulation_steps"]) == few
    assert small["per_device_train_batch_size"] == micro


def test_more_ranks_than_a_proof_has_are_not_compared() -> None:
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    with pytest.raises(ConfigError, match="a proof has at most 8 ranks"):
        on_few_ranks({**sizes, "launch": {"ranks": 11}}, sizes, SAMPLES)


def test_rollouts_stay_as_large_on_few_ranks() -> None:
    keys: BatchKeys = ROLLOUTS
    sizes: dict[str, object] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2,
    }  # fmt: skip
    values = {
        "generation_batch_size": 32,
        "per_device_train_batch_size": 2,
        "launch": {"ranks": 8, "sharding": "zero2"},
    }
    assert on_few_ranks(values, sizes, keys) == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "launch": {"ranks": 4, "sharding": "ddp", "reshard_after_forward": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "own", "found"),
    [("launch.sharding", "fsdp2", None, Reach.COMPARED), ("launch.sharding", "fsdp2", "zero3", Reach.KERNEL),
     ("launch.sharding", "fsdp1", "ddp", Reach.KERNEL), ("launch.offload", "parameters", "none", Reach.HARMLESS),
     ("launch.server_ranks", 2, 0, Reach.OTHER),
     ("launch.server_ranks", 2, 1, Reach.HARMLESS), ("launch.config.mixed_precision", "bf16", None, Reach.OTHER)],
)  # fmt: skip
def test_what_a_proof_says_of_each_part_of_a_launch(key: str, value: object, own: object, found: Reach) -> None:
    assert reach_of_launch(key, value, own)[0] is found
