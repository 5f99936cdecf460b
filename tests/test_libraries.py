"""`estimate --libraries`: a recipe with another environment's TRL, beside the same TRL's trainer run by hand."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import by_hand
import pytest

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.recipe.as_of import bytes_a_logit
from autofit.scripts.libraries import AskedRecipe, Libraries, PeakOfPhase, Theirs, Today, run_with
from autofit.scripts.their_run import in_their_keys

GB = 10**9
VOCABULARY = 2**16
MODEL = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
WEIGHTS = 2 * (2 * VOCABULARY * 16)  # of the embeddings and the head
RECIPE = {key: value for key, value in by_hand.COMMON.items() if key not in ("max_steps", "report_to", "save_strategy")}
# Environments with older TRLs, which .ci/compat makes: their folders, with a colon between them.
OLDER = [folder for folder in os.environ.get("AUTOFIT_OLDER_LIBRARIES", "").split(":") if folder]
BOTH = [  # each age and each trainer once; all pairs are thorough
    pytest.param(place, kind, marks=pytest.mark.thorough if (kind == "grpo") is (number == 0) else ())
    for number, place in enumerate(OLDER or ["none"])
    for kind in ("sft", "grpo")
]


def environment(folder: Path, packages: dict[str, tuple[str, str]], needs: dict[str, str] | None = None) -> Path:
    """An environment at `folder` with empty `packages`: {name: (version, tag of its wheel)}."""
    site = folder / "lib" / "python3.10" / "site-packages"
    for name, (number, tag) in packages.items():
        home = site / f"{name}-{number}.dist-info"
        home.mkdir(parents=True)
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
        requires = "".join(f"Requires-Dist: {line}\n" for line in (needs or {}).get(name, "").split(";") if line)
        (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{requires}")
        (home / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
        (home / "RECORD").write_text(f"{name}/__init__.py,,\n{home.name}/METADATA,,\n")
    return folder


PURE = "py3-none-any"


def test_an_environment_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = environment(tmp_path / "without", {"torch": ("2.1", PURE)})
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    for place, word in (
        (tmp_path / "nowhere", "there is no"), (without, "has none"), (tmp_path / "empty", "Python environment"),
        (broken, "no python that starts"),
    ):  # fmt: skip
        assert main(["estimate", "recipe.yaml", "--gpu", "l4", "--libraries", str(place)]) == 2
        said = capsys.readouterr().err
        assert word in said
        assert "--libraries" in said
        assert "Traceback" not in said
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="no python that starts"):
        Libraries(broken)


def test_what_is_taken_is_the_family_of_trl_and_what_it_needs_that_is_not_here(tmp_path: Path) -> None:
    other, any_python = "cp310-cp310-linux_x86_64", "cp39-abi3-linux_x86_64"
    tags = {"trl": PURE, "transformers": PURE, "torch": other, "tokenizers": any_python, "numpy": other, "sympy": PURE}
    tags |= {"regex": PURE, "only_there": PURE, "only_there_too": other}
    needs = {"trl": "transformers>=4.46", "transformers": "tokenizers<0.22,>=0.21;numpy>=1.17;torch; extra == 'torch'"}
    needs["trl"] += ";regex;only-there;only-there-too"
    own = environment(tmp_path / "own", {name: ("1.0", tag) for name, tag in tags.items()}, needs)
    found = Libraries(own)
    assert set(found.taken) == {"trl", "transformers", "tokenizers", "only-there"}
    found.link(tmp_path)
    assert (tmp_path / "trl" / "__init__.py").exists()
    assert (tmp_path / "trl-1.0.dist-info" / "METADATA").exists()
    assert not (tmp_path / "numpy").exists()
    assert found.version("torch") == "1.0"


def test_keys_that_the_other_trl_does_not_know_are_named() -> None:
    given = {"dtype": "bfloat16", "max_length": 64, "loss_type": "nll", "dataset_name": "a/b", "report_to": "wandb"}
    known = {"torch_dtype", "max_seq_length", "dataset_name", "report_to", "max_steps"}
    values, unknown, renamed = in_their_keys(given, known)
    assert unknown == ["loss_type"]
    assert renamed == ["dtype as torch_dtype", "max_length as max_seq_length"]
    assert values["torch_dtype"] == "bfloat16"
    assert (values["report_to"], values["max_steps"]) == ("none", 3)
    assert values["dataset_name"] != "a/b"


def test_both_are_told_beside_each_other() -> None:
    phase = PeakOfPhase(name="update", peak_allocated_bytes=30 * GB, peak_reserved_bytes=30 * GB, device_used_bytes=GB)
    theirs = Theirs(
        environment="env", trainer="sft", versions={"trl": "0.14.0", "peft": "0.14.0", "torch": "2.13.0+cpu"},
        their_torch="2.5.1+cu124", phases=(phase,), peak_allocated_bytes=30 * GB, peak_reserved_bytes=30 * GB,
        device_used_bytes=31 * GB, least_capacity_bytes=31 * GB, fits=False, verdict="does not fit in 24.00 GB",
        step_s=1.0, longest_tokens=64, unknown_keys=("loss_type",), renamed_keys=(), notes=(),
    )  # fmt: skip
    said = theirs.lines(Today(trl="1.16.0", device_used_bytes=21 * GB, fits=True))
    assert said[0] == "with your trl 0.14.0 (peft 0.14.0): 31.00 GB device-used; with today's 1.16.0: 21.00 GB"
    assert "upgrading alone mends it" in said[1]
    assert "torch 2.13.0, which is simulated, not 2.5.1" in said[3]
    assert said[-1].endswith("left out: loss_type")
    assert "mends" not in theirs.lines(Today(trl="1.16.0", device_used_bytes=30 * GB, fits=False))[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def with_weights(model: Path, folder: Path) -> Path:
    """A copy of the model at `folder`, with weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**MODEL)).to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(model / "config.json", folder)
    return folder


def recipe(kind: str, model: Path) -> dict[str, object]:
    own = {"model_name_or_path": str(model), "dataset_name": "a/b", **RECIPE}
    if kind == "sft":
        return own | {"dtype": "bfloat16", "max_length": by_hand.TOKENS[kind]}
    return own | {"num_generations": 4, "max_completion_length": by_hand.TOKENS[kind]}


def both(libraries: Libraries, kind: str, model: Path, folder: Path) -> tuple[Theirs, list[int]]:
    """What `--libraries` says, and the bytes of the same trainer run by hand with the same libraries."""
    asked = AskedRecipe(
        trainer=kind, values=recipe(kind, model), tokens=by_hand.TOKENS[kind], gpu="a100-80gb", target_bytes=80 * GB
    )
    theirs = run_with(libraries, asked, folder / "run", deadline_s=300)
    links, out = folder / "site-packages", folder / "by_hand.json"
    links.mkdir()
    libraries.link(links)
    words = [sys.executable, "-P", by_hand.__file__, kind, str(with_weights(model, folder / "own")), str(out)]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(links)}, check=True, capture_output=True, timeout=300)
    return theirs, json.loads(out.read_text())


def peaks(theirs: Theirs) -> list[int]:
    return [theirs.peak_allocated_bytes, theirs.peak_reserved_bytes, theirs.device_used_bytes]


@pytest.mark.thorough  # CI has it of older libraries, below
def test_the_installed_libraries_as_an_environment_hold_what_the_trainer_holds_by_hand(
    model: Path, tmp_path: Path
) -> None:
    import trl

    theirs, by_its_trainer = both(Libraries(Path(trl.__file__).parents[1]), "sft", model, tmp_path)
    assert peaks(theirs) == by_its_trainer
    assert theirs.versions["trl"] == version("trl")
    assert [phase.name for phase in theirs.phases] == ["load", "update", "optimizer"]
    assert max(phase.peak_allocated_bytes for phase in theirs.phases) == theirs.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.skipif(
    not OLDER, reason="AUTOFIT_OLDER_LIBRARIES names no environment with an older TRL (.ci/compat does)"
)
@pytest.mark.parametrize(("place", "kind"), BOTH)
def test_older_libraries_hold_what_their_trainer_holds_by_hand(
    place: str, kind: str, model: Path, tmp_path: Path
) -> None:
    theirs, by_their_trainer = both(Libraries(Path(place)), kind, model, tmp_path)
    assert peaks(theirs) == by_their_trainer
    if kind == "sft":  # three of the logits in float32; transformers 4.48 keeps those in 16 bits beside them
        a_logit = bytes_a_logit("sft", (0, 14), float32=False) + (2 if "4.48" in theirs.versions["transformers"] else 0)
        logits = 4 * by_hand.TOKENS[kind] * VOCABULARY
        held = 4 * WEIGHTS + 2 * 8_519_680  # weights, gradients and two states, and cuBLAS's workspaces
        assert theirs.peak_allocated_bytes - held == pytest.approx(a_logit * logits, rel=0.002)
