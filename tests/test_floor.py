"""What a training surely holds, told from its keys before any import: never more than its simulation holds."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from autofit.api.estimating import estimate
from autofit.cli import main
from autofit.commands import predict
from autofit.plugin.protocol import Inspection, WorstCase
from autofit.plugin.registry import check_source_early
from autofit.recipe.yaml_file import read_source
from autofit.trainers.floor import held

SEVEN = {"model_name_or_path": "Qwen/Qwen2.5-7B", "dtype": "bfloat16"}
WEIGHTS = 2 * 7_615_616_512
HEAD = 2 * 152_064 * 3_584
HALF = "Qwen/Qwen2.5-0.5B"


def of(trainer: str, values: Mapping[str, object]) -> dict[str, int]:
    return dict(held(trainer, values, Inspection(device="sim:t4", worst_case=WorstCase(path=Path("none")))))


@pytest.mark.parametrize(
    ("trainer", "changes", "expected"),
    [
        ("sft", {}, [WEIGHTS, WEIGHTS, 2 * WEIGHTS]),
        ("sft", {"dtype": None}, [2 * WEIGHTS, 2 * WEIGHTS, 4 * WEIGHTS]),
        ("dpo", {"dtype": "auto", "optim": "adamw_torch"}, [WEIGHTS, WEIGHTS, 2 * WEIGHTS]),
        ("grpo", {"dtype": "float16"}, [WEIGHTS, WEIGHTS, 2 * WEIGHTS]),
        ("reward", {}, [WEIGHTS - HEAD, WEIGHTS - HEAD, 2 * (WEIGHTS - HEAD)]),  # a head of one score in its place
        ("rloo", {"optim": "adafactor"}, [WEIGHTS, WEIGHTS]),
        ("sft", {"optim": "galore_adamw_layerwise"}, [WEIGHTS]),  # gives each gradient back within the backward
        ("sft", {"use_peft": True}, [WEIGHTS]),
        ("hf", {"objective": "sft", "packing": True}, [WEIGHTS, WEIGHTS, 2 * WEIGHTS]),
        ("hf", {"objective": "sft", "trainable_layers": 2}, []),
        ("hf", {"objective": "rerank"}, []),
        ("sft", {"load_in_4bit": True}, []),
        ("sft", {"model_init_kwargs": {"dtype": "float16"}}, []),
        ("sft", {"deepspeed": "ds.json"}, []),
        ("sft", {"model_name_or_path": "unsloth/Qwen2.5-7B-bnb-4bit"}, []),
        ("sft", {"model_name_or_path": "someone/else"}, []),
        ("sft", {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}, [2 * 30_532_122_624]),  # experts that no token takes
        ("sft", {"model_name_or_path": "google/gemma-3-4b-it"}, [2 * 4_300_079_472]),  # a vision tower beside text
    ],
)  # fmt: skip
def test_only_what_is_certain_is_told(trainer: str, changes: dict[str, object], expected: list[int]) -> None:
    assert list(of(trainer, {**SEVEN, **changes}).values()) == expected


@pytest.mark.parametrize(("launch", "known"), [({}, True), ({"launch": {"ranks": 2, "sharding": "fsdp2"}}, False)])
def test_of_several_ranks_nothing_is_told(launch: dict[str, object], known: bool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({**SEVEN, **launch}))
    source = read_source(tmp_path / "run.yaml")
    found = check_source_early(source, trainer="sft", device="sim:t4", changes={}, prompt_tokens=64)
    assert bool(found.held_bytes) == known


@pytest.mark.parametrize("more", [[], ["--stream"], ["--json"]])
@pytest.mark.parametrize("card", ["rtx4090", "a100-80gb"])
def test_a_recipe_that_cannot_fit_is_told_before_it_is_simulated(
    more: list[str], card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "begin_server", lambda: None)
    monkeypatch.setattr(predict, "_answered", lambda *_, **__: 0)
    (tmp_path / "run.yaml").write_text(json.dumps(SEVEN))
    asked = ["check", str(tmp_path / "run.yaml"), "--trainer", "sft", "--prompt-tokens", "64", "--gpu", card, *more]
    assert main(asked) == 0
    out, err = capfd.readouterr()
    told = " ".join((out if more == ["--stream"] else err).split())
    sentence = "does not fit: weights 15.23 GB + gradients 15.23 GB + AdamW's moments 30.46 GB = 60.92 GB alone, of"
    assert (sentence in told) == (card == "rtx4090" and more != ["--json"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        ("sft", {}),
        pytest.param("sft", {"use_peft": True, "dtype": "float32"}, marks=pytest.mark.thorough),
        ("reward", {"dtype": "bfloat16"}),
        ("hf", {"objective": "sft", "bf16": True, "dtype": "float32"}),
    ],
)
def test_a_simulation_holds_no_less(trainer: str, changes: dict[str, object], tmp_path: Path) -> None:
    values = {"model_name_or_path": HALF, "dtype": "bfloat16", "per_device_train_batch_size": 1, **changes}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    found = estimate(tmp_path / "run.yaml", trainer=trainer, gpu="a100-40gb", prompt_tokens=32, advice=False)
    certain = of(trainer, values)
    phases = {phase.name: phase.peak_allocated_bytes for phase in found.result.phases}
    spare = max(phases["update"], phases["optimizer"]) - sum(certain.values())
    assert 0 <= spare < 0.7 * sum(certain.values())
